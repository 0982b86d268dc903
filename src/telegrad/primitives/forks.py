"""Forks that users' code makes on a thread of a worker: the child must not go on with the worker's work.

In the child that thread is the only one. When it leaves the users' code it ends the process, as if the program ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn

from ..errors import TelegradError
from .current import thread


def leave(error: BaseException | None = None) -> NoReturn:
    """Ends this process with the exit code that Python would give it, if `error` is what was raised."""
    code, cause = 0, error
    while isinstance(cause, TelegradError):  # telegrad's own around what users' code raised while it was pickled, say
        cause = cause.__cause__
    if isinstance(cause, SystemExit):
        error = cause
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = error.code or 0
    elif error is not None:
        code = 1
        with contextlib.suppress(Exception):
            if isinstance(error, SystemExit):
                print(error.code, file=sys.stderr)
            else:
                traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def leave_if_orphan(error: BaseException | None = None) -> None:
    """Ends this process, if it is a fork that was made on this thread while a worker of the parent had it."""
    if thread.is_orphan:
        leave(error)


def _in_child() -> None:
    thread.is_orphan = thread.is_workers


os.register_at_fork(after_in_child=_in_child)
