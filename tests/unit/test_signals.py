"""What asks a daemon to stop."""

import asyncio
import os
import signal

from p2pdiloco_daemon.signals import stop_signals


def test_the_first_sigterm_asks_to_stop() -> None:
    async def main() -> None:
        with stop_signals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()

    asyncio.run(main())


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
