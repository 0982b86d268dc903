"""Tensors on devices, on their way out of a message's sender and into its receiver: by the device lane of their
connection (transport/device.py), or through host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ..errors import DecodeError, EncodeError
from ..options import SHARED_MEMORY_FROM
from ..primitives.futures import use_devices
from ..transport.copying import WORTH_HELP, copy_memory
from ..transport.cuda import CUDA
from .devices import have_device
from .pickling_state import Outgoing, arriving

_STAGED_FROM = 1 << 20  # bytes


def put_on_lane(given: torch.Tensor, tensor: torch.Tensor, target: str | None, message: Outgoing) -> int | None:
    """Has a tensor, which is dense, go by device memory that the receiver opens; returns its number in the message.
    None: it goes through the host. `given` is the tensor as the caller has it: pickled a second time, it is there.

    Raises:
        EncodeError: a CUDA graph is being captured.
    """
    use_devices()
    if not tensor.is_cuda:
        return None
    if target is not None and target != "cpu" and message.connection is not None and tensor.nbytes:
        if (known := message.put.get(id(given))) is not None:
            return known[1]
        if (lane := message.connection.open_device_lane()) is not None:
            flat = tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
            if not lane.reserve(flat, message.placed):
                return None
            number = len(message.placed) - 1
            message.put[id(given)] = given, number
            return number
    if torch.cuda.is_current_stream_capturing():
        raise EncodeError(
            f"a tensor on {tensor.device} cannot be sent while a CUDA graph is captured; send it before or after that"
        )
    return None


def take_from_lane(number: int, target: str | None) -> torch.Tensor:
    """The bytes of a tensor in device memory, of the message that this thread unpickles, on the device that it is to
    arrive on; on the CPU, if there is no such device here."""
    frames = arriving().frames
    if frames is None or not 0 <= number < len(frames.arrived):
        raise DecodeError(f"tensor {number} of a message lies in device memory, and there is none")
    device = torch.device(target) if target is not None and have_device(target) else torch.device("cpu")
    use_devices(device if device.type != "cpu" else None)
    found: torch.Tensor = frames.arrived[number].take(device, frames.deadline, _is_alive)
    return found


def _is_alive() -> bool:
    return True  # the lane is closed when the connection ends, and says so itself


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor of a device, in host memory. Large ones by memory that the device writes to itself, which torch
    keeps for the next: such a copy is several times as fast."""
    if not tensor.is_cuda or tensor.nbytes < SHARED_MEMORY_FROM:
        return tensor.cpu()
    try:
        with _beside_captures(tensor.get_device()):
            host = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=True)
            host.copy_(tensor.as_strided((tensor.numel(),), (1,)), non_blocking=True)
            torch.cuda.current_stream().synchronize()
            return host
    except RuntimeError:  # there is no such memory left
        return tensor.cpu()


def _beside_captures(device: int) -> AbstractContextManager[None]:
    """Makes a CUDA device the current one; in it, calls that CUDA does not allow while another thread captures a graph
    leave that capture alone.

    Raises:
        CudaError: the CUDA runtime cannot be called.
    """
    CUDA.load()
    return CUDA.on(device)


def staged(tensor: torch.Tensor, target: str) -> torch.Tensor:
    """A flat tensor in host memory; if it is large, on the CUDA device that it is to arrive on, in the order of the
    current stream. It goes piece by piece through memory that the device reads itself: one piece is filled while the
    other one is read. CUDA's own way takes longer. The host memory is free when this returns.

    Raises:
        DecodeError: a CUDA graph is being captured.
    """
    nbytes = tensor.nbytes
    if nbytes < _STAGED_FROM or not target.startswith("cuda") or not have_device(target):
        return tensor
    index = torch.device(target).index
    try:
        with _beside_captures(torch.cuda.current_device() if index is None else index):
            if torch.cuda.is_current_stream_capturing():
                raise DecodeError(
                    f"a tensor cannot arrive on {target} while a CUDA graph is captured; make the call before or after "
                    "that"
                )
            return _in_pieces(tensor, nbytes)
    except DecodeError:
        raise
    except RuntimeError:  # there is no such memory left: torch has a way without
        return tensor


def _in_pieces(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    pieces = [
        torch.empty(min(nbytes, WORTH_HELP), dtype=torch.uint8, device="cpu", pin_memory=True)
        for _ in range(2 if nbytes > WORTH_HELP else 1)
    ]
    result = torch.empty_like(tensor, device="cuda")
    source, flat, stream = tensor.data_ptr(), result.view(torch.uint8), torch.cuda.current_stream()
    was_read: list[torch.cuda.Event] = []
    for number, start in enumerate(range(0, nbytes, WORTH_HELP)):
        piece, size = pieces[number % 2], min(WORTH_HELP, nbytes - start)
        if number >= 2:
            was_read[number - 2].synchronize()
        copy_memory(piece.data_ptr(), source + start, size, (piece, tensor))
        flat[start : start + size].copy_(piece[:size], non_blocking=True)
        was_read.append(stream.record_event())
    return result
