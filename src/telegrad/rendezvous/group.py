"""Group: the workers that find each other in one of torch's stores, by these keys.

    group                a random name; connections between different groups are refused
    size                 how many workers it has
    ids                  a counter: the next worker id
    name/<name>          the id of the worker that has the name
    rank/<rank>          the id of the worker that has the rank (groups of a fixed size)
    incarnations/<rank>  how many workers have had it
    failed/<rank>        why the worker of that rank could not start
    member/<id>          its Member entry
    <barrier>/<rank>     set when that rank has arrived there
    <topic>/<rank>       what that rank has said to all

A store's client blocks all its users while it waits for a key, so a worker that waits polls instead. Each request has
a time limit (see store.py).
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ..errors import NameTakenError, RendezvousError
from ..events import logger
from ..messages import MAX_WORKER_ID, Member
from ..primitives import clock
from ..primitives.interrupts import interruptible
from .address import first_line
from .store import Deadline, StoreClient

_PREFIX = "telegrad/"
_NEVER = "\x00never"
_LEAVING = 1.0  # seconds that leaving a group may take


def this_host() -> str:
    """Equal for two processes that can reach each other by unix socket: same kernel, user and processes."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.getuid()}/{os.readlink('/proc/self/ns/pid')}"


class Group:
    """The workers that share a store, as one of them sees it. Methods that ask the store take a time limit in seconds;
    by default that of the start-up."""

    def __init__(self, store: Any, world_size: int | None, timeout: float) -> None:
        self._client = StoreClient(PrefixStore(_PREFIX, store))
        self.world_size = world_size
        self._timeout = timeout
        try:
            self.name = self._agree()
        except BaseException:
            self.let_go()
            raise

    def _agree(self) -> str:
        """The group's name. The first worker to come decides on the name and the size; the size must be the same for
        all."""
        until = self._until(None)
        name = self._compare_set("group", "", uuid.uuid4().hex, until)
        size = "no fixed size" if self.world_size is None else f"{self.world_size} workers"
        if (agreed := self._compare_set("size", "", size, until)) != size:
            raise RendezvousError(
                "RPC group mixes statically and dynamically initialized members which is not supported. Or it mixes "
                f"sizes: it has {agreed}, and this worker is to join a group of {size}; give all the same world_size"
            )
        return name

    def _until(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    def _ask(self, until: Deadline, method: str, *args: Any) -> Any:
        try:
            return self._client.ask(lambda store: getattr(store, method)(*args), until)
        except RendezvousError:
            raise
        except Exception as error:
            raise RendezvousError(
                f"the group's store does not answer: {first_line(error)}; has the process that serves it ended?"
            ) from error

    def _get(self, key: str, until: Deadline) -> bytes | None:
        # Not get(), which waits for a key that is not there, and keeps all others from the store meanwhile. Compared
        # with a value that no key ever has, nothing is set, and the key's own value comes back.
        found: bytes = self._ask(until, "compare_set", key, _NEVER, _NEVER)
        return None if found == _NEVER.encode() else found

    def _compare_set(self, key: str, expected: str, desired: str, until: Deadline) -> str:
        """Sets the key if it is as expected (empty: not there); what it is then."""
        value: bytes = self._ask(until, "compare_set", key, expected, desired)
        return value.decode()

    # -- joining and leaving ---------------------------------------------------------------------------

    def new_id(self, rank: int) -> int:
        """A worker id that was never used in this group. The first to have a rank has the rank as its id."""
        until = self._until(None)
        if self.world_size is not None:
            if not 0 <= rank < self.world_size:
                raise RendezvousError(f"rank {rank} is not within world_size {self.world_size}; ranks start at 0")
            if self._ask(until, "add", f"incarnations/{rank}", 1) == 1:
                return rank
        id = int(self._ask(until, "add", "ids", 1)) - 1 + (self.world_size or 0)
        if id > MAX_WORKER_ID:
            raise RendezvousError(f"this group has had {MAX_WORKER_ID} workers; start a new one")
        return id

    def claim(self, name: str, id: int, is_alive: Callable[[Member], bool]) -> None:
        """Takes the name, also from a worker that died with it.

        Raises:
            NameTakenError: a live worker has it.
        """
        joining = self._until(None)
        expected = ""
        while True:
            until = self._until(None)
            owner = self._compare_set(f"name/{name}", expected, str(id), until)
            if owner == str(id):
                return
            member = self._member(int(owner), until) if owner else None
            if owner and member is None and joining.left():  # it claimed the name and is about to join
                interruptible(time.sleep, 0.01)
                continue
            if member is not None and is_alive(member):
                raise NameTakenError(
                    f"worker name {name!r} is not unique: a live worker with id {owner} has it; choose another"
                )
            expected = owner

    def publish(self, member: Member) -> None:
        until = self._until(None)
        self._ask(until, "set", f"member/{member.id}", msgspec.msgpack.encode(member))
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
                self._ask(until, "delete_key", f"member/{member.id}")
        except RendezvousError as error:
            logger.debug("worker %r left its group without a word: %s", member.name, str(error))
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Never uses the store again: one that this process serves ends with that. Any number of times."""
        self._client.close()

    # -- looking ---------------------------------------------------------------------------------------

    def _member(self, id: int, until: Deadline) -> Member | None:
        data = self._get(f"member/{id}", until)
        return None if data is None else msgspec.msgpack.decode(data, type=Member)

    def find(self, to: str | int, timeout: float | None = None) -> Member | None:
        """The member of that name or id."""
        until = self._until(timeout)
        if isinstance(to, int):
            return self._member(to, until)
        id = self._get(f"name/{to}", until)
        return self._member(int(id), until) if id else None

    def members(self, timeout: float | None = None) -> list[Member]:
        """All members, by id."""
        until = self._until(timeout)
        count = int(self._ask(until, "add", "ids", 0)) + (self.world_size or 0)
        return [member for id in range(count) if (member := self._member(id, until))]

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
                if (reason := self._get(f"failed/{rank}", until)) is not None:
                    raise RendezvousError(f"rank {rank} could not join the group: {reason.decode()}")
            return not missing

        if not poll_until(all_here, self._timeout):
            raise RendezvousError(
                f"ranks {sorted(missing)} of {self.world_size} did not join within {self._timeout:.0f} s; "
                "were they started, with the same address and world_size?"
            )
        return self.members()

    # -- all together ----------------------------------------------------------------------------------

    def exchange(self, topic: str, member: Member, said: bytes) -> list[bytes]:
        """Says something to every rank, and returns what all have said, by rank. A worker that takes the place of one
        that has left waits for no other, and hears those that have said something.

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
                elif rank not in heard and (reason := self._get(f"failed/{rank}", until)) is not None:
                    raise RendezvousError(f"rank {rank} could not join the group: {reason.decode()}")
            return len(heard) == self.world_size or member.id != member.rank

        if not poll_until(all_said, self._timeout):
            missing = sorted(set(range(self.world_size)) - set(heard))
            raise RendezvousError(f"ranks {missing} have joined, and did not say {topic} within {self._timeout:.0f} s")
        return [heard[rank] for rank in sorted(heard)]

    def arrive(self, barrier: str, rank: int, timeout: float | None = None) -> None:
        self._ask(self._until(timeout), "set", f"{barrier}/{rank}", b"1")

    def arrived(self, barrier: str, rank: int, timeout: float | None = None) -> bool:
        return bool(self._ask(self._until(timeout), "check", [f"{barrier}/{rank}"]))


def poll_until(condition: Callable[[], bool], timeout: float | None) -> bool:
    """Asks again and again, less and less often; False if the time was over."""
    deadline = None if timeout is None else clock.now() + timeout
    pause = 0.001
    while not condition():
        if deadline is not None and clock.now() > deadline:
            return False
        interruptible(time.sleep, pause)
        pause = min(0.05, pause * 1.5)
    return True
