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
    NOISE,
    PLAIN,
    ROUNDS,
    SHARES_FAILING,
    STRATEGIES,
    WORKERS,
    Outcome,
    Setting,
    Store,
    limit,
)

SETTLED_ROUNDS = ROUNDS // 2
"""Rounds at the end over which a level is averaged."""

Rows = Iterable[Sequence[str]]
Runs = dict[Setting, Outcome]


def write_report(results: Path) -> None:
    """Writes the tables beside what is stored."""
    sections = [part.strip() for part in _sections(Store(results))]
    results.with_suffix(".md").write_text("\n\n".join(sections) + "\n")


def _sections(store: Store) -> Iterator[str]:
    runs = store.runs()
    yield "# What gossip costs in agreement and in loss"
    yield (
        "Commands: `python -m benchmarks.gossip noise | order | bound | failing | report`. One"
        " process, the real topologies, mixes and outer step; exchanges are function calls in"
        " float32."
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
        found = {s.seed: o for s, o in runs.items() if s == Setting(strategy, s.seed)}
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
    """Of Nesterov and of plain outer steps, beside what noise alone would give."""
    rows = []
    for plain, outer in ((True, PLAIN), (False, (LEARNING_RATE, MOMENTUM))):
        for strategy, (_, size1, size2) in NOISE.items():
            ratios = _ratios(runs, strategy, plain)
            if ratios:
                theory = limit(size1, size2, WORKERS, *outer)
                told = [f"{outer[0]}, {outer[1]}", strategy, str(len(ratios)), _number(theory)]
                rows.append([*told, f"{mean(ratios):.2f}", _range(ratios)])
    return (
        "Mean squared distance to the mean before the mixes, over DiLoCo's with the same seed"
        f" (where it is the drift of one round), in the last {SETTLED_ROUNDS} rounds. For many"
        " workers and plain steps of rate 1 the bound of the paper is 1, 1.5 and 2; theory here is"
        f" for {WORKERS} workers whose inner steps are noise.\n\n"
    ) + _table(["outer rate, momentum", "strategy", "seeds", "theory", "measured", "range"], rows)


def _ratios(runs: Runs, strategy: str, plain: bool) -> list[float]:
    seeds = [s.seed for s in runs if s == Setting(strategy, s.seed, plain=plain)]
    found = []
    for seed in seeds:
        base = runs.get(Setting("DiLoCo", seed, plain=plain))
        mine = runs[Setting(strategy, seed, plain=plain)]
        if base and base.drift and mine.drift:
            found.append(_level(mine.drift) / _level(base.drift))
    return found


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _failing(runs: Runs) -> str:
    rows = []
    for strategy in STRATEGIES:
        for share in (0.0, *SHARES_FAILING):
            found = _with_failures(runs, strategy, share)
            if not found or not _with_failures(runs, strategy, SHARES_FAILING[0]):
                continue
            more = [_final(o) - _final(whole) for o, whole in found]
            rows.append(
                [
                    strategy,
                    f"{share:.0%}",
                    str(len(found)),
                    f"{mean(_final(o) for o, _ in found):.4f}",
                    f"{mean(more):+.4f}",
                    f"{mean(o.of_workers[-1][1] for o, _ in found):.4f}",
                    f"{mean(_level(o.outputs) for o, _ in found):.4f}",
                ]
            )
    return (
        "Each exchange of a round fails with this probability, for both of its ends, which keep the"
        " identity in its place; means over seeds. `factored`: hypercube as Mix1, and as Mix2"
        " everybody who is in time, which is DiLoCo while nothing fails. `DiLoCo` here has no Mix1"
        " that would bring workers together again after a failed exchange.\n\n"
    ) + _table(
        [
            "strategy",
            "failing",
            "seeds",
            "loss",
            "more than without",
            "workers' own",
            "JS distance",
        ],
        rows,
    )


def _with_failures(runs: Runs, strategy: str, share: float) -> list[tuple[Outcome, Outcome]]:
    """(outcome, the same without failures) by seed."""
    whole = "DiLoCo" if strategy == "factored" else strategy
    found = []
    for setting in [s for s in runs if not s.plain and s.failing == share]:
        base = runs.get(Setting(whole, setting.seed))
        if setting.strategy == (strategy if share else whole) and base:
            found.append((runs[setting], base))
    return found


def _foretelling(runs: Runs) -> str:
    """Rank correlations across runs, within each round, so that time explains nothing."""
    excess, outputs, parameters = [], [], []
    for setting, outcome in runs.items():
        base = runs.get(Setting("DiLoCo", setting.seed))
        if base and outcome.outputs and not setting.plain and outcome is not base:
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
