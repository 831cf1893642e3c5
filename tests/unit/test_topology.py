"""Mixing matrices: doubly stochastic whatever happens, and as contracting as theory says."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.topology import (
    ALONE,
    PAIRS,
    Groups,
    Row,
    Topology,
    everybody,
    exponential,
    hypercube,
    ring,
    sweep_rounds,
)

Matrix = npt.NDArray[np.float64]

TOPOLOGIES: dict[str, Topology] = {
    "everybody": everybody,
    "pairs": PAIRS,
    "groups": Groups(4),
    "hypercube": hypercube,
    "exponential": exponential,
    "ring": ring,
}
SIZES = [1, 2, 3, 5, 8, 13, 16, 31]
ROUNDS = 50

any_topology = st.sampled_from(sorted(TOPOLOGIES))


def peers(count: int) -> list[PeerId]:
    return [PeerId(f"peer{i}") for i in range(count)]


def rows(topology: Topology, members: Sequence[PeerId], number: int) -> dict[PeerId, Row]:
    return {me: topology(me, members, number, "seed") for me in members}


def matrix(members: Sequence[PeerId], mixing: dict[PeerId, Row]) -> Matrix:
    place = {peer: i for i, peer in enumerate(members)}
    result = np.zeros((len(members), len(members)))
    for me, row in mixing.items():
        result[place[me], place[me]] = row.own
        for partner, weight in row.partners.items():
            result[place[me], place[partner]] = weight
    return result


def at(topology: Topology, count: int, number: int) -> Matrix:
    return matrix(peers(count), rows(topology, peers(count), number))


def sweep(topology: Topology, count: int) -> Matrix:
    mixed = np.eye(count)
    for number in range(sweep_rounds(count)):
        mixed = at(topology, count, number) @ mixed
    return mixed


def contraction(w: Matrix) -> float:
    """Largest factor by which W leaves a sum of squared distances to the mean."""
    centre = np.eye(len(w)) - np.full_like(w, 1 / len(w))
    return float(np.linalg.norm(w @ centre, 2) ** 2)


def mean_contraction(topology: Topology, count: int) -> float:
    """Over many rounds, for the worst vector that does not know the rounds to come."""
    squares = [at(topology, count, n).T @ at(topology, count, n) for n in range(ROUNDS)]
    centre = np.eye(count) - np.full((count, count), 1 / count)
    return float(np.trace(np.mean(squares, axis=0) @ centre) / (count - 1))


def assert_doubly_stochastic(w: Matrix) -> None:
    assert (w >= 0).all()
    np.testing.assert_allclose(w.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_allclose(w.sum(axis=1), 1, atol=1e-12)


# ---------------------------------------------------------------- always


@given(any_topology, st.integers(1, 40), st.integers(0, 1000))
def test_every_mixing_matrix_is_symmetric_and_doubly_stochastic(
    name: str, count: int, number: int
) -> None:
    w = at(TOPOLOGIES[name], count, number)
    assert_doubly_stochastic(w)
    np.testing.assert_array_equal(w, w.T)


@given(any_topology, st.integers(2, 20), st.integers(0, 100), st.data())
def test_failed_exchanges_leave_it_doubly_stochastic(
    name: str, count: int, number: int, data: st.DataObject
) -> None:
    members = peers(count)
    mixing = rows(TOPOLOGIES[name], members, number)
    links = sorted({(a, b) for a in members for b in mixing[a].partners if a < b})
    failed = data.draw(st.lists(st.sampled_from(links), unique=True)) if links else []
    for a, b in failed:
        mixing[a], mixing[b] = mixing[a].without([b]), mixing[b].without([a])
    assert_doubly_stochastic(matrix(members, mixing))


@given(any_topology, st.integers(2, 20), st.integers(0, 100), st.integers(0, 19))
def test_a_member_that_dies_in_a_round_becomes_the_identity(
    name: str, count: int, number: int, index: int
) -> None:
    members = peers(count)
    dead = members[index % count]
    mixing = rows(TOPOLOGIES[name], members, number)
    after = {me: row.without([dead]) for me, row in mixing.items() if me != dead}
    after[dead] = mixing[dead].without(members)
    assert after[dead] == Row(pytest.approx(1.0), {})  # type: ignore[arg-type]
    assert_doubly_stochastic(matrix(members, after))


@given(any_topology, st.permutations(peers(9)), st.integers(0, 50))
def test_a_row_depends_on_who_is_there_not_on_who_was_named_first(
    name: str, shuffled: list[PeerId], number: int
) -> None:
    topology = TOPOLOGIES[name]
    assert topology(shuffled[0], shuffled, number, "s") == topology(
        shuffled[0], peers(9), number, "s"
    )


def test_the_partners_of_a_round_are_the_same_on_every_machine() -> None:
    """Written down once: hashing must not depend on platform, version or order."""
    members = peers(5)
    assert [tuple(PAIRS(me, members, 7, "run").partners) for me in members] == [
        (),
        ("peer2",),
        ("peer1",),
        ("peer4",),
        ("peer3",),
    ]


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_the_last_member_goes_on_alone(name: str) -> None:
    assert TOPOLOGIES[name](PeerId("a"), [PeerId("a")], 3, "s") == ALONE


# ---------------------------------------------------------------- contraction


@pytest.mark.parametrize("count", SIZES[1:])
def test_everybody_is_an_exact_average(count: int) -> None:
    assert contraction(at(everybody, count, 0)) < 1e-24


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("count", SIZES[2:])
def test_groups_contract_by_one_over_their_size_in_expectation(size: int, count: int) -> None:
    """k groups have a mixing matrix of rank k, of which the mean takes one: by symmetry
    E[W'W] leaves (k - 1) / (M - 1) of every deviation. For pairs of an even number
    that is (M - 2) / (2 (M - 1)), which tends to 1/2.
    """
    num_groups = math.ceil(count / size)
    known = (num_groups - 1) / (count - 1)
    assert mean_contraction(Groups(size), count) == pytest.approx(known, abs=1e-12)
    assert known <= 1 / size


@pytest.mark.parametrize("size", [2, 4])
def test_no_deviation_is_favoured_by_random_groups(size: int) -> None:
    """The trace above is the eigenvalue only if all partners are equally likely."""
    mixed = np.mean([at(Groups(size), 9, number) for number in range(4000)], axis=0)
    apart = mixed[~np.eye(9, dtype=bool)]
    np.testing.assert_allclose(apart, apart.mean(), rtol=0.12)


@pytest.mark.parametrize("count", [2, 4, 8, 16, 32])
def test_a_hypercube_of_a_power_of_two_averages_exactly_in_one_sweep(count: int) -> None:
    assert contraction(sweep(hypercube, count)) < 1e-24
    assert count == 2 or contraction(at(hypercube, count, 0)) == pytest.approx(1)


@pytest.mark.parametrize("count", [3, 5, 6, 7, 9, 13, 31, 33])
def test_a_hypercube_with_places_free_contracts_in_each_sweep(count: int) -> None:
    assert contraction(sweep(hypercube, count)) < 0.75


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8, 13, 16, 31, 32, 33])
def test_exponential_hops_contract_as_their_spectrum_says(count: int) -> None:
    rounds = sweep_rounds(count)
    known = max(
        math.prod(math.cos(math.pi * mode * 2**hop / count) ** 2 for hop in range(rounds))
        for mode in range(1, count)
    )
    assert contraction(sweep(exponential, count)) == pytest.approx(known**2, abs=1e-12)
    sine = math.sin(2**rounds * math.pi / count) / (2**rounds * math.sin(math.pi / count))
    assert known**2 <= sine**4 + 1e-12


@pytest.mark.parametrize("count", [3, 4, 5, 8, 13, 16, 31])
def test_a_ring_contracts_as_its_spectrum_says(count: int) -> None:
    """The slowest wave goes once around; in a ring of two or three there is none."""
    known = (1 / 3 + 2 / 3 * math.cos(2 * math.pi / count)) ** 2
    assert contraction(at(ring, count, 0)) == pytest.approx(known, abs=1e-12)


# ---------------------------------------------------------------- change


def test_random_groups_change_with_every_round_and_run() -> None:
    members = peers(16)
    seen = {tuple(PAIRS(members[0], members, n, s).partners) for n in range(40) for s in "ab"}
    assert len(seen) > 10


def test_the_ring_keeps_its_neighbours_and_others_return_after_a_sweep() -> None:
    members = peers(13)
    for me in members:
        assert ring(me, members, 0, "s") == ring(me, members, 1, "s")
        for topology in (hypercube, exponential):
            assert topology(me, members, 1, "s") == topology(me, members, 1 + sweep_rounds(13), "s")


def test_one_that_leaves_the_ring_moves_only_its_neighbours() -> None:
    members = peers(12)
    gone = members[5]
    rest = [peer for peer in members if peer != gone]
    moved = [me for me in rest if ring(me, members, 0, "s") != ring(me, rest, 0, "s")]
    assert sorted(moved) == sorted(ring(gone, members, 0, "s").partners)


@pytest.mark.parametrize(
    "name", ["everybody", "pairs", "groups", "hypercube", "exponential", "ring"]
)
def test_a_swarm_whose_members_come_and_go_still_agrees_on_its_mean(name: str) -> None:
    """From 12 members to 7 and to 12 others; those who come bring a value of their own."""
    random = np.random.default_rng(0)
    values = {peer: float(random.standard_normal()) for peer in peers(12)}
    for number in range(120):
        if number == 20:
            for peer in peers(12)[:5]:
                del values[peer]
        if number == 40:
            values |= {PeerId(f"late{i}"): float(random.standard_normal()) for i in range(5)}
        mean = math.fsum(values.values()) / len(values)
        mixing = rows(TOPOLOGIES[name], list(values), number)
        values = {
            me: row.own * values[me] + sum(w * values[p] for p, w in row.partners.items())
            for me, row in mixing.items()
        }
        assert math.fsum(values.values()) / len(values) == pytest.approx(mean, abs=1e-12)
    assert np.std(list(values.values())) < 1e-3
