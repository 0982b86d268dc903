"""A ring of workers that call each other, and what such a call costs.

What you learn here: how to start workers (`LocalCluster`), how to call a function on one of them (`rpc_sync`),
and that a function can call the next worker while it runs, and so on around the ring.

    python examples/ring.py                     six workers
    python examples/ring.py 24 --transport tcp  more of them, over TCP
    python examples/ring.py --no-torch          without torch.distributed.rpc beside it
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time

import torch
from rich.console import Console

import telegrad
from telegrad import rpc
from telegrad.cli.bench import FIGURES, LARGE, compare

LAPS = 200


def pass_on(token: torch.Tensor, ring: list[str], path: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Runs on each worker in turn: adds its part to the token, and calls the next one from inside this call.

    The workers have never seen this script. The function travels to them by value, once.
    """
    here = ring.index(rpc.get_worker_info().name)
    token = token.clone()  # arguments are copies: what is changed in them the sender does not see
    token[here] += 1
    path = [*path, os.getpid()]
    if here == len(ring) - 1:
        return token, path
    return rpc.rpc_sync(ring[here + 1], pass_on, args=(token, ring, path))


def run_ring(console: Console, ring: list[str]) -> None:
    def lap(token: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        return rpc.rpc_sync(ring[0], pass_on, args=(token, ring, []))

    began = time.perf_counter()
    token, path = lap(torch.zeros(len(ring), dtype=torch.int64))
    first = time.perf_counter() - began
    console.print(f"first lap   {first * 1e3:.1f} ms, in which each worker met the next and got the function")
    console.print(f"processes   {' > '.join(map(str, path))}", soft_wrap=True)

    began = time.perf_counter()
    for _ in range(LAPS - 1):
        token, _ = lap(token)
    each = (time.perf_counter() - began) / (LAPS - 1)
    console.print(f"other laps  {each * 1e3:.2f} ms each: {len(ring) / each:,.0f} hops per second, out and back")
    assert token.tolist() == [LAPS] * len(ring)
    console.print(f"the token   {token.tolist()} after {LAPS} laps", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A ring of workers that call each other.")
    parser.add_argument("workers", nargs="?", type=int, default=6, help="how many workers (default: 6)")
    parser.add_argument("--transport", choices=["unix", "tcp", "inproc"], default="unix")
    parser.add_argument("--no-torch", action="store_true", help="measure telegrad alone")
    options = parser.parse_args()
    if options.workers < 1:
        parser.error("a ring has one worker or more")
    torch.set_num_threads(1)
    console = Console(highlight=False)
    ring = [f"worker{n}" for n in range(options.workers)]
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        console.print(f"note        this machine is busy (load {load:.1f}, {cores} cores); it shows in all times")

    with contextlib.ExitStack() as running:
        began = time.perf_counter()
        with console.status(f"starting {len(ring)} workers"):
            running.enter_context(telegrad.LocalCluster(ring, transport=options.transport))
        took = time.perf_counter() - began
        console.print(f"start-up    {took:.2f} s for {len(ring)} workers over {options.transport}")
        run_ring(console, ring)
        compare(console, ring[0], (*FIGURES, LARGE), with_torch=not options.no_torch)
    console.print("To try next:")
    console.print("  examples/ring.py 24 --transport tcp   a larger ring, over sockets alone")
    console.print("  README.md                             a program of 15 lines to start from")
    console.print("  scripts/bench                         the same comparison with more care")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; no process is left behind")
