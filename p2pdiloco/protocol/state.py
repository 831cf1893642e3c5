"""What the roles of a node share: its registers, its view of the others, its ledger, and the
actions it is collecting.
"""

import random
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from p2pdiloco.protocol import election
from p2pdiloco.protocol.actions import Action, Note, Send
from p2pdiloco.protocol.ledger import Ledger
from p2pdiloco.protocol.lineage import CONTRIBUTORS_MAX, Signer
from p2pdiloco.protocol.membership import Membership
from p2pdiloco.protocol.naming import PeerId, RoundId, sentence
from p2pdiloco.protocol.pacing import Clocks, SyncTimes
from p2pdiloco.protocol.pauses import Pauses
from p2pdiloco.protocol.register import Register
from p2pdiloco.protocol.wire import Committed, Head, Message

ROUNDS_KEPT = 20
"""Ended rounds that the page shows."""
STRIKE_S = 30.0
"""A peer whose bytes were wrong is left alone for this long, doubled with each further strike."""
STRIKE_MAX_S = 3600.0
RETRY_S = 0.5
"""A peer that did not give what it announced is not asked again for this long, doubled with each
failure in a row up to `RETRY_MAX_S`; a fragment waits as long after a failed catch-up.
"""
RETRY_MAX_S = 15.0
IDLE_S = 60.0
"""A synchronizer that was passed over for want of merges is passed over at once for this long,
doubled each time: a deaf peer must not cost the patience for each term that it leads.
"""
IDLE_MAX_S = 3600.0
UNBELIEVED_AFTER = 3
"""Failures in a row after which nothing waits any more for what a peer announces."""
REFUSALS_KEPT = 64
"""Reasons that are counted one by one: they may hold text of peers, who must not fill our memory.
The rarest are counted together.
"""
OTHER_REASONS = "other reasons"


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """`genesis_digests`: state digest of version 0 of each fragment. `incarnation` must grow with
    each start.
    """

    run_id: str
    me: PeerId
    name: str
    incarnation: int
    genesis_digests: tuple[str, ...]
    genesis_donors: tuple[PeerId, ...]
    times: SyncTimes
    term_merges: int
    contributors_max: int = CONTRIBUTORS_MAX


class Condition(Enum):
    """What the node is doing, in one word."""

    FETCHING = "fetching"
    TRAINING = "training"
    ISOLATED = "isolated"
    SETTLED = "settled"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """For the page: how a round ended, seen from here. `duration_s` is known to its synchronizer
    only.
    """

    fragment: int
    version: int
    term: int
    attempt: int
    synchronizer: PeerId
    contributors: tuple[PeerId, ...]
    outcome: str
    reason: str
    at: float
    duration_s: float | None


