"""Ctrl-C at any moment.

The work runs on a thread of its own, and the main thread only waits, for the end of the work or for Ctrl-C. So no
exception is raised in the middle of anything. What Ctrl-C does is to end the other processes; whatever the work waits
for then fails, and it ends too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

from rich.console import Console

from ..cluster.forkserver import ForkServer
from ..errors import TelegradError
from ..events import logger

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
PATIENCE = 3.0  # seconds for the work to end, once the processes have

Work = Callable[[ForkServer], int]


def run(work: Work, console: Console) -> int:
    """Runs it to its end, or to Ctrl-C. Returns an exit code; no process is left in any case."""
    outcome: queue.SimpleQueue[int] = queue.SimpleQueue()  # its put() may be called by a handler of signals
    stopping = threading.Event()
    with _on_interrupt(lambda: outcome.put(INTERRUPTED)):
        with ForkServer() as server:

            def run_and_tell() -> None:
                try:
                    outcome.put(work(server))
                except Exception as error:
                    if not stopping.is_set():
                        _explain(error, console)
                    outcome.put(1)

            thread = threading.Thread(target=run_and_tell, name="demo", daemon=True)
            thread.start()
            code = _get(outcome)
            if code == INTERRUPTED:
                stopping.set()
                logger.addFilter(_nothing)  # that workers are gone is no news now
        thread.join(PATIENCE)
        logger.removeFilter(_nothing)
        if code == INTERRUPTED:
            Console().show_cursor(True)
            console.print("stopped; no process is left behind")
        if thread.is_alive():  # in a long computation, with nothing that is worth waiting for
            sys.stdout.flush()
            os._exit(code)
    return code


def _get(outcome: queue.SimpleQueue[int]) -> int:
    # The system may give a signal to any thread, and Python's handler then runs when the main thread next wakes up.
    while True:
        with contextlib.suppress(queue.Empty):
            return outcome.get(timeout=0.1)


def _nothing(_: logging.LogRecord) -> bool:
    return False


def _explain(error: Exception, console: Console) -> None:
    if isinstance(error, TelegradError | OSError):
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
    else:
        traceback.print_exception(error)


@contextlib.contextmanager
def _on_interrupt(do: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are none of our business there
        return
    before = signal.signal(signal.SIGINT, lambda *_: do())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
