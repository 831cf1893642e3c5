"""How fast bodies may leave this machine, so that messages are never stuck behind them.

A token bucket. Nobody tells a program what its uplink carries, so the rate follows from what the
node's own messages suffer: as long as their round trips stay within `DELAY_S` of the best, nothing
queues anywhere and the bucket opens wider and wider; once they do not, the link is full, so what
left during the last seconds is what it carries, and the bucket is set below that. So does LEDBAT
(RFC 6817), by one-way delays; a round trip will do here, since bodies are what fills this link.

Not here: clocks and sockets. `bootstrap` waits as long as `wait_s` says before it writes.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

DELAY_S = 0.15
"""More than a busy machine's own hiccups, far less than the three seconds after which a silent node
counts as dead."""
HEADROOM = 0.75
"""Of what the link was seen to carry: the rest is for messages, and for what queues already."""
GROWTH_MIN, GROWTH_MAX, GROWTH_S = 0.005, 0.05, 30.0
"""By this part the rate grows in a second in which the bucket held something back and nothing
queued: slowly at first, since the link was full at little more, and quickly after so long.
"""
RATE_MIN = 16 * 1024.0
"""Bytes per second; slower than this a peer would give up (`exchange.BYTES_PER_S_MIN`)."""
BURST_S = 0.25
"""The bucket holds what leaves in so much time."""
WRITE_S = 0.1
"""And one write takes no more than this: a hundred bodies at once still get a byte each within the
ten seconds in which a receiver wants one.
"""
MEASURED_S = 3.0
"""What left in the last seconds is what the link carries when it is full; a new rate is given as
long to show what it does.
"""
TRIPS = 3
"""The newest round trips; one delayed message may be the other side's hiccup."""
TRIPS_KEPT_S = 5.0
"""Older ones say nothing of the link as it is now."""
BEST_KEPT_S = 300.0
"""The best round trip to a peer is looked for among those of five minutes: routes change."""
BEST_MAX_S = 0.5
"""And what takes longer than this is no best one: the link was full from the start."""
PEERS_MAX = 256


@dataclass(slots=True)
class _Best:
    """The shortest round trip to a peer, and when it was seen."""

    took_s: float
    at: float


@dataclass
class Uplink:
    """`rate` in bytes per second; None as long as the link was never full."""

    rate: float | None = None
    carried: float | None = None
    """What left per second when the link was last full."""
    _tokens: float = 0.0
    _filled_at: float = 0.0
    _held_back: bool = False
    _looked_at: float = -inf
    _lowered_at: float = -inf
    _sent: deque[tuple[float, int]] = field(default_factory=deque)
    _best: dict[str, _Best] = field(default_factory=dict)
    """By peer; who was heard of last comes last."""
    _delays: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=TRIPS))
    """When a message was answered, and how much later than the best one to that peer."""

    # ---------------------------------------------------------------- bodies

    def write_bytes(self, most: int) -> int:
        """How much to write at once."""
        if self.rate is None:
            return most
        return min(most, int(self.rate * WRITE_S))

    def wait_s(self, num_bytes: int, now: float) -> float:
        """Takes so many bytes out of the bucket; they may leave after as many seconds."""
        self._sent.append((now, num_bytes))
        self._forget(now)
        if self.rate is None:
            return 0.0
        grown = self._tokens + self.rate * (now - self._filled_at)
        self._tokens = min(grown, self.rate * BURST_S) - num_bytes
        self._filled_at = now
        if self._tokens >= 0:
            return 0.0
        self._held_back = True
        return -self._tokens / self.rate

    # ---------------------------------------------------------------- messages

    def round_trip(self, peer: str, took_s: float, now: float) -> None:
        """A message to `peer` was answered, or given up after so long."""
        best = self._best.pop(peer, None)
        if best is None or took_s <= best.took_s or now > best.at + BEST_KEPT_S:
            best = _Best(min(took_s, BEST_MAX_S), now)
        self._best[peer] = best
        if len(self._best) > PEERS_MAX:
            del self._best[next(iter(self._best))]
        self._delays.append((now, took_s - best.took_s))
        if now >= self._looked_at + 1.0:
            self._adapt(now)
            self._looked_at = now

    def delay_s(self, now: float) -> float:
        """What the link adds to a round trip: the least that any of the newest shows, since a peer
        may be slow by itself.
        """
        delays = [delay_s for at, delay_s in self._delays if at > now - TRIPS_KEPT_S]
        return min(delays) if len(delays) == TRIPS else 0.0

    def sent_per_s(self, now: float) -> float:
        """Bytes of bodies that left lately."""
        self._forget(now)
        return sum(num for _, num in self._sent) / MEASURED_S

    def _forget(self, now: float) -> None:
        while self._sent and self._sent[0][0] < now - MEASURED_S:
            self._sent.popleft()

    def _adapt(self, now: float) -> None:
        delayed = self.delay_s(now) > DELAY_S
        sent = self.sent_per_s(now)
        if delayed and sent > RATE_MIN and now >= self._lowered_at + MEASURED_S:
            self.carried = sent if self.rate is None else min(sent, self.rate)
            self.rate = max(RATE_MIN, HEADROOM * self.carried)
            self._tokens, self._filled_at, self._lowered_at = 0.0, now, now
        elif self.rate is not None and self._held_back and not delayed:
            share = min(1.0, (now - self._lowered_at) / GROWTH_S)
            self.rate *= 1.0 + GROWTH_MIN + share * (GROWTH_MAX - GROWTH_MIN)
        self._held_back = False
