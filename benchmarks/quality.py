"""What merging is worth: M learners with the real merge, one alone, and data parallel.

    python -m benchmarks.quality sweep     short runs over outer settings
    python -m benchmarks.quality final     1,000 steps, several seeds, against both baselines
    python -m benchmarks.quality long      4,000 steps against data parallel
    python -m benchmarks.quality merge     radial-directional against plain averaging
    python -m benchmarks.quality wire      what quantized outer gradients cost
    python -m benchmarks.quality spread    who is waited for when learners differ in speed
    python -m benchmarks.quality report    the tables and the picture from what is stored

All learners live in this process and are stepped in the order of a virtual clock whose unit is the
median learner's step. A merge is launched every H/P units; a learner answers at its next step
boundary; when the round closes, the outer gradients go through codec, merge, codec and outer step;
`sync_steps` later the new fragment is there, and each learner overwrites its own at its next
boundary. That is what the daemons do, less the network. The swarm is judged by its anchors, which
an export holds.

Results are stored after every evaluation; a finished run is not repeated. Same text, model, batch
per learner and inner optimizer everywhere; the data-parallel baseline sees exactly the swarm's
tokens, in one batch of M times the size.
"""

import argparse
import heapq
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from p2pdiloco.compress.codec import decode, encode
from p2pdiloco.compress.quantize import WireFormat
from p2pdiloco.learn.evaluate import held_out_loss
from p2pdiloco.learn.inner_loop import InnerLoop
from p2pdiloco.learn.models import build_model, embedding_names, parameter_shapes
from p2pdiloco.learn.text import Text, TextStream, open_text
from p2pdiloco.optim.fragments import Fragment, plan_fragments
from p2pdiloco.optim.merge import MergeRule, merge, token_weight
from p2pdiloco.optim.outer import nesterov_step
from p2pdiloco.spec import DataSpec, InnerSpec, ModelSpec, OuterSpec, SyncSpec

RESULTS = Path(__file__).parent / "results"
EVALUATE_EVERY = 100
"""Steps of the median learner."""
WINDOWS_PER_BLOCK = 8
"""20 held-out blocks, 8 windows of 128 bytes in each: the same 20 kB for every run."""
LEARNERS = 4
SPREAD = (1.0, 1.0, 1.18, 1.18)
"""Step times of the paper's two kinds of accelerator, 18 % apart; each step varies by 10 %."""
SPREAD_NOISE = 0.1
SPREAD_SYNC_STEPS = 0.5
"""Time from the close of a round to the new fragment at every learner, in steps."""

Vector = npt.NDArray[np.float32]
Admit = Literal["first", "grace", "all", "wait"]
"""Whom a round waits for: the quorum of one, a quorum of one and the grace window, everybody; the
learners go on meanwhile. Under "wait" they do not: the synchronous baseline, K = M, where each
stands still at every H/P steps until all have arrived.
"""


@dataclass(frozen=True, slots=True)
class Swarm:
    """The outer settings of M learners; H, P and tau as in the paper."""

    outer_learning_rate: float = OuterSpec().learning_rate
    outer_momentum: float = OuterSpec().momentum
    inner_steps: int = SyncSpec().inner_steps
    num_fragments: int = SyncSpec().num_fragments
    overlap_steps: int = SyncSpec().overlap_steps
    merge: MergeRule = SyncSpec().merge
    wire: WireFormat = SyncSpec().wire
    admit: Admit = "all"
    step_times: tuple[float, ...] = (1.0,) * LEARNERS
    noise: float = 0.0
    sync_steps: float | None = None
    """None: the whole overlap, the worst case."""

    def __str__(self) -> str:
        rule = f"{self.merge} {self.outer_learning_rate}/{self.outer_momentum}"
        return f"{rule} H{self.inner_steps} P{self.num_fragments} {self.wire} {self.admit}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: a swarm, or with `swarm=None` one learner with a batch of `batches` learners."""

    seed: int
    swarm: Swarm | None = None
    batches: int = 1
    inner_learning_rate: float = InnerSpec().learning_rate

    @property
    def kind(self) -> str:
        """What the command line calls it."""
        if self.swarm is not None:
            return "swarm"
        return "alone" if self.batches == 1 else "parallel"

    def __str__(self) -> str:
        what = str(self.swarm) if self.swarm else f"batch {self.batches * InnerSpec().batch_size}"
        return f"{what} inner {self.inner_learning_rate} seed {self.seed}"


