"""Who mixes with whom in a round of gossip, and with what weight.

A topology gives each member its row of a mixing matrix W: member i leaves the round with the sum of
w_ij x_j. It is a pure function of the members, the number of the round and the run's seed, so
everybody who knows the same members names the same partners, without a word exchanged; where views
differ, one side finds itself unexpected and the exchange fails like any other.

Every W is symmetric and doubly stochastic, for any number of members. Double stochasticity keeps
the members' mean (Factored Gossip DiLoCo, arXiv 2606.22768, builds on that). Symmetry is ours: it
makes failure a matter of two members. An exchange that fails, or a member that is gone, leaves the
identity in its place (`Row.without`): both ends of the link add its weight to their own, so rows
and columns still sum to one. If one end alone notices, the sum moves by w_ij (x_j - x_i) once.

The contraction rho of a W bounds what a round leaves of the sum of squared distances to the mean:

    topology      links of a member           rho
    everybody     M - 1                       0
    Groups(g)     g - 1, anew each round      (k - 1) / (M - 1) in expectation, k = ceil(M / g)
                                              groups: at most 1/g
    hypercube     1                           0 over log2 M rounds if M = 2^n; up to 1 in one round
    exponential   2                           over n = ceil(log2 M) rounds at most the 4th power of
                                              sin(2^n pi/M) / (2^n sin(pi/M)); up to 1 in one round
    ring          2, always the same          (1/3 + 2/3 cos(2 pi / M))^2

Partners that come back make difference coding pay (`compress/difference.py`): the ring's always do,
those of hypercube and exponential every ceil(log2 M) rounds.

The exponential graph follows Stochastic Gradient Push (arXiv 1811.10792), where links have one
direction; here both ends of a hop exchange, which costs a second link and squares the eigenvalues.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from p2pdiloco.protocol.naming import PeerId


@dataclass(frozen=True, slots=True)
class Row:
    """One member's row of W; sums to one."""

    own: float
    partners: Mapping[PeerId, float]
    """Weights above zero, in the order of the peers' names."""

    def without(self, failed: Collection[PeerId]) -> "Row":
        """The identity in the place of each failed exchange: its weight becomes our own."""
        kept = {peer: weight for peer, weight in self.partners.items() if peer not in failed}
        lost = [weight for peer, weight in self.partners.items() if peer in failed]
        return Row(sum(lost, self.own), kept)


ALONE = Row(1.0, {})
"""The row of the identity."""

Topology: TypeAlias = Callable[[PeerId, Collection[PeerId], int, str], Row]
"""(me, members, round number, seed) -> my row. The members include me; their order is of no
account.
"""


def everybody(me: PeerId, members: Collection[PeerId], _: int, __: str) -> Row:
    """The exact average of all, by direct exchange."""
    return _shared(me, members)


@dataclass(frozen=True, slots=True)
class Groups:
    """Random disjoint groups of at most `size`, as equal as possible; anew in each round."""

    size: int

    def __call__(
        self, me: PeerId, members: Collection[PeerId], round_number: int, seed: str
    ) -> Row:
        order = _order(frozenset(members), f"{seed}/{round_number}")
        num_groups = -(-len(order) // self.size)
        return _shared(me, order[order.index(me) % num_groups :: num_groups])


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipPlan:
    """The mixes of a run that gossips: of starts behind the steps, and of outer gradients while the
    learner stands still, or None where nothing blocks. `mix2_fragments` have tensors for that.
    """

    mix1: Topology
    mix2: Topology | None
    seed: str
    by_quorum: bool = False
    """Whether the learner waits for a quorum of outer gradients and the grace window from then on;
    else for all partners, for half a period at most, a whole one for vectors on their way.
    """
    mix2_fragments: frozenset[int] | None = None
    """None for all."""

    def blocks(self, fragment: int) -> Topology | None:
        """The blocking mix of the fragment, if it has one."""
        has = self.mix2_fragments is None or fragment in self.mix2_fragments
        return self.mix2 if has else None


PAIRS = Groups(2)
"""With an odd number of members one is alone, each time another one."""


def hypercube(me: PeerId, members: Collection[PeerId], round_number: int, seed: str) -> Row:
    """In turn for each bit of a member's place: it averages with the member at the place that
    differs in this bit, and is alone where there is no such place.
    """
    order = _order(frozenset(members), seed)
    partner = order.index(me) ^ 1 << round_number % sweep_rounds(len(order))
    return _shared(me, [me, order[partner]]) if partner < len(order) else ALONE


def exponential(me: PeerId, members: Collection[PeerId], round_number: int, seed: str) -> Row:
    """In turn for each hop 1, 2, 4, ... below M: a quarter from each member so far away on the
    circle of all.
    """
    order = _order(frozenset(members), seed)
    hop = 1 << round_number % sweep_rounds(len(order))
    return _from_both_sides(me, order, hop, 0.25)


def ring(me: PeerId, members: Collection[PeerId], _: int, seed: str) -> Row:
    """A third from each neighbour on the circle of all."""
    order = _order(frozenset(members), seed)
    return _from_both_sides(me, order, 1, 1 / 3 if len(order) > 2 else 0.25)


def sweep_rounds(num_members: int) -> int:
    """ceil(log2 M), at least 1: rounds after which hypercube and exponential begin again."""
    return max(1, (num_members - 1).bit_length())


def _shared(me: PeerId, group: Collection[PeerId]) -> Row:
    """The plain average of a group that I am in."""
    share = 1 / len(group)
    return Row(share, {peer: share for peer in sorted(group) if peer != me})


def _from_both_sides(me: PeerId, order: Sequence[PeerId], hop: int, weight: float) -> Row:
    """Two partners may be one and the same, or in a small swarm I myself."""
    place, weights = order.index(me), dict[PeerId, float]()
    for partner in sorted(order[(place + step) % len(order)] for step in (-hop, hop)):
        weights[partner] = weights.get(partner, 0.0) + weight
    weights.pop(me, None)
    return Row(1.0 - sum(weights.values()), weights)


@lru_cache(maxsize=64)
def _order(members: frozenset[PeerId], key: str) -> tuple[PeerId, ...]:
    """The members by a hash with `key`: the same everywhere, another one for another key."""
    return tuple(sorted(members, key=lambda peer: (_digest(key, peer), peer)))


def _digest(key: str, peer: PeerId) -> bytes:
    return hashlib.blake2b(f"{key}/{peer}".encode(), digest_size=8).digest()
