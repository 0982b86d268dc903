"""A CUDA without a device: telegrad.transport.cuda.Cuda's methods over host memory.

A `Machine` has memory, handles and processes; each process is a `SimulatedCuda`. Streams are queues, each run by a
thread that dawdles (seeded); a stream can be paused. Device tensors are tensors on the CPU that are only to be looked
at after `synchronize()`. A process can be killed: what its streams had not done is never done, as with a real one.

What a real device would punish now and then is noted in `Machine.violations` always: a copy that touches memory that
was freed or closed, a call outside of `on(device)`, an event or memory given back twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from telegrad.transport.cuda import HANDLE_BYTES, CudaError


def no_memory() -> CudaError:
    return CudaError("CUDA error: out of memory", 2)


class Memory:
    def __init__(self, size: int) -> None:
        self.size = size
        self._tensor = torch.empty(size, dtype=torch.uint8)  # pages that are not touched cost nothing
        self.pointer = self._tensor.data_ptr()
        self.freed = False


class Event:
    def __init__(self) -> None:
        self.last: object = None  # what was recorded last
        self.reached: object = None


class Stream:
    """A queue of functions, run by a thread."""

    def __init__(self, machine: Machine, process: SimulatedCuda, seed: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._random = random.Random(seed)
        self._machine = machine
        self._process = process
        self.running = threading.Event()  # cleared: paused
        self.running.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], object]) -> None:
        self._queue.put(function)

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            self.running.wait()
            time.sleep(self._random.random() * self._machine.slowest)
            if not self._process.killed:
                function()

    def synchronize(self) -> None:
        done = threading.Event()
        self.submit(done.set)
        assert done.wait(20)

    def close(self) -> None:
        self.running.set()
        self._queue.put(None)
        self._thread.join(20)
        assert not self._thread.is_alive()


class Machine:
    def __init__(self, seed: int = 0, slowest: float = 0.0) -> None:
        self.slowest = slowest  # seconds that one thing on a stream may take
        self.seed = seed
        self.lock = threading.RLock()
        self.memories: list[Memory] = []
        self.handles: dict[bytes, Any] = {}
        self.violations: list[str] = []
        self.processes: list[SimulatedCuda] = []
        self._numbers = itertools.count(1)

    def number(self) -> int:
        return next(self._numbers)

    def process(self, *uuids: str) -> SimulatedCuda:
        self.processes.append(SimulatedCuda(self, uuids or ("GPU-0",)))
        return self.processes[-1]

    def handle_of(self, thing: Any) -> bytes:
        handle = self.number().to_bytes(8, "big").ljust(HANDLE_BYTES, b"\1")
        self.handles[handle] = thing
        return handle

    def close(self) -> None:
        for process in self.processes:
            for stream in process.streams.values():
                stream.close()
        self.processes.clear()


class SimulatedCuda:
    """One process. Its methods are those of Cuda; see there."""

    def __init__(self, machine: Machine, uuids: tuple[str, ...]) -> None:
        self.machine = machine
        self.uuids = uuids
        self.killed = False
        self.ready = True
        self.capturing = False
        self.unavailable = ""
        self.sticky = ""  # an error from which no call recovers
        self.fail: dict[str, list[Exception]] = {}  # by method: errors of the calls that come
        self.calls: Counter[str] = Counter()
        self.memory_limit = 1 << 40
        self.caches_released = 0
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}  # made or opened, not given back
        self.allocated: dict[int, Memory] = {}
        self.opened: dict[int, Memory] = {}
        self._side: dict[int, int] = {}
        self._defaults: dict[int, int] = {}
        self._made: dict[int, torch.Tensor] = {}  # torch's memory, which lives until the streams are done with it
        self._thread = threading.local()

    # -- for tests -------------------------------------------------------------------------------------

    def new_stream(self) -> int:
        with self.machine.lock:
            number = self.machine.number()
            self.streams[number] = Stream(self.machine, self, self.machine.seed + number)
        return number

    @contextlib.contextmanager
    def using(self, stream: int) -> Iterator[None]:
        """As `with torch.cuda.stream(...)`."""
        before = getattr(self._thread, "stream", None)
        self._thread.stream = stream
        yield
        self._thread.stream = before

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        """As `tensor.fill_(value)`, on the current stream."""

        def run() -> None:
            tensor.fill_(value)

        self.streams[self.stream(0)].submit(run)

    def synchronize(self) -> None:
        assert not self.killed
        for stream in list(self.streams.values()):
            stream.synchronize()

    def kill(self) -> None:
        self.killed = True

    def _call(self, name: str, *, needs_device: bool = False) -> None:
        with self.machine.lock:
            self.calls[name] += 1
        if self.sticky:
            raise CudaError(f"CUDA error: {self.sticky}", 700)
        if self.fail.get(name):
            raise self.fail[name].pop(0)
        if needs_device and getattr(self._thread, "device", None) is None:
            self.machine.violations.append(f"{name} outside of on(device)")

    def _check_alive(self, address: int, nbytes: int) -> None:
        for memory in self.machine.memories:
            inside = memory.pointer <= address < memory.pointer + memory.size
            if not inside:
                continue
            if address + nbytes > memory.pointer + memory.size:
                self.machine.violations.append("a copy over the end of its memory")
            if memory.freed:
                self.machine.violations.append("a copy touches memory that was freed")
            elif memory.pointer not in self.allocated and memory.pointer not in self.opened:
                self.machine.violations.append("a copy touches memory that is not open here")

    # -- devices and streams ---------------------------------------------------------------------------

    def is_ready(self) -> bool:
        return self.ready

    def load(self) -> None:
        if self.unavailable:
            raise CudaError(self.unavailable)

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        self._call("on")
        assert 0 <= device < len(self.uuids)
        before = getattr(self._thread, "device", None)
        self._thread.device = device
        try:
            yield
        finally:
            self._thread.device = before

    at = on

    def device_of(self, tensor: torch.Tensor) -> int:
        return getattr(tensor, "simulated_device", 0)

    def uuid(self, device: int) -> str:
        return self.uuids[device]

    def device_with(self, uuid: str) -> int | None:
        return self.uuids.index(uuid) if uuid in self.uuids else None

    def stream(self, device: int) -> int:
        stream = getattr(self._thread, "stream", None)
        if stream is not None:
            return stream
        with self.machine.lock:
            if device not in self._defaults:
                self._defaults[device] = self.new_stream()
            return self._defaults[device]

    def side_stream(self, device: int) -> int:
        with self.machine.lock:
            if device not in self._side:
                self._side[device] = self.new_stream()
            return self._side[device]

    def is_capturing(self) -> bool:
        return self.capturing

    # -- torch's memory --------------------------------------------------------------------------------

    def empty(self, nbytes: int, device: int) -> torch.Tensor:
        self._call("empty")
        tensor = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
        tensor.simulated_device = device
        self._made[tensor.data_ptr()] = tensor
        return tensor

    def moved(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.synchronize()
        moved = tensor.clone()
        moved.simulated_device = device.index
        return moved

    def keep_for_stream(self, tensor: torch.Tensor, device: int, stream: int) -> None:
        assert stream == self.stream(device)
        self.streams[stream].submit(partial(id, tensor))

    def release_cache(self) -> None:
        self.caches_released += 1

    # -- memory ----------------------------------------------------------------------------------------

    def malloc(self, nbytes: int) -> int:
        self._call("malloc", needs_device=True)
        with self.machine.lock:
            if sum(m.size for m in self.allocated.values()) + nbytes > self.memory_limit:
                raise no_memory()
            memory = Memory(nbytes)
            self.machine.memories.append(memory)
            self.allocated[memory.pointer] = memory
        return memory.pointer

    def free(self, pointer: int) -> None:
        self._call("free", needs_device=True)
        with self.machine.lock:
            memory = self.allocated.pop(pointer, None)
            if memory is None:
                self.machine.violations.append("freed what is not allocated")
                return
            memory.freed = True
            for process in self.machine.processes:
                if pointer in process.opened and not process.killed:
                    self.machine.violations.append("freed what another process has open")

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._call("copy", needs_device=True)

        self.streams[stream].submit(partial(self._run_copy, to, source, nbytes, self._made.pop(to, None)))

    def _run_copy(self, to: int, source: int, nbytes: int, keep: torch.Tensor | None) -> None:
        with self.machine.lock:
            self._check_alive(to, nbytes)
            self._check_alive(source, nbytes)
        ctypes.memmove(to, source, nbytes)

    def write(self, to: int, data: bytes, stream: int) -> None:
        self._call("write", needs_device=True)
        self.streams[stream].submit(partial(ctypes.memmove, to, data, len(data)))

    def read(self, source: int, nbytes: int, stream: int) -> bytes:
        self._call("read", needs_device=True)
        self.streams[stream].synchronize()
        return ctypes.string_at(source, nbytes)

    def export_memory(self, pointer: int) -> bytes:
        self._call("export_memory")
        return self.machine.handle_of(self.allocated[pointer])

    def open_memory(self, handle: bytes) -> int:
        self._call("open_memory", needs_device=True)
        memory = self.machine.handles.get(handle)
        if memory is None or memory.freed:
            raise CudaError("CUDA error: invalid device context", 201)
        with self.machine.lock:
            if memory.pointer in self.opened:
                self.machine.violations.append("opened twice")
            self.opened[memory.pointer] = memory
        return memory.pointer

    def close_memory(self, pointer: int) -> None:
        self._call("close_memory", needs_device=True)
        if self.opened.pop(pointer, None) is None:
            self.machine.violations.append("closed what is not open")

    # -- events ----------------------------------------------------------------------------------------

    def event(self) -> int:
        self._call("event", needs_device=True)
        number = self.machine.number()
        self.events[number] = Event()
        return number

    def record(self, event: int, stream: int) -> None:
        self._call("record", needs_device=True)
        found, token = self.events[event], object()
        found.last = token

        def reach() -> None:
            found.reached = token

        self.streams[stream].submit(reach)

    def is_done(self, event: int) -> bool:
        self._call("is_done", needs_device=True)
        found = self.events[event]
        return found.last is found.reached

    def destroy(self, event: int) -> None:
        self._call("destroy", needs_device=True)
        if self.events.pop(event, None) is None:
            self.machine.violations.append("destroyed an event twice")

    def export_event(self, event: int) -> bytes:
        self._call("export_event")
        return self.machine.handle_of(self.events[event])

    def open_event(self, handle: bytes) -> int:
        self._call("open_event", needs_device=True)
        event = self.machine.handles.get(handle)
        if event is None:
            raise CudaError("CUDA error: invalid resource handle", 400)
        number = self.machine.number()
        self.events[number] = event
        return number
