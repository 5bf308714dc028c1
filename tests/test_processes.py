"""Imported again, reloaded, pickled, forked and spawned: nothing breaks or registers twice."""

from __future__ import annotations

import ast
import copy
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from processes import finish, start

import gdn_verify
from gdn_verify import supported, verify_conv
from gdn_verify.support import runs_on
from gdn_verify.tuned import CallShape, Tuned

CALL = """
    import torch, gdn_verify

    def call():
        state, x = torch.ones(2, 64, 4), torch.ones(2, 3, 64)
        return gdn_verify.verify_conv(state, x, torch.ones(64, 4), qk_channels=32, head_dim=16)[0]

    expected = call()
"""


def python(code: str, **env: str) -> None:
    _, err = finish(start(textwrap.dedent(CALL) + textwrap.dedent(code), **env))
    assert not err


def test_import_and_load_again() -> None:
    python("""
        import importlib, sys
        first, function = gdn_verify, gdn_verify.verify_conv
        importlib.reload(gdn_verify)
        importlib.reload(gdn_verify.ops)
        importlib.reload(gdn_verify.support)
        import gdn_verify.distributed
        importlib.reload(gdn_verify.distributed)
        assert torch.equal(call(), expected)
        for name in [name for name in sys.modules if name.startswith("gdn_verify")]:
            if "_core" not in name:  # a module of C++ is made once
                del sys.modules[name]
        import gdn_verify
        import gdn_verify.distributed
        assert gdn_verify is not first
        assert torch.equal(call(), expected)
        assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(), expected)
        torch.ops.load_library(gdn_verify.ops._LIBRARY)
        schemas = torch._C._jit_get_schemas_for_operator("gdn::verify_fused_conv_kn_batched")
        assert len(schemas) == 1
    """)


def test_a_second_copy_of_the_package_is_refused(tmp_path) -> None:
    """The operators of a process are those of one build; another one would end the process."""
    python(f"""
        import pathlib, shutil, sys
        folder = pathlib.Path(gdn_verify.__file__).parent
        shutil.copytree(folder, "{tmp_path}/gdn_verify")
        for name in [name for name in sys.modules if name.startswith("gdn_verify")]:
            del sys.modules[name]
        sys.path.insert(0, "{tmp_path}")
        first = gdn_verify
        import gdn_verify
        assert gdn_verify.__file__.startswith("{tmp_path}")
        try:
            gdn_verify.verify_conv
        except ImportError as error:
            assert "another copy of gdn_verify" in str(error)
        else:
            raise SystemExit("no error")
        gdn_verify = first
        assert torch.equal(call(), expected)
    """)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_child_process_computes_the_same(start: str, tmp_path) -> None:
    (tmp_path / "child.py").write_text(
        textwrap.dedent(CALL)
        + textwrap.dedent(f"""
            import torch.multiprocessing as mp

            if __name__ == "__main__":
                context = mp.get_context("{start}")
                with context.Pool(2) as pool:
                    results = [pool.apply_async(call) for _ in range(4)]
                    for result in results:
                        assert torch.equal(result.get(60), expected)
                assert torch.equal(call(), expected)
        """)
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "child.py"], capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("threads", [0, 1])
def test_a_fork_after_torch_ran_its_threads(threads: int) -> None:
    """OpenMP, which runs them, does not survive a fork: any parallel operator of torch hangs."""
    python(f"""
        import os, signal
        n, d = 64, 4096
        state, x, weight = torch.ones(n, d, 4), torch.ones(n, 4, d), torch.ones(d, 4)
        outputs = [torch.zeros_like(x) for _ in range(3)]
        torch.set_num_threads(max(2, torch.get_num_threads()))

        def large(output):
            gdn_verify.verify_conv(state, x, weight, qk_channels=2048, head_dim=128, output=output,
                                   update_state=False, snapshots="none")

        large(outputs[0])
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            if {threads}:
                torch.set_num_threads({threads})
            large(outputs[1])
            same = outputs[1].numpy().tobytes() == outputs[0].numpy().tobytes()
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
        large(outputs[2])
        assert torch.equal(outputs[2], outputs[0])
    """)


