"""Ctrl-C and SIGTERM: the first asks to stop, the second does not wait."""

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Set by the first Ctrl-C or SIGTERM; the second one cancels the running task at once."""
    stop, loop, task = asyncio.Event(), asyncio.get_running_loop(), asyncio.current_task()
    assert task

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        logger.warning("stopped at once")
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
