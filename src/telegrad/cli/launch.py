"""`telegrad run`: torchrun for one machine, with one line at the end that says which rank failed.

`python -m telegrad.cli.launch FD TORCHRUN-ARGUMENTS` is the process that `telegrad run` becomes: signals reach torchrun
itself, which passes them on to the ranks. FD is a socket that listens where the group is to meet. The store is served
there, and torchrun, which would open the port on every interface, uses the store that its process has (multi_tenant).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":  # until torchrun handles signals, there is nothing to end
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

_LINES_SHOWN = 30  # of the failed rank's stderr


def main(fd: int, arguments: list[str]) -> int:
    """Runs torchrun. Returns 0, the exit code of the rank that failed first, or 128 + n after signal n."""
    with socket.socket(fileno=os.dup(fd)) as listener:
        host, port = listener.getsockname()
    store = TCPStore(host, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=fd)
    where = [f"--master-addr={host}", f"--master-port={store.port}"]
    logging.disable(logging.ERROR)  # the verdict below says what torchrun would
    with tempfile.TemporaryDirectory(prefix="telegrad-run-") as logs:
        try:
            run(parse_args([*where, "--log-dir", logs, *arguments]))
        except ChildFailedError as error:
            return _explain(error, Path(logs))
        except SignalException as error:
            if error.__context__ is None:  # the first one
                with contextlib.suppress(SignalException):
                    _end_ranks(error.sigval)
            name = "Ctrl-C" if error.sigval == signal.SIGINT else signal.Signals(error.sigval).name
            _say(f"{name}; all processes have ended")
            return 128 + error.sigval
        finally:
            _signal_ranks(signal.SIGKILL)  # a second signal ends torchrun while it still waits for them
    return 0


def _explain(error: ChildFailedError, logs: Path) -> int:
    rank, failure = error.get_first_failure()
    code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    ended = f"exit code {code}"
    if failure.exitcode < 0:
        ended = f"{signal.Signals(-failure.exitcode).name} ({ended})"
    _say(f"rank {rank} failed with {ended}; the others were ended")
    for written in logs.glob(f"*/attempt_0/{failure.local_rank}/stderr.log"):
        print(*written.read_text(errors="replace").splitlines()[-_LINES_SHOWN:], sep="\n", file=sys.stderr)
    return code


def _end_ranks(number: int) -> None:
    """Passes a signal on to the ranks, and waits for them. torchrun has done so, unless the signal came before it knew
    them all."""
    _signal_ranks(number)
    deadline = time.monotonic() + float(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    with contextlib.suppress(ChildProcessError):  # there are no more
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.01)


def _signal_ranks(number: int) -> None:
    for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
        with contextlib.suppress(ProcessLookupError):
            try:
                os.killpg(pid, number)  # each rank leads a process group
            except ProcessLookupError:
                os.kill(pid, number)  # as soon as it has begun


def _say(text: str) -> None:
    print(f"telegrad run: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
