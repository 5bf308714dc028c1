"""Every option alone, every pair of option values together, and what the options mean."""

import itertools

import cases
import compare
import numpy as np
import pytest
from small_calls import int32

from gdn_verify import reference

PAIRS = cases.covering_array(cases.FACTORS, cases.legal)
SHIPPED_PAIRS = cases.covering_array(cases.SHIPPED_FACTORS, cases.legal)
BATCHED = "verify_fused_conv_kn_batched"
SMALL = {"head_dim": 32, "input_layout": "rows"}


def check_against_reference(name: str, case: cases.Case) -> None:
    compare.assert_same_case(cases.run(name, case), cases.run("reference", case), name)


@pytest.mark.parametrize("chosen", list(cases.single_options()), ids=repr)
def test_every_option_alone(built, chosen):
    for num_tokens in (1, 4, 17):
        check_against_reference(built, cases.make_case(5, num_tokens, **chosen))


@pytest.mark.parametrize("index", range(len(PAIRS)))
def test_every_pair_of_options(built, index):
    for num_tokens in (3, 1 + index % 17):
        case = cases.make_case(5, num_tokens, seed=index, **PAIRS[index])
        check_against_reference(built, case)


@pytest.mark.parametrize("index", range(len(SHIPPED_PAIRS)))
def test_every_pair_of_options_of_shipped_layers(built, index):
    for num_tokens in (4, 1 + index % 17):
        case = cases.make_case(3, num_tokens, 512, seed=index, **SHIPPED_PAIRS[index])
        check_against_reference(built, case)


def test_every_simd_level(cpu_level):
    for index, chosen in enumerate(PAIRS):
        check_against_reference("core", cases.make_case(5, 1 + index % 17, seed=index, **chosen))
    for index, chosen in enumerate(SHIPPED_PAIRS):
        case = cases.make_case(3, 1 + index % 17, 512, seed=index, **chosen)
        check_against_reference("core", case)


def test_pairs_are_all_there():
    for a, b in itertools.combinations(cases.FACTORS, 2):
        wanted = {
            (x, y) for x in cases.FACTORS[a] for y in cases.FACTORS[b] if cases.legal({a: x, b: y})
        }
        assert wanted <= {(c[a], c[b]) for c in PAIRS}, (a, b)
    assert all(cases.legal(c) for c in PAIRS)


# ---- indices and padding -----------------------------------------------------------------------


def test_padding_zeroes_output_and_touches_nothing_else(implementation):
    case = cases.make_case(5, 4, slots="permuted", spare=2, rows="permuted", **SMALL)
    case.options |= {"conv_state_indices": int32(3, 0, 5, -7, 1), "pad_slot_id": 0}
    for i in (1, 3):
        case.args["new_input"][i] = 0x7FC0  # NaN
    done = cases.run(implementation, case)
    assert (done.args["output"][[1, 3]] == 0).all()
    assert not (done.args["output"][[0, 2, 4]] == 0).all(axis=(1, 2)).any()
    for slot in (0, 2, 4, 6):
        compare.assert_same(
            done.args["conv_state"][slot], case.args["conv_state"][slot], f"slot {slot}"
        )
    live = case.options["inter_indices"][[0, 2, 4]]
    for row in set(range(7)) - set(live.tolist()):
        name = "conv_state_inter"
        compare.assert_same(done.args[name][row], case.args[name][row], f"row {row}")


def test_slots_and_rows_are_a_permutation_of_the_plain_call(implementation):
    plain = cases.make_case(5, 4, spare=2, **SMALL)
    expected = cases.run(implementation, plain)
    case = plain.copy()
    slots, rows = int32(6, 2, 0, 5, 3), int32(1, 4, 6, 0, 2)
    for i in range(5):
        case.args["conv_state"][slots[i]] = plain.args["conv_state"][i]
    case.options |= {"conv_state_indices": slots, "inter_indices": rows}
    actual = cases.run(implementation, case)
    compare.assert_same(actual.args["output"], expected.args["output"], "output")
    for i in range(5):
        compare.assert_same(
            actual.args["conv_state"][slots[i]], expected.args["conv_state"][i], "state"
        )
        compare.assert_same(
            actual.args["conv_state_inter"][rows[i], :4],
            expected.args["conv_state_inter"][i, :4], "windows",
        )  # fmt: skip


def test_a_slot_that_is_only_read_may_be_shared(implementation):
    case = cases.make_case(3, 4, update_state=False, **SMALL)
    case.options["conv_state_indices"] = int32(1, 1, 0)
    case.args["new_input"][1] = case.args["new_input"][0]
    done = cases.run(implementation, case)
    compare.assert_same(done.args["output"][1], done.args["output"][0])
    check_against_reference(implementation, case)


