"""Group: the workers that find each other in one of torch's stores, by these keys.

    group                a random name; connections between different groups are refused
    size                 how many workers it has
    ids                  a counter: the next worker id
    present              how many workers have joined a file and not left; "ended" once the last one has left, who
                         removes it
    name/<name>          the id of the worker that has the name
    rank/<rank>          the id of the worker that has the rank (groups of a fixed size)
    incarnations/<rank>  how many workers have had it
    failed/<rank>        why the worker of that rank could not start
    member/<id>          its Member entry
    <barrier>/<rank>     set when that rank has arrived there
    <topic>/<rank>       what that rank has said to all

Others may write to the store, too: a value that makes no sense is a RendezvousError that names its key, texts are made
harmless for terminals, and the name and id of an entry are compared with what the worker itself tells (peers.py).

A store's client blocks all its users while it waits for a key, so a worker that waits polls instead. Each request has
a time limit (see store.py).
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ..errors import NameTakenError, RendezvousError
from ..events import logger
from ..messages import MAX_WORKER_ID, Member
from ..primitives import clock
from ..primitives.interrupts import interruptible
from ..primitives.text import check_name, clean
from .address import first_line
from .file import file_of
from .store import Deadline, StoreClient, no_answer

Value = TypeVar("Value")

_PREFIX = "telegrad/"
_NEVER = "\x00never"
_ENDED = "ended"
_LONGEST_TEXT = 2000  # bytes of a text in the store that are shown
_LEAVING = 1.0  # seconds that leaving a group may take
_FIRST_PAUSE = 1e-3  # seconds


def this_host() -> str:
    """Equal for two processes that can reach each other by unix socket: same kernel, user and processes."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.getuid()}/{os.readlink('/proc/self/ns/pid')}"


