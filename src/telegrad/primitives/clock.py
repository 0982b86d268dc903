"""The clock of deadlines. All of telegrad reads it as `clock.now()`, so that a test can put its own in this place."""

from __future__ import annotations

import time

now = time.monotonic
