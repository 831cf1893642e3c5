"""The benchmarks of placement: what they promise whatever a step takes."""

import copy
import itertools
from collections.abc import Callable
from functools import cache

import pytest

from benchmarks.placement_engine import Machine, SimulatedEngine
from benchmarks.placement_replica import RealReplica, Texts, calibrated_engine, scaled
from benchmarks.placement_world import (
    BASELINE,
    POLICIES,
    Finished,
    Job,
    Replica,
    Turn,
    Workload,
    World,
    agentic,
)
from p2pdiloco.learn.models import build_model
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.turns import Load, Step
from p2pdiloco.rollout.engine import Engine
from p2pdiloco.spec import ModelSpec

LENGTH_MAX = 192
WORKLOAD = Workload(
    Step(number=0, prompt_tokens=(48, 40), group_size=3),
    [[Turn(3 + i, 5, 0.01)] * (1 + i % 3) for i in range(6)],
)


def ticking(tick_s: float = 0.001) -> Callable[[], float]:
    """A clock that goes on by a little whenever it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) * tick_s


def real_replicas(texts: Texts, *, drafts: bool) -> dict[PeerId, Replica]:
    engine = prototype(drafts)
    return {
        PeerId(name): RealReplica(copy.deepcopy(engine), texts, 0.002, LENGTH_MAX, ticking())
        for name in ("a", "b")
    }


@cache
def prototype(drafts: bool) -> Engine:
    """Two full rows fit."""
    model = build_model(ModelSpec(preset="tiny"), 0, LENGTH_MAX)
    return calibrated_engine(model, 2 * LENGTH_MAX, drafts=drafts, clock=ticking())


class Watched:
    """A replica of which all times are looked at."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.rtt_s = replica.rtt_s
        self.num_finished = 0
        self._last = 0.0

    @property
    def next_s(self) -> float:
        next_s = self._replica.next_s
        assert next_s >= self._last
        return next_s

    def load(self) -> Load:
        return self._replica.load()

    def submit(self, job: Job, now: float) -> None:
        self._replica.submit(job, now)

    def advance(self, now: float) -> list[Finished]:
        finished = list(self._replica.advance(now))
        for one in finished:
            assert one.at >= self._last
            self._last = one.at
        self.num_finished += len(finished)
        return finished


@pytest.mark.parametrize("policy", [BASELINE, "WAR, both", "swarm"])
def test_on_real_engines_every_turn_is_played_once_and_no_clock_goes_back(policy: str) -> None:
    replicas = {
        name: Watched(replica)
        for name, replica in real_replicas(Texts(WORKLOAD), drafts=False).items()
    }
    outcome = World(WORKLOAD, replicas, POLICIES[policy], report_s=0.05).run()
    played = sum(replica.num_finished for replica in replicas.values())
    assert played == sum(len(turns) for turns in WORKLOAD.turns)
    assert 0 < outcome.hit_rate < 1


def test_the_tokens_are_the_same_whatever_the_policy_and_with_drafts() -> None:
    digests = set()
    for policy, drafts in [(BASELINE, False), ("WAR's score", False), ("swarm", True)]:
        texts = Texts(WORKLOAD)
        World(WORKLOAD, real_replicas(texts, drafts=drafts), POLICIES[policy]).run()
        digests.add(texts.digest)
    assert len(digests) == 1


def test_a_turn_that_comes_out_otherwise_is_noticed() -> None:
    texts = Texts(WORKLOAD)
    texts.answered(0, 0, [1, 2, 3])
    with pytest.raises(AssertionError, match="came out otherwise"):
        texts.answered(0, 0, [1, 2, 4])


def test_a_trajectorys_text_is_as_long_as_the_workload_says() -> None:
    texts = Texts(WORKLOAD)
    for turn in range(3):
        assert len(texts.prompt(2, turn)) == WORKLOAD.prompt_tokens(2, turn)
        texts.answered(2, turn, [0] * WORKLOAD.turns[2][turn].new_tokens)
    assert texts.prompt(0, 0) == texts.prompt(1, 0) != texts.prompt(3, 0)


def test_a_scaled_workload_has_no_trajectory_beyond_the_length() -> None:
    workload = agentic(4, 8, seed=0)
    small = scaled(workload, 8, 600)
    assert small.step.prompt_tokens[0] == workload.step.prompt_tokens[0] // 8
    lengths = [small.prompt_tokens(i, len(turns)) for i, turns in enumerate(small.turns)]
    assert max(lengths) <= 600
    assert sum(map(len, small.turns)) < sum(map(len, workload.turns))


def test_simulated_replicas_stand_in_the_same_world() -> None:
    machine = Machine("a", 0.02, 0.0002, 4, 500, 0.02)
    replicas = {PeerId(name): Watched(SimulatedEngine(machine)) for name in ("a", "b")}
    outcome = World(WORKLOAD, replicas, POLICIES["swarm"]).run()
    assert outcome.num_new_tokens == WORKLOAD.num_new_tokens
    assert 0 < outcome.hit_rate < 1
