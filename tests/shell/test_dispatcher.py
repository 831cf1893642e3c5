"""Steps that are rolled out and shared while workers lie, die and fall silent, and dispatchers are
replaced: every trajectory is learnt from once, and the next step comes."""

import asyncio
import logging
import math
import random

import pytest
import rollout_swarm
from rollout_swarm import (
    ANNA,
    BERT,
    CLEO,
    NUM_TRAJECTORIES,
    World,
    episode_of,
    swarm,
)
from virtual_clock import run_virtual

from p2pdiloco_daemon.rl import rolling_out

ALL = list(range(NUM_TRAJECTORIES))


def num_turns(step: int) -> int:
    return sum(len(episode_of(step, trajectory).answers) for trajectory in ALL)


def test_steps_follow_each_other_and_each_trajectory_is_learnt_from_once() -> None:
    async def script() -> None:
        async with swarm(World()) as world:
            await world.until_version(3)
            for step in range(3):
                assert world.learnt(step) == ALL
                played = world.turns_played(step)
                assert played.total() == num_turns(step)
            assert all(node.worker.played for node in world.nodes.values())

    run_virtual(script())


def test_a_worker_that_dies_in_mid_turn_costs_time_only() -> None:
    async def script() -> None:
        async with swarm(World()) as world:
            await asyncio.sleep(1.5)
            world.nodes[BERT].worker.is_up = False
            await asyncio.sleep(2)
            world.nodes[BERT].worker.is_up = True
            await world.until_version(2)
            assert world.learnt(0) == world.learnt(1) == ALL

    run_virtual(script())


@pytest.mark.parametrize("after_s", [0.7, 1.5, 2.5, 3.5, 4.5, 5.2, 5.8])
def test_a_dispatcher_that_dies_in_mid_step_is_replaced(after_s: float) -> None:
    async def script() -> None:
        async with swarm(World()) as world:
            await asyncio.sleep(after_s)
            assert world.version == 0
            world.kill(ANNA)
            await world.until_version(2)
            alive = [world.nodes[name] for name in (BERT, CLEO)]
            learnt = [t for node in alive for step, of in node.learnt if step == 0 for t in of]
            assert len(learnt) == len(set(learnt))
            assert set(world.learnt(0)) == set(ALL)

    run_virtual(script())


def test_what_workers_hold_is_not_generated_again_for_a_new_dispatcher() -> None:
    async def script() -> None:
        async with swarm(World()) as world:
            for node in world.nodes.values():
                node.worker.turn_s = 1.0 if node.me != ANNA else 60.0
            await asyncio.sleep(2.9)
            before = world.turns_played(0)
            assert before
            world.kill(ANNA)
            await world.until_version(1)
            again = [turn for turn, n in world.turns_played(0).items() if n > 1]
            assert not again

    run_virtual(script())


def test_what_a_worker_shows_counts_and_not_what_it_says_to_hold() -> None:
    async def script() -> None:
        async with swarm(World()) as world:
            for node in world.nodes.values():
                node.worker.turn_s = 1.0 if node.me != ANNA else 60.0
            world.nodes[CLEO].worker.manner = "claims ends"
            await asyncio.sleep(1.9)
            assert world.nodes[CLEO].worker.kept
            world.kill(ANNA)
            await world.until_version(1)
            assert set(world.learnt(0)) == set(ALL)

    run_virtual(script())


