"""Who learns from which groups of a step that is rolled out, and when a share goes out again.

Groups are dealt to the members that learn, by name, so that two dispatchers deal alike. A member
without any gets an empty share: it makes its steps all the same, or the swarm would wait for it.
What a member took is its own: nobody else gets it, unless the member is gone for `ORPHANED_S` and
had not learnt from it. What it never took goes to others as soon as it is gone, or has refused for
`REFUSING_S`; so a step does not hang on whoever leaves in the middle of it.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from p2pdiloco.protocol.naming import PeerId

RETRY_S = 2.0
"""Until a share that was not taken is offered again."""
ORPHANED_S = 15.0
"""A member that took a share and is gone for so long will not learn from it: silence alone has
lasted as long as that on a home link."""
REFUSING_S = 60.0
"""A member that has taken nothing for so long, though it lives, learns from nothing this step."""


@dataclass(frozen=True, slots=True)
class Learner:
    """A living member that can contribute, as it told of itself last."""

    life: int
    """Another one than before: it was started anew, and has lost what it took."""
    steps: int
    """Since the version that the step is of."""
    trains: bool
    """Its learner has stepped, so the swarm waits for it."""


@dataclass(frozen=True, slots=True)
class LearnersSeen:
    """All who are there now."""

    learners: Mapping[PeerId, Learner]


@dataclass(frozen=True, slots=True)
class ShareTaken:
    """Answers SendShare."""

    peer: PeerId
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShareFailed:
    """Answers SendShare: it did not arrive, or was refused."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class SendShare:
    """Give the member all episodes of these groups; answer: ShareTaken or ShareFailed."""

    peer: PeerId
    groups: tuple[int, ...]


Event = LearnersSeen | ShareTaken | ShareFailed


@dataclass(slots=True)
class _Member:
    life: int
    seen_at: float
    offered_at: float
    """Since when it takes nothing of what it is offered."""
    refuses: bool = False
    steps: int = 0
    wanted: set[int] = field(default_factory=set)
    """Its groups that it has not taken."""
    shares: list[set[int]] = field(default_factory=list)
    """The groups of each share that it took. It learns from one after the other, H steps each."""
    owes: bool = True
    """It is to take a share, if only an empty one."""
    sending: bool = False
    retry_at: float = float("-inf")

    @property
    def num_groups(self) -> int:
        return len(self.wanted) + sum(map(len, self.shares))

    def give_back(self, inner_steps: int) -> set[int]:
        """Loses the groups that it took and had not learnt from; says which."""
        num_learnt = self.steps // inner_steps
        lost = set[int]().union(*self.shares[num_learnt:])
        del self.shares[num_learnt:]
        return lost


class Dealing:
    """`handle` is the only call that changes anything. It wants to hear of the learners every
    second; there is no other clock."""

    def __init__(
        self,
        groups: Collection[int],
        inner_steps: int,
        taken: Mapping[PeerId, Collection[int]],
    ) -> None:
        """`groups` have episodes. `taken` are those that members took of an earlier dispatcher, an
        empty collection if they took an empty share; of what they say, what is none of `groups` is
        left out: it cannot be dealt again. A share is learnt from in `inner_steps`."""
        self._inner_steps = inner_steps
        self._taken_before = {peer: set(of).intersection(groups) for peer, of in taken.items()}
        self._undealt = set(groups).difference(*self._taken_before.values())
        self._members: dict[PeerId, _Member] = {}
        self._dealt = False

    @property
    def num_waiting(self) -> int:
        """Groups that nobody has taken yet."""
        return len(self._undealt) + sum(len(m.wanted) for m in self._members.values())

    def handle(self, event: Event, now: float) -> list[SendShare]:
        match event:
            case LearnersSeen(learners):
                for peer in sorted(learners):
                    self._seen(peer, learners[peer], now)
                self._bury(learners, now)
                self._deal(learners, now)
            case ShareTaken(peer, groups):
                member = self._members[peer]
                member.sending = member.owes = member.refuses = False
                member.wanted -= set(groups)
                member.shares.append(set(groups))
            case ShareFailed(peer):
                member = self._members[peer]
                member.sending, member.retry_at = False, now + RETRY_S
            case _:
                assert_never(event)
        return list(self._offers(now))

    def _seen(self, peer: PeerId, learner: Learner, now: float) -> None:
        member = self._members.get(peer)
        if member is None:
            taken = self._taken_before.get(peer)
            is_in = taken is not None or not self._dealt or learner.trains
            member = _Member(learner.life, now, now, owes=taken is None and is_in)
            member.shares = [] if taken is None else [taken]
            self._members[peer] = member
        elif member.life != learner.life:
            member.wanted |= member.give_back(self._inner_steps)
            member.life, member.offered_at, member.refuses = learner.life, now, False
        member.seen_at, member.steps = now, learner.steps

    def _bury(self, learners: Mapping[PeerId, Learner], now: float) -> None:
        """Takes back what will not be learnt from."""
        for peer, member in self._members.items():
            is_gone = peer not in learners
            is_owed = member.owes or member.wanted
            member.refuses |= bool(is_owed) and now - member.offered_at > REFUSING_S
            if is_gone or member.refuses:
                self._undealt |= member.wanted
                member.wanted = set()
            if is_gone and now - member.seen_at > ORPHANED_S:
                self._undealt |= member.give_back(self._inner_steps)

    def _deal(self, learners: Mapping[PeerId, Learner], now: float) -> None:
        """What belongs to nobody, to whoever has least."""
        able = sorted(peer for peer in learners if not self._members[peer].refuses)
        if not able:
            return
        self._dealt = True
        for group in sorted(self._undealt):
            members = [self._members[peer] for peer in able]
            member = min(members, key=lambda m: m.num_groups)
            if not member.wanted:
                member.offered_at = now
            member.wanted.add(group)
        self._undealt.clear()

    def _offers(self, now: float) -> Iterator[SendShare]:
        for peer, member in sorted(self._members.items()):
            is_due = (member.owes or member.wanted) and not member.sending
            if is_due and now >= member.retry_at and now - member.seen_at < RETRY_S:
                member.sending = True
                yield SendShare(peer, tuple(sorted(member.wanted)))
