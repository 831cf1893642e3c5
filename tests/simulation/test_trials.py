"""Many production nodes in virtual time: drawn faults, and the scenarios of the failure table."""

import os
import subprocess
import sys

import pytest

from p2pdiloco.protocol.ledger import BRANCH
from p2pdiloco.protocol.lineage import Record
from p2pdiloco.protocol.membership import ALL_TO_ALL_MAX
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.state import Condition
from p2pdiloco.protocol.wire import Left
from p2pdiloco.simulation.disk import State
from p2pdiloco.simulation.faults import (
    ClockJump,
    Crash,
    Leave,
    OneWay,
    Partition,
    RelayDeath,
    Stall,
)
from p2pdiloco.simulation.lies import Forger, Liar
from p2pdiloco.simulation.machine import INBOX_MAX, Machine
from p2pdiloco.simulation.network import HOME_LINKS, LinkKind, Quality
from p2pdiloco.simulation.schedule import inflict
from p2pdiloco.simulation.trial import finish, run_trial
from p2pdiloco.simulation.world import Swarm, World

PERFECT = Quality()
CHUNK_S = 0.05
"""About what a chunk of 1 MiB takes in these tests."""
RETURN_S = 4.0
"""In which one that is back with its disk takes part in a merge: a heartbeat, a step, a round."""
NUM_TRIALS = 500
TRIALS_PER_BLOCK = 10


def name(index: int) -> PeerId:
    return PeerId(f"machine-{index:03d}")


def world_of(num_machines: int, seed: int = 1, **spec: int | float | Quality | LinkKind) -> World:
    """Machines of nearly the same speed in a network that loses nothing, all just starting."""
    swarm = Swarm(num_machines=num_machines, **{"network": PERFECT, "step_spread": 0.1, **spec})  # type: ignore[arg-type]
    world = World(seed, swarm)
    world.start_all()
    return world


def versions(machine: Machine) -> list[int]:
    assert machine.node
    return [register.version for register in machine.node.state.registers]


def received_by(machine: Machine) -> list[Record]:
    """The merges, of those on its lineages, that its learner has received."""
    assert machine.node
    return [
        record
        for register in machine.node.state.registers
        for record in (register.chain.records if register.chain else ())
        if record.version <= (register.installed or 0)
    ]


def run_until(world: World, what: str, happens: object, within_s: float) -> None:
    """Runs in small steps until `happens()`."""
    assert callable(happens)
    limit = world.now + within_s
    while not happens():
        assert world.now < limit, f"{what} did not happen within {within_s} s"
        world.run(until=world.now + 0.02)


# -------------------------------------------------------------------- drawn faults


