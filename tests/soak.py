"""A simulated serving loop that checks every sequence against its own token-by-token run.

    python tests/soak.py [--steps N] [--seconds S] [--device cpu|cuda] [--lanes N] [--seed N]

A step is one verify call. Sequences arrive at random in free slots of a pool, are verified with K
from 1 to 17 draft tokens a step, accept a random prefix of them, finish and leave their slot, which
is poisoned with NaN, to later ones. Lanes of the batch without a sequence are padding, whose input
is NaN. Engines roll back in different ways (`ENGINES`) and take turns. Beside each verify, every
lane's tokens go one by one through the per-token path on windows of its own, and everything must
be equal byte for byte: all rows of the output, those of padding too, all snapshots, the whole pool,
free slots and slots of other sequences included.

A step is made of tensor operations alone, so that on CUDA it is captured as a graph for each engine
and K, with a launch configuration drawn for it, and replayed without the host waiting for anything
but the progress, now and then. Prints steps, sequences, tokens, memory and mismatches; the exit
status is 1 where there was a mismatch or memory grew, 0 otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import resource
import sys
import time
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

import gdn_verify
from gdn_verify import _core

MAX_TOKENS = 17
D_INNER, QK_CHANNELS, HEAD_DIM, D_CONV = 384, 256, 128, 4
HEADS = (QK_CHANNELS, HEAD_DIM)
NAN = float("nan")
MEMORY_GROWTH = 64 << 20  # bytes that a warm run may add


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


@dataclasses.dataclass(frozen=True)
class Kind:
    """How an engine calls the operator and rolls back."""

    history: bool = False  # the snapshots
    commit: bool = False  # by gdn::commit_conv_state; else by num_accepted_tokens
    keep_all: bool = False  # everything is accepted, and the default verify commits it
    ragged: bool = False
    state_dtype: torch.dtype = torch.float32
    state_len: int = D_CONV


ENGINES = {
    "commit of windows, ragged": Kind(commit=True, ragged=True),
    "commit of history": Kind(commit=True, history=True, state_len=D_CONV - 1),
    "rollback in history": Kind(history=True),
    "rollback in windows, bfloat16": Kind(state_dtype=torch.bfloat16),
    "all accepted": Kind(keep_all=True),
}


class Engine:
    """One pool, one batch of lanes, one way to roll back."""

    def __init__(self, kind: Kind, lanes: int, device: torch.device):
        self.kind, self.lanes, self.device = kind, lanes, device
        self.n_slots = 2 * lanes  # so that there is always a free one
        window = (D_INNER, kind.state_len)

        def full(value: float, *shape: int, dtype: torch.dtype = kind.state_dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        # the last slot is where scatters write that have nothing to write
        self.pool = full(NAN, self.n_slots + 1, *window)
        self.expected_pool = self.pool.clone()
        self.weight = torch.randn(D_INNER, D_CONV, device=device).bfloat16()
        shape = (MAX_TOKENS, *window)
        if kind.history:
            shape = (kind.state_len - 1 + MAX_TOKENS, D_INNER)
        self.snapshots = full(NAN, lanes, *shape)
        self.windows = full(NAN, lanes, *window)  # of the token-by-token run
        self.row = torch.randperm(lanes, device=device, dtype=torch.int32)
        self.slot = full(-1, lanes, dtype=torch.int64)  # -1: no sequence
        self.left = full(0, lanes, dtype=torch.int64)  # tokens until it finishes
        self.accepted = full(0, lanes, dtype=torch.int32)  # of the step before
        self.lane = torch.arange(lanes, device=device)
        # mismatching elements, sequences finished, verifies of a sequence, tokens accepted
        self.totals = full(0, 4, dtype=torch.int64)

    # ---- one step ----

    def step(self, k: int, config: int) -> None:
        """Arrivals, one verify of `k` positions, its check, acceptance, departures."""
        live = self.arrive()
        lengths = torch.full_like(self.left, k)
        if self.kind.ragged:
            lengths = self.below(torch.full_like(self.left, k + 1))
        begin = lengths.cumsum(0) - lengths
        position = torch.arange(k, device=self.device)
        valid = position < lengths[:, None]  # [lanes, k]
        total = self.lanes * k
        rows = (begin[:, None] + position).masked_fill(~valid, total)  # of the packed input
        packed = torch.randn(total + 1, D_INNER, device=self.device).bfloat16()
        owner_live = (valid & live[:, None]).flatten()
        known = torch.zeros(total + 1, dtype=torch.bool, device=self.device)
        known.index_put_((rows.flatten(),), owner_live)
        packed.masked_fill_(~known[:, None], NAN)  # padding, and rows of no sequence

        output = self.verify(packed[:total], lengths, k, config)
        golden, windows = self.token_by_token(packed[rows], valid & live[:, None])
        self.check_output(output, golden, rows, total)
        self.check_snapshots(windows, valid & live[:, None])
        accepted = self.accept(lengths)
        self.keep(windows, accepted, live)
        self.check_pool()
        self.depart(live, accepted)

    def below(self, bound: Tensor) -> Tensor:
        """A number from 0 to bound - 1 for each lane. In float32 a product would now and then be
        rounded up to the bound."""
        drawn = torch.rand(self.lanes, dtype=torch.float64, device=self.device)
        return (drawn * bound).long()

    def arrive(self) -> Tensor:
        """Puts sequences into some of the empty lanes; returns which are live."""
        arrives = (self.slot < 0) & (torch.rand(self.lanes, device=self.device) < 0.3)
        score = torch.rand(self.n_slots + 1, device=self.device)
        score.index_fill_(0, self.slot.masked_fill(self.slot < 0, self.n_slots), -1.0)
        score[-1:].fill_(-1.0)
        free = score.topk(self.lanes).indices
        self.slot.copy_(torch.where(arrives, free, self.slot))
        start = torch.randn(self.windows.shape, device=self.device).to(self.kind.state_dtype)
        self.windows.copy_(torch.where(arrives[:, None, None], start, self.windows))
        self.put(arrives, start)
        length = 1 + self.below(torch.full_like(self.left, 100))
        self.left.copy_(torch.where(arrives, length, self.left))
        self.accepted.masked_fill_(arrives, 0)  # starts from conv_state
        return self.slot >= 0

    def put(self, where: Tensor, windows: Tensor) -> None:
        """Into the slots of some lanes, in the pool and in what it should be."""
        target = self.slot.masked_fill(~where, self.n_slots)
        for pool in (self.pool, self.expected_pool):
            pool.index_put_((target,), windows)

    def verify(self, packed: Tensor, lengths: Tensor, k: int, config: int) -> Tensor:
        kind = self.kind
        output = torch.full_like(packed, NAN)
        shape = packed.shape if kind.ragged else (self.lanes, k, D_INNER)
        options = {}
        if kind.ragged:
            options["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
            options["max_num_tokens"] = k
        if not (kind.commit or kind.keep_all):
            options["num_accepted_tokens"] = self.accepted
        torch.ops.gdn.verify_fused_conv_kn_batched(
            self.pool[: self.n_slots],
            packed.view(shape),
            self.weight,
            output.view(shape),
            self.snapshots,
            *HEADS,
            conv_state_indices=self.slot.int(),
            inter_indices=self.row,
            update_state=kind.keep_all,
            config=config,
            **options,
        )
        return output

    def token_by_token(self, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and windows after each token, `[lanes, k, ..]`, from every lane's own window."""
        k = tokens.shape[1]
        state = self.windows.clone()
        output = torch.empty_like(tokens)
        after = state.new_empty(self.lanes, k, *state.shape[1:])
        lanes = self.lane[:, None].expand(-1, k).masked_fill(~valid, -1).int()
        for t in range(k):
            torch.ops.gdn.conv1d_update_l2norm(
                state,
                tokens[:, t],
                self.weight,
                output[:, t],
                *HEADS,
                conv_state_indices=lanes[:, t],
            )
            after[:, t] = state
        return output, after

    # ---- the checks ----

    def count(self, mismatches: Tensor) -> None:
        self.totals[0] += mismatches.sum()

    def check_output(self, output: Tensor, golden: Tensor, rows: Tensor, total: int) -> None:
        """Rows of padding are zero in both; rows that no lane owns stay zero here."""
        expected = output.new_zeros(total + 1, D_INNER)
        expected.index_put_((rows.flatten(),), golden.flatten(0, 1))
        self.count(bits(output) != bits(expected)[:total])

    def check_snapshots(self, windows: Tensor, valid: Tensor) -> None:
        found = self.snapshots
        if self.kind.history:
            found = gdn_verify.history_windows(found, self.kind.state_len)
        found = found[self.row.long(), : windows.shape[1]]
        self.count((bits(found) != bits(windows)) & valid[:, :, None, None])

    def check_pool(self) -> None:
        self.count(bits(self.pool)[:-1] != bits(self.expected_pool)[:-1])

    # ---- acceptance ----

    def accept(self, lengths: Tensor) -> Tensor:
        """How many of its tokens every lane keeps."""
        if self.kind.keep_all:
            return lengths
        if self.kind.commit:  # may be none
            return self.below(lengths + 1)
        return 1 + self.below(lengths)  # 0 would start from conv_state again

    def keep(self, windows: Tensor, accepted: Tensor, live: Tensor) -> None:
        """The state after the accepted tokens, here and in the operator's way."""
        kept = windows[self.lane, (accepted - 1).clamp(min=0)]
        keeps = live & (accepted > 0)
        self.windows.copy_(torch.where(keeps[:, None, None], kept, self.windows))
        self.accepted.copy_(accepted.masked_fill(~live, 0))
        if self.kind.commit or self.kind.keep_all:
            target = self.slot.masked_fill(~live, self.n_slots)
            self.expected_pool.index_put_((target,), self.windows)
        if self.kind.commit:
            torch.ops.gdn.commit_conv_state(
                [self.pool[: self.n_slots]],
                [self.snapshots],
                accepted.int(),
                conv_state_indices=self.slot.int(),
                inter_indices=self.row,
            )

    def depart(self, live: Tensor, accepted: Tensor) -> None:
        kept = accepted.masked_fill(~live, 0)
        self.left -= kept
        done = live & (self.left <= 0)
        self.put(done, torch.full_like(self.windows, NAN))
        self.slot.masked_fill_(done, -1)
        self.totals[1:] += torch.stack([done.sum(), live.sum(), kept.sum()])


