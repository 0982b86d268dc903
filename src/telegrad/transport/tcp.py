"""Several hosts: scatter-gather writes out of tensors' memory, reads into memory that tensors then keep."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

from ..errors import AddressError, ConnectError, NoRouteError
from ..messages import Hello
from ..options import Options
from .base import split_address
from .lease import ReadLease
from .listening import StreamTransport
from .stream import StreamConnection
from .wire import FrameReader

_WORTH_READING = 256 << 10  # bytes of a large message; see TcpConnection._read_from


class TcpConnection(StreamConnection):
    transport = "tcp"

    def __init__(self, sock: socket.socket, peer: Hello, lease: ReadLease, options: Options) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._low_water = 1  # guarded by the lease
        super().__init__(sock, peer, lease, options)

    def _make_reader(self) -> FrameReader:
        return FrameReader(self._limit, self._private_pool, read_from=self._read_from)

    def _read_from(self, nbytes: int) -> None:
        """Has the system say that there is something to read when so many bytes are there, or many, or the end.

        A thread that takes each packet of a large message as it comes spends a quarter of its time on waking, and
        contends with the sender for the socket.
        """
        nbytes = min(nbytes, _WORTH_READING)
        if nbytes != self._low_water:
            self._low_water = nbytes
            with contextlib.suppress(OSError):  # where a system has no such thing it never says less than this
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def tick(self) -> None:
        super().tick()
        if self._low_water > 1:
            # Old systems have been known to wait for more than they had room for. Now the thread reads what is there.
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


class TcpTransport(StreamTransport):
    name = "tcp"
    connection = TcpConnection

    def _bind(self) -> tuple[socket.socket, str, Sequence[int]]:
        host = "127.0.0.1" if self._options.tcp_host is None else self._options.tcp_host
        _check_listening_host(host, allowed=self._options.insecure_listen_beyond_loopback)
        try:
            family, target = _resolve(host, 0)
            sock = socket.create_server(target, family=family, backlog=1024)
        except OSError as error:
            raise AddressError(f"cannot listen for TCP at {host!r}: {error}; see Options.tcp_host") from error
        return sock, f"tcp://{host}:{sock.getsockname()[1]}", ()

    def _target(self, address: str) -> tuple[int, tuple[str, int]]:
        host, _, port = split_address(address, "tcp").rpartition(":")
        if not host or not port.isdecimal():
            raise AddressError(f"{address!r} is not of the form tcp://host:port")
        try:
            family, target = _resolve(host, int(port))
        except OSError as error:
            raise ConnectError(f"no worker answers at {address}: {error}") from error
        if not self._options.insecure_listen_beyond_loopback and not ipaddress.ip_address(target[0]).is_loopback:
            raise NoRouteError(
                f"{address} is beyond the loopback, and this worker dials no such address: there is no authentication. "
                "On a network where you trust everybody, set Options(tcp_host=ADDRESS, "
                "insecure_listen_beyond_loopback=True) on this worker, with an address of this host"
            )
        return family, target


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The family and address of the first that the name stands for; the same at both ends."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, (str(target[0]), int(target[1]))


def _check_listening_host(host: str, *, allowed: bool) -> None:
    try:
        address = ipaddress.ip_address(host)
        loopback, anywhere = address.is_loopback, address.is_unspecified
    except ValueError:
        loopback, anywhere = host == "localhost", not host
    if anywhere:
        raise AddressError(
            f"Options.tcp_host is {host!r}, which stands for every address of this machine; peers are told the same "
            "address, so name the one that they are to connect to"
        )
    if not loopback and not allowed:
        raise AddressError(
            f"Options.tcp_host is {host!r}, which other machines can reach, and there is no authentication: "
            "any program that connects can run code as this user. Listen on a loopback address, or, on a network where "
            "you trust everybody, set Options(insecure_listen_beyond_loopback=True)"
        )
