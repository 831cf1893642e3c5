"""A real learner process in an rl run: it waits for shares, learns from them, and starts anew."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from learner_stage import Stage, open_stage

from benchmarks.made_up import made_up_spec
from p2pdiloco.rl.episodes import pack
from p2pdiloco.rl.rules import rulebook_of
from p2pdiloco.rollout.request import Token
from p2pdiloco.spec import DataSpec, RlSpec, RunSpec, SyncSpec
from p2pdiloco_daemon.learner.learner import (
    Died,
    Idle,
    Installed,
    Learned,
    Ready,
    Snapshot,
    StepsDone,
)

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(1200)]

H = 3
SPEC = made_up_spec(
    RunSpec(
        name="test",
        sync=SyncSpec(num_fragments=1, inner_steps=H),
        data=DataSpec(sequence_length=64),
        rl=RlSpec(num_groups=2, group_size=4, turns_max=1),
    )
)


def share(step: int) -> list[bytes]:
    """Every trajectory guesses another number."""
    rules = rulebook_of(SPEC, "run", step)
    episodes = []
    for trajectory in range(rules.tasks.num_trajectories):
        conversation = rules.conversation(trajectory)
        conversation.answered([Token(ord("0") + trajectory, -5.5, step)])
        assert conversation.episode
        episodes.append(pack(conversation.episode))
    return episodes


async def learn_from_one(stage: Stage, version: int) -> None:
    """From an install to the wait for the next share."""
    since = len(stage.events)
    stage.install_all(version)
    await stage.next(Installed, since)
    assert stage.learner.learn(version, share(version))
    learned = await stage.next(Learned, since)
    assert (learned.step, learned.num_episodes, learned.num_dropped) == (version, 8, 0)
    assert learned.num_learnt_from == 8
    assert 0 < learned.reward < 1
    await stage.next(Idle, stage.events.index(learned))
    steps = [event for event in stage.events[since:] if isinstance(event, StepsDone)]
    assert sum(done.steps for done in steps) == H


def test_it_learns_from_shares_and_starts_anew_when_one_is_lost_with_it(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await learn_from_one(stage, 0)
        since = len(stage.events)
        stage.learner.snapshot(0, base_version=0)
        snapshot = await stage.next(Snapshot, since)
        assert (snapshot.steps, snapshot.tokens) == (H, 8)
        assert np.abs(snapshot.values - stage.values[0]).max() > 0

        assert stage.learner.pid
        os.kill(stage.learner.pid, signal.SIGKILL)
        await stage.next(Died, since)
        assert not stage.learner.learn(0, share(0))
        await stage.next(Ready, since)
        await learn_from_one(stage, 1)

    async def play() -> None:
        async with open_stage(tmp_path, SPEC) as stage:
            await scene(stage)

    asyncio.run(play())
