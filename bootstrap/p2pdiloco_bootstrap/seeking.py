"""When a peer is sought that a request could not reach.

Apart from the requests, which may be over before a dial has failed. A peer that has moved, or that
has another relay, says so in its record; a peer that is gone is sought less and less often.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

PAUSE_S = (2.0, 60.0)
"""First and longest time between two searches for one peer; it doubles."""

FORGET_S = 300.0
"""After so long without a request for it a peer is sought from the start again."""

SOUGHT_MAX = 256
"""Peers remembered as sought; beyond that a new one is not."""

AT_ONCE = 8
"""Searches; each is a look-up of one key and a dial of some addresses."""


@dataclass(slots=True)
class _Sought:
    next_at: float
    pause_s: float
    asked_at: float


@dataclass(slots=True)
class Seeker:
    """Of one host; `find` looks a peer up and dials it, or raises OSError."""

    find: Callable[[str], Awaitable[None]]
    _sought: dict[str, _Sought] = field(default_factory=dict)
    _due: asyncio.Queue[str] = field(default_factory=lambda: asyncio.Queue(SOUGHT_MAX))

    def seek(self, peer: str) -> None:
        """A request could not reach `peer`; a search starts soon, or is not due yet."""
        now = asyncio.get_running_loop().time()
        self._sought = {p: s for p, s in self._sought.items() if now < s.asked_at + FORGET_S}
        if peer not in self._sought and len(self._sought) >= SOUGHT_MAX:
            return
        sought = self._sought.setdefault(peer, _Sought(now, PAUSE_S[0], now))
        sought.asked_at = now
        if now >= sought.next_at and not self._due.full():
            sought.next_at = now + sought.pause_s
            sought.pause_s = min(2 * sought.pause_s, PAUSE_S[1])
            self._due.put_nowait(peer)

    async def run(self) -> None:
        """Searches for ever."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(AT_ONCE):
                tasks.create_task(self._work(), name=f"seeking {number}")

    async def _work(self) -> None:
        while True:
            peer = await self._due.get()
            try:
                await self.find(peer)
            except OSError as error:
                log.debug("%s is not found: %s", peer, error)
            else:
                log.info("%s is found again", peer[-8:])
                self._sought.pop(peer, None)
