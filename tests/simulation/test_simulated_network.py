"""Links, cuts, home routers and clocks, each looked at alone."""

import random

import pytest

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.simulation.machine import Clock
from p2pdiloco.simulation.network import HOME_LINKS, MBIT, Link, Network, Quality

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
QUIET = Quality(delay_s=1e-9)
SECOND = int(8 * MBIT)
"""Bytes that take a second at 8 Mbit/s."""


def network(*links: Link) -> Network:
    made = Network(random.Random(1), QUIET)
    for name, link in zip((A, B, C), links, strict=False):
        made.attach(name, link)
    return made


SLOW_UP = Link(up_mbit_s=8.0, latency_s=0.0)
FAST = Link(latency_s=0.0)


def test_who_is_asked_by_two_serves_one_after_the_other() -> None:
    net = network(SLOW_UP, FAST, FAST)
    assert net.carry(A, B, SECOND, now=10.0) == pytest.approx(11.0, abs=1e-2)
    assert net.carry(A, C, SECOND, now=10.0) == pytest.approx(12.0, abs=1e-2)
    assert net.served_bytes[A] == 2 * SECOND


def test_who_asks_two_receives_at_the_width_of_its_downlink() -> None:
    net = network(FAST, FAST, Link(down_mbit_s=8.0, latency_s=0.0))
    assert net.carry(A, C, SECOND, now=0.0) == pytest.approx(1.0, abs=1e-2)
    assert net.carry(B, C, SECOND, now=0.0) == pytest.approx(2.0, abs=1e-2)


def test_an_idle_link_owes_nothing() -> None:
    net = network(SLOW_UP, FAST)
    net.carry(A, B, SECOND, now=0.0)
    assert net.carry(A, B, SECOND, now=100.0) == pytest.approx(101.0, abs=1e-2)


def test_a_one_way_cut_lets_the_other_way_through() -> None:
    net = network(FAST, FAST)
    net.block(A, B)
    assert not net.carries(A, B) and net.carries(B, A)
    assert not net.connected(A, B) and not net.connected(B, A), "no answer comes back"
    assert not net.arrivals(A, B) and net.arrivals(B, A)
    net.unblock(A, B)
    assert net.connected(A, B)


def test_two_behind_home_routers_meet_at_the_relay_while_it_lives() -> None:
    net = network(Link(nat=True), Link(nat=True), FAST)
    assert net.connected(A, B)
    net.relay_is_up = False
    assert not net.connected(A, B)
    assert net.connected(A, C) and net.connected(B, C), "C can be dialled"


def test_home_links_are_what_they_say() -> None:
    links = [HOME_LINKS.draw(random.Random(seed)) for seed in range(200)]
    assert all(10 <= link.up_mbit_s <= 40 and 50 <= link.down_mbit_s <= 100 for link in links)
    assert all(0.01 <= link.latency_s <= 0.06 for link in links)
    assert 60 < sum(link.nat for link in links) < 140


def test_a_clock_drifts_and_jumps_and_never_goes_back() -> None:
    clock = Clock(rate=1.03, offset=5.0)
    shown = clock.shows(10.0)
    clock.go_at(0.97, now=10.0)
    assert clock.shows(10.0) == pytest.approx(shown)
    clock.jump(100.0)
    assert clock.shows(10.0) == pytest.approx(shown + 100.0)
    assert clock.when(clock.shows(42.0)) == pytest.approx(42.0)
