"""What a swarm does that has too few members to merge: its learners' values are mixed by gossip.

Nothing is committed below the quorum, and nothing is made up: anchors, momenta and lineage stay as
they are, counters go on, and every token stays pending. Only the learners' own values move towards
each other, a fragment after each H steps, so that members do not drift apart while they wait:

    TAKING      a copy of the learner's values is taken; it steps on
    SWAPPING    partners swap these copies
    BLENDING    the learner adds the weighted differences to what it has by then

When the quorum is back, contributions are made as always, of what has become of the values since
the last merge: one lineage, and every token in it, if it is merged. A partner must stand on the
same anchor. Rounds are numbered by whoever begins one; others join in its number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol import events
from p2pdiloco.protocol.actions import BlendValues, FetchMix, TakeValues
from p2pdiloco.protocol.gossip import MixEvent
from p2pdiloco.protocol.links import Links
from p2pdiloco.protocol.naming import MixId, PeerId, sentence
from p2pdiloco.protocol.register import Register
from p2pdiloco.protocol.state import NodeState
from p2pdiloco.protocol.topology import PAIRS
from p2pdiloco.protocol.wire import Link, Mixing

LOST_S = 10.0
"""A swarm counts as below its quorum after this: members that restart are back before it."""
ROUNDS_LEAP_MAX = 2**20
"""A swarm below its quorum takes months to count so far, a round with each H steps, and who is
started anew begins at 0; larger leaps would use the numbers up.
"""


class Stage(Enum):
    TAKING = "taking"
    SWAPPING = "swapping"
    BLENDING = "blending"


@dataclass(slots=True)
class LocalRound:
    links: Links
    stage: Stage = Stage.TAKING


class Fallback:
    """Of one node; `active` says whether its swarm is below the quorum."""

    def __init__(self, node: NodeState):
        self.node = node
        self.active = False
        self._short_since: float | None = None
        num = len(node.registers)
        self.rounds: list[LocalRound | None] = [None] * num
        self.mixed = 0
        """Rounds that ended with a partner's values."""
        self._next_round = [0] * num
        self._mixed_at = [0] * num
        """Steps since receipt when the fragment was mixed last."""

    def beat(self) -> None:
        """With every heartbeat."""
        self._judge()
        for register in self.node.registers:
            if round_ := self.rounds[register.index]:
                self._give_up_the_late(register, round_)
                for peer in round_.links.waiting_for():
                    self._tell(peer, [round_.links.link(peer)], round_)
            elif self._is_due(register):
                self._begin(register, self._next_round[register.index])

    def _judge(self) -> None:
        node, quorum = self.node, self.node.config.times.quorum
        short = node.ready and len(self.node.ready_peers) + 1 < quorum
        if not short:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = node.now
        was, since = self.active, self._short_since
        self.active = since is not None and node.now >= since + LOST_S
        if self.active and not was:
            node.note(
                f"fewer members than the quorum of {quorum}: nothing is merged; learners' values "
                f"are mixed by gossip until more are back"
            )
        elif was and not self.active:
            node.note("the quorum is back: merging again")

    def _is_due(self, register: Register) -> bool:
        node, p = self.node, register.index
        here = node.learner_alive and register.installed == register.version
        steps = register.steps - self._mixed_at[p]
        return self.active and here and steps >= node.config.times.inner_steps

    def _begin(self, register: Register, number: int) -> None:
        node, p = self.node, register.index
        members = [
            node.me,
            *(peer for peer in self.node.ready_peers if self._stands_with(register, peer)),
        ]
        row = PAIRS(node.me, members, number, f"{node.config.run_id}/{p}")
        self._next_round[p], self._mixed_at[p] = number + 1, register.steps
        if row.partners:
            links = Links(MixId(p, number, "local"), row, node.now)
            self.rounds[p] = LocalRound(links)
            node.do(TakeValues(p, number, register.version, links.partners))

    def _stands_with(self, register: Register, peer: PeerId) -> bool:
        member = self.node.membership.members.get(peer)
        heartbeat = member.heartbeat if member else None
        digest = register.chain.digest if register.chain else None
        return heartbeat is not None and heartbeat.heads[register.index].digest == digest

    # ---------------------------------------------------------------- swapping

    def handle(self, event: MixEvent) -> None:
        match event:
            case events.MixFetched():
                self._fetched(event)
            case events.MixFailed():
                self._failed(event)
            case events.ValuesTaken():
                self._taken(event)
            case events.ValuesBlended():
                self._blended(event)
            case events.ValuesLost():
                self._lost(event)
            case events.RoundCut() | events.RoundFinished() | events.RoundUnfinished():
                raise AssertionError(f"{event} in a run with synchronizers")
            case _:
                assert_never(event)

    def mixing(self, sender: PeerId, message: Mixing) -> None:
        """What a partner says. Raises PeerError for what no run with synchronizers has."""
        if any(told.part != "local" for told in message.links):
            raise PeerError("it speaks of rounds of gossip, this run has synchronizers")
        answers = [link for told in message.links for link in self._link(sender, told)]
        if answers:
            self.node.send(sender, Mixing(tuple(answers)))

    def _link(self, sender: PeerId, told: Link) -> Sequence[Link]:
        """What to answer a partner, if anything. Raises PeerError for a fragment unknown here."""
        if told.fragment >= len(self.rounds):
            raise PeerError(f"fragment {told.fragment}; the run has {len(self.rounds)}")
        p = told.fragment
        round_ = self.rounds[p]
        if round_ is None and self._joins(sender, told):
            self._begin(self.node.registers[p], told.round)
            round_ = self.rounds[p]
        if round_ and round_.links.mix.round == told.round and sender in round_.links.partners:
            answer = round_.links.heard(sender, told)
            self._fetch(round_, sender)
            self._look_at(round_)
            return (
                [round_.links.link(sender)] if answer and round_.stage is not Stage.TAKING else []
            )
        return [] if told.stage in ("whole", "void") else [told._replace(stage="void")]

    def _joins(self, sender: PeerId, told: Link) -> bool:
        """Whether to begin the round that a partner is in: our own would come soon anyhow."""
        register, first = self.node.registers[told.fragment], self._next_round[told.fragment]
        near = first <= told.round < first + ROUNDS_LEAP_MAX
        here = register.installed == register.version and self.node.learner_alive
        return (
            self.active
            and near
            and here
            and register.steps > self._mixed_at[told.fragment]
            and self._stands_with(register, sender)
        )

    def _fetch(self, round_: LocalRound, peer: PeerId) -> None:
        if round_.stage is Stage.SWAPPING and round_.links.wants(peer) and self.node.may_ask(peer):
            round_.links.ask(peer)
            self.node.do(FetchMix(round_.links.mix, peer))

    def _tell(self, peer: PeerId, links: Sequence[Link], round_: LocalRound) -> None:
        if round_.stage is not Stage.TAKING:
            self.node.send(peer, Mixing(tuple(links)))

    def _fetched(self, event: events.MixFetched) -> None:
        if round_ := self._round_of(event.mix):
            round_.links.fetched(event.peer, self.node.now)
            self._tell(event.peer, [round_.links.link(event.peer)], round_)
            self._look_at(round_)

    def _failed(self, event: events.MixFailed) -> None:
        if event.hostile:
            self.node.refuse(event.reason, event.peer)
        if round_ := self._round_of(event.mix):
            round_.links.failed(event.peer, sentence(event.reason), event.hostile)
            self._look_at(round_)

    def _round_of(self, mix: MixId) -> LocalRound | None:
        round_ = self.rounds[mix.fragment]
        return round_ if round_ and round_.links.mix == mix else None

    def _give_up_the_late(self, register: Register, round_: LocalRound) -> None:
        """By the time the next round is due."""
        node, links = self.node, round_.links
        steps = register.steps - self._mixed_at[register.index]
        late = steps >= node.config.times.inner_steps
        for peer in links.waiting_for():
            if not node.is_alive(peer) or (late and not links.is_arriving(peer)):
                links.give_up(peer, "it did not come in time")
        self._look_at(round_)

    def _look_at(self, round_: LocalRound) -> None:
        if round_.stage is not Stage.SWAPPING or round_.links.waiting_for():
            return
        mix, row = round_.links.mix, round_.links.whole()
        if row.partners:
            round_.stage = Stage.BLENDING
            self.node.do(BlendValues(mix.fragment, mix.round, row))
        else:
            self.rounds[mix.fragment] = None

    # ---------------------------------------------------------------- what the learner has done

    def _taken(self, event: events.ValuesTaken) -> None:
        round_ = self.rounds[event.fragment]
        if round_ and round_.links.mix.round == event.round and round_.stage is Stage.TAKING:
            round_.stage = Stage.SWAPPING
            for peer in round_.links.partners:
                self._tell(peer, [round_.links.link(peer)], round_)
                self._fetch(round_, peer)

    def _blended(self, event: events.ValuesBlended) -> None:
        round_ = self.rounds[event.fragment]
        if round_ and round_.links.mix.round == event.round:
            self.rounds[event.fragment] = None
            self.mixed += 1

    def _lost(self, event: events.ValuesLost) -> None:
        """Not taken, or not blended: the learner died, or has received another version."""
        round_ = self.rounds[event.fragment]
        if round_ and round_.links.mix.round == event.round:
            self.rounds[event.fragment] = None

    def installed(self, fragment: int) -> None:
        """The learner received a state: what it had is gone."""
        self.rounds[fragment], self._mixed_at[fragment] = None, 0

    def learner_stopped(self) -> None:
        for p in range(len(self.rounds)):
            self.installed(p)
