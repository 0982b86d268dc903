"""Tests of faults that fail today. pytest does not collect this file by itself; run it by its name."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import pytest
from fault_fixtures import workers  # noqa: F401
from fault_programs import PATIENCE, check_nothing_is_left, check_works, forward, soon, wait_until

from telegrad import autograd


def test_ctrl_c_as_all_have_reported(workers, monkeypatch):
    """The root was about to tell the others that the pass is done."""
    driver = workers["driver"]
    wait = driver.engine._wait

    def wait_and_press(*args: object) -> None:
        wait(*args)
        monkeypatch.undo()
        raise KeyboardInterrupt

    with autograd.context() as context_id:
        loss = forward()
        monkeypatch.setattr(driver.engine, "_wait", wait_and_press)
        with pytest.raises(KeyboardInterrupt):
            autograd.backward(context_id, [loss], timeout=PATIENCE)
        with soon(3.0):
            wait_until(lambda: not any(w.engine.statistics()["passes"] for w in workers.values()), "its end")
    check_works()
    check_nothing_is_left()
