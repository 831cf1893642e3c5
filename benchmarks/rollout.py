"""What a rollout engine on one core brings: against transformers, and with drafts against without.

    python -m benchmarks.rollout tiny 1 8             the 1.02M preset, 1 and 8 trajectories at once
    python -m benchmarks.rollout CHECKPOINT_DIR 1     a pretrained checkpoint in Hugging Face format

The workload is `rollout_workload`'s; there are two epochs over the same tasks, as in RL, and in the
second the drafter knows the first one's answers. Sampling is at temperature 1.

All variants of a load run in turns, some rounds; the figures are medians of generated tokens per
second of process time on one thread, so that other programs on the machine matter little. The
engine's variants must produce the same tokens, all at once or one trajectory at a time: that is
checked. What transformers has draws its own tokens. `generate` computes each turn's history anew;
"without reuse" is the engine with that handicap. Continuous batching keeps prefixes.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.rollout_variants import (
    Outcome,
    Variant,
    with_continuous_batching,
    with_engine,
    with_generate,
)
from benchmarks.rollout_workload import Policy, pretrained, trained
from benchmarks.swarm import machine, table, write
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "rollout"
BASE = "engine without drafts"
COST = "cost of 4 drafts each"


def main(source: str, loads: Sequence[int]) -> None:
    torch.set_num_threads(1)
    policy = trained() if source == "tiny" else pretrained(Path(source))
    for load in loads:
        compare(policy, load)


def compare(policy: Policy, load: int) -> None:
    """Measures all variants at a load, and writes the report anew."""
    variants: dict[str, Variant] = {
        "transformers generate": with_generate,
        "transformers continuous batching": with_continuous_batching,
        "engine without drafts or reuse": partial(with_engine, drafter=None, reuse=False),
        BASE: partial(with_engine, drafter=None),
        "engine, drafts that pay": with_engine,
    }
    if load > 1:
        alone = partial(with_engine, drafter=None, at_once=1)
        variants["engine without drafts, one at a time"] = alone
    keep(policy, load, measured(policy, load, variants))


def measured(policy: Policy, load: int, variants: dict[str, Variant]) -> dict[str, list[Outcome]]:
    """The outcomes of each variant; the engine's must agree about the tokens."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in variants}
    for _ in range(policy.workload.rounds):
        for name, run in variants.items():
            outcomes[name].append(run(policy, load))
            print(policy.name, load, name, round(outcomes[name][-1].rate, 1), file=sys.stderr)
    digests = {o.digest for name, runs in outcomes.items() for o in runs if "engine" in name}
    assert len(digests) == 1, "the engine's variants disagree about tokens"
    return outcomes


def keep(policy: Policy, load: int, outcomes: dict[str, list[Outcome]]) -> None:
    """Adds the load to what earlier runs found, and writes the report anew."""
    kept = RESULTS.with_suffix(".json")
    result = json.loads(kept.read_text()) if kept.exists() else {}
    result.setdefault(policy.name, {})[str(load)] = {
        "machine": machine(),
        "workload": asdict(policy.workload),
        "variants": {
            name: [{"tokens_per_s": o.rate, "tokens": o.num_tokens, **o.detail} for o in runs]
            for name, runs in outcomes.items()
        },
    }
    write(RESULTS, result, report(result))


def report(result: JsonObject) -> str:
    rows: list[list[object]] = []
    for name, loads in result.items():
        for load, measured in loads.items():
            rates = {
                variant: median(run["tokens_per_s"] for run in runs)
                for variant, runs in measured["variants"].items()
            }
            work = measured["workload"]
            shape = f"{work['turns']} turns of {work['turn_tokens']}"
            for variant, rate in rates.items():
                runs = measured["variants"][variant]
                steps = runs[-1].get("tokens per step", "")
                told = [f"{rate:.1f}", f"{rate / rates[BASE]:.2f}", steps, runs[-1].get(COST, "")]
                rows.append([name, load, shape, variant, len(runs), *told])
    columns = ["model", "at once", "at most", "variant"]
    columns += ["runs", "tokens/s", "ratio", "per step", COST]
    head = (
        "Rollout throughput on one thread: generated tokens per second of process time, medians of"
        " runs in turns, at temperature 1, two epochs over the same tasks. The ratio is to the"
        f" {BASE}, with the same tokens. `per step` counts the tokens of a step; the last column"
        " says how much longer a step takes that tries 4 drafts for each sequence."
    )
    return f"{head}\n\n{table(columns, rows)}"


if __name__ == "__main__":
    main(sys.argv[1], [int(load) for load in sys.argv[2:]])
