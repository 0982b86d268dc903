"""Scripts as users write them: no main guard, everything in `__main__`, workers that do not run the script."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEAD = """
    import torch
    import telegrad
    from telegrad import rpc

    torch.set_num_threads(1)
"""


def run(text: str, tmp_path: Path, *, as_file: bool = True) -> None:
    """Runs a script, with warnings as errors; it asserts what is to be shown, and says so at its end."""
    source = textwrap.dedent(HEAD) + textwrap.dedent(text)
    path = tmp_path / "script.py"
    path.write_text(source)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path) if as_file else "-"],
        input="" if as_file else source,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "shown\n"
    assert done.stderr == ""


def test_a_parameter_server(tmp_path):
    text = """
        LEARNING_RATE = 0.5
        weights = torch.zeros(3)
        steps = 0

        def step(gradient):
            global weights, steps
            weights = weights - LEARNING_RATE * gradient
            steps += 1
            return weights

        def get():
            return weights, steps

        def train(rounds):
            for _ in range(rounds):
                rpc.rpc_sync("ps", step, args=(torch.ones(3),))
            return rpc.get_worker_info().name

        @rpc.functions.async_execution
        def later(gradient):
            return rpc.rpc_async("ps", step, args=(gradient,)).then(lambda future: future.wait() * 10)

        with telegrad.LocalCluster(["t1", "t2", "ps"]) as cluster:
            # Two workers that call a third share one namespace there, and the driver shares it too.
            assert [rpc.rpc_sync(t, train, args=(10,)) for t in ("t1", "t2", "t1", "t2")] == ["t1", "t2"] * 2
            found, count = rpc.rpc_sync("ps", get)
            assert count == 40
            assert found.tolist() == [-20.0] * 3
            assert steps == 0
            assert rpc.rpc_sync("t1", get)[1] == 0

            assert rpc.rpc_sync("t1", later, args=(torch.ones(3),)).tolist() == [-205.0] * 3

            LEARNING_RATE = 1.0  # is bound anew, so it travels; the server's weights stay as they are
            assert rpc.rpc_sync("ps", step, args=(torch.ones(3),)).tolist() == [-21.5] * 3
            assert rpc.rpc_sync("t1", train, args=(1,)) == "t1"
            assert rpc.rpc_sync("ps", get)[0].tolist() == [-22.5] * 3

            weights = torch.ones(3)
            assert rpc.rpc_sync("ps", get)[0].tolist() == [1.0] * 3
            assert rpc.rpc_sync("ps", get)[1] == 43
        print("shown")
    """
    run(text, tmp_path)


def test_classes(tmp_path):
    text = """
        import collections, dataclasses, enum, functools

        class Net(torch.nn.Module):
            made = 0

            def __init__(self):
                super().__init__()
                Net.made += 1
                self.layer = torch.nn.Linear(2, 2)

            def forward(self, x):
                return scaled(self.layer(x))

            @classmethod
            def count(cls):
                return cls.made

            @staticmethod
            def twice(x):
                return 2 * x

        def scaled(x):
            return x * FACTOR

        FACTOR = 2

        @dataclasses.dataclass
        class Batch:
            x: torch.Tensor
            color: "Color" = None

        class Color(enum.Enum):
            RED = 1

        Pair = collections.namedtuple("Pair", "a b")

        class OddError(Exception):
            def __init__(self, batch):
                super().__init__(batch)
                self.batch = batch

        class Counter:
            def __init__(self):
                self.n = 0

            def up(self):
                self.n += 1
                return self

        def forward(net, batch):
            assert type(batch) is Batch and batch.color is Color.RED and isinstance(net, Net)
            return Batch(net(batch.x), batch.color)

        def make():
            return Net()

        def fail(batch):
            raise OddError(batch)

        def pair(x):
            return Pair(x, [Color.RED])

        def over(name, function, *args):
            return rpc.rpc_sync(name, function, args=args)

        @functools.cache
        def cached(x):
            return Counter()

        def cached_twice(x):
            return cached(x) is cached(x)

        with telegrad.LocalCluster(["a", "b"]) as cluster:
            net, batch = Net(), Batch(torch.ones(2), Color.RED)
            methods = dict(vars(Net))
            for _ in range(3):
                result = cluster.call("a", forward, net, batch)
                assert type(result) is Batch and result.color is Color.RED
                assert torch.equal(result.x, net(batch.x))
                result = cluster.call("a", over, "b", forward, net, batch)
                assert type(result) is Batch and torch.equal(result.x, net(batch.x))
            assert {k: v for k, v in vars(Net).items() if k != "__slotnames__"} == methods  # home is untouched

            # A class's own state stays at the callee, until the origin changes the class.
            before = cluster.call("a", Net.count)
            assert type(cluster.call("a", make)) is Net
            assert type(cluster.call("a", make)) is Net
            assert cluster.call("a", Net.count) == before + 2
            assert Net.made == 1
            Net.made = 100
            assert cluster.call("a", Net.count) == 100
            Net.forward = lambda self, x: x
            assert torch.equal(cluster.call("a", forward, net, batch).x, batch.x)
            del Net.forward
            Net.forward = lambda self, x: scaled(x)
            FACTOR = 7
            assert torch.equal(cluster.call("a", forward, net, batch).x, 7 * batch.x)

            assert cluster.call("a", Net.twice, 4) == 8
            assert cluster.call("a", Counter().up).n == 1
            assert cluster.call("a", functools.partial(pair, 1)) == Pair(1, [Color.RED])
            assert type(cluster.call("a", pair, 1)) is Pair
            assert cluster.call("a", cached_twice, 1)
            assert cluster.call("a", type, batch) is Batch
            for worker in ("a", "b"):
                try:
                    cluster.call("a", over, worker, fail, batch)
                except OddError as error:
                    assert torch.equal(error.batch.x, batch.x)
                    assert "in fail" in str(error.__cause__) or "in over" in str(error.__cause__)
                else:
                    raise AssertionError
        print("shown")
    """
    run(text, tmp_path)


def test_without_a_file_as_in_a_notebook(tmp_path):
    text = """
        def cell(text):
            exec(text, globals())

        with telegrad.LocalCluster(["a", "b"]) as cluster:
            cell("def f(x): return x + offset")
            cell("offset = 1")
            assert cluster.call("a", f, 1) == 2
            cell("offset = 10")
            assert cluster.call("a", f, 1) == 11
            cell("def f(x): return -x")
            assert cluster.call("a", f, 1) == -1
            cell("class Thing:\\n    def go(self): return 'old'")
            thing = Thing()
            assert cluster.call("a", Thing.go, thing) == "old"
            cell("class Thing:\\n    def go(self): return 'new'")
            assert cluster.call("a", Thing().go) == "new"
            assert cluster.call("a", thing.go) == "old"
            assert cluster.call("a", lambda: [Thing().go(), f(2), rpc.rpc_sync("b", f, args=(3,))]) == ["new", -2, -3]
            assert cluster.call("driver", f, 4) == -4  # itself

            cell("def report(x): reports.append(x); return len(reports)")
            cell("reports = []")
            cell("def work(n): return [rpc.rpc_sync('driver', report, args=(i,)) for i in range(n)]")
            assert cluster.call("a", work, 3) == [1, 2, 3]  # called back, it is at home
            assert reports == [0, 1, 2]

            cell("import threading; lock = threading.Lock()")
            cell("def uses_lock(): return lock")
            try:
                cluster.call("a", uses_lock)
            except telegrad.errors.EncodeError as error:
                assert "its global 'lock', a lock" in str(error), error
            else:
                raise AssertionError
        print("shown")
    """
    run(text, tmp_path, as_file=False)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_in_a_process_that_multiprocessing_started(tmp_path, start):
    text = f"""
        import multiprocessing, warnings
        warnings.filterwarnings("ignore", message=".*fork.*")

        calls = 0

        def count():
            global calls
            calls += 1
            return calls

        class Thing:
            pass

        def main():
            with telegrad.LocalCluster(["a"]) as cluster:
                assert [cluster.call("a", count) for _ in range(3)] == [1, 2, 3]
                assert calls == 0
                assert type(cluster.call("a", Thing)) is Thing
                assert cluster.call("a", lambda: count()) == 4

        if __name__ == "__main__":
            process = multiprocessing.get_context("{start}").Process(target=main)
            process.start()
            process.join()
            assert process.exitcode == 0
            print("shown")
    """
    run(text, tmp_path)
