"""The drop-in: install(), the processes that it follows into, `python -m telegrad.compat`, and what says that it is not
there. Each test runs a program in a process of its own, since install() lasts."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from telegrad.compat import __main__ as program

# A program of torch's RPC that knows nothing of telegrad. Prints what RRef is, and a result.
PROGRAM = """
    import os
    import sys
    import torch
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    import torch.multiprocessing as mp
    from torch.distributed.rpc import RRef, rpc_sync

    class Doubler:
        def __init__(self):
            self.times = 2

        def double(self, tensor):
            return tensor * self.times

    def add(a, b):
        return a + b

    def run(rank, path):
        options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + path, rpc_timeout=30)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        if rank == 0:
            with dist_autograd.context() as context_id:
                leaf = torch.ones(2, requires_grad=True)
                rref = rpc.remote("worker1", Doubler)
                loss = rref.rpc_sync().double(rpc_sync("worker1", add, args=(leaf, 1))).sum()
                dist_autograd.backward(context_id, [loss])
                print(RRef.__module__, dist_autograd.get_gradients(context_id)[leaf].tolist(), sys.argv[1:])
        rpc.shutdown()

    if __name__ == "__main__":
        mp.start_processes(run, args=(sys.argv[1],), nprocs=2, start_method="{method}")
"""


def run(*command: str | Path, expect: int = 0, cwd: Path | None = None) -> str:
    """What a process prints."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100, check=False, cwd=cwd)
    assert done.returncode == expect, done.stderr
    return done.stdout if expect == 0 else done.stderr


def run_code(code: str, expect: int = 0) -> str:
    return run("-c", textwrap.dedent(code), expect=expect)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_script_and_the_processes_that_it_starts_run_on_telegrad(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PROGRAM.replace("{method}", method)))
    store = str(tmp_path / "store")
    shown = run("-m", "telegrad.compat", script, store, "--flag")
    arguments = [store, "--flag"]
    assert shown.strip() == f"telegrad.rref [2.0, 2.0] {arguments}"


def test_a_module_of_a_package_runs_on_telegrad(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text(textwrap.dedent(PROGRAM.replace("{method}", "spawn")))
    store = str(tmp_path / "store")
    shown = run("-m", "telegrad.compat", "-m", "package.program", store, "--flag", cwd=tmp_path)
    assert shown.strip() == f"telegrad.rref [2.0, 2.0] {[store, '--flag']}"


# Prints what it finds of itself, at once and at the end, when workers may still serve calls.
ITSELF = """
    import atexit, inspect, pickle, sys

    class Own:
        pass

    def look(when):
        main = sys.modules["__main__"]
        pickle.loads(pickle.dumps(Own()))
        print(when, main.Own is Own, vars(main) is globals(), inspect.getsource(Own).split(), file=sys.stderr)

    atexit.register(look, "end")
    look("now")
    spec = __spec__ and (__spec__.name, __spec__.origin)
    print(__name__, __file__, __package__, __cached__, spec, type(__loader__), sys.argv, sys.path[0], file=sys.stderr)
    sys.exit(3)
"""


@pytest.mark.parametrize("how", ["link", "folder", "-m package", "-m package.module"])
def test_a_program_finds_itself_as_python_has_it(tmp_path: Path, how: str) -> None:
    code = textwrap.dedent(ITSELF)
    (tmp_path / "package").mkdir()
    (tmp_path / "other").mkdir()
    for name in ("module.py", "package/__init__.py", "package/__main__.py", "package/module.py"):
        (tmp_path / name).write_text("" if name.endswith("__init__.py") else code)
    (tmp_path / "other" / "link.py").symlink_to(tmp_path / "module.py")
    found = {"link": "other/link.py", "folder": "package"}
    command = [found[how]] if how in found else how.split()
    as_python = run(*command, "argument", expect=3, cwd=tmp_path)
    assert as_python.splitlines()[0] == "now True True ['class', 'Own:', 'pass']"
    assert as_python.splitlines()[-1] == "end True True ['class', 'Own:', 'pass']"
    assert run("-m", "telegrad.compat", *command, "argument", expect=3, cwd=tmp_path) == as_python


def test_a_worker_serves_calls_after_its_script_has_ended(tmp_path: Path) -> None:
    """worker1 calls worker0 when the script of that has ended: its handler of atexit has told it so."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import atexit
            import sys
            import threading
            import torch.distributed.rpc as rpc

            class Own:
                pass

            def kind(value):
                return type(value) is Own

            ended = threading.Event()

            def at_the_end():
                rpc.rpc_sync("worker1", ended_there)
                rpc.shutdown()

            def ended_there():
                ended.set()

            rank = int(sys.argv[1])
            options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/store", rpc_timeout=30)
            rpc.init_rpc(f"worker{{rank}}", rank=rank, world_size=2, rpc_backend_options=options)
            if rank == 0:
                atexit.register(at_the_end)
            else:
                ended.wait(60)
                print(rpc.rpc_sync("worker0", kind, args=(Own(),)))
                rpc.shutdown()
            """
        )
    )
    command = [sys.executable, "-m", "telegrad.compat", str(script)]
    other = subprocess.Popen([*command, "0"], stderr=subprocess.PIPE, text=True)
    try:
        shown = run(*command[1:], "1")
        _, errors = other.communicate(timeout=60)
    finally:
        other.kill()
        other.communicate()
    assert (shown, errors) == ("True\n", "")