# ---- running it --------------------------------------------------------------------------------


def graphed(step: Callable[[], None], pool: object) -> Callable[[], None]:
    """`step` as a CUDA graph. Runs it once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):  # replays follow each other and may share memory
        step()
    return graph.replay


def memory(device: torch.device) -> int:
    """Bytes of this process, on the host and on the device."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    return pages * resource.getpagesize() + reserved


@dataclasses.dataclass
class Report:
    """What a run did."""

    steps: int = 0
    seconds: float = 0.0
    mismatches: int = 0
    sequences: int = 0
    verifies: int = 0  # of one sequence
    tokens: int = 0
    memory: tuple[int, int] = (0, 0)  # once all has been warm for a while, and at the end

    def update(self, engines: list[Engine]) -> None:
        """Waits for the device."""
        each = torch.stack([engine.totals for engine in engines]).sum(0).tolist()
        self.mismatches, self.sequences, self.verifies, self.tokens = each
        self.memory = (self.memory[0], memory(engines[0].device))

    def text(self) -> str:
        rate = self.steps / max(self.seconds, 1e-9)
        before, after = (f"{each / 2**20:.1f} MiB" for each in self.memory)
        return (
            f"{self.steps} steps in {self.seconds:.1f} s ({rate:.0f} a second): "
            f"{self.verifies} verifies of a sequence, {self.sequences} sequences finished, "
            f"{self.tokens} tokens accepted, memory {before} when warm and {after} now, "
            f"{self.mismatches} mismatches"
        )


