"""What scripts/demo runs: the demo, and Ctrl-C ends it without a traceback while torch is still being imported."""

import os
import runpy
import signal

signal.signal(signal.SIGINT, lambda *_: os._exit(130))
runpy.run_module("telegrad.demo", run_name="__main__", alter_sys=True)
