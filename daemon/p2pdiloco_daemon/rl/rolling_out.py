"""One step's rollouts, as its dispatcher carries them out: `Placement` decides, this asks.

One task owns the placement, as in `node`; each turn placed is a task that ends in an event. What a
worker gives is checked before it counts: that it answers what was asked and goes on from what was
before it, its story, and of a random sample every token. Who gave something else is left alone for
long, and all that it gave in this step is generated again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

from p2pdiloco.errors import P2PDilocoError, PeerError
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.placement import Placement, Rules
from p2pdiloco.protocol.standing import Standing
from p2pdiloco.protocol.trajectories import Stage
from p2pdiloco.protocol.turns import (
    Action,
    Event,
    GiveUp,
    Held,
    Holding,
    Load,
    LoadReported,
    Place,
    Step,
    TimePassed,
    TrajectoryEnded,
    TurnFailed,
    TurnFinished,
    TurnId,
    TurnReady,
    TurnRevoked,
    Withdraw,
    WorkerLost,
)
from p2pdiloco.rl.episodes import pack, unpack
from p2pdiloco.rl.harvest import Grown, Harvest, grown, until
from p2pdiloco_daemon.exchange import Refused
from p2pdiloco_daemon.rl.checker import Checker
from p2pdiloco_daemon.rl.crew import Crew, Heard, Played
from p2pdiloco_daemon.rollouts.trajectories import RolloutsBusy, TurnRefused

WORKERS_MAX = 64
"""Workers that one dispatcher asks: what one node's link and checks can keep up with."""
ROWS_MAX = 64
"""Of one worker, whatever it says of itself: bounds the turns that wait for one answer."""
LOOK_S = 0.5
"""Between two questions to a worker how it is."""
LOAD_S = 4.0
"""For the answer."""
SILENT_MAX = 2
"""Questions in a row without an answer after which a worker is lost."""
COLLECT_S = 10.0
"""What a dispatcher that takes over waits for what workers hold; what comes later is generated
again."""
FETCHES_AT_ONCE = 8
CHECKS_AT_ONCE = 16
BUSY_S = 0.5
"""Until a worker that has too much to do is asked again for the same turn; its load says if there
is none any more."""

Expected = (OSError, TimeoutError, P2PDilocoError)
"""What a worker may do to a question."""
Note = Callable[[str], None]

logger = logging.getLogger(__name__)


