"""`telegrad trace`: what the profiler has written, summed up, and several traces made into one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ..errors import TelegradError
from ..primitives.text import clean, clean_lines
from ..profiler import Summary, load, merge
from ..profiler.summary import TITLES
from .output import Code, Stopped, console, duration, error_console, size


def run_trace(files: list[Path], output: Path | None, *, as_json: bool) -> int:
    """Prints the summary of one or several traces, and writes them as one. A file that is no trace is told of and
    left out; the exit code is 1 then.

    Raises:
        Stopped: a file is not there, none is a trace, or the output cannot be written.
    """
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise Stopped(f"there is no file {', '.join(missing)}", Code.USAGE)
    if output is not None and output.resolve() in [file.resolve() for file in files]:
        raise Stopped(f"{output} is one of the traces; write to another file", Code.USAGE)
    good, traces = [], []
    for file in files:
        try:
            traces.append(load(file))
            good.append(file)
        except (TelegradError, OSError) as error:
            error_console().print(clean_lines(f"telegrad trace: {error}"), markup=False)
    if not good:
        raise Stopped("nothing is left to sum up")
    trace = traces[0] if len(good) == 1 else merge(good)
    if output is not None:
        try:
            trace.save(output)
        except OSError as error:
            raise Stopped(f"cannot write {output}: {error.strerror}") from error
    summary = trace.summary()
    if as_json:
        print(json.dumps(summary.to_dict(), indent=2))
    else:
        target = console()
        if not target.is_terminal:
            print(summary)
        elif target.width < max(map(len, str(summary).splitlines())):
            for line in narrow(summary):
                target.print(line, markup=False, no_wrap=True, overflow="ellipsis")
        else:
            target.print(summary)
        if output is not None:
            print(f"written: {output}, to be opened in Perfetto")
    return Code.FINE if len(good) == len(files) else Code.WRONG


def narrow(summary: Summary) -> Iterator[str]:
    """The summary for a terminal that its table does not fit: a few lines for each worker."""
    told = summary.to_dict()
    steps, length = max(1, told["steps"]), told["length"] or 1.0

    def line(title: str, time: float) -> str:
        return f"  {duration(time / steps / 1e6):>7} {time / length:>4.0%}  {title}"

    yield f"{duration(told['length'] / steps / 1e6)} a step"
    for name, worker in told["workers"].items():
        yield f"{clean(name)}, {size(worker['bytes_out'])} in {worker['messages_out']} messages"
        for state, title in TITLES.items():
            yield line(title, worker[state])
    yield "critical path"
    for link in told["critical_path"][:5]:
        yield line(clean(f"{link['worker']}: {link['name']}"), link["time"])
    for name, why in told["missing"].items():
        yield clean(f"{name} is missing: {why}")
