"""Which of a member's addresses a worker may dial, and what to set where there is none.

The addresses come from the store, which any local user can write to. So they are not simply tried one after the other:
a peer on this host is reached by the unix socket, which checks the user, and never by TCP where this worker has the
unix transport; and TCP is dialled only by a worker that has it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from ..errors import AddressError, ConnectError, NoRouteError, VersionError
from ..messages import Hello, Member
from ..primitives import clock
from ..transport.base import Connection, CrossingError, Transport


def dial(member: Member, hello: Hello, host: str, transports: Mapping[str, Transport], timeout: float) -> Connection:
    """Connects a worker on `host` with a member, at the first of its addresses that answers. Takes `timeout` seconds at
    most: each address has an equal part of what those before it have left.

    Raises:
        NoRouteError: no transport of both leads there.
        ConnectError: none of them answers. The cause is set where one did not in time, so that it may be busy.
        CrossingError, VersionError: as Transport.connect().
    """
    to_it = msgspec.structs.replace(hello, to=member.id)
    errors: list[str] = []
    slow: BaseException | None = None
    deadline, found = clock.now() + timeout, addresses_to_dial(member, host, transports)
    for place, address in enumerate(found):
        left = max(0.0, deadline - clock.now()) / (len(found) - place)
        try:
            return transports[address.partition(":")[0]].connect(address, to_it, left)
        except (VersionError, CrossingError, NoRouteError):
            raise
        except (ConnectError, AddressError) as error:  # the store may hold what is no address
            errors.append(str(error))
            slow = error.__cause__ if isinstance(error.__cause__, TimeoutError | BlockingIOError) else slow
    if not errors:
        raise NoRouteError(why_none(member, host, transports))
    raise ConnectError("; ".join(errors)) from slow


def addresses_to_dial(member: Member, host: str, transports: Collection[str]) -> list[str]:
    """The addresses of a member that a worker on `host` with these transports dials, best first."""
    is_near = member.host == host
    found = []
    for address in member.addresses:
        scheme = address.partition(":")[0]
        if scheme not in transports:
            continue
        if (scheme == "unix" and not is_near) or (scheme == "tcp" and is_near and "unix" in transports):
            continue
        found.append(address)
    return found


def why_none(member: Member, host: str, transports: Collection[str]) -> str:
    """Says what to set on which worker, where addresses_to_dial() is empty."""
    name, listens = repr(member.name), f"it listens at {list(member.addresses)}"
    on_it = any(address.startswith("tcp:") for address in member.addresses)
    if not member.addresses:
        return f"worker {name} listens nowhere"
    if member.host == host and "unix" in transports:
        return (
            f"worker {name} is on this host and has no unix socket ({listens}); set "
            f"Options(transports=('unix', 'tcp')) on worker {name}, or Options(transports=('tcp',)) on this one"
        )
    if member.host == host:
        return (
            f"this worker has TCP only, and worker {name} on the same host has none ({listens}); set "
            f"Options(transports=('unix', 'tcp')) on either"
        )
    where = f"worker {name} is on another host, or of another user or container, so only TCP leads there"
    lacking = [worker for worker, has in ((f"worker {name}", on_it), ("this worker", "tcp" in transports)) if not has]
    return (
        f"{where}, and {' and '.join(lacking)} did not ask for TCP; set Options(tcp_host=ADDRESS, "
        f"insecure_listen_beyond_loopback=True) on {' and '.join(lacking)}, with an address that the other can reach"
    )