def test_the_program_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "usage" in run("-m", "telegrad.compat", expect=2)
    monkeypatch.setattr(program, "install", lambda: None)
    monkeypatch.setattr(sys, "path", sys.path[:])
    for arguments, message in (
        (["none.py"], "there is no script 'none.py'"),
        ([str(tmp_path)], "has no __main__.py"),
        (["-m"], "-m needs the name of a module"),
        (["-m", "none"], "there is no module 'none' that can be run"),
        (["-m", "none.of_it"], "No module named 'none'"),
        (["-m", "json"], "'json' is a package without a __main__.py"),
        (["-m", "sys"], "there is no module 'sys' that can be run"),
    ):
        monkeypatch.setattr(sys, "argv", ["telegrad.compat", *arguments])
        with pytest.raises(SystemExit, match=message):
            program.main()


def test_options_of_install_hold_in_spawned_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import torch.distributed.rpc as rpc
            import torch.multiprocessing as mp

            def run(rank):
                options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/store")
                rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
                print(rpc.api._get_current_rpc_agent().worker.options.spin)
                rpc.shutdown()

            if __name__ == "__main__":
                import telegrad.compat
                telegrad.compat.install(telegrad.Options(spin=0.125))
                telegrad.compat.install()
                try:
                    telegrad.compat.install({{"spin": 1}})
                except TypeError as error:
                    print(error)
                mp.spawn(run, nprocs=1)
            """
        )
    )
    assert run(script).splitlines() == ["options is a dict; expected telegrad.Options", "0.125"]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_started_processes_import_nothing_of_telegrads_from_the_current_directory(tmp_path: Path, method: str) -> None:
    for name in ("telegrad", "msgspec", "torch"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)\n")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "script.py"
    text = textwrap.dedent(PROGRAM.replace("{method}", method))
    script.write_text(f"import telegrad.compat\ntelegrad.compat.install()\n{text}")
    shown = run(script, tmp_path / "store", cwd=tmp_path)
    assert shown.startswith("telegrad.rref [2.0, 2.0]")


SHADOWS = ("msgspec", "cloudpickle", "torch", "typing", "dataclasses", "typer", "rich")
SAYS_WHERE = """
    import sys
    import torch.distributed.rpc as rpc
    import beside
    print(rpc.RRef.__module__, sys.path[0], beside.WHERE)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory to run programs in, with files that are called as what telegrad imports."""
    here = tmp_path.resolve() / "here"
    here.mkdir()
    for name in SHADOWS:
        (here / f"{name}.py").write_text("import os; os._exit(9)\n")
    return here


def write_program(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "beside.py").write_text(f"WHERE = {folder.name!r}\n")
    (folder / name).write_text(textwrap.dedent(SAYS_WHERE))
    return folder / name


@pytest.mark.parametrize("options", [["-m", "telegrad.compat"], ["-mtelegrad.compat"], ["-Bm", "telegrad.compat"]])
def test_a_script_imports_from_its_own_folder_and_nothing_comes_from_the_current_directory(
    here: Path, options: list[str]
) -> None:
    script = write_program(here / "scripts", "script.py")
    assert run(*options, "scripts/script.py", cwd=here) == f"telegrad.rref {script.parent} scripts\n"


def test_a_module_imports_from_the_current_directory_and_telegrad_does_not(here: Path) -> None:
    write_program(here, "program.py")
    assert run("-m", "telegrad.compat", "-m", "program", cwd=here) == f"telegrad.rref {here} here\n"


def test_where_python_is_told_to_leave_out_the_scripts_folder_it_is_left_out(here: Path) -> None:
    """As with `python -P script.py`; a directory that is run as a script is always there."""
    script = write_program(here / "scripts", "script.py")
    for start in ([], ["-m", "telegrad.compat"]):
        assert "No module named 'beside'" in run("-P", *start, script, cwd=here, expect=1)
    write_program(here / "scripts", "__main__.py")
    shown = run("-P", "-m", "telegrad.compat", "scripts", cwd=here)
    assert shown == f"telegrad.rref {script.parent} scripts\n"


def test_the_command_line_imports_nothing_from_the_current_directory(here: Path) -> None:
    assert "Usage: telegrad" in run("-m", "telegrad", "--help", cwd=here)


def test_a_module_of_the_users_that_imports_telegrad_finds_the_current_directory_as_ever(tmp_path: Path) -> None:
    for name in ("mine", "telegrads"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("import sys\nimport telegrad\nBEFORE = sys.path[0]\n")
        (tmp_path / name / "__main__.py").write_text(f"import {name}, sys\nprint({name}.BEFORE, sys.path[0])\n")
        where = tmp_path.resolve()
        assert run("-m", name, "telegrad.compat", cwd=tmp_path) == f"{where} {where}\n"


def test_names_that_were_imported_before_change_too() -> None:
    shown = run_code(
        """
        import torch
        import torch.distributed.rpc as rpc
        from torch.distributed.autograd import backward, context
        from torch.distributed.optim import DistributedOptimizer
        from torch.distributed.rpc import RRef, init_rpc, rpc_sync
        import telegrad.compat
        assert not telegrad.compat.is_installed()
        telegrad.compat.install()
        telegrad.compat.install()  # nothing more
        assert telegrad.compat.is_installed()
        from torch.distributed.nn import RemoteModule
        from torch.distributed.nn.api.remote_module import RemoteModule as the_same
        names = [backward, context, DistributedOptimizer, RRef, rpc_sync, RemoteModule, rpc.remote]
        print([name.__module__.partition(".")[0] for name in names], RemoteModule is the_same)
        print(rpc.backend_registry.BackendType.TENSORPIPE is rpc.BackendType.TENSORPIPE)
        print(torch._jit_internal.RRef is RRef, rpc.api.RRef is RRef, rpc.PyRRef is RRef)
        """
    )
    assert shown.splitlines() == [f"{['telegrad'] * 7} True", "True", "True True True"]


def test_modules_that_are_imported_later_have_telegrads_classes() -> None:
    """install() itself imports none of them: that takes long."""
    shown = run_code(
        """
        import importlib, inspect, sys
        import telegrad.compat
        telegrad.compat.install()
        print([name for name in sys.modules if name.startswith(("torch.distributed.optim", "torch.distributed.nn"))])
        import torch.distributed.optim.optimizer as own_module
        from torch.distributed.nn import RemoteModule
        from torch.distributed.nn.api.remote_module import RemoteModule as the_same
        from torch.distributed.optim import DistributedOptimizer
        print(DistributedOptimizer.__module__, own_module.DistributedOptimizer is DistributedOptimizer)
        print(RemoteModule.__module__, RemoteModule is the_same)
        importlib.reload(own_module)
        print(own_module.DistributedOptimizer is DistributedOptimizer, "class" in inspect.getsource(own_module))
        """
    )
    assert shown.splitlines() == [
        "[]",
        "telegrad.optim.distributed True",
        "telegrad.nn.remote_module True",
        "True True",
    ]


def test_install_is_refused_while_torchs_own_rpc_runs(tmp_path: Path) -> None:
    shown = run_code(
        f"""
        import torch.distributed.rpc as rpc
        import telegrad.compat
        options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/store")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        try:
            telegrad.compat.install()
        except RuntimeError as error:
            print(error)
        rpc.shutdown()
        print(telegrad.compat.is_installed())
        telegrad.compat.install()
        options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/other")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        print(type(rpc.api._get_current_rpc_agent()).__module__)
        rpc.shutdown()
        """
    )
    refusal, installed, agent = shown.splitlines()
    assert "torch's own RPC is running" in refusal
    assert "before torch.distributed.rpc.init_rpc()" in refusal
    assert installed == "False"
    assert agent == "telegrad.compat.agent"


def test_what_is_not_there_says_what_to_use() -> None:
    shown = run_code(
        """
        import telegrad.compat
        telegrad.compat.install()
        import torch.distributed.rpc as rpc
        for name in (
            "_invoke_rpc_builtin", "_invoke_rpc_python_udf", "_invoke_rpc_torchscript", "_invoke_remote_builtin",
            "_invoke_remote_python_udf", "_invoke_remote_torchscript", "_enable_jit_rref_pickle",
            "_disable_jit_rref_pickle",
        ):
            try:
                getattr(rpc, name)()
            except NotImplementedError as error:
                assert name in str(error), error
                print(str(error).partition("telegrad: ")[2])
        try:
            rpc._set_and_start_rpc_agent(object())
        except NotImplementedError as error:
            print(error)
        """
    )
    lines = shown.splitlines()
    assert len(lines) == 9
    assert all(lines)


def test_no_rref_goes_into_a_scripted_function(tmp_path: Path) -> None:
    shown = run_code(
        f"""
        import telegrad.compat
        telegrad.compat.install()
        import torch
        import torch.distributed.rpc as rpc
        options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/store")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        scripted = torch.jit.CompilationUnit("def f(x: RRef[Tensor]) -> Tensor:\\n    return x.to_here()\\n")
        try:
            scripted.f(rpc.RRef(torch.ones(1)))
        except RuntimeError as error:
            print(error)
        rpc.shutdown()
        """
    )
    assert "Expected a value of type 'RRef[Tensor]'" in shown
    assert "telegrad.rref.RRef" in shown


def test_an_rpc_in_a_scripted_function_is_warned_of(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import warnings
            import torch
            import torch.distributed.rpc as rpc

            def add(a: torch.Tensor) -> torch.Tensor:
                return a + 1

            def far(to: str) -> torch.Tensor:
                return rpc.rpc_sync(to, add, (torch.ones(2),))

            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.jit.script(far)
            print([str(warning.message) for warning in caught if "RPC" in str(warning.message)])
            """
        )
    )
    shown = run("-m", "telegrad.compat", script)
    assert "far makes an RPC from inside of TorchScript" in shown


