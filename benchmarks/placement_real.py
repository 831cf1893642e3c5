"""Placement of turns on real engines: throughput and hit rate by policy, with drafts and without.

    python -m benchmarks.placement_real [--model tiny|small] [--loads 64,8] [--seeds 1]

Three replicas in one process, each a real engine on a clock of its own (`placement_replica.py`);
dispatcher, trajectories, links and tools are those of the simulated benchmark (`placement.py`),
all lengths and times divided by `DIVISOR`. The model is a preset trained on tool dialogues for some
seconds. Noise is keyed, so all policies must bring the same tokens: that is checked. A finished run
is stored in results/placement_real.json and not repeated; the tables are placement_real.md.
"""

import argparse
import copy
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, geometric_mean

import torch

from benchmarks.placement_replica import RealReplica, Texts, calibrated_engine, scaled
from benchmarks.placement_world import (
    BASELINE,
    GROUP_SIZE,
    POLICIES,
    REPORT_S,
    Outcome,
    World,
    agentic,
)
from benchmarks.rollout_workload import trained_on_dialogues
from benchmarks.swarm import machine, table, write
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.rollout.engine import Engine
from p2pdiloco_daemon.rollouts.trajectories import ROWS_MAX

RESULTS = Path(__file__).parent / "results" / "placement_real"
NUM_REPLICAS = 3
DIVISOR = 8
LENGTH_MAX = 1024
"""Of a trajectory: what the model is trained on."""
CACHE_TOKENS = 16 * LENGTH_MAX
"""Too few for all that 64 trajectories would reuse beside the rows that run."""
RTT_S = 0.02 / DIVISOR
CACHE_AWARE = ("swarm", "WAR's score", "WAR, both")
"""Each alone and with drafts."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One run."""

    model: str
    load: int
    """Trajectories per replica, all begun at once."""
    policy: str
    drafts: bool
    seed: int

    @property
    def key(self) -> str:
        drafts = "drafts" if self.drafts else "no drafts"
        return f"{self.model}/{self.load}/{self.policy}/{drafts}/{self.seed}"


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a setting."""

    outcome: Outcome
    digest: str
    """Of all tokens."""
    cpu_s: float
    """What the run took, dispatcher and all."""
    num_drafted: int
    num_held: int
    """Of the drafted tokens."""


def run(setting: Setting, engine: Engine) -> Run:
    """On copies of this engine, whose caches are empty."""
    num_groups = setting.load * NUM_REPLICAS // GROUP_SIZE
    workload = scaled(agentic(num_groups, GROUP_SIZE, setting.seed), DIVISOR, LENGTH_MAX)
    texts, started = Texts(workload), time.process_time()
    replicas = {
        PeerId(f"r{index}"): RealReplica(copy.deepcopy(engine), texts, RTT_S, LENGTH_MAX)
        for index in range(NUM_REPLICAS)
    }
    outcome = World(workload, replicas, POLICIES[setting.policy], report_s=REPORT_S).run()
    return Run(
        outcome,
        texts.digest,
        time.process_time() - started,
        sum(replica.engine.num_drafted for replica in replicas.values()),
        sum(replica.engine.num_held for replica in replicas.values()),
    )


class Runs:
    """Finished ones, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs: dict[str, Run] = {}
        if path.exists():
            told = json.loads(path.read_text())["runs"]
            self._runs = {
                key: Run(**{**fields, "outcome": Outcome(**fields["outcome"])})
                for key, fields in told.items()
            }

    def has(self, setting: Setting) -> bool:
        return setting.key in self._runs

    def of(self, setting: Setting) -> Run:
        return self._runs[setting.key]

    def add(self, setting: Setting, run: Run) -> None:
        """Whatever the policy, the tokens are the same."""
        ours = setting.model, setting.load, setting.seed
        for key, other in self._runs.items():
            model, load, _policy, _drafts, seed = key.split("/")
            same = (model, int(load), int(seed)) != ours or other.digest == run.digest
            assert same, f"{setting.key} brought other tokens than {key}"
        self._runs[setting.key] = run

    def json(self) -> dict[str, object]:
        return {key: asdict(self._runs[key]) for key in sorted(self._runs)}


