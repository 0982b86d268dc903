"""What telegrad takes for granted of torch's private names that only a torch with CUDA has: see test_torch_facts.py."""

from __future__ import annotations

import threading

import torch

from telegrad import _torch


def test_the_device_and_the_stream_of_this_thread() -> None:
    assert _torch.cuda_device() == torch.cuda.current_device()
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            assert _torch.cuda_raw_stream(torch.cuda.current_device()) == stream.cuda_stream


def test_a_key_is_seen_on_the_thread_of_a_device() -> None:
    key, seen = "tests: key", []

    def run() -> None:
        y = torch.ones(1, device="cuda", requires_grad=True) * 2
        y.register_hook(lambda _: seen.append((threading.get_ident(), _torch.is_in_tls(key))))
        y.sum().backward()

    def on_another_thread() -> None:
        _torch.stash_in_tls(key, None)
        for _ in range(100):
            run()

    thread = threading.Thread(target=on_another_thread)
    thread.start()
    thread.join()
    run()
    assert len({of for of, _ in seen}) == 1
    assert [found for _, found in seen] == [True] * 100 + [False]
