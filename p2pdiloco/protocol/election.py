"""Who synchronizes: a weighted rendezvous hash for each attempt at a term.

A term is a lease of `term_merges` versions of a fragment, so it follows from the fragment's version
and needs no agreement. Whose turn an attempt is, is the same on every node with the same view.
Since each attempt is drawn anew over all members, views that differ in one (one node has not heard
of it yet, or still lists the dead) differ only in the attempts that this one wins: two members who
know each other never take one attempt for theirs. Nodes with different views follow different
synchronizers only until gossip converges, and fencing and lineage make that harmless (DESIGN 4).
Weighted rendezvous hashing: Schindelhauer and Schomaker 2005, the logarithmic method; weights are
powers of two of the uplink, so that measuring noise does not reshuffle.
"""

import hashlib
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from p2pdiloco.protocol.naming import PeerId

SHARE_MEMBERS = 8
"""One more synchronizer works beside the others for every so many members, so that no home uplink
carries a large swarm.
"""

SCORES_KEPT = 2**15
"""Eight terms of a view as full as can be: who comes or goes costs one new score, not all."""


def term_of(version: int, term_merges: int) -> int:
    """The term under which `version` is made."""
    return (version - 1) // term_merges


class Turn(NamedTuple):
    """What is drawn for: an attempt at a term. `slot` tells apart those of a large swarm who
    synchronize side by side.
    """

    term: int
    attempt: int
    slot: int


def slot_of(fragment: int, num_candidates: int) -> int:
    """Fragments are shared out over as many synchronizers as the swarm has room for."""
    return fragment % (1 + num_candidates // SHARE_MEMBERS)


class Order:
    """The candidates of a turn: `first` is to act. Deterministic in the set of `members`, which are
    (peer, uplink in MB/s).

    It is kept up to date as they come and go: in a large swarm somebody always does, and to draw
    for everybody anew would be most of a node's work.
    """

    def __init__(self, run_id: str, turn: Turn, members: Iterable[tuple[PeerId, float]]):
        self.run_id = run_id
        self.turn = turn
        self._ranked = sorted(self._key(peer, uplink) for peer, uplink in members)

    @property
    def first(self) -> PeerId | None:
        return self._ranked[0][1] if self._ranked else None

    @property
    def peers(self) -> Iterator[PeerId]:
        """Best first."""
        return (peer for _, peer in self._ranked)

    def put(self, peer: PeerId, before: float | None, now: float | None) -> None:
        """Its uplink is another `now` than `before`; None while it is no candidate."""
        if before is not None:
            del self._ranked[bisect_left(self._ranked, self._key(peer, before))]
        if now is not None:
            insort(self._ranked, self._key(peer, now))

    def _key(self, peer: PeerId, uplink_mb_s: float) -> tuple[float, PeerId]:
        return _key(self.run_id, self.turn, peer, weight(uplink_mb_s))


def weight(uplink_mb_s: float) -> float:
    if uplink_mb_s <= 0:
        return 1.0
    return float(2.0 ** round(math.log2(min(max(uplink_mb_s, 2**-4), 2**4))))


@lru_cache(maxsize=SCORES_KEPT)
def _key(run_id: str, turn: Turn, peer: PeerId, weight: float) -> tuple[float, PeerId]:
    """The smaller, the better."""
    drawn = f"{run_id}/{turn.term}/{turn.attempt}/{turn.slot}/{peer}"
    digest = hashlib.blake2b(drawn.encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2.0**64
    return weight / math.log(uniform), peer
