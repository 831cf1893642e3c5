"""How late the event loop is: the difference between when a timer should fire and when it does."""

import asyncio
import faulthandler
import itertools
import logging
import sys
from collections import deque

TICK_S = 0.05
"""Each tick wakes the daemon; at 20 ms and with a watchdog set anew at each, measuring took a
quarter of a daemon's processor time with a small model."""
WINDOW_TICKS = 1200
"""One minute."""
STALL_S = 0.25
"""A loop that stands for longer has something on it that does not belong there."""
DUMP_AFTER_S = 5.0
"""A loop that stands for this long has its stacks dumped to stderr, from a watchdog thread."""
WATCH_TICKS = 20
"""The watchdog is a new thread each time it is set, so it is set once a second."""

logger = logging.getLogger(__name__)


class LagMonitor:
    """Measures while `run` runs; the percentiles are over the last minute."""

    def __init__(self) -> None:
        self._late_s: deque[float] = deque(maxlen=WINDOW_TICKS)

    async def run(self) -> None:
        """Never returns."""
        loop = asyncio.get_running_loop()
        try:
            for tick in itertools.count():
                if tick % WATCH_TICKS == 0:
                    file = sys.__stderr__ or sys.stderr
                    faulthandler.dump_traceback_later(DUMP_AFTER_S, file=file)
                due = loop.time() + TICK_S
                await asyncio.sleep(TICK_S)
                late_s = loop.time() - due
                self._late_s.append(max(0.0, late_s))
                if late_s > STALL_S:
                    logger.warning("the event loop stood still for %.2f s", late_s)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def percentile_ms(self, share: float) -> float:
        """Milliseconds; 0 before the first tick."""
        late = sorted(self._late_s)
        return 1000 * late[min(int(share * len(late)), len(late) - 1)] if late else 0.0
