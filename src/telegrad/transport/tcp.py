"""Several hosts: scatter-gather writes out of tensors' memory, reads into memory that tensors then keep."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

from ..config import Options
from ..errors import AddressError
from ..messages import Hello
from .base import Connection, Listener, Transport
from .poller import Poller
from .streams import StreamConnection, StreamListener, connect_socket, greet, split_address, welcome


class TcpConnection(StreamConnection):
    transport = "tcp"

    def __init__(self, sock: socket.socket, peer: Hello, poller: Poller, options: Options) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(sock, peer, poller, options)


class TcpTransport(Transport):
    name = "tcp"

    def __init__(self, poller: Poller, options: Options) -> None:
        self._poller = poller
        self._options = options

    def listen(
        self, answer: Callable[[Hello], Hello], on_connection: Callable[[Connection], None]
    ) -> Listener:
        def accept(sock: socket.socket) -> None:
            peer = welcome(sock, answer)
            on_connection(TcpConnection(sock, peer, self._poller, self._options))

        host = self._options.tcp_host
        _check_listening_host(host, allowed=self._options.insecure_listen_beyond_loopback)
        try:
            sock = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise AddressError(f"cannot listen for TCP at {host!r}: {error}; see Options.tcp_host") from error
        address = f"tcp://{host}:{sock.getsockname()[1]}"
        return StreamListener(sock, address, self._poller, self._options, accept)

    def connect(self, address: str, hello: Hello, timeout: float) -> Connection:
        host, _, port = split_address(address, "tcp").rpartition(":")
        sock = connect_socket(socket.AF_INET, (host, int(port)), address, timeout)
        try:
            peer = greet(sock, hello, address)
            return TcpConnection(sock, peer, self._poller, self._options)
        except BaseException:
            sock.close()
            raise


def _check_listening_host(host: str, *, allowed: bool) -> None:
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not allowed:
        raise AddressError(
            f"Options.tcp_host is {host!r}, which other machines can reach, and there is no authentication: "
            "whoever connects can run code as this user. Listen on a loopback address, or, on a network where "
            "you trust everybody, set Options(insecure_listen_beyond_loopback=True)"
        )
