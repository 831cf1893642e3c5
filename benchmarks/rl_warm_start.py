"""A tiny model that has read how `calculator` is played, as a checkpoint for rl runs to begin with.

    python -m benchmarks.rl_warm_start DIRECTORY [--minutes 4]

From random weights nobody ever writes a call of 16 right bytes, so there is nothing to reinforce.
What is read here are transcripts in which half of the players call the tool with the sum that was
asked for and repeat what it says, and the others write some number at once: it learns how a call is
written, not that it pays.
"""

import argparse
import random
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.rl_settings import spec_of
from p2pdiloco.learn.models import build_model
from p2pdiloco.rl.checks import Rulebook
from p2pdiloco.rl.episodes import Episode
from p2pdiloco.rl.losses import token_logprobs
from p2pdiloco.rl.packing import Weighted, batches
from p2pdiloco.rl.rules import rulebook_of
from p2pdiloco.rollout.request import Token

BATCH_SIZE = 32
LEARNING_RATE = 3e-3
WARMUP_STEPS = 50


def transcript(trajectory: int, rules: Rulebook, rng: random.Random) -> Episode:
    """Of a player that calls the tool, or of one that does not."""
    conversation = rules.conversation(trajectory)
    question = bytes(conversation.tokens).decode().split("\n")[1].removesuffix("=")
    a, b = map(int, question.split("+"))
    calls = [f"calc: {question}\n", f"{a + b}\n"]
    at_once = [f"{rng.randrange(10 ** len(str(a + b)))}\n"]
    for words in calls if rng.random() < 0.5 else at_once:
        conversation.answered([Token(byte, 0.0, rules.tasks.step) for byte in words.encode()])
    assert conversation.episode is not None
    return conversation.episode


def read(model: PreTrainedModel, environment: str, minutes: float, seed: int) -> None:
    """Trains it on transcripts for so long; prints the loss, nats per byte of the players."""
    spec, rng = spec_of(environment), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    started, step, mean = time.process_time(), 0, 0.0
    while time.process_time() - started < 60 * minutes:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        rules = rulebook_of(spec, "warm start", step)
        chosen = [Weighted(transcript(i, rules, rng), 0.0) for i in range(BATCH_SIZE)]
        [batch] = batches(chosen, 1 << 20)
        logits_BTV = model(input_ids=batch.tokens_BT, use_cache=False).logits
        logprobs_BT = token_logprobs(logits_BTV, batch.tokens_BT, 1.0)
        loss = -(logprobs_BT * batch.mask_BT).sum() / batch.mask_BT.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, mean = step + 1, mean + 0.05 * (loss.item() - mean)
        if step % 50 == 0:
            elapsed_s = time.process_time() - started
            print(f"{elapsed_s:6.1f} s  step {step:5}  loss {mean:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--environment", default="calculator")
    parser.add_argument("--minutes", type=float, default=4.0, help="of computing")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spec = spec_of(arguments.environment)
    model = build_model(spec.model, arguments.seed, spec.data.sequence_length)
    assert isinstance(model, PreTrainedModel)
    read(model, arguments.environment, arguments.minutes, arguments.seed)
    model.save_pretrained(arguments.directory)


if __name__ == "__main__":
    main()
