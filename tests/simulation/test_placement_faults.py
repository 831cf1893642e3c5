"""Whole steps with workers that die and return, messages lost, doubled and late, and dispatchers
that are replaced: every trajectory comes to its end once."""

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.placement import Placement, Rules
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
    TurnFinished,
    TurnId,
    TurnReady,
    Withdraw,
    WorkerLost,
)

STEP = Step(number=3, prompt_tokens=(50, 80, 60), group_size=4)
REPORT_S = 1.0
SILENCE_S = 4.0
HOURS_MAX_S = 3600.0


class Machine:
    """A worker: holds turns, loses them when it dies."""

    def __init__(self, name: PeerId) -> None:
        self.name = name
        self.is_alive = True
        self.life = 0
        self.held: dict[int, Held] = {}


class World:
    def __init__(self, seed: int, rules: Rules, *, loss: float, num_workers: int = 4) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.loss = loss
        self.lengths = [self.rng.randint(1, 6) for _ in range(STEP.num_trajectories)]
        self.rules = rules
        self.placement = Placement(STEP, rules, 0.0)
        self.machines = {PeerId(f"w{i}"): Machine(PeerId(f"w{i}")) for i in range(num_workers)}
        self.given_up: list[GiveUp] = []
        self.out: dict[int, PeerId] = {}
        """Where the present dispatcher has a turn generated."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._arrivals: dict[PeerId, float] = {}
        """Of the newest message to each worker."""
        self.num_begun = 0
        for machine in self.machines.values():
            self.at(self.rng.uniform(0, 2), partial(self._report, machine))

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._serial), call))

    def run(self) -> None:
        while not self.placement.is_done:
            deadline = self.placement.deadline
            assert deadline is not None
            assert self.now < HOURS_MAX_S, "the step does not come to an end"
            if self._heap and self._heap[0][0] <= deadline:
                self.now, _serial, call = heapq.heappop(self._heap)
                call()
            else:
                self.now = max(self.now, deadline)
                self.tell(TimePassed())

    def tell(self, event: Event) -> None:
        for action in self.placement.handle(event, self.now):
            self._check(action)
            self._carry_out(action)
        active = (Stage.GENERATING, Stage.ACTING)
        self.out = {t: w for t, w in self.out.items() if self._stage(t) in active}

    def kill(self, name: PeerId, away_s: float) -> None:
        machine = self.machines[name]
        machine.is_alive = False
        machine.life += 1
        machine.held.clear()
        self.at(min(SILENCE_S, away_s), lambda: self.tell(WorkerLost(name, "silent")))
        self.at(away_s, lambda: self._revive(machine))

    def replace_dispatcher(self) -> None:
        alive = [m.name for m in self.machines.values() if m.is_alive]
        self.placement = Placement(STEP, self.rules, self.now, ask=alive)
        self.out.clear()
        self.given_up.clear()

    def _stage(self, trajectory: int) -> Stage:
        return self.placement.trajectories[trajectory].stage

    def _check(self, action: Action) -> None:
        match action:
            case Place(worker, turn):
                assert turn.turn < self.lengths[turn.trajectory], "a turn after the last"
                known = self.placement.trajectories[turn.trajectory]
                assert (known.turn, known.worker) == (turn.turn, worker)
                self.out[turn.trajectory] = worker
            case Withdraw(worker, turn):
                if self.out.get(turn.trajectory) == worker:
                    del self.out[turn.trajectory]
            case GiveUp():
                self.given_up.append(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Place(worker, turn):
                self._send(lambda: self._begin(self.machines[worker], turn), worker)
            case Withdraw(worker, turn):
                self._send(lambda: self._drop(self.machines[worker], turn), worker)

    def _send(self, deliver: Callable[[], None], worker: PeerId | None = None) -> None:
        """Lost, late, or twice; what goes to one worker keeps its order."""
        for _ in range(self.rng.choices((0, 1, 2), (self.loss, 1 - 2 * self.loss, self.loss))[0]):
            arrival = self.now + self.rng.expovariate(10)
            if worker is not None:
                arrival = self._arrivals[worker] = max(arrival, self._arrivals.get(worker, 0.0))
            self.at(arrival - self.now, deliver)

    def _begin(self, machine: Machine, turn: TurnId) -> None:
        present = machine.held.get(turn.trajectory, Held(turn, Holding.READY, 0))
        is_news = present.turn < turn or (present.turn, present.holding) == (turn, Holding.READY)
        if not machine.is_alive or not is_news:
            return
        self.num_begun += 1
        machine.held[turn.trajectory] = Held(turn, Holding.GENERATING, self._tokens(turn))
        self._after(machine, turn, lambda: self._generated(machine, turn))

    def _generated(self, machine: Machine, turn: TurnId) -> None:
        num_tokens = self._tokens(turn) + 5
        machine.held[turn.trajectory] = Held(turn, Holding.ACTING, num_tokens)
        self._send(lambda: self.tell(TurnFinished(machine.name, turn, num_tokens, 0)))
        self._after(machine, turn, lambda: self._acted(machine, turn))

    def _acted(self, machine: Machine, turn: TurnId) -> None:
        trajectory = turn.trajectory
        if turn.turn + 1 == self.lengths[trajectory]:
            machine.held[trajectory] = Held(turn, Holding.ENDED, self._tokens(turn))
            self._send(lambda: self.tell(TrajectoryEnded(turn)))
            return
        following = TurnId(STEP.number, trajectory, turn.turn + 1)
        num_tokens = self._tokens(following)
        machine.held[trajectory] = Held(following, Holding.READY, num_tokens)
        self._send(lambda: self.tell(TurnReady(following, num_tokens)))

    def _after(self, machine: Machine, turn: TurnId, call: Callable[[], None]) -> None:
        """Unless the machine has died meanwhile, or dropped the turn."""
        life, held = machine.life, machine.held[turn.trajectory]

        def unless_gone() -> None:
            if machine.life == life and machine.held.get(turn.trajectory) is held:
                call()

        self.at(self.rng.expovariate(1), unless_gone)

    def _drop(self, machine: Machine, turn: TurnId) -> None:
        present = machine.held.get(turn.trajectory)
        if present is not None and present.turn == turn and present.holding is not Holding.ENDED:
            del machine.held[turn.trajectory]

    def _revive(self, machine: Machine) -> None:
        machine.is_alive = True

    def _report(self, machine: Machine) -> None:
        self.at(REPORT_S, lambda: self._report(machine))
        if machine.is_alive:
            load = Load(
                num_rows=2,
                cache_tokens=400,
                prefill_tokens_per_s=1000.0,
                token_s=((1, 0.1),),
                held=tuple(machine.held[t] for t in sorted(machine.held)),
            )
            self._send(lambda: self.tell(LoadReported(machine.name, load, 0.05)))

    @staticmethod
    def _tokens(turn: TurnId) -> int:
        return STEP.prompt_tokens[turn.trajectory // STEP.group_size] + 8 * turn.turn


def assert_all_ended(world: World) -> None:
    for trajectory, length in zip(world.placement.trajectories, world.lengths, strict=True):
        assert trajectory.stage is Stage.ENDED
        assert trajectory.turn == length - 1
    assert not world.given_up
    assert not world.out


@pytest.mark.parametrize("form", ["war", "swarm"])
@pytest.mark.parametrize("seed", range(4))
def test_a_quiet_step_ends_every_trajectory_at_its_last_turn(
    seed: int, form: Literal["war", "swarm"]
) -> None:
    world = World(seed, Rules(form=form, threshold=2.0), loss=0.0)
    world.run()
    assert_all_ended(world)


@pytest.mark.parametrize("seed", range(8))
def test_messages_lost_doubled_and_late_cost_time_only(seed: int) -> None:
    world = World(seed, Rules(), loss=0.1)
    world.run()
    assert_all_ended(world)


@pytest.mark.parametrize("seed", range(8))
def test_workers_that_die_and_return_lose_no_trajectory(seed: int) -> None:
    world = World(seed, Rules(), loss=0.02)
    names = sorted(world.machines)
    for _ in range(4):
        name, away_s = world.rng.choice(names), world.rng.uniform(0.5, 20)
        world.at(world.rng.uniform(1, 40), partial(world.kill, name, away_s))
    world.run()
    assert_all_ended(world)


@pytest.mark.parametrize("seed", range(8))
def test_a_new_dispatcher_in_mid_step_loses_none_and_counts_none_twice(seed: int) -> None:
    world = World(seed, Rules(), loss=0.02)
    for _ in range(3):
        world.at(world.rng.uniform(1, 25), world.replace_dispatcher)
    world.at(world.rng.uniform(1, 25), lambda: world.kill(PeerId("w0"), 5.0))
    world.run()
    assert_all_ended(world)


def test_what_a_new_dispatcher_finds_held_is_not_run_again() -> None:
    world = World(1, Rules(), loss=0.0)
    world.at(12.0, world.replace_dispatcher)
    world.run()
    assert_all_ended(world)
    assert world.num_begun == sum(world.lengths)
