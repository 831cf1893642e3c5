"""Dispatches the rollouts of an rl run, whenever it is this node's turn to.

    look --our turn--> roll out --all at an end--> share --next version--> look
                           ^------------a lie is found-----|

The turn follows from the core's view and is nobody's for longer than a version. If it passes to
another in the middle of a step, or the version becomes that of another lineage, everything here is
dropped: the successor asks the workers what they hold and the members what they took. While two
think it is theirs, turns are generated once more than needed, and members take shares of those that
are right in their own view, or nearly so.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from p2pdiloco.protocol.dealing import Learner
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.pauses import Pauses
from p2pdiloco.protocol.placement import Rules
from p2pdiloco.protocol.standing import Record, Standing
from p2pdiloco.protocol.trajectories import Stage
from p2pdiloco.protocol.turns import Step
from p2pdiloco.protocol.waiting import PATIENCE_S, Waiting
from p2pdiloco_daemon.exchange import Refused
from p2pdiloco_daemon.rl.checker import Checker
from p2pdiloco_daemon.rl.crew import Crew
from p2pdiloco_daemon.rl.rolling_out import LOAD_S, WORKERS_MAX, Expected, RollingOut
from p2pdiloco_daemon.rl.share_desk import (
    DOUBTED,
    GROUPS_BYTES_MAX,
    ShareDesk,
    Standpoint,
    pack_share,
    share_path,
    unpack_groups,
)
from p2pdiloco_daemon.rl.sharing import Sharing
from p2pdiloco_daemon.status import view

DOUBTS_S, DOUBTS_MAX_S = 600.0, 4 * 3600.0
"""Who doubted a share in which nothing was found is not listened to for so long: to look through
all of a share is dear."""
GREETED_S = 15.0
"""Between questions to all members, those too that are not asked for turns: several within their
patience."""
LOOK_S = 0.25
"""Between looks at whose turn it is."""
AGAIN_S = 5.0
"""After a step in which nothing came to an end, before it is tried once more."""

logger = logging.getLogger(__name__)


class Swarm(Standpoint, Protocol):
    """Of a `swarm_view.SwarmView`, what is asked here."""

    def pass_over(self, reason: str) -> None: ...
    def workers(self) -> Sequence[PeerId]: ...
    def learners(self) -> Mapping[PeerId, Learner]: ...
    def note(self, text: str) -> None: ...


class Shares(Protocol):
    """Of an `exchange.Exchange`, what is asked here."""

    async def hand(self, peer: str, path: str, body: bytes) -> None: ...
    async def get(self, peer: str, path: str, max_bytes: int) -> bytearray: ...


class Dispatcher:
    """`run` never returns."""

    def __init__(
        self,
        swarm: Swarm,
        crew: Crew,
        desk: ShareDesk,
        shares: Shares,
        step_of: Callable[[int], Step],
        rules: Rules,
        inner_steps: int,
        checker: Checker,
    ) -> None:
        """`step_of` gives the step of a version; it may take a while and runs in a thread."""
        self._swarm = swarm
        self._crew = crew
        self._desk = desk
        self._shares = shares
        self._step_of = step_of
        self._rules = rules
        self._inner_steps = inner_steps
        self._checker = checker
        self._standing = Standing()
        self._rolling_out: RollingOut | None = None
        self._sharing: Sharing | None = None
        self._doubters = Pauses(DOUBTS_S, DOUBTS_MAX_S)
        self._found_out = -1
        """The newest version whose step is gone through again, because of a lie in it."""
        self._waiting = Waiting()
        self._num_heard = 0

    def status(self) -> view.Dispatching:
        work, sharing = self._rolling_out, self._sharing
        dealing = sharing.dealing if sharing else None
        stages = work.stages() if work else {}
        records = self._standing.records
        return view.Dispatching(
            step=work.step.number if work else None,
            phase="sharing" if sharing else "rolling out" if work else "waiting",
            trajectories={stage.value: stages.get(stage, 0) for stage in Stage} if work else {},
            groups_waiting=dealing.num_waiting if dealing else 0,
            workers=[
                _worker(peer, records[peer])
                for peer in sorted(records, key=lambda peer: (-records[peer].turns, peer))
            ],
        )

    def heard(self, peer: PeerId) -> None:
        """The peer asked this node something about rollouts."""
        self._num_heard += peer == self._swarm.dispatcher

    async def run(self) -> None:
        while True:
            mine = self._mine()
            if mine is not None:
                await self._while_mine(*mine)
            else:
                self._look_at_the_other()
            await asyncio.sleep(LOOK_S)

    def _look_at_the_other(self) -> None:
        """Whoever dispatches now and does nothing is passed over."""
        swarm, now = self._swarm, asyncio.get_running_loop().time()
        has_share = self._desk.groups(swarm.version) is not None
        is_waiting = swarm.me in swarm.learners() and not has_share
        signs = self._num_heard if is_waiting else None
        if self._waiting.is_over(swarm.version, swarm.dispatcher, signs, now):
            swarm.pass_over(f"step {swarm.version} has not been dispatched for {PATIENCE_S:.0f} s")

    def _mine(self) -> tuple[int, str | None] | None:
        """The version that this node dispatches for now, and which state it is: on another lineage
        other turns are right."""
        swarm = self._swarm
        is_mine = swarm.version >= 0 and swarm.dispatcher == swarm.me
        return (swarm.version, swarm.head) if is_mine else None

    async def _while_mine(self, version: int, head: str | None) -> None:
        working = asyncio.create_task(self._step(version), name=f"dispatch step {version}")
        try:
            is_again = self._found_out == version
            while self._mine() == (version, head) and not working.done():
                await asyncio.wait((working,), timeout=LOOK_S)
                if not is_again and self._found_out == version:
                    break
        finally:
            if not working.done():
                working.cancel()
                await asyncio.wait((working,))
            self._rolling_out = self._sharing = None
        if working.done() and not working.cancelled():
            working.result()

    async def _step(self, version: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            greeting = tasks.create_task(self._greet_all(), name="greet all")
            await self._dispatched(version)
            greeting.cancel()

    async def _dispatched(self, version: int) -> None:
        step = await asyncio.to_thread(self._step_of, version)
        self._rolling_out = work = RollingOut(
            step,
            self._rules,
            self._crew,
            self._swarm.workers,
            self._standing,
            self._checker.closely() if self._found_out == version else self._checker,
            self._swarm.note,
        )
        await work.run()
        groups = work.harvest.ended()
        if not groups:
            self._swarm.note(f"step {version} brought nothing to learn from; it is tried again")
            await asyncio.sleep(AGAIN_S)
            return
        self._sharing = Sharing(
            groups,
            self._inner_steps,
            self._swarm.learners,
            partial(self._taken, version),
            partial(self._give, work),
        )
        await self._sharing.run()

    async def _greet_all(self) -> None:
        while True:
            await asyncio.sleep(GREETED_S)
            workers = self._swarm.workers()
            for first in range(0, len(workers), WORKERS_MAX):
                async with asyncio.TaskGroup() as tasks:
                    for worker in workers[first : first + WORKERS_MAX]:
                        tasks.create_task(self._greet(worker), name=f"greet {worker}")

    async def _greet(self, worker: PeerId) -> None:
        """Who has no share hears that somebody dispatches; see `waiting`."""
        with suppress(*Expected):
            async with asyncio.timeout(LOAD_S):
                await self._crew.load(worker)

    async def _give(self, work: RollingOut, peer: PeerId, episodes: Sequence[bytes]) -> None:
        version = work.step.number
        if peer == self._swarm.me:
            await self._desk.take(peer, version, episodes)
            return
        try:
            await self._shares.hand(peer, share_path(version), pack_share(episodes))
        except Refused as error:
            if error.status == DOUBTED:
                await self._look_through(work, peer, episodes)
            raise

    async def _look_through(
        self, work: RollingOut, peer: PeerId, episodes: Sequence[bytes]
    ) -> None:
        """The peer says that a token in its share is wrong."""
        version, now = work.step.number, asyncio.get_running_loop().time()
        if self._found_out == version or not self._doubters.over(peer, now):
            return
        refusals = await self._checker.refusals(version, episodes, range(len(episodes)), ended=True)
        lies = [pair for pair in zip(episodes, refusals, strict=True) if pair[1] is not None]
        for data, refusal in lies:
            assert refusal is not None
            await work.expose(data, refusal)
        if lies:
            self._found_out = version
        else:
            self._doubters.begin(peer, now)

    async def _taken(self, version: int, peer: PeerId) -> Collection[int] | None:
        if peer == self._swarm.me:
            return self._desk.groups(version)
        try:
            body = await self._shares.get(peer, share_path(version), GROUPS_BYTES_MAX)
        except Refused as error:
            if error.status == 404:
                return None
            raise
        return unpack_groups(body)


def _worker(peer: PeerId, record: Record) -> view.DispatchedWorker:
    prompts = record.prompt_tokens
    return view.DispatchedWorker(
        peer=peer,
        turns=record.turns,
        tokens=record.tokens,
        cached_share=record.reused / prompts if prompts else None,
        failures=record.failures,
        lies=record.lies,
        last_problem=record.last_problem,
    )
