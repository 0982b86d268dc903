"""The store behind an address: opened, served or connected to."""

from __future__ import annotations

import datetime
import os
import socket
import time
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ..errors import RendezvousError
from ..primitives import clock
from ..primitives.interrupts import interruptible
from .file import open_file_store
from .store import Deadline, StoreClient


def open_store(init_method: str, rank: int, world_size: int | None, timeout: float) -> tuple[Any, int, int | None]:
    """The store behind an address, with the rank and world size that it names, if it does.

    `env://` reads MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, as torchrun sets them.

    Raises:
        RendezvousError: the address makes no sense, its port is in use, no process serves the store, or another user
            could write to its file.
    """
    try:
        url = urlsplit(init_method)
        port = url.port
    except ValueError as error:
        raise RendezvousError(f"init_method {init_method!r} is not an address: {error}") from error
    if url.scheme == "env":
        return _open_env(rank, world_size, timeout)
    if url.scheme == "tcp":
        rank, world_size = _from_query(url.query, rank, world_size)
        if not url.hostname or port is None:
            raise RendezvousError(f"init_method {init_method!r} lacks a host or port; write tcp://HOST:PORT")
        return _open_tcp(url.hostname, port, rank, timeout), rank, world_size
    if url.scheme == "file":
        rank, world_size = _from_query(url.query, rank, world_size)
        path = url.netloc + url.path
        if not path or not os.path.isdir(os.path.dirname(path) or "."):
            raise RendezvousError(f"init_method {init_method!r}: its directory does not exist")
        return open_file_store(path), rank, world_size
    raise RendezvousError(f"init_method {init_method!r} is not understood; use env://, tcp://HOST:PORT or file:///PATH")


def _from_query(query: str, rank: int, world_size: int | None) -> tuple[int, int | None]:
    given = {
        key: int(value) for key, value in parse_qsl(query, keep_blank_values=True) if key in ("rank", "world_size")
    }
    return given.get("rank", rank), given.get("world_size", world_size)


def _open_env(rank: int, world_size: int | None, timeout: float) -> tuple[Any, int, int | None]:
    env = os.environ
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise RendezvousError(
            f"init_method env:// needs the environment variables {missing}; set them, start the program with "
            "torchrun, or give init_rpc() another init_method (tcp://HOST:PORT or file:///PATH)"
        )
    if rank < 0 and "RANK" in env:
        rank = int(env["RANK"])
    if world_size is None and "WORLD_SIZE" in env:
        world_size = int(env["WORLD_SIZE"])
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    # torchrun's own agent serves the store for its workers.
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = PrefixStore(f"telegrad/{env.get('TORCHELASTIC_RESTART_COUNT', 0)}", connect_store(host, port, timeout))
        return store, rank, world_size
    return _open_tcp(host, port, rank, timeout), rank, world_size


def _open_tcp(host: str, port: int, rank: int, timeout: float) -> Any:
    """Opens the store at that address. Rank 0 serves it; without ranks, the first process to come does."""
    if rank > 0:
        return connect_store(host, port, timeout)
    try:
        return serve_store(host, port, timeout)
    except (RuntimeError, ValueError, OSError) as error:
        if rank == 0:
            raise RendezvousError(
                f"rank 0 cannot serve the store at {host}:{port}: {first_line(error)}; "
                "is the port in use by another program, or the host not this machine?"
            ) from error
    return connect_store(host, port, timeout)


def serve_store(host: str, port: int, timeout: float) -> Any:
    """A store that listens at that address only (torch's own would listen on every interface)."""
    with socket.create_server((host, port), backlog=2048) as listener:
        port = listener.getsockname()[1]
        limit, fd = datetime.timedelta(seconds=timeout), os.dup(listener.fileno())
        return TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=fd)


def connect_store(host: str, port: int, timeout: float, *, wait: bool = True) -> Any:
    """A client of the store at that address. With `wait`, it may be served only later, but within `timeout` seconds."""
    # TCPStore retries on its own, but gives up silently late and prints; so look first whether there is a listener.
    deadline = clock.now() + timeout
    while True:
        try:
            interruptible(_knock, host, port, max(0.1, min(timeout, 5.0)))
            break
        except OSError as error:
            if not wait or clock.now() >= deadline:
                raise RendezvousError(
                    f"no store is served at {host}:{port} ({error}); start rank 0 first, or check the address"
                ) from error
            interruptible(time.sleep, 0.02)
    until = Deadline(max(1.0, deadline - clock.now()))
    limit = datetime.timedelta(seconds=until.seconds)
    client = StoreClient(None)
    try:
        return client.ask(lambda _: TCPStore(host, port, None, False, limit, wait_for_workers=False), until)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RendezvousError):
            raise RendezvousError(f"at {host}:{port}: {error}") from None
        raise RendezvousError(f"the program at {host}:{port} is not a store: {first_line(error)}") from error
    finally:
        client.close()


def _knock(host: str, port: int, timeout: float) -> None:
    socket.create_connection((host, port), timeout=timeout).close()


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
