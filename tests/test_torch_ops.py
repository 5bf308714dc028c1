"""The PyTorch operators: registration, torch.compile, the wrapper, and what errors say.

That the operators compute the right bits with every option is tested elsewhere, over all
implementations; here a few calls of each show that the binding passes everything on.
"""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from calls import BASE, CALLS, HEADS, batched, commit, equal, operator, tensors
from cases import make_case, run
from compare import assert_same_case
from processes import python

import gdn_verify
from gdn_verify import history_windows, reference, verify_conv
from gdn_verify.arrays import to_array

IMPLEMENTATION = {"cpu": "torch", "cuda": "cuda"}


# ---- one call of each operator -----------------------------------------------------------------

each_call = pytest.mark.parametrize("name", CALLS)


@pytest.mark.parametrize(
    ("op", "written"),
    [
        ("verify_fused_conv_kn_batched", {"conv_state", "output", "conv_state_inter"}),
        ("verify_fused_conv_kn", {"conv_state", "output", "conv_state_inter"}),
        ("conv1d_update_l2norm", {"conv_state", "output"}),
        ("commit_conv_state", {"conv_states"}),
    ],
)
def test_schema(op: str, written: set[str]) -> None:
    schema = operator(op).default._schema
    assert not schema.returns
    marked = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert marked == written
    for key in ("CPU", "CUDA", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"gdn::{op}", key)


@each_call
def test_equals_the_reference(name: str, device: str) -> None:
    case = CALLS[name]()
    assert_same_case(run(IMPLEMENTATION[device], case), run("reference", case), name)


@each_call
def test_opcheck(name: str, device: str) -> None:
    case = CALLS[name]()
    args, options = tensors(case, device)
    torch.library.opcheck(operator(case.op).default, tuple(args), options)


# ---- torch.compile, capture, inference mode ----------------------------------------------------


def compare_compiled(function: Any, device: str, backend: str, dynamic: bool | None) -> None:
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    for n in (1, 2, 5):
        args, _ = tensors(batched(n_seq=n), device)
        states, new_input, weight = args[0], args[1], args[2]
        eager_buffer = torch.stack([states + 1, states, states - 1])
        buffer = eager_buffer.clone()
        expected = function(eager_buffer, new_input, weight)
        actual = compiled(buffer, new_input, weight)
        equal(buffer, eager_buffer, f"n={n} buffer")
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            equal(a, e, f"n={n} result {i}")


