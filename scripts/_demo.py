"""What scripts/demo runs: `telegrad demo`. Ctrl-C ends it without a traceback while torch is still being imported."""

import os
import signal
import sys

signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from telegrad.cli import main  # noqa: E402

sys.argv.insert(1, "demo")
try:
    main()
finally:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: nothing may change the exit code any more
