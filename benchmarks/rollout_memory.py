"""Whether a rollout worker's memory stays bounded, however long it works and whatever it is asked.

    python -m benchmarks.rollout_memory [--minutes 60]

A real worker of an rl run, tiny preset with random weights, works without a break: turns from the
beginning and from histories, completions of random prompts, checks with replay, and some of each
withdrawn in the middle. Its policy changes every `POLICY_S`. Sampled is the memory that is the
worker's alone (USS). What it may keep is bounded: keys and values (`CACHE_BYTES`), and what the
drafter remembers of answers (some 130 MB once 262,144 tokens were generated); until these are full
it grows. Slopes are those of a line through the samples.
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from benchmarks.made_up import made_up_spec
from benchmarks.swarm import machine, table, write
from p2pdiloco.optim.fragments import fragments_of
from p2pdiloco.protocol.turns import TurnId
from p2pdiloco.rl.checks import Rulebook
from p2pdiloco.rl.episodes import pack
from p2pdiloco.rl.rules import rulebook_of
from p2pdiloco.rollout.request import Token
from p2pdiloco.spec import DataSpec, RlSpec, RunSpec, SyncSpec
from p2pdiloco_daemon.rollouts.messages import Finished, Installed, Load, Progressed
from p2pdiloco_daemon.rollouts.trajectories import RolloutsBusy, TurnRefused
from p2pdiloco_daemon.rollouts.worker import (
    Policy,
    Question,
    RolloutEvent,
    RolloutOptions,
    Rollouts,
    running_rollouts,
)
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "rollout_memory"
POLICY_S = 20.0
SAMPLE_S = 6.0
AT_ONCE = 12
"""Of those who ask, each for one thing after the other."""
WITHDRAWN_SHARE = 0.1
PAUSE_S = 0.02
"""After what was not answered."""
RUN_ID = "memory"
DRAFT = RunSpec(
    name="memory",
    sync=SyncSpec(num_fragments=1),
    data=DataSpec(sequence_length=256),
    rl=RlSpec(answer_tokens_max=48),
)


@dataclass
class Work:
    """What is asked of the worker, what came of it, and how much memory it had."""

    spec: RunSpec
    rng: random.Random
    version: int = 0
    values: Sequence[np.ndarray] = ()
    done: Counter[str] = field(default_factory=Counter)
    is_serving: asyncio.Event = field(default_factory=asyncio.Event)
    num_tokens: int = 0
    episodes: list[bytes] = field(default_factory=list)
    """Of the present step, some."""
    cache_share: float = 0.0
    """Of the memory for keys and values, what is allocated."""
    samples: list[tuple[float, float, float]] = field(default_factory=list)
    """(seconds, MB, share of the cache)"""

    def newest(self) -> Policy | None:
        return Policy(self.version, self.values) if self.values else None

    def hear(self, event: RolloutEvent) -> None:
        if isinstance(event, Load):
            self.num_tokens, self.cache_share = event.tokens, event.cache_share

        elif isinstance(event, Installed):
            self.is_serving.set()

    def change_policy(self) -> None:
        """Other weights, near those before."""
        noise = np.random.default_rng(self.version)
        [before] = self.values
        change = noise.normal(0, 1e-3, before.size).astype(np.float32)
        self.version, self.values, self.episodes = self.version + 1, [before + change], []

    @property
    def rules(self) -> Rulebook:
        return rulebook_of(self.spec, RUN_ID, self.version)


async def run(minutes: float) -> JsonObject:
    work = Work(made_up_spec(DRAFT), random.Random(1))
    fragments = fragments_of(work.spec)
    work.values = [np.random.default_rng(1).normal(0, 0.05, fragments[0].size).astype(np.float32)]
    options = RolloutOptions(spec=work.spec, run_id=RUN_ID, fragments=fragments, newest=work.newest)
    with ThreadPoolExecutor(1) as executor:
        async with running_rollouts(options, work.hear, executor) as rollouts:
            await work.is_serving.wait()
            try:
                async with asyncio.timeout(60 * minutes), asyncio.TaskGroup() as tasks:
                    for _ in range(AT_ONCE):
                        tasks.create_task(_ask(work, rollouts))
                    tasks.create_task(_change(work))
                    tasks.create_task(_sample(work, rollouts))
            except TimeoutError:
                pass
    return {
        "machine": machine(),
        "minutes": minutes,
        "done": dict(sorted(work.done.items())),
        "tokens": work.num_tokens,
        "policies": work.version + 1,
        "samples": [[round(number, 2) for number in sample] for sample in work.samples],
    }


async def _ask(work: Work, rollouts: Rollouts) -> None:
    while True:
        kind = work.rng.choice(("turn", "history", "completion", "check"))
        is_withdrawn = work.rng.random() < WITHDRAWN_SHARE
        try:
            async with asyncio.timeout(0.05 if is_withdrawn else None):
                await _one(work, rollouts, kind)
        except (TimeoutError, RolloutsBusy, TurnRefused):
            work.done["withdrawn, busy or void"] += 1
            await asyncio.sleep(PAUSE_S)
        else:
            work.done[kind] += 1


async def _one(work: Work, rollouts: Rollouts, kind: str) -> None:
    trajectory = work.rng.randrange(work.rules.tasks.num_trajectories)
    match kind:
        case "turn":
            played = await rollouts.play(TurnId(work.version, trajectory, 0), b"")
            work.episodes = [*work.episodes[-50:], played.episode]
        case "history":
            turn, history = _history(work, trajectory)
            await rollouts.play(TurnId(work.version, trajectory, turn), history)
        case "completion":
            await _complete(work, rollouts)
        case _ if work.episodes:
            some = work.rng.sample(work.episodes, min(2, len(work.episodes)))
            await rollouts.check(work.version, some, range(2))
        case _:
            raise RolloutsBusy("there is nothing to check yet")


def _history(work: Work, trajectory: int) -> tuple[int, bytes]:
    """Somebody's guesses, up to three; (the next turn, the history), from the beginning if they
    came to an end."""
    conversation = work.rules.conversation(trajectory)
    for _ in range(work.rng.randint(1, 3)):
        guess = [Token(ord(str(work.rng.randrange(10))), -2.0, work.version)]
        stop = Token(work.rules.policy.stop_token, -1.0, work.version)
        conversation.answered([*guess, stop])
        if conversation.episode is not None:
            return 0, b""
    return conversation.turn, pack(conversation.so_far())


async def _complete(work: Work, rollouts: Rollouts) -> None:
    prompt = "".join(chr(work.rng.randrange(97, 123)) for _ in range(work.rng.randrange(1, 200)))
    question = Question(prompt=prompt, num_tokens_max=50, seed=work.rng.randrange(1 << 30))
    with rollouts.answering(question) as answer:
        while isinstance(event := await answer.get(), Progressed):
            pass
        if not isinstance(event, Finished):
            raise RolloutsBusy(event.reason)


async def _change(work: Work) -> None:
    while True:
        await asyncio.sleep(POLICY_S)
        work.change_policy()


async def _sample(work: Work, rollouts: Rollouts) -> None:
    started = time.monotonic()
    while True:
        await asyncio.sleep(SAMPLE_S)
        if rollouts.pid and work.num_tokens:
            uss = psutil.Process(rollouts.pid).memory_full_info().uss
            work.samples.append((time.monotonic() - started, uss / 1e6, work.cache_share))


def slope_mb_per_hour(samples: Sequence[Sequence[float]]) -> float:
    """Of the least-squares line."""
    at, mb, _share = np.array(samples).T
    return float(np.polyfit(at, mb, 1)[0] * 3600)


def largest(samples: Sequence[Sequence[float]]) -> float:
    return max(mb for _at, mb, _share in samples)


def report(result: JsonObject) -> str:
    samples = result["samples"]
    earlier, later = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    done = ", ".join(f"{number} {kind}" for kind, number in result["done"].items())
    tenths = [samples[len(samples) * i // 10] for i in range(10)]
    rows = [
        ["minutes", f"{result['minutes']:g}"],
        ["asked", done],
        ["tokens generated", result["tokens"]],
        ["policies", result["policies"]],
        ["USS by tenths of the time, MB", " ".join(f"{mb:.0f}" for _, mb, _ in tenths)],
        ["its cache full by then, %", " ".join(f"{100 * share:.0f}" for *_, share in tenths)],
        ["largest in each half, MB", f"{largest(earlier):.0f}, {largest(later):.0f}"],
        [
            "slope of the second half and of the last quarter, MB/h",
            f"{slope_mb_per_hour(later):.1f}, {slope_mb_per_hour(later[len(later) // 2 :]):.1f}",
        ],
    ]
    head = "Memory of a rollout worker (USS) under continuous mixed load with changing policies."
    return f"{head}\n\n{table(['what', 'measured'], rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    result = asyncio.run(run(parser.parse_args().minutes))
    write(RESULTS, result, report(result))


if __name__ == "__main__":
    main()