class RollingOut:
    """`run` once; `harvest` has what came of it, at any time."""

    def __init__(
        self,
        step: Step,
        rules: Rules,
        crew: Crew,
        workers: Callable[[], Sequence[PeerId]],
        standing: Standing,
        checker: Checker,
        note: Note,
    ) -> None:
        """`workers` are those that may be asked, at the time."""
        self.step = step
        self.harvest = Harvest(step)
        self._rules = rules
        self._crew = crew
        self._workers = workers
        self._standing = standing
        self._checker = checker
        self._note = note
        self._placement: Placement | None = None
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        """Bounded by the turns and questions on their way."""
        self._present: set[PeerId] = set()
        self._asking: set[PeerId] = set()
        self._silences: Counter[PeerId] = Counter()
        self._plays: dict[tuple[PeerId, TurnId], asyncio.Task[None]] = {}
        self._given: set[tuple[PeerId, TurnId]] = set()
        """Of those, what is looked through here by now."""
        self._children: set[asyncio.Task[None]] = set()
        self._checks = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._given_up: list[GiveUp] = []
        self._unshown: dict[PeerId, tuple[int, str]] = {}
        """Of the trajectories that a worker says to hold, how many could not be had, and why not
        the last of them."""
        self._untrue_held: dict[PeerId, tuple[int, str]] = {}
        """Of those that it showed, how many are not true, and what is wrong with the last."""

    async def run(self) -> None:
        """Until every trajectory is at an end."""
        async with asyncio.TaskGroup() as tasks:
            found = await self._collected()
            self._placement = Placement(self.step, self._rules, self._now())
            for event in found:
                self._inbox.put_nowait(event)
            self._start(tasks, self._watch(tasks), "watch workers")
            try:
                await self._own(tasks, self._placement)
            finally:
                for child in self._children:
                    child.cancel()
        if self._given_up:
            self._note(
                f"step {self.step.number}: {len(self._given_up)} of {self.step.num_trajectories}"
                f" trajectories given up; the last: {self._given_up[-1].reason}"
            )

    async def expose(self, data: bytes, refusal: str) -> None:
        """What a worker gave of an episode that has ended turned out not to be true."""
        episode = unpack(data)
        givers = self.harvest.givers(episode.trajectory)
        if len(givers) == len(episode.answers):  # or it has been taken back already
            self._untrue(await self._forger(Grown(episode, data, True), givers), refusal)

    def stages(self) -> Mapping[Stage, int]:
        """How many trajectories are where."""
        if self._placement is None:
            return {Stage.WAITING: self.step.num_trajectories}
        return Counter(trajectory.stage for trajectory in self._placement.trajectories)

    # ---------------------------------------------------------------- the owner

    async def _own(self, tasks: asyncio.TaskGroup, placement: Placement) -> None:
        while (deadline := placement.deadline) is not None:
            event: Event = TimePassed()
            try:
                async with asyncio.timeout_at(deadline):
                    event = await self._inbox.get()
            except TimeoutError:
                pass
            for action in placement.handle(event, self._now()):
                self._carry_out(tasks, action)
            await asyncio.sleep(0)  # a full inbox must not keep the loop from other work

    def _carry_out(self, tasks: asyncio.TaskGroup, action: Action) -> None:
        match action:
            case Place(worker, turn):
                if (worker, turn) in self._given:
                    return  # it took long to look through, and is answered all the same
                history = self.harvest.history(turn)
                if history is None or worker not in self._present:
                    self._inbox.put_nowait(TurnFailed(worker, turn, "it is no longer wanted there"))
                    return
                play = self._start(tasks, self._play(worker, turn, history), f"{turn} at {worker}")
                self._plays[worker, turn] = play
                play.add_done_callback(lambda _: self._plays.pop((worker, turn), None))
            case Withdraw(worker, turn, reason, is_overdue):
                if is_overdue and (worker, turn) in self._given:
                    return
                if play_ := self._plays.get((worker, turn)):
                    play_.cancel()
                if is_overdue:
                    self._dawdled(worker, reason)
            case GiveUp():
                self._given_up.append(action)
            case _:
                assert_never(action)

    def _start(
        self, tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None], name: str
    ) -> asyncio.Task[None]:
        child = tasks.create_task(work, name=name)
        self._children.add(child)
        child.add_done_callback(self._children.discard)
        return child

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # ---------------------------------------------------------------- who is there

    async def _watch(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            workers = self._workers()[:WORKERS_MAX]
            for worker in sorted(self._present.difference(workers)):
                self._lost(worker, "it has left, or is silent")
            for worker in workers:
                if worker not in self._asking and self._standing.may_ask(worker, self._now()):
                    self._asking.add(worker)
                    self._start(tasks, self._look_at(worker), f"load of {worker}")
            await asyncio.sleep(LOOK_S)

    async def _look_at(self, worker: PeerId) -> None:
        try:
            async with asyncio.timeout(LOAD_S):
                heard = await self._crew.load(worker)
        except PeerError as error:
            self._failed(worker, str(error))
        except (RolloutsBusy, Refused) as error:
            self._lost(worker, str(error))
        except Expected as error:
            self._silences[worker] += 1
            if self._silences[worker] >= SILENT_MAX:
                self._lost(worker, _why(error))
        else:
            self._silences.pop(worker, None)
            self._heard(worker, heard)
        finally:
            self._asking.discard(worker)

    def _heard(self, worker: PeerId, heard: Heard) -> None:
        if heard.version != self.step.number:
            self._lost(worker, f"it has policy {heard.version}")
        elif self._standing.may_ask(worker, self._now()):
            self._present.add(worker)
            self._inbox.put_nowait(_reported(worker, heard, ()))

    def _lost(self, worker: PeerId, reason: str) -> None:
        """What it is at goes to others, until it is there again."""
        if worker not in self._present:
            return
        self._present.discard(worker)
        for (of, _turn), play in list(self._plays.items()):
            if of == worker and play is not asyncio.current_task():
                play.cancel()
        self._inbox.put_nowait(WorkerLost(worker, reason))

    def _failed(self, worker: PeerId, reason: str) -> None:
        pause_s = self._standing.failed(worker, reason, self._now())
        logger.info("%s is not asked for %.0f s: %s", worker[-8:], pause_s, reason)
        self._lost(worker, reason)

    def _dawdled(self, worker: PeerId, reason: str) -> None:
        pause_s = self._standing.dawdled(worker, reason, self._now())
        self._note(
            f"{worker[-8:]} has not given a turn: {reason}; it is not asked for"
            f" {pause_s / 60:.0f} minutes"
        )
        self._lost(worker, reason)

    def _untrue(self, giver: PeerId | None, reason: str) -> None:
        """What it gave, or, of nobody, what was taken over."""
        if giver is not None:
            self._lied(giver, reason)
            return
        self._note(f"what was taken over is not true, and is generated again: {reason}")
        self._revoke(None)

    def _lied(self, worker: PeerId, reason: str) -> None:
        """What it gave in this step is generated again, with all that was built upon it."""
        pause_s = self._standing.lied(worker, reason, self._now())
        self._note(
            f"{worker[-8:]} gave a turn that is not true: {reason}; it is not asked for"
            f" {pause_s / 60:.0f} minutes, and what it gave is generated again"
        )
        self._lost(worker, reason)
        self._revoke(worker)

    def _revoke(self, giver: PeerId | None) -> None:
        for turn, num_tokens in self.harvest.revoke(giver):
            self._inbox.put_nowait(TurnRevoked(turn, num_tokens))

    # ---------------------------------------------------------------- turns

    async def _play(self, worker: PeerId, turn: TurnId, history: bytes) -> None:
        try:
            played = await self._answer(worker, turn, history)
            self._given.add((worker, turn))
            got = await asyncio.to_thread(_grown, history, played, turn)
        except PeerError as error:
            self._lied(worker, str(error))
        except Expected as error:
            self._failed(worker, _why(error))
        else:
            await self._judge(worker, turn, history, got, played.num_reused)
        finally:
            self._given.discard((worker, turn))

    async def _answer(self, worker: PeerId, turn: TurnId, history: bytes) -> Played:
        while True:
            try:
                return await self._asked(worker, turn, history)
            except RolloutsBusy as error:
                logger.debug("%s: %s", worker[-8:], error)
            await asyncio.sleep(BUSY_S)

    async def _asked(self, worker: PeerId, turn: TurnId, history: bytes) -> Played:
        """Whoever holds the history need not be given it."""
        if history and self.harvest.holder(turn.trajectory) == worker:
            try:
                return await self._crew.play(worker, turn, b"")
            except TurnRefused as error:
                logger.debug("%s: %s", worker[-8:], error)
        return await self._crew.play(worker, turn, history)

    async def _judge(
        self, worker: PeerId, turn: TurnId, history: bytes, got: Grown, num_reused: int
    ) -> None:
        givers = [*self.harvest.givers(turn.trajectory), worker]
        replay = self._checker.draw()
        refusal = None
        if worker != self._crew.me:
            refusal = await self._refusal(got, replay=replay)
        if refusal is not None:
            liar = await self._forger(got, givers) if replay else worker
            self._inbox.put_nowait(TurnFailed(worker, turn, refusal))
            self._untrue(liar, refusal)
        elif self.harvest.history(turn) == history and self.harvest.take(got, worker):
            answer = got.episode.answers[-1]
            new_tokens = answer.end - answer.start
            self._standing.gave(worker, new_tokens, answer.start, num_reused)
            self._inbox.put_nowait(TurnFinished(worker, turn, answer.end, num_reused))
            self._inbox.put_nowait(_next(turn, got))
        else:
            self._inbox.put_nowait(TurnFailed(worker, turn, "it is another turn's time by now"))

    async def _forger(self, got: Grown, givers: Sequence[PeerId | None]) -> PeerId | None:
        """Of those that gave its turns, the first whose answer the policy would not have given; a
        worker may hold what it was handed, so nobody answers for what was found with it."""
        if len(set(givers)) > 1:
            for num_turns in range(1, got.num_turns):
                part = until(got.episode, num_turns)
                if await self._refusal(Grown(part, pack(part), False), replay=True):
                    return givers[num_turns - 1]
        return givers[-1]

    async def _refusal(self, got: Grown, *, replay: bool) -> str | None:
        replayed = (0,) if replay else ()
        async with self._checks:
            [refusal] = await self._checker.refusals(
                self.step.number, [got.data], replayed, ended=got.is_ended
            )
        return refusal

    # ---------------------------------------------------------------- taking over

    async def _collected(self) -> list[Event]:
        """Who is there, and what they hold of the step already, checked."""
        heard: dict[PeerId, Heard] = {}
        kept: dict[PeerId, list[Held]] = {}
        fetches = asyncio.Semaphore(FETCHES_AT_ONCE)
        try:
            async with asyncio.timeout(COLLECT_S):
                async with asyncio.TaskGroup() as tasks:
                    for worker in self._workers()[:WORKERS_MAX]:
                        tasks.create_task(self._first_look(worker, heard))
                async with asyncio.TaskGroup() as tasks:
                    for trajectory, claims in self._claims(heard).items():
                        tasks.create_task(self._fetch(trajectory, claims, kept, fetches))
        except TimeoutError:
            logger.info("not all that workers hold of step %d could be had", self.step.number)
        self._tell_collected()
        self._present.update(heard)
        return [_reported(worker, of, kept.get(worker, ())) for worker, of in heard.items()]

    async def _first_look(self, worker: PeerId, heard: dict[PeerId, Heard]) -> None:
        try:
            async with asyncio.timeout(LOAD_S):
                told = await self._crew.load(worker)
        except Expected as error:
            logger.debug("no load of %s: %s", worker, error)
            return
        is_asked = self._standing.may_ask(worker, self._now())
        if told.version == self.step.number and is_asked:
            heard[worker] = told

    def _claims(self, heard: Mapping[PeerId, Heard]) -> dict[int, list[tuple[PeerId, Held]]]:
        """Of each trajectory, who says to hold how much; the furthest first."""
        claims: dict[int, list[tuple[PeerId, Held]]] = {}
        for worker, told in sorted(heard.items()):
            for held in told.load.held:
                turn = held.turn
                if turn.step == self.step.number and turn.trajectory < self.step.num_trajectories:
                    claims.setdefault(turn.trajectory, []).append((worker, held))
        for of_one in claims.values():
            of_one.sort(key=lambda claim: _num_turns(claim[1]), reverse=True)
        return claims

    async def _fetch(
        self,
        trajectory: int,
        claims: Sequence[tuple[PeerId, Held]],
        kept: dict[PeerId, list[Held]],
        fetches: asyncio.Semaphore,
    ) -> None:
        for worker, held in claims:
            num_turns = _num_turns(held)
            if num_turns < 1:
                return
            last = replace(held.turn, turn=num_turns - 1)
            try:
                async with fetches:
                    played = await self._crew.held(worker, self.step.number, trajectory)
                    got = await asyncio.to_thread(_grown, b"", played, last)
                    refusal = await self._refusal(got, replay=self._checker.draw())
            except Expected as error:
                _count(self._unshown, worker, _why(error))
                continue
            if refusal is None:
                self.harvest.found(got, worker)
                kept.setdefault(worker, []).append(_held(last, got))
                return
            _count(self._untrue_held, worker, refusal)

    def _tell_collected(self) -> None:
        """Once of each worker, however many trajectories it says to hold."""
        for worker, (number, last) in self._unshown.items():
            logger.info(
                "%s does not show %d of the trajectories that it says to hold; the last: %s",
                *(worker[-8:], number, last),
            )
        for worker, (number, last) in self._untrue_held.items():
            # who gave which of their turns, only the earlier dispatcher knew
            self._note(
                f"what {worker[-8:]} holds of {number} trajectories is not true; the last: {last}"
            )


def _count(reasons: dict[PeerId, tuple[int, str]], worker: PeerId, reason: str) -> None:
    """One more, and the newest reason."""
    number, _last = reasons.get(worker, (0, ""))
    reasons[worker] = number + 1, reason


def _grown(history: bytes, played: Played, turn: TurnId) -> Grown:
    if played.holding not in (Holding.READY, Holding.ENDED):
        raise PeerError(f"asked for {turn}, got one that is {played.holding.value} still")
    return grown(history, played.episode, turn, is_ended=played.holding is Holding.ENDED)


def _next(turn: TurnId, got: Grown) -> Event:
    if got.is_ended:
        return TrajectoryEnded(turn)
    return TurnReady(replace(turn, turn=turn.turn + 1), got.num_tokens)


def _held(last: TurnId, got: Grown) -> Held:
    """What a worker showed, which may be something else than it said."""
    if got.is_ended:
        return Held(last, Holding.ENDED, got.num_tokens)
    return Held(replace(last, turn=last.turn + 1), Holding.READY, got.num_tokens)


def _num_turns(held: Held) -> int:
    """That are behind what is held."""
    return held.turn.turn + (held.holding is Holding.ENDED)


def _reported(worker: PeerId, heard: Heard, held: Sequence[Held]) -> LoadReported:
    load: Load = replace(heard.load, num_rows=min(heard.load.num_rows, ROWS_MAX), held=tuple(held))
    return LoadReported(worker, load, heard.rtt_s)


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__