def soak(
    steps: int,
    device: torch.device,
    seconds: float = float("inf"),
    lanes: int = 16,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Runs until `steps` or `seconds` are over."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    engines = [Engine(kind, lanes, device) for kind in ENGINES.values()]
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    turns: list[Callable[[], None]] = []
    for engine, k in product(engines, range(1, MAX_TOKENS + 1)):
        config = chance.randrange(-1, _core.build_info()["num_configs"])
        turn = functools.partial(engine.step, k, config)
        turns.append(graphed(turn, pool) if pool else turn)
    for engine in engines:
        engine.totals[1:] = 0  # what came before counts where it is a mismatch

    report = Report()
    begin = said = time.monotonic()
    while report.steps < steps and report.seconds < seconds:
        chance.choice(turns)()
        report.steps += 1
        if report.steps == 4 * len(turns):
            report.memory = (memory(device), 0)
        if report.steps % 256 == 0:
            report.seconds = time.monotonic() - begin
            if report.seconds > said - begin + 5:
                report.update(engines)
                said = time.monotonic()
                say(report.text())
    report.update(engines)
    report.seconds = time.monotonic() - begin
    return report


def positive(text: str, number: type = int) -> int | float:
    value = number(text)
    if not value > 0:  # so that NaN fails: a run of nothing would be a success
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=positive, default=10_000)
    parser.add_argument(
        "--seconds", type=functools.partial(positive, number=float), default=float("inf")
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lanes", type=positive, default=16, help="sequences of a batch, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.set_num_threads(1)  # nothing here is large
    report = soak(
        options.steps,
        device,
        options.seconds,
        options.lanes,
        options.seed,
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(report.text())
    before, after = report.memory
    grew = before > 0 and after - before > MEMORY_GROWTH
    if grew:
        print(f"memory grew by {(after - before) >> 20} MiB")
    return int(report.mismatches > 0 or grew)


if __name__ == "__main__":
    sys.exit(main())
