"""The exchanges of one mix: with each partner a vector is swapped, and both know that it was.

An exchange counts only if both ends have the other's vector; else both keep the identity in its
place, so that the mixing matrix stays symmetric and doubly stochastic (`topology.py`). Each end
tells the other how far it got, again and again until both say that the link is whole:

    open --> half (we have theirs) --> whole (and they have ours)          void: does not count

The last word can be lost, as always; then one end waits, asks, and is told what the other did.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from p2pdiloco.protocol.naming import MixId, PeerId
from p2pdiloco.protocol.topology import Row
from p2pdiloco.protocol.wire import Link, LinkStage


@dataclass(slots=True)
class _End:
    """What is known of one partner. `weight` is the smaller of both ends'."""

    weight: float
    offered: bool = False
    asked: bool = False
    have: bool = False
    has_ours: bool = False
    failure: str | None = None

    @property
    def stage(self) -> LinkStage:
        if self.failure:
            return "void"
        if not self.have:
            return "open"
        return "whole" if self.has_ours else "half"


class Links:
    """Of this node with the partners of `row`, since the time `begun`."""

    def __init__(self, mix: MixId, row: Row, begun: float):
        self.mix = mix
        self.begun = begun
        self.arrived = begun
        """When the last vector came in."""
        self._ends = {peer: _End(weight) for peer, weight in row.partners.items()}

    @property
    def partners(self) -> tuple[PeerId, ...]:
        return tuple(self._ends)

    def link(self, peer: PeerId) -> Link:
        """What to tell the partner."""
        end, mix = self._ends[peer], self.mix
        return Link(mix.fragment, mix.round, mix.part, end.stage, end.weight)

    def heard(self, peer: PeerId, link: Link) -> bool:
        """Takes in what a partner says; returns whether it needs an answer."""
        end = self._ends[peer]
        is_first, end.offered = not end.offered, True
        end.weight = min(end.weight, link.weight)
        if link.stage == "void":
            end.failure = end.failure or "it does not count the exchange"
            return False
        end.has_ours |= link.stage != "open"
        return is_first or (link.stage != "whole" and end.stage in ("whole", "void"))

    def wants(self, peer: PeerId) -> bool:
        """Whether to fetch the partner's vector now."""
        end = self._ends[peer]
        return end.offered and not (end.asked or end.have or end.failure)

    def ask(self, peer: PeerId) -> None:
        self._ends[peer].asked = True

    def fetched(self, peer: PeerId, now: float) -> None:
        end = self._ends[peer]
        end.asked, end.have, self.arrived = False, True, now

    def failed(self, peer: PeerId, reason: str, for_good: bool) -> None:
        """It is asked again when it next says that its vector lies ready, unless `for_good`."""
        end = self._ends[peer]
        end.asked = False
        if for_good:
            end.failure = reason

    def give_up(self, peer: PeerId, reason: str) -> None:
        end = self._ends[peer]
        end.failure = end.failure or reason

    def has_offered(self, peer: PeerId) -> bool:
        return self._ends[peer].offered

    def has(self, peer: PeerId) -> bool:
        return self._ends[peer].have

    def is_arriving(self, peer: PeerId) -> bool:
        return self._ends[peer].asked

    def waiting_for(self) -> Sequence[PeerId]:
        """Partners with whom it is not settled whether the exchange counts."""
        return [peer for peer, end in self._ends.items() if end.stage in ("open", "half")]

    def whole(self) -> Row:
        """The row of what counts."""
        counted = {p: end.weight for p, end in self._ends.items() if end.stage == "whole"}
        return Row(1.0 - sum(counted.values()), counted)

    def failures(self) -> dict[PeerId, str]:
        return {peer: end.failure for peer, end in self._ends.items() if end.failure}
