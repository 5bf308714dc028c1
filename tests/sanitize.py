"""Every launch configuration and every option once, over small shapes, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize.py

`make sanitize` runs memcheck, racecheck, initcheck and synccheck. Torch's caching allocator would
hide what lies outside a tensor from the tools, so it must be off. With --fresh, which initcheck
wants, what a call only writes is memory that nobody wrote before, so that a read shows; results are
not copied back then. Otherwise they are compared with the core's. The exit status is 1 for a wrong
result; the tool has one of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

import cases
import compare
import numpy as np
import torch
from cases import Case
from small_calls import int32, single, update
from test_options import commit_case, wrong_index_cases

from gdn_verify import _core

CONFIGS = range(-1, _core.build_info()["num_configs"])


def shipped() -> Iterator[Case]:
    """Of the layers that have launch configurations: every pair of options, and all K that end a
    block or a thread's tokens early."""
    pairs = cases.covering_array(cases.SHIPPED_FACTORS, cases.legal)
    for seed, chosen in enumerate(pairs):
        yield cases.make_case(3, 1 + seed % 9, 384, seed=seed, **chosen)
    for num_tokens in (1, 2, 3, 4, 7, 17, 40):
        for snapshots in ("windows", "history", None):
            yield cases.make_case(2, num_tokens, 384, head_dim=128, snapshots=snapshots)


def others() -> Iterator[Case]:
    """What the general kernel takes, the other operators."""
    for seed, chosen in enumerate(cases.covering_array(cases.FACTORS, cases.legal)):
        yield cases.make_case(3, 1 + seed % 6, seed=seed, **chosen)
    for chosen in cases.single_options():
        yield cases.make_case(**chosen)
    for num_tokens in (0, 1, 70):
        yield cases.make_case(3, num_tokens)
    yield single()
    yield update()
    for kind in ("windows", "history"):
        for layout in ("contiguous", "transposed", "strided", "pool"):
            yield commit_case(kind, layout)
            yield commit_case(
                kind, layout, slots=int32(6, -1, 2, -9, 1), rows=int32(2, cases.PAD, 0, -1, 3)
            )
    yield commit_case("windows", "contiguous", n_layers=66)


def wrong() -> Iterator[Case]:
    """Wrong index values; what sequences that then share a slot or a row leave there is open."""
    for each in wrong_index_cases():
        yield each.values[0]
    layouts = {"state_layout": "pool", "snapshot_layout": "rows", "input_layout": "rows"}
    indices = {"slots": "permuted", "rows": "permuted", "accepted": "mixed", "spare": 2}
    for seed in range(24):
        chosen: dict[str, Any] = {**layouts, **indices, "head_dim": (32, 128)[seed % 2]}
        chosen["snapshots"] = ("windows", "history")[seed // 2 % 2]
        chosen["ragged"] = (False, "max_num_tokens")[seed // 4 % 2]
        if seed >= 16:
            chosen |= {"tree": True, "snapshots": "windows"}
        case = cases.make_case(6, 5, 4 * chosen["head_dim"], seed=seed, **chosen)
        cases.garble(np.random.default_rng(seed), case)
        yield case


class Fresh(cases.OnDevice):
    """Tensors on the GPU, those that a call only writes in memory that nobody wrote."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        written = {"output"}
        if "num_accepted_tokens" not in case.options:
            written.add("conv_state_inter")
        arrays = case.arrays().items()
        self.written = {id(cases.buffer_of(x)) for name, x in arrays if name in written}
        self.written -= {id(cases.buffer_of(x)) for name, x in arrays if name not in written}

    def upload(self, owner: np.ndarray, whole: np.ndarray) -> torch.Tensor:
        if id(owner) in self.written:
            return torch.empty(len(whole), dtype=torch.uint8, device="cuda")
        return super().upload(owner, whole)


def run_fresh(case: Case, **options: Any) -> None:
    case = case.copy()
    device = Fresh(case)
    args = cases.map_arrays(device.tensor, list(case.args.values()))
    options = cases.map_arrays(device.tensor, {**case.options, **options})
    getattr(torch.ops.gdn, case.op)(*args, **options)
    torch.cuda.synchronize()


def run_all(fresh: bool) -> int:
    """Returns how many results were wrong."""
    calls = failures = 0
    for cases_of, configs in ((shipped, CONFIGS), (others, (-1,)), (wrong, (-1,))):
        for case in cases_of():
            expected = None if fresh or cases_of is wrong else cases.run("core", case)
            takes_config = case.op.startswith("verify")
            for config in configs:
                options = {"config": config, "pdl": calls % 2 == 1} if takes_config else {}
                calls += 1
                if fresh:
                    run_fresh(case, **options)
                    continue
                actual = cases.run("cuda", case, **options)
                try:
                    if expected:
                        compare.assert_same_case(actual, expected, f"config {config}")
                except AssertionError as error:
                    failures += 1
                    print(error, flush=True)
    print(f"{calls} calls, {failures} wrong results")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fresh", action="store_true", help="leave unread memory unwritten")
    options = parser.parse_args()
    for missing, sentence in (
        (not torch.cuda.is_available(), "torch sees no CUDA device"),
        (len(CONFIGS) == 1, "gdn_verify was built without CUDA"),
        (os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1",
         "PYTORCH_NO_CUDA_MEMORY_CACHING must be 1"),
    ):  # fmt: skip
        if missing:
            print(sentence, file=sys.stderr)
            return 2
    return int(run_all(options.fresh) > 0)


if __name__ == "__main__":
    sys.exit(main())
