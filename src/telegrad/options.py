"""Options: everything that can be set about a worker, in one frozen object that travels whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# Kept out of Options: both ends must agree on it, so it belongs to the wire version.
SHARED_MEMORY_FROM = 64 * KIB  # messages of at least this many bytes leave the socket for shared memory


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a worker behaves. All times are in seconds."""

    rpc_timeout: float = 60.0
    """Deadline of a call that names none; 0 means no limit."""
    init_timeout: float = 60.0
    """How long start-up waits for the store and for the other workers."""
    shutdown_timeout: float = 60.0
    """How long a graceful shutdown waits for work in flight and for the others; 0 means no limit."""
    connect_timeout: float = 10.0
    """How long connecting to a peer and the handshake may take."""

    transports: tuple[str, ...] = ("unix",)
    """Which transports to listen on and to dial: "unix" for peers of this host and user, "tcp" for others.
    A peer on this host is never dialled over TCP by a worker that has "unix"."""
    tcp_host: str | None = None
    """Where to listen for TCP: an address that others can connect to, so not 0.0.0.0. Given, it adds "tcp" to
    `transports`; else a worker with "tcp" listens on 127.0.0.1, where every user of this machine can connect.
    Anything but a loopback address needs `insecure_listen_beyond_loopback`."""
    insecure_listen_beyond_loopback: bool = False
    """Lets `tcp_host` be a public address, and lets this worker dial public addresses. INSECURE: there is no
    authentication, and a program that reaches the port, or that a worker dials, can run code as this user."""

    max_message_bytes: int = 16 * GIB
    """A larger message is refused, by its sender and by its receiver."""
    peer_byte_limit: int = 256 * MIB
    """Calls in flight to one peer, in bytes; a caller over the limit waits until replies have come. What lies in
    shared memory or an in-process queue and was not read yet is held to the same limit."""
    pool_bytes: int = 1 * GIB
    """Free memory kept for reuse per connection, in bytes, before it is given back to the system."""

    spin: float = 300e-6
    """How long a thread that expects a message polls before it sleeps. Waking an idle core costs more
    than most messages; 0 never spins."""
    idle_thread_timeout: float = 5.0
    """A thread that had nothing to do for this long ends (one always stays)."""

    def __post_init__(self) -> None:
        for name in ("rpc_timeout", "init_timeout", "shutdown_timeout", "connect_timeout", "spin"):
            if getattr(self, name) < 0:
                raise ValueError(f"Options.{name} is {getattr(self, name)}; it must not be negative")
        if self.tcp_host is not None and "tcp" not in self.transports:
            object.__setattr__(self, "transports", (*self.transports, "tcp"))
        unknown = set(self.transports) - {"unix", "tcp"}
        if unknown or not self.transports:
            raise ValueError(f"Options.transports is {self.transports!r}; choose from 'unix' and 'tcp'")

    @classmethod
    def of(cls, options: Options | None, torch_options: Any = None) -> Options:
        """The options given, or what torch's RpcBackendOptions say, or the defaults.

        Of torch's object the timeout is taken; its thread counts, channels and transports have no
        meaning here, and its init_method is read by init_rpc().
        """
        result = options or cls()
        if torch_options is not None and options is None:
            result = replace(result, rpc_timeout=float(torch_options.rpc_timeout))
        return result
