"""Placement of turns compared, simulated: least request and sticky, WAR's score, the swarm's form.

    python -m benchmarks.placement [--loads 4,16,32,64] [--seeds 3]

Nothing here runs a model. The dispatcher is the real one (`p2pdiloco.protocol.placement`); replicas
are `placement_engine.py`, whose steps take what a cost table says; each policy rolls out the same
trajectories (`placement_world.py`) on the same replicas with empty caches. A finished run is stored
in results/placement.json and not repeated; the tables are placement.md. With real engines:
`placement_real.py`.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, geometric_mean

from benchmarks.placement_engine import Machine, SimulatedEngine
from benchmarks.placement_world import (
    BASELINE,
    GROUP_SIZE,
    POLICIES,
    Outcome,
    World,
    agentic,
)
from p2pdiloco.protocol.naming import PeerId

RESULTS = Path(__file__).parent / "results"

REPLICAS: dict[str, Sequence[Machine]] = {
    "alike": [Machine(f"r{i}", 0.02, 0.0002, 32, 60_000, 0.02) for i in range(3)],
    "unlike": [
        Machine("fast", 0.02, 0.0002, 32, 60_000, 0.02),
        Machine("half", 0.04, 0.0004, 32, 40_000, 0.05),
        Machine("quarter", 0.08, 0.0008, 16, 30_000, 0.1),
    ],
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One run."""

    replicas: str
    load: int
    """Trajectories per replica, all begun at once."""
    policy: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.replicas}/{self.load}/{self.policy}/{self.seed}"

    def run(self) -> Outcome:
        machines = REPLICAS[self.replicas]
        num_groups = max(1, self.load * len(machines) // GROUP_SIZE)
        workload = agentic(num_groups, GROUP_SIZE, self.seed)
        replicas = {PeerId(machine.name): SimulatedEngine(machine) for machine in machines}
        return World(workload, replicas, POLICIES[self.policy]).run()


class Store:
    """Finished runs, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Outcome]:
        if not self._path.exists():
            return {}
        table = json.loads(self._path.read_text())
        return {key: Outcome(**outcome) for key, outcome in table.items()}

    def add(self, key: str, outcome: Outcome) -> None:
        runs = {**self.read(), key: outcome}
        table = {name: asdict(runs[name]) for name in sorted(runs)}
        self._path.write_text(json.dumps(table, indent=1) + "\n")


_INTRODUCTION = f"""# Placement of turns, simulated

Command: `python -m benchmarks.placement`. No model ran and no network: the real dispatcher, and
replicas whose steps take what a cost table says (20 ms, and 200 us per token, on the fast one).
Agentic trajectories in groups of {GROUP_SIZE}: prompts of 1,000 to 3,000 tokens, answers of 80,
observations of 200, tools of 1.5 s on average with long tails, 4 to 14 turns by group. Throughput
is generated tokens per second of one step, relative to "{BASELINE}" on the same trajectories,
geometric mean over the seeds; in brackets the share of prompt tokens that were cached."""


def report(store: Store, loads: Sequence[int], seeds: Sequence[int]) -> Iterator[str]:
    """The tables, of settings of which all runs are there."""
    runs = store.read()
    yield f"{_INTRODUCTION} {len(seeds)} seeds."
    for name, machines in REPLICAS.items():
        sizes = ", ".join(f"{m.num_rows} rows and {m.cache_tokens:,} tokens" for m in machines)
        yield f"## Three replicas, {name}\n\nCaches: {sizes}."
        complete = [
            load
            for load in loads
            if all(Setting(name, load, p, s).key in runs for p in POLICIES for s in seeds)
        ]
        header = "| policy | " + " | ".join(f"{load} per replica" for load in complete) + " |"
        rows = [header, "| --- |" + " --- |" * len(complete)]
        for policy in POLICIES:
            cells = [_cell(runs, name, load, policy, seeds) for load in complete]
            rows.append(f"| {policy} | " + " | ".join(cells) + " |")
        yield "\n".join(rows)


def _cell(
    runs: dict[str, Outcome], replicas: str, load: int, policy: str, seeds: Sequence[int]
) -> str:
    ours = [runs[Setting(replicas, load, policy, seed).key] for seed in seeds]
    theirs = [runs[Setting(replicas, load, BASELINE, seed).key] for seed in seeds]
    ratios = [one.throughput / other.throughput for one, other in zip(ours, theirs, strict=True)]
    return f"{geometric_mean(ratios):.2f} ({fmean(run.hit_rate for run in ours):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", default="4,16,32,64")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    loads, seeds = [int(load) for load in arguments.loads.split(",")], range(arguments.seeds)
    store = Store(RESULTS / "placement.json")
    for seed, load, replicas, policy in itertools.product(seeds, loads, REPLICAS, POLICIES):
        setting = Setting(replicas, load, policy, seed)
        if setting.key not in store.read():
            outcome = setting.run()
            store.add(setting.key, outcome)
            print(
                f"{setting.key}: {outcome.seconds:.0f} s, hits {outcome.hit_rate:.2f}", flush=True
            )
    tables = "\n\n".join(report(store, loads, seeds)) + "\n"
    (RESULTS / "placement.md").write_text(tables)
    print(tables)


if __name__ == "__main__":
    main()
