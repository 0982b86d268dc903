"""What telegrad takes for granted of torch's private names that only a torch with CUDA has: see test_torch_facts.py."""

from __future__ import annotations

import torch

from telegrad import _torch


def test_the_device_and_the_stream_of_this_thread() -> None:
    assert _torch.cuda_device() == torch.cuda.current_device()
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            assert _torch.cuda_raw_stream(torch.cuda.current_device()) == stream.cuda_stream
