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
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from p2pdiloco.protocol.naming import PeerId

SHARE_MEMBERS = 8
"""One more synchronizer works beside the others for every so many members, so that no home uplink
carries a large swarm.
"""

SCORES_KEPT = 2**15
"""Eight terms of a view as full as can be: who comes or goes costs one new score, not all."""
BELOW_ONE = 1.0 - 2.0**-53
"""The largest float of a share; a hash near 2**64 would be rounded to one, which has no score."""


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


class Drawing:
    """Who drew best in a turn. Deterministic in the set of `members`, an uplink in MB/s by peer,
    which the caller keeps up to date and tells of with `changed`.

    In a large swarm somebody always comes or goes; to draw for everybody anew would be most of a
    node's work, and only the best of all matters.
    """

    def __init__(self, run_id: str, turn: Turn, members: Mapping[PeerId, float]):
        self._run_id, self._turn, self._members = run_id, turn, members
        self._best = self._draw()

    @property
    def first(self) -> PeerId | None:
        """Who is to act; None where there are no members."""
        return self._best[1] if self._best else None

    def in_order(self) -> list[PeerId]:
        """All of them, best first."""
        return [peer for _, peer in sorted(map(self._key, self._members))]

    def changed(self, peer: PeerId) -> None:
        """It is a member since, or none any more, or has another uplink."""
        if self._best is None or peer == self._best[1]:
            self._best = self._draw()
        elif peer in self._members:
            self._best = min(self._best, self._key(peer))

    def _draw(self) -> tuple[float, PeerId] | None:
        return min(map(self._key, self._members), default=None)

    def _key(self, peer: PeerId) -> tuple[float, PeerId]:
        return _key(self._run_id, self._turn, peer, weight(self._members[peer]))


def weight(uplink_mb_s: float) -> float:
    if uplink_mb_s <= 0:
        return 1.0
    return float(2.0 ** round(math.log2(min(max(uplink_mb_s, 2**-4), 2**4))))


@lru_cache(maxsize=SCORES_KEPT)
def _key(run_id: str, turn: Turn, peer: PeerId, weight: float) -> tuple[float, PeerId]:
    """The smaller, the better."""
    drawn = f"{run_id}/{turn.term}/{turn.attempt}/{turn.slot}/{peer}"
    return score(hashlib.blake2b(drawn.encode(), digest_size=8).digest(), weight), peer


def score(digest: bytes, weight: float) -> float:
    """Of 8 bytes that are uniformly distributed; below zero."""
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2.0**64
    return weight / math.log(min(uniform, BELOW_ONE))
