"""Benchmarks: telegrad and torch.distributed.rpc, alternately, in one run.

`python -m benchmarks [SUITE]` imports `benchmarks.SUITE` (default: `calls`) and runs its `SUITE` object, so a
new benchmark is one new module and changes nothing here. The path of a run, file by file:

    command_line.py   what to run
    runner.py         rounds: each backend in turn, then the floors, at the end the sections
    processes.py      fresh processes for each job; none is left afterwards (ports.py: where they meet)
    figures.py        what a suite is made of      backends.py  the two sides      sampling.py  the clock
    calls.py  startup.py  floors.py  memory.py  profiling.py  callee.py            the suite `calls`
    summary.py        medians, ratios, goals
    report.py  tables.py  plot.py  machine.py      what is printed and written to results/
"""
