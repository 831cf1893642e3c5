"""The swarm's arithmetic against an oracle: K = M, nobody fails, float32 on the wire.

Then fragments, contributions, codec, merge and replicas must together do what the synchronous
DiLoCo below does in thirty lines of torch: the same parameters to the last bit. The learners are
the same code on both sides; the oracle knows no fragments, payloads or versions.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from p2pdiloco.optim.fragments import Fragment, plan_fragments
from p2pdiloco.optim.merge import MergeRule, token_weight
from p2pdiloco_daemon.storage.replica import Replica, genesis

M, H, ROUNDS = 3, 5, 4
LEARNING_RATE, MOMENTUM = 0.7, 0.6
VOCABULARY, WIDTH, BATCH = 32, 16, 8
EMBEDDING = "0.weight"

Parameters = dict[str, torch.Tensor]
MergeTensor = Callable[[str, list[torch.Tensor]], torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums inside a step depend on how many threads share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Learner:
    """A tiny network that learns its own noisy table by AdamW; moments outlive each overwrite."""

    def __init__(self, index: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, WIDTH),
            torch.nn.Linear(WIDTH, 3 * WIDTH),
            torch.nn.Tanh(),
            torch.nn.Linear(3 * WIDTH, VOCABULARY),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.random = torch.Generator().manual_seed(index)

    def parameters(self) -> Parameters:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def overwrite(self, values: Parameters) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in values:
                    parameter.copy_(values[name])

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            inputs = torch.randint(VOCABULARY, (BATCH,), generator=self.random)
            targets = (inputs * 7 + torch.randint(2, (BATCH,), generator=self.random)) % VOCABULARY
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()


def synchronous_diloco(merge: MergeTensor) -> Parameters:
    """DiLoCo (arXiv 2311.08105), algorithm 1, with outer Nesterov momentum."""
    learners = [Learner(m) for m in range(M)]
    anchor = learners[0].parameters()
    momentum = {name: torch.zeros_like(value) for name, value in anchor.items()}
    for _ in range(ROUNDS):
        for learner in learners:
            learner.overwrite(anchor)
            learner.train(H)
        locals_ = [learner.parameters() for learner in learners]
        for name in anchor:
            delta = merge(name, [anchor[name] - local[name] for local in locals_])
            momentum[name] = MOMENTUM * momentum[name] + delta
            anchor[name] = anchor[name] - LEARNING_RATE * (delta + MOMENTUM * momentum[name])
    return anchor


def mean(_: str, deltas: list[torch.Tensor]) -> torch.Tensor:
    return sum(((1 / M) * delta for delta in deltas[1:]), (1 / M) * deltas[0])


def radial_directional(name: str, deltas: list[torch.Tensor]) -> torch.Tensor:
    """Decoupled DiLoCo (arXiv 2604.21428): mean of the norms times direction of the mean direction;
    embeddings by mean."""
    if name == EMBEDDING:
        return mean(name, deltas)
    norms = [float(delta.double().norm()) for delta in deltas]
    direction = ((1 / M) / norms[0]) * deltas[0]
    for norm, delta in zip(norms[1:], deltas[1:], strict=True):
        direction = direction + ((1 / M) / norm) * delta
    return (sum(norms) / M / float(direction.double().norm())) * direction


def swarm(num_fragments: int, rule: MergeRule) -> Parameters:
    """The same training through our parts: every learner has its own replica, one of them
    merges.
    """
    learners = [Learner(m) for m in range(M)]
    start = learners[0].parameters()
    shapes = {name: tuple(value.shape) for name, value in start.items()}
    plan = plan_fragments(shapes, num_fragments, [EMBEDDING])
    replicas = [new_replica(plan, rule, start) for _ in learners]
    for version in range(ROUNDS):
        for learner in learners:
            learner.train(H)
        for fragment in plan:
            merge_fragment(fragment, version, learners, replicas)
    assert len({digests(replica) for replica in replicas}) == 1
    return learners[0].parameters()


def merge_fragment(
    fragment: Fragment, version: int, learners: list[Learner], replicas: list[Replica]
) -> None:
    p = fragment.index
    weight = token_weight(H * BATCH, H)
    synchronizer = replicas[version % M]
    parts = []
    for learner, replica in zip(learners, replicas, strict=True):
        local = flatten(fragment, learner.parameters())
        contribution = replica.encode_outer_gradient(p, version, local)
        parts.append((synchronizer.decode_contribution(p, contribution), weight))
    payload = synchronizer.merge(p, parts)
    for learner, replica in zip(learners, replicas, strict=True):
        state = replica.apply(p, version + 1, payload)
        replica.put(state)
        learner.overwrite(unflatten(fragment, state.anchor))


def new_replica(plan: tuple[Fragment, ...], rule: MergeRule, start: Parameters) -> Replica:
    replica = Replica(
        plan,
        outer_learning_rate=LEARNING_RATE,
        outer_momentum=MOMENTUM,
        wire="float32",
        merge_rule=rule,
    )
    for fragment in plan:
        replica.put(genesis(fragment.index, flatten(fragment, start)))
    return replica


def digests(replica: Replica) -> tuple[str, ...]:
    states = [replica.state(fragment.index) for fragment in replica.fragments]
    return tuple(state.digest for state in states if state)


def flatten(fragment: Fragment, values: Parameters) -> npt.NDArray[np.float32]:
    return np.concatenate([values[slot.name].numpy().reshape(-1) for slot in fragment.slots])


def unflatten(fragment: Fragment, vector: npt.NDArray[np.float32]) -> Parameters:
    return {
        slot.name: torch.from_numpy(vector[slot.span].reshape(slot.shape).copy())
        for slot in fragment.slots
    }


@pytest.mark.parametrize("num_fragments", [1, 4])
@pytest.mark.parametrize(("rule", "oracle"), [("mean", mean), ("rda", radial_directional)])
def test_the_swarm_equals_synchronous_diloco_to_the_last_bit(
    num_fragments: int, rule: MergeRule, oracle: MergeTensor
) -> None:
    expected = synchronous_diloco(oracle)
    got = swarm(num_fragments, rule)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].numpy().tobytes() == value.numpy().tobytes(), name


def test_the_oracle_learns() -> None:
    """Otherwise equality would say little."""
    learner, inputs = Learner(0), torch.arange(VOCABULARY)
    targets = inputs * 7 % VOCABULARY

    def loss() -> float:
        return torch.nn.functional.cross_entropy(learner.model(inputs), targets).item()

    before = loss()
    learner.overwrite(synchronous_diloco(mean))
    assert loss() < before - 0.1