def operate_on_a_view(
    buffer: torch.Tensor, new_input: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    output = torch.empty_like(new_input)
    snapshots = buffer.new_empty((*new_input.shape, 4))
    torch.ops.gdn.verify_fused_conv_kn_batched(
        buffer[1], new_input, weight, output, snapshots, BASE.qk_channels, BASE.head_dim
    )  # fmt: skip
    return output * 2, snapshots[:, 1].clone(), buffer[1] + 1


def operate_twice(
    buffer: torch.Tensor, new_input: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The wrapper, a commit, and a second step that must see both."""
    state = buffer[1]
    first, history = verify_conv(
        state, new_input, weight, snapshots="history", update_state=False, **HEADS
    )
    assert history is not None
    accepted = torch.full((new_input.shape[0],), 2, dtype=torch.int32, device=buffer.device)
    torch.ops.gdn.commit_conv_state([state], [history], accepted)
    second, windows = verify_conv(state, new_input, weight, **HEADS)
    assert windows is not None
    return first, history_windows(history, 4) + 1, second, windows


@pytest.mark.parametrize("function", [operate_on_a_view, operate_twice])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_graph_keeps_the_mutation(device: str, function: Any, dynamic: Any) -> None:
    compare_compiled(function, device, "aot_eager", dynamic)


@pytest.mark.parametrize(
    "function", [operate_on_a_view, pytest.param(operate_twice, marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_keeps_the_mutation(device: str, function: Any) -> None:
    compare_compiled(function, device, "inductor", None)


def operate_on_a_ragged_batch(
    states: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor,
    like: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    return verify_conv(
        states, packed, weight, cu_seqlens=cu_seqlens, max_num_tokens=like.shape[0], **HEADS
    )[0]


@pytest.mark.usefixtures("fresh_dynamo")
def test_dynamic_graph_is_compiled_once() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        operate_on_a_ragged_batch, fullgraph=True, backend=counter, dynamic=True
    )
    compiled_before = 0
    for n_seq, num_tokens in ((7, 5), (11, 6), (9, 17)):  # dynamo takes equal sizes for one
        case = batched(n_seq=n_seq, num_tokens=num_tokens, ragged="max_num_tokens")
        expected = run("reference", case)
        args, options = tensors(case)
        output = compiled(*args[:3], options["cu_seqlens"], torch.empty(num_tokens))
        equal(output, expected.args["output"])
        equal(args[0], expected.args["conv_state"])
        compiled_before = compiled_before or counter.frame_count
        assert counter.frame_count == compiled_before


def operate_on_lengths_of_the_data(
    states: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max().item())
    return verify_conv(
        states, packed, weight, cu_seqlens=cu_seqlens, max_num_tokens=longest, **HEADS
    )[0]


@pytest.mark.usefixtures("fresh_dynamo")
def test_graph_learns_max_num_tokens_when_it_runs() -> None:
    case = batched(n_seq=5, ragged="max_num_tokens")
    expected = run("reference", case)
    args, options = tensors(case)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(
            operate_on_lengths_of_the_data, fullgraph=True, backend="aot_eager"
        )
        output = compiled(*args[:3], options["cu_seqlens"])
    equal(output, expected.args["output"])
    equal(args[0], expected.args["conv_state"])


def test_inference_mode(device: str) -> None:
    case = batched()
    expected = run("reference", case)
    with torch.inference_mode():
        args, options = tensors(case, device)
        output, windows = verify_conv(*args[:3], **HEADS, **options)
    equal(output, expected.args["output"])
    equal(windows, expected.args["conv_state_inter"])
    equal(args[0], expected.args["conv_state"])


@pytest.mark.gpu
def test_graph_capture_on_a_side_stream() -> None:
    case = batched()
    args, _ = tensors(case, "cuda")
    before = args[0].clone()
    op = torch.ops.gdn.verify_fused_conv_kn_batched
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*args)
    equal(args[0], before)  # captured, not run
    graph.replay()
    torch.cuda.synchronize()
    expected = run("reference", case)
    equal(args[0], expected.args["conv_state"])
    equal(args[3], expected.args["output"])


# ---- views and empty batches -------------------------------------------------------------------


def test_slot_view_of_a_pool(device: str) -> None:
    case = batched()
    expected = run("reference", case)
    args, _ = tensors(case, device)
    pool = torch.full((3, 4, 1024, 4), float("nan"), device=device)
    pool[:, 0] = args[0]
    args[0] = pool[:, 0]
    torch.ops.gdn.verify_fused_conv_kn_batched(*args)
    equal(pool[:, 0], expected.args["conv_state"])
    equal(args[3], expected.args["output"])
    assert pool[:, 1:].isnan().all()


@pytest.mark.parametrize(("n_seq", "num_tokens"), [(0, 4), (3, 0)])
def test_empty_batch(device: str, n_seq: int, num_tokens: int) -> None:
    args, _ = tensors(batched(), device)
    before = args[0].clone()
    new_input = args[1][:n_seq, :num_tokens]
    output, windows = verify_conv(args[0], new_input, args[2], **HEADS)
    assert output.shape == new_input.shape
    assert windows is not None
    assert windows.shape == (n_seq, num_tokens, 1024, 4)
    equal(args[0], before)
    if device == "cuda":
        torch.cuda.synchronize()


def test_empty_batch_of_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        output, _ = verify_conv(
            torch.empty(3, 1024, 4), torch.empty(0, 4, 1024, dtype=torch.bfloat16),
            torch.empty(1024, 4), qk_channels=512, head_dim=128,
        )  # fmt: skip
    assert output.shape == (0, 4, 1024)


def test_denormals_are_kept_whatever_the_thread_has_set() -> None:
    case = make_case(n_seq=3, values="special", state_dtype="float32", input_dtype="float32")
    expected = run("reference", case)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        actual = run("torch", case)
        assert float(torch.tensor([1e-40]) * 1.0) == 0.0  # the setting is as it was
    finally:
        torch.set_flush_denormal(False)
    assert_same_case(actual, expected)


def test_a_call_leaks_nothing() -> None:
    args, _ = tensors(batched(n_seq=1, num_tokens=1))
    args[1], args[3] = args[1][:0], args[3][:0]
    op = torch.ops.gdn.verify_fused_conv_kn_batched.default

    def call(times: int) -> int:
        for _ in range(times):
            op(*args, activation="silu")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = call(1000)
    assert call(100_000) - before < 2000  # KiB; one leaked string a call would be 3100


# ---- the wrapper -------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshots", ["windows", "history", "none"])
@pytest.mark.parametrize("state", ["W", "W-1"])
def test_wrapper_allocates(device: str, snapshots: str, state: str) -> None:
    kind = None if snapshots == "none" else snapshots
    case = batched(snapshots=kind, state=state, state_dtype="float16", input_layout="rows")
    expected = run("reference", case)
    args, _ = tensors(case, device)
    output, inter = verify_conv(*args[:3], snapshots=snapshots, **HEADS)  # type: ignore[arg-type]
    assert output.is_contiguous()
    equal(output, expected.args["output"])
    equal(args[0], expected.args["conv_state"])
    if inter is None:
        assert snapshots == "none"
    else:
        equal(inter, expected.args["conv_state_inter"])


def test_wrapper_allocates_for_ragged_batches(device: str) -> None:
    case = batched(ragged="max_num_tokens")
    expected = run("reference", case)
    args, options = tensors(case, device)
    output, windows = verify_conv(*args[:3], **HEADS, **options)
    assert windows is not None
    assert windows.shape == (3, 4, 1024, 4)
    equal(output, expected.args["output"])
    bounds = options["cu_seqlens"].tolist()
    for i in range(3):
        rows = bounds[i + 1] - bounds[i]
        equal(windows[i, :rows], expected.args["conv_state_inter"][i, :rows])


def test_wrapper_uses_what_it_is_given() -> None:
    case = batched(accepted="mixed", rows="permuted", spare=2)
    expected = run("reference", case)
    args, options = tensors(case)
    output, inter = verify_conv(
        *args[:3], output=args[3], conv_state_inter=args[4], **HEADS, **options
    )
    assert output is args[3]
    assert inter is args[4]
    equal(output, expected.args["output"])
    equal(inter, expected.args["conv_state_inter"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"snapshots": "some"}, "snapshots is 'some', but it must be"),
        ({"conv_state": None}, "conv_state_inter must be given where conv_state is None"),
        ({"num_accepted_tokens": torch.ones(3, dtype=torch.int32)},
         "conv_state_inter must be given with num_accepted_tokens"),
        ({"inter_indices": torch.ones(3, dtype=torch.int32)},
         "conv_state_inter must be given with inter_indices"),
        ({"cu_seqlens": torch.zeros(4, dtype=torch.int32),
          "new_input": torch.empty(0, 1024, dtype=torch.bfloat16)},
         "max_num_tokens must be given with cu_seqlens"),
        ({"cu_seqlens": torch.zeros(4, dtype=torch.int32), "max_num_tokens": -3,
          "new_input": torch.empty(0, 1024, dtype=torch.bfloat16)},
         "max_num_tokens is -3, but it must not be negative"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32), "max_num_tokens": 4,
          "new_input": torch.empty(0, 1024, dtype=torch.bfloat16)},
         r"cu_seqlens must be \[n_seq \+ 1\], but is \[0\]"),
        ({"new_input": torch.empty(4, 1024)}, "new_input has 2 dimensions, but it must have 3"),
        ({"conv_state": torch.empty(1024, 4)}, "conv_state has 2 dimensions, but it must have 3"),
        ({"weight": torch.nn.Parameter(torch.empty(1024, 4))}, "weight requires grad"),
    ],
)  # fmt: skip
def test_wrapper_refuses(change: dict[str, Any], sentence: str) -> None:
    args, _ = tensors(batched())
    given = {"conv_state": args[0], "new_input": args[1], "weight": args[2], **change}
    with pytest.raises(ValueError, match=sentence):
        verify_conv(**given, **HEADS)


def test_parameters_are_fine_without_grad() -> None:
    args, _ = tensors(batched())
    with torch.no_grad():
        verify_conv(args[0], args[1], torch.nn.Parameter(args[2]), **HEADS)


@pytest.mark.parametrize("state_len", [3, 4])
def test_history_windows(state_len: int) -> None:
    buffer = torch.arange(2 * 9 * 10, dtype=torch.float32).reshape(2, 9, 10)
    for history in (buffer, buffer.transpose(1, 2), buffer[:, 1:8, ::2], buffer[1]):
        windows = history_windows(history, state_len)
        rows, d_inner = history.shape[-2:]
        assert windows.shape[-3:] == (rows - state_len + 1, d_inner, state_len)
        assert windows.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        for t in range(rows - state_len + 1):
            expected = history[..., t : t + state_len, :].transpose(-1, -2)
            equal(windows[..., t, :, :], expected)
    equal(history_windows(buffer, 4), reference.history_windows(buffer.numpy(), 4))
    with pytest.raises(ValueError, match="history holds 9 entries a row"):
        history_windows(buffer, 10)
    with pytest.raises(ValueError, match="history has 4 dimensions"):
        history_windows(buffer[None], 4)


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("head_dim", 100),
        ("l2_eps", -1.0),
        ("l2_eps", float("nan")),
        ("qk_channels", 2048),
        ("weight", torch.empty(1024, 9)),
        ("new_input", torch.empty(3, 4, 1024, dtype=torch.float64)),
        ("new_input", torch.empty(1, 1, 3, 4, 1024)),
        ("num_accepted_tokens", torch.empty(3, dtype=torch.int64)),
        ("num_accepted_tokens", torch.empty(3, dtype=torch.bool)),
    ],
)
def test_the_sentences_of_the_core_arrive(device: str, argument: str, value: Any) -> None:
    case = batched()
    args, _ = tensors(case, device)
    given = {**dict(zip(case.args, args, strict=True))}
    given[argument] = value.to(device) if isinstance(value, torch.Tensor) else value
    before = to_array(given["conv_state"]).copy()
    with pytest.raises(RuntimeError) as caught:
        torch.ops.gdn.verify_fused_conv_kn_batched(**given)
    message = str(caught.value)
    assert argument in message
    assert "\n" not in message
    assert ".cpp" not in message
    equal(given["conv_state"], before)


def test_lists_of_a_commit_have_one_length() -> None:
    args, _ = tensors(commit())
    with pytest.raises(RuntimeError, match=r"^snapshots has 2 layers, but conv_states has 3"):
        torch.ops.gdn.commit_conv_state(args[0], args[1][:2], args[2])


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", ["conv_state", "output", "num_accepted_tokens"])
def test_devices_do_not_mix(wrong: str) -> None:
    case = batched(accepted="mixed")
    args, options = tensors(case, "cuda")
    given = {**dict(zip(case.args, args, strict=True)), **options}
    given[wrong] = given[wrong].cpu()
    with pytest.raises(RuntimeError, match=f"^{wrong} is on cpu, but new_input is on cuda:0"):
        torch.ops.gdn.verify_fused_conv_kn_batched(**given)


# ---- the package -------------------------------------------------------------------------------


def test_import_registers_the_operators() -> None:
    python("""
        import torch, gdn_verify
        torch.ops.gdn.verify_fused_conv_kn_batched, torch.ops.gdn.commit_conv_state
    """)
    assert set(gdn_verify.__all__) <= set(dir(gdn_verify))


def test_core_and_reference_work_without_torch() -> None:
    python("""
        import sys
        sys.modules["torch"] = None
        import gdn_verify.reference, gdn_verify._core
        try:
            gdn_verify.verify_conv
        except ImportError as error:
            assert "torch" in str(error)
        else:
            raise SystemExit("no error")
        assert not hasattr(gdn_verify, "other")
    """)


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["", "0", "1"])
def test_check_variable(check: str) -> None:
    said = python(
        """
        import torch, gdn_verify
        x = torch.zeros(2, 3, 256, device="cuda")
        state = torch.zeros(2, 256, 4, device="cuda")
        slots = torch.tensor([0, 9], dtype=torch.int32, device="cuda")
        try:
            gdn_verify.verify_conv(state, x, torch.zeros(256, 4, device="cuda"), qk_channels=0,
                                   head_dim=1, conv_state_indices=slots)
            print("passed")
        except RuntimeError as error:
            print(error)
        """,
        GDN_VERIFY_CHECK=check,
    )
    assert ("conv_state_indices" in said) == (check == "1")
