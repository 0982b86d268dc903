"""One timeline of all workers.

    with telegrad.profiler.profile() as prof:
        step()
    prof.export_chrome_trace("step.json")   # opens in Perfetto
    print(prof.summary())

docs/profiling.md says more. torch's own profilers have calls in them too: see profiled_calls.py.
"""

from torch.profiler import schedule

from ..errors import TraceError
from ..runtime.profiled_calls import local_only
from .drawing import draw
from .session import profile
from .summary import Summary
from .trace import Trace, load, merge

__all__ = [
    "Summary",
    "Trace",
    "TraceError",
    "draw",
    "load",
    "local_only",
    "merge",
    "profile",
    "schedule",
]
