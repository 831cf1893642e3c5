"""What asks a daemon to stop."""

import asyncio
import os
import signal

import pytest

from p2pdiloco_daemon.signals import stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_to_stop(number: signal.Signals) -> None:
    async def main() -> None:
        with stop_signals() as stop:
            os.kill(os.getpid(), number)
            await stop.wait()

    before = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        asyncio.run(main())
    finally:
        signal.signal(number, before)


def test_under_nohup_the_end_of_the_terminal_stops_nothing() -> None:
    async def main() -> None:
        with stop_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
            assert not stop.is_set()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(main())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_end_of_the_supervisor_asks_to_stop() -> None:
    async def main() -> None:
        reading, writing = os.pipe()
        with stop_signals(reading) as stop:
            await asyncio.sleep(0)
            assert not stop.is_set()
            os.close(writing)
            await stop.wait()
        os.close(reading)

    asyncio.run(main())
