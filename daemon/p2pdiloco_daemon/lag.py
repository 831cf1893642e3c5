"""How late the event loop is: the difference between when a timer should fire and when it does.

A loop that is very late although the process took no processor time was not blocked: the machine
slept (a closed lid), or somebody stopped the process.
"""

import asyncio
import faulthandler
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable

TICK_S = 0.05
"""Each tick wakes the daemon; at 20 ms and with a watchdog set anew at each, measuring took a
quarter of a daemon's processor time with a small model."""
WINDOW_TICKS = 1200
"""One minute."""
STALL_S = 0.25
"""A loop that stands for longer has something on it that does not belong there."""
DUMP_AFTER_S = 5.0
"""A loop that stands for this long has its stacks dumped to stderr, from a watchdog thread."""
SLEEP_S = 3.0
"""From so much on it is worth a word, and others have begun to suspect this node."""
SLEEP_BUSY_MAX = 0.1
"""Share of that time that the process may have been running."""
WATCH_TICKS = 20
"""The watchdog is a new thread each time it is set, so it is set once a second."""

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
        try:
            for tick in itertools.count():
                if tick % WATCH_TICKS == 0:
                    file = sys.__stderr__ or sys.stderr
                    faulthandler.dump_traceback_later(DUMP_AFTER_S, file=file)
                due, began, busy = loop.time() + TICK_S, self._clock(), self._busy()
                await asyncio.sleep(TICK_S)
                late_s, away_s = loop.time() - due, self._clock() - began - TICK_S
                if away_s >= SLEEP_S and self._busy() - busy < SLEEP_BUSY_MAX * away_s:
                    self._on_sleep(away_s)
                    continue
                self._late_s.append(max(0.0, late_s))
                if late_s > STALL_S:
                    logger.warning("the event loop stood still for %.2f s", late_s)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def percentile_ms(self, share: float) -> float:
        """Milliseconds; 0 before the first tick."""
        late = sorted(self._late_s)
        return 1000 * late[min(int(share * len(late)), len(late) - 1)] if late else 0.0
