"""Ctrl-C, SIGTERM and the end of the terminal: the first asks to stop, the second does not wait.

The end of whoever started this process asks to stop, too, where it wants that.
"""

import argparse
import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


def add_supervisor_option(parser: argparse.ArgumentParser) -> None:
    """For whoever starts daemons by the dozen, as the demo does; no person needs it."""
    parser.add_argument("--supervisor-fd", type=int, help=argparse.SUPPRESS)


@contextmanager
def stop_signals(supervisor_fd: int | None = None) -> Iterator[asyncio.Event]:
    """Set by the first of these signals; the second one cancels the running task at once.

    `supervisor_fd` is the reading end of a pipe that nobody writes to: whoever holds the other end
    has ended, however that came, when it can be read.
    """
    stop, loop, task = asyncio.Event(), asyncio.get_running_loop(), asyncio.current_task()
    assert task

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    def on_supervisor_gone() -> None:
        assert supervisor_fd is not None
        loop.remove_reader(supervisor_fd)
        logger.warning("the process that started this one is gone")
        stop.set()

    if supervisor_fd is not None:
        loop.add_reader(supervisor_fd, on_supervisor_gone)
    numbers = _numbers()
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        logger.warning("stopped at once")
    finally:
        if supervisor_fd is not None:
            loop.remove_reader(supervisor_fd)
        for number in numbers:
            loop.remove_signal_handler(number)


def _numbers() -> list[signal.Signals]:
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which `nohup` wants
        numbers.append(signal.SIGHUP)
    return numbers
