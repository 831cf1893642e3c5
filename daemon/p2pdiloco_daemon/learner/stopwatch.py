"""How long something took, and how much of that the machine was busy with something else."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Seconds since some moment."""


class Stopwatch:
    """Sums up spans of time, and how much of them this thread was ready to run and had no core."""

    def __init__(self, clock: Clock, queued: Clock) -> None:
        self._clock = clock
        self._queued = queued
        self._sums = 0.0, 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        started, queued = self._clock(), self._queued()
        try:
            yield
        finally:
            spent_s, queued_s = self._sums
            self._sums = (
                spent_s + self._clock() - started,
                queued_s + self._queued() - queued,
            )

    def take(self) -> tuple[float, float]:
        """Both sums in seconds, which start anew."""
        sums, self._sums = self._sums, (0.0, 0.0)
        return sums


def queued_clock() -> Clock:
    """The seconds in which the calling thread waited for a core, so far; only Linux tells."""
    try:
        fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return lambda: 0.0
    return lambda: int(os.pread(fd, 64, 0).split()[1]) / 1e9