@dataclass(slots=True)
class Outcome:
    """curve: (step, held-out nats per byte); merged: mean number of contributions per merge."""

    curve: list[tuple[int, float]] = field(default_factory=list)
    merged: float | None = None
    payload_bytes: float | None = None
    """Mean size of one learner's contribution."""
    goodput: float | None = None
    """Share of the learners' virtual time in which they took steps rather than waited."""
    cpu_s: float = 0.0

    def at(self, step: int) -> float | None:
        return dict(self.curve).get(step)


# ---------------------------------------------------------------- learners


class JointStream:
    """The streams of several learners side by side in one batch."""

    def __init__(self, streams: Sequence[TextStream]) -> None:
        self.cursor = 0
        self._streams = streams

    def next_batch(self, batch_size: int) -> npt.NDArray[np.int64]:
        share = batch_size // len(self._streams)
        self.cursor += batch_size
        return np.concatenate([stream.next_batch(share) for stream in self._streams])


class Bench:
    """The text, and learners on it."""

    def __init__(self, compiled: bool = False) -> None:
        self.data = DataSpec()
        self.compiled = compiled
        self.text: Text = open_text(self.data)

    def stream(self, seed: int, learner: int) -> TextStream:
        return TextStream(self.text, self.data.sequence_length, seed, f"learner {learner}")

    def learner(
        self, setting: Setting, streams: Sequence[TextStream], num_fragments: int
    ) -> InnerLoop:
        model = build_model(ModelSpec(preset="tiny"), setting.seed, self.data.sequence_length)
        if self.compiled:
            model.compile(dynamic=False)
        plan = plan_fragments(parameter_shapes(model), num_fragments, embedding_names(model))
        batch_size = InnerSpec().batch_size * len(streams)
        spec = InnerSpec(batch_size=batch_size, learning_rate=setting.inner_learning_rate)
        return InnerLoop(model, JointStream(streams), spec, plan)

    def evaluate(self, model: torch.nn.Module) -> float:
        return held_out_loss(model, self.text, self.data.sequence_length, WINDOWS_PER_BLOCK)


Record = Callable[[Outcome], None]


def train_single(bench: Bench, setting: Setting, num_steps: int, record: Record) -> None:
    """One learner, alone (`batches=1`) or standing for `batches` data-parallel ones."""
    streams = [bench.stream(setting.seed, m) for m in range(setting.batches)]
    loop = bench.learner(setting, streams, 1)
    outcome = Outcome()
    for step in range(1, num_steps + 1):
        loop.step()
        if step % EVALUATE_EVERY == 0:
            outcome.curve.append((step, bench.evaluate(loop.model)))
            record(outcome)


# ---------------------------------------------------------------- the swarm


@dataclass(slots=True)
class Round:
    """One merge that gathers contributions."""

    fragment: int
    opened: float
    parts: dict[int, tuple[Vector, float]] = field(default_factory=dict)
    """Learner -> (decoded outer gradient, weight)."""
    closing: bool = False


@dataclass(slots=True)
class FragmentState:
    """What every replica holds."""

    version: int
    anchor: Vector
    momentum: Vector


_COMMIT, _LAUNCH, _BOUNDARY, _CLOSE, _EVALUATE = range(5)
"""Events at the same instant happen in this order."""


