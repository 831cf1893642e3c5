"""How late the event loop is: the difference between when a timer should fire and when it does."""

import asyncio
import faulthandler
import logging
import sys
from collections import deque

TICK_S = 0.02
WINDOW_TICKS = 3000
"""One minute."""
STALL_S = 0.25
"""A loop that stands for longer has something on it that does not belong there."""
DUMP_AFTER_S = 5.0
"""A loop that stands for this long has its stacks dumped to stderr, from a watchdog thread."""

logger = logging.getLogger(__name__)


class LagMonitor:
    """Measures while `run` runs; the percentiles are over the last minute."""

    def __init__(self) -> None:
        self._late_s: deque[float] = deque(maxlen=WINDOW_TICKS)

    async def run(self) -> None:
        """Never returns."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                faulthandler.dump_traceback_later(DUMP_AFTER_S, file=sys.__stderr__ or sys.stderr)
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
