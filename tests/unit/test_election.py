import random
from collections import Counter
from collections.abc import Iterable

import pytest
from protocol_builders import RUN

from p2pdiloco.protocol.election import (
    SHARE_MEMBERS,
    Order,
    candidate,
    first_attempt,
    term_of,
)
from p2pdiloco.protocol.naming import PeerId

PEERS = [PeerId(f"peer{i}") for i in range(10)]
EQUAL = [(peer, 1.0) for peer in PEERS]
TERMS = range(1000)


def order(run_id: str, term: int, members: Iterable[tuple[PeerId, float]]) -> tuple[PeerId, ...]:
    return tuple(Order(run_id, term, members).peers)


def test_a_term_is_a_lease_of_some_merges() -> None:
    assert [term_of(version, 4) for version in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_everybody_reaches_the_same_order() -> None:
    assert order(RUN, 3, EQUAL) == order(RUN, 3, reversed(EQUAL))


def test_terms_and_runs_shuffle_anew() -> None:
    orders = {order(RUN, term, EQUAL) for term in range(5)} | {order("other", 0, EQUAL)}
    assert len(orders) == 6


def test_a_place_at_the_top_falls_to_each_in_proportion_to_its_uplink() -> None:
    members = [(PEERS[0], 4.0), (PEERS[1], 2.0), (PEERS[2], 1.0), (PEERS[3], 1.0)]
    first = Counter(order(RUN, term, members)[0] for term in TERMS)
    assert [first[p] / len(TERMS) for p in PEERS[:4]] == pytest.approx(
        [0.5, 0.25, 0.125, 0.125], abs=0.04
    )


def test_noise_of_the_measured_uplink_does_not_reshuffle() -> None:
    noisy = [(peer, 1.0 + i / 40) for i, peer in enumerate(PEERS)]
    assert order(RUN, 0, noisy) == order(RUN, 0, EQUAL)


def test_nobody_wins_by_boasting_or_loses_for_want_of_a_measurement() -> None:
    boasting = [(PEERS[0], 1e9), *EQUAL[1:]]
    first = Counter(order(RUN, term, boasting)[0] for term in TERMS)
    assert first[PEERS[0]] / len(TERMS) == pytest.approx(16 / 25, abs=0.05)
    assert order(RUN, 0, [(p, 0.0) for p in PEERS]) == order(RUN, 0, EQUAL)


def test_one_that_leaves_moves_nobody_else() -> None:
    for term in range(20):
        before = order(RUN, term, EQUAL)
        after = order(RUN, term, [m for m in EQUAL if m[0] != PEERS[4]])
        assert after == tuple(p for p in before if p != PEERS[4])


def test_an_order_that_was_kept_up_to_date_is_the_one_made_anew() -> None:
    rng, kept, members = random.Random(0), Order(RUN, 0, EQUAL), dict(EQUAL)
    for _ in range(100):
        peer, uplink = rng.choice(PEERS), rng.choice((None, 0.0, 1.0, 4.0))
        kept.put(peer, uplink)
        members.pop(peer, None)
        if uplink is not None:
            members[peer] = uplink
        assert tuple(kept.peers) == order(RUN, 0, members.items())


def test_each_attempt_is_the_next_candidates() -> None:
    small = PEERS[: SHARE_MEMBERS - 1]
    assert [candidate(small, 3, attempt) for attempt in (0, 1, 7)] == [small[0], small[1], small[0]]


def test_fragments_are_shared_out_in_a_large_swarm() -> None:
    large = [PeerId(str(i)) for i in range(3 * SHARE_MEMBERS)]
    assert [candidate(large, fragment, 0) for fragment in range(5)] == ["0", "1", "2", "3", "0"]


def test_the_dead_are_passed_over() -> None:
    alive = {PEERS[2], PEERS[3]}.__contains__
    assert first_attempt(PEERS[:4], 0, 0, alive) == 2
    assert first_attempt(PEERS[:4], 0, 3, alive) == 3
    assert first_attempt(PEERS[:4], 0, 4, alive) == 6


def test_with_nobody_alive_the_attempt_stays() -> None:
    assert first_attempt(PEERS, 0, 5, lambda _: False) == 5
