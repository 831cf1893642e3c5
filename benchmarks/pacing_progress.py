"""What periods that vary cost in progress, on real training: with the outer step following or not.

    python -m benchmarks.pacing_progress

Two learners in this process train the small model of `benchmarks.gossip` on the usual text and
merge as a run does (codec, RDA, replica). A merge comes on its appointment every H steps, or late
by any part of the slack, every step alike: the widest spread that any policy can make of it.
"""

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gossip import DATA, MODEL
from benchmarks.pacing_replay import mean_and_half_width
from benchmarks.swarm import table
from p2pdiloco.learn.evaluate import held_out_loss
from p2pdiloco.learn.inner_loop import InnerLoop
from p2pdiloco.learn.models import build_model, embedding_names, parameter_shapes
from p2pdiloco.learn.text import TextStream, open_text
from p2pdiloco.optim.fragments import plan_fragments
from p2pdiloco.optim.merge import token_weight
from p2pdiloco.spec import InnerSpec
from p2pdiloco_daemon.storage.replica import Replica, genesis

RESULTS = Path(__file__).parent / "results" / "pacing" / "progress.json"
LEARNERS = 2
INNER_STEPS, SLACK_STEPS = 16, 12
NUM_STEPS = 192
SEEDS = 3
OUTER = ((0.5, 0.3), (0.4, 0.8))
"""The spec's default, and one whose momentum lasts long."""
VARIANTS = ("on time", "late, factors follow", "late, usual factors")
"""Factors follow short periods. What they cost when they followed long ones as well is stored under
`EARLIER`."""
EARLIER = "late, factors followed long periods too"


@dataclass(frozen=True, slots=True)
class Setting:
    variant: str
    outer: tuple[float, float]
    seed: int

    def periods(self) -> list[int]:
        """They add up to `NUM_STEPS`; the last merge is on time."""
        rng, num = random.Random(self.seed), NUM_STEPS // INNER_STEPS
        late = [rng.randint(0, SLACK_STEPS) for _ in range(num - 1)]
        offsets = [0, *(late if self.variant != "on time" else [0] * len(late)), 0]
        return [INNER_STEPS + b - a for a, b in itertools.pairwise(offsets)]


def train(setting: Setting) -> float:
    """Held-out loss of the merged model, in nats per byte."""
    torch.set_num_threads(1)
    text = open_text(DATA)
    model = build_model(MODEL, setting.seed, DATA.sequence_length)
    fragments = plan_fragments(parameter_shapes(model), 1, embedding_names(model))
    loops = [
        InnerLoop(
            build_model(MODEL, setting.seed, DATA.sequence_length),
            TextStream(text, DATA.sequence_length, setting.seed, f"learner{m}"),
            InnerSpec(),
            fragments,
        )
        for m in range(LEARNERS)
    ]
    replica = Replica(
        fragments,
        outer_learning_rate=setting.outer[0],
        outer_momentum=setting.outer[1],
        wire="int8",
        merge_rule="rda",
        paced_inner_steps=INNER_STEPS if setting.variant == VARIANTS[1] else None,
    )
    local = np.empty(fragments[0].size, np.float32)
    loops[0].read_fragment(0, local)
    replica.put(genesis(0, local))
    for version, period in enumerate(setting.periods()):
        parts = []
        for loop in loops:
            for _ in range(period):
                loop.step()
            loop.read_fragment(0, local)
            sent = replica.encode_outer_gradient(0, version, local)
            delta = replica.decode_contribution(0, sent)
            parts.append((delta, token_weight(loop.tokens[0], loop.steps[0])))
        state = replica.apply(0, version + 1, replica.merge(0, parts), period)
        replica.put(state)
        for loop in loops:
            loop.overwrite_fragment(0, state.anchor.copy())
    return held_out_loss(loops[0].model, text, DATA.sequence_length)


def report(found: dict[str, Any]) -> str:
    """What is there of it, since every setting is stored when it is done."""
    rows = []
    for outer, variant in itertools.product(OUTER, (*VARIANTS, EARLIER)):
        if f"{outer[0]} {outer[1]} {variant}" not in found:
            continue
        losses = found[f"{outer[0]} {outer[1]} {variant}"]
        on_time = found[f"{outer[0]} {outer[1]} {VARIANTS[0]}"]
        more = [a - b for a, b in zip(losses, on_time, strict=True)]
        mean, (extra, half) = float(np.mean(losses)), mean_and_half_width(more)
        rows.append([*outer, variant, f"{mean:.4f}", f"{extra:+.4f} ± {half:.4f}"])
    columns = ["outer rate", "momentum", "merges", "held-out loss", "against on time"]
    return (
        f"Two learners, {NUM_STEPS} steps, a merge every {INNER_STEPS}, {SLACK_STEPS} of slack; "
        f"held-out nats per byte over {SEEDS} seeds, paired; ± is 1.96 standard errors.\n\n"
        + table(columns, rows)
    )


def main() -> None:
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for outer, variant in itertools.product(OUTER, VARIANTS):
        name = f"{outer[0]} {outer[1]} {variant}"
        found[name] = [train(Setting(variant, outer, seed)) for seed in range(SEEDS)]
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(report(found))


if __name__ == "__main__":
    main()
