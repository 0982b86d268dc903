"""On every thread that telegrad starts, torch's settings are those of the process, whatever ran there before."""

from __future__ import annotations

import ast
import ctypes
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import telegrad
from telegrad.primitives import torch_threads

PACKAGE = Path(telegrad.__file__).parent
STARTS = {"Thread", "start_new_thread", "ThreadPoolExecutor", "Timer"}
THREADS = 4
PATIENCE = 30.0

_barriers: dict[int, threading.Barrier] = {}


def omp_threads() -> int:
    """How many threads an operator uses that looks at nothing else, on this thread."""
    found = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line]
    return ctypes.CDLL(found[0]).omp_get_max_threads()


def omp_threads_together(number: int) -> tuple[str, int]:
    """The same, called at once on several threads."""
    here = omp_threads()
    _barriers.setdefault(number, threading.Barrier(THREADS)).wait(PATIENCE)
    return threading.current_thread().name, here


@pytest.fixture
def number_of_threads() -> Iterator[int]:
    """The number that torch.set_num_threads() was given, which is restored afterwards."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def starts(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in STARTS:
            yield node


def test_every_thread_is_prepared() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for call in starts(ast.parse(path.read_text())):
            found[f"{path.relative_to(PACKAGE)}: {ast.unparse(call)}"] = call
    assert len(found) >= 8
    unprepared = [where for where in found if "prepared(" not in where and "initializer=begin_thread" not in where]
    # It interrupts the main thread and ends; nothing else runs on it.
    assert unprepared == ["primitives/interrupts.py: _thread.start_new_thread(_press_again, ())"]


def test_a_fresh_thread_uses_as_many_threads_as_was_set(number_of_threads: int) -> None:
    torch.set_num_threads(3)
    found: list[int] = []
    thread = threading.Thread(target=torch_threads.prepared(lambda: found.append(omp_threads())))
    thread.start()
    thread.join(PATIENCE)
    assert found == [3]


def test_all_threads_of_a_worker_follow_the_last_number(server: telegrad.ForkServer) -> None:
    with telegrad.LocalCluster(["a"], server=server) as cluster:
        numbers = iter(range(100))
        for wanted in (1, 3, 2):  # 1 is what LocalCluster sets
            if wanted > 1:
                cluster.call("a", torch.set_num_threads, wanted)
            number = next(numbers)
            futures = [cluster.call_async("a", omp_threads_together, number) for _ in range(THREADS)]
            found = dict(future.wait() for future in futures)
            assert len(found) == THREADS
            assert set(found.values()) == {wanted}


def test_threads_follow_the_program_of_their_process(number_of_threads: int) -> None:
    below = torch.set_num_threads
    with telegrad.LocalCluster(["a"], transport="inproc") as cluster:
        for number, wanted in enumerate((number_of_threads, 3, 2), 1000):
            torch.set_num_threads(wanted)
            futures = [cluster.call_async("a", omp_threads_together, number) for _ in range(THREADS)]
            assert {count for _, count in (future.wait() for future in futures)} == {wanted}
        with pytest.raises(RuntimeError, match="positive"):
            torch.set_num_threads(0)
        assert torch.set_num_threads is not below
    assert torch.set_num_threads is below


def test_a_program_that_has_imported_the_function_by_its_name(number_of_threads: int, monkeypatch) -> None:
    """Before the worker starts, or while it runs; and afterwards it has torch's own."""
    below, made = torch.set_num_threads, [types.ModuleType(f"has_it_{when}") for when in ("before", "meanwhile")]

    def import_it(module: types.ModuleType) -> None:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec("from torch import set_num_threads", vars(module))

    import_it(made[0])
    with telegrad.LocalCluster(["a"], transport="inproc") as cluster:
        import_it(made[1])
        for number, (module, wanted) in enumerate(zip(made, (3, 2), strict=True), 2000):
            module.set_num_threads(wanted)
            futures = [cluster.call_async("a", omp_threads_together, number) for _ in range(THREADS)]
            assert {count for _, count in (future.wait() for future in futures)} == {wanted}
    assert [module.set_num_threads for module in (torch, torch._C, *made)] == [below] * 4


# -- what users' functions leave behind ---------------------------------------------------------------------


def flushes() -> tuple[bool, bool]:
    return (torch.tensor([1e-40]) * 1).item() == 0.0, torch.empty(0).is_meta


def leave_behind() -> None:
    torch.set_flush_denormal(True)
    torch.set_default_device("meta")


@telegrad.rpc.functions.async_execution
def leave_behind_in_a_callback() -> torch.futures.Future:
    return telegrad.rpc.rpc_async("b", flushes).then(lambda future: leave_behind())


@pytest.mark.parametrize("function", [leave_behind, leave_behind_in_a_callback])
def test_what_is_set_for_a_thread_ends_with_the_function(cluster, function) -> None:
    for _ in range(5):
        cluster.call("a", function)
        assert cluster.call("a", flushes) == (False, False)


def test_threads_have_the_denormals_of_the_one_that_started_their_worker() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        with telegrad.LocalCluster(["a"], transport="inproc") as cluster:
            torch.set_flush_denormal(False)
            assert [cluster.call("a", flushes) for _ in range(3)] == [(True, False)] * 3
            cluster.call("a", torch.set_flush_denormal, False)
            assert cluster.call("a", flushes) == (True, False)
    finally:
        torch.set_flush_denormal(False)