@pytest.mark.parametrize("block", range(NUM_TRIALS // TRIALS_PER_BLOCK))
def test_the_promises_hold_under_drawn_faults(block: int) -> None:
    for seed in range(block * TRIALS_PER_BLOCK, (block + 1) * TRIALS_PER_BLOCK):
        run_trial(seed)


@pytest.mark.parametrize("seed", [5, 23, 56])
def test_one_seed_gives_one_history_under_any_hash_seed(seed: int) -> None:
    def history(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", "p2pdiloco.simulation", str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    assert history("1") == history("2")


# -------------------------------------------------------------------- nothing goes wrong


def test_without_faults_every_merge_has_all_members() -> None:
    world = world_of(5, overlap_steps=4)
    world.run(until=10.0)
    before = set(world.records)
    world.run(until=70.0)
    merges = [record for digest, record in world.records.items() if digest not in before]
    assert len(merges) > 25
    assert {len(record.contributors) for record in merges} == {5}
    assert world.checkers.forks == 0


def test_without_faults_all_tokens_of_the_records_are_in_the_ledgers() -> None:
    world = world_of(4)
    world.run(until=40.0)
    world.settle()
    world.run(until=50.0)
    world.checkers.one_head()
    merged = sum(world.checkers.totals(m).merged for m in world.up)
    chains = [r.chain for r in world.node(name(0)).state.registers]
    assert merged == sum(c.head.tokens_total for c in chains if c and c.head) > 0


def test_equal_members_take_turns_at_synchronizing() -> None:
    world = world_of(4, num_fragments=2, inner_steps=3, term_merges=1, step_s=0.3, step_spread=0.0)
    world.run(until=240.0)
    assert len(world.records) > 200
    world.checkers.took_turns(tolerance=0.4)


def test_a_swarm_of_one_trains_and_merges_alone() -> None:
    world = world_of(1)
    world.run(until=30.0)
    node = world.node(name(0))
    assert node.condition is Condition.ISOLATED
    assert min(versions(world.machines[name(0)])) >= 3
    assert world.checkers.forks == 0
    finish(world)


def test_news_spreads_through_a_large_swarm() -> None:
    world = world_of(24)
    world.run(until=12.0)
    world.checkers.slowest_spread_s = 0.0
    world.run(until=40.0)
    world.checkers.one_lineage()
    assert world.checkers.slowest_spread_s < 4.0


def test_a_synchronizer_on_a_home_link_serves_its_merge_to_a_few_who_serve_the_others() -> None:
    world = world_of(16, links=HOME_LINKS, num_fragments=1, inner_steps=20, payload_bytes=10**6)
    world.run(until=20.0)
    world.errands.copies.clear()
    world.run(until=60.0)
    assert len(world.errands.copies) >= 3
    world.checkers.spared_uplinks(copies_max=ALL_TO_ALL_MAX)
    world.checkers.one_lineage()


def test_a_hundred_machines_share_one_lineage() -> None:
    world = world_of(100, overlap_steps=3)
    world.run(until=25.0)
    world.checkers.one_lineage()
    assert min(min(versions(m)) for m in world.up) >= 2


# -------------------------------------------------------------------- machines die and return


def test_a_synchronizer_killed_in_every_term_holds_nobody_up() -> None:
    world = world_of(5, num_fragments=1, term_merges=2)
    killed: list[int] = []

    def leads_a_new_term() -> bool:
        for machine in world.up:
            assert machine.node
            round_ = machine.node.state.registers[0].round
            if round_ and round_.reports and round_.id.term not in killed:
                killed.append(round_.id.term)
                world.crash(machine)
                world.at(world.now + 6.0, lambda m=machine: world.start(m))  # type: ignore[misc]
                return True
        return False

    for _ in range(10):
        run_until(world, "the next term", leads_a_new_term, within_s=30.0)
    assert killed == sorted(set(killed))
    world.run(until=world.now + 6.0)
    finish(world)
    assert world.checkers.forks == 0


@pytest.mark.parametrize("back", [(0,), (2,), (1, 3), (3, 2, 0)])
def test_everybody_leaves_and_any_subset_returns(back: tuple[int, ...]) -> None:
    world = world_of(4)
    world.run(until=25.0)
    for index, machine in enumerate(world.machines.values()):
        world.at(25.0 + index * 0.3, lambda m=machine: world.crash(m))  # type: ignore[misc]
    world.run(until=30.0)
    assert not world.up
    disks = [world.machines[name(i)].disk.fragments for i in back]
    held = [max(log.load()[1].version for log in logs) for logs in zip(*disks, strict=True)]
    for index in back:
        world.start(world.machines[name(index)])
    world.run(until=60.0)
    for index in back:
        now = versions(world.machines[name(index)])
        assert all(after > before for after, before in zip(now, held, strict=True)), (now, held)
    for machine in world.machines.values():
        world.start(machine)
    finish(world)


def test_ledgers_are_exact_when_nodes_restart() -> None:
    world = world_of(4, seed=3)
    crashes = [(8.0 + 4.3 * i, Crash(name(i % 4), 1.0 + i % 3)) for i in range(10)]
    leaves = [(10.0 + 9.0 * i, Leave(name((i + 2) % 4), 2.0)) for i in range(4)]
    world.run(until=inflict(world, sorted([*crashes, *leaves], key=lambda entry: entry[0])))
    finish(world)
    assert not world.checkers.blind
    merged = sum(world.checkers.totals(m).merged for m in world.up)
    heads = [r.chain.head for r in world.node(name(0)).state.registers if r.chain]
    assert merged == sum(head.tokens_total for head in heads if head)


@pytest.mark.parametrize("seed", range(5))
def test_below_the_quorum_nothing_is_merged_and_training_goes_on(seed: int) -> None:
    """Who returns does not know of the member that is still dead, so the two do not know the same
    candidates, at whatever attempt they have arrived.
    """
    world = world_of(3, seed, quorum=2)
    world.run(until=20.0)
    world.crash(world.machines[name(1)])
    world.crash(world.machines[name(2)])
    world.run(until=26.0)
    merges, steps = len(world.records), world.checkers.count_steps()
    world.run(until=66.0)
    assert len(world.records) == merges
    world.checkers.kept_pace(steps, 40.0)
    world.start(world.machines[name(2)])
    world.run(until=66.0 + RETURN_S)
    assert len(world.records) > merges


@pytest.mark.parametrize("seed", range(3))
def test_who_waited_for_a_quorum_for_weeks_merges_when_another_returns(seed: int) -> None:
    """It has counted an attempt each time it lost patience; who returns counts from 0."""
    world = world_of(2, seed, quorum=2)
    world.run(until=20.0)
    world.crash(world.machines[name(1)])
    world.run(until=26.0)
    for register in world.node(name(0)).state.registers:
        register.fence = (register.version // world.swarm.term_merges, 100_000)
    merges = len(world.records)
    world.start(world.machines[name(1)])
    world.run(until=40.0)
    assert len(world.records) > merges


# -------------------------------------------------------------------- joining


@pytest.mark.parametrize("at", [4.7, 13.1, 22.9, 41.3])
def test_a_joiner_ends_exactly_at_the_head(at: float) -> None:
    world = World(seed=int(at), swarm=Swarm(num_machines=4, network=PERFECT))
    *others, joiner = world.machines.values()
    for machine in others:
        world.start(machine)
    world.at(at, lambda: world.start(joiner))
    world.run(until=at + 15.0)
    world.settle()
    world.run(until=at + 30.0)
    world.checkers.one_head()
    assert joiner.replica == others[0].replica
    assert joiner.learner.stepping


@pytest.mark.parametrize("chunks", [1, 5, 9])
def test_a_donor_that_dies_in_the_middle_is_replaced(chunks: int) -> None:
    swarm = Swarm(num_machines=4, network=PERFECT, num_fragments=1, state_bytes=10 << 20)
    world = World(seed=2, swarm=swarm)
    *others, joiner = world.machines.values()
    for machine in others:
        world.start(machine)
    world.run(until=30.0)
    world.start(joiner)
    run_until(world, "the catch-up", lambda: joiner.catching_up.get(0), within_s=5.0)
    assert joiner.node and joiner.node.state.registers[0].pursuit
    register, head = joiner.node.state.registers[0], world.node(name(0)).state.registers[0].version
    donor = joiner.node.state.registers[0].pursuit.catch_up.donors[0]
    world.run(until=world.now + chunks * CHUNK_S)
    world.crash(world.machines[donor])
    run_until(world, "the end of it", lambda: register.version >= head, within_s=5.0)
    world.run(until=world.now + 5.0)
    world.start(world.machines[donor])
    finish(world)


# -------------------------------------------------------------------- clocks, disks, standing still


@pytest.mark.parametrize("with_learner", [False, True])
def test_a_machine_that_stands_still_holds_nobody_up(with_learner: bool) -> None:
    world = world_of(4)
    world.run(until=15.0)
    merges = len(world.records)
    stall = Stall(name(2), 20.0, with_learner)
    world.run(until=inflict(world, [(15.0, stall)]))
    assert len(world.records) >= merges + 2 * world.swarm.num_fragments
    finish(world)


def test_the_inbox_of_a_machine_that_stands_still_fills_up_and_refuses() -> None:
    world = world_of(2)
    world.run(until=5.0)
    sender, still = world.machines[name(0)], world.machines[name(1)]
    world.stall(still, with_learner=False)
    for _ in range(INBOX_MAX + 10):
        world.send(sender, still.name, Left())
    world.run(until=6.0)
    assert still.messages_waiting == INBOX_MAX
    assert still.messages_refused >= 10
    world.go_on(still, with_learner=False, life=still.life)
    assert still.messages_waiting == 0


@pytest.mark.parametrize("seconds", [5.0, 1000.0])
def test_a_machine_that_was_suspended_finds_its_place_again(seconds: float) -> None:
    world = world_of(4)
    world.run(until=inflict(world, [(15.0, ClockJump(name(1), seconds))]))
    finish(world)


def test_with_a_full_disk_training_goes_on_and_a_restart_begins_from_what_was_written() -> None:
    world = world_of(3)
    world.run(until=15.0)
    victim = world.machines[name(1)]
    victim.disk.full = True
    written = versions(victim)
    world.run(until=30.0)
    assert all(now > before for now, before in zip(versions(victim), written, strict=True))
    world.crash(victim)
    victim.disk.full = False
    world.start(victim)
    assert versions(victim) == written
    world.checkers.blind.add(victim.name)
    finish(world)


def test_a_machine_that_lost_its_disk_joins_as_if_it_were_new() -> None:
    world = world_of(3)
    world.run(until=inflict(world, [(15.0, Crash(name(1), 5.0, wiped=True))]))
    assert versions(world.machines[name(1)]) == [-1] * world.swarm.num_fragments
    finish(world)


# -------------------------------------------------------------------- who reaches whom


def test_machines_behind_home_routers_go_on_alone_when_the_relay_dies() -> None:
    world = world_of(3, links=LinkKind(nat=1.0))
    world.run(until=inflict(world, [(15.0, RelayDeath(20.0))]))
    assert {m.node.condition for m in world.up if m.node} == {Condition.ISOLATED}
    finish(world)
    assert world.checkers.forks > 0


def test_a_deaf_synchronizer_does_not_stop_the_merges_of_the_others() -> None:
    world = world_of(4, num_fragments=1, term_merges=1)
    deaf = OneWay(tuple(world.machines), (name(1),), 85.0)
    calm_from = inflict(world, [(15.0, deaf)])
    world.run(until=15.0)
    before = set(world.records)
    world.run(until=calm_from)
    new = [record for digest, record in world.records.items() if digest not in before]
    assert sum(record.synchronizer != name(1) for record in new) >= 5
    finish(world)


# -------------------------------------------------------------------- partitions, lies, rot


def test_after_a_partition_the_tokens_of_the_losing_branch_are_named() -> None:
    """By each member, those of the merges that its learner has received: one that the partition
    kept from a contributor cost it nothing, since its tokens were merged by another.
    """
    world = world_of(5)
    side = (name(1), name(4))
    calm_from = inflict(world, [(15.0, Partition(side, 24.0))])
    received: set[tuple[PeerId, str]] = set()
    while world.now < calm_from + 1.0:
        world.run(until=world.now + 0.02)
        received |= {(m.name, record.digest) for m in world.up for record in received_by(m)}
    finish(world)
    assert world.checkers.forks >= world.swarm.num_fragments
    on_it = set()
    for register in world.node(name(0)).state.registers:
        assert register.chain
        on_it |= {record.digest for record in world.checkers.chain_of(register.chain.head)}
    branch = [record for digest, record in world.records.items() if digest not in on_it]
    named = {m.name: world.checkers.totals(m).lost.get(BRANCH, 0) for m in world.up}
    for who, tokens in named.items():
        assert tokens == sum(r.tokens_of(who) for r in branch if (who, r.digest) in received)
    assert all(named[member] > 0 for member in side)


def test_a_liar_is_left_alone_and_harms_nobody() -> None:
    world = world_of(5, num_fragments=2)
    world.run(until=inflict(world, [(10.0, Liar(name(3), 20.0))]))
    honest = [m for m in world.up if m.name != name(3)]
    assert any(m.node and m.node.state.strikes.count(name(3)) for m in honest)
    finish(world)


def test_a_forger_is_followed_where_it_keeps_its_word_and_nowhere_else() -> None:
    world = world_of(4)
    world.run(until=inflict(world, [(10.0 + 8 * i, Forger(name(i % 2), 8.0)) for i in range(4)]))
    finish(world)
    forged = set().union(*(machine.forged for machine in world.machines.values()))
    followed = [
        record
        for register in world.node(name(3)).state.registers
        for record in world.checkers.chain_of(register.chain.head if register.chain else None)
        if record.payload_digest in forged
    ]
    assert {record.synchronizer for record in followed} <= {name(0), name(1)}


def test_a_replica_that_rots_is_healed_from_others() -> None:
    world = world_of(4, num_fragments=1, term_merges=100)
    world.run(until=20.0)
    leader = world.node(name(0)).state.post(world.node(name(0)).state.registers[0])[0]
    victim = next(m for m in world.up if m.name != leader)
    held = victim.replica[0]
    assert held
    victim.replica[0] = State(held.version, "0" * 64)
    run_until(
        world,
        "the divergence",
        lambda: victim.node and victim.node.state.registers[0].distrusted,
        within_s=15.0,
    )
    finish(world)
    assert len({m.replica[0] for m in world.up}) == 1
