"""Operators of all workers as torch's own FunctionEvents, for key_averages() and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.autograd.profiler_util import EventList, FunctionEvent

from .._torch import DeviceType
from ..primitives.text import clean
from .chrome import ON_DEVICE, ChromeEvent

_OPERATORS = frozenset(("cpu_op", "user_annotation", "python_function"))


def function_events(events: Sequence[ChromeEvent], ids: Mapping[int, int], *, per_worker: bool) -> EventList:
    """torch's list of events; `ids` has the id of each process's worker. Without `per_worker`, an operator has the same
    name on all workers, and one average."""
    found = []
    threads: dict[tuple[int, Any], int] = {}
    # Of all events or of none: torch's table asks the first one.
    device = "cuda" if any(event.get("cat") in ON_DEVICE for event in events) else None
    for number, event in enumerate(events):
        category = event.get("cat")
        if event.get("ph") != "X" or category not in _OPERATORS | ON_DEVICE:
            continue
        args = event.get("args", {})
        found.append(
            FunctionEvent(
                id=number,
                name=clean(event["name"]),
                trace_name=clean(event["name"]),
                thread=threads.setdefault((event["pid"], event["tid"]), len(threads) + 1),
                start_us=event["ts"],
                end_us=event["ts"] + event["dur"],
                input_shapes=args.get("Input Dims"),
                concrete_inputs=args.get("Concrete Inputs"),
                stack=args.get("Call stack", "").split(";") if args.get("Call stack") else [],
                scope=0,
                sequence_nr=args.get("Sequence number", -1),
                node_id=ids.get(event["pid"], -1) if per_worker else -1,
                device_type=DeviceType.CUDA if category in ON_DEVICE else DeviceType.CPU,
                is_user_annotation=category == "user_annotation",
                use_device=device,
            )
        )
    found.sort(key=lambda f: (f.time_range.start, -f.time_range.end))
    listed = EventList(found, use_device=device)
    listed._build_tree()
    return listed
