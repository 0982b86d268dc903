"""Every error that telegrad raises on purpose.

    TelegradError (RuntimeError)
    ├── NotStartedError          a call before init_rpc() or after shutdown()
    ├── AlreadyStartedError      init_rpc() a second time
    ├── UnknownWorkerError       no worker of that name or id in the group (also ValueError)
    ├── NameTakenError           a live worker already has that name
    ├── RendezvousError          the store cannot be reached, or the others did not come
    ├── ClusterError             a child of LocalCluster did not start, or ended by itself
    ├── CallTimeoutError         a call outlived its deadline (also TimeoutError)
    ├── PeerLostError            the worker behind a call is gone (also ConnectionError)
    ├── FinaliserError           a call that would wait, made by a finaliser that the collector ran inside of telegrad
    ├── ValueGoneError           a handle to a value that is gone, with its last holder
    ├── OptimizerError           something failed on some owners of parameters
    ├── GradientError            a backward pass that cannot be run as asked for
    │   ├── UnknownContextError  no such context here: it was never known, or it has ended
    │   └── BackwardError        a backward pass that failed, on this worker or another
    ├── DrawingError             a picture that cannot be drawn here: no pygraphviz
    ├── RemoteError              a remote exception whose own type cannot be rebuilt here
    ├── TraceError               a file that is no trace, or only the beginning of one
    ├── MessageError
    │   ├── EncodeError          something in a message cannot be pickled
    │   ├── DecodeError          a message arrived that cannot be rebuilt here
    │   │   └── OutOfMemoryError a worker has no memory for a message (also MemoryError)
    │   └── TooLargeError        a message over Options.max_message_bytes
    ├── HandedOverError          a write that was given up in the middle of a message, which still arrives (internal)
    └── TransportError (ConnectionError)
        ├── AddressError         an address that cannot be listened on or understood
        ├── ConnectError         no answer at an address, or the peer refused
        │   └── NoRouteError     no transport that both workers were told to use leads there
        ├── ConnectionClosedError  the connection ended, politely or not
        └── ProtocolError        bytes that no telegrad worker would send
            └── VersionError     the peer speaks another wire version

A remote exception arrives as its own type where that type can be rebuilt; its `__cause__` is then a
`RemoteTraceback`, which prints the traceback of the worker where it was raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TelegradError(RuntimeError):
    """The root of the tree. A RuntimeError, since that is what programs written for torch catch."""


def text_of(error: BaseException) -> str:
    """An exception's text, whatever its class does; its type where it has none."""
    try:
        return str(error) or type(error).__name__
    except BaseException as reason:  # its class may raise anything, and this must not
        return f"{type(error).__name__} (its text cannot be had: {type(reason).__name__})"


class NotStartedError(TelegradError):
    pass


class AlreadyStartedError(TelegradError):
    pass


class UnknownWorkerError(TelegradError, ValueError):
    pass


class NameTakenError(TelegradError):
    pass


class RendezvousError(TelegradError):
    no_answer = False  # whether the store itself has failed


class ClusterError(TelegradError):
    pass


class CallTimeoutError(TelegradError, TimeoutError):
    pass


class PeerLostError(TelegradError, ConnectionError):
    worker_id = -1  # of the worker that is gone, where it is known


class FinaliserError(TelegradError):
    """A call that would wait, made by a `__del__` that the garbage collector ran in the middle of telegrad's code."""


class ValueGoneError(TelegradError):
    """The value that an RRef refers to is gone: a worker was lost while it handed the RRef on."""


class OptimizerError(TelegradError):
    """Something failed on some owners of parameters. What the others did stays done.

    `errors` has the error of each owner that failed, by its name; `done` the names of the others.
    """

    def __init__(self, what: str, errors: Mapping[str, BaseException], done: Sequence[str]) -> None:
        told = "; ".join(f"{name!r}: {type(e).__name__}: {text_of(e)}" for name, e in errors.items())
        super().__init__(
            f"{what} failed on {len(errors)} of {len(errors) + len(done)} owners of parameters: {told}. "
            f"It is done on: {list(done)}"
        )
        self.what = what
        self.errors = dict(errors)
        self.done = tuple(done)

    def __reduce__(self) -> Any:
        return OptimizerError, (self.what, self.errors, self.done)


class GradientError(TelegradError):
    pass


class UnknownContextError(GradientError):
    pass


class BackwardError(GradientError):
    """A failed backward pass. It begins as torch's does, `Error on Node <id>: <message>`; the original exception
    is its `__cause__`."""

    def __init__(self, text: str, worker: str = "", worker_id: int = -1) -> None:
        super().__init__(text)
        self.worker = worker
        self.worker_id = worker_id


class DrawingError(TelegradError):
    pass


class RemoteError(TelegradError):
    """Stands for an exception of another worker whose type cannot be rebuilt here."""


class TraceError(TelegradError):
    pass


class MessageError(TelegradError):
    pass


class EncodeError(MessageError):
    pass


class DecodeError(MessageError):
    pass


class OutOfMemoryError(DecodeError, MemoryError):
    """A worker had no memory for one message. The connection goes on, and so does everything else."""


class TooLargeError(MessageError):
    pass


class HandedOverError(TelegradError, TimeoutError):
    """The time of a write is over in the middle of a message; another thread writes the rest. `interrupt` is what ended
    the wait instead, if it was not the time."""

    interrupt: BaseException | None = None


class TransportError(TelegradError, ConnectionError):
    pass


class AddressError(TransportError):
    pass


class ConnectError(TransportError):
    pass


class NoRouteError(ConnectError):
    """Two workers have no transport in common that leads from one to the other. The text says what to set on which."""


class ConnectionClosedError(TransportError):
    pass


class ProtocolError(TransportError):
    pass


class VersionError(ProtocolError):
    pass


class RemoteTraceback(Exception):
    """The `__cause__` of an exception that was raised on another worker: prints the traceback from there."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text

    def __str__(self) -> str:
        return f"on worker {self.worker!r}:\n{self.text}"
