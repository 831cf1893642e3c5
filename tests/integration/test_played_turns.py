"""Real rollout workers play the turns of a small step: the same tokens wherever they are played."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.made_up import made_up_spec
from p2pdiloco.learn.models import build_model
from p2pdiloco.optim.fragments import fragments_of
from p2pdiloco.protocol.turns import Holding, TurnId
from p2pdiloco.rl.checks import story
from p2pdiloco.rl.episodes import pack, unpack
from p2pdiloco.rl.rules import rulebook_of
from p2pdiloco.spec import DataSpec, RlSpec, RunSpec, SyncSpec
from p2pdiloco_daemon.children.shared_memory import Vector
from p2pdiloco_daemon.rollouts.held_turns import Played
from p2pdiloco_daemon.rollouts.messages import Installed, Speeds
from p2pdiloco_daemon.rollouts.trajectories import ROWS_MAX, RolloutsBusy, TurnRefused
from p2pdiloco_daemon.rollouts.worker import (
    Policy,
    RolloutEvent,
    RolloutOptions,
    Rollouts,
    running_rollouts,
)

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(1800)]

PATIENCE_S = 1500.0
RUN_ID = "run"
STEP = 3
SPEC = made_up_spec(
    RunSpec(
        name="test",
        sync=SyncSpec(num_fragments=1),
        data=DataSpec(sequence_length=64),
        rl=RlSpec(environment="guess", num_groups=2, group_size=2),
    )
)
[FRAGMENT] = fragments_of(SPEC)
RULES = rulebook_of(SPEC, RUN_ID, STEP)


def weights() -> Vector:
    """Of a model that has learnt to say digits, so that trajectories have several turns."""
    model = build_model(SPEC.model, SPEC.seed, SPEC.data.sequence_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = random.Random(1)
    for _ in range(30):
        batch = torch.tensor([list(_game(rng).encode()) for _ in range(8)])
        logits = model(input_ids=batch[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    values: Vector = np.empty(FRAGMENT.size, np.float32)
    parameters = dict(model.named_parameters())
    for slot in FRAGMENT.slots:
        values[slot.span] = parameters[slot.name].detach().numpy().ravel()
    return values


def _game(rng: random.Random) -> str:
    guesses = (f"{rng.randrange(10)}{rng.choice(('more', 'less'))}" for _ in range(3))
    return "Guess 0 to 9.\n" + "\n".join(guesses)


@dataclass
class Worker:
    """A rollout worker whose policy a test sets."""

    newest: Policy | None = None
    rollouts: Rollouts = field(init=False)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, event: RolloutEvent) -> None:
        if isinstance(event, Installed | Speeds):
            self.news.set()

    async def serve(self, policy: Policy) -> None:
        """Waits until it is the worker's, measured."""
        self.newest = policy
        while self.rollouts.version != policy.version or self.rollouts.load() is None:
            self.news.clear()
            await self.news.wait()


@asynccontextmanager
async def working() -> AsyncIterator[Worker]:
    worker = Worker()
    options = RolloutOptions(
        spec=SPEC, run_id=RUN_ID, fragments=(FRAGMENT,), newest=lambda: worker.newest
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(PATIENCE_S))
        executor = stack.enter_context(ThreadPoolExecutor(1))
        worker.rollouts = await stack.enter_async_context(
            running_rollouts(options, worker.hear, executor)
        )
        yield worker


async def trajectory(number: int, *workers: Worker) -> list[Played]:
    """Its turns, of which each of the workers plays every so many."""
    history, turns = b"", list[Played]()
    for turn, worker in zip(range(4), cycle(workers)):
        turns.append(await worker.rollouts.play(TurnId(STEP, number, turn), history))
        history = turns[-1].episode
        if turns[-1].holding is Holding.ENDED:
            break
    return turns


def test_a_trajectory_is_the_same_at_one_worker_and_at_two() -> None:
    async def run() -> None:
        newest = Policy(STEP, [weights()])
        async with working() as one, working() as two:
            await asyncio.gather(one.serve(newest), two.serve(newest))
            alone = [await trajectory(number, one) for number in range(4)]
            moved = [await trajectory(number, two, one) for number in range(4)]
            assert max(map(len, alone)) > 1
            for ours, theirs in zip(alone, moved, strict=True):
                assert [turn.held for turn in ours] == [turn.held for turn in theirs]
                episode, other = unpack(ours[-1].episode), unpack(theirs[-1].episode)
                assert (episode.tokens, episode.reward) == (other.tokens, other.reward)
                assert story(episode, RULES) is None
            await check_them(two, [turns[-1].episode for turns in alone])
            await move_on(one)

    asyncio.run(run())


async def check_them(worker: Worker, episodes: list[bytes]) -> None:
    assert await worker.rollouts.check(STEP, episodes, range(4)) == [None] * 4
    unfinished = await worker.rollouts.check(STEP, episodes, ended=False)
    assert all(refusal and "ends before or after" in refusal for refusal in unfinished)
    honest = unpack(episodes[0])
    forged = pack(replace(honest, reward=0.5 if honest.reward == 1 else 1.0))
    [believed, refused] = await worker.rollouts.check(STEP, [episodes[1], forged], [0])
    assert believed is None
    assert refused is not None and "its reward is another" in refused


async def move_on(worker: Worker) -> None:
    """What a worker says of itself, and what a new policy does to what it holds."""
    rollouts = worker.rollouts
    load = rollouts.load()
    assert load is not None and load.num_rows == ROWS_MAX
    assert {held.turn.trajectory for held in load.held} == {0, 1, 2, 3}
    assert [number for number, _seconds in load.token_s] == [1, 2, 4, 8, 16, 32]
    assert all(seconds > 0 for _number, seconds in load.token_s)
    assert load.prefill_tokens_per_s > 0
    await worker.serve(Policy(STEP + 1, [weights()]))
    assert rollouts.held(STEP, 0) is None
    with pytest.raises(TurnRefused, match="is none of step 4"):
        await rollouts.play(TurnId(STEP, 0, 0), b"")
    with pytest.raises(RolloutsBusy, match="no policy of step 5 yet"):
        await rollouts.play(TurnId(STEP + 2, 0, 0), b"")


def test_who_waits_for_a_killed_worker_is_told_so_and_it_comes_back() -> None:
    async def run() -> None:
        async with working() as worker:
            await worker.serve(Policy(STEP, [weights()]))
            pid = worker.rollouts.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            playing = asyncio.create_task(worker.rollouts.play(TurnId(STEP, 0, 0), b""))
            checking = asyncio.create_task(worker.rollouts.check(STEP, [b"garbage"]))
            await asyncio.wait({playing, checking}, timeout=0)
            os.kill(pid, signal.SIGKILL)
            for waiting in (playing, checking):
                with pytest.raises(RolloutsBusy):
                    await waiting
            assert worker.rollouts.load() is None
            await worker.serve(worker.newest or Policy(STEP, []))
            [refusal] = await worker.rollouts.check(STEP, [b"garbage"])
            assert refusal is not None and "malformed episode" in refusal
            assert (await trajectory(0, worker))[0].held.turn.trajectory == 0

    asyncio.run(run())
