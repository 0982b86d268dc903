"""A meeting point on this host for one group of workers."""

from __future__ import annotations

import os
import socket


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def meet_at(port: int) -> None:
    """Tell `init_rpc` in this process, and in those it starts, where its group meets."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)


def meet_at_free_port() -> None:
    meet_at(free_port())
