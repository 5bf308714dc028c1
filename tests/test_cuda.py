"""What is particular to CUDA: launch configurations, garbage in index tensors, exhaustive grids.

Every other test with the argument `implementation` or `built` runs on CUDA too.
"""

import cases
import compare
import numpy as np
import pytest
from test_bit_identity import MAX_SEQ, MAX_TOKENS, largest, part
from test_options import SHIPPED_PAIRS, wrong_index_cases

from gdn_verify import _core
from gdn_verify.arrays import to_tensor

pytestmark = pytest.mark.gpu

CONFIGS = range(-1, _core.build_info()["num_configs"])


def test_the_build_has_cuda():
    assert _core.build_info()["has_cuda"]
    assert len(CONFIGS) > 1


@pytest.mark.parametrize("n_seq", range(1, MAX_SEQ + 1))
@pytest.mark.parametrize("model", cases.FULL_SHAPES)
def test_full_width_over_the_grid(model, n_seq):
    case, reference_run = largest(cases.FULL_SHAPES[model], ())
    for num_tokens in range(1, MAX_TOKENS + 1):
        small = part(case, n_seq, num_tokens)
        expected = part(reference_run, n_seq, num_tokens)
        actual = cases.run("cuda", small)
        for name in ("output", "conv_state_inter"):
            compare.assert_same(actual.args[name], expected.args[name], f"{name} {small!r}")
        compare.assert_same(
            actual.args["conv_state"], expected.args["conv_state_inter"][:, -1], f"state {small!r}"
        )


@pytest.mark.parametrize("index", range(len(SHIPPED_PAIRS)))
def test_every_configuration(index):
    for num_tokens in (1, 2, 3, 4, 8, 17):
        case = cases.make_case(5, num_tokens, 512, seed=index, **SHIPPED_PAIRS[index])
        expected = cases.run("core", case)
        for config in CONFIGS:
            actual = cases.run("cuda", case, config=config)
            compare.assert_same_case(actual, expected, f"config {config}, K = {num_tokens}")


@pytest.mark.parametrize("n_seq", [1, 40, 300])
def test_every_configuration_of_larger_batches(n_seq):
    for num_tokens in (1, 5, 17) if n_seq == 300 else (1, 5, 17, 40, 130):
        for snapshots in ("windows", "history", None):
            case = cases.default_case(
                cases.EIGHTH_SHAPES["qwen3.5-35b-a3b-tp8"], n_seq, num_tokens, snapshots=snapshots
            )
            expected = cases.run("core", case)
            for config in CONFIGS:
                actual = cases.run("cuda", case, config=config)
                compare.assert_same_case(actual, expected, f"config {config}")


def test_programmatic_dependent_launch():
    """The output of one layer is the input of the next, so that a missing wait shows."""
    import torch

    for num_tokens in (1, 4, 17):
        case = cases.default_case(cases.FULL_SHAPES["qwen3.5-35b-a3b"], 4, num_tokens)
        case.args["weight"][...] = 0x3F80  # ones: values survive many layers
        a = case.args
        x, y = a["new_input"].copy(), a["new_input"].copy()
        expected = [a["conv_state"].copy() for _ in range(8)]
        for state in expected:
            cases.call("core", case.op, state, x, a["weight"], y, None, 4096, 128)
            x, y = y, x

        states = [torch.from_numpy(a["conv_state"].copy()).cuda() for _ in range(8)]
        buffers = [to_tensor(a["new_input"].copy()).cuda() for _ in range(2)]
        weight = to_tensor(a["weight"].copy()).cuda()
        for i, state in enumerate(states):
            torch.ops.gdn.verify_fused_conv_kn_batched(
                state, buffers[i % 2], weight, buffers[1 - i % 2], None, 4096, 128, pdl=True
            )
        for i, (state, wanted) in enumerate(zip(states, expected, strict=True)):
            compare.assert_same(state.cpu().numpy(), wanted, f"layer {i}")


@pytest.mark.parametrize("case", list(wrong_index_cases()))
def test_wrong_index_values_make_padding(case):
    """A sequence with a wrong index value gets zeros, the others what they get without it."""
    name = case.label
    actual = cases.run("cuda", case)
    compare.assert_same_around(actual, case)
    if case.op == "commit_conv_state" or name.startswith(("cu_seqlens", "shared")):
        return  # whose rows are whose is open
    expected = case.copy()
    bad = 1 if "parent" in name else 2
    if name == "sequence longer than max_num_tokens":
        bad = 0
        expected.options["max_num_tokens"] = 5  # as padding it may be that long
    option = "inter_indices" if case.args["conv_state"] is None else "conv_state_indices"
    expected.options[option][bad] = -1
    expected.call("core")
    for argument, x in expected.args.items():
        if isinstance(x, np.ndarray):
            compare.assert_same(actual.args[argument], x, f"{name} {argument}")


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("seed", range(40))
def test_garbage_in_all_index_tensors(head_dim, seed):
    """Random index values, near the legal ones and far away: nothing outside is touched.

    The device sees views of larger buffers; what lies around them must keep its bytes.
    """
    rng = np.random.default_rng(seed)
    chosen = {
        "head_dim": head_dim, "spare": 2, "state_layout": "pool", "snapshot_layout": "rows",
        "slots": "permuted", "rows": "permuted", "accepted": "mixed", "input_layout": "rows",
        "snapshots": ("windows", "history")[seed % 2],
    }  # fmt: skip
    if seed % 4 >= 2:
        chosen["ragged"] = "max_num_tokens"
    if seed % 8 >= 4:
        chosen |= {"tree": True, "snapshots": "windows"}
    case = cases.make_case(6, 5, 4 * head_dim, seed=seed, **chosen)
    cases.garble(rng, case)
    # two sequences that share a slot or a row race, but stay inside
    done = cases.run("cuda", case)
    compare.assert_same_around(done, case)
    for name in ("new_input", "weight"):
        compare.assert_same(done.args[name], case.args[name], name)
    # the device is fine afterwards
    sound = cases.make_case(3, 4, head_dim=head_dim)
    compare.assert_same_case(cases.run("cuda", sound), cases.run("core", sound))


@pytest.mark.slow
def test_silu_of_every_float32():
    """Through the operator: W = 2 on a zero state with weights 0 and 1 makes the accumulator x."""
    import torch

    import gdn_verify.ops  # noqa: F401

    n, d_inner = 4096, 4096
    state = torch.zeros(n, d_inner, 1, device="cuda")
    weight = torch.tensor([0.0, 1.0], device="cuda").repeat(d_inner, 1)
    output = torch.empty(n, 1, d_inner, device="cuda")
    for begin in range(0, 2**32, n * d_inner):
        x = np.arange(begin, begin + n * d_inner, dtype=np.uint64).astype(np.uint32)
        x = x.view(np.float32)
        torch.ops.gdn.verify_fused_conv_kn_batched(
            state, torch.from_numpy(x).cuda().view(n, 1, d_inner), weight, output, None, 0, 1,
            update_state=False,
        )  # fmt: skip
        expected = _core.silu(x + np.float32(0))  # the accumulator makes -0 a +0
        compare.assert_same(output.cpu().numpy().ravel(), expected, f"from 0x{begin:08x}")
