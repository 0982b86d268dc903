"""Benchmarks: telegrad and torch.distributed (rpc and autograd), alternately, in one run.

`python -m benchmarks [SUITE ...]` imports `benchmarks.SUITE` and runs its `SUITE` object (without a name: every
suite that `command_line.py` lists), so a new benchmark is one new module. The path of a run, file by file:

    command_line.py   what to run
    runner.py         rounds: each backend in turn, then the floors, at the end the sections
    processes.py      fresh processes for each job; none is left afterwards (ports.py: where they meet)
    figures.py        what a suite is made of      backends.py  the two sides      sampling.py  the clock
    calls.py  startup.py  floors.py  memory.py  profiling.py  callee.py            the suite `calls`
    gradients.py  growth.py  planning.py  passes.py  programs.py                   the suite `gradients`
    training.py  models.py                                                         the suite `training`
    summary.py        medians, ratios, goals
    report.py  tables.py  plot.py  growth_plot.py  machine.py    what is printed and written to results/
"""
