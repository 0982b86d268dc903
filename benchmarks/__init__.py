"""Benchmarks: telegrad and torch.distributed (rpc and autograd), alternately, in one run.

`python -m benchmarks [SUITE ...]` imports `benchmarks.SUITE` and runs its `SUITE` object (without a name: every
suite that `command_line.py` lists), so a new benchmark is one new module. The path of a run, file by file:

    command_line.py   what to run
    runner.py         rounds: each backend in turn, then the floors, at the end the sections
    processes.py      fresh processes for each job; none is left afterwards (ports.py: where they meet)
    busy.py           busy loops beside a run
    figures.py        what a suite is made of      backends.py  the two sides      sampling.py  the clock
    calls.py  startup.py  floors.py  memory.py  profiling.py  callee.py            the suite `calls`
    gradients.py  growth.py  planning.py  passes.py  programs.py                   the suite `gradients`
    training.py  models.py                                                         the suite `training`
    steps.py  trainers.py  step_models.py  stages.py  optimizer_steps.py
      leaves.py  messages.py  cputime.py  by_hand.py                               the suite `steps`
    plain.py  devices.py                                 the suites `plain` and `devices`, which run by name only
    summary.py        medians, ratios, goals
    report.py  growth_report.py  tables.py               what is printed and written to results/
    plot.py  growth_plot.py      machine.py              the pictures; the machine and its load
"""
