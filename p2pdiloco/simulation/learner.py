"""The learner of a machine: inner steps for ever, arrivals and snapshots at step boundaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2pdiloco.protocol import actions, events
from p2pdiloco.protocol.naming import RoundId
from p2pdiloco.simulation.disk import State

if TYPE_CHECKING:
    from p2pdiloco.simulation.machine import Machine
    from p2pdiloco.simulation.world import World

LEARNER_START_S = 0.5
LEARNER_RESTART_S = 1.0
HANDOVER_S = 0.02
ENCODE_S = 0.05


@dataclass
class LearnerModel:
    """Takes inner steps at its own pace for ever, once it received every fragment.

    `waiting` are states handed over for its next step boundary, `asked` the snapshots wanted from
    it; `held` what it trains on.
    """

    num_fragments: int
    step_s: float
    tokens_per_step: int
    alive: bool = False
    life: int = 0
    slowdown: float = 1.0
    stalled: int = 0
    resume: Callable[[], None] | None = None
    """The boundary that fell due while it stood still."""
    stepping: bool = False
    held: list[State | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    waiting: dict[int, State] = field(default_factory=dict)
    asked: dict[int, RoundId] = field(default_factory=dict)
    ending: dict[int, actions.CutRound | actions.FinishRound] = field(default_factory=dict)
    """Rounds of gossip to be ended at the next boundary, by fragment."""
    visits: list[actions.TakeValues | actions.BlendValues] = field(default_factory=list)
    """What is to be done at the next boundary, in a swarm below its quorum."""
    held_for: set[int] = field(default_factory=set)
    """Fragments whose snapshot it will stand still after."""
    cut: set[int] = field(default_factory=set)
    """Fragments whose round was cut: it stands still until they go on."""
    steps_total: int = 0
    next_boundary: float = 0.0
    pace_s: float = 0.0
    """Of a step, from the last boundary that was an event to the next."""
    num_ahead: int = 1
    """Steps between these two."""
    stretch: int = 0
    """Counts them; one that was cut short is another."""

    def start(self) -> None:
        self.alive, self.stepping, self.life = True, False, self.life + 1
        self.held = [None] * self.num_fragments
        self.steps = [0] * self.num_fragments
        self.waiting, self.asked, self.ending = {}, {}, {}
        self.visits, self.held_for, self.cut = [], set(), set()

    def stop(self) -> None:
        self.alive, self.stepping, self.resume = False, False, None

    def step(self, num: int) -> None:
        self.steps = [steps + num for steps in self.steps]
        self.steps_total += num

    def cut_short(self, now: float) -> bool:
        """Something waits for the boundary that comes next: the steps after it are no longer taken
        for quiet. Says whether the next event comes sooner for that.
        """
        left = int((self.next_boundary - now) / self.pace_s) if self.stepping else 0
        left = max(0, min(left, self.num_ahead - 1))
        self.num_ahead -= left
        self.next_boundary -= left * self.pace_s
        return left > 0

    def receive(self, fragment: int) -> int:
        """Overwrites a fragment; returns the tokens counted on the version before."""
        self.cut.discard(fragment)
        tokens = self.steps[fragment] * self.tokens_per_step
        self.held[fragment], self.steps[fragment] = self.waiting.pop(fragment), 0
        return tokens

    def go_on_from(self, fragment: int, state: State) -> int:
        """The same for a state that it made itself."""
        self.waiting[fragment] = state
        return self.receive(fragment)

    @property
    def complete(self) -> bool:
        return all(self.held)


class Training:
    """Runs the learners of a world."""

    def __init__(self, world: World):
        self.world = world

    def start(self, machine: Machine) -> None:
        machine.learner.start()
        self.world.handle(machine, events.LearnerStarted())

    def kill(self, machine: Machine) -> None:
        """Its daemon starts it again."""
        learner, world = machine.learner, self.world
        if not (machine.node and learner.alive):
            return
        learner.stop()
        asked = [learner.asked[p] for p in sorted(learner.asked)]
        ending = [learner.ending[p] for p in sorted(learner.ending)]
        world.handle(machine, events.LearnerStopped("killed"))
        for round_id in asked:
            world.handle(machine, events.ContributionFailed(round_id, "the learner died"))
        for action in ending:
            world.mixings.fail(machine, action)
        world.soon(machine, LEARNER_RESTART_S, lambda: self.start(machine))

    def go_on(self, machine: Machine) -> None:
        """After it stood still."""
        learner = machine.learner
        if learner.resume and not learner.stalled:
            resume, learner.resume = learner.resume, None
            learner.next_boundary = self.world.now
            resume()

    def install(self, machine: Machine, fragment: int, version: int) -> None:
        state, learner = machine.replica[fragment], machine.learner
        self.world.checkers.installing(machine, fragment, version, state)
        assert state
        learner.waiting[fragment] = state
        if not learner.stepping:
            self._soon(machine, HANDOVER_S, lambda: self._first_boundary(machine))
        self.cut_short(machine)

    def ask(self, machine: Machine, round_id: RoundId, hold: bool) -> None:
        """Wants a snapshot for a round."""
        machine.learner.asked[round_id.fragment] = round_id
        if hold:
            machine.learner.held_for.add(round_id.fragment)
        if machine.learner.cut:
            self._soon(machine, HANDOVER_S, lambda: self._first_boundary(machine))
        self.cut_short(machine)

    def cut_short(self, machine: Machine) -> None:
        learner = machine.learner
        if learner.num_ahead > 1 and learner.cut_short(self.world.now):
            self._await_boundary(machine)

    def _first_boundary(self, machine: Machine) -> None:
        if not machine.learner.stepping:
            self._boundary(machine)

    def _soon(self, machine: Machine, delay_s: float, happen: Callable[[], None]) -> None:
        """Something that the learner process does, whether or not its daemon stands still."""
        world, learner, life = self.world, machine.learner, machine.learner.life

        def fall_due() -> None:
            if learner.life != life or not learner.alive:
                return
            if learner.stalled:
                learner.resume = happen
            else:
                happen()

        world.at(world.now + delay_s, fall_due)

    def _boundary(self, machine: Machine) -> None:
        """A step boundary: counters first, then arrivals, then the snapshots that can be taken."""
        world, learner = self.world, machine.learner
        if learner.stepping:
            num, step_s = learner.num_ahead, learner.step_s * learner.slowdown
            learner.step(num)
            world.handle(machine, events.StepsDone(num, num * learner.tokens_per_step, step_s))
        for p in sorted(learner.waiting):
            version = learner.waiting[p].version
            tokens = learner.receive(p)
            world.handle(machine, events.FragmentInstalled(p, version, tokens))
        for p in sorted(learner.asked):
            self._snapshot(machine, p)
        for p in sorted(p for p in learner.ending if learner.steps[p]):
            world.mixings.reached(machine, learner.ending.pop(p))
        visits, learner.visits = learner.visits, []
        for visit in visits:
            world.mixings.visited(machine, visit)
        self._go_on(machine)

    def go_on_if_whole(self, machine: Machine) -> None:
        """A learner that stood still may have been given what it waited for."""
        if not machine.learner.stepping:
            self._go_on(machine)

    def _go_on(self, machine: Machine) -> None:
        world, learner = self.world, machine.learner
        learner.stepping = learner.alive and learner.complete and not learner.cut
        if learner.stepping:
            learner.pace_s = learner.step_s * learner.slowdown * world.rng.uniform(0.9, 1.1)
            learner.num_ahead = (
                1 if learner.asked or learner.ending or learner.visits else world.swarm.quiet_steps
            )
            learner.next_boundary = world.now + learner.num_ahead * learner.pace_s
            self._await_boundary(machine)

    def _await_boundary(self, machine: Machine) -> None:
        learner = machine.learner
        stretch = learner.stretch = learner.stretch + 1

        def reached() -> None:
            if learner.stretch == stretch:
                self._boundary(machine)

        self._soon(machine, learner.next_boundary - self.world.now, reached)

    def _snapshot(self, machine: Machine, fragment: int) -> None:
        learner, world = machine.learner, self.world
        round_id, held = learner.asked[fragment], learner.held[fragment]
        if not held or held.version < round_id.version - 1 or learner.steps[fragment] < 1:
            return
        del learner.asked[fragment]
        if held.version > round_id.version - 1:
            reason = f"the learner is at v{held.version}"
            world.handle(machine, events.ContributionFailed(round_id, reason))
            return
        if fragment in learner.held_for:
            learner.held_for.discard(fragment)
            learner.cut.add(fragment)
        steps = learner.steps[fragment]
        tokens = steps * learner.tokens_per_step
        encode_s = ENCODE_S * machine.slowdown
        world.soon(
            machine,
            encode_s,
            lambda: world.errands.shelve(machine, round_id, held.digest, steps, tokens),
        )