class SwarmRun:
    """M learners in virtual time."""

    def __init__(self, bench: Bench, setting: Setting, num_steps: int, record: Record) -> None:
        assert setting.swarm is not None
        self.swarm = setting.swarm
        self.bench, self.record, self.num_steps = bench, record, num_steps
        self.waits = self.swarm.admit == "wait"
        self.end = float("inf") if self.waits else float(num_steps)
        self.random = random.Random(f"spread {setting.seed}")
        num_learners = len(self.swarm.step_times)
        self.learners = [
            bench.learner(setting, [bench.stream(setting.seed, m)], self.swarm.num_fragments)
            for m in range(num_learners)
        ]
        self.judge = bench.learner(
            setting, [bench.stream(setting.seed, 0)], self.swarm.num_fragments
        )
        self.plan: tuple[Fragment, ...] = self.judge.fragments
        self.states = [self._genesis(p) for p in range(len(self.plan))]
        self.versions = [[0] * len(self.plan) for _ in self.learners]
        self.rounds: dict[int, Round] = {}
        self.outcome = Outcome()
        self.sizes: list[int] = []
        self.contributors: list[int] = []
        self.taken = [0] * num_learners
        self.waiting: dict[int, float] = {}
        """Learner -> since when it stands still."""
        self.waited = 0.0
        self.serial = itertools.count()
        self.events: list[tuple[float, int, int, Any]] = []
        # The unit of time is the median learner's step.
        times = sorted(self.swarm.step_times)
        self.unit = (times[(num_learners - 1) // 2] + times[num_learners // 2]) / 2

    def run(self) -> None:
        for m in range(len(self.learners)):
            self._at(0.0, _BOUNDARY, m)
        if not self.waits:
            self._at(self._launch_time(1), _LAUNCH, 1)
            for step in range(EVALUATE_EVERY, self.num_steps + 1, EVALUATE_EVERY):
                self._at(float(step), _EVALUATE, step)
        handlers: dict[int, Callable[[float, Any], None]] = {
            _COMMIT: self._commit,
            _LAUNCH: self._launch,
            _BOUNDARY: self._boundary,
            _CLOSE: self._close,
            _EVALUATE: self._evaluate,
        }
        while self.events and self.events[0][0] <= self.end:
            now, kind, _, what = heapq.heappop(self.events)
            handlers[kind](now, what)

    def _at(self, when: float, kind: int, what: object) -> None:
        heapq.heappush(self.events, (round(when, 9), kind, next(self.serial), what))

    def _launch_time(self, number: int) -> float:
        return number * self.swarm.inner_steps / self.swarm.num_fragments

    def _genesis(self, p: int) -> FragmentState:
        anchor = np.empty(self.plan[p].size, np.float32)
        self.judge.read_fragment(p, anchor)
        return FragmentState(0, anchor, np.zeros_like(anchor))

    def _launch(self, now: float, number: int) -> None:
        """Opens the round of the next fragment, unless its last one is still under way."""
        self._open(now, number)
        self._at(self._launch_time(number + 1), _LAUNCH, number + 1)

    def _open(self, now: float, number: int) -> None:
        p = (number - 1) % len(self.plan)
        if p not in self.rounds:
            self.rounds[p] = Round(p, now)

    def _boundary(self, now: float, m: int) -> None:
        """First what has arrived, then the open rounds, then the next step, unless it waits."""
        loop = self.learners[m]
        for p, state in enumerate(self.states):
            if state.version > self.versions[m][p]:
                loop.overwrite_fragment(p, state.anchor)
                self.versions[m][p] = state.version
        period = self.swarm.inner_steps // self.swarm.num_fragments
        arrives = self.waits and self.taken[m] > 0 and self.taken[m] % period == 0
        if arrives and not self.waiting:
            self._open(now, self.taken[m] // period)
        if arrives:
            self.waiting[m] = now
        for pending in list(self.rounds.values()):
            self._contribute(now, pending, m)
        if not arrives:
            self._step(now, m)

    def _step(self, now: float, m: int) -> None:
        over = self.taken[m] >= self.num_steps if self.waits else now >= self.end
        if not over:
            self.learners[m].step()
            self.taken[m] += 1
            noise = self.random.gauss(1.0, self.swarm.noise) if self.swarm.noise else 1.0
            duration = self.swarm.step_times[m] / self.unit * max(0.5, noise)
            self._at(now + duration, _BOUNDARY, m)

    def _contribute(self, now: float, pending: Round, m: int) -> None:
        p, loop = pending.fragment, self.learners[m]
        if loop.steps[p] == 0 or m in pending.parts or self._is_closed(pending):
            return
        local = np.empty(self.plan[p].size, np.float32)
        loop.read_fragment(p, local)
        payload = encode(self.states[p].anchor - local, self.swarm.wire)
        self.sizes.append(len(payload))
        weight = token_weight(loop.tokens[p], loop.steps[p])
        pending.parts[m] = decode(payload, local.size, self.swarm.wire), weight
        if len(pending.parts) == len(self.learners):
            self._at(now, _CLOSE, pending)
        elif self.swarm.admit in ("first", "grace") and not pending.closing:
            pending.closing = True
            self._at(now + self._grace(now - pending.opened), _CLOSE, pending)

    def _grace(self, quorum_steps: float) -> float:
        """Decoupled DiLoCo, equation 3, in steps."""
        if self.swarm.admit == "first":
            return 0.0
        slack = self.swarm.overlap_steps - quorum_steps - self._sync_steps()
        return max(0.0, SyncSpec().grace_factor * slack)

    def _sync_steps(self) -> float:
        given = self.swarm.sync_steps
        return self.swarm.overlap_steps if given is None else given

    def _is_closed(self, pending: Round) -> bool:
        return self.rounds.get(pending.fragment) is not pending or pending.opened < 0

    def _close(self, now: float, pending: Round) -> None:
        if self._is_closed(pending):
            return
        p = pending.fragment
        pending.opened = -1.0
        parts = [pending.parts[m] for m in sorted(pending.parts)]
        self.contributors.append(len(parts))
        deltas, weights = zip(*parts, strict=True)
        merged = merge(deltas, weights, self.plan[p], self.swarm.merge)
        delta = decode(encode(merged, self.swarm.wire), merged.size, self.swarm.wire)
        self._at(now + self._sync_steps(), _COMMIT, (pending, delta))
        if self.waits:
            self._all_go_on(now)

    def _all_go_on(self, now: float) -> None:
        if self.taken[0] % EVALUATE_EVERY == 0:
            self._at(now, _EVALUATE, self.taken[0])
        for m, since in self.waiting.items():
            self.waited += now - since
            self._step(now, m)
        self.waiting.clear()

    def _commit(self, now: float, closed: tuple[Round, Vector]) -> None:
        pending, delta = closed
        state = self.states[pending.fragment]
        state.anchor, state.momentum = nesterov_step(
            state.anchor,
            state.momentum,
            delta,
            self.swarm.outer_learning_rate,
            self.swarm.outer_momentum,
        )
        state.version += 1
        del self.rounds[pending.fragment]

    def _evaluate(self, now: float, step: int) -> None:
        for p, state in enumerate(self.states):
            self.judge.overwrite_fragment(p, state.anchor)
        self.outcome.curve.append((step, self.bench.evaluate(self.judge.model)))
        self.outcome.merged = float(np.mean(self.contributors))
        self.outcome.payload_bytes = float(np.mean(self.sizes))
        self.outcome.goodput = 1 - self.waited / (now * len(self.learners))
        self.record(self.outcome)


# ---------------------------------------------------------------- what is stored


class Store:
    """All outcomes by setting, in one JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Outcome]:
        """Setting key -> outcome; also what another process has stored meanwhile."""
        if not self.path.exists():
            return {}
        runs = json.loads(self.path.read_text())["runs"]
        return {_key(run["setting"]): _outcome(run["outcome"]) for run in runs}

    def find(self, setting: Setting, step: int) -> float | None:
        outcome = self.read().get(_key(asdict(setting)))
        return outcome.at(step) if outcome else None

    def get(self, setting: Setting) -> Outcome | None:
        return self.read().get(_key(asdict(setting)))

    def put(self, setting: Setting, outcome: Outcome) -> None:
        runs = self.read()
        runs[_key(asdict(setting))] = outcome
        content = [
            {"setting": json.loads(key), "outcome": asdict(value)} for key, value in runs.items()
        ]
        self.path.parent.mkdir(exist_ok=True)
        unfinished = self.path.with_suffix(f".{os.getpid()}.tmp")
        lines = ",\n".join(json.dumps(run) for run in content)
        unfinished.write_text(f'{{"runs": [\n{lines}\n]}}\n')
        os.replace(unfinished, self.path)


def _key(setting: dict[str, Any]) -> str:
    return json.dumps(setting, sort_keys=True)


def _outcome(fields: dict[str, Any]) -> Outcome:
    return Outcome(**{**fields, "curve": [(int(step), loss) for step, loss in fields["curve"]]})


def carry_out(bench: Bench, store: Store, settings: Iterable[Setting], num_steps: int) -> None:
    """Runs what is not stored yet, and prints each result."""
    for setting in settings:
        if store.find(setting, num_steps) is None:
            begun = time.process_time()

            def record(outcome: Outcome, setting: Setting = setting, begun: float = begun) -> None:
                outcome.cpu_s = round(time.process_time() - begun, 1)
                known = store.get(setting)
                if known is None or len(outcome.curve) > len(known.curve):
                    store.put(setting, outcome)

            if setting.swarm:
                SwarmRun(bench, setting, num_steps, record).run()
            else:
                train_single(bench, setting, num_steps, record)
        print(f"{store.find(setting, num_steps):.4f}  {setting}", flush=True)


# ---------------------------------------------------------------- the studies


def baselines(seed: int) -> list[Setting]:
    """One learner alone, and data parallel."""
    return [Setting(seed), Setting(seed, batches=LEARNERS)]


_SWEPT: list[tuple[MergeRule, float, float, int, int]] = [
    # merge, outer learning rate, momentum, H, P
    ("rda", 0.7, 0.3, 24, 6),
    ("mean", 1.0, 0.3, 24, 6),
    ("mean", 1.0, 0.5, 24, 6),
    ("rda", 1.0, 0.0, 24, 6),
    ("rda", 0.7, 0.3, 8, 4),
    ("mean", 1.0, 0.5, 8, 4),
    ("rda", 0.7, 0.3, 12, 6),
    ("mean", 1.0, 0.3, 8, 4),
    ("rda", 0.7, 0.0, 8, 4),
    ("rda", 0.5, 0.3, 8, 4),
    ("rda", 0.5, 0.3, 24, 6),
    ("rda", 0.5, 0.3, 12, 6),
    ("mean", 0.7, 0.3, 12, 6),
    ("mean", 1.0, 0.0, 12, 6),
]

SWEEP = [
    Swarm(
        merge=rule,
        outer_learning_rate=rate,
        outer_momentum=momentum,
        inner_steps=h,
        num_fragments=p,
        wire="int8",
    )
    for rule, rate, momentum, h, p in _SWEPT
]


def sweep(seeds: Sequence[int]) -> list[Setting]:
    """Outer settings against both baselines."""
    return [
        run
        for seed in seeds
        for run in [*baselines(seed), *(Setting(seed, swarm) for swarm in SWEEP)]
    ]


def final(seeds: Sequence[int]) -> list[Setting]:
    """The defaults of the run spec against both baselines."""
    return [run for seed in seeds for run in [Setting(seed, Swarm()), *baselines(seed)]]


def merge_rules(seeds: Sequence[int]) -> list[Setting]:
    """The other merge rule at the same outer settings."""
    return [Setting(seed, replace(Swarm(), merge=rule)) for seed in seeds for rule in MERGES]


def wires(seeds: Sequence[int]) -> list[Setting]:
    """The wire formats."""
    return [Setting(seed, replace(Swarm(), wire=wire)) for seed in seeds for wire in WIRES]


def spread(seeds: Sequence[int]) -> list[Setting]:
    """Learners of two speeds under the ways to close a round."""
    uneven = replace(Swarm(), step_times=SPREAD, noise=SPREAD_NOISE, sync_steps=SPREAD_SYNC_STEPS)
    return [Setting(seed, replace(uneven, admit=admit)) for seed in seeds for admit in ADMITS]


MERGES: tuple[MergeRule, ...] = ("rda", "mean")
WIRES: tuple[WireFormat, ...] = ("float32", "int8", "int4")
ADMITS: tuple[Admit, ...] = ("first", "grace", "wait")

STUDIES: dict[str, tuple[Callable[[Sequence[int]], list[Setting]], int, list[int]]] = {
    "sweep": (sweep, 300, [0]),
    "final": (final, 1000, [0, 1, 2]),
    "long": (final, 4000, [0]),
    "merge": (merge_rules, 1000, [0]),
    "wire": (wires, 1000, [0]),
    "spread": (spread, 400, [0, 1, 2]),
}
"""Name -> settings for given seeds, steps, seeds."""


def main() -> None:
    """Parses the command line and runs one study, or reports on what is stored."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", choices=[*STUDIES, "report"])
    parser.add_argument("--steps", type=int, help="of the median learner, a multiple of 100")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--only", choices=["alone", "swarm", "parallel"], help="one kind of run")
    parser.add_argument("--results", type=Path, default=RESULTS / "quality.json")
    parser.add_argument("--compile", action="store_true", help="torch.compile: a fifth faster")
    args = parser.parse_args()
    store = Store(args.results)
    if args.study == "report":
        from benchmarks.quality_report import write_report

        write_report(store, args.results.parent)
        return
    torch.set_num_threads(1)
    settings, num_steps, seeds = STUDIES[args.study]
    runs = [run for run in settings(args.seeds or seeds) if args.only in (None, run.kind)]
    carry_out(Bench(args.compile), store, runs, args.steps or num_steps)


if __name__ == "__main__":
    main()
