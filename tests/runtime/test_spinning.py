"""When threads of a worker spin, on the bench's clock: not while another program wants their cores."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from scripted import Bench
from world import World

from telegrad.transport import lease as lease_module

LOOK = 2e-6  # seconds from one look to the next, on a core of one's own
SLICE = 4e-3  # while another program has it


class Spinner:
    """A thread with the lease. Before each look that it takes while it spins, `between` may do something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = World()
        self.bench = Bench(self.world, monkeypatch)
        self.lease = self.bench.lease
        self.lease.max_spin = 300e-6
        self.connection = self.bench.connection("b", 2)
        self.between: Callable[[], None] = lambda: None
        self.disturbed = False
        self.looks = 0
        system = SimpleNamespace(**{**vars(lease_module.os), "sched_yield": self._yield})
        monkeypatch.setattr(lease_module, "os", system)

    def _yield(self) -> None:
        self.looks += 1
        self.world.now += SLICE if self.disturbed else LOOK
        self.between()

    def spins(self, after: float = 0.0) -> bool:
        """Waits for 10 ms, so many seconds after the last time, as where messages follow each other closely."""
        self.world.now += after
        self.looks = 0
        self.lease._lively = True
        self.lease.wait(10e-3)
        return self.looks > 0

    def is_disturbed_twice(self, after: float = 0.0) -> bool:
        """Whether it spins, and is disturbed two times in a row."""
        self.disturbed = True
        return self.spins(after) and self.spins()

    def run(self, program: Callable[[], None]) -> None:
        def with_lease() -> None:
            assert self.lease.try_take()
            program()
            self.lease.release()

        thread = self.world.spawn(with_lease)
        self.world.run()
        if thread.error is not None:
            raise thread.error


@pytest.fixture
def spinner(monkeypatch):
    return Spinner(monkeypatch)


def test_a_thread_that_has_its_core_spins_each_time(spinner):
    def program() -> None:
        for _ in range(5):
            assert spinner.spins()
            assert 140 < spinner.looks < 160  # and blocks after that
            assert spinner.lease.linger

    spinner.run(program)


def test_beside_devices_a_thread_spins_for_longer_and_where_messages_are_further_apart(spinner):
    def program() -> None:
        def lingers_after_2_ms() -> bool:
            for _ in range(2):
                spinner.world.now += 2e-3
                spinner.world.readable.add(spinner.connection.fd)
                spinner.lease.wait(0)
                spinner.world.readable.clear()
            return spinner.lease.linger > 0

        assert not lingers_after_2_ms()
        for _ in range(2):  # the second time changes nothing
            spinner.lease.expect_devices()
        assert spinner.spins()
        assert 500 < spinner.looks < 550
        assert lingers_after_2_ms()

    spinner.run(program)


def test_one_that_is_disturbed_now_and_then_goes_on(spinner):
    """The system has work of its own."""

    def program() -> None:
        for _ in range(5):
            spinner.disturbed = True
            assert spinner.spins(after=0.1)
            assert spinner.looks == 1  # it blocks at once, this time
            spinner.disturbed = False
            assert spinner.spins()

    spinner.run(program)


def test_one_that_was_disturbed_twice_does_not_spin_for_a_while(spinner):
    def program() -> None:
        assert spinner.is_disturbed_twice()
        assert spinner.looks == 1  # it blocks at once
        spinner.disturbed = False
        assert not spinner.spins()
        assert not spinner.spins(after=0.1)
        spinner.lease._lively = True
        assert not spinner.lease.linger
        assert spinner.spins(after=0.1)

    spinner.run(program)


def test_one_that_is_disturbed_again_waits_twice_as_long(spinner):
    def program() -> None:
        assert spinner.is_disturbed_twice()
        for calm in (0.2, 0.4, 0.8, 1.6, 3.2, 3.2):
            assert not spinner.spins(after=calm - 0.05)
            assert spinner.is_disturbed_twice(after=0.05)
        # Undisturbed for as long, and the next time counts as the first.
        spinner.disturbed = False
        assert spinner.spins(after=3.3)
        assert spinner.is_disturbed_twice(after=3.3)
        assert not spinner.spins(after=0.1)
        assert spinner.spins(after=0.1)

    spinner.run(program)


def test_a_message_that_came_meanwhile_hides_nothing(spinner):
    """The thread that gets its core back finds what it waited for: it was disturbed all the same."""

    def program() -> None:
        spinner.disturbed = True
        assert spinner.spins()
        spinner.between = lambda: spinner.world.readable.add(spinner.connection.fd)
        assert spinner.spins()
        spinner.world.readable.clear()
        spinner.between = lambda: None
        assert not spinner.spins(after=0.1)

    spinner.run(program)


def test_a_thread_that_completes_what_it_waits_for_wakes_no_other(spinner):
    """It has read the answer itself: the bell would wake an idle thread of the worker for nothing."""
    bench = spinner.bench
    call = bench.call(1, spinner.connection)
    rung = []
    real = spinner.lease.ring
    spinner.lease.ring = lambda connection=None: (rung.append(1), real(connection))

    def wait() -> None:
        bench.reader.wait_for(call, None)
        assert call.done

    spinner.world.spawn(wait)
    spinner.world.spawn(lambda: bench.answer(1, spinner.connection), "answer")
    spinner.world.run()
    assert call.done and not rung
