"""The limit of gossip against the oracle: with an exact global Mix2 it is synchronous DiLoCo.

To the last bit, under either merge rule, with whole models and with fragments: all workers then add
the same outer gradients in the same order to the same start.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from test_synchronous_diloco import (
    EMBEDDING,
    LEARNING_RATE,
    MOMENTUM,
    ROUNDS,
    H,
    Learner,
    M,
    MergeTensor,
    Parameters,
    flatten,
    mean,
    radial_directional,
    synchronous_diloco,
    unflatten,
)

from p2pdiloco.optim.fragments import Fragment, plan_fragments
from p2pdiloco.optim.merge import MergeRule
from p2pdiloco.optim.mixing import (
    DILOCO,
    Exchanged,
    Factors,
    WorkerState,
    finish_round,
    mix_gradients,
    mix_parameters,
)
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.topology import everybody

MEMBERS = [PeerId(f"peer{m}") for m in range(M)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums inside a step depend on how many threads share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gossip(factors: Factors, num_fragments: int, rule: MergeRule) -> Parameters:
    """The oracle's training by factored rounds; returns what the first learner holds."""
    learners = dict(zip(MEMBERS, (Learner(m) for m in range(M)), strict=True))
    first = learners[MEMBERS[0]]
    shapes = {name: tuple(value.shape) for name, value in first.parameters().items()}
    plan = plan_fragments(shapes, num_fragments, [EMBEDDING])
    states = {
        (me, fragment): WorkerState(
            flatten(fragment, first.parameters()), np.zeros(fragment.size, np.float32)
        )
        for me in MEMBERS
        for fragment in plan
    }
    for number in range(ROUNDS):
        for learner in learners.values():
            learner.train(H)
        for fragment in plan:
            mix_fragment(factors, fragment, number, rule, learners, states)
    ends = [learner.parameters() for learner in learners.values()]
    assert all(torch.equal(end[name], ends[0][name]) for end in ends for name in shapes)
    return ends[0]


def mix_fragment(
    factors: Factors,
    fragment: Fragment,
    number: int,
    rule: MergeRule,
    learners: dict[PeerId, Learner],
    states: dict[tuple[PeerId, Fragment], WorkerState],
) -> None:
    assert factors.mix2
    starts = {me: states[me, fragment].start for me in MEMBERS}
    gradients = {me: starts[me] - flatten(fragment, learners[me].parameters()) for me in MEMBERS}
    for me in MEMBERS:
        start = starts[me]
        if factors.mix1:
            row = factors.mix1(me, MEMBERS, number, "mix1")
            exchanged = {peer: Exchanged(starts[peer], start) for peer in row.partners}
            start = mix_parameters(start, row, exchanged)
        row = factors.mix2(me, MEMBERS, number, "mix2")
        mixed = mix_gradients(me, gradients, row, fragment, rule)
        state = finish_round(states[me, fragment], start, mixed, LEARNING_RATE, MOMENTUM)
        states[me, fragment] = state
        learners[me].overwrite(unflatten(fragment, state.start))


@pytest.mark.parametrize("factors", [DILOCO, Factors(everybody, everybody)])
@pytest.mark.parametrize("num_fragments", [1, 4])
@pytest.mark.parametrize(("rule", "oracle"), [("mean", mean), ("rda", radial_directional)])
def test_gossip_with_an_exact_mix2_equals_synchronous_diloco_to_the_last_bit(
    factors: Factors, num_fragments: int, rule: MergeRule, oracle: MergeTensor
) -> None:
    expected = synchronous_diloco(oracle)
    got = gossip(factors, num_fragments, rule)
    for name, value in expected.items():
        assert got[name].numpy().tobytes() == value.numpy().tobytes(), name