@dataclass
class NodeState:
    """Data, and the few words that every role uses. All times are monotonic seconds."""

    config: NodeConfig
    signer: Signer
    rng: random.Random
    now: float
    registers: list[Register]
    membership: Membership
    ledger: Ledger
    clocks: Clocks = field(default_factory=Clocks)
    refusals: Counter[str] = field(default_factory=Counter)
    rounds: deque[RoundOutcome] = field(default_factory=lambda: deque(maxlen=ROUNDS_KEPT))
    merges: int = 0
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    uplink_mb_s: float = 0.0
    learner_alive: bool = False
    settling: bool = False
    gone: bool = False
    strikes: Pauses = field(default_factory=lambda: Pauses(STRIKE_S, STRIKE_MAX_S))
    idle: Pauses = field(default_factory=lambda: Pauses(IDLE_S, IDLE_MAX_S))
    """Synchronizers that lived and merged nothing."""
    unhelpful: Pauses = field(default_factory=lambda: Pauses(RETRY_S, RETRY_MAX_S))
    out: list[Action] = field(default_factory=list)
    orders: dict[int, tuple[PeerId, ...]] = field(default_factory=dict)
    """Candidates by term, kept until the next event changes what they follow from."""

    @property
    def me(self) -> PeerId:
        return self.config.me

    def do(self, *actions: Action) -> None:
        self.out.extend(actions)

    def send(self, peer: PeerId, message: Message) -> None:
        assert peer != self.me, message
        self.do(Send(peer, message))

    def note(self, text: str) -> None:
        self.do(Note(text))

    def refuse(self, reason: str, peer: PeerId | None = None) -> None:
        """Counts a refusal; with `peer`, holds it against that peer, which is then left alone."""
        reason = sentence(reason)
        if reason not in self.refusals and len(self.refusals) >= REFUSALS_KEPT:
            rarest = min(
                (r for r in self.refusals if r != OTHER_REASONS),
                key=lambda r: (self.refusals[r], r),
            )
            self.refusals[OTHER_REASONS] += self.refusals.pop(rarest)
        self.refusals[reason] += 1
        if peer and self.cooled_down(peer):
            pause_s = self.strikes.begin(peer, self.now)
            self.note(f"{peer[-8:]} is left alone for {pause_s:.0f} s: {reason}")

    def cooled_down(self, peer: PeerId) -> bool:
        """Whether the peer is not being left alone for something wrong that it sent."""
        return self.strikes.over(peer, self.now)

    def may_ask(self, peer: PeerId) -> bool:
        return self.cooled_down(peer) and self.unhelpful.over(peer, self.now)

    def better_heads(self, register: Register) -> list[Head]:
        """What living members hold that is newer than ours, or heavier, if they are to be
        believed.
        """
        p = register.index
        heads = [
            m.heartbeat.heads[p]
            for m in self.membership.alive(self.now)
            if m.heartbeat
            and self.cooled_down(m.peer)
            and self.unhelpful.count(m.peer) < UNBELIEVED_AFTER
        ]
        return [h for h in heads if h.version >= 0 and register.gains_from(h.weight)]

    @property
    def ready(self) -> bool:
        """Whether this node holds every fragment and takes part in rounds."""
        whole = all(r.chain for r in self.registers)
        return whole and not self.settling and not self.gone

    def is_alive(self, peer: PeerId) -> bool:
        return self.membership.is_alive(peer, self.now)

    def is_of_use(self, peer: PeerId) -> bool:
        """As a synchronizer: it lives, was not passed over lately, and is not being left alone."""
        if peer == self.me:
            return True
        return self.is_alive(peer) and self.idle.over(peer, self.now) and self.cooled_down(peer)

    def swarm_step_s(self) -> float:
        """Inner-step time of the median ready learner, this one included."""
        steps = [h.step_s for _, h in self.membership.ready(self.now) if h.step_s > 0]
        if self.step_s > 0:
            steps.append(self.step_s)
        return statistics.median_low(steps) if steps else 0.0

    def candidates(self, term: int) -> tuple[PeerId, ...]:
        if term not in self.orders:
            known = self.membership.candidates()
            if self.ready:
                known.append((self.me, self.uplink_mb_s))
            self.orders[term] = election.order(self.config.run_id, term, known)
        return self.orders[term]

    def attempt(self, register: Register) -> int:
        """The highest attempt seen at the next version of a fragment."""
        return register.attempt_in(election.term_of(register.version + 1, self.config.term_merges))

    def post(self, register: Register) -> tuple[PeerId | None, int, int]:
        """(synchronizer, term, attempt) of the next version of a fragment, as seen from here."""
        term = election.term_of(register.version + 1, self.config.term_merges)
        order = self.candidates(term)
        if not order:
            return None, term, 0
        seen = register.attempt_in(term)
        attempt = election.first_attempt(order, register.index, seen, self.is_of_use)
        return election.candidate(order, register.index, attempt), term, attempt

    def is_turn_of(self, peer: PeerId, round_id: RoundId) -> bool:
        """Whether `peer` is the candidate for this attempt, as seen from here."""
        order = self.candidates(round_id.term)
        return bool(order) and peer == election.candidate(
            order, round_id.fragment, round_id.attempt
        )

    def local_steps(self, register: Register) -> int:
        return register.steps if register.installed == register.version else 0

    def all_steps(self, register: Register) -> Sequence[int]:
        """Steps since receipt of our version, of every learner that steps: this one first.

        Members that stand elsewhere have done none, but for those of no use to ask: one that
        announces what it never hands out must not keep the others from merging.
        """
        p, version = register.index, register.version
        others = (
            h.local_steps[p] if h.heads[p].version == version else 0
            for m, h in self.membership.ready(self.now)
            if h.step_s > 0 and (h.heads[p].version == version or self.may_ask(m.peer))
        )
        mine = [self.local_steps(register)] if self.step_s > 0 else []
        return [*mine, *others]

    def tell_head(self, peer: PeerId, register: Register) -> None:
        """Lets a peer that is behind, or on a lighter lineage, know."""
        if register.chain and register.chain.head and peer != self.me:
            self.send(peer, Committed(register.chain.head))
