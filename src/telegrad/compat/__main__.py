"""python -m telegrad.compat script.py ARGS: runs a script of torch's RPC on telegrad."""

from __future__ import annotations

import os
import runpy
import sys

from .replacing import install

USAGE = "usage: python -m telegrad.compat script.py [arguments of the script ...]"


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    script = sys.argv[1]
    if not os.path.exists(script):
        sys.exit(f"telegrad.compat: there is no script {script!r}\n{USAGE}")
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # as Python has it for a script
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