class Group:
    """The workers that share a store, as one of them sees it. Methods that ask the store take a time limit in seconds;
    by default that of the start-up.

    The last worker to leave removes the file that the store is in, if `removes_file`. Where torch has opened it, torch
    does so, once nothing uses it: the program may have more than this group in it.
    """

    def __init__(self, store: Any, world_size: int | None, timeout: float, *, removes_file: bool = True) -> None:
        self._client = StoreClient(PrefixStore(_PREFIX, store))
        self.world_size = world_size
        self._timeout = timeout
        self._file = file_of(store)
        self._removes_file = removes_file and bool(self._file)
        self._is_counted = False  # in "present"
        self._published = b""  # this worker's entry
        self.dead: set[int] = set()  # ranks of which this worker has found, at its end, that they have died
        try:
            self.name = self._agree()
        except BaseException:
            self.let_go()
            raise

    def _agree(self) -> str:
        """The group's name. The first worker to come decides on the name and the size; the size must be the same for
        all."""
        until = self._until(None)
        if self._removes_file:
            self._count_in(until)
        name = self._compare_set("group", "", uuid.uuid4().hex, until)
        size = "no fixed size" if self.world_size is None else f"{self.world_size} workers"
        if (agreed := self._compare_set("size", "", size, until)) != size:
            raise RendezvousError(
                "RPC group mixes statically and dynamically initialized members which is not supported. Or it mixes "
                f"sizes: it has {clean(agreed)}, and this worker is to join a group of {size}; give all the same "
                "world_size"
            )
        return name

    def _count_in(self, until: Deadline) -> None:
        if (self._get("present", until) or b"").startswith(_ENDED.encode()):
            raise RendezvousError(
                f"the group that met at file://{self._file} has just ended; start again, or remove the file"
            )
        self._add("present", 1, until)
        self._is_counted = True

    def _until(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    def _ask(self, until: Deadline, method: str, *args: Any) -> Any:
        return self._carry_out(until, f"{method} {args[0]}", lambda store: getattr(store, method)(*args))

    def _carry_out(self, until: Deadline, what: str, request: Callable[[Any], Any]) -> Any:
        if self._file and not os.path.exists(self._file):  # torch would make it anew
            raise no_answer(f"the file {self._file!r}, where the group has met, is gone; has the group ended?")
        try:
            return self._client.ask(request, until)
        except RendezvousError:
            raise
        except Exception as error:
            raise no_answer(
                f"the group's store does not answer: {first_line(error)}; has the process that serves it ended? "
                f"(the request: {clean(what)})"
            ) from None  # its text has pages of C++ frames, which a traceback would show

    def _get(self, key: str, until: Deadline) -> bytes | None:
        # Not get(), which waits for a key that is not there, and keeps all others from the store meanwhile. Compared
        # with a value that no key ever has, nothing is set, and the key's own value comes back.
        found: bytes = self._ask(until, "compare_set", key, _NEVER, _NEVER)
        return None if found == _NEVER.encode() else found

    def _compare_set(self, key: str, expected: str, desired: str, until: Deadline) -> str:
        """Sets the key if it is as expected (empty: not there); what it is then."""
        return self._text(key, self._ask(until, "compare_set", key, expected, desired))

    def _add(self, key: str, amount: int, until: Deadline) -> int:
        if (value := self._get(key, until)) is not None:
            self._number(key, value)  # add() ends the connection with the store if the value is no number
        return int(self._ask(until, "add", key, amount))

    # -- what the store holds, which others may have written ------------------------------------------

    def _text(self, key: str, value: bytes) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise self.spoilt(key, value) from None

    def _number(self, key: str, value: bytes) -> int:
        if not value.isdigit() or len(value) > 20:
            raise self.spoilt(key, value)
        return int(value)

    def spoilt(self, key: str, value: bytes, why: str = "") -> RendezvousError:
        """Makes the error for a value of the store that makes no sense."""
        return RendezvousError(
            f"the key {clean(key)} of the group's store makes no sense{why and f' ({clean(why)})'}: {value[:80]!r}; "
            "something else writes to the store: meet at another address, that others cannot write to"
        )

    def decode(self, key: str, value: bytes, type: type[Value]) -> Value:
        """Decodes a value of the store.

        Raises:
            RendezvousError: it makes no sense; names the key.
        """
        try:
            return msgspec.msgpack.decode(value, type=type)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self.spoilt(key, value, str(error)) from None

    # -- joining and leaving ---------------------------------------------------------------------------

    def new_id(self, rank: int) -> int:
        """A worker id that was never used in this group. The first to have a rank has the rank as its id."""
        until = self._until(None)
        if self.world_size is not None:
            if not 0 <= rank < self.world_size:
                raise RendezvousError(f"rank {rank} is not within world_size {self.world_size}; ranks start at 0")
            if self._add(f"incarnations/{rank}", 1, until) == 1:
                return rank
        id = self._add("ids", 1, until) - 1 + (self.world_size or 0)
        if id > MAX_WORKER_ID:
            raise RendezvousError(f"this group has had {MAX_WORKER_ID} workers; start a new one")
        return id

    def claim(self, name: str, id: int, is_alive: Callable[[Member], bool]) -> None:
        """Takes the name, also from a worker that died with it.

        Raises:
            NameTakenError: a live worker has it.
            RendezvousError: the store does not answer, or is what is left of a group that has ended.
        """
        if self._file and self.world_size is not None and id >= self.world_size:
            self._check_file(is_alive)
        joining = self._until(None)
        expected = ""
        while True:
            until = self._until(None)
            owner = self._compare_set(f"name/{name}", expected, str(id), until)
            if owner == str(id):
                return
            member = self._named(name, owner.encode(), until) if owner else None
            if owner and member is None and joining.left():  # it claimed the name and is about to join
                interruptible(time.sleep, 0.01)
                continue
            if member is not None and is_alive(member):
                raise NameTakenError(
                    f"worker name {name!r} is not unique: a live worker with id {owner} has it; choose another"
                )
            expected = owner

    def _check_file(self, is_alive: Callable[[Member], bool]) -> None:
        """Of the first workers of a group of fixed size none may be left: then this file was left behind by them."""
        if not any(map(is_alive, self.members())):
            raise RendezvousError(
                f"the file {self._file!r} was left behind by a group of {self.world_size} workers, of which none lives "
                "any more; remove it, or meet at another one"
            )

    def publish(self, member: Member) -> None:
        """Tells the others where this worker is.

        Raises:
            RendezvousError: the store does not answer, or its counter of ids was set back.
        """
        until = self._until(None)
        entry, key = msgspec.msgpack.encode(member), f"member/{member.id}"
        if (found := self._ask(until, "compare_set", key, self._published, entry)) != entry:
            raise self.spoilt(key, found, f"id {member.id} was given out twice; this worker is {member.name!r}")
        self._published = entry
        if member.rank >= 0:
            self._ask(until, "set", f"rank/{member.rank}", str(member.id))
            if member.id != member.rank:  # it takes the place of one that has left
                self._ask(until, "delete_key", f"left/{member.rank}")

    def fail(self, rank: int, reason: str) -> None:
        """Tells the workers that wait for this rank that it does not come."""
        if self.world_size is not None:
            self._ask(self._until(_LEAVING), "set", f"failed/{rank}", reason)

    def leave(self, member: Member, *, tell: bool) -> None:
        """Frees the name, if the others are to be told, and lets go of the store. Takes a second at most.

        The store may be gone by now; then there is no worker left to tell.
        """
        until = self._until(_LEAVING)
        try:
            if tell and member.rank >= 0:
                self._ask(until, "set", f"left/{member.rank}", b"1")
            if tell:
                self._compare_set(f"name/{member.name}", str(member.id), "", until)
            if tell and self._published:
                self._ask(until, "delete_key", f"member/{member.id}")
        except RendezvousError as error:
            logger.debug("worker %r left its group without a word: %s", member.name, str(error))
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Never uses the store again: one that this process serves ends with that. The last worker to let go of a file
        removes it. Any number of times."""
        counted, self._is_counted = self._is_counted, False
        if counted:
            with contextlib.suppress(RendezvousError, FileNotFoundError):  # a fork's store is closed
                self._count_out(self._until(_LEAVING))
        self._client.close()

    def _count_out(self, until: Deadline) -> None:
        if self._add("present", -1, until):
            return
        ranks = range(self.world_size or 0)  # those that are yet to come must find why the others have left
        if any(self._get(f"rank/{rank}", until) is None for rank in ranks):
            return
        end = f"{_ENDED} {uuid.uuid4().hex}"
        if self._compare_set("present", "0", end, until) == end:
            os.unlink(self._file)  # whoever opens it until here finds that the group has ended

    # -- looking ---------------------------------------------------------------------------------------

    def _member(self, id: int, until: Deadline) -> Member | None:
        key = f"member/{id}"
        if (data := self._get(key, until)) is None:
            return None
        member = self.decode(key, data, Member)
        try:
            check_name(member.name)
        except ValueError as error:
            raise self.spoilt(key, data, str(error)) from None
        if member.id != id or not all(text.isprintable() for text in (member.host, *member.addresses)):
            raise self.spoilt(key, data)
        return member

    def _named(self, name: str, id: bytes, until: Deadline) -> Member | None:
        """The member that the key of a name leads to."""
        key = f"name/{name}"
        member = self._member(self._number(key, id), until)
        if member is not None and member.name != name:
            raise self.spoilt(key, id, f"the worker with that id is {member.name!r}")
        return member

    def find(self, to: str | int, timeout: float | None = None) -> Member | None:
        """The member of that name or id.

        Raises:
            RendezvousError: the store does not answer in time, or what it holds makes no sense.
        """
        until = self._until(timeout)
        if isinstance(to, int):
            return self._member(to, until)
        id = self._get(f"name/{to}", until)
        return self._named(to, id, until) if id else None

    def of_rank(self, rank: int, timeout: float | None = None) -> Member | None:
        """The newest member of that rank; None for one that has not joined yet, or has left."""
        until = self._until(timeout)
        id = self._get(f"rank/{rank}", until)
        return None if id is None else self._member(self._number(f"rank/{rank}", id), until)

    def members(self, timeout: float | None = None) -> list[Member]:
        """All members, by id."""
        until = self._until(timeout)
        count = self._number("ids", self._get("ids", until) or b"0") + (self.world_size or 0)
        return [member for id in range(min(count, MAX_WORKER_ID + 1)) if (member := self._member(id, until))]

    def wait_for_all(self) -> list[Member]:
        """Waits until every rank has joined.

        Raises:
            RendezvousError: some did not come in time, or could not join; it names their ranks.
        """
        assert self.world_size is not None
        missing = set(range(self.world_size))

        def all_here() -> bool:
            until = self._until(None)
            missing.difference_update([r for r in missing if self._get(f"rank/{r}", until) is not None])
            for rank in missing:
                self._check_not_failed(rank, until)
            return not missing

        if not poll_until(all_here, self._timeout):
            raise RendezvousError(
                f"ranks {sorted(missing)} of {self.world_size} did not join within {self._timeout:.0f} s; "
                "were they started, with the same address and world_size?"
            )
        return self.members()

    def _check_not_failed(self, rank: int, until: Deadline) -> None:
        if (reason := self._get(f"failed/{rank}", until)) is not None:
            told = clean(reason[:_LONGEST_TEXT].decode(errors="backslashreplace"))
            raise RendezvousError(f"rank {rank} could not join the group: {told}")

    # -- all together ----------------------------------------------------------------------------------

    def exchange(self, topic: str, member: Member, said: bytes) -> dict[str, bytes]:
        """Says something to every rank, and returns what all have said, in order of their ranks and by the store's
        keys. A worker that takes the place of one that has left waits for no other, and hears those that have said
        something.

        Raises:
            RendezvousError: some did not say anything in time, or could not join; it names their ranks.
        """
        assert self.world_size is not None
        self._ask(self._until(None), "set", f"{topic}/{member.rank}", said)
        heard: dict[int, bytes] = {}

        def all_said() -> bool:
            until = self._until(None)
            for rank in range(self.world_size or 0):
                if rank not in heard and (found := self._get(f"{topic}/{rank}", until)) is not None:
                    heard[rank] = found
                elif rank not in heard:
                    self._check_not_failed(rank, until)
            return len(heard) == self.world_size or member.id != member.rank

        if not poll_until(all_said, self._timeout):
            missing = sorted(set(range(self.world_size)) - set(heard))
            raise RendezvousError(f"ranks {missing} have joined, and did not say {topic} within {self._timeout:.0f} s")
        return {f"{topic}/{rank}": heard[rank] for rank in sorted(heard)}

    def arrive(self, barrier: str, rank: int, timeout: float | None = None) -> None:
        self._ask(self._until(timeout), "set", f"{barrier}/{rank}", b"1")

    def arrived(self, barrier: str, ranks: Sequence[int], timeout: float | None = None) -> tuple[int, list[int]]:
        """Looks, rank by rank, who has arrived there or has left the group, as far as to the first that did neither.
        Returns how many come before that one, and which of these have left."""

        def look(store: Any) -> tuple[int, list[int]]:
            left: list[int] = []
            for count, rank in enumerate(ranks):
                if not store.check([f"{barrier}/{rank}"]):
                    if not store.check([f"left/{rank}"]):
                        return count, left
                    left.append(rank)
            return len(ranks), left

        found: tuple[int, list[int]] = self._carry_out(self._until(timeout), f"check {barrier}", look)
        return found


def check_same_name(member: Member, name: str) -> None:
    """Compares a member's entry in the store, to which others may write, with the name in the Hello of its worker.

    Raises:
        RendezvousError: they differ.
    """
    if member.name != name:
        raise RendezvousError(
            f"the key member/{member.id} of the group's store belongs to a worker {member.name!r}, but the worker with "
            f"that id is {name!r}; something else writes to the store: meet at another address, that others cannot "
            "write to"
        )


def poll_until(condition: Callable[[], bool], timeout: float | None) -> bool:
    """Asks again and again, less and less often; False if the time was over."""
    began = clock.now()
    deadline = None if timeout is None else began + timeout
    pause = _FIRST_PAUSE
    while not condition():
        now = clock.now()
        if deadline is not None and now >= deadline:
            return False
        interruptible(time.sleep, pause if deadline is None else min(pause, deadline - now))
        pause = min(1.5 * pause, pause_after(now - began))
    return True


def pause_after(waited: float, least: float = 0.05, most: float = 0.25) -> float:
    """Returns how long to pause before asking again what was asked for so many seconds: a hundredth of these."""
    return min(most, max(least, waited / 100))
