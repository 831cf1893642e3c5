"""The dispatcher of one step's rollouts: which worker generates which turn.

    WAITING --Place--> GENERATING --TurnFinished--> ACTING --TurnReady--> WAITING (next turn)
                                                       \\--TrajectoryEnded--> ENDED
    GENERATING, ACTING --failed, lost, too late--> WAITING (same turn); GIVEN_UP after `TRIES_MAX`
    any of them but GIVEN_UP --TurnRevoked--> WAITING (that turn)
    any of them --beyond a limit, the step's time is up--> GIVEN_UP

Form "war" is WAR (arXiv 2607.17299): while there are fewer requests than a threshold, a new
trajectory goes to the replica with the fewest and stays there (veRL's rule); from there on pairs of
turn and replica are placed by score, within windows. Form "swarm" is ours, for replicas of
different speed: always within windows and cache, and a turn goes elsewhere than where its history
is cached, or to a slow replica, only if the trajectory is estimated to end sooner that way. Either
way a trajectory moves between two turns only.

State is soft. A dispatcher that takes over in mid-step starts from nothing but the step, waits for
what the workers report to hold, or for `COLLECT_S`, and goes on from the furthest that is known of
each trajectory; what nobody holds starts over and comes out the same (turns.py). At any time a turn
counts if it is further than what is known, whoever brings it, so none counts twice.
"""

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.replicas import Need, Replica
from p2pdiloco.protocol.scores import Candidate, Form, Order, Swarm, War, pairs
from p2pdiloco.protocol.trajectories import (
    Expectations,
    Stage,
    Trajectory,
    trajectories_of,
    turn_id,
)
from p2pdiloco.protocol.turns import (
    Action,
    Event,
    GiveUp,
    Held,
    Holding,
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

TRIES_MAX = 4
"""Of one turn. One that has cost four workers is more likely at fault than they are."""
COLLECT_S = 5.0
"""What a new dispatcher waits for reports: a few of their intervals."""
PATIENCE = 4.0
"""A turn may take so many times what was estimated."""
TURN_S_MIN = 120.0
"""Every turn may take this long: estimates of short ones are mostly noise."""
QUEUED_PER_ROW = 4
"""Turns at a replica per row of its engine: what an engine's queue holds."""
REVIEW_S = 1.0
"""All that wait are looked at anew this often; in between only where something is new."""
CONSIDERED_MAX = 64
"""Groups from which a replica may begin a trajectory next; bounds what one decision costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How turns are placed, and what a trajectory may take."""

    form: Literal["war", "swarm"] = "swarm"
    order: Order = "by use"
    """Of the swarm's form."""
    threshold: float = 16.0
    """Of WAR's form: requests per replica from which on turns are placed by score."""
    wait_s_max: float = 60.0
    """After this a turn goes before all that have not waited so long: environments are not kept for
    ever (WAR's share of the sandbox's life)."""
    act_s_max: float = 60.0
    turns_max: int = 64
    tokens_max: int = 1 << 16
    step_s_max: float = 3600.0


class Placement:
    """`handle` is the only call that changes anything; call it again at `deadline`.

    Actions on one worker must reach it in their order, or not at all.
    """

    def __init__(
        self, step: Step, rules: Rules, now: float, *, ask: Collection[PeerId] = ()
    ) -> None:
        """`ask` are the workers that may hold parts of the step already: none for whoever begins
        it, all that are known for whoever takes over."""
        self.step = step
        self.trajectories = trajectories_of(step, now)
        for trajectory in self.trajectories:
            if trajectory.num_tokens >= rules.tokens_max:
                trajectory.stage = Stage.GIVEN_UP
        self.expectations = Expectations()
        self._rules = rules
        self._replicas: dict[PeerId, Replica] = {}
        self._unheard = set(ask)
        self._collect_until = now + COLLECT_S
        self._ends = now + rules.step_s_max
        self._reviewed = -math.inf
        self._new_replicas: set[PeerId] = set()
        """Those with other load than when turns were placed last."""
        self._new_waiting: set[int] = set()
        """Trajectories that have come to wait since."""

    @property
    def is_done(self) -> bool:
        """Every trajectory is at an end."""
        return not any(trajectory.is_open for trajectory in self.trajectories)

    @property
    def deadline(self) -> float | None:
        """When `TimePassed` is due."""
        if self.is_done:
            return None
        deadlines = [t.deadline for t in self.trajectories if t.deadline is not None]
        if self._unheard:
            deadlines.append(self._collect_until)
        elif self._replicas and any(t.stage is Stage.WAITING for t in self.trajectories):
            deadlines.append(self._reviewed + REVIEW_S)
        return min([self._ends, *deadlines])

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes in what has happened and says what is to be done. Events of other steps, and news
        that is none, are ignored."""
        actions = list(self._taken_in(event, now))
        actions += self._overdue(now)
        if not self._unheard:
            actions += self._placed(now)
        return actions

    def _taken_in(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case LoadReported():
                yield from self._load_reported(event, now)
            case TurnFinished():
                yield from self._turn_finished(event, now)
            case TurnFailed():
                yield from self._turn_failed(event, now)
            case TurnReady(turn, num_tokens):
                yield from self._further(Held(turn, Holding.READY, num_tokens), None, now)
            case TrajectoryEnded(turn):
                yield from self._further(Held(turn, Holding.ENDED, 0), None, now)
            case TurnRevoked():
                yield from self._turn_revoked(event, now)
            case WorkerLost(worker, reason):
                yield from self._worker_lost(worker, reason, now)
            case TimePassed():
                pass
            case _:
                assert_never(event)

    def _worker_lost(self, worker: PeerId, reason: str, now: float) -> Iterator[Action]:
        self._unheard.discard(worker)
        self._replicas.pop(worker, None)
        for trajectory in self.trajectories:
            if trajectory.worker == worker:
                yield from self._lost(trajectory, reason, now)
            if trajectory.home == worker:
                trajectory.home, trajectory.computed = None, 0

    def _load_reported(self, event: LoadReported, now: float) -> Iterator[Action]:
        replica = self._replicas.get(event.worker)
        if replica is None:
            replica = Replica(event.worker, event.load, event.rtt_s)
            self._replicas[event.worker] = replica
        replica.reported(event.load, event.rtt_s)
        self._unheard.discard(event.worker)
        self._new_replicas.add(event.worker)
        for held in event.load.held:
            yield from self._further(held, event.worker, now)

    def _turn_finished(self, event: TurnFinished, now: float) -> Iterator[Action]:
        trajectory = self._of(event.turn)
        if trajectory is None or not trajectory.is_behind(event.turn.turn, Holding.ACTING):
            return
        replica = self._replicas.get(event.worker)
        if trajectory.turn == event.turn.turn:
            new_tokens = event.num_tokens - trajectory.num_tokens
            self.expectations.turn_finished(trajectory.group, new_tokens)
        yield from self._further(
            Held(event.turn, Holding.ACTING, event.num_tokens), event.worker, now
        )
        if replica is not None and trajectory.worker == event.worker:
            replica.finished(self._need(trajectory), event.num_reused, self._num_wanted(replica))
            self._new_replicas.add(event.worker)

    def _turn_failed(self, event: TurnFailed, now: float) -> Iterator[Action]:
        trajectory = self._of(event.turn)
        if trajectory is None or trajectory.turn != event.turn.turn:
            return
        if trajectory.worker == event.worker:
            yield from self._lost(trajectory, event.reason, now)

    def _turn_revoked(self, event: TurnRevoked, now: float) -> Iterator[Action]:
        trajectory, turn = self._of(event.turn), event.turn.turn
        if trajectory is None or trajectory.stage is Stage.GIVEN_UP or trajectory.turn < turn:
            return
        if trajectory.worker is not None:
            present = turn_id(self.step, trajectory)
            yield Withdraw(trajectory.worker, present, "an earlier turn was not true")
        self._forget(trajectory)
        trajectory.turn, trajectory.tries = turn, 0
        trajectory.prompt_tokens = event.num_tokens
        yield from self._lost(trajectory, "it was not true", now)

    def _further(self, held: Held, worker: PeerId | None, now: float) -> Iterator[Action]:
        """Somebody is at this turn. If that is news, the trajectory is there from now on; if it is
        old, whoever it is need not go on."""
        trajectory = self._of(held.turn)
        if trajectory is None or not self._can_be(held, trajectory):
            return
        if not trajectory.is_behind(held.turn.turn, held.holding):
            is_mine = worker in (trajectory.worker, trajectory.home)
            if worker is not None and not is_mine and held.holding is not Holding.ENDED:
                yield Withdraw(worker, held.turn, "the trajectory went on elsewhere")
            return
        if trajectory.worker is not None and worker not in (None, trajectory.worker):
            former = turn_id(self.step, trajectory)
            yield Withdraw(trajectory.worker, former, "another worker is further")
        yield from self._advanced(trajectory, held, worker, now)

    def _can_be(self, held: Held, trajectory: Trajectory) -> bool:
        """Whether the rules allow for what a worker says it holds."""
        if held.holding is Holding.ENDED:
            return True
        least = self.step.prompt_tokens[trajectory.group]
        return held.num_tokens >= least and held.turn.turn <= self._rules.turns_max

    def _advanced(
        self, trajectory: Trajectory, held: Held, worker: PeerId | None, now: float
    ) -> Iterator[Action]:
        turn, before, holding = held.turn.turn, trajectory.turn, held.holding
        if turn > before:
            trajectory.tries = 0
        trajectory.turn = turn
        if holding in (Holding.READY, Holding.ENDED):
            self._leave(trajectory, now)
        if holding is Holding.ENDED:
            trajectory.stage = Stage.ENDED
            self.expectations.trajectory_ended(trajectory.group, turn + 1)
            self._forget(trajectory)
            return
        trajectory.num_tokens = held.num_tokens
        if holding is not Holding.ACTING or turn > before:
            trajectory.prompt_tokens = held.num_tokens
        if holding is Holding.READY:
            trajectory.stage, trajectory.since = Stage.WAITING, now
            self._new_waiting.add(trajectory.id)
            if worker in self._replicas:
                trajectory.home = worker
                self._replicas[worker].holds(self._need(trajectory))
            yield from self._beyond_limits(trajectory, now)
            return
        assert worker is not None, "only a worker generates and acts"
        self._begin(trajectory, worker, holding is Holding.GENERATING, now)

    def _begin(self, trajectory: Trajectory, worker: PeerId, generating: bool, now: float) -> None:
        """The turn is found to be generated, or acted on, at this worker."""
        if trajectory.worker != worker:
            trajectory.tries += generating
            self._leave(trajectory, now)
            if worker in self._replicas:
                need = self._need(trajectory)
                self._replicas[worker].adopt(need, now, generating=generating)
        trajectory.worker = trajectory.home = worker
        trajectory.since = now
        trajectory.stage = Stage.GENERATING if generating else Stage.ACTING
        trajectory.computed = 0 if generating else trajectory.num_tokens
        trajectory.deadline = now + (TURN_S_MIN if generating else self._rules.act_s_max)

    def _beyond_limits(self, trajectory: Trajectory, now: float) -> Iterator[Action]:
        if trajectory.turn >= self._rules.turns_max:
            yield from self._given_up(trajectory, f"more than {self._rules.turns_max} turns", now)
        elif trajectory.num_tokens > self._rules.tokens_max:
            reason = f"{trajectory.num_tokens} tokens; at most {self._rules.tokens_max} are allowed"
            yield from self._given_up(trajectory, reason, now)

    def _overdue(self, now: float) -> Iterator[Action]:
        if now >= self._collect_until:
            self._unheard.clear()
        for trajectory in self.trajectories:
            if now >= self._ends and trajectory.is_open:
                yield from self._given_up(trajectory, "the step's time is up", now)
            elif trajectory.deadline is not None and now >= trajectory.deadline:
                waited = now - trajectory.since
                reason = f"{trajectory.stage.value} for {waited:.0f} s"
                assert trajectory.worker is not None
                turn = turn_id(self.step, trajectory)
                yield Withdraw(trajectory.worker, turn, reason, is_overdue=True)
                yield from self._lost(trajectory, reason, now)

    def _lost(self, trajectory: Trajectory, reason: str, now: float) -> Iterator[Action]:
        """The turn has to be generated again, elsewhere if there is somebody else."""
        self._leave(trajectory, now)
        trajectory.num_tokens = trajectory.prompt_tokens
        trajectory.stage, trajectory.since = Stage.WAITING, now
        self._new_waiting.add(trajectory.id)
        trajectory.home, trajectory.computed = None, 0
        if trajectory.tries >= TRIES_MAX:
            reason = f"turn {trajectory.turn} failed {trajectory.tries} times: {reason}"
            yield from self._given_up(trajectory, reason, now)

    def _given_up(self, trajectory: Trajectory, reason: str, now: float) -> Iterator[Action]:
        if trajectory.worker is not None:
            yield Withdraw(trajectory.worker, turn_id(self.step, trajectory), reason)
        self._leave(trajectory, now)
        trajectory.stage = Stage.GIVEN_UP
        self._forget(trajectory)
        yield GiveUp(trajectory.id, reason)

    def _leave(self, trajectory: Trajectory, now: float) -> None:
        replica = self._replicas.get(trajectory.worker) if trajectory.worker else None
        if replica is not None:
            replica.left(trajectory.id, now)
            self._new_replicas.add(replica.name)
        trajectory.worker = trajectory.deadline = None

    def _forget(self, trajectory: Trajectory) -> None:
        for replica in self._replicas.values():
            replica.memory.forget(trajectory.id)

    def _placed(self, now: float) -> Iterator[Action]:
        waiting = [t for t in self.trajectories if t.stage is Stage.WAITING]
        if not waiting or not self._replicas:
            return
        if now >= self._reviewed + REVIEW_S:
            self._reviewed = now
            self._new_replicas.update(self._replicas)
        generating = sum(replica.num_generating for replica in self._replicas.values())
        requests = (len(waiting) + generating) / len(self._replicas)
        if self._rules.form == "war" and requests < self._rules.threshold:
            yield from self._sticky(waiting, now)
        else:
            yield from self._scored(waiting, now)
        self._new_replicas.clear()
        self._new_waiting.clear()

    def _sticky(self, waiting: Sequence[Trajectory], now: float) -> Iterator[Action]:
        """Each at once: where it was, or where there are fewest requests."""
        for trajectory in sorted(waiting, key=lambda t: (t.since, t.id)):
            replica = self._replicas.get(trajectory.home or PeerId(""))
            if replica is None:
                replica = min(self._replicas.values(), key=lambda r: (r.num_generating, r.name))
            if replica.num_generating < QUEUED_PER_ROW * replica.load.num_rows:
                yield self._place(trajectory, replica, now)

    def _scored(self, waiting: Sequence[Trajectory], now: float) -> Iterator[Action]:
        """Pairs by rank while replicas have places."""
        replicas = [replica for _name, replica in sorted(self._replicas.items())]
        form: Form = War()
        if self._rules.form == "swarm":
            form = Swarm(self._rules.order, replicas, len(waiting), now)
        queues = self._queues(waiting, now)
        new = [i for i, q in enumerate(queues) if q[0].need.trajectory in self._new_waiting]
        for candidate, replica in pairs(queues, replicas, form, new, self._new_replicas):
            yield self._place(self.trajectories[candidate.need.trajectory], replica, now)

    def _queues(self, waiting: Sequence[Trajectory], now: float) -> list[deque[Candidate]]:
        """One for each trajectory with a history, one for the new ones of a group."""
        resumed: list[deque[Candidate]] = []
        new: dict[int, deque[Candidate]] = {}
        for trajectory in waiting:
            candidate = self._candidate(trajectory, now)
            if trajectory.turn > 0:
                resumed.append(deque([candidate]))
            elif trajectory.group in new:
                new[trajectory.group].append(candidate)
            elif len(new) < CONSIDERED_MAX:
                new[trajectory.group] = deque([candidate])
        return [*resumed, *new.values()]

    def _candidate(self, trajectory: Trajectory, now: float) -> Candidate:
        waited = now - trajectory.since
        return Candidate(
            self._need(trajectory),
            trajectory.home,
            self.expectations.turns(trajectory.group),
            waited if trajectory.turn > 0 and waited > self._rules.wait_s_max else 0.0,
        )

    def _place(self, trajectory: Trajectory, replica: Replica, now: float) -> Place:
        need = self._need(trajectory)
        computed = trajectory.computed if trajectory.home == replica.name else 0
        expected_s = max(replica.turn_s(need, now), replica.cycle_s)
        replica.place(need, computed, now)
        trajectory.stage, trajectory.since = Stage.GENERATING, now
        trajectory.worker = trajectory.home = replica.name
        trajectory.tries += 1
        trajectory.deadline = now + max(TURN_S_MIN, PATIENCE * expected_s)
        return Place(replica.name, turn_id(self.step, trajectory))

    def _need(self, trajectory: Trajectory) -> Need:
        group = trajectory.group
        return Need(
            trajectory.id,
            group,
            self.step.prompt_tokens[group],
            trajectory.num_tokens,
            self.expectations.new_tokens(group),
            self.expectations.turns_left(group, trajectory.turn),
        )

    def _num_wanted(self, replica: Replica) -> int:
        """WAR's bound of a window: what is active there and its share of what waits."""
        waiting = sum(t.stage is Stage.WAITING for t in self.trajectories)
        return replica.num_active + -(-waiting // len(self._replicas))

    def _of(self, turn: TurnId) -> Trajectory | None:
        """None for a turn of another step, or of a trajectory that the step does not have."""
        if turn.step != self.step.number or turn.trajectory >= len(self.trajectories):
            return None
        return self.trajectories[turn.trajectory]
