"""The promises, looked at after every event. A broken one names the seed.

Each was seen to bite: `tests/simulation/test_checkers.py` plants bugs in the core and says which
promise notices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2pdiloco.protocol import actions, events
from p2pdiloco.protocol.ledger import Totals
from p2pdiloco.protocol.lineage import Contributor, Record
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.node import Node
from p2pdiloco.protocol.register import Register
from p2pdiloco.protocol.wire import Heartbeat
from p2pdiloco.simulation import promises
from p2pdiloco.simulation.bounds import out_of_bounds
from p2pdiloco.simulation.disk import State
from p2pdiloco.simulation.machine import Contribution, Machine
from p2pdiloco.simulation.promises import FragmentSight, Sight

if TYPE_CHECKING:
    from p2pdiloco.simulation.world import World

PACE = 0.85
"""Share of its usual steps that a learner takes at least when nothing goes wrong; its pace varies
by a tenth.
"""


LOOK_ALWAYS_MACHINES = 50
"""In a larger swarm the promises are looked at after a sample of the events only."""
SAMPLED = 16


def _is_small_talk(event: events.Event) -> bool:
    """What comes every second from everybody; whatever it broke is still broken at the next event
    of another kind.
    """
    return isinstance(event, events.MessageArrived) and isinstance(event.message, Heartbeat)


def _weight(head: Record | None) -> tuple[int, int]:
    """More merged tokens win, then the smaller digest; said here again, independent of the core."""
    return (head.tokens_total, -int(head.digest, 16)) if head else (0, 0)


def sight_of(machine: Machine, now: float) -> Sight:
    """What an outsider sees of a node that is up."""
    node = machine.node
    assert node, f"{machine.name} is down"
    return Sight(
        name=machine.name,
        at=now,
        life=machine.disk.incarnation,
        fragments=tuple(map(_fragment_sight, node.state.registers, machine.replica)),
        tokens=node.state.ledger.totals(),
        settled=node.is_settled,
        steps=machine.learner.steps_total,
    )


def _fragment_sight(register: Register, state: State | None) -> FragmentSight | None:
    chain = register.chain
    if chain is None:
        return None
    held = state.digest if state and state.version == chain.version else None
    return FragmentSight(chain.version, chain.digest, held, chain.tokens_total)


class PromiseBroken(AssertionError):
    """What was promised, when and where it was broken, and how to see it again."""

    def __init__(self, world: World, who: str, what: str):
        trial = f"{world.seed} gossip" if world.swarm.gossip else f"{world.seed}"
        super().__init__(
            f"seed {world.seed}, {world.now:.3f} s, {who}: {what}. "
            f"See it again: python -m p2pdiloco.simulation {trial}"
        )


@dataclass(frozen=True, slots=True)
class _Stand:
    """Where a machine stood with a fragment when it was last looked at."""

    weight: tuple[int, int]
    version: int
    digest: str


class Checkers:
    def __init__(self, world: World):
        self.world = world
        self.merges: Counter[PeerId] = Counter()
        """Commits by synchronizer."""
        self.last_merge: dict[int, float] = {}
        self.forks = 0
        """Commits beside another one on the same parent."""
        self.blind: set[PeerId] = set()
        """Machines whose donors' records did not reach back to where the lineages part: donors
        restart with few records. What became of their tokens in between is not known to them.
        """
        self.slowest_spread_s = 0.0
        """From a commit to the last machine that has it."""
        self._samples = len(world.machines) > LOOK_ALWAYS_MACHINES
        self._committed_at: dict[str, float] = {}
        self._children: dict[tuple[int, str], str] = {}
        self._states: dict[tuple[int, str], str] = {}
        self._stands: dict[tuple[PeerId, int], _Stand] = {}
        self._fences: dict[tuple[PeerId, int], tuple[str, tuple[int, int]]] = {}

    def broken(self, who: str, what: str) -> PromiseBroken:
        return PromiseBroken(self.world, who, what)

    def hold(self, who: str, broken: str | None) -> None:
        """Raises what one of the promises says."""
        if broken:
            raise self.broken(who, broken)

    def sights(self) -> list[Sight]:
        return [sight_of(machine, self.world.now) for machine in self.world.up]

    # ---------------------------------------------------------------- what machines are about to do

    def started(self, machine: Machine) -> None:
        """The disk may be behind what the memory was: a restart begins from there."""
        for p in range(len(machine.replica)):
            self._stands.pop((machine.name, p), None)
            self._fences.pop((machine.name, p), None)
        self._same_states(machine)

    def before_actions(
        self, machine: Machine, event: events.Event, wanted: Sequence[actions.Action]
    ) -> None:
        assert machine.node
        for action in wanted:
            if isinstance(action, actions.PrepareContribution):
                self._fence_holds(machine, action)
            elif isinstance(action, actions.CatchUp):
                self._one_catch_up(machine, action.fragment)

    def _fence_holds(self, machine: Machine, action: actions.PrepareContribution) -> None:
        """A round with an older (term, attempt) than one that was joined gets no contribution."""
        assert machine.node
        chain = machine.node.state.registers[action.round.fragment].chain
        assert chain
        key = (machine.name, action.round.fragment)
        head, newest = self._fences.get(key, (chain.digest, (0, 0)))
        if head == chain.digest and action.round.fence < newest:
            raise self.broken(
                machine.name, f"it contributes to {action.round}, but has seen the fence {newest}"
            )
        self._fences[key] = (chain.digest, action.round.fence)

    def _one_catch_up(self, machine: Machine, fragment: int) -> None:
        if machine.catching_up.get(fragment):
            raise self.broken(machine.name, f"two catch-ups of fragment {fragment} at once")

    def installing(
        self, machine: Machine, fragment: int, version: int, state: State | None
    ) -> None:
        """The learner receives what the replica holds, and nothing twice, which would throw away
        its steps; only what was loaded anew is another matter, after memory went wrong.
        """
        learner = machine.learner
        if state is None or state.version != version:
            raise self.broken(
                machine.name, f"installs v{version} of fragment {fragment}, the replica has {state}"
            )
        if not learner.alive:
            raise self.broken(machine.name, "installs into a learner that is not running")
        if learner.waiting.get(fragment, learner.held[fragment]) is state:
            raise self.broken(machine.name, f"installs fragment {fragment} v{version} twice")

    def merging(
        self,
        machine: Machine,
        state: State,
        merged: Sequence[Contribution],
        parts: Sequence[Contributor],
    ) -> None:
        """Outer gradients are merged into the state that they were taken against, with their own
        counters.
        """
        for contribution, part in zip(merged, parts, strict=True):
            if contribution.base != state.digest:
                raise self.broken(
                    machine.name,
                    f"{contribution.round}: the outer gradient of {part.peer} was made against "
                    f"another state than v{state.version} here",
                )
            if (contribution.tokens, contribution.steps) != (part.tokens, part.steps):
                raise self.broken(machine.name, f"{contribution.round}: wrong counters in {part}")

    def committing(self, machine: Machine, record: Record) -> None:
        self.merges[machine.name] += 1
        self.last_merge[record.fragment] = self.world.now
        self._committed_at[record.digest] = self.world.now
        known = self._children.setdefault((record.fragment, record.parent), record.digest)
        self.forks += known != record.digest
        if len(record.contributors) < self.world.swarm.quorum:
            raise self.broken(machine.name, f"{record} has fewer contributors than the quorum")
        names = [contributor.peer for contributor in record.contributors]
        if len(names) != len(set(names)):
            raise self.broken(machine.name, f"{record} counts a contributor twice")

    def woke(self, machine: Machine) -> None:
        """A deadline that has passed is dealt with; else the shell would wake the node for ever."""
        node = machine.node
        if node and node.deadline is not None and node.deadline < machine.local(self.world.now):
            raise self.broken(machine.name, "it was woken and did not deal with its deadline")

    # ---------------------------------------------------------------- after every event

    def after(self, machine: Machine, event: events.Event) -> None:
        node = machine.node
        if not node or node.state.gone:
            return
        self._learner_goes_on(machine)
        if self._samples and not self._is_drawn(event):
            return
        for p in range(len(machine.replica)):
            self._lineage(machine, node, p)
        if isinstance(event, events.StepsDone):
            self._ledger(machine)
        if not _is_small_talk(event):
            self.hold(machine.name, out_of_bounds(self.world, machine, node.state))

    def _is_drawn(self, event: events.Event) -> bool:
        """In a large swarm: whatever changes a lineage, and of the rest one in `SAMPLED`."""
        changes = isinstance(event, events.StateReached | events.RoundMerged)
        return changes or self.world.num_events % SAMPLED == 0

    def _lineage(self, machine: Machine, node: Node, fragment: int) -> None:
        """Versions go back only towards a heavier lineage, or to come again to the same head after
        our own state was damaged; equal heads mean equal states.
        """
        register = node.state.registers[fragment]
        chain, key = register.chain, (machine.name, fragment)
        before = self._stands.get(key)
        if chain is None:
            if before or machine.replica[fragment]:
                raise self.broken(machine.name, f"fragment {fragment} was forgotten")
            return
        digest = chain.digest
        if before and before.digest == digest:
            return
        state = machine.replica[fragment]
        if state is None or state.version != chain.version:
            raise self.broken(machine.name, f"chain at v{chain.version}, replica at {state}")
        self._same_states(machine)
        took_s = self.world.now - self._committed_at.get(digest, self.world.now)
        self.slowest_spread_s = max(self.slowest_spread_s, took_s)
        if before and not self.world.swarm.gossip:
            grew = self._grew_from(before, chain.head)
            if not grew:
                self._is_heavier(machine, before, register)
            shared = before.version if grew else self._fork_point(before, chain.head)
            if chain.base > shared:
                self.blind.add(machine.name)
        self._stands[key] = _Stand(_weight(chain.head), chain.version, digest)

    def _is_heavier(self, machine: Machine, before: _Stand, register: Register) -> None:
        chain, pursuit = register.chain, register.pursuit
        assert chain
        aim = pursuit.lineage[-1] if pursuit else chain.head
        mended = register.mended_at == machine.node.state.now if machine.node else False
        if max(_weight(aim), _weight(chain.head)) <= before.weight and not mended:
            raise self.broken(
                machine.name,
                f"fragment {register.index} went from v{before.version} to v{chain.version} of a "
                f"lineage that is not heavier",
            )

    def _fork_point(self, before: _Stand, head: Record | None) -> int:
        """The newest version that both lineages have."""
        ours = {r.digest: r.version for r in self.chain_of(self.world.records.get(before.digest))}
        return max((ours.get(record.digest, 0) for record in self.chain_of(head)), default=0)

    def _grew_from(self, before: _Stand, head: Record | None) -> bool:
        while head and head.version > before.version:
            if head.parent == before.digest:
                return True
            head = self.world.records.get(head.parent)
        return False

    def _same_states(self, machine: Machine) -> None:
        sight = sight_of(machine, self.world.now)
        self.hold(machine.name, promises.identical_states(self._states, sight))

    def _ledger(self, machine: Machine) -> None:
        sight = sight_of(machine, self.world.now)
        self.hold(machine.name, promises.ledger_adds_up(sight))
        own = machine.tokens_this_life * len(machine.replica) + machine.processed_before
        if sight.tokens.processed < own:
            raise self.broken(
                machine.name, f"{own} tokens processed, the ledger says {sight.tokens}"
            )

    def _learner_goes_on(self, machine: Machine) -> None:
        learner = machine.learner
        if (
            learner.stepping
            and not learner.stalled
            and self.world.now > learner.next_boundary + 1e-6
        ):
            raise self.broken(machine.name, f"the learner waits ({learner.next_boundary:.3f} s)")

    # ---------------------------------------------------------------- at times

    def one_lineage(self) -> None:
        """The heads of each fragment lie on one chain."""
        parents = {digest: record.parent for digest, record in self.world.records.items()}
        self.hold("swarm", promises.on_one_chain(self.sights(), parents))

    def one_head(self) -> None:
        """Everybody settled on the same heads."""
        self.hold("swarm", promises.one_head(self.sights()))

    def took_turns(self, tolerance: float) -> None:
        """Equal machines made about equally many merges."""
        merges = {str(name): self.merges[name] for name in self.world.machines}
        broken = promises.taken_in_turns(merges, merges, tolerance)
        self.hold("swarm", broken)

    def spared_uplinks(self, copies_max: float) -> None:
        """No synchronizer served one of its merges to more than so many others."""
        most = max(self.world.errands.copies.values(), default=0.0)
        what = "copies of a merge served by its synchronizer"
        self.hold("swarm", promises.at_most(what, most, copies_max))

    def merged_since(self, since: float) -> None:
        """Every fragment was merged again after that moment."""
        for p in range(self.world.swarm.num_fragments):
            if self.last_merge.get(p, 0.0) <= since:
                raise self.broken("swarm", f"fragment {p} was not merged since {since:.1f} s")

    def resumed_since(self, since: float) -> None:
        """Everybody trains, on one lineage, and every fragment was merged again. Steps that were
        begun on a slow machine are over.
        """
        self.one_lineage()
        self.merged_since(since)
        for machine in self.world.up:
            learner = machine.learner
            if not learner.stepping or learner.next_boundary > self.world.now + 2 * learner.step_s:
                raise self.broken(machine.name, "its learner does not train at its pace")

    def mixed_since(self, since: float) -> None:
        """Everybody, but for those who are left alone for something wrong, has mixed every fragment
        with somebody after that moment, and all are in about the same round.
        """
        world = self.world
        for p in range(world.swarm.num_fragments):
            rounds = [state.version if (state := m.replica[p]) else -1 for m in world.up]
            if max(rounds) - min(rounds) > 1:
                raise self.broken("swarm", f"fragment {p}: members are in rounds {rounds}")
            for machine in world.up:
                if any(not m.node.state.cooled_down(machine.name) for m in world.up if m.node):
                    continue
                if world.mixings.last_mixed.get((machine.name, p), 0.0) <= since:
                    text = f"it has not mixed fragment {p} since {since:.1f} s"
                    raise self.broken(machine.name, text)

    def mixed_alike(
        self, since: float, until: float, one_sided_max: float, spread_max: float
    ) -> None:
        """Both ends count an exchange or neither does: always between these times, in which nothing
        fails any more, and nearly always before. So nobody drifts away.
        """
        mixings = self.world.mixings
        if late := mixings.one_sided(since, until):
            raise self.broken("swarm", f"{late} exchanges count at one end, and nothing failed")
        share = mixings.one_sided(0.0, until) / max(1, len(mixings.counted))
        self.hold("swarm", promises.at_most("of the exchanges are one-sided", share, one_sided_max))
        for p in range(self.world.swarm.num_fragments):
            spread = mixings.spread(p)
            self.hold("swarm", promises.at_most(f"drifts, fragment {p}", spread, spread_max))

    def all_settled(self) -> None:
        restless = [sight.name for sight in self.sights() if not sight.settled]
        self.hold("swarm", f"{restless} do not settle" if restless else None)

    def count_steps(self) -> dict[PeerId, int]:
        return {m.name: m.learner.steps_total for m in self.world.up}

    def kept_pace(self, before: dict[PeerId, int], passed_s: float) -> None:
        """No learner waited for anything while `passed_s` went by since `before` was counted."""
        for name, steps in before.items():
            learner = self.world.machines[name].learner
            usual = passed_s / (learner.step_s * learner.slowdown)
            if learner.steps_total - steps < PACE * usual - 1:
                raise self.broken(
                    name, f"{learner.steps_total - steps} steps instead of about {usual:.0f}"
                )

    def chain_of(self, head: Record | None) -> list[Record]:
        """Newest first, down to version 1."""
        chain = []
        while head:
            chain.append(head)
            head = self.world.records.get(head.parent)
        return chain

    def ledgers_meet_lineages(self) -> None:
        """What each living node calls merged is what the records from version 1 on say of it; the
        records add up to `tokens_total`.
        """
        merged: Counter[PeerId] = Counter()
        for p in range(self.world.swarm.num_fragments):
            heads = [m.node.state.registers[p].chain for m in self.world.up if m.node]
            head = max((c for c in heads if c), key=lambda c: c.weight).head
            chain = self.chain_of(head)
            if head and sum(r.tokens for r in chain) != head.tokens_total:
                raise self.broken("swarm", f"fragment {p}: tokens_total of {head} does not add up")
            for record in chain:
                for contributor in record.contributors:
                    merged[contributor.peer] += contributor.tokens
        for machine in self.world.up:
            if machine.name not in self.blind:
                sight = sight_of(machine, self.world.now)
                broken = promises.ledger_meets_records(sight, merged[machine.name])
                self.hold(machine.name, broken)

    @staticmethod
    def totals(machine: Machine) -> Totals:
        assert machine.node
        return machine.node.state.ledger.totals()
