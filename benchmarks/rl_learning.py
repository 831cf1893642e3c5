"""Whether the parts of `p2pdiloco.rl` learn: one process, one model from random weights.

    python -m benchmarks.rl_learning [--task guess] [--seed 0] [--minutes 5]

Each step the rollout engine generates a step's episodes with the newest weights, every episode's
story is checked, a sample is replayed, and the model takes one AdamW step of GRPO. Prints the mean
reward per step. This is not the swarm: no merges, no network.
"""

import argparse
import copy
import random
import time
from collections.abc import Sequence
from statistics import fmean

import torch
from transformers import PreTrainedModel

from p2pdiloco.learn.models import build_model
from p2pdiloco.learn.text import ByteTokenizer
from p2pdiloco.rl.alone import play_step
from p2pdiloco.rl.assignment import SHARED, StepTasks
from p2pdiloco.rl.checks import Rulebook, story
from p2pdiloco.rl.conversation import Limits, Policy
from p2pdiloco.rl.environments import Guess, Sums, Task
from p2pdiloco.rl.episodes import Episode
from p2pdiloco.rl.losses import LossRules
from p2pdiloco.rl.packing import batches, select
from p2pdiloco.rl.replay import replay, sampled
from p2pdiloco.rl.step import accumulate
from p2pdiloco.rollout.engine import Engine
from p2pdiloco.rollout.engine import Limits as EngineLimits
from p2pdiloco.spec import ModelSpec

TASKS: dict[str, Task] = {"guess": Guess(), "sums": Sums(largest=4)}
NUM_GROUPS, GROUP_SIZE = 8, 16
LIMITS = Limits(turns_max=4, answer_tokens_max=1, tokens_max=96)
POLICY = Policy(stop_token=ord("\n"))
LOSS = LossRules(variant="dapo")
BATCH_TOKENS = 8192
LEARNING_RATE = 2e-3
REPLAYED_SHARE = 0.02


def rules_of(step: int, task: Task, seed: int) -> Rulebook:
    tasks = StepTasks(f"benchmark {seed}", step, SHARED, NUM_GROUPS, GROUP_SIZE)
    return Rulebook(
        tasks=tasks,
        task=task,
        tokenizer=ByteTokenizer(),
        policy=POLICY,
        limits=LIMITS,
        versions=frozenset({step}),
    )


def groups_of(episodes: Sequence[Episode]) -> list[list[Episode]]:
    return [
        [e for e in episodes if e.trajectory // GROUP_SIZE == group] for group in range(NUM_GROUPS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=sorted(TASKS), default="guess")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    model = build_model(ModelSpec(preset="tiny"), arguments.seed, LIMITS.tokens_max)
    assert isinstance(model, PreTrainedModel)
    engine = Engine(
        copy.deepcopy(model).eval(),
        EngineLimits(num_rows_max=128, num_waiting_max=NUM_GROUPS * GROUP_SIZE),
        time.monotonic,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    checker = random.Random(arguments.seed)
    started, step = time.monotonic(), 0
    while time.monotonic() - started < 60 * arguments.minutes:
        engine.swap(dict(model.named_parameters()), step)
        rules = rules_of(step, TASKS[arguments.task], arguments.seed)
        episodes = play_step(engine, rules)
        for episode in episodes:
            assert story(episode, rules) is None
        frozen = copy.deepcopy(model).eval()
        for episode in sampled(episodes, REPLAYED_SHARE, checker):
            refusal = replay(episode, rules, {step: frozen}, engine.referee.margin)
            assert refusal is None, refusal
        selection = select(groups_of(episodes), step, 0, LOSS.variant)
        optimizer.zero_grad()
        totals = selection.totals(LIMITS.turns_max * LIMITS.answer_tokens_max)
        made = accumulate(model, batches(selection.chosen, BATCH_TOKENS), totals, LOSS, 1.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 5 == 0:
            reward = fmean(episode.reward for episode in episodes)
            elapsed = time.monotonic() - started
            print(
                f"{elapsed:6.1f} s  step {step:4}  reward {reward:.3f}  drift {made.drift:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
