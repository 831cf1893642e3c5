"""Placement of turns compared, simulated: least request and sticky, WAR's score, the swarm's form.

    python -m benchmarks.placement [--loads 4,16,32,64] [--seeds 3]

Nothing here runs a model. The dispatcher is the real one (`p2pdiloco.protocol.placement`); replicas
are `placement_engine.py`, whose steps take what a cost table says; each policy rolls out the same
trajectories, with the same answers, tool times and links, on the same replicas with empty caches. A
finished run is stored in results/placement.json and not repeated; the tables are placement.md.
"""

import argparse
import heapq
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, geometric_mean

from benchmarks.placement_engine import Job, Machine, SimulatedEngine
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.placement import Placement, Rules
from p2pdiloco.protocol.turns import (
    Event,
    Load,
    LoadReported,
    Place,
    Step,
    TimePassed,
    TrajectoryEnded,
    TurnFinished,
    TurnId,
    TurnReady,
)

RESULTS = Path(__file__).parent / "results"
GROUP_SIZE = 8
NEVER = 1e9
"""Seconds: nothing is withdrawn here, so that every policy does the same work."""

REPLICAS: dict[str, Sequence[Machine]] = {
    "alike": [Machine(f"r{i}", 0.02, 0.0002, 32, 60_000, 0.02) for i in range(3)],
    "unlike": [
        Machine("fast", 0.02, 0.0002, 32, 60_000, 0.02),
        Machine("half", 0.04, 0.0004, 32, 40_000, 0.05),
        Machine("quarter", 0.08, 0.0008, 16, 30_000, 0.1),
    ],
}

BASELINE = "least request, sticky"
POLICIES: dict[str, Rules] = {
    BASELINE: Rules(form="war", threshold=NEVER, act_s_max=NEVER, step_s_max=NEVER),
    "WAR's score": Rules(form="war", threshold=0.0, act_s_max=NEVER, step_s_max=NEVER),
    "WAR, both": Rules(form="war", act_s_max=NEVER, step_s_max=NEVER),
    "swarm": Rules(act_s_max=NEVER, step_s_max=NEVER),
    "swarm, short first": Rules(order="short first", act_s_max=NEVER, step_s_max=NEVER),
    "swarm, long first": Rules(order="long first", act_s_max=NEVER, step_s_max=NEVER),
}


@dataclass(frozen=True, slots=True)
class Turn:
    new_tokens: int
    observed_tokens: int
    """Of the environment's answer."""
    act_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    step: Step
    turns: Sequence[Sequence[Turn]]
    """Of each trajectory."""

    @property
    def num_new_tokens(self) -> int:
        return sum(turn.new_tokens for turns in self.turns for turn in turns)


def agentic(num_groups: int, group_size: int, seed: int) -> Workload:
    """Tool-using trajectories: long prompts, short answers, turns with a long tail."""
    rng = random.Random(seed)
    prompts = [rng.randint(1000, 3000) for _ in range(num_groups)]
    turns = []
    for _ in range(num_groups):
        mean_turns = rng.uniform(4, 14)
        for _ in range(group_size):
            num = min(40, max(1, round(mean_turns * rng.lognormvariate(0, 0.4))))
            turns.append([_turn(rng) for _ in range(num)])
    return Workload(Step(number=0, prompt_tokens=tuple(prompts), group_size=group_size), turns)


