import random
from collections import Counter
from collections.abc import Iterable
from math import inf

import pytest
from protocol_builders import RUN

from p2pdiloco.protocol.election import SHARE_MEMBERS, Drawing, Turn, score, slot_of, term_of
from p2pdiloco.protocol.naming import PeerId

PEERS = [PeerId(f"peer{i}") for i in range(10)]
EQUAL = [(peer, 1.0) for peer in PEERS]
TERMS = range(1000)


def order(
    run_id: str, term: int, members: Iterable[tuple[PeerId, float]], attempt: int = 0, slot: int = 0
) -> tuple[PeerId, ...]:
    return tuple(Drawing(run_id, Turn(term, attempt, slot), dict(members)).in_order())


def test_a_term_is_a_lease_of_some_merges() -> None:
    assert [term_of(version, 4) for version in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_everybody_reaches_the_same_order() -> None:
    assert order(RUN, 3, EQUAL) == order(RUN, 3, reversed(EQUAL))


def test_every_hash_can_be_drawn() -> None:
    """Names are made up by peers, who may look for the hash that nobody can compute with."""
    lowest, highest = score(bytes(8), 1.0), score(b"\xff" * 8, 1.0)
    assert -inf < highest < lowest < 0.0


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


def test_a_drawing_that_was_kept_up_to_date_is_the_one_made_anew() -> None:
    rng, members = random.Random(0), dict(EQUAL)
    kept = Drawing(RUN, Turn(0, 0, 0), members)
    for peer in [*PEERS, *rng.choices(PEERS, k=200)]:
        uplink = None if members.get(peer) else rng.choice((1.0, 4.0))
        members.pop(peer, None)
        if uplink is not None:
            members[peer] = uplink
        kept.changed(peer)
        assert kept.first == next(iter(kept.in_order()), None)


def test_attempts_and_slots_are_drawn_anew() -> None:
    firsts = {order(RUN, 0, EQUAL, attempt, slot)[0] for attempt in range(10) for slot in range(10)}
    assert firsts == set(PEERS)


def test_two_who_know_each_other_never_take_one_attempt_for_theirs() -> None:
    rng = random.Random(0)
    for attempt in range(200):
        one, other, *rest = rng.sample(EQUAL, len(EQUAL))
        views = [[one, other, *rng.sample(rest, rng.randint(0, len(rest)))] for _ in range(2)]
        firsts = [order(RUN, 0, view, attempt)[0] for view in views]
        assert firsts != [one[0], other[0]]


def test_fragments_are_shared_out_in_a_large_swarm_only() -> None:
    assert {slot_of(fragment, SHARE_MEMBERS - 1) for fragment in range(5)} == {0}
    assert [slot_of(fragment, 3 * SHARE_MEMBERS) for fragment in range(5)] == [0, 1, 2, 3, 0]
