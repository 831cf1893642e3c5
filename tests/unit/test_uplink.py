import random
from math import inf

import pytest

from p2pdiloco.protocol.uplink import (
    DELAY_S,
    HEADROOM,
    MEASURED_S,
    PEERS_MAX,
    RATE_MIN,
    WRITE_S,
    Uplink,
)

CHUNK = 1 << 18
MB = 1e6


class Link:
    """Carries `rate` bytes per second in order; a second's worth fits into its buffers. Bodies are
    always waiting, or come at `demand`; a message goes to either of two peers every half second.
    """

    def __init__(self, rate: float, hiccup_s: float = 0.0) -> None:
        self.rate, self.hiccup_s = rate, hiccup_s
        self.uplink = Uplink()
        self.rng = random.Random(1)
        self.now = self.free_at = self.sent = 0.0
        self.delays: list[float] = []
        self.under_way: list[tuple[float, float, str]] = []
        for _ in range(8):
            self._message()

    def run(self, seconds: float, demand: float = inf) -> None:
        end, write_at = self.now + seconds, self.now
        while self.now < end:
            while write_at < self.now + 0.5:
                self._answer_until(write_at)
                size = self.uplink.write_bytes(CHUNK)
                leaves = max(write_at + self.uplink.wait_s(size, write_at), self.free_at - 1.0)
                self._carry(size, leaves)
                write_at = max(leaves, write_at + size / demand)
            self._message()

    def _carry(self, size: float, at: float) -> float:
        self.free_at = max(self.free_at, at) + size / self.rate
        self.sent += size
        return self.free_at

    def _message(self) -> None:
        self.now += 0.5
        queued_s = self._carry(500, self.now) - self.now
        late_s = self.hiccup_s if self.rng.random() < 0.1 else 0.0
        self.delays.append(queued_s)
        took_s = 0.05 + queued_s + late_s
        self.under_way.append((self.now + took_s, took_s, f"peer{len(self.delays) % 2}"))
        self._answer_until(self.now)

    def _answer_until(self, now: float) -> None:
        for at, took_s, peer in sorted(self.under_way):
            if at <= now:
                self.uplink.round_trip(peer, took_s, at)
        self.under_way = [message for message in self.under_way if message[0] > now]


def test_an_uplink_that_was_never_full_is_not_limited() -> None:
    uplink = Uplink()
    assert uplink.write_bytes(CHUNK) == CHUNK
    assert uplink.wait_s(CHUNK, 0.0) == 0.0


@pytest.mark.parametrize("rate", [0.1 * MB, 1 * MB, 10 * MB])
def test_the_bucket_finds_what_the_link_carries_and_stays_below(rate: float) -> None:
    link = Link(rate)
    link.run(60)
    link.delays.clear()
    before = link.sent
    link.run(240)
    used = (link.sent - before) / 240 / rate
    late = sum(delay > 2 * DELAY_S for delay in link.delays) / len(link.delays)
    assert used > 0.7
    assert late < 0.15


def test_without_the_bucket_messages_wait_behind_bodies() -> None:
    link = Link(1 * MB)
    link.uplink._adapt = lambda now: None  # type: ignore[method-assign]
    link.run(60)
    assert min(link.delays[20:]) > 0.9


def test_a_machine_with_hiccups_is_not_mistaken_for_a_full_link() -> None:
    link = Link(10 * MB, hiccup_s=0.5)
    link.run(120, demand=1 * MB)
    assert link.uplink.rate is None


def test_the_bucket_opens_again_when_the_link_carries_more() -> None:
    link = Link(0.2 * MB)
    link.run(60)
    link.rate = 2 * MB
    link.run(120)
    assert link.uplink.rate is not None
    assert link.uplink.rate > MB


def test_the_bucket_closes_when_the_link_carries_less() -> None:
    link = Link(2 * MB)
    link.run(60)
    link.rate = 0.2 * MB
    link.run(60)
    assert link.uplink.rate is not None
    assert link.uplink.rate < 0.25 * MB


def full(uplink: Uplink, sent: int) -> None:
    """Three seconds in which so much left, and messages began to wait."""
    uplink.round_trip("bert", 0.05, 0.0)
    uplink.wait_s(sent, 4.0)
    for now in (4.5, 5.0, 5.5):
        uplink.round_trip("bert", 1.0, now)


def test_the_first_rate_is_what_left_less_headroom() -> None:
    uplink = Uplink()
    full(uplink, 3_000_000)
    assert uplink.carried == 1 * MB
    assert uplink.rate == HEADROOM * MB


def test_the_rate_has_a_least() -> None:
    uplink = Uplink()
    full(uplink, int(3.1 * RATE_MIN))
    assert uplink.rate == RATE_MIN
    assert uplink.write_bytes(CHUNK) == int(RATE_MIN * WRITE_S)


def test_writes_become_small_enough_to_be_interrupted() -> None:
    uplink = Uplink(rate=1 * MB)
    assert uplink.write_bytes(CHUNK) == WRITE_S * MB
    assert uplink.write_bytes(100) == 100


def test_bodies_share_the_bucket_in_turn() -> None:
    uplink = Uplink(rate=1 * MB)
    waits = [uplink.wait_s(100_000, 1.0) for _ in range(5)]
    assert waits == pytest.approx([0.0, 0.0, 0.05, 0.15, 0.25])


def test_what_left_long_ago_is_forgotten_though_nobody_asks() -> None:
    uplink = Uplink()
    for second in range(100):
        uplink.wait_s(1000, float(second))
    assert len(uplink._sent) <= MEASURED_S + 1


def test_only_so_many_peers_are_remembered() -> None:
    uplink = Uplink()
    for number in range(2 * PEERS_MAX):
        uplink.round_trip(f"peer{number}", 0.05, number * 0.01)
    assert len(uplink._best) == PEERS_MAX


def test_one_delayed_message_says_nothing() -> None:
    uplink = Uplink()
    uplink.round_trip("bert", 0.05, 0.0)
    uplink.wait_s(3_000_000, 3.9)
    uplink.round_trip("bert", 1.0, 4.0)
    assert uplink.delay_s(4.0) == 0.0
    assert uplink.rate is None
