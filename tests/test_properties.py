"""Properties of any call, drawn by hypothesis.

Every implementation equals the reference, byte for byte, on any legal call. A call of any shapes,
strides, offsets, dtypes, options and numbers is either refused with a sentence that names an
argument, and nothing written, or equals the reference. Index values of any kind are refused exactly
where a plain reading of the rules says so, by that name.

A few hundred examples each, or GDN_VERIFY_EXAMPLES (`make fuzz`).
"""

from __future__ import annotations

import os
from typing import Any

import cases
import compare
import numpy as np
import pytest
from cases import Case
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from small_calls import commit, ragged, single, stateless, update, view

BATCHED = "verify_fused_conv_kn_batched"
DTYPES = (np.float32, np.float16, np.uint16, np.int32, np.int64, np.float64, np.int8)
NAMES = {*sum(cases.OPERATORS.values(), ()), "qk_channels", "head_dim", "l2_eps", "bias",
         "activation", "conv_state_indices", "pad_slot_id", "inter_indices", "num_accepted_tokens",
         "cu_seqlens", "max_num_tokens", "parent_index", "config"}  # fmt: skip


def examples(few: int) -> settings:
    return settings(
        max_examples=int(os.environ.get("GDN_VERIFY_EXAMPLES", few)),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# ---- legal calls -------------------------------------------------------------------------------


@st.composite
def legal_calls(draw: st.DrawFn, most_tokens: int = 19, **fixed: Any) -> Case:
    chosen: dict[str, Any] = dict(fixed)
    for name, values in cases.FACTORS.items():
        legal = [v for v in values if cases.legal({**chosen, name: v})]
        if name not in fixed:
            chosen[name] = draw(st.sampled_from(legal or [values[0]]))
    if not cases.legal(chosen):
        chosen = {**chosen, "state": "W", "snapshots": "windows", "slots": None}
    n_seq, num_tokens = draw(st.integers(4, 7)), draw(st.integers(2, most_tokens))
    return cases.make_case(n_seq, num_tokens, seed=draw(st.integers(0, 999)), **chosen)


@examples(60)
@given(case=legal_calls())
def test_any_call_equals_the_reference(built, case):
    compare.assert_same_case(cases.run(built, case), cases.run("reference", case), built)


# ---- index values ------------------------------------------------------------------------------


def first_wrong(case: Case) -> tuple[str, int] | None:
    """By the rules of the documentation: the name and the sequence of the first wrong index value
    of a batched call that is right otherwise."""
    a, o = case.args, case.options
    state, snapshots = a["conv_state"], a["conv_state_inter"]
    bounds = o.get("cu_seqlens")
    n_seq = len(a["new_input"]) if bounds is None else len(bounds) - 1
    capacity = 0
    if snapshots is not None:
        lead = (0 if state is None else state.shape[2] - 1) if snapshots.ndim == 3 else 0
        lead = a["weight"].shape[1] - 2 if state is None else lead
        capacity = snapshots.shape[1] - lead
    most = o.get("max_num_tokens", capacity)
    slots_taken, rows_taken = set(), set()
    for i in range(n_seq):
        num_rows = a["new_input"].shape[1]
        if bounds is not None:
            begin, end = int(bounds[i]), int(bounds[i + 1])
            num_rows = end - begin
            wrong_start = i == 0 and begin != 0
            if wrong_start or begin < 0 or num_rows < 0 or end > len(a["new_input"]):
                return "cu_seqlens", i
            if num_rows == 0:
                continue
            if num_rows > most:
                return "cu_seqlens", i
        slot = int(o["conv_state_indices"][i]) if "conv_state_indices" in o else i
        row = int(o["inter_indices"][i]) if "inter_indices" in o else i
        index = "inter_indices" if state is None else "conv_state_indices"
        value = row if state is None else slot
        padding = value < 0 or value == o.get("pad_slot_id", -1)
        if index in o and padding:
            continue
        if state is not None and slot >= len(state):
            return "conv_state_indices", i
        if snapshots is not None and not 0 <= row < len(snapshots):
            return "inter_indices", i
        if "num_accepted_tokens" in o:
            accepted = int(o["num_accepted_tokens"][i])
            if not (state is None) <= accepted <= capacity:
                return "num_accepted_tokens", i
        if "parent_index" in o:
            parents = o["parent_index"][i, :num_rows]
            if any(not -1 <= parent < t for t, parent in enumerate(parents)):
                return "parent_index", i
        writes = o.get("update_state", True) and "parent_index" not in o and state is not None
        if writes and slot in slots_taken:
            return "conv_state_indices", i
        if snapshots is not None and row in rows_taken:
            return "inter_indices", i
        slots_taken.add(slot)
        rows_taken.add(row)
    return None


@st.composite
def any_index_values(draw: st.DrawFn) -> Case:
    """A call some of whose index values are anything."""
    heads = {"head_dim": draw(st.sampled_from([1, 5, 32, 128]))}
    case = draw(legal_calls(5, slots=draw(st.sampled_from(["permuted", "padded"])), **heads))
    indices = {name: x for name, x in case.options.items() if isinstance(x, np.ndarray)
               and x.dtype == np.int32}  # fmt: skip
    anything = st.integers(-3, 12) | st.integers(-(2**31), 2**31 - 1)
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(sorted(indices)))
        position = tuple(draw(st.integers(0, n - 1)) for n in indices[name].shape)
        indices[name][position] = draw(anything)
    return case


