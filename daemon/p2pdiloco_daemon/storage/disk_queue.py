"""The disk thread: everything that blocks on files, one thing after the other.

What is *saved* is waited for by nobody: a failure is kept for the page until the same thing could
be saved, and training goes on.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from p2pdiloco.errors import StoreError

P = ParamSpec("P")
T = TypeVar("T")

WRITES_WAITING_MAX = 64
"""Saves that may wait for the disk; more are skipped, and a later snapshot makes up for them."""
DISK_PATIENCE_S = 1.0
"""A merge that takes longer to write is told of before it is written: a node that says nothing for
three seconds counts as dead."""

SLOW = "slow disk"

logger = logging.getLogger(__name__)


class DiskQueue:
    """`disk` has one thread and is closed by whoever made it."""

    def __init__(self, disk: ThreadPoolExecutor) -> None:
        self.saved_at: float | None = None
        self._disk = disk
        self._num_waiting = 0
        self._is_slow = False
        self._errors: dict[str, str] = {}

    @property
    def error(self) -> str | None:
        """Why something could not be saved, until it could."""
        return next(iter(self._errors.values()), None)

    @property
    def is_waiting(self) -> bool:
        """Whether something is being saved."""
        return self._num_waiting > 0

    @property
    def is_busy(self) -> bool:
        """Half of what may wait does, so that what can be had again should not be saved."""
        return self._num_waiting >= WRITES_WAITING_MAX // 2

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs file access in the disk thread, after all that was asked for before."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._disk, lambda: call(*args, **kwargs))

    def save(
        self, what: str, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> Future[None] | None:
        """Saves in the background, in order; a failure is kept for the page, not raised. None if
        too much is waiting already.
        """
        if self._num_waiting >= WRITES_WAITING_MAX:
            waiting = f"the disk is too slow: {self._num_waiting} writes are waiting"
            self._errors[what] = waiting
            return None
        self._num_waiting += 1
        loop = asyncio.get_running_loop()
        return self._disk.submit(self._write, loop, what, lambda: call(*args, **kwargs))

    async def written(self, merge: Future[None]) -> None:
        """Returns when a merge is on disk, or the disk has refused it or is too slow."""
        if merge.done() or self._is_slow:
            return
        try:
            async with asyncio.timeout(DISK_PATIENCE_S):
                await asyncio.shield(asyncio.wrap_future(merge))
        except TimeoutError:
            self._is_slow = True
            self._errors[SLOW] = (
                f"the disk is too slow: a merge is not written after {DISK_PATIENCE_S:.0f} s"
            )

    def _write(self, loop: asyncio.AbstractEventLoop, what: str, call: Callable[[], None]) -> None:
        error = None
        try:
            call()
        except StoreError as refused:
            error = str(refused)
        except Exception as bug:  # nobody awaits a save, so it must be told here
            logger.exception("the %s could not be saved", what)
            error = f"{type(bug).__name__}: {bug}"
        loop.call_soon_threadsafe(self._written, loop.time(), what, error)

    def _written(self, now: float, what: str, error: str | None) -> None:
        self._num_waiting -= 1
        if not self._num_waiting:
            self._is_slow = False
            self._errors.pop(SLOW, None)
        if error is None:
            self._errors.pop(what, None)
            self.saved_at = now
            return
        if error != self._errors.get(what):
            logger.warning("%s", error)
        self._errors[what] = error
