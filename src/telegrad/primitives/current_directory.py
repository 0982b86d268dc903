"""The current directory, which `python -m telegrad...` has put first among the places to import from.

What telegrad imports must not come from there: `python script.py` and the command `telegrad` do not look there, and a
file of the user's may be called torch.py. Python has put it there before any of our code runs, so it is taken out first
of all when telegrad is imported. Only what Python itself loads to find a module can still come from there, and telegrad
itself, where it lies there.

Imports nothing that Python has not loaded to start.
"""

import os
import sys

_taken_out = ""


def take_out() -> None:
    """Takes the current directory out of sys.path, if Python has put it there to run one of telegrad's modules. Called
    while Python looks for a module that `-m` names."""
    global _taken_out
    # The module is the last thing on the command line that was for Python: as "telegrad.compat", or "-mtelegrad.compat"
    # with any other letters before the m.
    named = sys.orig_argv[-len(sys.argv)]
    if named.startswith("-"):
        named = named.partition("m")[2]
    if named.partition(".")[0] != "telegrad" or sys.flags.safe_path:
        return
    try:
        here = os.getcwd()
    except OSError:  # it was removed, and Python has put nothing there
        return
    telegrads = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if sys.path[0] == here != telegrads:
        _taken_out = sys.path.pop(0)


def put_back() -> None:
    """Puts it back, for a module of the user's: everything is as `python -m` has it. Any number of times."""
    global _taken_out
    if _taken_out:
        sys.path.insert(0, _taken_out)
        _taken_out = ""
