"""How many trajectories a replica keeps going at once: additive increase, multiplicative decrease.

A trajectory whose environment acts needs its keys and values again soon. With too many of them they
push each other's out, every turn computes its history anew, and a replica does prefill and little
else. The window counts trajectories from their turn's placement to the next turn's, environment
included (CONCUR, arXiv 2601.22705, counts agents the same way), and follows its rule:

    W + INCREASE    while the cache is used below USE_LOW
    W * DECREASE    if it is used above USE_HIGH and the hit rate is below HIT_LOW
    W               otherwise

looked at after every `CYCLE` finished turns (WAR's delta). WAR (arXiv 2607.17299) prints the rule
with the sign of the hit rate turned round, without a reason; this is CONCUR's direction. Use is
that of the trajectories in the window: what an engine keeps of others it gives up at need. The
constants are a first guess of ours, not tuned; CONCUR's are 0.2, 0.5 and 0.2, increase 2,
decrease 0.5.
"""

from dataclasses import dataclass

USE_LOW = 0.75
USE_HIGH = 0.75
HIT_LOW = 0.8
INCREASE = 2.0
DECREASE = 0.8
CYCLE = 8
"""Turns over which the hit rate is averaged."""


@dataclass(slots=True)
class Window:
    """`size` is at least one."""

    size: float
    _hits: float = 0.0
    _turns: int = 0

    def observe(self, hit: float, use: float) -> None:
        """A turn has finished: `hit` is the reused share of what could have been reused, `use` the
        share of the cache that the window's trajectories need."""
        self._hits += hit
        self._turns += 1
        if self._turns < CYCLE:
            return
        hit_rate = self._hits / self._turns
        self._hits, self._turns = 0.0, 0
        if use < USE_LOW:
            self.size += INCREASE
        elif use > USE_HIGH and hit_rate < HIT_LOW:
            self.size = max(1.0, self.size * DECREASE)

    def bound(self, num_wanted: int) -> None:
        """WAR's clamp: a window that nobody fills does not grow."""
        self.size = max(1.0, min(self.size, num_wanted))
