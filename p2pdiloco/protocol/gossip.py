"""The node without a synchronizer: it mixes with partners, and makes its own outer step.

Factored Gossip DiLoCo (arXiv 2606.22768), per fragment:

    TRAINING    partners swap their starts of the round (Mix1) behind H inner steps
    CUTTING     where there is a Mix2, the learner stands still, and hands out its outer gradient
    MIXING      partners swap outer gradients, until all have or the wait is over
    FINISHING   the outer step is made; the learner goes on from there with the next round

Rounds are counted alike by all: `Head.version` is the round of a fragment, and a node whose median
companion is in a later round jumps there when its own ends. A round ends when the median learner
has done H steps in it, as under a synchronizer. There is no lineage and nothing to agree on: whom a
node mixes with follows from the members that it knows (`topology.py`), and an exchange counts only
if both ends have it (`links.py`). Where the paper waits for a late Mix1, we go on stepping until it
is settled: the round becomes longer, the learner waits for nobody.

A blocking mix is of a group, for each of whom the learner waits, half a period at most (a whole one
if its vector is on its way); or, where the run says so (`factored`), of a quorum: of everybody,
where the learner waits for K outer gradients, its own among them, and then for the grace window of
a synchronizer's round (`pacing.grace_s`); who is not there by then is the identity. Each member
closes its window by itself, and the links see to it that both ends count the same. A merge of a
quorum with records, as under a synchronizer, would not do: a record vouches for the state that its
merge leads to, and one that was mixed with partners is like nobody else's. The paper's Mix2 is of
all or of a fixed group, and says nothing of partners that are late.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol import contributor, events
from p2pdiloco.protocol.actions import CatchUp, CutRound, FetchMix, FinishRound, OpenMix
from p2pdiloco.protocol.follower import DONORS_MAX, Follower
from p2pdiloco.protocol.ledger import NOT_ASKED
from p2pdiloco.protocol.lineage import Chain
from p2pdiloco.protocol.links import Links
from p2pdiloco.protocol.naming import MixId, PeerId, sentence
from p2pdiloco.protocol.pacing import grace_s, steps_due
from p2pdiloco.protocol.register import Pursuit, Register
from p2pdiloco.protocol.state import NodeState, RoundOutcome
from p2pdiloco.protocol.topology import ALONE, GossipPlan, Row, Topology
from p2pdiloco.protocol.wire import Heartbeat, Link, Mixing

OWN_PACE = 2
"""A round ends when we have done so many times H steps, and the median learner has had the time for
as many, whatever the others have done: those that announce a learner and take no steps must not
hold us for ever, and who is much faster than the others must not run away from them.
"""
PATIENCE_S = 20.0
"""A partner that has our start of a due round, or fetches it, and does not say so is given up after
this; or after the time that its own start took to get here three times over, if that is longer.
"""
BLOCKED_MIN_S = 2.0
"""A partner that hands out no outer gradient, while our learner stands still, is given up after
half a period, at least this: two heartbeats. One whose outer gradient is being fetched has twice as
long.
"""
LAST_WORD_S = 1.5
"""Beyond the grace window, for the word of a partner whose outer gradient we have: it may count the
exchange already. The word is repeated with each heartbeat: each second in a small swarm, too late
for this in one of more than some thirty members.
"""
LEAP_MAX = 1000
"""Rounds that a node jumps forward at most: nobody uses the numbers up by announcing a high one."""


REPLACED = "in a state that was damaged, before anybody else had it"

MixEvent = (
    events.MixFetched
    | events.MixFailed
    | events.RoundCut
    | events.RoundFinished
    | events.RoundUnfinished
    | events.ValuesTaken
    | events.ValuesBlended
    | events.ValuesLost
)


class Stage(Enum):
    TRAINING = "training"
    CUTTING = "cutting"
    MIXING = "mixing"
    FINISHING = "finishing"


@dataclass(slots=True)
class GossipRound:
    """A round of one fragment. `next_version` is the round that follows, once it is FINISHING."""

    round: int
    starts: Links
    stage: Stage = Stage.TRAINING
    outers: Links | None = None
    due_since: float | None = None
    cut_at: float = 0.0
    grace_until: float | None = None
    closed_at: float = 0.0
    next_version: int = 0

    def links(self, part: str) -> Links | None:
        return self.starts if part == "start" else self.outers


class Gossiper:
    """Runs this node's rounds."""

    def __init__(self, node: NodeState, follower: Follower, plan: GossipPlan):
        self.node = node
        self.follower = follower
        self.plan = plan
        self.rounds: list[GossipRound | None] = [None for _ in node.registers]
        self._before: list[GossipRound | None] = [None for _ in node.registers]
        """The rounds that ended last: a partner may have missed the last word."""

    @property
    def is_busy(self) -> bool:
        """Whether some round is ending."""
        return any(round_ and round_.stage is not Stage.TRAINING for round_ in self.rounds)

    @property
    def partners(self) -> list[PeerId]:
        """Whom we exchange starts with at the moment."""
        open_rounds = [round_ for round_ in self.rounds if round_]
        return sorted({peer for round_ in open_rounds for peer in round_.starts.partners})

    @property
    def deadline(self) -> float | None:
        """When the next grace window ends."""
        limits = (
            self._limit(round_, peer)
            for register, round_ in zip(self.node.registers, self.rounds, strict=True)
            if round_ and round_.stage is Stage.MIXING and _goes_on(register)
            if round_.outers and round_.grace_until is not None
            for peer in round_.outers.waiting_for()
        )
        return min(limits, default=None)

    # ---------------------------------------------------------------- getting a first state

    def heartbeat(self, sender: PeerId, heartbeat: Heartbeat) -> None:
        """Who holds nothing takes the state of any member, and starts in its round."""
        for register, head in zip(self.node.registers, heartbeat.heads, strict=True):
            if head.version >= 0 and (register.chain is None or register.distrusted):
                self.follower.ask(register, sender)

    def records_fetched(self, event: events.RecordsFetched) -> None:
        """There are no records; a donor's word is all that vouches for its state, but for the
        genesis weights.
        """
        node, register = self.node, self.node.registers[event.fragment]
        if register.asked != event.peer:
            return
        register.asked = None
        genesis = node.config.genesis_digests[event.fragment]
        usable = [
            snapshot
            for snapshot in event.snapshots
            if (snapshot.version or snapshot.state_digest == genesis)
            and self._is_near(register, snapshot.version)
        ]
        if register.pursuit or (register.chain and not register.distrusted):
            return
        if not usable:
            self.follower.of_no_use(register, event.peer, "it offers no state")
            return
        snapshot = max(usable, key=lambda s: s.version)
        others = node.config.genesis_donors if snapshot.version == 0 else ()
        donors = [p for p in dict.fromkeys([event.peer, *others]) if p != node.me]
        catch_up = CatchUp(event.fragment, snapshot, (), (), tuple(donors[:DONORS_MAX]))
        register.pursuit = Pursuit(catch_up, (), event.peer)
        node.do(catch_up)

    def _is_near(self, register: Register, version: int) -> bool:
        """Whether the median member could come to this round: who starts in one far ahead of all
        mixes with nobody, and its own next round may be more than a message can say.
        """
        voices = self.node.membership.voices(self.node.now)
        heads = [register.version, *(h.heads[register.index].version for _, h in voices)]
        held = [head for head in heads if head >= 0]
        return version <= statistics.median_high(held or [0]) + LEAP_MAX

    def state_reached(self, event: events.StateReached) -> None:
        """A whole state was loaded, of a member, of the owner, or from our own disk."""
        node, register = self.node, self.node.registers[event.fragment]
        assert register.pursuit and event.record is None
        own = register.pursuit.source == node.me
        node.ledger.lose_carried(register.index, event.version if own else -1, REPLACED)
        register.chain = Chain(event.version, event.state_digest)
        register.newest_seen = event.version
        register.pursuit, register.failures = None, 0
        if register.distrusted:
            register.distrusted, register.mended_at = False, node.now
        self.rounds[register.index] = None
        node.note(f"fragment {register.index}: starts in round {event.version}")
        contributor.hand_over(node, register)

    # ---------------------------------------------------------------- what partners say

    def mixing(self, sender: PeerId, message: Mixing) -> None:
        """Raises PeerError for a fragment that the run does not have."""
        answers = [link for told in message.links for link in self._link(sender, told)]
        self._tell(sender, answers)

    def _link(self, sender: PeerId, told: Link) -> Sequence[Link]:
        """What to answer, if anything."""
        if told.fragment >= len(self.rounds):
            raise PeerError(f"fragment {told.fragment}; the run has {len(self.rounds)}")
        round_, before = self.rounds[told.fragment], self._before[told.fragment]
        if round_ is None or told.round > round_.round:
            return []
        links = round_.links(told.part) if told.round == round_.round else None
        if not self.node.cooled_down(sender):  # it must not wait for us
            if links and sender in links.partners:
                links.give_up(sender, "it is left alone for something wrong")
            return [] if told.stage == "void" else [told._replace(stage="void")]
        if links and sender in links.partners:
            answer = links.heard(sender, told)
            self._fetch(links, sender)
            return [links.link(sender)] if answer else []
        if told.round == round_.round or told.stage in ("whole", "void"):
            return []
        old = before.links(told.part) if before and before.round == told.round else None
        counted = old is not None and sender in old.whole().partners
        return [told._replace(stage="whole" if counted else "void")]

    def _fetch(self, links: Links, peer: PeerId) -> None:
        """An outer gradient only once our own lies ready: before, nothing would keep it."""
        round_ = self.rounds[links.mix.fragment]
        early = links.mix.part == "outer" and round_ and round_.stage is Stage.CUTTING
        if links.wants(peer) and self.node.may_ask(peer) and not early:
            links.ask(peer)
            self.node.do(FetchMix(links.mix, peer))

    def _tell(self, peer: PeerId, links: Sequence[Link]) -> None:
        if links:
            self.node.send(peer, Mixing(tuple(links)))

    def handle(self, event: MixEvent) -> None:
        match event:
            case events.MixFetched():
                self._fetched(event)
            case events.MixFailed():
                self._failed(event)
            case events.RoundCut():
                self._cut(event)
            case events.RoundFinished():
                self._finished(event)
            case events.RoundUnfinished():
                self._unfinished(event)
            case events.ValuesTaken() | events.ValuesBlended() | events.ValuesLost():
                raise AssertionError(f"{event} in a run that always gossips")
            case _:
                assert_never(event)

    def _fetched(self, event: events.MixFetched) -> None:
        if links := self._links_of(event.mix):
            links.fetched(event.peer, self.node.now)
            self._tell(event.peer, [links.link(event.peer)])

    def _failed(self, event: events.MixFailed) -> None:
        if event.hostile:
            self.node.refuse(event.reason, event.peer)
        if links := self._links_of(event.mix):
            links.failed(event.peer, sentence(event.reason), event.hostile)

    def _links_of(self, mix: MixId) -> Links | None:
        round_ = self.rounds[mix.fragment]
        links = round_.links(mix.part) if round_ else None
        return links if links and links.mix == mix else None

    def beat(self) -> None:
        """With every heartbeat: tell partners where we stand, until the exchange is settled."""
        told: dict[PeerId, list[Link]] = {}
        for round_ in self.rounds:
            for links in (round_.starts, round_.outers) if round_ else ():
                for peer in links.waiting_for() if links else ():
                    assert links
                    told.setdefault(peer, []).append(links.link(peer))
        for peer, links_to in sorted(told.items()):
            self._tell(peer, links_to)

    # ---------------------------------------------------------------- rounds

    def look_around(self, beats: bool) -> None:
        """Called after every event."""
        for register in self.node.registers:
            if _goes_on(register):
                self._look_at(register, beats)

    def _look_at(self, register: Register, beats: bool) -> None:
        round_ = self.rounds[register.index]
        if not self.node.ready and not (round_ and round_.stage is Stage.MIXING):
            return
        if round_ is None or (beats and self._is_lonely(round_)):
            round_ = self._begin(register, round_)
        match round_.stage:
            case Stage.TRAINING if self._is_due(register, round_):
                self._give_up_the_late(round_)
                if not round_.starts.waiting_for():
                    self._end(register, round_)
            case Stage.MIXING:
                assert round_.outers
                self._give_up_the_silent(round_)
                if not round_.outers.waiting_for():
                    self._finish(register, round_)
            case _:
                pass

    @staticmethod
    def _is_lonely(round_: GossipRound) -> bool:
        """Nobody was known when it began."""
        return round_.stage is Stage.TRAINING and not round_.starts.partners

    def _begin(self, register: Register, lonely: GossipRound | None) -> GossipRound:
        node = self.node
        mix = MixId(register.index, register.version, "start")
        row = self._row(self.plan.mix1, register.version)
        links = Links(mix, row, node.now)
        round_ = lonely or GossipRound(register.version, links)
        round_.starts, self.rounds[register.index] = links, round_
        if links.partners or lonely is None:
            node.do(OpenMix(mix, links.partners))
        for peer in links.partners:
            self._tell(peer, [links.link(peer)])
        return round_

    def _row(self, topology: Topology, round_number: int) -> Row:
        node = self.node
        members = node.ready_peers
        if not members:
            return ALONE
        return topology(node.me, [node.me, *members], round_number, self.plan.seed)

    def _is_due(self, register: Register, round_: GossipRound) -> bool:
        """Whether the median learner that steps has done its part of the round, or most of the
        others are in a later one. If half of them are, which may be a single one that claims it, we
        do half of our part first.
        """
        node, p = self.node, register.index
        mine, due = node.local_steps(register), steps_due(node.config.times, p, register.version)
        if not mine or node.settling or not node.learner_alive:
            return False
        done, ahead = [mine >= due], [False]
        for member, heartbeat in node.membership.ready(node.now):
            if heartbeat.step_s > 0 and node.cooled_down(member.peer):
                head = heartbeat.heads[p]
                same = head.version == register.version and heartbeat.local_steps[p] >= due
                ahead.append(head.version > register.version)
                done.append(ahead[-1] or same)
        num_ahead, num_others = ahead.count(True), len(ahead) - 1
        is_left = 2 * num_ahead > num_others
        is_left |= num_ahead > 0 and 2 * num_ahead == num_others and 2 * mine >= due
        is_median = done.count(False) <= (len(done) - 1) // 2
        is_due = is_left or is_median or self._is_past_own_pace(mine, due)
        if is_due and round_.due_since is None:
            round_.due_since = node.now
        return is_due

    def _is_past_own_pace(self, mine: int, due: int) -> bool:
        node, most = self.node, OWN_PACE * due
        return mine >= most and mine * node.step_s >= most * node.swarm_step_s()

    def _give_up_the_late(self, round_: GossipRound) -> None:
        """A partner that has not begun the round by its end is left out; one whose start is on its
        way is waited for.
        """
        node, links = self.node, round_.starts
        assert round_.due_since is not None
        patience_s = max(PATIENCE_S, 3 * (links.arrived - links.begun))
        for peer in links.waiting_for():
            if not node.is_alive(peer):
                links.give_up(peer, "it is gone")
            elif not links.has_offered(peer):
                links.give_up(peer, "it had not begun the round at its end")
            elif not links.is_arriving(peer) and node.now > round_.due_since + patience_s:
                links.give_up(peer, "it did not say in time that it has ours")

    def _give_up_the_silent(self, round_: GossipRound) -> None:
        node, links = self.node, round_.outers
        assert links
        half_period_s = node.config.times.inner_steps * node.swarm_step_s() / 2
        patience_s = max(BLOCKED_MIN_S, half_period_s)
        for peer in links.waiting_for():
            if not node.is_alive(peer):
                links.give_up(peer, "it is gone")
                continue
            limit_s = patience_s * (2 if links.is_arriving(peer) else 1)
            if node.now > round_.cut_at + limit_s:
                links.give_up(peer, "its outer gradient did not come in time")
        if self.plan.by_quorum:
            self._keep_to_the_grace_window(round_, links)

    def _keep_to_the_grace_window(self, round_: GossipRound, links: Links) -> None:
        node, times = self.node, self.node.config.times
        if round_.grace_until is None and len(links.whole().partners) + 1 >= times.quorum:
            quorum_s = node.now - round_.cut_at
            node.clocks.quorum_s.add(quorum_s)
            grace = grace_s(times, node.swarm_step_s(), quorum_s, node.clocks.sync_s.value)
            round_.grace_until = node.now + grace
        if round_.grace_until is None:
            return
        for peer in links.waiting_for():
            if node.now >= self._limit(round_, peer):
                links.give_up(peer, "the grace window was over")
                self._tell(peer, [links.link(peer)])

    @staticmethod
    def _limit(round_: GossipRound, peer: PeerId) -> float:
        """Until when this partner is waited for, once there is a quorum."""
        assert round_.outers and round_.grace_until is not None
        return round_.grace_until + (LAST_WORD_S if round_.outers.has(peer) else 0.0)

    def _end(self, register: Register, round_: GossipRound) -> None:
        node, plan = self.node, self.plan
        mix2 = plan.blocks(register.index)
        row = self._row(mix2, round_.round) if mix2 else ALONE
        if not row.partners:
            self._finish(register, round_)
            return
        round_.stage, round_.cut_at = Stage.CUTTING, node.now
        mix = MixId(register.index, round_.round, "outer")
        round_.outers = Links(mix, row, node.now)
        node.do(CutRound(register.index, round_.round, round_.outers.partners))

    def _cut(self, event: events.RoundCut) -> None:
        round_ = self.rounds[event.fragment]
        if round_ and round_.round == event.round and round_.stage is Stage.CUTTING:
            assert round_.outers
            round_.stage, round_.cut_at = Stage.MIXING, self.node.now
            for peer in round_.outers.partners:
                self._tell(peer, [round_.outers.link(peer)])
                self._fetch(round_.outers, peer)

    def _finish(self, register: Register, round_: GossipRound) -> None:
        round_.stage, round_.next_version = Stage.FINISHING, self._next_version(register)
        round_.closed_at = self.node.now
        self.node.do(
            FinishRound(
                register.index,
                round_.round,
                round_.next_version,
                round_.starts.whole(),
                round_.outers.whole() if round_.outers else None,
            )
        )

    def _next_version(self, register: Register) -> int:
        """The next round, or that of the median member if we are behind."""
        node, p = self.node, register.index
        ready = node.membership.ready(node.now)
        heads = [h.heads[p].version for m, h in ready if node.cooled_down(m.peer)]
        median = statistics.median_high([register.version + 1, *heads])
        return max(register.version + 1, min(median, register.version + LEAP_MAX))

    # ---------------------------------------------------------------- how rounds end

    def installed(self, event: events.FragmentInstalled) -> None:
        """The learner went on with the next round, or received a state anew."""
        node, register = self.node, self.node.registers[event.fragment]
        pending = node.ledger.pending[register.index]
        assert event.tokens == pending, f"the learner counted {event.tokens} tokens, we {pending}"
        round_ = self.rounds[register.index]
        finishing = round_ if round_ and round_.stage is Stage.FINISHING else None
        if finishing and event.version == finishing.next_version:
            node.ledger.carry(register.index, event.version)
            if finishing.outers:
                node.clocks.sync_s.add(node.now - finishing.closed_at)
        elif register.installed is not None:
            node.ledger.settle(
                register.index,
                register.installed + 1,
                merged=0,
                offered=0,
                kind="lost",
                reason=NOT_ASKED,
            )
        register.installed, register.steps = event.version, 0

    def _share(self, round_: GossipRound) -> None:
        """Tokens are merged once a partner has them: those of earlier rounds with our start, those
        of this one with our outer gradient.
        """
        p, ledger = round_.starts.mix.fragment, self.node.ledger
        if round_.outers and round_.outers.whole().partners:
            ledger.share(p, round_.next_version)
        elif round_.starts.whole().partners:
            ledger.share(p, round_.round)

    def _finished(self, event: events.RoundFinished) -> None:
        node, register = self.node, self.node.registers[event.fragment]
        round_ = self.rounds[register.index]
        register.chain = Chain(event.version, event.state_digest)
        register.newest_seen = event.version
        if register.installed == event.version:
            register.handed = event.state_digest
        if round_ is None or round_.next_version != event.version:
            # a damaged state was replaced meanwhile; what we hold now is this one all the same
            register.handed, self.rounds[register.index] = None, None
            contributor.hand_over(node, register)
            return
        self._before[register.index], self.rounds[register.index] = round_, None
        self._share(round_)
        outcome = self._outcome(round_)
        node.merges += outcome.outcome == "mixed"
        node.rounds.append(outcome)
        node.note(f"fragment {register.index}, round {round_.round}: {outcome.reason}")
        contributor.hand_over(node, register)

    def learner_stopped(self) -> None:
        """The outer gradients are gone; a round that it has gone on from is finished without it."""
        for round_ in self.rounds:
            if round_ and round_.stage in (Stage.CUTTING, Stage.MIXING):
                round_.stage, round_.outers, round_.grace_until = Stage.TRAINING, None, None

    def _unfinished(self, event: events.RoundUnfinished) -> None:
        """The learner died, or values went wrong: it trains on from the start of the round."""
        node, register = self.node, self.node.registers[event.fragment]
        round_ = self.rounds[register.index]
        if not round_ or round_.round != event.round or round_.stage is Stage.TRAINING:
            return
        node.note(f"fragment {register.index}, round {round_.round}: {sentence(event.reason)}")
        node.ledger.lose_carried(register.index, register.version, sentence(event.reason))
        round_.stage, round_.outers, round_.grace_until = Stage.TRAINING, None, None
        register.handed = None
        contributor.hand_over(node, register)

    def _outcome(self, round_: GossipRound) -> RoundOutcome:
        node, links = self.node, round_.starts
        counted = links.whole().partners
        blocked = _blocked(round_.outers) if round_.outers else ""
        outers = round_.outers.whole().partners if round_.outers else {}
        others = {*counted, *outers}
        missing = "; ".join(f"{p[-8:]}: {why}" for p, why in sorted(links.failures().items()))
        reason = f"mixed with {len(counted)} of {len(links.partners)} partners{blocked}"
        assert round_.due_since is not None
        return RoundOutcome(
            fragment=links.mix.fragment,
            version=round_.next_version,
            term=0,
            attempt=0,
            synchronizer=node.me,
            contributors=tuple(sorted([node.me, *others])),
            outcome="mixed" if others else "alone",
            reason=sentence(f"{reason}; {missing}" if missing else reason),
            at=node.now,
            duration_s=node.now - round_.due_since,
        )


def _goes_on(register: Register) -> bool:
    """Else its round stands until a state is there."""
    return register.chain is not None and not (register.busy or register.distrusted)


def _blocked(outers: Links) -> str:
    """What came of the mix that the learner stood still for."""
    missing = "; ".join(f"{p[-8:]}: {why}" for p, why in sorted(outers.failures().items()))
    told = f", then {len(outers.whole().partners)} of {len(outers.partners)}"
    return f"{told} ({missing})" if missing else told
