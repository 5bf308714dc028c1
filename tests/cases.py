"""Inputs for tests, and the implementations to run them on.

A `Case` is one call: an operator's name, its arguments as NumPy arrays and its options. Arrays are
views of larger buffers wherever an engine's are (projection rows, pools), and what lies around a
view is filled with NaN, so that reading it shows. `call` runs an operator in place on NumPy arrays;
`run` runs a case on copies of its whole buffers, so that a write outside a view shows too. The
copies, and all buffers on CUDA, lie between guards (guards.py), which every run is verified to have
kept.

bfloat16 is np.uint16, as everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import emulated
import numpy as np
import torch
from guards import GUARD, Guarded

import gdn_verify.ops  # noqa: F401  registers the operators
from gdn_verify import _core, reference
from gdn_verify.arrays import to_tensor
from gdn_verify.models import MODELS, Shape

DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}

OPERATORS = {
    "verify_fused_conv_kn_batched": (
        "conv_state", "new_input", "weight", "output", "conv_state_inter",
    ),
    "verify_fused_conv_kn": (
        "conv_state", "new_input", "weight", "output", "conv_state_inter",
    ),
    "conv1d_update_l2norm": ("conv_state", "new_input", "weight", "output"),
    "commit_conv_state": ("conv_states", "snapshots", "num_accepted"),
}  # fmt: skip
"""Names of the positional tensor arguments of each operator."""

PAD = 10**6  # what other indices of a padded sequence hold: nothing may look at them

# The distinct layer shapes: whole, one tensor-parallel eighth, toys.
FULL_SHAPES = {n: MODELS[n] for n in ("qwen3.5-35b-a3b", "qwen3.5-27b", "qwen3.5-397b-a17b")}
EIGHTH_SHAPES = {f"{n}-tp8": MODELS[f"{n}-tp8"] for n in FULL_SHAPES}
TOY_SHAPES = {n: s for n, s in MODELS.items() if n.startswith("toy-")}
ODD_SHAPES = {f"odd-{h}": Shape(3 * h + 7, 2 * h, h) for h in (1, 5, 33, 100, 127, 130, 300)}


# ---- implementations ---------------------------------------------------------------------------


CPU_IMPLEMENTATIONS = ("reference", "core", "torch")
BUILT = CPU_IMPLEMENTATIONS[1:]


def call(implementation: str, op: str, *args: Any, **kwargs: Any) -> None:
    """Runs an operator in place on NumPy arrays, on "reference", "core", "torch", "cuda" or
    "emulated" (see emulated.py)."""
    if implementation == "reference":
        getattr(reference, op)(*args, **kwargs)
    elif implementation == "core":
        getattr(_core, op)(*args, **kwargs)
    elif implementation == "emulated":
        getattr(emulated.core(), op)(*args, **kwargs)
    elif implementation == "torch":
        getattr(torch.ops.gdn, op)(*map_arrays(to_tensor, args), **map_arrays(to_tensor, kwargs))
    elif implementation == "cuda":
        device = OnDevice()
        there, options = map_arrays(device.tensor, args), map_arrays(device.tensor, kwargs)
        try:
            getattr(torch.ops.gdn, op)(*there, **options)
        finally:  # what a refused call wrote shows too
            device.copy_back()
    else:
        raise ValueError(implementation)


def map_arrays(f: Callable[[np.ndarray], Any], x: Any) -> Any:
    """f on every array in x, which may be nested."""
    if isinstance(x, np.ndarray):
        return f(x)
    if isinstance(x, (list, tuple)):
        return type(x)(map_arrays(f, e) for e in x)
    if isinstance(x, dict):
        return {name: map_arrays(f, e) for name, e in x.items()}
    return x


def buffer_of(x: np.ndarray) -> np.ndarray:
    """The array that owns x's memory."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def offset_of(x: np.ndarray) -> int:
    """Bytes from the start of x's buffer to its first element."""
    if x.size == 0:
        return 0
    return x.__array_interface__["data"][0] - buffer_of(x).__array_interface__["data"][0]


