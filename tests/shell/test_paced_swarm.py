"""A swarm that leaves slack, in virtual time: merges wait for a busy machine, but not for ever."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from memory_swarm import FRAGMENTS, TIMES, A, B, Living, Swarm, play_swarm
from test_report import report_of

from p2pdiloco.protocol import events
from p2pdiloco.protocol.policies import Pressure
from p2pdiloco_daemon.storage.replica import Replica

H, SLACK = TIMES.inner_steps, 4
LAG = 2
"""Steps that pass between a learner's word and the snapshot that answers it."""


@pytest.fixture(autouse=True)
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memory_swarm.TIMES", replace(TIMES, slack_steps=SLACK))
    monkeypatch.setattr("memory_swarm.PACING", "pressure-gate")
    monkeypatch.setattr("memory_swarm.new_replica", paced_replica)


def paced_replica() -> Replica:
    return Replica(
        FRAGMENTS,
        outer_learning_rate=0.7,
        outer_momentum=0.3,
        wire="float32",
        merge_rule="rda",
        paced_inner_steps=H,
    )


async def press(living: Living, *spells: tuple[float, float]) -> None:
    """Other programs use so much of the machine, for so many seconds each, over and over."""
    while True:
        for owner, seconds in spells:
            living.shell.post(events.MachineMeasured(Pressure(owner=owner)))
            await asyncio.sleep(seconds)


def periods(living: Living, after_version: int = 3) -> Sequence[int]:
    """Inner steps of the median contributor, of every merge after the first ones."""
    chains = [register.chain for register in living.node.state.registers]
    return [r.period_steps for chain in chains if chain for r in chain.records[after_version:]]


def test_periods_stay_in_their_bounds_and_keep_their_mean(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(2)
        busy = swarm.nodes[B]
        busy.tasks.create_task(press(busy, (0.9, 5.0), (0.1, 4.0)))
        await swarm.train(240)
        found = periods(swarm.nodes[A])
        assert len(found) > 60
        assert len(set(found)) > 3
        assert min(found) >= H - SLACK
        assert max(found) <= H + SLACK + LAG
        assert fmean(found) == pytest.approx(H, abs=LAG)

    play_swarm(tmp_path, scenario)


def test_replicas_stay_bit_identical_over_periods_that_vary(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(2)
        busy = swarm.nodes[B]
        busy.tasks.create_task(press(busy, (0.9, 3.0), (0.1, 5.0)))
        await swarm.train(60)
        await swarm.kill(B)
        await swarm.train(30)
        swarm.start(B)
        await swarm.train(30)
        await swarm.settle()
        a, b = swarm.nodes[A], swarm.nodes[B]
        assert a.digests == b.digests and None not in a.digests
        assert len(set(periods(a))) > 2
        assert all(r.mended_at is None for n in (a, b) for r in n.node.state.registers)

    play_swarm(tmp_path, scenario)


def test_a_machine_that_is_always_busy_is_merged_all_the_same(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(2)
        busy = swarm.nodes[B]
        busy.tasks.create_task(press(busy, (0.9, 1.0)))
        await swarm.train(120)
        assert fmean(periods(swarm.nodes[A])) == pytest.approx(H, abs=LAG)
        assert busy.node.state.ledger.totals().merged > 0

    play_swarm(tmp_path, scenario)


def test_the_page_says_what_the_next_sync_waits_for(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(30)
        for living in swarm.nodes.values():
            living.shell.post(events.MachineMeasured(Pressure(owner=0.9)))
        sentences, reporter = set[str](), report_of(swarm.nodes[A])
        for _ in range(40):
            await swarm.train(0.5)
            pacing = reporter.status().pacing
            assert pacing and pacing.policy == "pressure-gate"
            assert pacing.pressure["owner"] == 0.9
            assert len(pacing.fragments) == TIMES.num_fragments
            sentences.add(pacing.sentence.partition(" at step ")[2].partition("because ")[2])
        assert "other programs is at 0.90, the limit 0.60" in sentences

    play_swarm(tmp_path, scenario)


def test_a_run_without_slack_has_nothing_to_say_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memory_swarm.TIMES", TIMES)

    async def scenario(swarm: Swarm) -> None:
        swarm.start(A, B)
        await swarm.train(5)
        assert report_of(swarm.nodes[A]).status().pacing is None

    play_swarm(tmp_path, scenario)