# ---- ragged ------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshots", ["windows", "history", None])
def test_ragged_equals_separate_calls(implementation, snapshots):
    case = cases.make_case(
        6, 7, ragged="max_num_tokens", spare=2, snapshots=snapshots, slots="permuted", **SMALL
    )
    done = cases.run(implementation, case)
    alone = case.copy()
    bounds = case.options["cu_seqlens"]
    for i, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
        if begin == end:
            continue
        slot = int(case.options["conv_state_indices"][i])
        a = alone.args
        inter = a["conv_state_inter"]
        cases.call(
            implementation, "verify_fused_conv_kn",
            a["conv_state"][slot], a["new_input"][begin:end], a["weight"],
            a["output"][begin:end], None if inter is None else inter[i],
            a["qk_channels"], a["head_dim"], a["l2_eps"],
        )  # fmt: skip
    alone.args["output"][bounds[-1] :] = 0
    compare.assert_same_case(done, alone)


def test_an_empty_sequence_is_left_alone_whatever_its_indices(implementation):
    case = cases.make_case(3, 4, ragged=True, rows="permuted", slots="permuted", **SMALL)
    case.options["cu_seqlens"][:] = int32(0, 4, 4, 8)
    case.options["num_accepted_tokens"] = int32(0, 99, 2)
    case.options["inter_indices"][:] = int32(2, 10**6, 0)
    case.options["conv_state_indices"][:] = int32(1, 10**6, 2)
    check_against_reference(implementation, case)


# ---- trees -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["W", "W-1"])
@pytest.mark.parametrize("d_conv", [2, 4, 8])
def test_each_path_of_a_tree_is_its_own_chain(implementation, d_conv, state):
    case = cases.make_case(3, 9, tree=True, d_conv=d_conv, state=state, **SMALL)
    done = cases.run(implementation, case)
    compare.assert_same(done.args["conv_state"], case.args["conv_state"], "state")
    for i in range(3):
        parents = case.options["parent_index"][i].tolist()
        for node in range(9):
            path = [node]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            path.reverse()
            a = case.copy().args
            output, windows = a["output"][i, path], a["conv_state_inter"][i, path]
            state_i = a["conv_state"][i].copy()
            cases.call(
                implementation, "verify_fused_conv_kn",
                state_i, a["new_input"][i, path], a["weight"], output, windows,
                a["qk_channels"], a["head_dim"],
            )  # fmt: skip
            label = f"sequence {i}, path {path}"
            compare.assert_same(done.args["output"][i, path], output, label)
            compare.assert_same(done.args["conv_state_inter"][i, path], windows, label)
            compare.assert_same(done.args["conv_state_inter"][i, node], state_i, label)


def test_a_tree_without_branches_is_a_chain_that_leaves_the_state(implementation):
    chain = cases.make_case(3, 6, **SMALL)
    tree = chain.copy()
    tree.options["parent_index"] = np.tile(np.arange(-1, 5, dtype=np.int32), (3, 1))
    expected, actual = cases.run(implementation, chain), cases.run(implementation, tree)
    for name in ("output", "conv_state_inter"):
        compare.assert_same(actual.args[name], expected.args[name], name)
    compare.assert_same(actual.args["conv_state"], chain.args["conv_state"], "state")


def test_single_sequence_takes_a_tree_and_a_start(implementation):
    case = cases.make_case(1, 6, tree=True, accepted="mixed", **SMALL)
    expected = cases.run(implementation, case)
    arrays = [case.args[n] for n in cases.OPERATORS[BATCHED]]
    single = cases.Case(
        "verify_fused_conv_kn",
        dict(zip(case.args, [x if n == 2 else x[0] for n, x in enumerate(arrays)]
                 + list(case.args.values())[5:], strict=True)),
        {
            "parent_index": case.options["parent_index"][0],
            "num_accepted_tokens": case.options["num_accepted_tokens"],
        },
    )  # fmt: skip
    actual = cases.run(implementation, single)
    for name in ("output", "conv_state_inter", "conv_state"):
        compare.assert_same(actual.args[name], expected.args[name][0], name)


# ---- rollback ----------------------------------------------------------------------------------


