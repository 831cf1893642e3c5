"""Whether drafts that pay are as good as the best fixed ones at every load, from 1 to 64 at once.

    python -m benchmarks.rollout_sweep [LOAD ...]

The engine plays the dialogues of `rollout_workload` with the trained preset: without drafts, with
every draft tried up to 4, 8 or 16 tokens, and with as much of each as its cost table says that it
pays. All variants must produce the same tokens. Loads are added to those that earlier runs found,
and the picture is drawn anew (matplotlib is the `benchmarks` extra).

A figure is the median of runs in turns: generated tokens per second of process time on one thread.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.rollout import measured
from benchmarks.rollout_variants import Capped, Variant, with_engine
from benchmarks.rollout_workload import Policy, trained
from benchmarks.swarm import machine, table, write
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "rollout_sweep"
LOADS = (1, 2, 4, 8, 16, 32, 64)
FIXED = (4, 8, 16)
NONE, PAYING = "engine without drafts", "engine, drafts that pay"
COLOURS = {NONE: "#8c8c8c", 4: "#9ecae1", 8: "#4a98c9", 16: "#1f6cb0", PAYING: "#b2182b"}


def variants() -> dict[str, Variant]:
    fixed: dict[str, Variant] = {
        _fixed(length): partial(with_engine, drafter=partial(Capped, length), calibrated=False)
        for length in FIXED
    }
    return {NONE: partial(with_engine, drafter=None), **fixed, PAYING: with_engine}


def main(loads: Sequence[int]) -> None:
    torch.set_num_threads(1)
    policy = trained()
    for load in loads:
        keep(policy, load)


def keep(policy: Policy, load: int) -> None:
    """Measures a load, and writes report and picture anew."""
    kept = RESULTS.with_suffix(".json")
    result = json.loads(kept.read_text()) if kept.exists() else {"loads": {}}
    outcomes = measured(policy, load, variants())
    result["machine"] = machine()
    result["loads"][str(load)] = {
        name: [round(outcome.rate, 1) for outcome in runs] for name, runs in outcomes.items()
    }
    write(RESULTS, result, report(result))
    draw(result, RESULTS.with_suffix(".svg"))


def report(result: JsonObject) -> str:
    rows = [
        [
            load,
            len(result["loads"][str(load)][PAYING]),
            *(f"{rates[name]:.0f}" for name in variants()),
            f"{rates[PAYING] / max(rate for name, rate in rates.items() if name != PAYING):.2f}",
        ]
        for load, rates in medians(result)
    ]
    head = (
        "Generated tokens per second of process time on one thread by trajectories at once, tiny"
        " preset trained on the dialogues; medians of runs in turns. The last column is the rate of"
        " drafts that pay over the best of the others at that load; a single run may be 10 % off."
    )
    return f"{head}\n\n{table(['at once', 'runs', *variants(), 'ratio'], rows)}"


def medians(result: JsonObject) -> list[tuple[int, dict[str, float]]]:
    """(load, tokens/s by variant), by growing load."""
    loads = sorted((int(load), runs) for load, runs in result["loads"].items())
    return [(load, {name: median(r) for name, r in runs.items()}) for load, runs in loads]


def draw(result: JsonObject, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "sweep"
    figure, axes = pyplot.subplots(figsize=(7, 4.5), facecolor="white")
    points = medians(result)
    for name in variants():
        fixed = {_fixed(length): length for length in FIXED}
        colour = COLOURS[fixed.get(name, name)]
        rates = [rates[name] for _load, rates in points]
        axes.plot([load for load, _rates in points], rates, "o-", color=colour, label=name, lw=2)
    axes.set_xscale("log", base=2)
    axes.set_xticks([load for load, _rates in points], [str(load) for load, _rates in points])
    axes.set_xlabel("trajectories at once")
    axes.set_ylabel("tokens per second of process time")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def _fixed(length: int) -> str:
    return f"engine, drafts up to {length}"


if __name__ == "__main__":
    main([int(load) for load in sys.argv[1:]] or LOADS)
