"""Users' pickling code that raises what ends threads and processes, and messages of kinds that are not known."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ends import End, encoded

import telegrad
from telegrad import errors, rpc
from telegrad.errors import DecodeError, EncodeError, RemoteError
from telegrad.messages import Envelope, Kind, Reply
from telegrad.primitives import current
from telegrad.primitives.current import current_worker
from telegrad.serialization.codec import KINDS, decode_envelope, not_understood
from telegrad.transport.base import Frames

ENDINGS = [SystemExit, KeyboardInterrupt, GeneratorExit]


def throw(kind: type[BaseException]) -> Any:
    raise kind("out of users' code")


class Bad:
    """Raises when it is pickled, or when it is unpickled."""

    def __init__(self, kind: type[BaseException], when: str) -> None:
        self.kind, self.when = kind, when

    def __reduce__(self) -> Any:
        return (throw, (self.kind,)) if self.when == "unpickled" else throw(self.kind)


class BadError(Exception):
    def __init__(self, kind: type[BaseException], when: str) -> None:
        super().__init__("a bad one")
        self.kind, self.when = kind, when

    __reduce__ = Bad.__reduce__

    def __str__(self) -> str:
        return throw(self.kind) if self.when == "shown" else "a bad one"

    def __copy__(self) -> Any:
        return throw(self.kind)


@pytest.fixture
def on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a thread of a worker sees itself."""
    monkeypatch.setattr(current.thread, "is_main", False)


def answer(link: Any, value: Any) -> Any:
    return link.far.encode(link.near, Kind.REPLY, Reply(value))


@pytest.mark.parametrize("kind", ENDINGS)
class TestOnAThreadOfTheWorker:
    @pytest.fixture(autouse=True)
    def _another_thread(self, on_another_thread: None) -> None: ...

    def test_encoding(self, link, kind):
        with pytest.raises(EncodeError, match=f"{kind.__name__}: out of users' code"):
            answer(link, Bad(kind, "pickled"))
        assert link.far.codec.first_unsendable([1, bad := Bad(kind, "pickled")], link.near.hello, track=False) is bad

    def test_decoding(self, link, kind):
        envelope, frames = answer(link, Bad(kind, "unpickled"))
        with pytest.raises(DecodeError, match=f"{kind.__name__}: out of users' code"):
            link.near.codec.decode(envelope, frames)

    @pytest.mark.parametrize("when", ["pickled", "unpickled", "shown"])
    def test_exceptions(self, link, kind, when):
        failure = link.far.codec.encode_exception(BadError(kind, when), "a traceback", link.near.hello)
        error = link.near.codec.decode_exception(failure, "a")
        assert isinstance(error, RemoteError if when != "shown" else BadError | RemoteError)
        assert "BadError" in failure.type_name

    def test_errors_of_creations(self, kind):
        table = telegrad.references.table.References(1, "a", SimpleNamespace(later=lambda seconds, task: lambda: None))
        entry = table._owned[5] = telegrad.references.entries.Owned(5, 1)
        table.set_error(5, BadError(kind, "pickled"))
        with pytest.raises(RemoteError, match="a bad one"):
            table.value_of(entry, 1.0)


class TestCtrlC:
    """On the main thread a KeyboardInterrupt out of users' code is the user's."""

    def test_encoding(self, link):
        bad = Bad(KeyboardInterrupt, "pickled")
        with pytest.raises(KeyboardInterrupt):
            answer(link, bad)
        with pytest.raises(KeyboardInterrupt):
            link.far.codec.first_unsendable([bad], link.near.hello, track=False)
        with pytest.raises(KeyboardInterrupt):
            link.far.codec.encode_exception(BadError(KeyboardInterrupt, "pickled"), "", link.near.hello)

    def test_decoding(self, link):
        envelope, frames = answer(link, Bad(KeyboardInterrupt, "unpickled"))
        with pytest.raises(KeyboardInterrupt):
            link.near.codec.decode(envelope, frames)
        failure = link.far.codec.encode_exception(BadError(KeyboardInterrupt, "unpickled"), "", link.near.hello)
        with pytest.raises(KeyboardInterrupt):
            link.near.codec.decode_exception(failure, "a")

    def test_anything_else_is_the_messages_error(self, link):
        with pytest.raises(EncodeError, match="SystemExit"):
            answer(link, Bad(SystemExit, "pickled"))


_levels: list[int] = []


class Notes:
    """Notes the thread's level of critical sections wherever users' code runs."""

    def __reduce__(self) -> Any:
        _levels.append(current.thread.critical)
        return note, ()


def note() -> None:
    _levels.append(current.thread.critical)


def test_users_code_runs_outside_of_critical_sections(link, monkeypatch):
    _levels.clear()
    monkeypatch.setattr(current.thread, "critical", 2)
    envelope, frames = answer(link, [Notes()])
    link.near.codec.decode(envelope, frames)
    assert current.thread.critical == 2
    assert _levels == [0, 0]


# -- in a cluster ------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[telegrad.LocalCluster]:
    options = telegrad.Options(rpc_timeout=30.0)
    with telegrad.LocalCluster(["a"], transport="inproc", options=options) as cluster:
        yield cluster


def give(kind: type[BaseException], when: str) -> Any:
    return Bad(kind, when)


def fail(kind: type[BaseException], when: str) -> None:
    raise BadError(kind, when)


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit])  # an interrupt may be decoded by the main thread
def test_calls_go_on_after_answers_that_cannot_be_had(pair, kind):
    with pytest.raises(EncodeError, match=kind.__name__):
        rpc.rpc_async("a", give, args=(kind, "pickled")).wait()
    for function, expected in ((give, DecodeError), (fail, RemoteError)):
        future = rpc.rpc_async("a", function, args=(kind, "unpickled"))
        done = future.then(lambda f: type(_error_of(f)))
        assert done.wait() is expected
    assert rpc.rpc_sync("a", abs, args=(-1,)) == 1


def _error_of(future: Any) -> BaseException | None:
    try:
        future.wait()
    except Exception as error:
        return error
    return None


# -- kinds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [0, max(Kind) + 1, 99, -1])
def test_a_message_of_an_unknown_kind(kind):
    assert kind not in KINDS
    assert f"is of kind {kind}" in str(not_understood(msgspec.msgpack.encode([kind, 1])))


@pytest.mark.parametrize("kind", list(Kind))
def test_all_kinds_are_known(kind):
    end = End(1)
    frames = encoded(end.codec, Envelope(kind, 1), Reply(1), end.hello)
    assert decode_envelope(frames.header).kind == kind
    assert kind in KINDS


def misbehave() -> None:
    (connection,) = current_worker()._peers.connections()
    connection.write(Frames(msgspec.msgpack.encode([99, 1]), [b"x"]), 5.0)


def test_a_peer_that_sends_an_unknown_kind_is_cut_off(pair, caplog):
    caplog.set_level(logging.CRITICAL, "telegrad")  # a record would keep the error, its frames and the worker
    with pytest.raises(errors.PeerLostError, match="kind 99"):
        rpc.rpc_sync("a", misbehave)
    assert len(pair.worker._pending) == 0
