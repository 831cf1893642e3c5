"""Real shells gossip in virtual time: no synchronizer, nobody waits, nobody drifts away."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from memory_swarm import (
    BOOT,
    FRAGMENTS,
    OUTER_TENSORS,
    TARGET,
    TIMES,
    TOKENS_PER_STEP,
    A,
    B,
    C,
    Swarm,
    play_swarm,
    rot,
)

from p2pdiloco.protocol.topology import PAIRS, GossipPlan, everybody, hypercube

MINUTE = 60.0


def plan(mix1: str = "hypercube", *, blocks: bool = False, by_quorum: bool = False) -> GossipPlan:
    named = {"hypercube": hypercube, "everybody": everybody, "pairs": PAIRS}[mix1]
    blocking = [f.index for f in FRAGMENTS if any(s.name in OUTER_TENSORS for s in f.slots)]
    return GossipPlan(
        mix1=named,  # type: ignore[arg-type]
        mix2=everybody if by_quorum else PAIRS if blocks else None,
        seed="test",
        by_quorum=by_quorum,
        mix2_fragments=frozenset(blocking),
    )


def anchors(swarm: Swarm) -> list[np.ndarray]:
    states = [[n.holdings.replica.state(f.index) for f in FRAGMENTS] for n in swarm.nodes.values()]
    return [np.concatenate([state.anchor for state in each if state]) for each in states]


def apart(swarm: Swarm) -> float:
    """The largest distance of any number of two nodes; they begin at 2 from where they go."""
    return max(float(np.abs(a - b).max()) for a in anchors(swarm) for b in anchors(swarm))


def assert_ledgers_add_up(swarm: Swarm) -> None:
    for living in swarm.nodes.values():
        totals = living.node.state.ledger.totals()
        assert totals.adds_up and totals.processed > 0


@pytest.mark.parametrize("mix1", ["hypercube", "everybody", "pairs"])
def test_three_nodes_train_towards_the_same(tmp_path: Path, mix1: str) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B, C)
        await swarm.train(2 * MINUTE)
        await swarm.settle()
        assert min(swarm.versions()) >= 25
        assert max(living.distance for living in swarm.nodes.values()) < 0.3
        assert apart(swarm) < 0.2
        assert sum(swarm.network.mixed.values()) > 100
        assert_ledgers_add_up(swarm)

    play_swarm(tmp_path, scenario, gossip=plan(mix1))


def test_no_token_is_overwritten_and_no_learner_waits(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(MINUTE)
        for living in swarm.nodes.values():
            totals = living.node.state.ledger.totals()
            assert not totals.lost and not totals.rejected and totals.merged > 0
            assert living.learner.steps_total > 0.9 * MINUTE / living.learner.step_s - 10

    play_swarm(tmp_path, scenario, gossip=plan())


def test_a_blocking_mix_brings_nodes_nearer_at_the_price_of_standing_still(
    tmp_path: Path,
) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B, C)
        await swarm.train(MINUTE)
        steps = [living.learner.steps_total for living in swarm.nodes.values()]
        await swarm.settle()
        assert max(steps) < 0.95 * MINUTE / 0.5
        assert min(swarm.versions()) >= 8
        blocked = [r.reason for r in swarm.nodes[A].node.state.rounds]
        assert any("then 1" in reason for reason in blocked), blocked
        rounds = swarm.nodes[A].node.state.rounds
        norm = next(f.index for f in FRAGMENTS if f.slots[0].name == "norm")
        assert not any("then" in r.reason for r in rounds if r.fragment == norm)
        assert_ledgers_add_up(swarm)

    play_swarm(tmp_path, scenario, gossip=plan("everybody", blocks=True))


def test_a_quorum_that_all_reach_gives_all_the_same_outer_steps(tmp_path: Path) -> None:
    """Momenta agree; starts do but for their codec; nobody waits for long."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B, C)
        await swarm.train(1.0)
        for living, step_s in zip(swarm.nodes.values(), (0.4, 0.5, 0.65), strict=True):
            # so that outer gradients are unlike, and some come before one's own is cut
            living.learner.step_s, living.learner.pull = step_s, step_s**2
        await swarm.train(2 * MINUTE)
        steps = [living.learner.steps_total for living in swarm.nodes.values()]
        await swarm.settle()
        assert min(steps) > 0.6 * 2 * MINUTE / 0.65
        assert min(swarm.versions()) >= 12
        blocked = {f.index for f in FRAGMENTS if any(s.name in OUTER_TENSORS for s in f.slots)}
        for living in swarm.nodes.values():
            rounds = [r.reason for r in living.node.state.rounds if r.fragment in blocked]
            assert sum("then 2 of 2" in reason for reason in rounds) > 0.8 * len(rounds), rounds
            states = [living.holdings.replica.state(p) for p in sorted(blocked)]
            assert max(float(np.abs(s.anchor - TARGET).max()) for s in states if s) < 0.2
        momenta = [
            np.concatenate(
                [s.momentum for p in sorted(blocked) if (s := n.holdings.replica.state(p))]
            )
            for n in swarm.nodes.values()
        ]
        assert max(float(np.abs(m - momenta[0]).max()) for m in momenta) < 0.01
        assert_ledgers_add_up(swarm)

    play_swarm(tmp_path, scenario, gossip=plan(by_quorum=True), times=replace(TIMES, quorum=3))


