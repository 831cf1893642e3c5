"""Production nodes that gossip, in virtual time."""

import pytest

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.state import Condition
from p2pdiloco.protocol.topology import PAIRS, GossipPlan, Topology, everybody, hypercube, ring
from p2pdiloco.simulation.faults import Crash, Partition
from p2pdiloco.simulation.network import Quality
from p2pdiloco.simulation.schedule import inflict
from p2pdiloco.simulation.trial import finish, finish_gossip, run_gossip_trial
from p2pdiloco.simulation.world import Swarm, World

NUM_TRIALS = 20
TRIALS_PER_BLOCK = 10


def name(index: int) -> PeerId:
    return PeerId(f"machine-{index:03d}")


def world_of(
    num_machines: int,
    mix1: Topology,
    mix2: Topology | None = None,
    seed: int = 1,
    *,
    quorum: int | None = None,
) -> World:
    """Machines of nearly the same speed in a network that loses nothing, all just starting. With a
    `quorum`, Mix2 ends by it.
    """
    plan = GossipPlan(mix1=mix1, mix2=mix2, seed="test", by_quorum=quorum is not None)
    swarm = Swarm(
        num_machines=num_machines,
        quorum=quorum or 1,
        num_fragments=2,
        network=Quality(),
        step_spread=0.1,
        gossip=plan,
    )
    world = World(seed, swarm)
    world.start_all()
    return world


def count(world: World) -> int:
    return sum(len(ends) == 2 for ends in world.mixings.counted.values())


# -------------------------------------------------------------------- drawn faults


