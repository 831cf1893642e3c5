"""The factored round: what it keeps, what it contracts, and which tensors it takes."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import pytest

from p2pdiloco.learn.models import build_model, embedding_names, parameter_shapes
from p2pdiloco.optim.fragments import Fragment, TensorSlot, plan_fragments
from p2pdiloco.optim.merge import norm
from p2pdiloco.optim.mixing import (
    DILOCO,
    GLOBAL_M1,
    GLOBAL_M1_LOCAL_M2,
    PAIRWISE,
    Exchanged,
    Factors,
    WorkerState,
    disagreement_limit,
    end_tensors,
    finish_round,
    mix_gradients,
    mix_parameters,
    part_of,
)
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.topology import PAIRS, Row, ring
from p2pdiloco.spec import ModelSpec

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


@pytest.mark.parametrize(
    ("factors", "rho1", "rho2", "limit"),
    [
        (DILOCO, 0.0, 0.0, 1.0),
        (GLOBAL_M1_LOCAL_M2, 0.0, 0.5, 1.5),
        (GLOBAL_M1, 0.0, 1.0, 2.0),
        (PAIRWISE, 0.5, 1.0, 3.0),
    ],
)
def test_disagreement_settles_where_the_bound_says(
    factors: Factors, rho1: float, rho2: float, limit: float
) -> None:
    """Drift is noise alone. Of 64 workers pairs have rho 62/126."""
    count, size = 64, 100
    random = np.random.default_rng(0)
    workers = Workers(count, size, factors, rate=1.0, mu=0.0)
    peaks = []
    for number in range(40):
        workers.step(lambda _, __: random.standard_normal(size).astype(np.float32))
        if number >= 20:
            peaks.append(workers.peak)
    drift = size * (1 - 1 / count)
    assert disagreement_limit(1.0, rho1, rho2) == pytest.approx(limit)
    assert np.mean(peaks) / drift == pytest.approx(limit, rel=0.03)


def test_private_momentum_adds_to_the_limit() -> None:
    """GlobalM1 with Nesterov: the outer step of a round is lr ((1 + mu) D_t + sum mu^(k+1) D_t-k),
    so its square is lr^2 ((1 + mu)^2 + mu^4 / (1 - mu^2)) times the drift: 2d becomes 4.46 d.
    """
    random = np.random.default_rng(0)
    workers, peaks = Workers(32, 200, GLOBAL_M1, rate=0.7, mu=0.9), []
    for number in range(120):
        workers.step(lambda _, __: random.standard_normal(200).astype(np.float32))
        if number >= 40:
            peaks.append(workers.peak)
    known = 1 + 0.7**2 * ((1 + 0.9) ** 2 + 0.9**4 / (1 - 0.9**2))
    assert np.mean(peaks) / (200 * (1 - 1 / 32)) == pytest.approx(known, rel=0.03)


def test_gossip_descends_where_workers_see_different_data() -> None:
    """Each worker is drawn to its own minimum; the swarm must find the mean of them."""
    random = np.random.default_rng(0)
    workers = Workers(8, 4, PAIRWISE, rate=0.7, mu=0.5)
    minima = {me: random.standard_normal(4).astype(np.float32) for me in workers.members}
    for _ in range(150):
        workers.step(lambda me, start: np.float32(0.1) * (start - minima[me]))
    np.testing.assert_allclose(workers.mean, np.mean(list(minima.values()), axis=0), atol=1e-4)


# ---------------------------------------------------------------- part of the tensors


def test_mix2_needs_embedding_head_and_the_two_shallowest_layers() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.experts.7.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.10.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    slots = [TensorSlot(name, (2,), 0, name in (names[0], names[-1])) for name in names]
    assert end_tensors(slots) == {names[0], names[1], names[2], names[-1]}


def test_the_ends_are_two_fifths_of_the_tiny_model() -> None:
    """The paper's subset was 43 % of its parameters."""
    model = build_model(ModelSpec(preset="tiny"), 0, 128)
    (whole,) = plan_fragments(parameter_shapes(model), 1, embedding_names(model))
    part = part_of(whole, end_tensors(whole.slots))
    assert part.layout.size / whole.size == pytest.approx(0.42, abs=0.01)


def test_a_part_travels_as_a_vector_of_its_own() -> None:
    whole = np.arange(N, dtype=np.float32)
    part = part_of(FRAGMENT, {"b", "elsewhere"})
    assert part.layout.slots == (TensorSlot("b", (200,), 0, True),)
    assert part.take(whole).tolist() == whole[400:].tolist()
    changed = part.put(whole, np.zeros(200, np.float32))
    assert changed.tolist() == [*range(400), *[0] * 200]
    assert whole[400] == 400


def test_a_fragment_may_hold_none_of_the_part() -> None:
    part, whole = part_of(FRAGMENT, {"elsewhere"}), np.arange(N, dtype=np.float32)
    assert part.layout.size == 0
    assert part.put(whole, part.take(whole)).tolist() == whole.tolist()


def test_pairs_differ_between_the_two_mixes() -> None:
    members = [PeerId(f"peer{i}") for i in range(16)]
    rows = [[PAIRS(me, members, 0, mix) for me in members] for mix in ("mix1", "mix2")]
    assert rows[0] != rows[1]
