"""An event loop whose clock jumps to the next timer instead of waiting for it."""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for busy threads only: what else it would have waited is added to the clock."""

    now = 0.0
    threads_busy = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.threads_busy and timeout != 0:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("deadlock: everything waits and nothing is scheduled")
        if not ready and timeout is not None:
            self.now = math.nextafter(self.now + max(timeout, 0.0), math.inf)
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and is a hair later than the timer it jumped to. It stands still while
    threads of a `CountedExecutor` work, as the default executor is; sockets do not belong here.
    """

    def __init__(self) -> None:
        self.selector = _JumpingSelector()
        super().__init__(self.selector)
        self._clock_resolution = 0.0  # no timer fires a hair too early, to be set again for ever
        self._counted = CountedExecutor(self, max_workers=4)
        self.set_default_executor(self._counted)

    def time(self) -> float:
        return self.selector.now

    async def shutdown_default_executor(self) -> None:
        """asyncio's waits in a thread that nobody counts."""
        self._counted.shutdown()


class CountedExecutor(ThreadPoolExecutor):
    """Threads for which a virtual clock waits. `submit` is for the loop's own thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_workers: int = 1) -> None:
        super().__init__(max_workers)
        assert isinstance(loop, VirtualClockLoop)
        self._loop = loop

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        answer: Future[T] = Future()
        self._loop.selector.threads_busy += 1
        super().submit(self._run, answer, partial(call, *args, **kwargs))
        return answer

    def _run(self, answer: Future[T], call: Callable[[], T]) -> None:
        """The loop hears of the answer before it hears that the thread is free."""
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
        self._loop.call_soon_threadsafe(self._finished)

    def _finished(self) -> None:
        self._loop.selector.threads_busy -= 1


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
