"""The node's place on the network: a host, and another one whenever its p2pd has ended.

Learner, replica and core go on meanwhile. To the others the node is one that was cut off for some
seconds: requests fail as they do when a peer cannot be reached, and the protocol repeats what
matters. Not here: what runs on a host (`app.py` gives it as `work`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from p2pdiloco.errors import NetworkError, UserError
from p2pdiloco_bootstrap.control import Stream
from p2pdiloco_bootstrap.host import Host, HostOptions, open_host
from p2pdiloco_bootstrap.streams import new_session

HEALTHY_S = 60.0
"""A p2pd that ran for so long was sound: the next one is started at once, whatever came before."""

DEATHS_MAX = 8
"""In a row, each after less than `HEALTHY_S`: then a person has to look. Starts that all fail at
once are given half a minute."""

RESTART_DELAY_MAX_S = 8.0
"""Restarts wait 0, 1, 2, 4, ... seconds, at most this."""

Work = Callable[[Host], Coroutine[Any, Any, None]]
"""What is done on a host for as long as it lives; it is cancelled when the host ends."""

logger = logging.getLogger(__name__)


class Deaths:
    """Counts deaths in a row; bounds how often a thing is started again."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def one_more(self, reason: str, lived_s: float) -> float:
        """Seconds to wait before the next start; NetworkError once there were too many."""
        self._in_a_row = 1 if lived_s >= HEALTHY_S else self._in_a_row + 1
        if self._in_a_row >= DEATHS_MAX:
            raise NetworkError(
                f"{reason}; that was {self._in_a_row} times in a row, each within "
                f"{HEALTHY_S:.0f} s of its start, so this one has saved and left; "
                "see what ends p2pd on this machine, then start again"
            )
        return min(2.0 ** (self._in_a_row - 2), RESTART_DELAY_MAX_S) if self._in_a_row > 1 else 0.0


def reason_of(error: UserError | OSError) -> str:
    """In words; a TimeoutError has none."""
    return str(error) or type(error).__name__


def first_start_failed(error: UserError | OSError) -> UserError | NetworkError:
    """What to raise for an `error` before there ever was a host: nobody waits for another try."""
    if isinstance(error, UserError):
        return error
    return NetworkError(
        f"the network process p2pd did not come up ({reason_of(error)}); see whether this machine "
        "has memory left and what ends p2pd there, then start again"
    )


@dataclass(slots=True)
class _Life:
    """Of one host."""

    host: Host
    tasks: asyncio.TaskGroup
    ended: asyncio.Future[str] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Why it is over."""
    working: asyncio.Task[None] | None = None

    def run(self, call: Awaitable[object], name: str) -> asyncio.Task[None]:
        """What the network does to `call` ends this life; anything else that it raises, all."""

        async def until_ended() -> None:
            try:
                await call
            except OSError as error:
                if not self.ended.done():
                    self.ended.set_result(reason_of(error))

        return self.tasks.create_task(until_ended(), name=name)


class Network:
    """Made by `running_network`; `session` is good over all hosts."""

    def __init__(self, options: Callable[[], HostOptions]) -> None:
        self.session = new_session(self._open_stream, self._on_silence)
        self.restarts = 0
        self.problem: str | None = None
        """Why there is no host just now."""
        self.last_error: str | None = None
        self._options = options
        self._life: _Life | None = None
        self._work: Work | None = None
        self._opened = asyncio.Event()

    @property
    def host(self) -> Host | None:
        """None while p2pd is started again."""
        return self._life.host if self._life else None

    def loneliness(self) -> str | None:
        """Why no bootstrap peer is connected; None when one is, or there is none to reach."""
        bootstraps = self._life.host.bootstraps() if self._life else ()
        if not bootstraps or any(status.connected for status in bootstraps):
            return None
        return "; ".join(status.sentence() for status in bootstraps)

    def reach(self) -> str | None:
        """How other nodes reach this one, in a sentence; None where there is nothing to say."""
        return self._life.host.reach() if self._life else None

    @asynccontextmanager
    async def working(self, work: Work) -> AsyncIterator[None]:
        """While this is open, `work` runs on the host, and anew on each that takes its place."""
        assert self._work is None, "one work at a time"
        self._work = work
        if self._life:
            self._start_work(self._life)
        try:
            yield
        finally:
            self._work = None
            if self._life and self._life.working:
                self._life.working.cancel()
                await asyncio.wait((self._life.working,))

    async def keep(self) -> None:
        """Never returns; NetworkError when p2pd does not stay or did not come up, UserError where a
        person has to mend something before it can.
        """
        deaths, loop = Deaths(), asyncio.get_running_loop()
        while True:
            started = loop.time()
            reason = await self._live()
            delay_s = deaths.one_more(reason, loop.time() - started)
            self.restarts += 1
            self.last_error = reason
            self.problem = f"{reason}; it is started again"
            logger.warning("%s in %.0f s; training goes on", self.problem, delay_s)
            await asyncio.sleep(delay_s)

    async def _live(self) -> str:
        """One host, from start to end; returns why it ended."""
        try:
            async with open_host(self._options()) as host:
                return await self._serve(host)
        except (UserError, OSError) as error:
            if not self._opened.is_set():
                raise first_start_failed(error) from error
            return reason_of(error)

    async def _serve(self, host: Host) -> str:
        async with asyncio.TaskGroup() as tasks:
            self._life = life = _Life(host, tasks)
            watching = life.run(host.watch(), "p2pd")
            if self._work:
                self._start_work(life)
            if self.problem:
                logger.info("the network is there again")
            self.problem = None
            self._opened.set()
            try:
                return await life.ended
            finally:
                self._life = None
                for task in (watching, life.working):
                    if task:
                        task.cancel()

    def _start_work(self, life: _Life) -> None:
        assert self._work
        life.working = life.run(self._work(life.host), "on the network")

    async def _open_stream(self, peer: str) -> Stream:
        if self._life is None:
            raise ConnectionError("the network process p2pd is being started again")
        return await self._life.host.open_stream(peer)

    def _on_silence(self, peer: str) -> None:
        if self._life:
            self._life.host.seek(peer)


@asynccontextmanager
async def running_network(
    options: Callable[[], HostOptions], on_end: Callable[[], object]
) -> AsyncIterator[Network]:
    """A network that is up. If it ends for good, `on_end` is called, and the reason is raised when
    the context is left.
    """
    network = Network(options)
    keeping = asyncio.create_task(network.keep(), name="network")
    opening = asyncio.create_task(network._opened.wait(), name="network opens")
    try:
        await asyncio.wait((keeping, opening), return_when=asyncio.FIRST_COMPLETED)
        if not keeping.done():
            keeping.add_done_callback(lambda _: on_end())
            yield network
    finally:
        opening.cancel()
        keeping.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await keeping
        finally:
            await network.session.close()