@examples(100)
@given(case=any_index_values())
def test_any_index_values(built, case):
    wrong = first_wrong(case)
    event("right" if wrong is None else wrong[0])
    if built == "cuda" and wrong:
        cases.run(built, case)  # whose guards are verified
        return
    mine = case.copy()
    if wrong is None:
        mine.call(built)
        compare.assert_same_case(mine, cases.run("reference", case), built)
    else:
        error = IndexError if built == "core" else RuntimeError
        with pytest.raises(error, match=rf"^{wrong[0]} .*, but is not at sequence {wrong[1]}$"):
            mine.call(built)
        compare.assert_same_case(mine, case, "written to")
    mine.verify_guards()


# ---- calls of any kind -------------------------------------------------------------------------


def assign(case: Case, name: str, x: Any) -> None:
    """An array by its name in `Case.arrays`."""
    where = case.args if name.partition("[")[0] in case.args else case.options
    if name.endswith("]"):
        of, _, index = name[:-1].partition("[")
        where[of][int(index)] = x
    else:
        where[name] = x


@st.composite
def relaid(draw: st.DrawFn, x: np.ndarray, signs: tuple[int, ...]) -> np.ndarray:
    """x as a view with any strides from any offset, now and then of elements that are one."""
    strides = [0] * x.ndim
    step = 1
    for k in draw(st.permutations(range(x.ndim))):
        strides[k] = step * draw(st.sampled_from(signs))
        step = max(1, step * max(1, x.shape[k]) * draw(st.sampled_from([1, 1, 2, 3])))
    if draw(st.integers(0, 3)) == 0 and x.ndim:
        k = draw(st.integers(0, x.ndim - 1))
        strides[k] = draw(st.sampled_from([0, 1, strides[k] - 1 or 1]))
    reach = [s * max(0, n - 1) for s, n in zip(strides, x.shape, strict=True)]
    before = draw(st.integers(0, 9)) - sum(r for r in reach if r < 0)
    buffer = cases.filled((before + sum(r for r in reach if r > 0) + 1 + draw(st.integers(0, 9)),),
                          x.dtype.type if x.dtype.type in cases.FILL else np.float32)  # fmt: skip
    buffer = np.nan_to_num(buffer).astype(x.dtype) if buffer.dtype != x.dtype else buffer
    result = view(buffer, x.shape, tuple(strides), before)
    result[...] = x
    return result


@st.composite
def reshaped(draw: st.DrawFn, x: np.ndarray) -> np.ndarray:
    shape = list(x.shape)
    if draw(st.integers(0, 5)) == 0:
        shape = draw(st.sampled_from([shape[1:], [*shape, 1], [1, *shape], []]))
    elif shape:
        k = draw(st.integers(0, len(shape) - 1))
        shape[k] = draw(st.sampled_from([0, 1, 2, 9, max(0, shape[k] - 1), shape[k] + 1]))
    return np.resize(x, shape) if x.size else np.zeros(shape, x.dtype)


NUMBERS = st.integers(-3, 70) | st.sampled_from([2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63)])
FLOATS = st.floats(width=64) | st.sampled_from([0.0, -0.0, 1e-6, 1e39, 5e-324])