def _turn(rng: random.Random) -> Turn:
    return Turn(
        max(4, round(80 * rng.lognormvariate(0, 0.6))),
        max(8, round(200 * rng.lognormvariate(0, 0.7))),
        1.5 * rng.lognormvariate(0, 0.8),
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one step."""

    seconds: float
    """Simulated, to the end of the last trajectory."""
    num_new_tokens: int
    num_prefilled: int
    """Prompt tokens that were computed."""
    hit_rate: float
    """Share of all turns' prompt tokens that were not."""
    dispatcher_ms: float
    """Real time that the dispatcher took per event."""

    @property
    def throughput(self) -> float:
        """Generated tokens per second."""
        return self.num_new_tokens / self.seconds


class World:
    """One step on simulated replicas."""

    def __init__(self, workload: Workload, machines: Sequence[Machine], rules: Rules) -> None:
        self.workload = workload
        self.now = 0.0
        self.engines = {PeerId(machine.name): SimulatedEngine(machine) for machine in machines}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._placement = Placement(workload.step, rules, 0.0, ask=list(self.engines))
        self._reused = self._prompts = self._events = 0
        self._decided_s = 0.0
        self._deadline = math.inf

    def run(self) -> Outcome:
        for name, engine in self.engines.items():
            self._tell(_report(name, engine.machine))
        while not self._placement.is_done:
            at, name = min((engine.next_s, name) for name, engine in self.engines.items())
            heard = self._heap[0][0] if self._heap else math.inf
            if self._deadline < min(at, heard):
                self.now = max(self.now, self._deadline)
                self._tell(TimePassed())
            elif heard <= at:
                self.now, _serial, call = heapq.heappop(self._heap)
                call()
            else:
                self.now = at
                self._advance(name)
        engines = self.engines.values()
        assert sum(engine.num_decoded for engine in engines) >= self.workload.num_new_tokens
        return Outcome(
            self.now,
            self.workload.num_new_tokens,
            sum(engine.num_prefilled for engine in engines),
            self._reused / self._prompts,
            1000 * self._decided_s / self._events,
        )

    def _at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._serial), call))

    def _tell(self, event: Event) -> None:
        started = time.perf_counter()
        actions = self._placement.handle(event, self.now)
        self._deadline = self._placement.deadline or math.inf
        self._decided_s += time.perf_counter() - started
        self._events += 1
        for action in actions:
            assert isinstance(action, Place), action
            link_s = self.engines[action.worker].machine.rtt_s / 2
            self._at(self.now + link_s, partial(self._submit, action))

    def _submit(self, place: Place) -> None:
        engine = self.engines[place.worker]
        self._advance(place.worker)
        trajectory, turn = place.turn.trajectory, place.turn.turn
        step = self.workload.step
        group = trajectory // step.group_size
        before = self.workload.turns[trajectory][:turn]
        prompt = step.prompt_tokens[group] + sum(t.new_tokens + t.observed_tokens for t in before)
        new_tokens = self.workload.turns[trajectory][turn].new_tokens
        job = Job((trajectory, turn), group, step.prompt_tokens[group], prompt, new_tokens)
        engine.submit(job, self.now)

    def _advance(self, name: PeerId) -> None:
        for when, job in self.engines[name].advance(self.now):
            self._finished(name, job, when)

    def _finished(self, name: PeerId, job: Job, when: float) -> None:
        machine = self.engines[name].machine
        self._reused += job.num_reused
        self._prompts += job.prompt_tokens
        trajectory, number = job.key
        turn = self.workload.turns[trajectory][number]
        heard = max(self.now, when + machine.rtt_s / 2)
        id_ = TurnId(0, trajectory, number)
        total = job.prompt_tokens + job.new_tokens
        self._at(heard, lambda: self._tell(TurnFinished(name, id_, total, job.num_reused)))
        last = number + 1 == len(self.workload.turns[trajectory])
        following: Event = TrajectoryEnded(id_)
        if not last:
            following = TurnReady(TurnId(0, trajectory, number + 1), total + turn.observed_tokens)
        self._at(heard + turn.act_s, lambda: self._tell(following))


def _report(name: PeerId, machine: Machine) -> LoadReported:
    load = Load(
        num_rows=machine.num_rows,
        cache_tokens=machine.cache_tokens,
        prefill_tokens_per_s=machine.prefill_tokens_per_s(),
        token_s=machine.decode_table(),
    )
    return LoadReported(name, load, machine.rtt_s)


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
        return World(workload, machines, POLICIES[self.policy]).run()


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