@pytest.mark.parametrize(
    ("manner", "words"),
    [
        ("rubbish", "that it says to hold"),
        ("invented reward", "trajectories is not true; the last"),
    ],
)
def test_what_a_worker_shows_of_many_trajectories_is_told_of_once(
    manner: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def script() -> list[str]:
        async with swarm(World()) as world:
            for node in world.nodes.values():
                node.worker.turn_s = 1.0 if node.me != ANNA else 60.0
            await asyncio.sleep(1.9)
            cleo = world.nodes[CLEO].worker
            assert len(cleo.kept) > 1
            cleo.manner = manner
            world.kill(ANNA)
            await asyncio.sleep(20.0)
            return world.nodes[BERT].notes

    with caplog.at_level(logging.INFO):
        notes = run_virtual(script())
    told = [*notes, *(record.message for record in caplog.records)]
    assert sum(words in text for text in told) == 1


def test_nobody_is_named_for_what_a_liar_handed_to_it() -> None:
    async def script() -> None:
        async with swarm(World(replayed_shares={CLEO: 1.0})) as world:
            for node in world.nodes.values():
                node.worker.turn_s = 1.0 if node.me != ANNA else 60.0
            await asyncio.sleep(3.5)
            cleo = world.nodes[CLEO].worker
            cleo.handed.update(cleo.kept)
            world.kill(ANNA)
            await world.until_version(1)
            notes = world.nodes[BERT].notes
            assert any("what was taken over is not true" in note for note in notes)
            assert not any("gave a turn that is not true" in note for note in notes)
            assert not world.nodes[CLEO].blamed

    run_virtual(script())


def test_two_dispatchers_at_once_count_nothing_twice() -> None:
    async def script() -> None:
        world = World()
        world.claims = {BERT: BERT}
        async with swarm(world):
            await asyncio.sleep(7)
            world.claims.clear()
            await world.until_version(2)
            for node in world.nodes.values():
                of_node = [t for step, of in node.learnt if step == 0 for t in of]
                assert len(of_node) == len(set(of_node))

    run_virtual(script())


@pytest.mark.parametrize(
    ("manner", "replayed_share"),
    [("invented reward", 0.0), ("rubbish", 0.0), ("other tokens", 1.0)],
)
def test_a_worker_that_lies_is_named_and_its_turns_are_run_again(
    manner: str, replayed_share: float
) -> None:
    async def script() -> None:
        async with swarm(World(replayed_share=replayed_share)) as world:
            world.nodes[CLEO].worker.manner = manner
            await world.until_version(1)
            notes = world.nodes[ANNA].notes
            assert any("cleo gave a turn that is not true" in note for note in notes)
            assert not any("bert" in note for note in notes)
            assert world.learnt(0) == ALL
            assert not [node.blamed for node in world.nodes.values() if node.blamed]
            [liar] = [w for w in world.nodes[ANNA].dispatcher_.status().workers if w.lies]
            assert (liar.peer, liar.lies) == (CLEO, 1)

    run_virtual(script())


def test_a_lie_that_the_dispatcher_missed_is_found_by_who_gets_it_and_pinned_on_the_liar() -> None:
    async def script() -> None:
        async with swarm(World(replayed_shares={BERT: 1.0})) as world:
            world.nodes[CLEO].worker.manner = "other tokens"
            for name in (ANNA, BERT):
                world.nodes[name].worker.turn_s = 4.0  # so that the liar gets most of the turns
            await world.until_version(1)
            notes = world.nodes[ANNA].notes
            assert any("cleo gave a turn that is not true" in note for note in notes)
            assert not world.nodes[BERT].blamed
            assert set(world.learnt(0)) == set(ALL)
            status = world.nodes[ANNA].dispatcher_.status()
            assert [w.peer for w in status.workers if w.lies] == [CLEO]

    run_virtual(script())


def test_a_member_that_cries_wolf_costs_one_look_through() -> None:
    async def script() -> None:
        async with swarm(World(replayed_shares={BERT: 1.0})) as world:
            world.nodes[BERT].worker.manner = "doubts"
            await world.until_version(1)
            assert world.learnt(0)
            assert not world.nodes[ANNA].notes

    run_virtual(script())


def test_a_worker_that_is_silent_is_left_alone_and_its_turns_are_run_again() -> None:
    async def script() -> None:
        async with swarm(World()) as world:
            world.nodes[CLEO].worker.manner = "silent"
            await world.until_version(1)
            assert world.learnt(0) == ALL
            workers = world.nodes[ANNA].dispatcher_.status().workers
            [cleo] = [worker for worker in workers if worker.peer == CLEO]
            assert cleo.failures
            assert cleo.turns == 0

    run_virtual(script())


@pytest.mark.parametrize("check_s", [100.0, math.inf], ids=["slow", "hung"])
def test_nobody_is_left_alone_because_the_dispatcher_is_slow_to_check(
    check_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rolling_out, "CHECKS_AT_ONCE", 2)

    async def script() -> None:
        async with swarm(World()) as world:
            for node in world.nodes.values():
                node.worker.turn_s = 0.1
            world.nodes[ANNA].worker.check_s = check_s
            await world.until_version(1, 3600)
            assert world.learnt(0) == ALL
            workers = world.nodes[ANNA].dispatcher_.status().workers
            assert not [worker for worker in workers if worker.failures or worker.lies]

    run_virtual(script())


def test_who_is_not_asked_for_turns_hears_all_the_same_that_somebody_dispatches() -> None:
    async def script() -> None:
        async with swarm(World()) as world:
            world.nodes[CLEO].worker.manner = "rubbish"
            for name in (ANNA, BERT):
                world.nodes[name].worker.turn_s = 60.0
            await asyncio.sleep(150)
            assert world.version == 0
            assert not world.nodes[CLEO].learnt
            assert not world.passed_over

    run_virtual(script())


def test_a_worker_that_cannot_be_reached_any_more_is_lost() -> None:
    async def script() -> None:
        async with swarm(World()) as world:
            await asyncio.sleep(1.5)
            world.deaf.add(CLEO)
            await asyncio.sleep(40)
            world.deaf.clear()
            whole = world.version + 1
            await world.until_version(whole + 1)
            assert world.learnt(whole) == ALL

    run_virtual(script())


def test_a_share_that_is_not_true_is_refused_and_its_sender_blamed() -> None:
    async def script() -> None:
        async with swarm(World(replayed_share=0.0)) as world:
            world.nodes[ANNA].worker.manner = "invented reward"  # nobody checks its own
            await asyncio.sleep(30)
            blamed = world.nodes[BERT].blamed + world.nodes[CLEO].blamed
            assert blamed
            assert {peer for peer, _ in blamed} == {ANNA}
            assert world.learnt(0) != ALL

    run_virtual(script())


def test_a_joiner_in_mid_step_takes_part_at_once_in_turns_and_in_the_next_shares() -> None:
    async def script() -> None:
        world = World(names=(ANNA, BERT))
        async with swarm(world):
            await asyncio.sleep(1.5)
            joiner = world.start(CLEO)
            await world.until_version(2)
            assert joiner.worker.played
            assert any(step == 1 and of for step, of in joiner.learnt)
            assert world.learnt(1) == ALL

    run_virtual(script())


def test_a_joiner_that_has_no_share_is_patient_while_the_others_learn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_swarm, "LEARN_S", 1e6)

    async def script() -> None:
        async with swarm(World(names=(ANNA, BERT))) as world:
            await world.until_all_have_shares()
            joiner = world.start(CLEO)
            await asyncio.sleep(300)
            assert not joiner.learnt
            assert not world.passed_over

    run_virtual(script())


