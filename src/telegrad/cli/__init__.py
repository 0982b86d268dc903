"""The command line: `telegrad run`, `top`, `doctor`, `trace`, `bench` and `demo`.

    app.py          the commands, their options and help; imports what a command needs when it runs
    launcher.py     run: processes with torchrun's variables (ranks.py: one of them; keeper.py: nothing outlives it)
    top.py          top: what a running group does (views.py: its tables; observing.py, beside the core, looks)
    doctor.py       doctor: what would go wrong on this machine (checks.py, selftest.py)
    comparison.py   bench: calls and a pass beside torch's
    trace.py        trace: profiler traces, summed up and merged
    figures.py      figures in words
    output.py       consoles, and how a command ends that cannot go on

Nothing here is imported by the rest of the package, and no command imports torch unless it needs it.
"""


def main() -> None:
    """The entry point: `telegrad ...` and `python -m telegrad ...`."""
    from .app import app

    app(prog_name="telegrad")
