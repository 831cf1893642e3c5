"""How late the event loop is."""

import asyncio
from collections.abc import Callable
from itertools import count

import pytest
from virtual_clock import VirtualClockLoop, run_virtual

from p2pdiloco_daemon.lag import SLEEP_S, TICK_S, WATCHES_MAX, LagMonitor, Watchdog


class Process:
    """What the system tells: how long it was on a core, and for how long the machine slept."""

    def __init__(self) -> None:
        self.slept_s = 0.0
        self.busy_s = 0.0

    def clock(self) -> float:
        return asyncio.get_running_loop().time() + self.slept_s

    def busy(self) -> float:
        return self.busy_s


async def measure(late_s: float, every: int) -> LagMonitor:
    """A minute in which the loop stands still for `late_s` at every so many ticks."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)
    monitor = LagMonitor(clock=loop.time)
    measuring = asyncio.create_task(monitor.run())
    for tick in count(1):
        await asyncio.sleep(TICK_S)
        if tick % every == 0:
            loop.selector.now += late_s
        if loop.time() > 60:
            break
    measuring.cancel()
    await asyncio.wait([measuring])
    return monitor


def test_before_the_first_tick_there_is_no_lag() -> None:
    assert LagMonitor().percentile_ms(0.99) == 0


def test_a_loop_in_time_has_none() -> None:
    monitor = run_virtual(measure(0.0, 1))
    assert monitor.percentile_ms(1.0) == pytest.approx(0, abs=1e-6)


def test_rare_pauses_are_in_the_tail_only() -> None:
    monitor = run_virtual(measure(0.2, 50))
    assert monitor.percentile_ms(0.5) == pytest.approx(0, abs=1e-6)
    assert 100 < monitor.percentile_ms(1.0) <= 200.001


def test_a_long_stand_is_told(caplog: pytest.LogCaptureFixture) -> None:
    run_virtual(measure(2.0, 1000))
    run_virtual(measure(2.0, 10))
    assert "the event loop stood still for" in caplog.text


async def sleeps_told(change: Callable[[Process, VirtualClockLoop], None]) -> list[float]:
    """What is told of sleep when `change` comes between two ticks."""
    told: list[float] = []
    process, loop = Process(), asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)
    monitor = LagMonitor(told.append, process.clock, process.busy)
    measuring = asyncio.create_task(monitor.run())
    await asyncio.sleep(10.5 * TICK_S)
    change(process, loop)
    await asyncio.sleep(10 * TICK_S)
    measuring.cancel()
    await asyncio.wait([measuring])
    assert (monitor.percentile_ms(1.0) > 1) == (not told)
    return told


def test_a_machine_that_slept_is_told_of_and_counts_as_no_lag() -> None:
    def sleep(process: Process, loop: VirtualClockLoop) -> None:
        process.slept_s += 3600

    assert run_virtual(sleeps_told(sleep)) == [pytest.approx(3600, abs=1)]


def test_a_stopped_process_is_told_of_in_the_same_way() -> None:
    def stop(process: Process, loop: VirtualClockLoop) -> None:
        loop.selector.now += 12

    assert run_virtual(sleeps_told(stop)) == [pytest.approx(12, abs=1)]


@pytest.mark.parametrize(("late_s", "busy_s"), [(12.0, 11.0), (SLEEP_S / 2, 0.0)])
def test_a_loop_that_computes_or_starves_does_not_sleep(late_s: float, busy_s: float) -> None:
    def hold_up(process: Process, loop: VirtualClockLoop) -> None:
        loop.selector.now += late_s
        process.busy_s += busy_s

    assert run_virtual(sleeps_told(hold_up)) == []


def test_a_loop_that_stands_has_its_stacks_told_once() -> None:
    watchdog = Watchdog()
    told = [watchdog.look() for _ in range(3 * WATCHES_MAX)]
    (stacks,) = filter(None, told)
    assert told.index(stacks) == WATCHES_MAX
    assert "test_a_loop_that_stands_has_its_stacks_told_once" in stacks


def test_a_loop_that_moves_has_not() -> None:
    watchdog = Watchdog()
    for tick in range(3 * WATCHES_MAX):
        watchdog.ticks = tick // 2
        assert watchdog.look() is None