def rollback_run(implementation, snapshots, state, n_seq=4, num_tokens=5, steps=8):
    """Verifies `steps` times, each from a random accepted prefix of the step before.

    Yields per step and sequence the output and the straight run over the tokens that were kept.
    """
    rng = np.random.default_rng(11)
    case = cases.make_case(
        n_seq, num_tokens, snapshots=snapshots, state=state, output_dtype="float32",
        accepted="mixed", **SMALL,
    )  # fmt: skip
    accepted = case.options["num_accepted_tokens"]
    kept = [[] for _ in range(n_seq)]  # inputs accepted so far
    if state is None:
        accepted[:] = 1  # the first snapshot of the row is the start
        start = reference.history_windows(case.args["conv_state_inter"], 3)[:, 0].copy()
    else:
        accepted[:] = 0
        start = case.args["conv_state"].copy()
    a = case.args
    for _ in range(steps):
        a["new_input"][...] = cases.normal(rng, a["new_input"].shape, np.uint16)
        case.call(implementation, update_state=False)
        for i in range(n_seq):
            drafts = a["new_input"][i]
            chain = np.stack([*kept[i], *drafts])
            output = np.zeros(chain.shape, np.float32)
            final = start[i].copy()
            reference.verify_fused_conv_kn(
                final, chain, a["weight"], output, None, a["qk_channels"], a["head_dim"]
            )
            compare.assert_same(a["output"][i], output[len(kept[i]) :], f"sequence {i}")
            n = int(rng.integers(1, num_tokens + 1))
            kept[i].extend(drafts[:n].copy())
            accepted[i] = n


@pytest.mark.parametrize(("snapshots", "state"), [
    ("windows", "W"), ("windows", "W-1"), ("history", "W"), ("history", "W-1"), ("history", None),
])  # fmt: skip
def test_zero_copy_rollback_over_many_steps(implementation, snapshots, state):
    rollback_run(implementation, snapshots, state)


@pytest.mark.parametrize("state", ["W", "W-1"])
def test_history_is_the_windows(implementation, state):
    windows = cases.make_case(4, 6, snapshots="windows", state=state, **SMALL)
    history = cases.make_case(4, 6, snapshots="history", state=state, **SMALL)
    for name in ("conv_state", "new_input", "weight"):
        history.args[name][...] = windows.args[name]
    expected, actual = cases.run(implementation, windows), cases.run(implementation, history)
    compare.assert_same(actual.args["output"], expected.args["output"])
    view = reference.history_windows(
        actual.args["conv_state_inter"], windows.args["conv_state"].shape[-1]
    )
    compare.assert_same(view, expected.args["conv_state_inter"])


def commit_case(kind, layout, state_dtype="float32", n_layers=3, slots=None, rows=None):
    rng = np.random.default_rng(3)
    dtype = cases.DTYPES[state_dtype]
    n_seq, tokens, d_inner, state_len = 5, 6, 40, 4
    shape = (
        (n_seq + 2, tokens, d_inner, state_len)
        if kind == "windows"
        else (n_seq + 2, state_len - 1 + tokens, d_inner)
    )
    return cases.Case(
        "commit_conv_state",
        {
            "conv_states": [
                cases.spaced(cases.special(rng, (n_seq + 2, d_inner, state_len), dtype), layout)
                for _ in range(n_layers)
            ],
            "snapshots": [
                cases.spaced(cases.special(rng, shape, dtype), layout) for _ in range(n_layers)
            ],
            "num_accepted": int32(6, 0, 3, 1, 2),
        },
        {
            **({} if slots is None else {"conv_state_indices": slots}),
            **({} if rows is None else {"inter_indices": rows}),
        },
        f"{kind} {layout}",
    )


@pytest.mark.parametrize("kind", ["windows", "history"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "pool"])
@pytest.mark.parametrize("state_dtype", cases.DTYPES)
def test_commit(implementation, kind, layout, state_dtype):
    for slots, rows in (
        (None, None),
        (int32(6, 0, 2, 4, 1), int32(2, 5, 0, 6, 3)),
        (int32(6, -1, 2, -9, 1), int32(2, cases.PAD, 0, -cases.PAD, 3)),
    ):
        case = commit_case(kind, layout, state_dtype, slots=slots, rows=rows)
        done = cases.run(implementation, case)
        compare.assert_same_case(done, cases.run("reference", case))
        for state, before, snapshots in zip(
            done.args["conv_states"], case.args["conv_states"], case.args["snapshots"], strict=True
        ):
            wanted = before.copy()
            for i, accepted in enumerate(case.args["num_accepted"]):
                slot = i if slots is None else slots[i]
                row = i if rows is None else rows[i]
                if slot >= 0 and accepted > 0:
                    windows = (
                        reference.history_windows(snapshots, 4) if kind == "history" else snapshots
                    )
                    wanted[slot] = windows[row, accepted - 1]
            compare.assert_same(state, wanted)


