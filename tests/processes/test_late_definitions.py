"""Definitions of `__main__` that another process of the same script has not got, or not yet: they go by value."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

PATIENCE = 60.0

START = """
    import os, threading

    from telegrad import errors, rpc

    calls, may_go_on = [], threading.Event()

    def note(x):
        calls.append(x)
        return len(calls)

    def go_on():
        may_go_on.set()

    def count():
        return len(calls)
"""

LATE = """
    OFFSET = 10

    def helper(x):
        return x + OFFSET

    def late(x):
        from __main__ import note  # the callee's own: it has that

        note(x)
        return helper(x)

    class Point:
        class Inner:
            def __init__(self, x):
                self.x = x

            @staticmethod
            def make(x):
                return Point.Inner(x)

        def __init__(self, x):
            self.x = x

        def double(self):
            return Point(self.x * 2)

    def check(to):
        global late, OFFSET

        assert rpc.rpc_sync(to, late, args=(1,)) == 11
        assert rpc.rpc_sync(to, count) == 1  # it has run once
        assert rpc.rpc_async(to, late, args=(2,)).wait() == 12
        assert rpc.remote(to, late, args=(3,)).to_here() == 13
        assert rpc.rpc_sync(to, count) == 3
        OFFSET = 20
        assert rpc.rpc_sync(to, late, args=(1,)) == 21  # bound anew
        assert rpc.rpc_sync(to, Point, args=(4,)).x == 4
        point = rpc.rpc_sync(to, Point.double, args=(Point(5),))
        assert type(point) is Point and point.x == 10
        assert rpc.remote(to, Point, args=(6,)).rpc_sync().double().x == 12
        assert rpc.rpc_sync(to, type, args=([Point.Inner(1)],)) is list
        assert type(rpc.rpc_sync(to, Point.Inner.make, args=(7,))) is Point.Inner
        futures = [rpc.rpc_async(to, late, args=(i,)) for i in range(20)]
        assert [future.wait() for future in futures] == [20 + i for i in range(20)]

        def late(x):
            return -x

        late.__qualname__ = "late"
        globals()["late"] = late
        assert rpc.rpc_sync(to, late, args=(1,)) == -1
        print("done")
"""


def run(path: Path, **env: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(path)], env={**os.environ, **env}, **pipes)


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    outs = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, err
            outs.append(out)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return outs


def script(tmp_path: Path, *parts: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text("\n".join(textwrap.dedent(part) for part in parts))
    return path


def test_definitions_after_init_rpc(tmp_path):
    """Rank 1 does not come to them before rank 0 has called them."""
    path = script(
        tmp_path,
        START,
        f"""
        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"w{{rank}}", rank=rank, world_size=2, init_method="file://{tmp_path}/store")
        if rank == 1:
            assert may_go_on.wait({PATIENCE})
        """,
        LATE,
        """
        if rank == 0:
            check("w1")
            rpc.rpc_sync("w1", go_on)
        rpc.shutdown()
        """,
    )
    assert finish([run(path, RANK=str(rank)) for rank in range(2)]) == ["done\n", ""]


def test_a_result_of_a_class_that_the_caller_has_not_got(tmp_path):
    path = script(
        tmp_path,
        START,
        f"""
        def make():
            assert has_it.wait({PATIENCE})
            return globals()["Late"]()

        has_it = threading.Event()
        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"w{{rank}}", rank=rank, world_size=2, init_method="file://{tmp_path}/store")
        if rank == 0:
            print(type(rpc.rpc_sync("w1", make)).__name__)

        class Late:
            pass

        has_it.set()
        rpc.shutdown()
        """,
    )
    outs = finish([run(path, RANK=str(rank)) for rank in range(2)])
    assert outs == ["Late\n", ""]


def test_definitions_under_the_guard_of_a_script_that_spawns(tmp_path):
    path = script(
        tmp_path,
        START,
        f"""
        def child():
            rpc.init_rpc("w1", rank=1, world_size=2, init_method="file://{tmp_path}/store")
            rpc.shutdown()
        """,
        "if __name__ == '__main__':\n" + textwrap.indent(textwrap.dedent(LATE), "    "),
        f"""
        if __name__ == "__main__":
            import multiprocessing

            process = multiprocessing.get_context("spawn").Process(target=child)
            process.start()
            rpc.init_rpc("w0", rank=0, world_size=2, init_method="file://{tmp_path}/store")
            check("w1")
            rpc.shutdown()
            process.join({PATIENCE})
            assert process.exitcode == 0
        """,
    )
    assert finish([run(path)]) == ["done\n"]


def test_what_neither_has_is_an_error(tmp_path):
    path = script(
        tmp_path,
        START,
        f"""
        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"w{{rank}}", rank=rank, world_size=2, init_method="file://{tmp_path}/store")
        if rank == 0:
            from telegrad.primitives.current import current_worker

            late = note
            late.__qualname__ = late.__name__ = "renamed"
            globals()["renamed"] = late
            current_worker().calls.definition_for = lambda *_: None
            try:
                rpc.rpc_sync("w1", late, args=(1,))
            except errors.DecodeError as error:
                print("has no attribute 'renamed'" in str(error))
        rpc.shutdown()
        """,
    )
    assert finish([run(path, RANK=str(rank)) for rank in range(2)]) == ["True\n", ""]


def test_asking_for_a_definition_is_part_of_the_calls_time_limit(tmp_path):
    """The callee has answered with what its caller has not got, and does not say what that is."""
    path = script(
        tmp_path,
        START,
        f"""
        def make():
            assert has_it.wait({PATIENCE})
            return globals()["Late"]()

        def has_it_set():
            return has_it.wait({PATIENCE})

        has_it = threading.Event()
        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"w{{rank}}", rank=rank, world_size=2, init_method="file://{tmp_path}/store")
        if rank == 1:
            from telegrad.primitives.current import current_worker

            class Late:
                pass

            calls, tells = current_worker().calls, current_worker().calls.definition_for
            calls.definition_for = lambda *asked: (may_go_on.wait(5.0), tells(*asked))[1]
            has_it.set()
        else:
            assert rpc.rpc_sync("w1", has_it_set)
            try:
                rpc.rpc_sync("w1", make, timeout=0.5)
            except errors.CallTimeoutError:
                print("in time")
            rpc.rpc_sync("w1", go_on)
            print(type(rpc.rpc_sync("w1", make)).__name__)
        rpc.shutdown()
        """,
    )
    outs = finish([run(path, RANK=str(rank)) for rank in range(2)])
    assert outs == ["in time\nLate\n", ""]
