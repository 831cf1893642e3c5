"""The factored round: what it keeps and what it contracts."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.optim.fragments import Fragment, TensorSlot
from p2pdiloco.optim.merge import norm
from p2pdiloco.optim.mixing import (
    DILOCO,
    GLOBAL_M1,
    GLOBAL_M1_LOCAL_M2,
    PAIRWISE,
    Continuation,
    Exchanged,
    Factors,
    WorkerState,
    disagreement_limit,
    finish_round,
    mix_gradients,
    mix_parameters,
)
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.topology import PAIRS, Row, ring

Vector = npt.NDArray[np.float32]

N = 600
FRAGMENT = Fragment(0, (TensorSlot("a", (20, 20), 0, False), TensorSlot("b", (200,), 400, True)))
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def vector(*values: float) -> Vector:
    return np.array(values, np.float32)


def flat(size: int) -> Fragment:
    return Fragment(0, (TensorSlot("w", (size,), 0, False),))


def uncoded(own: Vector, received: Mapping[PeerId, Vector]) -> dict[PeerId, Exchanged]:
    return {peer: Exchanged(theirs, own) for peer, theirs in received.items()}


# ---------------------------------------------------------------- Mix1


def test_mix1_takes_the_weighted_average_of_starts() -> None:
    own = vector(1.0, 0.0)
    got = mix_parameters(own, Row(0.5, {B: 0.25, C: 0.25}), uncoded(own, {B: own + 4, C: own - 8}))
    assert got.tolist() == [0.0, -1.0]


def test_a_partner_that_failed_leaves_the_identity_in_its_place() -> None:
    own, row = vector(1.0), Row(0.5, {B: 0.25, C: 0.25})
    assert mix_parameters(own, row, uncoded(own, {B: vector(5.0)})).tolist() == [2.0]
    assert mix_parameters(own, row, {}).tolist() == [1.0]


def test_parameters_that_agree_stay_to_the_last_bit() -> None:
    """A sum of thirds would shrink them a little in every round."""
    own = np.random.default_rng(0).standard_normal(N).astype(np.float32)
    row = Row(1 / 3, {B: 1 / 3, C: 1 / 3})
    assert mix_parameters(own, row, uncoded(own, {B: own, C: own})).tobytes() == own.tobytes()


def test_mix1_keeps_the_sum_even_if_the_wire_loses_bits() -> None:
    random = np.random.default_rng(0)
    ours, theirs = random.standard_normal((2, N)).astype(np.float32)
    ours_seen, theirs_seen = np.round(ours, 1), np.round(theirs, 1)
    row = Row(0.5, {B: 0.5})
    mixed = mix_parameters(ours, row, {B: Exchanged(theirs_seen, ours_seen)})
    mixed += mix_parameters(theirs, row, {B: Exchanged(ours_seen, theirs_seen)})
    np.testing.assert_allclose(mixed, ours + theirs, atol=1e-6)


# ---------------------------------------------------------------- Mix2


def test_mix2_of_a_group_is_the_same_to_the_last_bit_for_its_members() -> None:
    values = np.random.default_rng(0).standard_normal((3, N)).astype(np.float32)
    gradients = dict(zip([A, B, C], values, strict=True))
    third = [Row(1 / 3, {p: 1 / 3 for p in [A, B, C] if p != me}) for me in [A, B, C]]
    got = {
        mix_gradients(me, gradients, row, FRAGMENT, "mean").tobytes()
        for me, row in zip([A, B, C], third, strict=True)
    }
    assert len(got) == 1
    np.testing.assert_allclose(np.frombuffer(got.pop(), np.float32), values.mean(axis=0), atol=1e-6)


def test_mix2_gives_a_failed_partners_weight_to_ourselves() -> None:
    gradients = {A: np.full(N, 1, np.float32), C: np.full(N, 5, np.float32)}
    got = mix_gradients(A, gradients, Row(0.25, {B: 0.5, C: 0.25}), FRAGMENT, "mean")
    np.testing.assert_allclose(got, 2.0)
    alone = mix_gradients(A, {A: gradients[A]}, Row(0.5, {B: 0.5}), FRAGMENT, "mean")
    assert alone.tobytes() == gradients[A].tobytes()


def test_rda_as_mix2_keeps_the_length_where_the_mean_shrinks_it() -> None:
    values = np.random.default_rng(0).standard_normal((2, 400)).astype(np.float32)
    gradients = dict(zip([A, B], values, strict=True))
    row, tensor = Row(0.5, {B: 0.5}), flat(400)
    length = (norm(values[0]) + norm(values[1])) / 2
    assert norm(mix_gradients(A, gradients, row, tensor, "rda")) == pytest.approx(length, rel=1e-5)
    assert norm(mix_gradients(A, gradients, row, tensor, "mean")) < 0.8 * length


# ---------------------------------------------------------------- rounds


Gradient = Callable[[PeerId, Vector], Vector]


class Workers:
    """M workers whose inner steps are a function; everything on one flat tensor."""

    def __init__(self, count: int, size: int, factors: Factors, rate: float, mu: float) -> None:
        self.members = [PeerId(f"peer{i}") for i in range(count)]
        zero = np.zeros(size, np.float32)
        self.states = {me: WorkerState(zero, zero) for me in self.members}
        self.factors, self.rate, self.mu, self.round = factors, rate, mu, 0
        self.peak = 0.0

    def step(self, gradient: Gradient) -> None:
        starts = {me: state.start for me, state in self.states.items()}
        gradients = {me: gradient(me, start) for me, start in starts.items()}
        self.peak = spread([starts[me] - gradients[me] for me in self.members])
        self.states = {me: self._next(me, starts, gradients) for me in self.members}
        self.round += 1

    def _next(
        self, me: PeerId, starts: dict[PeerId, Vector], gradients: dict[PeerId, Vector]
    ) -> WorkerState:
        state, factors = self.states[me], self.factors
        start, gradient = state.start, gradients[me]
        if factors.mix1:
            row = factors.mix1(me, self.members, self.round, "mix1")
            received = {partner: starts[partner] for partner in row.partners}
            start = mix_parameters(start, row, uncoded(start, received))
        if factors.mix2:
            row = factors.mix2(me, self.members, self.round, "mix2")
            gradient = mix_gradients(me, gradients, row, flat(gradient.size), "mean")
        return finish_round(state, start, gradient, self.rate, self.mu)

    @property
    def mean(self) -> Vector:
        starts = [state.start for state in self.states.values()]
        return np.asarray(np.mean(starts, axis=0), np.float32)


def spread(vectors: list[Vector]) -> float:
    """Mean squared distance to the mean."""
    return float(np.square(vectors - np.mean(vectors, axis=0)).sum(axis=1).mean())


@pytest.mark.parametrize(
    "factors", [DILOCO, GLOBAL_M1, GLOBAL_M1_LOCAL_M2, PAIRWISE, Factors(ring, ring)]
)
def test_the_workers_mean_takes_diloco_steps_whatever_the_mixes(factors: Factors) -> None:
    """Mixes are doubly stochastic, so they move no sum."""
    random = np.random.default_rng(0)
    workers = Workers(7, 5, factors, rate=0.7, mu=0.9)
    anchor = momentum = np.zeros(5, np.float32)
    for _ in range(20):
        drift = {me: random.standard_normal(5).astype(np.float32) for me in workers.members}
        workers.step(lambda me, _, drift=drift: drift[me])  # type: ignore[misc]
        mean = np.mean(list(drift.values()), axis=0, dtype=np.float32)
        momentum = np.float32(0.9) * momentum + mean
        anchor = anchor - np.float32(0.7) * (mean + np.float32(0.9) * momentum)
        np.testing.assert_allclose(workers.mean, anchor, atol=1e-5)


def test_the_limit_of_plain_steps_is_the_papers() -> None:
    limits = [disagreement_limit(rho1, rho2) for rho1, rho2 in [(0, 0), (0, 0.5), (0, 1), (0.5, 1)]]
    assert limits == [1.0, 1.5, 2.0, 3.0]


@pytest.mark.parametrize(("rate", "mu"), [(1.0, 0.0), (0.7, 0.3), (0.7, 0.9)])
@pytest.mark.parametrize(
    ("factors", "rho1", "rho2"),
    [
        (DILOCO, 0.0, 0.0),
        (GLOBAL_M1_LOCAL_M2, 0.0, 7 / 15),
        (GLOBAL_M1, 0.0, 1.0),
        (PAIRWISE, 7 / 15, 1.0),
    ],
)
def test_disagreement_settles_where_theory_says(
    factors: Factors, rho1: float, rho2: float, rate: float, mu: float
) -> None:
    """Inner steps are noise alone; pairs of 16 workers contract by 7/15."""
    count, size, settled = 16, 200, 40
    random = np.random.default_rng(0)
    workers, peaks = Workers(count, size, factors, rate, mu), []
    for number in range(3 * settled):
        workers.step(lambda _, __: random.standard_normal(size).astype(np.float32))
        if number >= settled:
            peaks.append(workers.peak)
    expected = size * (1 - 1 / count) * disagreement_limit(rho1, rho2, rate, mu)
    assert np.mean(peaks) == pytest.approx(expected, rel=0.04)


def test_gossip_descends_where_workers_see_different_data() -> None:
    """Each worker is drawn to its own minimum; the swarm must find the mean of them."""
    random = np.random.default_rng(0)
    workers = Workers(8, 4, PAIRWISE, rate=0.7, mu=0.5)
    minima = {me: random.standard_normal(4).astype(np.float32) for me in workers.members}
    for _ in range(150):
        workers.step(lambda me, start: np.float32(0.1) * (start - minima[me]))
    np.testing.assert_allclose(workers.mean, np.mean(list(minima.values()), axis=0), atol=1e-4)


def test_pairs_differ_between_the_two_mixes() -> None:
    members = [PeerId(f"peer{i}") for i in range(16)]
    rows = [[PAIRS(me, members, 0, mix) for me in members] for mix in ("mix1", "mix2")]
    assert rows[0] != rows[1]


# -------------------------------------------------------------------- going on without a wait


@given(st.integers(0, 2**32), st.sampled_from([(1.0, 0.0), (0.5, 0.3), (0.7, 0.9)]))
@settings(max_examples=30)
def test_a_learner_can_go_on_from_the_next_start_by_itself(
    seed: int, outer: tuple[float, float]
) -> None:
    """The affine form gives what the outer step gives, to float32 rounding."""
    rng = np.random.default_rng(seed)
    start, momentum, mixed, local = (rng.normal(0, 1, 50).astype(np.float32) for _ in range(4))
    state = WorkerState(start, momentum)
    expected = finish_round(state, mixed, start - local, *outer)
    continuation = Continuation.of(state, mixed, *outer)
    got = continuation.finish(state, local, outer[1])
    np.testing.assert_allclose(got.start, expected.start, atol=1e-5)
    np.testing.assert_array_equal(got.momentum, expected.momentum)
    np.testing.assert_array_equal(got.start, continuation.start(local))