def test_the_agent_and_the_groups_numbers(tmp_path: Path) -> None:
    shown = run_code(
        f"""
        import telegrad.compat
        telegrad.compat.install()
        import torch.distributed.rpc as rpc
        options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/store", num_worker_threads=5)
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        assert rpc._is_current_rpc_agent_set()
        print(rpc.get_worker_info(), rpc.get_rpc_timeout())
        rpc._set_rpc_timeout(7)
        print(rpc.get_rpc_timeout(), rpc._get_debug_info()["agent.thread_pool_size"], rpc.api._all_gather(3))
        try:
            rpc.get_worker_info("nobody")
        except RuntimeError as error:
            print(error)
        rpc.shutdown()
        assert not rpc._is_current_rpc_agent_set()
        """
    )
    info, numbers, unknown = shown.splitlines()
    assert info == "WorkerInfo(name='alone', id=0) 60.0"
    assert numbers == "7.0 5 {'alone': 3}"
    assert "could not find destination" in unknown


def test_device_maps_of_torchs_options(tmp_path: Path) -> None:
    """Wrong ones are refused at the start, and a device that none names, when a tensor is to be sent from it. torch's
    lazy device stands for a GPU."""
    shown = run_code(
        f"""
        import telegrad.compat
        telegrad.compat.install()
        import torch
        import torch._lazy.ts_backend
        import torch.distributed.rpc as rpc
        torch._lazy.ts_backend.init()
        torch.cuda.device_count = lambda: 1

        def start(path, **maps):
            options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/" + path)
            options.set_device_map("alone", maps)
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)

        try:
            start("first", **{{"cuda:1": "cuda:0"}})
        except ValueError as error:
            print(str(error).splitlines()[0], rpc.api._is_current_rpc_agent_set())
        start("second", cpu="cpu")
        print(rpc.api._get_current_rpc_agent()._get_device_map(rpc.get_worker_info()))
        print(rpc.rpc_sync("alone", torch.neg, args=(torch.ones(1),)))
        try:
            rpc.rpc_sync("alone", torch.neg, args=(torch.ones(1, device="lazy"),))
        except RuntimeError as error:
            print(error)
        rpc.shutdown()
        """
    )
    assert shown.splitlines() == [
        "Node alone has source devices with invalid indices in its device map for alone False",
        "{device(type='cpu'): device(type='cpu')}",
        "tensor([-1.])",
        "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before sending "
        "them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly configure device "
        "mapping. Request device mapping is not available for destination alone for device lazy:0 but received a "
        "tensor on that device.",
    ]
