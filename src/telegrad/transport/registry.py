"""The transports by their schemes: the part of an address before "://". A new transport is named here."""

from __future__ import annotations

from ..options import Options
from .base import Transport
from .inproc import Hub, InprocTransport
from .lease import ReadLease
from .poller import Poller
from .tcp import TcpTransport
from .unix import UnixTransport

TRANSPORTS = {transport.name: transport for transport in (UnixTransport, TcpTransport)}


def make_transports(hub: Hub | None, poller: Poller, lease: ReadLease, options: Options) -> list[Transport]:
    """The transports of one worker: within a process (`hub`) that one alone, else those of Options.transports."""
    if hub is not None:
        return [InprocTransport(hub, lease, options)]
    return [make(poller, lease, options) for name, make in TRANSPORTS.items() if name in options.transports]
