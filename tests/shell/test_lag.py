"""How late the event loop is."""

import asyncio
from itertools import count

import pytest
from virtual_clock import VirtualClockLoop, run_virtual

from p2pdiloco_daemon.lag import TICK_S, LagMonitor


async def measure(late_s: float, every: int) -> LagMonitor:
    """A minute in which the loop stands still for `late_s` at every so many ticks."""
    monitor, loop = LagMonitor(), asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)
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
