"""The tables of the gossip study, from what `benchmarks.gossip` has stored."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.gossip import (
    INNER_STEPS,
    LEARNING_RATE,
    MOMENTUM,
    NESTEROV,
    ROUNDS,
    SHARES_FAILING,
    STRATEGIES,
    WORKERS,
    Outcome,
    Setting,
    Store,
)

SETTLED_ROUNDS = ROUNDS // 2
"""Rounds at the end over which a level is averaged."""

Rows = Iterable[Sequence[str]]
Runs = dict[Setting, Outcome]


def write_report(store: Store, path: Path) -> None:
    """Writes gossip.md."""
    path.write_text("\n\n".join(part.strip() for part in _sections(store)) + "\n")


def _sections(store: Store) -> Iterator[str]:
    runs = store.runs()
    yield "# What gossip costs in agreement and in loss"
    yield (
        "Commands: `python -m benchmarks.gossip noise | order | failing | report`. One process, the"
        " real topologies, mixes and outer step; exchanges are function calls in float32."
    )
    yield "## Disagreement from noise alone\n\n" + _noise(store.read()["noise"])
    if not runs:
        yield "No training run is stored yet."
        return
    yield (
        f"## Training\n\nLlama of 0.12 M parameters (64 wide, 2 layers) on bytes of the King James"
        f" Bible; {WORKERS} workers with 4 x 64 bytes per step each; H = {INNER_STEPS},"
        f" {ROUNDS} rounds, {ROUNDS * INNER_STEPS} steps per worker; inner AdamW 3e-3, outer"
        f" Nesterov {LEARNING_RATE}, {MOMENTUM}, merged by mean; Mix2 of GlobalM1LocalM2 in random"
        " pairs. Held-out nats per byte. Far smaller and shorter than the paper's (1.5B parameters,"
        " H = 100): of use for the order and the mechanism, not for the size of the gaps."
    )
    yield "### Final loss\n\n" + _order(runs)
    yield "### Disagreement in training, and the bound\n\n" + _drift(runs)
    yield "### Exchanges that fail\n\n" + _failing(runs)
    yield "### What foretells loss: outputs or parameters\n\n" + _foretelling(runs)


def _noise(limits: Sequence[dict[str, float | None]]) -> str:
    rows = [
        [
            str(row["name"]),
            str(row["workers"]),
            *(_number(row[key]) for key in ("plain_known", "plain", "nesterov_known", "nesterov")),
        ]
        for row in limits
    ]
    return (
        "Mean squared distance to the mean before the mixes, in drifts of one round; inner steps"
        " are independent noise. For plain steps theory is the paper's bound"
        " 1 + rho2 / (1 - rho1), with the exact contraction for this number of workers: 1, 1.5, 2"
        " and 3 for many. Private Nesterov momentum remembers old differences; its limit is ours"
        f" (`optim/mixing.py`), here with outer learning rate {NESTEROV[0]} and momentum"
        f" {NESTEROV[1]}.\n\n"
    ) + _table(["strategy", "workers", "theory", "measured", "Nesterov theory", "measured"], rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _order(runs: Runs) -> str:
    rows = []
    for strategy in STRATEGIES:
        found = {s.seed: o for s, o in runs.items() if s.strategy == strategy and not s.failing}
        if not found:
            continue
        against = [seed for seed in found if Setting("Sync-DP", seed) in runs]
        gaps = [_final(found[s]) - _final(runs[Setting("Sync-DP", s)]) for s in against]
        to_diloco = [
            _final(o) - _final(runs[Setting("DiLoCo", s)])
            for s, o in found.items()
            if Setting("DiLoCo", s) in runs
        ]
        workers = [o.of_workers[-1][1] for o in found.values() if o.of_workers]
        rows.append(
            [
                strategy,
                ", ".join(f"{_final(found[seed]):.4f}" for seed in sorted(found)),
                f"{mean(gaps):+.4f}" if gaps else "-",
                f"{mean(to_diloco):+.4f}" if to_diloco else "-",
                f"{mean(workers):.4f}" if workers else "-",
            ]
        )
    return (
        "Loss of the workers' mean, by seed; gaps are means over the seeds. The paper's gaps to"
        " Sync-DP at 1.5B and 10B tokens: DiLoCo +0.062, GlobalM1LocalM2 +0.070, GlobalM1 +0.102"
        " nats per token.\n\n"
    ) + _table(["strategy", "loss", "to Sync-DP", "to DiLoCo", "workers' own loss"], rows)


def _drift(runs: Runs) -> str:
    rows = []
    for setting, outcome in runs.items():
        base = runs.get(Setting("DiLoCo", setting.seed))
        if base is None or setting.failing or not outcome.drift:
            continue
        ratio = _level(outcome.drift) / _level(base.drift)
        rows.append([setting.strategy, str(setting.seed), f"{ratio:.2f}"])
    return (
        "Mean squared distance before the mixes over DiLoCo's (where it is the drift of one round),"
        f" in the last {SETTLED_ROUNDS} rounds.\n\n"
    ) + _table(["strategy", "seed", "disagreement"], rows)


def _failing(runs: Runs) -> str:
    rows = []
    for setting, outcome in runs.items():
        whole = Setting(setting.strategy, setting.seed)
        if not outcome.outputs or setting.strategy == "DiLoCo":
            continue
        if not any(Setting(setting.strategy, setting.seed, f) in runs for f in SHARES_FAILING):
            continue
        rows.append(
            (
                (setting.strategy, setting.seed, setting.failing),
                [
                    setting.strategy,
                    str(setting.seed),
                    f"{setting.failing:.0%}",
                    f"{_final(outcome):.4f}",
                    f"{_final(outcome) - _final(runs[whole]):+.4f}" if whole in runs else "-",
                    f"{outcome.of_workers[-1][1]:.4f}",
                    f"{_level(outcome.outputs):.4f}",
                ],
            )
        )
    return (
        "Each exchange of a round fails with this probability, for both of its ends.\n\n"
    ) + _table(
        ["strategy", "seed", "failing", "loss", "more than without", "workers' own", "JS distance"],
        [row for _, row in sorted(rows)],
    )


def _foretelling(runs: Runs) -> str:
    """Rank correlations across runs, within each round, so that time explains nothing."""
    excess, outputs, parameters = [], [], []
    for setting, outcome in runs.items():
        base = runs.get(Setting("DiLoCo", setting.seed))
        if base and outcome.outputs and setting.strategy != "DiLoCo":
            excess.append(np.subtract(outcome.training, base.training))
            outputs.append(outcome.outputs)
            parameters.append(outcome.parameters)
    if len(excess) < 4:
        return "Too few runs."
    rounds = range(2, ROUNDS)
    found = {
        name: mean(
            _rank_correlation([run[t] for run in measure], [run[t] for run in excess])
            for t in rounds
        )
        for name, measure in (("outputs", outputs), ("parameters", parameters))
    }
    return (
        f"Rank correlation, over {len(excess)} runs and within each round, between disagreement at"
        " the start of a round and its training loss above DiLoCo's with the same seed:"
        f" Jensen-Shannon distance of outputs {found['outputs']:.2f}, L2 distance of parameters"
        f" {found['parameters']:.2f}."
    )


def _rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's."""
    ranks = [np.argsort(np.argsort(values)) - (len(values) - 1) / 2 for values in (xs, ys)]
    return float(ranks[0] @ ranks[1] / np.square(ranks[0]).sum())


def _final(outcome: Outcome) -> float:
    return outcome.of_mean[-1][1]


def _level(values: Sequence[float]) -> float:
    return mean(values[-SETTLED_ROUNDS:])


def _table(header: Sequence[str], rows: Rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
