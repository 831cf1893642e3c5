"""What the roles of a node share: its registers, its view of the others, its ledger, and the
actions it is collecting.
"""

import random
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from p2pdiloco.protocol import election, pacing
from p2pdiloco.protocol.actions import Action, Note, Send
from p2pdiloco.protocol.ledger import OTHER_REASONS, Ledger
from p2pdiloco.protocol.lineage import CONTRIBUTORS_MAX, Signer
from p2pdiloco.protocol.membership import Member, Membership
from p2pdiloco.protocol.naming import PeerId, RoundId, sentence
from p2pdiloco.protocol.pacer import Pacer
from p2pdiloco.protocol.pacing import Clocks, SyncTimes
from p2pdiloco.protocol.pauses import Pauses
from p2pdiloco.protocol.policies import TOKENS_FULL
from p2pdiloco.protocol.register import Register
from p2pdiloco.protocol.topology import GossipPlan
from p2pdiloco.protocol.wire import Committed, Head, Heartbeat, Message

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
REST_MAX_S = 300.0
"""What slower learners of an rl run get beyond the median one, at most."""
AT_ONCE_MAX = 250
"""Members up to which it counts before the next heartbeat who came or left as a candidate."""
DRAWINGS_KEPT = 4
"""For each fragment: of the present attempt, and of those of its deputies."""
DEAD_ENDS_MAX = 8
"""Attempts in a row that fall to nobody of use before the next best of the last one acts: where
nearly all have died, most attempts would fall to the dead.
"""
NUM_DEPUTIES = 2
"""Candidates that a synchronizer tells of itself with each heartbeat, since they act when it is
silent; hearsay about it would be late in a large swarm, and two would act at once.
"""


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
    pacing: str = "fixed"
    pacing_tokens: int = TOKENS_FULL
    contributors_max: int = CONTRIBUTORS_MAX
    gossip: GossipPlan | None = None
    """Without a synchronizer."""
    mixes_below_quorum: bool = False
    """See `fallback.py`."""
    blocks: bool = False
    """Synchronous DiLoCo: learners stand still from their snapshot to the merge, which waits for
    all of them."""

    rolls_out: bool = False
    """Learners make the steps of a share of rollouts and then wait for the merge: so a round is
    not due before all of them are done, within reason."""


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