class OnDevice:
    """Guarded buffers on the GPU; views of one buffer here are views of one buffer there.

    Nothing but copies between the host and the device: no kernel of torch is needed.
    """

    def __init__(self) -> None:
        self.buffers: dict[int, tuple[np.ndarray, Guarded, Any]] = {}

    def tensor(self, x: np.ndarray) -> torch.Tensor:
        owner = buffer_of(x)
        assert owner.flags.c_contiguous
        assert owner.dtype == x.dtype
        if id(owner) not in self.buffers:
            guarded = Guarded(owner, 16 * GUARD)
            self.buffers[id(owner)] = owner, guarded, self.upload(owner, guarded.whole)
        _, guarded, whole = self.buffers[id(owner)]
        middle = whole[guarded.guard : guarded.guard + owner.nbytes]
        flat = middle.view(to_tensor(np.empty(0, x.dtype)).dtype)
        strides = [s // x.itemsize for s in x.strides]
        # as_strided counts from the start of the storage, which holds the guard too
        start = (guarded.guard + offset_of(x)) // x.itemsize
        return flat.as_strided(x.shape, strides, start)

    def upload(self, owner: np.ndarray, whole: np.ndarray) -> torch.Tensor:
        """`whole`, the bytes of the buffer `owner` between its guards, as a tensor."""
        return torch.from_numpy(whole).cuda()

    def copy_back(self) -> None:
        torch.cuda.synchronize()
        for owner, guarded, whole in self.buffers.values():
            host = whole.cpu().numpy()
            guarded.verify(host)
            middle = host[guarded.guard : guarded.guard + owner.nbytes]
            owner[...] = middle.view(owner.dtype).reshape(owner.shape)


# ---- cases -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """One call: op(*args.values(), **options); arrays of `args` and `options` may share buffers."""

    op: str
    args: dict[str, Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    label: str = ""
    guarded: list[Guarded] = dataclasses.field(default_factory=list)  # the buffers, of a copy

    def __repr__(self) -> str:
        return f"<{self.op} {self.label}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis prints: shapes, strides and offsets, and values of index arrays alone."""

        def text(x: Any) -> str:
            if isinstance(x, list):
                return f"[{', '.join(map(text, x))}]"
            if not isinstance(x, np.ndarray):
                return repr(x)
            if x.dtype == np.int32:
                return repr(x)
            return f"{x.dtype}{x.shape} strides {x.strides} at {offset_of(x)}"

        rest = {**self.args, **self.options}.items()
        printer.text(f"{self!r} " + ", ".join(f"{name}={text(x)}" for name, x in rest))

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by argument name; those in lists as name[i]."""
        found = {}
        for name, x in {**self.args, **self.options}.items():
            for i, e in enumerate(x if isinstance(x, list) else [x]):
                if isinstance(e, np.ndarray):
                    found[f"{name}[{i}]" if isinstance(x, list) else name] = e
        return found

    def copy(self) -> Case:
        """The same views on copies of the buffers, which are guarded."""
        copies: dict[int, Guarded] = {}

        def view(x: np.ndarray) -> np.ndarray:
            owner = buffer_of(x)
            if id(owner) not in copies:
                copies[id(owner)] = Guarded(owner)
            buffer = copies[id(owner)].array
            if x.size == 0:  # has no address in its buffer
                return np.ndarray(x.shape, x.dtype, buffer)
            return np.ndarray(x.shape, x.dtype, buffer, offset_of(x), x.strides)

        args, options = map_arrays(view, self.args), map_arrays(view, self.options)
        return Case(self.op, args, options, self.label, list(copies.values()))

    def verify_guards(self) -> None:
        """Raises where something was written beside the buffers of a copy."""
        for each in self.guarded:
            each.verify()

    def call(self, implementation: str, **options: Any) -> None:
        """Runs it in place."""
        call(implementation, self.op, *self.args.values(), **{**self.options, **options})


def run(implementation: str, case: Case, **options: Any) -> Case:
    """Runs a copy of the case and returns it, with what was written."""
    mine = case.copy()
    mine.call(implementation, **options)
    mine.verify_guards()
    return mine


# ---- arrays ------------------------------------------------------------------------------------

FILL = {np.float32: np.nan, np.float16: np.nan, np.uint16: 0x7FC0, np.int32: PAD}


def filled(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """NaN in a float dtype, PAD in int32."""
    return np.full(shape, FILL[dtype], dtype)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return reference.from_float32(rng.standard_normal(shape, np.float32), dtype)


def special(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Mostly normal values, among them signed zeros, denormals, huge values, infinities, NaN."""
    x = rng.standard_normal(shape, np.float32)
    x *= np.exp2(rng.integers(-20, 8, shape)).astype(np.float32)
    rare = np.float32([0.0, -0.0, 1e-45, -1e-40, 1e-38, -88.5, 89, -104, 1e18])
    rarest = np.float32([np.inf, -np.inf, np.nan, 3e38, -3e38])
    x = np.where(rng.random(shape) < 0.02, rng.choice(rare, shape), x)
    x = np.where(rng.random(shape) < 0.001, rng.choice(rarest, shape), x)
    return reference.from_float32(x, dtype)


def spaced(x: np.ndarray, layout: str) -> np.ndarray:
    """x as a view with the same shape and values in another memory layout.

    "contiguous"; "transposed": the last two dimensions change places in memory; "strided": every
    dimension a part of a larger one; "rows": parts of longer rows, as of a projection, the last
    dimension keeps stride 1; "odd-rows": the same at odd offsets; "pool": one of four in each slot.
    """
    dtype = x.dtype.type
    if layout == "contiguous":
        buffer = filled(x.shape, dtype)
        view = buffer
    elif layout == "transposed":
        buffer = filled((*x.shape[:-2], x.shape[-1], x.shape[-2]), dtype)
        view = buffer.swapaxes(-1, -2)
    elif layout == "strided":
        buffer = filled(tuple(2 * n + 1 for n in x.shape), dtype)
        view = buffer[tuple(slice(1, None, 2) for _ in x.shape)]
    elif layout in ("rows", "odd-rows"):
        last, before = x.shape[-1], 24 if layout == "rows" else 25
        buffer = filled((*(n + 1 for n in x.shape[:-1]), last + before + 16), dtype)
        view = buffer[(*(slice(0, n) for n in x.shape[:-1]), slice(before, before + last))]
    elif layout == "pool":
        buffer = filled((x.shape[0], 4, *x.shape[1:]), dtype)
        view = buffer[:, 0]
    else:
        raise ValueError(layout)
    view[...] = x
    return view


# ---- the batched operator with any options -----------------------------------------------------

FACTORS: dict[str, tuple[Any, ...]] = {
    "d_conv": (4, 2, 3, 5, 6, 7, 8),
    "head_dim": (32, 1, 5, 33, 64, 127, 128, 130, 300),
    "state": ("W", "W-1", None),
    "state_dtype": ("float32", "bfloat16", "float16"),
    "input_dtype": ("bfloat16", "float16", "float32"),
    "weight_dtype": ("input", "float32"),
    "output_dtype": ("input", "float32"),
    "bias": (None, "input", "float32"),
    "activation": ("silu", "none"),
    "state_layout": ("contiguous", "transposed", "strided", "pool"),
    "input_layout": ("contiguous", "rows", "odd-rows"),
    "weight_layout": ("contiguous", "transposed", "strided"),
    "snapshots": ("windows", "history", None),
    "snapshot_layout": ("contiguous", "transposed", "strided", "rows"),
    "spare": (0, 2),  # rows, slots and tokens of buffers beyond what is needed
    "slots": (None, "permuted", "padded", "null-block"),
    "rows": (None, "permuted"),
    "accepted": (None, "mixed"),
    "ragged": (False, True, "max_num_tokens"),
    "tree": (False, True),
    "update_state": (True, False),
    "index_stride": (1, 3),
    "qk": ("some", "none", "all"),
    "values": ("normal", "special"),
}
"""Values that the options of `make_case` take; the first of each is the default form."""

SHIPPED_FACTORS = {
    **FACTORS,
    "d_conv": (4,),
    "head_dim": (128,),
    "input_dtype": ("bfloat16", "float16"),
}
"""The same for the layers of shipped models, which have kernels of their own."""


def legal(chosen: dict[str, Any]) -> bool:
    """Whether a choice of FACTORS, complete or not, is a call that the operator accepts."""
    get = chosen.get
    if get("tree") and get("snapshots", "windows") == "history":
        return False
    no_state = get("state", "W") is None
    no_snapshots = get("snapshots", "windows") is None
    if no_snapshots and (get("rows") or get("accepted") or no_state):
        return False
    if no_state:  # the history is the only state
        if get("slots") or get("tree") or get("snapshots", "history") != "history":
            return False
        if get("accepted", "mixed") is None:
            return False
    return not (get("slots") == "null-block" and get("spare") == 0)  # the null block is spare


def covering_array(
    factors: dict[str, tuple[Any, ...]], is_legal: Callable[[dict[str, Any]], bool], seed: int = 0
) -> list[dict[str, Any]]:
    """Choices such that every legal pair of values of two factors occurs in one of them.

    Greedy: each choice starts from a pair that is still missing and takes, factor by factor in
    random order, the legal value that covers most missing pairs.
    """
    rng = np.random.default_rng(seed)
    names = list(factors)

    def pair(a: str, i: int, b: str, j: int) -> tuple[tuple[str, int], tuple[str, int]]:
        return ((a, i), (b, j)) if names.index(a) < names.index(b) else ((b, j), (a, i))

    missing = {
        pair(a, i, b, j): None
        for n, a in enumerate(names)
        for b in names[n + 1 :]
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
        if is_legal({a: factors[a][i], b: factors[b][j]})
    }
    choices: list[dict[str, Any]] = []
    while missing:
        seed_pair = next(iter(missing))
        for _ in range(200):
            picked = dict(seed_pair)
            for name in rng.permutation([n for n in names if n not in picked]):
                best: tuple[int, float, int] | None = None
                for i in range(len(factors[name])):
                    values = {n: factors[n][k] for n, k in picked.items()}
                    if is_legal({**values, name: factors[name][i]}):
                        gain = sum(pair(name, i, n, k) in missing for n, k in picked.items())
                        best = max(best or (-1, 0.0, 0), (gain, rng.random(), i))
                if best is None:
                    break
                picked[name] = best[2]
            if len(picked) == len(names):
                break
        else:
            raise AssertionError(f"no legal choice holds {seed_pair}")
        for n, a in enumerate(names):
            for b in names[n + 1 :]:
                missing.pop(pair(a, picked[a], b, picked[b]), None)
        choices.append({n: factors[n][picked[n]] for n in names})
    return choices


def single_options() -> Iterable[dict[str, Any]]:
    """Every option alone: the default form with one factor changed."""
    for name, values in FACTORS.items():
        for value in values[1:]:
            chosen = {name: value}
            if name == "state" and value is None:
                chosen |= {"snapshots": "history", "accepted": "mixed"}
            if value == "null-block":
                chosen |= {"spare": 2}
            yield chosen


def make_case(
    n_seq: int = 5,
    num_tokens: int = 4,
    d_inner: int | None = None,
    qk_channels: int | None = None,
    l2_eps: float = 1e-6,
    seed: int = 0,
    **chosen: Any,
) -> Case:
    """A call of the batched operator; `chosen` names values of FACTORS, others are the default.

    d_inner and qk_channels follow from head_dim and `qk` where they are not given.
    """
    c = {**{name: values[0] for name, values in FACTORS.items()}, **chosen}
    assert legal(c), chosen
    rng = np.random.default_rng(seed)
    values = special if c["values"] == "special" else normal
    state_dtype, input_dtype = DTYPES[c["state_dtype"]], DTYPES[c["input_dtype"]]

    def dtype_of(name: str) -> Any:
        return input_dtype if c[name] == "input" else np.float32

    head_dim, d_conv, spare = c["head_dim"], c["d_conv"], c["spare"]
    if d_inner is None:
        d_inner = 3 * head_dim + (0 if c["qk"] == "all" else 7)
    if qk_channels is None:
        qk_channels = {"some": 2 * head_dim, "all": 3 * head_dim, "none": 0}[c["qk"]]
    state_len = d_conv if c["state"] == "W" else d_conv - 1

    options = _index_options(rng, c, n_seq, num_tokens)
    if "cu_seqlens" in options:
        total = int(options["cu_seqlens"][-1]) + spare
        shape: tuple[int, ...] = (total, d_inner)
    else:
        shape = (n_seq, num_tokens, d_inner)
    new_input = values(rng, shape, input_dtype)
    if "cu_seqlens" in options:
        new_input[total - spare :] = FILL[input_dtype]
    output = normal(rng, shape, dtype_of("output_dtype"))
    weight = normal(rng, (d_inner, d_conv), dtype_of("weight_dtype"))
    if c["bias"] is not None:
        options["bias"] = values(rng, (d_inner,), dtype_of("bias"))
        options["bias"][::7] = 0
        options["bias"][1::7] = 0x8000 if options["bias"].dtype == np.uint16 else -0.0

    conv_state = snapshots = None
    if c["state"] is not None:
        n_slots = n_seq + spare
        conv_state = spaced(
            values(rng, (n_slots, d_inner, state_len), state_dtype), c["state_layout"]
        )
    if c["snapshots"] is not None:
        tokens = num_tokens + spare
        if c["snapshots"] == "windows":
            inner = (n_seq + spare, tokens, d_inner, state_len)
        else:
            inner = (n_seq + spare, state_len - 1 + tokens, d_inner)
        snapshots = spaced(values(rng, inner, state_dtype), c["snapshot_layout"])
    return Case(
        "verify_fused_conv_kn_batched",
        {
            "conv_state": conv_state,
            "new_input": spaced(new_input, c["input_layout"]),
            "weight": spaced(weight, c["weight_layout"]),
            "output": spaced(output, c["input_layout"]),
            "conv_state_inter": snapshots,
            "qk_channels": qk_channels,
            "head_dim": head_dim,
            "l2_eps": l2_eps,
        },
        options,
        " ".join(f"{name}={value}" for name, value in chosen.items()),
    )


def _index_options(
    rng: np.random.Generator, c: dict[str, Any], n_seq: int, num_tokens: int
) -> dict[str, Any]:
    """Options of make_case other than bias: index arrays and scalars."""
    options: dict[str, Any] = {}
    for name, default in (("activation", "silu"), ("update_state", True)):
        if c[name] != default:
            options[name] = c[name]

    padded = np.zeros(n_seq, bool)
    if c["slots"]:
        pad = 0 if c["slots"] == "null-block" else -1
        slots = rng.permutation(n_seq + c["spare"])[:n_seq]
        if c["slots"] == "null-block":
            slots = 1 + rng.permutation(n_seq + c["spare"] - 1)[:n_seq]
        if c["slots"] != "permuted":
            padded[1::3] = True
            slots[padded] = pad
            slots[1] = -5  # any negative slot is padding too
            options["pad_slot_id"] = pad
        options["conv_state_indices"] = slots
    if c["rows"]:
        options["inter_indices"] = rng.permutation(n_seq + c["spare"])[:n_seq]
        if c["state"] is None:
            padded[1::3] = True
            options["inter_indices"][padded] = -1
    if c["accepted"]:
        least = 1 if c["state"] is None else 0
        options["num_accepted_tokens"] = rng.integers(least, num_tokens + c["spare"] + 1, n_seq)
        options["num_accepted_tokens"][0] = num_tokens

    lengths = np.full(n_seq, num_tokens)
    if c["ragged"]:
        lengths = rng.integers(0, num_tokens + 1, n_seq)
        lengths[:2] = num_tokens
        lengths[2] = 0
        options["cu_seqlens"] = np.concatenate([[0], np.cumsum(lengths)])
        if c["ragged"] == "max_num_tokens" or c["snapshots"] is None:
            options["max_num_tokens"] = num_tokens
    if c["tree"]:
        width = num_tokens
        if c["ragged"] and "max_num_tokens" not in options:
            width = num_tokens + c["spare"]  # what the snapshots hold
        parents = np.stack([rng.integers(-1, np.arange(width)) for _ in range(n_seq)])
        parents[np.arange(width) >= lengths[:, None]] = PAD
        options["parent_index"] = parents

    # other indices of a padded or empty sequence are not looked at
    padding_name = "inter_indices" if c["state"] is None else "conv_state_indices"
    for name in ("conv_state_indices", "inter_indices", "num_accepted_tokens", "parent_index"):
        if name in options:
            options[name][lengths == 0] = PAD
            if name != padding_name:
                options[name][padded] = -PAD
    for name, x in options.items():
        if isinstance(x, np.ndarray):
            buffer = filled((*x.shape, c["index_stride"]), np.int32)
            buffer[..., 0] = x
            options[name] = buffer[..., 0]
    return options


def garble(rng: np.random.Generator, case: Case) -> None:
    """Random values into all index arrays of the options, near the legal ones and far away."""
    for x in case.options.values():
        if isinstance(x, np.ndarray) and x.dtype == np.int32:
            near = rng.integers(-3, 12, x.shape)
            far = rng.integers(-(2**31), 2**31, x.shape)
            x[...] = np.where(rng.random(x.shape) < 0.2, far, near)


def default_case(
    shape: Shape, n_seq: int = 3, num_tokens: int = 4, seed: int = 0, **chosen: Any
) -> Case:
    """make_case at a model's shape, input and output in strided rows."""
    return make_case(
        n_seq, num_tokens, shape.d_inner, shape.qk_channels, seed=seed,
        **{"head_dim": shape.head_dim, "d_conv": shape.d_conv, "input_layout": "rows", **chosen},
    )  # fmt: skip


# ---- the golden --------------------------------------------------------------------------------


def per_token(implementation: str, case: Case) -> Case:
    """What `case`, a batched call of the default form, must give, by the per-token path.

    K calls of conv1d_update_l2norm, each followed by a copy of the window into the snapshots.
    """
    golden = case.copy()
    conv_state, new_input, weight, output, snapshots, *scalars = golden.args.values()
    options = {
        n: golden.options[n]
        for n in ("bias", "activation", "conv_state_indices", "pad_slot_id")
        if n in golden.options
    }
    for t in range(new_input.shape[1]):
        call(
            implementation, "conv1d_update_l2norm",
            conv_state, new_input[:, t], weight, output[:, t], *scalars, **options,
        )  # fmt: skip
        slots = options.get("conv_state_indices", slice(0, len(new_input)))
        if snapshots is None:
            continue
        if snapshots.ndim == 4:
            snapshots[: len(new_input), t] = conv_state[slots]
        else:
            window = conv_state[slots].swapaxes(1, 2)
            snapshots[: len(new_input), t : t + window.shape[1]] = window
    return golden
