"""The command line: `telegrad run`, `top`, `doctor`, `trace`, `bench` and `demo`.

    app.py       the commands, their options and help; imports what a command needs when it runs
    launch.py    run: torchrun, and which rank failed
    top.py       top: a running group, live (observer.py: asks its workers; views.py: the tables)
    doctor.py    doctor: what would go wrong on this machine (checks.py, selftest.py)
    bench.py     bench: calls and a pass beside torch's
    trace.py     trace: profiler traces, summed up and merged
    output.py    consoles, figures in words, exit codes

The rest of the package imports nothing from here, and no command imports torch unless it needs it.
"""

import sys

_TOOLS = {"typer", "rich", "matplotlib", "pygments", "pygraphviz"}  # the extra `tools`


def main() -> None:
    """The entry point: `telegrad ...` and `python -m telegrad ...`."""
    try:
        from .app import app

        app(prog_name="telegrad")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _TOOLS:
            raise
        sys.exit(f"telegrad: this command needs {error.name}, which is not installed: pip install 'telegrad[tools]'")