def test_a_node_that_hangs_costs_the_others_a_grace_window_until_it_is_gone(
    tmp_path: Path,
) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B, C)
        await swarm.train(MINUTE)
        swarm.network.hung.add(C)
        before = swarm.nodes[A].learner.steps_total, swarm.nodes[A].versions
        await swarm.train(MINUTE)
        steps = swarm.nodes[A].learner.steps_total - before[0]
        assert steps > 0.5 * MINUTE / 0.5
        assert min(swarm.nodes[A].versions) >= min(before[1]) + 4
        reasons = " ".join(r.reason for r in swarm.nodes[A].node.state.rounds)
        assert "then 1 of 1" in reasons
        assert_ledgers_add_up(swarm)

    play_swarm(tmp_path, scenario, gossip=plan(by_quorum=True), times=replace(TIMES, quorum=2))


def test_a_node_that_is_alone_goes_on_and_is_joined(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A)
        await swarm.train(MINUTE)
        assert min(swarm.versions()) >= 8
        swarm.network.shelves.pop(BOOT)
        swarm.start(B)
        await swarm.train(30)
        assert min(swarm.nodes[B].versions) >= 12  # it began where the other was
        assert swarm.network.mixed[A] and swarm.network.mixed[B]
        assert apart(swarm) < 0.2

    play_swarm(tmp_path, scenario, gossip=plan())


def test_a_killed_node_comes_back_from_its_directory(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(MINUTE)
        rounds, tokens = swarm.nodes[B].versions, swarm.nodes[B].node.state.ledger.totals()
        await swarm.kill(B)
        await swarm.train(20)
        swarm.start(B)
        await swarm.train(5)
        assert min(swarm.nodes[B].versions) >= min(rounds) - 1
        await swarm.train(30)
        assert_ledgers_add_up(swarm)
        later = swarm.nodes[B].node.state.ledger.totals()
        assert later.merged >= tokens.merged - tokens.merged // 10
        assert abs(min(swarm.nodes[A].versions) - min(swarm.nodes[B].versions)) <= 1

    play_swarm(tmp_path, scenario, gossip=plan())


def test_damaged_memory_is_replaced_from_the_own_disk(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(MINUTE)
        rot(swarm.nodes[A].holdings.replica.state(0))
        await swarm.train(20)
        register = swarm.nodes[A].node.state.registers[0]
        assert register.damaged == 1 and not register.distrusted
        assert abs(float(anchors(swarm)[0].mean()) - TARGET) < 0.3
        assert_ledgers_add_up(swarm)

    play_swarm(tmp_path, scenario, gossip=plan())


# -------------------------------------------------------------------- below the quorum

QUORUM_OF_THREE = replace(TIMES, quorum=3)


def test_too_few_for_a_merge_mix_their_values_and_lose_no_token(tmp_path: Path) -> None:
    """Two of three train on; when the third comes, what they have learnt is merged."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(2 * MINUTE)
        assert max(swarm.versions()) == 0
        for living in swarm.nodes.values():
            fallback, totals = living.node.fallback, living.node.state.ledger.totals()
            assert fallback and fallback.active and fallback.mixed > 10
            assert totals.pending == totals.processed > 0
        learners = [living.learner for living in swarm.nodes.values()]
        for p in range(len(FRAGMENTS)):
            assert np.abs(learners[0].values[p] - learners[1].values[p]).max() < 0.2
        swarm.start(C)
        await swarm.train(MINUTE)
        await swarm.settle()
        assert min(swarm.versions()) >= 2
        digests = [living.digests for living in swarm.nodes.values()]
        assert digests[0] == digests[1] == digests[2]
        assert not any(n.node.fallback and n.node.fallback.active for n in swarm.nodes.values())
        merged = [n.node.state.ledger.totals().merged for n in swarm.nodes.values()]
        assert min(merged[:2]) > 0.5 * 2 * MINUTE / 0.5 * TOKENS_PER_STEP * len(FRAGMENTS)
        assert_ledgers_add_up(swarm)

    play_swarm(tmp_path, scenario, times=QUORUM_OF_THREE, mixes_below_quorum=True)


def test_without_leave_too_few_train_apart(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(MINUTE)
        assert not swarm.network.mixed and max(swarm.versions()) == 0

    play_swarm(tmp_path, scenario, times=QUORUM_OF_THREE)
