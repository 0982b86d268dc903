"""The CUDA runtime that torch has loaded, as one object with a few methods: memory of our own, events, and the handles
by which another process opens both. torch has no public names for these.

Nothing happens at import: CUDA is neither looked for nor initialised until `load()`. Tests put an object with the same
methods in its place (tests/transport/simulated_cuda.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path
from typing import Any

import torch

from .._torch import cuda_device, cuda_raw_stream

HANDLE_BYTES = 64  # of a handle of memory or of an event

_SUCCESS, _NO_MEMORY, _NOT_READY = 0, 2, 600
_DISABLE_TIMING, _INTERPROCESS = 2, 4  # flags of an event
_LAZY_PEER_ACCESS = 1  # flag of opened memory
_ANY_DIRECTION = 4  # of a copy: CUDA knows whose an address is
_MOST_STREAMS = 1000  # that are remembered
_NOTHING = contextlib.nullcontext()
_RELAXED = 2  # the mode in which a thread's calls leave other threads' captures alone


class CudaError(RuntimeError):
    """A call of CUDA's that failed, in CUDA's words; or the reason why CUDA cannot be called."""

    def __init__(self, text: str, code: int = -1) -> None:
        super().__init__(text)
        self.is_no_memory = code == _NO_MEMORY


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_Pointer = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaMalloc": (_Pointer, ctypes.c_size_t),
    "cudaFree": (_Pointer,),
    "cudaMemcpyAsync": (_Pointer, _Pointer, ctypes.c_size_t, ctypes.c_int, _Pointer),
    "cudaEventCreateWithFlags": (_Pointer, ctypes.c_uint),
    "cudaEventRecord": (_Pointer, _Pointer),
    "cudaEventQuery": (_Pointer,),
    "cudaEventDestroy": (_Pointer,),
    "cudaIpcGetMemHandle": (_Pointer, _Pointer),
    "cudaIpcOpenMemHandle": (_Pointer, _Handle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (_Pointer,),
    "cudaIpcGetEventHandle": (_Pointer, _Pointer),
    "cudaIpcOpenEventHandle": (_Pointer, _Handle),
    "cudaThreadExchangeStreamCaptureMode": (_Pointer,),
    "cudaGetLastError": (),
}


class Cuda:
    """CUDA's runtime. Pointers, events and streams are plain numbers.

    Calls that may wait let go of the interpreter lock. Those on the path of a message return at once and keep it, as
    torch's own operations do: another thread would take the lock each time, and this one wait until it is free again.

    All but `is_ready` and `load` need a successful `load()` before. Those that make, open or record something belong to
    the current device, and are called inside of `on(device)`, or of `at(device)`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards loading
        self._library: Any = None
        self._quick: Any = None  # the same, for calls that return at once
        self._side_streams: dict[int, torch.cuda.Stream] = {}
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device, and CUDA's own handle

    def is_ready(self) -> bool:
        """Whether this process uses CUDA already. Never initialises it."""
        return bool(torch.cuda.is_initialized())

    def load(self) -> None:
        """Finds the library. Any number of times; cheap after the first.

        Raises:
            CudaError: it cannot be called, and why.
        """
        if self._library is not None:
            return
        with self._lock:
            path = _loaded_library()
            try:
                library, quick = ctypes.CDLL(path), ctypes.PyDLL(path)
                for name, arguments in _SIGNATURES.items():
                    getattr(library, name).argtypes = getattr(quick, name).argtypes = arguments
                quick.cudaGetErrorString.argtypes = (ctypes.c_int,)
                quick.cudaGetErrorString.restype = ctypes.c_char_p
            except (OSError, AttributeError) as error:
                raise CudaError(f"{path} cannot be called: {error}") from error
            self._quick, self._library = quick, library

    def _check(self, code: int) -> None:
        if code != _SUCCESS:
            # CUDA remembers the error, and torch would raise it at its next launch of a kernel.
            self._quick.cudaGetLastError()
            raise CudaError(f"CUDA error: {self._quick.cudaGetErrorString(code).decode()}", code)

    def exchange_mode(self, mode: ctypes.c_int) -> None:
        """Exchanges this thread's mode, which says how its calls and captures of other threads get on."""
        if code := self._quick.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)):
            self._check(code)

    # -- devices and streams ---------------------------------------------------------------------------

    def on(self, device: int) -> _On:
        """Makes a device the current one of this thread, and keeps the thread's calls out of captures of others."""
        return _On(self, device)

    def at(self, device: int) -> contextlib.AbstractContextManager[object]:
        """Makes a device the current one of this thread. For copies and records: captures of others allow these."""
        return _NOTHING if cuda_device() == device else torch.cuda.device(device)

    def device_of(self, tensor: torch.Tensor) -> int:
        return tensor.get_device()

    def uuid(self, device: int) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def device_with(self, uuid: str) -> int | None:
        """The number that a device has in this process; None: it is not visible here."""
        return next((d for d in range(torch.cuda.device_count()) if self.uuid(d) == uuid), None)

    def stream(self, device: int) -> int:
        """The current stream of this thread."""
        found: int = cuda_raw_stream(device)
        return found

    def side_stream(self, device: int) -> int:
        """A stream that waits for no work of the user's."""
        found = self._side_streams.get(device)
        if found is None:
            found = self._side_streams.setdefault(device, torch.cuda.Stream(device))
        return int(found.cuda_stream)

    def is_capturing(self) -> bool:
        """Whether the current stream of the current device is captured into a graph."""
        return torch.cuda.is_current_stream_capturing()

    # -- torch's memory --------------------------------------------------------------------------------

    def empty(self, nbytes: int, device: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))

    def moved(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor on that device, in the order of both devices' current streams."""
        return tensor.to(device)

    def keep_for_stream(self, tensor: torch.Tensor, device: int, stream: int) -> None:
        """Keeps a tensor's memory from other streams until this one, the current one, has done what it was given so
        far."""
        found = self._streams.get((device, stream))
        if found is None:
            if len(self._streams) > _MOST_STREAMS:
                self._streams.clear()
            found = self._streams[device, stream] = torch.cuda.current_stream(device)
        tensor.record_stream(found)

    def release_cache(self) -> None:
        """Gives back what torch keeps for reuse. Waits for the device."""
        torch.cuda.empty_cache()

    # -- memory ----------------------------------------------------------------------------------------

    def malloc(self, nbytes: int) -> int:
        pointer = ctypes.c_void_p()
        self._check(self._library.cudaMalloc(ctypes.byref(pointer), nbytes))
        return pointer.value or 0

    def free(self, pointer: int) -> None:
        """May wait for the device."""
        self._check(self._library.cudaFree(pointer))

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copies from device memory to device memory, in the order of the stream."""
        if code := self._quick.cudaMemcpyAsync(to, source, nbytes, _ANY_DIRECTION, stream):
            self._check(code)

    def write(self, to: int, data: bytes, stream: int) -> None:
        """Copies from the host. The data may go when this returns: CUDA reads memory that is not pinned at once."""
        source = ctypes.create_string_buffer(data, len(data))
        self._check(self._library.cudaMemcpyAsync(to, ctypes.addressof(source), len(data), _ANY_DIRECTION, stream))

    def read(self, source: int, nbytes: int, stream: int) -> bytes:
        """Copies to the host, and waits for it, as CUDA does with memory that is not pinned."""
        data = ctypes.create_string_buffer(nbytes)
        self._check(self._library.cudaMemcpyAsync(ctypes.addressof(data), source, nbytes, _ANY_DIRECTION, stream))
        return data.raw

    def export_memory(self, pointer: int) -> bytes:
        handle = _Handle()
        self._check(self._library.cudaIpcGetMemHandle(ctypes.byref(handle), pointer))
        return bytes(handle)

    def open_memory(self, handle: bytes) -> int:
        pointer = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        self._check(self._library.cudaIpcOpenMemHandle(ctypes.byref(pointer), given, _LAZY_PEER_ACCESS))
        return pointer.value or 0

    def close_memory(self, pointer: int) -> None:
        """May wait for the device."""
        self._check(self._library.cudaIpcCloseMemHandle(pointer))

    # -- events ----------------------------------------------------------------------------------------

    def event(self) -> int:
        made = ctypes.c_void_p()
        flags = _DISABLE_TIMING | _INTERPROCESS
        self._check(self._library.cudaEventCreateWithFlags(ctypes.byref(made), flags))
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        if code := self._quick.cudaEventRecord(event, stream):
            self._check(code)

    def is_done(self, event: int) -> bool:
        """Whether what was recorded last has been reached; true before the first."""
        code = self._quick.cudaEventQuery(event)
        if code == _NOT_READY:
            self._quick.cudaGetLastError()  # as in _check
            return False
        if code:
            self._check(code)
        return True

    def destroy(self, event: int) -> None:
        self._check(self._library.cudaEventDestroy(event))

    def export_event(self, event: int) -> bytes:
        handle = _Handle()
        self._check(self._library.cudaIpcGetEventHandle(ctypes.byref(handle), event))
        return bytes(handle)

    def open_event(self, handle: bytes) -> int:
        opened = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        self._check(self._library.cudaIpcOpenEventHandle(ctypes.byref(opened), given))
        return opened.value or 0


class _On:
    """See Cuda.on(). A class of its own, as it is entered with every tensor."""

    __slots__ = ("_cuda", "_device", "_mode", "_other")

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda = cuda
        self._device = device
        self._mode = ctypes.c_int(_RELAXED)
        self._other: torch.cuda.device | None = None

    def __enter__(self) -> None:
        self._cuda.exchange_mode(self._mode)
        if cuda_device() != self._device:
            try:
                other = torch.cuda.device(self._device)  # which makes no context on the device that it goes back to
                other.__enter__()
                self._other = other
            except BaseException:
                self._cuda.exchange_mode(self._mode)
                raise

    def __exit__(self, *error: Any) -> None:
        if self._other is not None:
            self._other.__exit__(*error)
        self._cuda.exchange_mode(self._mode)


def _loaded_library() -> str:
    """The path of the libcudart that this process has loaded."""
    if torch.version.cuda is None:
        raise CudaError("torch was built without CUDA")
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "libcudart" in os.path.basename(path):
            return f"/{path}"
    raise CudaError("torch has loaded no libcudart: CUDA is linked into it, or was not initialised")


CUDA = Cuda()  # of this process; it holds nothing before load()