Post = tuple[PeerId | None, int, int]
"""(synchronizer, term, attempt) of the next version of a fragment; nobody when none can do it."""


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
    pacer: Pacer
    clocks: Clocks = field(default_factory=Clocks)
    refusals: Counter[str] = field(default_factory=Counter)
    rounds: deque[RoundOutcome] = field(default_factory=lambda: deque(maxlen=ROUNDS_KEPT))
    merges: int = 0
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    loss: float | None = None
    uplink_mb_s: float = 0.0
    learner_alive: bool = False
    settling: bool = False
    gone: bool = False
    strikes: Pauses = field(default_factory=lambda: Pauses(STRIKE_S, STRIKE_MAX_S))
    idle: Pauses = field(default_factory=lambda: Pauses(IDLE_S, IDLE_MAX_S))
    """Synchronizers that lived and merged nothing."""
    unhelpful: Pauses = field(default_factory=lambda: Pauses(RETRY_S, RETRY_MAX_S))
    out: list[Action] = field(default_factory=list)
    _whole: bool = False
    """Whether there was a state of every fragment already; it may be replaced, but not lost."""
    _standing: tuple[int, float | None] | None = None
    """What the drawings follow from: see `renew`."""
    _candidates: dict[PeerId, float] = field(default_factory=dict)
    """Who could synchronize, and its uplink in MB/s."""
    _drawings: dict[election.Turn, election.Drawing] = field(default_factory=dict)
    _posts: dict[int, tuple[int, tuple[int, int], Post]] = field(default_factory=dict)
    """By fragment: the version and the fence of our register that the post follows from, and it."""

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
        return [
            heartbeat.heads[p]
            for member, heartbeat in self.membership.voices(self.now)
            if register.gains_from_head(heartbeat.heads[p])
            and self.cooled_down(member.peer)
            and self.unhelpful.count(member.peer) < UNBELIEVED_AFTER
        ]

    @property
    def ready(self) -> bool:
        """Whether this node holds every fragment and takes part in rounds."""
        if not self._whole:
            self._whole = all(r.chain for r in self.registers)
        return self._whole and not self.settling and not self.gone

    @property
    def ready_peers(self) -> list[PeerId]:
        """The living others that hold every fragment, by name. Costs a look at every member."""
        return [m.peer for m in self.membership.alive(self.now) if m.ready]

    def is_alive(self, peer: PeerId) -> bool:
        return self.membership.is_alive(peer, self.now)

    def is_of_use(self, peer: PeerId) -> bool:
        """As a synchronizer: it lives, was not passed over lately, and is not being left alone."""
        if peer == self.me:
            return True
        return self.is_alive(peer) and self.idle.over(peer, self.now) and self.cooled_down(peer)

    def swarm_step_s(self) -> float:
        """Inner-step time of the median ready learner, this one included (of a sample of them in a
        large swarm).
        """
        steps = [h.step_s for _, h in self.membership.ready(self.now) if h.step_s > 0]
        if self.step_s > 0:
            steps.append(self.step_s)
        return statistics.median_low(steps) if steps else 0.0

    def renew(self, beats: bool) -> bool:
        """Brings the drawings up to date, and forgets the posts, if others follow by
        now; says whether it did.

        `Node.handle` calls it before and after it dispatches an event: within either half all look
        at the same drawings. In a large swarm, in which somebody always comes or goes, they change
        only when this node `beats`.
        """
        if len(self.membership.members) > AT_ONCE_MAX and not beats:
            return False
        weight = election.weight(self.uplink_mb_s) if self.ready else None
        standing = (self.membership.revision, weight)
        if standing == self._standing:
            return False
        self._standing = standing
        terms = {self._next_term(r) for r in self.registers}
        self._drawings = {turn: d for turn, d in self._drawings.items() if turn.term in terms}
        for peer in (*self.membership.changed, self.me):
            self._put(peer)
        self.membership.changed.clear()
        self._posts.clear()
        return True

    def _put(self, peer: PeerId) -> None:
        """Somebody came, left, or has another uplink."""
        mine = self.uplink_mb_s if self.ready else None
        uplink_mb_s = mine if peer == self.me else self.membership.candidate(peer)
        self._candidates.pop(peer, None)
        if uplink_mb_s is not None:
            self._candidates[peer] = uplink_mb_s
        for drawing in self._drawings.values():
            drawing.changed(peer)

    def review_posts(self) -> None:
        """Who was passed over because it seemed dead or idle may be of use again."""
        for register in self.registers:
            kept = self._posts.get(register.index)
            if kept and kept[2][2] > register.attempt_in(kept[2][1]):
                del self._posts[register.index]

    def drawing(self, fragment: int, term: int, attempt: int) -> election.Drawing:
        """Who is to synchronize in this attempt, and who comes next if it falls to none of use."""
        slot = election.slot_of(fragment, len(self._candidates))
        turn = election.Turn(term, attempt, slot)
        if turn not in self._drawings:
            drawing = election.Drawing(self.config.run_id, turn, self._candidates)
            self._drawings[turn] = drawing
            if len(self._drawings) > DRAWINGS_KEPT * len(self.registers):
                del self._drawings[next(iter(self._drawings))]
        return self._drawings[turn]

    def attempt(self, register: Register) -> int:
        """The highest attempt seen at the next version of a fragment."""
        return register.attempt_in(self._next_term(register))

    def _next_term(self, register: Register) -> int:
        """Under which its next version is made."""
        return election.term_of(register.version + 1, self.config.term_merges)

    def post(self, register: Register) -> Post:
        """Who is to make the next version of a fragment, as seen from here."""
        if kept := self._posts.get(register.index):
            version, fence, post = kept
            same = version == register.version and fence == register.fence
            if same and post[0] and self.is_of_use(post[0]):
                return post
        post = self._find_post(register)
        self._posts[register.index] = (register.version, register.fence, post)
        return post

    def _find_post(self, register: Register) -> Post:
        p, term = register.index, self._next_term(register)
        seen = register.attempt_in(term)
        if not self._candidates:
            return None, term, seen
        last = seen + DEAD_ENDS_MAX - 1
        for attempt in range(seen, last + 1):
            first = self.drawing(p, term, attempt).first
            if first and self.is_of_use(first):
                return first, term, attempt
        order = self.drawing(p, term, last).in_order()
        return next(filter(self.is_of_use, order), order[0]), term, last

    def deputies(self, register: Register) -> list[PeerId]:
        """Who comes next when the synchronizer of the next version falls silent."""
        _, term, attempt = self.post(register)
        attempts = range(attempt + 1, attempt + 1 + NUM_DEPUTIES)
        return [*filter(None, (self.drawing(register.index, term, k).first for k in attempts))]

    def is_turn_of(self, peer: PeerId, round_id: RoundId) -> bool:
        """Whether `peer` is the candidate for this attempt, as seen from here."""
        return peer == self.drawing(round_id.fragment, *round_id.fence).first

    def local_steps(self, register: Register) -> int:
        return register.steps if register.installed == register.version else 0

    def offset(self, register: Register) -> int:
        """By how many steps the newest merge missed its appointment (see `pacing`)."""
        times, chain = self.config.times, register.chain
        if chain is None or not times.slack_steps:
            return 0
        if register.paced[0] != chain.digest:
            offset = 0
            for record in chain.records:
                version, period = record.version, record.period_steps
                offset = pacing.next_offset(times, register.index, version, offset, period)
            register.paced = (chain.digest, offset)
        return register.paced[1]

    def window(self, register: Register) -> pacing.Window:
        """Of the next round."""
        times, p = self.config.times, register.index
        return pacing.window(times, p, register.version, self.offset(register))

    def is_due(self, register: Register, ready: Sequence[tuple[Member, Heartbeat]]) -> bool:
        """Whether the next round should be opened: the period is over, and nobody asks for more
        time who has any. `ready` is what the membership says.
        """
        learners, times = self.learners(register, ready), self.config.times
        steps, p, version = [num for num, _ in learners], register.index, register.version
        if not pacing.is_due(times, p, version, steps, self.offset(register)):
            return False
        if self.config.rolls_out and self._waits_for_rest(register, steps):
            return False
        asking = [asks for _, asks in learners]
        return not pacing.is_put_off(self.window(register), steps, asking)

    def _waits_for_rest(self, register: Register, steps: Sequence[int]) -> bool:
        """The median learner is done with its share: those behind it get as long again."""
        is_here = register.installed == register.version
        if not is_here or min(steps) >= self.window(register).opens:
            return False
        if register.median_done[0] != register.version:
            register.median_done = (register.version, self.now)
        done_at = register.median_done[1]
        return self.now < done_at + min(done_at - register.installed_at, REST_MAX_S)

    def learners(
        self, register: Register, ready: Sequence[tuple[Member, Heartbeat]]
    ) -> Sequence[tuple[int, bool]]:
        """Of every learner that steps (of a sample of them in a large swarm), this one first: its
        steps since receipt of our version, and whether it asks for time.

        Members that stand elsewhere have done none, but for those of no use to ask: one that
        announces what it never hands out must not keep the others from merging.
        """
        p, version = register.index, register.version
        others = (
            (h.local_steps[p] if here else 0, here and p in h.asks_for_time)
            for m, h in ready
            if h.step_s > 0 and ((here := h.heads[p].version == version) or self.may_ask(m.peer))
        )
        mine = [(self.local_steps(register), register.asks_for_time)] if self.step_s > 0 else []
        return [*mine, *others]

    def tell_head(self, peer: PeerId, register: Register) -> None:
        """Lets a peer that is behind, or on a lighter lineage, know."""
        if register.chain and register.chain.head and peer != self.me:
            self.send(peer, Committed(register.chain.head))
