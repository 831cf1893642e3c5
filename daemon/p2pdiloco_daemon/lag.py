"""How late the event loop is: the difference between when a timer should fire and when it does.

A loop that is very late although the process took no processor time was not blocked: the machine
slept (a closed lid), or somebody stopped the process.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Self

TICK_S = 0.05
"""Each tick wakes the daemon; at 20 ms measuring took much of a daemon's processor time with a
small model."""
WINDOW_TICKS = 1200
"""One minute."""
STALL_S = 0.25
"""A loop that stands for longer has something on it that does not belong there."""
SLEEP_S = 3.0
"""From so much on it is worth a word, and others have begun to suspect this node."""
SLEEP_BUSY_MAX = 0.1
"""Share of that time that the process may have been running."""
WATCH_S = 1.0
WATCHES_MAX = 5
"""A loop that makes no tick between so many looks of the watchdog has its stacks logged. Looks are
counted, not seconds: a process that was stopped makes none, and is not blocked."""

logger = logging.getLogger(__name__)


def time_with_sleep() -> float:
    """Monotonic seconds that go on while the machine sleeps; Linux's usual ones stand still."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LagMonitor:
    """Measures while `run` runs; the percentiles are over the last minute.

    `on_sleep` is told for how many seconds the node was asleep, once it is awake again.
    """

    def __init__(
        self,
        on_sleep: Callable[[float], object] = lambda seconds: None,
        clock: Callable[[], float] = time_with_sleep,
        busy: Callable[[], float] = time.process_time,
    ) -> None:
        self._on_sleep = on_sleep
        self._clock = clock
        self._busy = busy
        self._late_s: deque[float] = deque(maxlen=WINDOW_TICKS)

    async def run(self) -> None:
        """Never returns."""
        loop = asyncio.get_running_loop()
        with Watchdog() as watchdog:
            while True:
                watchdog.ticks += 1
                due, began, busy = loop.time() + TICK_S, self._clock(), self._busy()
                await asyncio.sleep(TICK_S)
                late_s, away_s = loop.time() - due, self._clock() - began - TICK_S
                if away_s >= SLEEP_S and self._busy() - busy < SLEEP_BUSY_MAX * away_s:
                    self._on_sleep(away_s)
                    continue
                self._late_s.append(max(0.0, late_s))
                if late_s > STALL_S:
                    logger.warning("the event loop stood still for %.2f s", late_s)

    def percentile_ms(self, share: float) -> float:
        """Milliseconds; 0 before the first tick."""
        late = sorted(self._late_s)
        return 1000 * late[min(int(share * len(late)), len(late) - 1)] if late else 0.0


class Watchdog:
    """A thread that logs all stacks when `ticks` stays the same.

    Not faulthandler's, which reads stacks while the other threads run: a daemon that went on after
    a SIGSTOP, when its watchdog was overdue, died of that with a segmentation fault.
    """

    def __init__(self) -> None:
        self.ticks = 0
        self._seen = -1
        self._looks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> str | None:
        """The stacks of all threads, once, at the last look that a loop may stand still for."""
        if self.ticks != self._seen:
            self._seen, self._looks = self.ticks, 0
            return None
        self._looks += 1
        return _stacks() if self._looks == WATCHES_MAX else None

    def _watch(self) -> None:
        while not self._stop.wait(WATCH_S):
            if stacks := self.look():
                seconds = WATCHES_MAX * WATCH_S
                logger.warning("the event loop stands still since %.0f s:\n%s", seconds, stacks)


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, 'thread')}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
