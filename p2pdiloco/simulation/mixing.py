"""What nodes ask for that gossip: vectors are swapped and mixed, learners go on from there.

A vector is one number, and an outer gradient a draw of unit noise: enough to see whether the
members keep their sum and how far they drift apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdiloco.protocol import actions, events
from p2pdiloco.protocol.naming import MixId, PeerId
from p2pdiloco.protocol.topology import Row
from p2pdiloco.simulation.disk import SNAPSHOTS_KEPT, Snapshot, State, digest
from p2pdiloco.simulation.learner import ENCODE_S
from p2pdiloco.simulation.machine import Machine, Offer

if TYPE_CHECKING:
    from p2pdiloco.simulation.world import World

MIX_S = 0.02


class Mixings:
    """`values` are those of all states that ever were, by digest; of genesis states 0.

    `counted` tells which ends counted each exchange, and when.
    """

    def __init__(self, world: World):
        self.world = world
        self.values: dict[str, float] = {}
        self.counted: dict[tuple[MixId, frozenset[PeerId]], dict[PeerId, float]] = {}
        self.last_mixed: dict[tuple[PeerId, int], float] = {}

    def value(self, state: State) -> float:
        return self.values.get(state.digest, 0.0)

    def open(self, machine: Machine, action: actions.OpenMix) -> None:
        state = machine.replica[action.mix.fragment]
        assert state and state.version == action.mix.round, (machine.name, action, state)
        self._offer(machine, Offer(action.mix, action.partners, self.value(state)))
        p = action.mix.fragment
        machine.received = {key: v for key, v in machine.received.items() if key[0].fragment != p}

    @staticmethod
    def _offer(machine: Machine, offer: Offer) -> None:
        machine.offers[offer.mix.fragment, offer.mix.part] = offer

    # ---------------------------------------------------------------- fetching

    def fetch(self, machine: Machine, mix: MixId, peer: PeerId) -> None:
        world, delay_s = self.world, 1.0
        if world.errands.reaches(machine, peer):
            num_bytes = world.swarm.payload_bytes
            delay_s = world.network.carry(peer, machine.name, num_bytes, world.now) - world.now
        world.soon(machine, delay_s, lambda: self._arrives(machine, mix, peer))

    def _arrives(self, machine: Machine, mix: MixId, peer: PeerId) -> None:
        other = self.world.errands.reaches(machine, peer)
        offer = other.offers.get((mix.fragment, mix.part)) if other else None
        answer: events.Event = events.MixFetched(mix, peer)
        if not offer or offer.mix != mix or machine.name not in offer.partners:
            answer = events.MixFailed(mix, peer, "no such vector" if other else "unreachable")
        elif other and other.lying:
            answer = events.MixFailed(mix, peer, "values that are not finite", hostile=True)
        else:
            machine.received[mix, peer] = offer.value
        self.world.handle(machine, answer)

    # ---------------------------------------------------------------- ending a round

    def end(self, machine: Machine, action: actions.CutRound | actions.FinishRound) -> None:
        """At the learner's next boundary; one that stands still goes on at once."""
        learner, p = machine.learner, action.fragment
        if isinstance(action, actions.FinishRound) and p in learner.cut:
            self._finish_cut(machine, action)
        elif learner.alive:
            learner.ending[p] = action
            self.world.training.cut_short(machine)
        else:
            self.fail(machine, action)

    def fail(self, machine: Machine, action: actions.CutRound | actions.FinishRound) -> None:
        failed = events.RoundUnfinished(action.fragment, action.round, "the learner died")
        self.world.handle(machine, failed)

    def reached(self, machine: Machine, action: actions.CutRound | actions.FinishRound) -> None:
        """The learner has come to the boundary."""
        world, p = self.world, action.fragment
        outer = world.rng.gauss(0, 1)
        if isinstance(action, actions.CutRound):
            machine.learner.cut.add(p)
            cut = events.RoundCut(p, action.round)
            mix = MixId(p, action.round, "outer")
            self._offer(machine, Offer(mix, action.partners, outer))
            world.soon(machine, ENCODE_S * machine.slowdown, lambda: world.handle(machine, cut))
            return
        state = self._stepped(machine, action, outer)
        tokens = machine.learner.go_on_from(p, state)
        world.handle(machine, events.FragmentInstalled(p, state.version, tokens))
        world.soon(machine, MIX_S * machine.slowdown, lambda: self._hold(machine, action, state))

    def _finish_cut(self, machine: Machine, action: actions.FinishRound) -> None:
        p, learner = action.fragment, machine.learner
        outer = machine.offers[p, "outer"].value
        state = self._stepped(machine, action, outer)
        life = learner.life

        def go_on() -> None:
            if learner.life != life or not learner.alive:
                self.fail(machine, action)
                return
            learner.cut.discard(p)
            tokens = learner.go_on_from(p, state)
            self.world.handle(machine, events.FragmentInstalled(p, state.version, tokens))
            self._hold(machine, action, state)
            self.world.training.go_on_if_whole(machine)

        self.world.soon(machine, MIX_S * machine.slowdown, go_on)

    def _stepped(self, machine: Machine, action: actions.FinishRound, outer: float) -> State:
        """The state after the outer step: plain, of rate 1."""
        p, before = action.fragment, machine.replica[action.fragment]
        assert before and before.version == action.round, (machine.name, action, before)
        start = MixId(p, action.round, "start")
        value = self.value(before) + self._mixed(machine, start, action.starts)
        if action.outers:
            outer += self._mixed(machine, MixId(p, action.round, "outer"), action.outers)
        state = State(action.version, digest("mixed", machine.name, before.digest, value, outer))
        self.values[state.digest] = value - outer
        return state

    def _mixed(self, machine: Machine, mix: MixId, row: Row) -> float:
        """What the partners change: a sum of weighted differences."""
        mine = machine.offers[mix.fragment, mix.part].value
        for peer in row.partners:
            pair = frozenset((machine.name, peer))
            self.counted.setdefault((mix, pair), {})[machine.name] = self.world.now
        return sum(w * (machine.received[mix, p] - mine) for p, w in row.partners.items())

    def _hold(self, machine: Machine, action: actions.FinishRound, state: State) -> None:
        p, world = action.fragment, self.world
        machine.replica[p] = state
        log = machine.disk.fragments[p]

        def keep() -> None:
            log.snapshots = [*log.snapshots, Snapshot(state, None)][-SNAPSHOTS_KEPT:]

        world.write(machine, keep)
        if action.starts.partners:
            self.last_mixed[machine.name, p] = world.now
        world.handle(machine, events.RoundFinished(p, state.version, state.digest))

    # ---------------------------------------------------------------- below the quorum

    def visit(self, machine: Machine, action: actions.TakeValues | actions.BlendValues) -> None:
        """At the learner's next boundary."""
        if not machine.learner.alive:
            self.world.handle(machine, _lost(action))
            return
        machine.learner.visits.append(action)
        self.world.training.cut_short(machine)

    def visited(self, machine: Machine, action: actions.TakeValues | actions.BlendValues) -> None:
        """The values are not modelled: what counts is who mixes with whom, and when."""
        world, p = self.world, action.fragment
        held, mix = machine.learner.held[p], MixId(p, action.round, "local")
        if isinstance(action, actions.TakeValues):
            if not held or held.version != action.version:
                world.handle(machine, _lost(action))
                return
            self._offer(machine, Offer(mix, action.partners, 0.0))
            world.handle(machine, events.ValuesTaken(p, action.round))
            return
        self._mixed(machine, mix, action.row)
        world.handle(machine, events.ValuesBlended(p, action.round))

    # ---------------------------------------------------------------- looking

    def one_sided(self, since: float, until: float) -> int:
        """Exchanges that one end counted in this time, and the other never did."""
        ends = self.counted.values()
        return sum(len(each) == 1 and since <= min(each.values()) < until for each in ends)

    def spread(self, fragment: int) -> float:
        """Mean squared distance of the living members' starts to their mean."""
        values = [self.value(s) for m in self.world.up if (s := m.replica[fragment])]
        mean = sum(values) / len(values)
        return sum((value - mean) ** 2 for value in values) / len(values)


def _lost(action: actions.TakeValues | actions.BlendValues) -> events.ValuesLost:
    return events.ValuesLost(action.fragment, action.round, "the learner died or moved on")