_INTRODUCTION = f"""# Placement of turns on real engines

Command: `python -m benchmarks.placement_real`. Three replicas in one process, each a real engine
(model, cache, radix tree of prefixes, admission) on a clock of its own, which is the processor time
of its steps on one thread; the real dispatcher, told what the engines measure of themselves; links
of {1000 * RTT_S:.1f} ms and tools, virtual. The work is that of the simulated benchmark with all
lengths and times divided by {DIVISOR}: groups of {GROUP_SIZE} with prompts of 125 to 375 tokens,
answers of 12 and observations of 32 on average, 4 to 14 turns by group, tools of 0.26 s, no
trajectory beyond {LENGTH_MAX:,} tokens. A cache holds {CACHE_TOKENS:,} tokens, rows ({ROWS_MAX} at
most) included: with 64 trajectories per replica too few for all that they would reuse.

Throughput is generated tokens per second of one step, relative to "{BASELINE}" without drafts on
the same trajectories, geometric mean over the seeds; in brackets the share of prompt tokens that
did not have to be computed. All runs of a load and seed brought the same tokens. The last table
has placement and drafts together over the better of the two alone."""


def report(runs: Runs, models: Sequence[str], loads: Sequence[int], seeds: int) -> Iterator[str]:
    """The tables, of what is there for all seeds."""
    yield f"{_INTRODUCTION} Seeds: {seeds}."
    for model in models:
        yield f"## {model}"
        columns = ["policy", "drafts", *(f"{load} per replica" for load in loads)]
        policies = [BASELINE, *CACHE_AWARE]
        yield table(
            columns,
            [
                [policy, "yes" if drafts else "no"]
                + [_cell(runs, model, load, policy, drafts, seeds) for load in loads]
                for policy, drafts in itertools.product(policies, (False, True))
            ],
        )
        yield table(
            ["together", *columns[2:]],
            [
                [policy] + [_together(runs, model, load, policy, seeds) for load in loads]
                for policy in CACHE_AWARE
            ],
        )


def _cell(runs: Runs, model: str, load: int, policy: str, drafts: bool, seeds: int) -> str:
    ours = [Setting(model, load, policy, drafts, seed) for seed in range(seeds)]
    ratio = _ratio(runs, ours)
    if ratio is None:
        return ""
    hits = fmean(runs.of(setting).outcome.hit_rate for setting in ours)
    return f"{ratio:.2f} ({hits:.2f})"


def _together(runs: Runs, model: str, load: int, policy: str, seeds: int) -> str:
    def ratio(policy: str, drafts: bool) -> float | None:
        return _ratio(runs, [Setting(model, load, policy, drafts, s) for s in range(seeds)])

    both, placed, drafted = ratio(policy, True), ratio(policy, False), ratio(BASELINE, True)
    if both is None or placed is None or drafted is None:
        return ""
    return f"{both / max(placed, drafted):.2f}"


def _ratio(runs: Runs, ours: Sequence[Setting]) -> float | None:
    """To the baseline; None while something is missing."""
    theirs = [Setting(s.model, s.load, BASELINE, False, s.seed) for s in ours]
    if not all(runs.has(setting) for setting in [*ours, *theirs]):
        return None
    return geometric_mean(
        runs.of(one).outcome.throughput / runs.of(other).outcome.throughput
        for one, other in zip(ours, theirs, strict=True)
    )


def measure(settings: Sequence[Setting], runs: Runs) -> Iterator[Setting]:
    """Runs those that are missing; yields each that it has added."""
    for setting in settings:
        if not runs.has(setting):
            runs.add(setting, run(setting, _engines(setting.model)[setting.drafts]))
            yield setting


@cache
def _engines(model: str) -> Mapping[bool, Engine]:
    """With drafts and without."""
    policy = trained_on_dialogues(model, LENGTH_MAX, windows=2, window_tokens=LENGTH_MAX // 2)
    return {
        drafts: calibrated_engine(policy, CACHE_TOKENS, drafts=drafts) for drafts in (False, True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", choices=["tiny", "small"])
    parser.add_argument("--loads", default="64,8")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loads = [int(load) for load in arguments.loads.split(",")]
    runs = Runs(RESULTS.with_suffix(".json"))
    for seed, load in itertools.product(range(arguments.seeds), loads):
        settings = [
            Setting(arguments.model, load, policy, drafts, seed)
            for drafts, policy in itertools.product((False, True), [BASELINE, *CACHE_AWARE])
        ]
        for setting in measure(settings, runs):
            done = runs.of(setting)
            print(f"{setting.key}: {done.outcome}, {done.cpu_s:.0f} CPU s", flush=True)
            _keep(runs, arguments.model, loads, arguments.seeds)


def _keep(runs: Runs, model: str, loads: Sequence[int], seeds: int) -> None:
    result = {"machine": machine(), "runs": runs.json()}
    write(RESULTS, result, "\n\n".join(report(runs, [model], loads, seeds)))


if __name__ == "__main__":
    main()
