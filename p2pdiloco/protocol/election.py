"""Who synchronizes: a weighted rendezvous order per term, and which of its candidates acts.

A term is a lease of `term_merges` versions of a fragment, so it follows from the fragment's version
and needs no agreement. The order of a term is the same on every node with the same view; nodes with
different views reach different orders only until gossip converges, and fencing and lineage make
that harmless (DESIGN 4). Weighted rendezvous hashing: Schindelhauer and Schomaker 2005, the
logarithmic method; weights are powers of two of the uplink, so that measuring noise does not
reshuffle.
"""

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

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


class Order:
    """The candidates of a term, best first, as `peers`; deterministic in the set of `members`,
    which are (peer, uplink in MB/s).

    It is kept up to date as they come and go: in a large swarm somebody always does, and to sort
    everybody anew for it would be most of a node's work.
    """

    def __init__(self, run_id: str, term: int, members: Iterable[tuple[PeerId, float]]):
        self.run_id = run_id
        self.term = term
        self._keys = {peer: _key(run_id, term, peer, weight(uplink)) for peer, uplink in members}
        self._ranked = sorted(self._keys.values())
        self.peers = [peer for _, peer in self._ranked]

    def put(self, peer: PeerId, uplink_mb_s: float | None) -> None:
        """It is a candidate with this uplink now; with None it is none."""
        if kept := self._keys.pop(peer, None):
            place = bisect_left(self._ranked, kept)
            del self._ranked[place], self.peers[place]
        if uplink_mb_s is not None:
            key = self._keys[peer] = _key(self.run_id, self.term, peer, weight(uplink_mb_s))
            place = bisect_left(self._ranked, key)
            self._ranked.insert(place, key)
            self.peers.insert(place, peer)


def weight(uplink_mb_s: float) -> float:
    if uplink_mb_s <= 0:
        return 1.0
    return float(2.0 ** round(math.log2(min(max(uplink_mb_s, 2**-4), 2**4))))


@lru_cache(maxsize=SCORES_KEPT)
def _key(run_id: str, term: int, peer: PeerId, weight: float) -> tuple[float, PeerId]:
    """The smaller, the better."""
    digest = hashlib.blake2b(f"{run_id}/{term}/{peer}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2.0**64
    return weight / math.log(uniform), peer


def candidate(candidates: Sequence[PeerId], fragment: int, attempt: int) -> PeerId:
    """Fragments are shared out over the first candidates; attempt k moves on by k places."""
    share = 1 + len(candidates) // SHARE_MEMBERS
    return candidates[(fragment % share + attempt) % len(candidates)]


def first_attempt(
    candidates: Sequence[PeerId], fragment: int, at_least: int, alive: Callable[[PeerId], bool]
) -> int:
    """The first attempt from `at_least` on whose candidate is alive; `at_least` if none is."""
    for attempt in range(at_least, at_least + len(candidates)):
        if alive(candidate(candidates, fragment, attempt)):
            return attempt
    return at_least
