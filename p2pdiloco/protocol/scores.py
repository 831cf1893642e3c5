"""Which waiting turn goes to which replica with a free place.

WAR (arXiv 2607.17299) scores pairs of request and replica:

    S = [t > share * ttl] * WAITING * t + TURNS * T_g + CACHE * H + IN_FLIGHT * N

with t the seconds that the turn has waited, T_g the expected turns of its group, H the cached share
of its prompt, N what the replica is at; WAITING, CACHE > 0 > TURNS, IN_FLIGHT, and each term far
larger than the next. The paper gives no values; these keep the terms apart at the sizes that occur.

The swarm's form ranks: turns that have waited too long come first, then those whose history lies in
this cache, since it will not for long, then those with a history elsewhere, then new trajectories;
among them short ones while the cache is under pressure (memory comes free soon), long ones while it
is not (a step ends with its longest trajectory: Seer, Heddle); then what is cached most. A turn
fits only if the cache has room for all that is active, and suits a replica only if no other is
expected to end the trajectory sooner, waiting included.
"""

from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.replicas import Need, Replica

WAITING, TURNS, CACHE, IN_FLIGHT = 1e6, -1e3, 1e2, -1e-2
USE_PRESSED = 0.7
"""Share of a replica's cache from which on memory is short."""

MOVE_GAIN = 0.7
"""A trajectory moves if that is expected to leave it less than this share of its time: estimates
are rough, and a move makes one history be computed twice."""

REFUSALS_MAX = 8
"""After so many turns with a history, or new ones, for which a replica is found unsuited, no more
of that kind are tried there at that time; bounds what a decision costs."""

Order: TypeAlias = Literal["short first", "long first", "by use"]
Key: TypeAlias = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting turn."""

    need: Need
    home: PeerId | None
    turns: float
    """Expected of a trajectory of its group."""
    overdue_s: float
    """What it has waited, if that is so long that its environment may be torn down; or else 0."""

    @property
    def is_new(self) -> bool:
        """Nothing of it is generated yet."""
        return self.need.num_tokens == self.need.group_tokens


class Form(Protocol):
    """How pairs are compared, and which are none."""

    def rank(self, candidate: Candidate, replica: Replica) -> Key:
        """The pair that ranks highest is placed."""

    def fits(self, candidate: Candidate, replica: Replica) -> bool:
        """Whether the replica has room, beyond its window."""

    def suits(self, candidate: Candidate, replica: Replica) -> bool:
        """Whether the turn had better wait for another replica; asked of the highest pair only."""


class War:
    """The paper's score."""

    def rank(self, candidate: Candidate, replica: Replica) -> Key:
        return (
            WAITING * candidate.overdue_s
            + TURNS * candidate.turns
            + CACHE * replica.hit(candidate.need)
            + IN_FLIGHT * replica.num_active,
        )

    def fits(self, candidate: Candidate, replica: Replica) -> bool:
        return True

    def suits(self, candidate: Candidate, replica: Replica) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Swarm:
    """Ours, at one moment."""

    order: Order
    replicas: Sequence[Replica]
    num_waiting: int
    now: float

    def rank(self, candidate: Candidate, replica: Replica) -> Key:
        need = candidate.need
        cached = replica.memory.num_cached(need)
        history = need.num_tokens - need.group_tokens
        is_cached = cached > need.group_tokens + history / 2
        resumes = 0.5 * (history > 0) * (1 + is_cached)
        use = self.order == "by use" and replica.use > USE_PRESSED
        turns_left = -need.turns_left if use or self.order == "short first" else need.turns_left
        return candidate.overdue_s, resumes, turns_left, cached / need.num_tokens

    def fits(self, candidate: Candidate, replica: Replica) -> bool:
        return replica.fits(candidate.need)

    def suits(self, candidate: Candidate, replica: Replica) -> bool:
        """A trajectory leaves home for another replica only if it gains clearly."""
        here_s = self._completion_s(candidate, replica)
        others = [other for other in self.replicas if other is not replica]
        best_s = min((self._completion_s(candidate, other) for other in others), default=here_s)
        if candidate.home == replica.name:
            return best_s >= MOVE_GAIN * here_s
        homes = [other for other in others if other.name == candidate.home]
        if homes:
            return here_s < MOVE_GAIN * self._completion_s(candidate, homes[0])
        return here_s <= best_s

    def _completion_s(self, candidate: Candidate, replica: Replica) -> float:
        ahead = self.num_waiting / len(self.replicas)
        return replica.completion_s(candidate.need, ahead, self.now)


def pairs(
    queues: Sequence[deque[Candidate]],
    replicas: Sequence[Replica],
    form: Form,
    new_queues: Sequence[int],
    new_replicas: Set[PeerId],
) -> Iterator[tuple[Candidate, Replica]]:
    """The pairs to place, one after the other; each must be placed before the next is asked for.

    The candidates of a queue are alike, so only the first of each is looked at. Looked at are pairs
    in which something is new: `new_queues` by their index, replicas by name.
    """
    rankings = [
        _Ranking(queues, range(len(queues)) if r.name in new_replicas else new_queues, r, form)
        for r in replicas
    ]
    while choices := [r for r in rankings if r.best is not None]:
        chosen = max(choices, key=lambda r: r.best or ())
        queue = chosen.queue
        if form.suits(queue[0], chosen.replica):
            yield queue.popleft(), chosen.replica
            chosen.rank()
        else:
            chosen.refuse()


class _Ranking:
    """The queues, best first, as one replica ranks them; nothing changes that but what is placed
    there."""

    def __init__(
        self,
        queues: Sequence[deque[Candidate]],
        indexes: Sequence[int],
        replica: Replica,
        form: Form,
    ) -> None:
        self.replica = replica
        self._queues = queues
        self._indexes = indexes
        self._form = form
        self._refused: dict[bool, set[int]] = {True: set(), False: set()}
        """Queues of new trajectories, and of others."""
        self._ranked: list[tuple[Key, int, int]] = []
        """(rank, free places, -queue), so that of equal pairs the one with most room and then the
        first queue is larger; smallest first."""
        self.rank()

    @property
    def best(self) -> tuple[Key, int, int] | None:
        """None if there is no pair."""
        while self._ranked and not self._queues[-self._ranked[-1][2]]:
            self._ranked.pop()
        return self._ranked[-1] if self._ranked else None

    @property
    def queue(self) -> deque[Candidate]:
        """That of the best."""
        return self._queues[-self._ranked[-1][2]]

    def rank(self) -> None:
        """Anew, after something was placed here."""
        replica, form, num_free = self.replica, self._form, self.replica.num_free
        self._ranked = sorted(
            (form.rank(self._queues[index][0], replica), num_free, -index)
            for index in self._indexes
            if num_free > 0 and self._queues[index]
            if index not in self._refused[self._queues[index][0].is_new]
            if form.fits(self._queues[index][0], replica)
        )

    def refuse(self) -> None:
        """The best had better wait for another replica. After several so will others like it."""
        is_new = self.queue[0].is_new
        self._refused[is_new].add(-self._ranked.pop()[2])
        if len(self._refused[is_new]) >= REFUSALS_MAX:
            self._indexes = [i for i in self._indexes if not self._is_of(i, is_new)]
            self._ranked = [r for r in self._ranked if not self._is_of(-r[2], is_new)]

    def _is_of(self, index: int, is_new: bool) -> bool:
        queue = self._queues[index]
        return bool(queue) and queue[0].is_new is is_new