def test_a_fork_after_the_core_ran_its_own_threads() -> None:
    python("""
        import os
        import numpy as np
        from gdn_verify import _core

        def core():
            state, x = np.ones((64, 2048, 4), np.float32), np.ones((64, 4, 2048), np.float32)
            output = np.empty_like(x)
            weight = np.ones((2048, 4), np.float32)
            _core.verify_fused_conv_kn_batched(state, x, weight, output, None, 1024, 128)
            return output.tobytes()

        before = core()
        child = os.fork()
        if child == 0:
            os._exit(0 if core() == before else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert core() == before
    """)


@pytest.mark.gpu
def test_a_build_with_cuda_where_no_gpu_is_seen() -> None:
    """Images are built, and run their CPU path, on machines without a GPU."""
    python(
        """
        assert torch.version.cuda and not torch.cuda.is_available()
        assert gdn_verify._core.build_info()["has_cuda"]
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(), expected)
        assert gdn_verify.load_tuned() == 0
        x = torch.ones(2, 3, 64)
        assert gdn_verify.supported(torch.ones(2, 64, 4), x, torch.ones(64, 4), qk_channels=32,
                                    head_dim=16)
        from gdn_verify import info
        assert info.collect()["devices"] == ["cpu"]
        """,
        CUDA_VISIBLE_DEVICES="",
    )


@pytest.mark.gpu
def test_a_build_for_other_architectures_names_them() -> None:
    """The driver is told to use none of the code that is there, only what it compiles from PTX: of
    the default architectures that of 12.0, which other devices cannot run."""
    archs = gdn_verify._core.build_info()["cuda_archs"]
    capability = torch.cuda.get_device_capability()
    if runs_on(" ".join(arch for arch in archs.split() if "+PTX" in arch), *capability):
        pytest.skip(f"the PTX of {archs} runs on this device")
    python(
        f"""
        state, x, weight = torch.ones(2, 64, 4), torch.ones(2, 3, 64), torch.ones(64, 4)
        one = torch.ones(2, dtype=torch.int32)
        state, x, weight, one = state.cuda(), x.cuda(), weight.cuda(), one.cuda()
        snapshots = torch.empty(2, 3, 64, 4, device="cuda")
        wanted = (
            "gdn_verify was built for the architectures {archs}, but device 0 is"
            " {capability[0]}.{capability[1]}: rebuild with TORCH_CUDA_ARCH_LIST="
        )
        for call in (
            lambda: gdn_verify.verify_conv(state, x, weight, qk_channels=32, head_dim=16),
            lambda: gdn_verify.verify_conv(state, x, weight, qk_channels=32, head_dim=16, pdl=True),
            lambda: torch.ops.gdn.commit_conv_state([state], [snapshots], one),
        ):
            try:
                call()
            except RuntimeError as error:
                assert str(error).startswith(wanted), error
            else:
                raise SystemExit("no error")
        torch.cuda.synchronize()
        assert torch.equal(state.cpu(), torch.ones(2, 64, 4))
        """,
        CUDA_FORCE_PTX_JIT="1",
    )


def test_one_logging_channel() -> None:
    """Nothing but the commands prints, and all that is reported goes to one logger."""
    commands = {"__main__", "bench", "check", "info", "table", "tune_command"}
    loggers = []
    for path in Path(gdn_verify.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert not name.startswith("warnings."), path
                assert name != "print" or path.stem in commands, path
                if name.endswith("getLogger"):
                    loggers += map(ast.unparse, node.args)
    assert set(loggers) == {"'gdn_verify'"}


def test_a_reader_that_stops_ends_a_command_without_a_traceback() -> None:
    command = f"'{sys.executable}' -m gdn_verify info | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert not done.stderr


def test_functions_and_values_are_pickled() -> None:
    for thing in (verify_conv, supported, gdn_verify.history_windows, gdn_verify.tune):
        assert pickle.loads(pickle.dumps(thing)) is thing
    shape, tuned = CallShape(8192, 4096, 8, 17), Tuned(3, 1.5, 2.0)
    assert pickle.loads(pickle.dumps((shape, tuned))) == (shape, tuned)


def test_a_module_that_calls_it_is_copied_and_saved(tmp_path) -> None:
    from test_export import Layer, check

    layer = Layer()
    check(copy.deepcopy(layer), "cpu")
    torch.save(layer, tmp_path / "layer.pt")
    check(torch.load(tmp_path / "layer.pt", weights_only=False), "cpu")
