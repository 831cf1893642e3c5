"""The tables and the picture of the quality study, from what `benchmarks.quality` has stored."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from benchmarks.quality_outcomes import Store
from benchmarks.quality_settings import (
    ADMITS,
    LEARNERS,
    MERGES,
    SPREAD_SYNC_STEPS,
    SWEEP,
    WIRES,
    Setting,
    Swarm,
    merge_rules,
    spread,
    wires,
)

FINAL_STEPS = 1000
SWEEP_STEPS = 300
MAX_SEEDS = 10

Rows = Iterable[Sequence[str]]
Study = Callable[[Sequence[int]], list[Setting]]


def write_report(store: Store, directory: Path) -> None:
    """Writes quality.md and quality.svg."""
    text = "\n\n".join(part.strip() for part in _sections(store)) + "\n"
    (directory / "quality.md").write_text(text)
    _draw(store, directory / "quality.svg")


def _sections(store: Store) -> Iterator[str]:
    best = Swarm()
    yield "# Does merging pay? Held-out loss of a swarm"
    yield (
        f"Defaults of the run spec, chosen here: merge `{best.merge}`, outer learning rate"
        f" {best.outer_learning_rate}, momentum {best.outer_momentum}, H = {best.inner_steps},"
        f" P = {best.num_fragments}, tau = {best.overlap_steps}, wire `{best.wire}`."
    )
    yield (
        "One process, the real inner loop, merge, codec and outer step; 1.02 M parameter Llama on"
        " bytes of the King James Bible, 4 learners with 4 x 128 bytes per step each, AdamW 3e-3,"
        " constant after 20 steps of warm-up, 1 thread of a shared x86-64 machine. Nats per byte on"
        " 160 held-out windows of 128 bytes; the swarm is judged by its anchors. *Gap closed*: how"
        " far the swarm gets from one learner alone (0 %) to data parallel with the same tokens"
        " (100 %) at equal local steps. Command: `python -m benchmarks.quality`."
    )
    yield (
        "To be read with care: the baselines use the swarm's inner learning rate, none of their own"
        " was tried. Everything but the first table is one seed; one run repeated with other"
        " rounding (`--compile`, used for some of the runs) came out 0.016 apart, so smaller"
        " differences, as between the wire formats, are noise."
    )
    yield "## Against one learner and data parallel\n\n" + _final(store)
    yield f"## Outer settings, {SWEEP_STEPS} steps, seed 0\n\n" + _sweep(store)
    yield "## Merge rule\n\n" + _variants(store, "merge", list(MERGES), merge_rules)
    yield "## Wire format\n\n" + _variants(store, "wire", list(WIRES), wires)
    yield (
        "## Whom a round waits for\n\nStep times 1, 1, 1.18, 1.18, each step varying by 10 %;"
        f" {SPREAD_SYNC_STEPS} steps from a round's close to the new fragment. *Goodput*: share of"
        " the learners' time in steps. When all wait, they do so every H/P = 2 steps, and are"
        " judged at equal steps, which take them longer; otherwise nobody waits.\n\n"
        + _spread(store)
    )


_ADMIT_WORDS = {
    "first": "with the first (K = 1)",
    "grace": "after the grace window (K = 1)",
    "wait": "with all, who wait (K = 4)",
}


def _spread(store: Store) -> str:
    """What was stored of each policy, at the last step that all of a seed's have reached. Where no
    goodput was counted, nobody waited.
    """
    rows = []
    for seed in range(MAX_SEEDS):
        runs = [(admit, store.get(run)) for admit, run in zip(ADMITS, spread([seed]), strict=True)]
        found = [(admit, outcome) for admit, outcome in runs if outcome]
        step = min((outcome.curve[-1][0] for _, outcome in found), default=0)
        for admit, outcome in found if len(found) > 1 else ():
            goodput = 1.0 if outcome.goodput is None else outcome.goodput
            figures = [f"{outcome.at(step):.4f}", f"{goodput:.1%}", f"{outcome.merged:.2f}"]
            rows.append([_ADMIT_WORDS[admit], f"{seed}", f"{step}", *figures])
    heads = ["closes", "seed", "steps", "loss", "goodput", "contributions per merge"]
    return _table(heads, rows)


def _final(store: Store) -> str:
    rows: list[list[str]] = []
    shares, excesses = [], []
    steps = sorted({step for seed in range(MAX_SEEDS) for step in _complete_steps(store, seed)})
    for step in (step for step in (300, FINAL_STEPS, 2000, 3000, 4000) if step in steps):
        for seed in range(MAX_SEEDS):
            losses = _losses(store, seed, Swarm(), step)
            if losses is None:
                continue
            alone, swarm, parallel = losses
            share, excess = (alone - swarm) / (alone - parallel), swarm / parallel - 1
            if step == FINAL_STEPS:
                shares.append(share)
                excesses.append(excess)
            rows.append([f"{step}", f"{seed}", *_shown(losses), f"{share:.0%}", f"{excess:+.1%}"])
    heads = ["steps", "seed", "alone", "swarm", "data parallel", "gap closed", "to data parallel"]
    table = _table(heads, rows)
    if len(shares) < 2:
        return table
    return table + (
        f"\n\nAfter {FINAL_STEPS} steps, {len(shares)} seeds: gap closed {mean(shares):.0%}"
        f" (standard deviation {stdev(shares):.0%}), loss {mean(excesses):+.1%} to data parallel."
    )


def _complete_steps(store: Store, seed: int) -> set[int]:
    runs = [store.get(run) for run in (Setting(seed, Swarm()), *_baselines(seed))]
    curves = [dict(run.curve) if run else {} for run in runs]
    return set(curves[0]).intersection(*curves[1:])


def _baselines(seed: int) -> tuple[Setting, Setting]:
    return Setting(seed), Setting(seed, batches=LEARNERS)


def _losses(store: Store, seed: int, swarm: Swarm, step: int) -> tuple[float, float, float] | None:
    """(alone, swarm, data parallel)"""
    alone, parallel = (store.find(run, step) for run in _baselines(seed))
    loss = store.find(Setting(seed, swarm), step)
    if alone is None or parallel is None or loss is None:
        return None
    return alone, loss, parallel


def _sweep(store: Store) -> str:
    rows = []
    for swarm in SWEEP:
        losses = _losses(store, 0, swarm, SWEEP_STEPS)
        if losses is not None:
            alone, loss, parallel = losses
            rows.append(
                [
                    swarm.merge,
                    f"{swarm.outer_learning_rate}, {swarm.outer_momentum}",
                    f"{swarm.inner_steps}, {swarm.num_fragments}, {swarm.overlap_steps}",
                    f"{loss:.4f}",
                    f"{(alone - loss) / (alone - parallel):.0%}",
                ]
            )
    rows.sort(key=lambda row: row[3])
    return _table(["merge", "lr, momentum", "H, P, tau", "loss", "gap closed"], rows)


def _variants(store: Store, head: str, names: list[str], study: Study) -> str:
    """One row per variant of a study, at the largest step that all its variants have reached."""
    rows = []
    for seed in range(MAX_SEEDS):
        runs = [store.get(run) for run in study([seed])]
        found = [run for run in runs if run is not None]
        if len(found) < len(names):
            continue
        step = max(set.intersection(*({step for step, _ in run.curve} for run in found)))
        for name, run in zip(names, found, strict=True):
            loss = dict(run.curve)[step]
            size = f"{(run.payload_bytes or 0) / 1e3:.0f} kB"
            rows.append([name, f"{seed}", f"{step}", f"{loss:.4f}", f"{run.merged:.2f}", size])
    heads = [head, "seed", "steps", "loss", "contributions per merge", "mean contribution"]
    return _table(heads, rows)


def _shown(losses: Iterable[float]) -> list[str]:
    return [f"{loss:.4f}" for loss in losses]


def _table(heads: Sequence[str], rows: Rows) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _draw(store: Store, path: Path) -> None:
    """Loss over local steps: every seed of the swarm and both baselines."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullFormatter, ScalarFormatter

    matplotlib.rcParams["svg.hashsalt"] = "quality"
    figure, axes = plt.subplots(figsize=(7, 4))
    lines: list[tuple[str, str, Callable[[int], Setting]]] = [
        ("one learner alone", "#999999", lambda seed: Setting(seed)),
        ("swarm of 4", "#d62728", lambda seed: Setting(seed, replace(Swarm()))),
        ("data parallel, same tokens", "#1f77b4", lambda seed: Setting(seed, batches=LEARNERS)),
    ]
    for label, colour, setting in lines:
        runs = [store.get(setting(seed)) for seed in range(MAX_SEEDS)]
        for number, run in enumerate(run for run in runs if run and len(run.curve) > 3):
            steps, losses = zip(*run.curve, strict=True)
            axes.plot(steps, losses, color=colour, lw=1.2, label=None if number else label)
    axes.set(xlabel="local steps", ylabel="held-out nats per byte", yscale="log", xscale="log")
    for axis, ticks in ((axes.xaxis, (100, 300, 1000, 4000)), (axes.yaxis, (1.2, 1.5, 2.0, 2.4))):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
