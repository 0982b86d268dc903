"""The commands: their arguments, their help, and which module does the work. Imports it only when it is asked for."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .output import Code, Stopped, error_console, stop

app = typer.Typer(
    help="Autograd that crosses machines: run programs on several workers, and see what they do.",
    epilog="Exit codes: 0 fine, 1 something is wrong, 2 wrong usage, 3 no group answers, 130 Ctrl-C. "
    "`telegrad COMMAND --help` has examples.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
AsJson = Annotated[bool, typer.Option("--json", help="The same as JSON.")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"telegrad {version('telegrad')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and end.")
    ] = False,
) -> None:
    pass


def _help(*paragraphs: str, examples: list[str]) -> str:
    """The text of --help. Lines of examples stay as they are."""
    return "\n\n".join([*paragraphs, "[bold]Examples[/]", "\n".join(f"  {line}" for line in examples)])


@contextlib.contextmanager
def _told(command: str) -> Iterator[None]:
    """Reports mistakes and Ctrl-C in a line, without a traceback."""
    try:
        yield
    except Stopped as error:
        stop(command, str(error), error.code)
    except KeyboardInterrupt:
        stop(command, "stopped; no process is left behind", Code.INTERRUPTED)


@app.command(
    help=_help(
        "Run a program as several processes on this machine, with torchrun.",
        "Each process gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and "
        "the rest), so [bold]telegrad.rpc.init_rpc(name)[/] needs no more than a name. Each line of output "
        "has its rank in front. When one process fails, all others are ended, and its last lines are shown again.",
        examples=[
            "telegrad run -n 4 train.py --steps 100",
            "telegrad run -n 2 -m package.train",
            "telegrad run -n 4 --no-prefix train.py > log.txt",
        ],
    ),
    context_settings={"allow_interspersed_args": False},
    epilog="Exit code: 0 when all processes ended with 0; else that of the first that failed (128 + n for signal n); "
    "130 after Ctrl-C; 2 for wrong usage.",
)
def run(
    script: Annotated[str, typer.Argument(help="A Python program; a module's name with -m.", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the program gets as it is.")] = None,
    count: Annotated[int, typer.Option("-n", "--processes", min=1, help="How many processes.")] = 2,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as with python -m.")] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where the group meets (MASTER_PORT); 0: any free port.")
    ] = 0,
    grace: Annotated[int, typer.Option(min=0, help="Seconds that a process has to end before it is killed.")] = 5,
    plain: Annotated[bool, typer.Option("--no-prefix", help="No rank in front of each line.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Do not say where the group meets.")] = False,
) -> None:
    with _told("run"):
        _check_program(script, module)
        listener = _listen(port)
        if not quiet:
            where = "{}:{}".format(*listener.getsockname())
            processes = "1 process" if count == 1 else f"{count} processes"
            error_console().print(f"[dim]{processes} that meet at {where}; to look at them: telegrad top {where}[/]")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank ${rank}] "
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(grace)  # older torchruns do not have it as an option
    options = [f"--nproc-per-node={count}", *([] if plain else ["--tee=3"]), *(["--module"] if module else [])]
    options += [script, *(arguments or [])]
    # In place of this process: signals and the exit code are torchrun's own. -P: torchrun imports nothing from the
    # current directory. It starts the program without -P.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "telegrad.cli.launch", str(listener.fileno()), *options])


def _check_program(script: str, module: bool) -> None:
    if module:
        package = script.partition(".")[0]  # from the current directory, too, as with python -m
        if find_spec(package) is None and PathFinder.find_spec(package, [os.getcwd()]) is None:
            raise Stopped(f"there is no module {script!r} on Python's path, or in {os.getcwd()}", Code.USAGE)
    elif not os.path.exists(script):
        hint = " (a module is run with -m)" if "/" not in script and not script.endswith(".py") else ""
        raise Stopped(f"there is no program {script!r} in {os.getcwd()}{hint}", Code.USAGE)


def _listen(port: int) -> socket.socket:
    try:
        listener = socket.create_server(("127.0.0.1", port), backlog=2048)
    except OSError as error:
        text = f"cannot use port {port}: {error.strerror}; choose another one, or leave --port out"
        raise Stopped(text) from error
    listener.set_inheritable(True)
    return listener


@app.command(
    help=_help(
        "Watch a running group: calls, bytes, latencies, contexts, passes and memory of each worker.",
        "It looks at any group, of fixed size or open, without joining it: no worker counts it or waits for it. "
        "Rates are over the last interval. q or Ctrl-C ends it. Where the output is no terminal it prints one table.",
        examples=[
            "telegrad top 127.0.0.1:29500",
            "telegrad top file:///tmp/meeting --interval 0.5",
            "telegrad top 127.0.0.1:29500 --once --json | jq '.workers[].calls_per_second'",
        ],
    ),
    epilog="Exit code: 0 when the group was seen (also when it has ended meanwhile); 1 when workers stop answering; "
    "2 for an address that makes no sense; 3 when no group answers there; 130 after Ctrl-C.",
)
def top(
    address: Annotated[
        str,
        typer.Argument(
            help="Where the group meets: HOST:PORT, tcp://HOST:PORT, file:///PATH or env://.", metavar="ADDRESS"
        ),
    ],
    interval: Annotated[float, typer.Option("-i", "--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look for one interval, print a plain table, and end.")] = False,
    as_json: AsJson = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds in which the group must answer.")] = 3.0,
    tcp: Annotated[
        bool, typer.Option("--tcp", help="Reach the workers over TCP. INSECURE: only where you trust everybody.")
    ] = False,
) -> None:
    from .top import watch

    with _told("top"):
        transport = "tcp" if tcp else "unix"
        raise typer.Exit(
            watch(address, interval=interval, once=once, as_json=as_json, timeout=timeout, transport=transport)
        )


@app.command(
    help=_help(
        "Say what on this machine would make telegrad fail or slow, and how to mend it.",
        "Versions, shared memory, limits, sockets, ports, clock, cores and settings; then a test: two "
        "workers, a call and a backward pass, compared with autograd in one process.",
        examples=["telegrad doctor", "telegrad doctor --json | jq '.findings[] | select(.status != \"ok\")'"],
    ),
    epilog="Exit code: 0 when telegrad works here; 1 when something would fail.",
)
def doctor(
    as_json: AsJson = False,
    quick: Annotated[
        bool, typer.Option("--no-test", help="Only look; start no workers and run no backward pass.")
    ] = False,
) -> None:
    from .doctor import examine

    with _told("doctor"):
        raise typer.Exit(examine(as_json=as_json, with_test=not quick))


@app.command(
    help=_help(
        "Sum up a profiler's trace: where the time went on each worker. Or merge several into one.",
        examples=[
            "telegrad trace step.json",
            "telegrad trace rank0.json rank1.json -o merged.json     and open merged.json in Perfetto",
            "telegrad trace step.json --json",
        ],
    ),
    epilog="Exit code: 0; 1 for a file that is cut short or is no trace; 2 for a file that is not there.",
)
def trace(
    files: Annotated[list[Path], typer.Argument(help="Traces that telegrad.profiler has written.", metavar="FILE...")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write all of them as one trace.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    from .trace import run_trace

    with _told("trace"):
        raise typer.Exit(run_trace(files, output, as_json=as_json))


@app.command(
    help=_help(
        "Measure telegrad beside torch.distributed.rpc on this machine, in about 20 seconds.",
        "An empty call, calls with 64 bytes and 1 MiB, and one call with a backward pass. In a checkout of the "
        "repository, scripts/bench has the benchmarks that take minutes.",
        examples=["telegrad bench --short", "telegrad bench --short --no-torch --json"],
    ),
    epilog="Exit code: 0; 1 when something could not be measured; 130 after Ctrl-C.",
)
def bench(
    short: Annotated[bool, typer.Option("--short", help="The short comparison, which is the only one.")] = True,
    without_torch: Annotated[bool, typer.Option("--no-torch", help="Measure telegrad alone.")] = False,
    as_json: AsJson = False,
) -> None:
    from .bench import measure

    with _told("bench"):
        raise typer.Exit(measure(with_torch=not without_torch, as_json=as_json))


@app.command(
    help=_help(
        "Train a small transformer over several processes, check its gradients, and write a report of it all.",
        examples=["telegrad demo", "telegrad demo --steps 20 --out /tmp/report --open"],
    ),
    epilog="Exit code: 0; 1 when gradients differ or something failed; 130 after Ctrl-C.",
)
def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Train for so many steps.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Train for about so long.")] = 60,
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the report goes.", metavar="DIR")] = Path(
        "telegrad-demo"
    ),
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
    open_report: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
) -> None:
    with _told("demo"):
        from ..demo import main

        raise typer.Exit(main(steps=steps, seconds=seconds, out=str(out), seed=seed, open_report=open_report))