@pytest.mark.parametrize("block", range(NUM_TRIALS // TRIALS_PER_BLOCK))
def test_the_promises_hold_under_drawn_faults(block: int) -> None:
    for seed in range(block * TRIALS_PER_BLOCK, (block + 1) * TRIALS_PER_BLOCK):
        run_gossip_trial(seed)


def test_one_seed_gives_one_history() -> None:
    assert run_gossip_trial(3).history() == run_gossip_trial(3).history()


# -------------------------------------------------------------------- nothing goes wrong


@pytest.mark.parametrize("mix1", [everybody, hypercube, PAIRS, ring])
def test_without_faults_both_ends_count_every_exchange(mix1: Topology) -> None:
    world = world_of(4, mix1)
    world.run(until=90.0)
    assert count(world) > 40
    assert world.mixings.one_sided(0.0, 80.0) == 0
    for machine in world.up:
        totals = world.checkers.totals(machine)
        assert not totals.lost and not totals.rejected and totals.merged > 0


def test_members_stay_in_the_same_round() -> None:
    world = world_of(5, hypercube)
    world.run(until=60.0)
    for p in range(2):
        rounds = [state.version for m in world.up if (state := m.replica[p])]
        assert min(rounds) >= 8 and max(rounds) - min(rounds) <= 1


def test_a_machine_that_is_alone_merges_nothing_until_another_has_its_values() -> None:
    world = world_of(2, everybody)
    first, second = world.machines.values()
    world.run(until=0.9)
    world.crash(second)
    world.run(until=40.0)
    alone = world.checkers.totals(first)
    assert alone.merged == 0 and alone.pending == alone.processed > 0
    world.start(second)
    world.run(until=60.0)
    assert world.checkers.totals(first).merged > alone.pending


def test_exact_averages_leave_one_rounds_drift() -> None:
    """Of independent drifts of unit variance, (M - 1) / M remains about the mean."""
    world, seen = world_of(4, everybody), []
    for _ in range(40):
        world.run(until=world.now + 6.0)
        seen += [world.mixings.spread(p) for p in range(2)]
    assert sum(seen) / len(seen) == pytest.approx(0.75, abs=0.35)


def test_a_blocking_mix_narrows_what_members_differ_by() -> None:
    spreads = []
    for mix2 in (None, everybody):
        world = world_of(4, everybody, mix2)
        world.run(until=120.0)
        settled = [world.mixings.spread(p) for p in range(2)]
        spreads.append(sum(settled))
        world.settle()
        world.run(until=150.0)
        world.checkers.all_settled()
    assert spreads[1] < 0.1 * spreads[0]


def test_a_quorum_of_all_makes_gossip_agree_as_diloco_does() -> None:
    world = world_of(4, hypercube, everybody, quorum=4)
    world.run(until=60.0)
    world.settle()
    world.run(until=80.0)
    world.checkers.all_settled()
    assert sum(world.mixings.spread(p) for p in range(2)) < 1e-12
    assert all(m.node and m.node.state.merges >= 16 for m in world.up)
    assert world.mixings.one_sided(0.0, 60.0) == 0


# -------------------------------------------------------------------- something goes wrong


def test_who_is_too_slow_for_the_quorum_costs_a_grace_window_and_does_not_drift_away() -> None:
    """One needs twenty times as long for a step as the others, which wait for it for at most
    gamma tau = 1.6 steps in each of the two rounds of 8; it comes back to them by their starts.
    """
    world = world_of(4, hypercube, everybody, quorum=2)
    slow, *quick = world.machines.values()
    slow.learner.step_s *= 20
    world.run(until=150.0)
    for machine in quick:
        assert machine.learner.steps_total > 8 / (8 + 2 * 2) * 150.0 / machine.learner.step_s - 15
        assert machine.node and machine.node.state.rounds
        left_out = [r for r in machine.node.state.rounds if "grace window was over" in r.reason]
        assert len(left_out) > len(machine.node.state.rounds) // 2
    assert max(world.mixings.spread(p) for p in range(2)) < 3.0
    assert world.mixings.one_sided(0.0, 140.0) == 0


def test_who_is_much_faster_than_the_others_mixes_with_them_all_the_same() -> None:
    world = world_of(4, hypercube)
    fast, *others = world.machines.values()
    fast.learner.step_s /= 5
    world.run(until=60.0)
    for p in range(2):
        rounds = [state.version for m in world.up if (state := m.replica[p])]
        assert min(rounds) >= 8 and max(rounds) - min(rounds) <= 1
    assert fast.node and {r.outcome for r in fast.node.state.rounds} == {"mixed"}
    assert fast.learner.steps_total > 3 * max(m.learner.steps_total for m in others)


def test_both_sides_of_a_partition_train_and_mix_again_afterwards() -> None:
    world = world_of(4, PAIRS)
    end = inflict(world, [(20.0, Partition((name(0), name(1)), 40.0))])
    world.run(until=50.0)
    assert all(m.node and m.node.condition is Condition.TRAINING for m in world.up)
    world.run(until=end)
    finish_gossip(world)


def test_a_machine_that_lost_its_disk_begins_where_the_others_are() -> None:
    world = world_of(3, everybody)
    end = inflict(world, [(40.0, Crash(name(1), 10.0, wiped=True))])
    world.run(until=end + 6.0)
    versions = [state.version for m in world.up for state in m.replica[:1] if state]
    assert len(versions) == 3 and max(versions) - min(versions) <= 1
    finish_gossip(world)


# -------------------------------------------------------------------- below the quorum


@pytest.mark.parametrize("seed", range(5))
def test_a_swarm_that_loses_its_quorum_mixes_and_is_one_lineage_again_afterwards(
    seed: int,
) -> None:
    swarm = Swarm(num_machines=4, num_fragments=2, quorum=3, mixes_below_quorum=True)
    world = World(seed, swarm)
    world.start_all()
    lost = [Crash(name(1), 60.0), Crash(name(2), 50.0)]
    end = inflict(world, [(20.0 + index, crash) for index, crash in enumerate(lost)])
    world.run(until=60.0)
    here = [machine.node.fallback for machine in world.up if machine.node]
    assert len(here) == 2 and all(each and each.active and each.mixed > 4 for each in here)
    assert max(world.checkers.last_merge.values()) < 30.0  # three are needed for a merge
    world.run(until=end)
    finish(world)
    for machine in world.up:
        assert machine.node and machine.node.fallback and not machine.node.fallback.active


# -------------------------------------------------------------------- synchronous DiLoCo


def test_synchronous_diloco_merges_everybody_and_overwrites_nothing() -> None:
    swarm = Swarm(num_machines=4, num_fragments=1, network=Quality(), step_spread=0.1, blocks=True)
    world = World(1, swarm)
    world.start_all()
    world.run(until=20.0)
    before = set(world.records)
    world.run(until=80.0)
    later = [record for digest, record in world.records.items() if digest not in before]
    assert len(later) >= 8
    assert {len(record.contributors) for record in later} == {4}
    for machine in world.up:
        totals = world.checkers.totals(machine)
        assert not totals.rejected and sum(totals.lost.values()) < 0.02 * totals.processed


def test_synchronous_diloco_goes_on_without_a_machine_that_died() -> None:
    swarm = Swarm(num_machines=3, num_fragments=1, network=Quality(), step_spread=0.1, blocks=True)
    world = World(1, swarm)
    world.start_all()
    world.run(until=30.0)
    world.crash(world.machines[name(1)])
    merged = len(world.records)
    world.run(until=90.0)
    assert len(world.records) >= merged + 6
