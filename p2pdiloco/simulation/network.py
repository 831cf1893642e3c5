"""The network between the machines: messages are delayed, lost, doubled and reordered; links are
cut.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """`delay_s` is the mean of what comes on top of `DELAY_MIN_S`, exponential, so that messages
    overtake each other; `loss` and `duplicate` are probabilities per message.
    """

    delay_s: float = 0.02
    loss: float = 0.0
    duplicate: float = 0.0


DELAY_MIN_S = 0.01
HOME = Quality(loss=0.002, duplicate=0.001)
"""An ordinary day between homes."""


class Network:
    """Knows which machines reach each other, and when a message sent now arrives."""

    def __init__(self, rng: random.Random, quality: Quality):
        self.rng = rng
        self.quality = quality
        self.usual = quality
        self._side: dict[str, int] = {}
        self._cut: dict[tuple[str, str], int] = {}

    def connected(self, one: str, other: str) -> bool:
        same_side = self._side.get(one, 0) == self._side.get(other, 0)
        return one == other or (same_side and not self._cut.get(_link(one, other)))

    def arrivals(self, sender: str, receiver: str) -> list[float]:
        """Seconds until each copy of a message arrives: none when it is lost."""
        rng, quality = self.rng, self.quality
        if not self.connected(sender, receiver) or rng.random() < quality.loss:
            return []
        copies = 2 if rng.random() < quality.duplicate else 1
        return [DELAY_MIN_S + rng.expovariate(1 / quality.delay_s) for _ in range(copies)]

    def round_trip_s(self) -> float:
        """Of a request over a reliable stream; what is lost there is sent again below us."""
        return 2 * (DELAY_MIN_S + self.rng.expovariate(1 / self.quality.delay_s))

    def split(self, sides: Sequence[Iterable[str]]) -> None:
        """Partitions the network; who is on no side stays on the first."""
        self._side = {name: index for index, side in enumerate(sides) for name in side}

    def heal(self) -> None:
        self._side = {}

    def cut(self, one: str, other: str) -> None:
        link = _link(one, other)
        self._cut[link] = self._cut.get(link, 0) + 1

    def mend(self, one: str, other: str) -> None:
        self._cut[_link(one, other)] -= 1


def _link(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)