def test_commit_of_many_layers(implementation):
    for n_layers in (1, 64, 65, 130):
        case = commit_case("windows", "contiguous", n_layers=n_layers)
        compare.assert_same_case(cases.run(implementation, case), cases.run("reference", case))


def test_commit_takes_the_accepted_node_of_a_tree(implementation):
    case = cases.make_case(5, 6, tree=True, **SMALL)
    done = cases.run(implementation, case)
    accepted = int32(6, 0, 3, 1, 2)
    state, windows = done.args["conv_state"], done.args["conv_state_inter"]
    cases.call(implementation, "commit_conv_state", [state], [windows], accepted)
    for i, a in enumerate(accepted):
        wanted = case.args["conv_state"][i] if a == 0 else windows[i, a - 1]
        compare.assert_same(state[i], wanted, f"sequence {i}")


# ---- wrong index values ------------------------------------------------------------------------


def wrong_index_cases():
    """(name, case) of calls with one bad index value, each otherwise right."""
    base = dict(slots="permuted", rows="permuted", accepted="mixed", spare=2, **SMALL)

    def case(name, option, position, value, **chosen):
        c = cases.make_case(5, 4, **{**base, **chosen})
        c.options[option][position] = value
        c.label = name
        return pytest.param(c, id=name)

    yield case("slot beyond the pool", "conv_state_indices", 2, 7)
    yield case("row beyond the snapshots", "inter_indices", 2, 7)
    yield case("negative row", "inter_indices", 2, -1)
    yield case("accepted beyond the snapshots", "num_accepted_tokens", 2, 7)
    yield case("negative accepted", "num_accepted_tokens", 2, -1)
    ragged = {"ragged": "max_num_tokens", "accepted": None}
    yield case("cu_seqlens descends", "cu_seqlens", 3, 3, **ragged)
    yield case("cu_seqlens does not start at 0", "cu_seqlens", 0, 1, **ragged)
    yield case("cu_seqlens negative", "cu_seqlens", 0, -1, **ragged)
    yield case("cu_seqlens beyond the rows", "cu_seqlens", 5, 1000, **ragged)
    yield case("sequence longer than max_num_tokens", "cu_seqlens", 1, 5, **ragged)
    yield case("parent is the node itself", "parent_index", (1, 2), 2, tree=True)
    yield case("parent below -1", "parent_index", (1, 2), -2, tree=True)
    yield case("parent after the node", "parent_index", (1, 2), 3, tree=True)
    no_state = {"state": None, "snapshots": "history", "slots": None}
    yield case("0 accepted without a state", "num_accepted_tokens", 2, 0, **no_state)

    shared = cases.make_case(5, 4, **base)
    shared.options["conv_state_indices"][:] = int32(1, 2, 3, 4, 1)
    shared.label = "shared slot"
    yield pytest.param(shared, id="shared slot")
    shared = cases.make_case(5, 4, **base)
    shared.options["inter_indices"][:] = int32(1, 2, 3, 4, 1)
    shared.label = "shared row"
    yield pytest.param(shared, id="shared row")
    for option, position, value in (
        ("conv_state_indices", 2, 7), ("inter_indices", 2, 7), ("inter_indices", 2, -1),
        ("num_accepted", 2, 7), ("num_accepted", 2, -1),
    ):  # fmt: skip
        c = commit_case("windows", "contiguous", slots=int32(6, 0, 2, 4, 1), rows=int32(*range(5)))
        {**c.args, **c.options}[option][position] = value
        yield pytest.param(c, id=f"commit: {option} {value}")


@pytest.mark.parametrize("case", list(wrong_index_cases()))
@pytest.mark.parametrize("implementation", cases.BUILT)
def test_wrong_index_values_raise_and_nothing_is_written(implementation, case):
    before = case.copy()
    with pytest.raises(IndexError if implementation == "core" else RuntimeError):
        case.call(implementation)
    compare.assert_same_case(case, before)


def test_a_padded_sequence_may_share_what_a_live_one_has(built):
    case = cases.make_case(5, 4, slots="padded", rows="permuted", **SMALL)
    slots = case.options["conv_state_indices"]
    live = int(np.argmax(slots >= 0))
    padded = int(np.argmax(slots < 0))
    case.options["inter_indices"][padded] = case.options["inter_indices"][live]
    check_against_reference(built, case)