@st.composite
def any_calls(draw: st.DrawFn, negative_strides: bool) -> Case:
    """A legal call with up to three things about it changed."""
    base = draw(
        st.sampled_from(["batched"] * 6 + ["ragged", "stateless", "single", "update", "commit"])
    )
    if base == "batched":
        case = draw(legal_calls(5, head_dim=draw(st.sampled_from([1, 5, 32, 128]))))
    else:
        case = {"ragged": ragged, "stateless": stateless, "single": single, "update": update,
                "commit": commit}[base]()  # fmt: skip
    for _ in range(draw(st.integers(0, 3))):
        arrays = case.arrays()
        name = draw(st.sampled_from(sorted(arrays)))
        x = arrays[name]
        kind = draw(st.sampled_from(["strides", "strides", "shape", "dtype", "alias", "drop",
                                     "number", "values"]))  # fmt: skip
        if kind == "strides":
            signs = (1, 1, 1, -1) if negative_strides else (1,)
            assign(case, name, draw(relaid(x, signs)))
        elif kind == "shape":
            assign(case, name, draw(reshaped(x)))
        elif kind == "dtype":
            assign(case, name, np.zeros(x.shape, draw(st.sampled_from(DTYPES))))
        elif kind == "alias":  # at any place of another array's buffer
            owner = cases.buffer_of(arrays[draw(st.sampled_from(sorted(arrays)))])
            if x.dtype == owner.dtype and x.size and x.size <= owner.size:
                contiguous = np.empty(x.shape, np.int8).strides
                start = draw(st.integers(0, owner.size - x.size))
                assign(case, name, view(owner, x.shape, contiguous, start))
        elif kind == "drop" and (
            name in case.options or name in ("conv_state", "conv_state_inter")
        ):
            assign(case, name, None)
        elif kind == "number":
            numbers = [n for n in ("qk_channels", "head_dim", "l2_eps") if n in case.args]
            if case.op == BATCHED:
                numbers += ["pad_slot_id", "max_num_tokens", "config"]
            if numbers:
                number = draw(st.sampled_from(numbers))
                value = draw(FLOATS if number == "l2_eps" else NUMBERS)
                assign(case, number, value)
        elif kind == "values" and x.dtype == np.int32 and x.size:
            position = tuple(draw(st.integers(0, n - 1)) for n in x.shape)
            x[position] = draw(st.integers(-3, 12) | st.integers(-(2**31), 2**31 - 1))
    return case


def outcome(implementation: str, case: Case) -> tuple[Case, Exception | None]:
    mine = case.copy()
    try:
        mine.call(implementation)
    except (ValueError, IndexError, RuntimeError, TypeError) as error:
        return mine, error
    finally:
        mine.verify_guards()
    return mine, None


def elements(x: np.ndarray) -> np.ndarray:
    """The address of every element, by bytes over its size."""
    offset = np.zeros(x.shape, np.int64)
    for k, (n, stride) in enumerate(zip(x.shape, x.strides, strict=True)):
        offset += (np.arange(n) * stride).reshape([-1 if i == k else 1 for i in range(x.ndim)])
    return (x.__array_interface__["data"][0] + offset).ravel() if x.size else offset.ravel()


def shares_what_it_writes(case: Case) -> bool:
    """By brute force: whether an element of what may be written is one of another, or twice."""
    arrays = case.arrays()
    addresses = {name: elements(x) for name, x in arrays.items()}
    for name, mine in addresses.items():
        if not name.startswith(("output", "conv_state", "conv_states")) or "indices" in name:
            continue
        if len(np.unique(mine)) < len(mine):
            return True
        if any(np.isin(mine, theirs).any() for n, theirs in addresses.items() if n != name):
            return True
    return False


def check_refusal(case: Case, mine: Case, error: Exception) -> None:
    if isinstance(error, TypeError):  # something that must be an array is absent
        assert "incompatible function arguments" in str(error)
        return
    first = str(error).partition(" ")[0].partition("[")[0]
    assert first in NAMES, error
    assert "\n" not in str(error)
    compare.assert_same_case(mine, case, "written to")
    if "share no memory" in str(error) or "overlap itself" in str(error):
        assert shares_what_it_writes(case), error


@examples(200)
@given(data=st.data())
def test_any_arguments(built, data):
    case = data.draw(any_calls(negative_strides=built == "core"))
    mine, error = outcome("core", case)
    event(type(error).__name__ if error else "accepted")
    # what cannot be decided cheaply is accepted, and then anything may come out
    shares = error is None and shares_what_it_writes(case)
    if error:
        check_refusal(case, mine, error)
    elif not shares:
        plain = case.copy()
        plain.options.pop("config", None)  # the reference has none
        plain.call("reference")
        compare.assert_same_case(mine, plain, "core")
    if built == "core" or isinstance(error, TypeError):
        return
    theirs, their_error = outcome(built, case)
    if built == "cuda" and isinstance(error, IndexError):
        assert their_error is None
    else:
        assert str(their_error) == str(error)
        if not shares:
            compare.assert_same_case(theirs, mine, built)