def test_a_member_that_leaves_before_its_share_leaves_no_gap() -> None:
    async def script() -> None:
        async with swarm(World()) as world:
            await asyncio.sleep(1.5)
            world.kill(CLEO)
            await world.until_version(1)
            assert world.learnt(0) == ALL

    run_virtual(script())


def test_when_all_who_took_shares_are_gone_the_rest_learns_them() -> None:
    async def script() -> None:
        async with swarm(World()) as world:
            await world.until_all_have_shares()
            world.kill(BERT)
            world.kill(CLEO)
            world.nodes[ANNA].stop()  # its learner has lost its share, too
            world.nodes[ANNA].desk.learner_started()
            await world.until_version(1)

    run_virtual(script())


@pytest.mark.parametrize("seed", range(6))
def test_no_step_hangs_whatever_dies_and_comes_back(seed: int) -> None:
    rng = random.Random(seed)

    async def trouble(world: World) -> None:
        name = rng.choice(sorted(world.nodes))
        match rng.randrange(4):
            case 0 if len(world.dead) < 2 and name not in world.dead:
                world.kill(name)
                await asyncio.sleep(rng.uniform(0, 12))
                world.start(name)
            case 1:
                worker = world.nodes[name].worker
                worker.is_up = False
                await asyncio.sleep(rng.uniform(0, 12))
                worker.is_up = True
            case 2:
                world.deaf.add(name)
                await asyncio.sleep(rng.uniform(0, 12))
                world.deaf.discard(name)
            case _:
                world.claims[name] = name
                await asyncio.sleep(rng.uniform(0, 12))
                world.claims.pop(name, None)

    async def script() -> None:
        async with swarm(World(replayed_share=0.2)) as world:
            for _ in range(12):
                await asyncio.sleep(rng.uniform(0, 6))
                await trouble(world)
            await world.until_version(world.version + 2, 300)
            assert world.learnt(world.version - 1) == ALL
            for node in world.nodes.values():
                for step in range(world.version):
                    learnt = [t for of, share in node.learnt if of == step for t in share]
                    assert len(learnt) == len(set(learnt))

    run_virtual(script())


def test_a_step_of_another_lineage_is_rolled_out_anew() -> None:
    async def script() -> None:
        async with swarm(World(replayed_share=1.0)) as world:
            await asyncio.sleep(2.5)
            before = world.turns_played(0)
            assert before
            for node in world.nodes.values():
                node.head = "theirs"
                node.worker.install(0)
            await world.until_version(1)
            again = world.turns_played(0)
            assert all(again[turn] > num for turn, num in before.items())
            assert world.learnt(0) == ALL

    run_virtual(script())


def test_a_dispatcher_that_is_stopped_cancels_every_request() -> None:
    async def script() -> None:
        async with swarm(World()) as world:
            await asyncio.sleep(1.5)
            assert any(node.worker.num_running for node in world.nodes.values())
            status = world.nodes[ANNA].dispatcher_.status()
            assert (status.step, status.phase) == (0, "rolling out")
            assert sum(status.trajectories.values()) == NUM_TRAJECTORIES
            world.running[ANNA].cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            assert not any(node.worker.num_running for node in world.nodes.values())

    run_virtual(script())
