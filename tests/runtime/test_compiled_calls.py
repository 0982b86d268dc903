"""torch.compile breaks its graph at telegrad's calls, and what it compiles computes the same.

In a process of its own: dynamo stays in a process once it was imported.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = """
    import sys
    import torch
    import telegrad
    from telegrad import autograd, rpc

    assert "torch._dynamo" not in sys.modules, "importing telegrad must not import dynamo"

    class Scale:
        def __init__(self):
            self.factor = torch.full((2,), 3.0)

        def forward(self, x):
            return x * self.factor

    def sync(x):
        return rpc.rpc_sync("a", torch.add, args=(x * 2, 1.0)).sin()

    def later(x):
        future = rpc.rpc_async("a", torch.add, args=(x * 2, 1.0))
        return future.then(lambda done: done.wait() + 1).wait().sin() + future.wait()

    def created(x):
        return rpc.remote("a", torch.add, args=(x * 2, 1.0)).to_here().sin()

    def methods(x):
        rref = rpc.remote("a", Scale)
        found = rref.rpc_sync().forward(x * 2).sin() + rref.rpc_async().forward(x).wait()
        return found + rref.remote().forward(x).to_here()

    def own(x):
        rref = rpc.RRef(x * 2)
        return rref.local_value() + rref.to_here()

    def gradients(x):
        with autograd.context() as context:
            loss = rpc.rpc_sync("a", torch.mul, args=(x * 2, 3.0)).sum()
            autograd.backward(context, [loss])
            return autograd.get_gradients(context)[x] * 2

    def some_gradients(x):
        with autograd.context() as context:
            loss = rpc.rpc_async("a", torch.mul, args=(x * 2, 3.0)).wait().sum()
            return autograd.grad(context, [loss], [x])[0] * 2

    with telegrad.LocalCluster(["a"], transport="inproc"):
        for backend in ("eager", "aot_eager"):
            for function in (sync, later, created, methods, own, gradients, some_gradients):
                x = torch.arange(2.0, requires_grad="gradients" in function.__name__)
                expected = function(x)
                compiled = torch.compile(function, backend=backend)
                for _ in range(2):
                    torch.testing.assert_close(compiled(x), expected)
                assert torch._dynamo.utils.counters["graph_break"], function
                torch._dynamo.reset()
                torch._dynamo.utils.counters.clear()
    print("done")
"""


def test_calls_break_the_graph() -> None:
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "done\n"
