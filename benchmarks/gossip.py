"""What gossip costs in agreement and in loss: the factored round on noise and on real training.

    python -m benchmarks.gossip noise      limits of disagreement against the bound, noise alone
    python -m benchmarks.gossip order      final loss: synchronous, DiLoCo, both GlobalM1
    python -m benchmarks.gossip bound      disagreement in training with plain outer steps of rate 1
    python -m benchmarks.gossip failing    10, 30 and 50 % of the exchanges fail
    python -m benchmarks.gossip report     tables from what is stored

All workers live in this process and take the same number of inner steps per round; exchanges are
function calls, float32, and fail at random where asked. Text, streams and inner loop are those of a
real run; the model is smaller than the smallest preset, since eight of them train on one processor.
A finished run is stored and not repeated.
"""

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.joint_stream import JointStream
from p2pdiloco.learn.disagreement import (
    output_disagreement,
    output_distributions,
    parameter_disagreement,
    probe_batch,
)
from p2pdiloco.learn.evaluate import held_out_loss
from p2pdiloco.learn.inner_loop import InnerLoop, Stream
from p2pdiloco.learn.models import build_model, embedding_names, parameter_shapes
from p2pdiloco.learn.text import Text, TextStream, open_text
from p2pdiloco.optim.fragments import plan_fragments
from p2pdiloco.optim.mixing import (
    DILOCO,
    GLOBAL_M1,
    GLOBAL_M1_LOCAL_M2,
    PAIRWISE,
    Exchanged,
    Factors,
    WorkerState,
    disagreement_limit,
    finish_round,
    mix_gradients,
    mix_parameters,
)
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.topology import (
    Groups,
    Row,
    Topology,
    everybody,
    exponential,
    hypercube,
    ring,
)
from p2pdiloco.spec import DataSpec, InnerSpec, ModelSpec

RESULTS = Path(__file__).parent / "results"
WORKERS = 8
INNER_STEPS = 16
ROUNDS = 12
EVALUATE_EVERY = 4
"""Rounds."""
LEARNING_RATE, MOMENTUM = 0.7, 0.3
"""Of the outer step; the best of benchmarks.quality for merging by mean."""
MODEL = ModelSpec(
    config={
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 172,
        "vocab_size": 256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
    }
)
DATA = DataSpec(sequence_length=64)
PROBE_SEQUENCES = 10
WINDOWS_PER_BLOCK = 3

STRATEGIES: dict[str, Factors | None] = {
    "Sync-DP": None,
    "DiLoCo": DILOCO,
    "GlobalM1LocalM2": GLOBAL_M1_LOCAL_M2,
    "GlobalM1": GLOBAL_M1,
    "pairwise": PAIRWISE,
    "factored": Factors(hypercube, everybody),
}
"""`factored` is of a quorum that all reach, which is DiLoCo unless exchanges fail."""
PLAIN = 1.0, 0.0
"""Outer learning rate and momentum of the paper's bound."""
SHARES_FAILING = [0.1, 0.3, 0.5]

Vector = npt.NDArray[np.float32]
MEMBERS = [PeerId(f"worker{m}") for m in range(WORKERS)]


@dataclass(frozen=True, slots=True)
class Setting:
    """One run."""

    strategy: str
    seed: int
    failing: float = 0.0
    """Share of the exchanges that fail."""
    plain: bool = False
    """Outer steps of rate 1 without momentum."""


@dataclass(slots=True)
class Outcome:
    """Lists with one entry per round, and (step, loss) of evaluations.

    outputs, parameters: disagreement of the starts of the round (Jensen-Shannon, L2);
    drift: mean squared distance to the workers' mean at the end of its inner steps, before mixing;
    training: mean training loss of the round; of_mean: held-out nats per byte of the workers' mean,
    of_workers: mean of the workers' own.
    """

    outputs: list[float] = field(default_factory=list)
    parameters: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)
    training: list[float] = field(default_factory=list)
    of_mean: list[tuple[int, float]] = field(default_factory=list)
    of_workers: list[tuple[int, float]] = field(default_factory=list)
    cpu_s: float = 0.0


# ---------------------------------------------------------------- training


class Bench:
    """The text, learners on it, and what they are measured by."""

    def __init__(self) -> None:
        self.text: Text = open_text(DATA)
        self.probe = probe_batch(self.text, DATA.sequence_length, PROBE_SEQUENCES)

    def stream(self, seed: int, worker: int) -> TextStream:
        return TextStream(self.text, DATA.sequence_length, seed, f"learner {worker}")

    def learner(self, seed: int, stream: Stream, batches: int = 1) -> InnerLoop:
        model = build_model(MODEL, seed, DATA.sequence_length)
        plan = plan_fragments(parameter_shapes(model), 1, embedding_names(model))
        return InnerLoop(
            model, stream, InnerSpec(batch_size=batches * InnerSpec().batch_size), plan
        )

    def loss(self, model: torch.nn.Module) -> float:
        return held_out_loss(model, self.text, DATA.sequence_length, WINDOWS_PER_BLOCK)


def synchronous(bench: Bench, setting: Setting) -> Outcome:
    """Data parallel: one learner with the batches of all."""
    streams = [bench.stream(setting.seed, m) for m in range(WORKERS)]
    loop = bench.learner(setting.seed, JointStream(streams), WORKERS)
    outcome = Outcome()
    for number in range(1, ROUNDS + 1):
        outcome.training.append(_mean(loop.step().loss for _ in range(INNER_STEPS)))
        if number % EVALUATE_EVERY == 0:
            outcome.of_mean.append((number * INNER_STEPS, bench.loss(loop.model)))
    return outcome


class GossipRun:
    """Eight workers in factored rounds; the whole model is one fragment."""

    def __init__(self, bench: Bench, setting: Setting, factors: Factors) -> None:
        self.bench, self.setting, self.factors = bench, setting, factors
        self.loops = {
            me: bench.learner(setting.seed, bench.stream(setting.seed, m))
            for m, me in enumerate(MEMBERS)
        }
        self.judge = bench.learner(setting.seed, bench.stream(setting.seed, 0))
        (self.fragment,) = self.judge.fragments
        zero = np.zeros(self.fragment.size, np.float32)
        self.states = {me: WorkerState(_read(loop), zero) for me, loop in self.loops.items()}
        self.outcome = Outcome()

    def run(self) -> Outcome:
        for number in range(ROUNDS):
            self._measure()
            self.outcome.training.append(_mean(self._train(loop) for loop in self.loops.values()))
            self._mix(number)
            if (number + 1) % EVALUATE_EVERY == 0:
                self._evaluate((number + 1) * INNER_STEPS)
        return self.outcome

    def _train(self, loop: InnerLoop) -> float:
        return _mean(loop.step().loss for _ in range(INNER_STEPS))

    def _measure(self) -> None:
        outputs = [output_distributions(loop.model, self.bench.probe) for loop in self._workers()]
        self.outcome.outputs.append(output_disagreement(outputs))
        starts = [self.states[me].start for me in MEMBERS]
        self.outcome.parameters.append(parameter_disagreement(starts))

    def _workers(self) -> list[InnerLoop]:
        return [self.loops[me] for me in MEMBERS]

    def _mix(self, number: int) -> None:
        rate, momentum = PLAIN if self.setting.plain else (LEARNING_RATE, MOMENTUM)
        ends = {me: _read(loop) for me, loop in self.loops.items()}
        self.outcome.drift.append(spread(np.stack(list(ends.values()))))
        starts = {me: state.start for me, state in self.states.items()}
        gradients = {me: starts[me] - ends[me] for me in MEMBERS}
        mixed = self._mix1(starts, number)
        directions = self._mix2(gradients, number)
        for me, loop in self.loops.items():
            self.states[me] = finish_round(
                self.states[me], mixed[me], directions[me], rate, momentum
            )
            loop.overwrite_fragment(0, self.states[me].start)

    def _mix1(self, starts: Mapping[PeerId, Vector], number: int) -> dict[PeerId, Vector]:
        if self.factors.mix1 is None:
            return dict(starts)
        rows = self._rows(self.factors.mix1, number, "mix1")
        return {
            me: mix_parameters(
                starts[me], row, {p: Exchanged(starts[p], starts[me]) for p in row.partners}
            )
            for me, row in rows.items()
        }

    def _mix2(self, gradients: Mapping[PeerId, Vector], number: int) -> dict[PeerId, Vector]:
        if self.factors.mix2 is None:
            return dict(gradients)
        rows = self._rows(self.factors.mix2, number, "mix2")
        return {
            me: mix_gradients(
                me, {p: gradients[p] for p in (me, *row.partners)}, row, self.fragment, "mean"
            )
            for me, row in rows.items()
        }

    def _rows(self, topology: Topology, number: int, mix: str) -> dict[PeerId, Row]:
        """Of a round in which some links fail, for both of their ends."""
        seed = f"{self.setting.seed}/{mix}"
        chance = random.Random(f"failing {seed}/{number}")
        links = itertools.combinations(MEMBERS, 2)
        failed = [link for link in links if chance.random() < self.setting.failing]
        return {
            me: topology(me, MEMBERS, number, seed).without(
                [peer for link in failed if me in link for peer in link]
            )
            for me in MEMBERS
        }

    def _evaluate(self, step: int) -> None:
        workers = _mean(self.bench.loss(loop.model) for loop in self._workers())
        starts = [self.states[me].start for me in MEMBERS]
        self.judge.overwrite_fragment(0, np.asarray(np.mean(starts, axis=0), np.float32))
        self.outcome.of_workers.append((step, workers))
        self.outcome.of_mean.append((step, self.bench.loss(self.judge.model)))


def spread(vectors: npt.NDArray[np.floating[Any]]) -> float:
    """Mean squared distance of the rows to their mean."""
    return float(np.square(vectors - vectors.mean(axis=0)).sum(axis=1).mean())


def _read(loop: InnerLoop) -> Vector:
    out = np.empty(loop.fragments[0].size, np.float32)
    loop.read_fragment(0, out)
    return out


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


# ---------------------------------------------------------------- noise alone

ALL = 1 << 30
"""A group with everybody in it."""

NOISE: dict[str, tuple[Factors, int | None, int]] = {
    "DiLoCo": (DILOCO, ALL, ALL),
    "GlobalM1LocalM2": (GLOBAL_M1_LOCAL_M2, ALL, 2),
    "GlobalM1": (GLOBAL_M1, ALL, 1),
    "groups of 4": (Factors(Groups(4), None), 4, 1),
    "pairwise": (PAIRWISE, 2, 1),
    "hypercube": (Factors(hypercube, None), None, 1),
    "exponential": (Factors(exponential, None), None, 1),
    "ring": (Factors(ring, None), None, 1),
}
"""Name -> mixes, and how many members mix in each; None if not in groups. Starts that agree, as
DiLoCo's, are as good as mixed.
"""
NOISE_SIZE = 100
NOISE_ROUNDS = 120
NOISE_SETTLED = 40
"""Rounds before the first that counts."""
NESTEROV = 0.7, 0.9


def noise_limits() -> list[dict[str, Any]]:
    """Disagreement before the mixes, in drifts, when inner steps are nothing but noise."""
    rows = []
    for count in (WORKERS, 64):
        for name, (factors, size1, size2) in NOISE.items():
            plain, nesterov = noise_limit(factors, count, [(1.0, 0.0), NESTEROV])
            levels = {"plain": plain, "nesterov": nesterov}
            known = {
                "plain_known": limit(size1, size2, count, 1.0, 0.0),
                "nesterov_known": limit(size1, size2, count, *NESTEROV),
            }
            rows.append({"workers": count, "name": name, **levels, **known})
    return rows


def limit(size1: int | None, size2: int, count: int, rate: float, mu: float) -> float | None:
    """In theory, of random groups among `count` workers, with the contraction for this number."""
    if size1 is None:
        return None
    rho1, rho2 = ((-(-count // size) - 1) / (count - 1) for size in (size1, size2))
    return disagreement_limit(rho1, rho2, rate, mu)


def noise_limit(factors: Factors, count: int, outer: Sequence[tuple[float, float]]) -> list[float]:
    """For each outer learning rate and momentum; the rounds of mixing.py as matrices."""
    noise = np.random.default_rng(0)
    members = [PeerId(f"worker{m}") for m in range(count)]
    starts = [np.zeros((count, NOISE_SIZE)) for _ in outer]
    momenta = list(starts)
    peaks: list[list[float]] = [[] for _ in outer]
    for number in range(NOISE_ROUNDS):
        drift = noise.standard_normal((count, NOISE_SIZE))
        mix1 = _matrix(factors.mix1, members, number, "mix1")
        mixed = _matrix(factors.mix2, members, number, "mix2") @ drift
        for i, (rate, mu) in enumerate(outer):
            peaks[i].append(spread(starts[i] - drift))
            momenta[i] = mu * momenta[i] + mixed
            starts[i] = mix1 @ starts[i] - rate * (mixed + mu * momenta[i])
    one_drift = NOISE_SIZE * (1 - 1 / count)
    return [_mean(levels[NOISE_SETTLED:]) / one_drift for levels in peaks]


def _matrix(
    topology: Topology | None, members: Sequence[PeerId], number: int, seed: str
) -> npt.NDArray[np.float64]:
    matrix = np.eye(len(members))
    if topology is None:
        return matrix
    place = {peer: i for i, peer in enumerate(members)}
    for me, i in place.items():
        row = topology(me, members, number, seed)
        matrix[i, i] = row.own
        for partner, weight in row.partners.items():
            matrix[i, place[partner]] = weight
    return matrix


# ---------------------------------------------------------------- what is stored


class Store:
    """The noise table and all runs, in one JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"noise": [], "runs": []}
        content: dict[str, Any] = json.loads(self.path.read_text())
        return content

    def write(self, content: dict[str, Any]) -> None:
        self.path.parent.mkdir(exist_ok=True)
        unfinished = self.path.with_suffix(".tmp")
        runs = ",\n".join(json.dumps(run) for run in content["runs"])
        unfinished.write_text(
            f'{{"noise": {json.dumps(content["noise"])},\n"runs": [\n{runs}\n]}}\n'
        )
        os.replace(unfinished, self.path)

    def runs(self) -> dict[Setting, Outcome]:
        return {Setting(**run["setting"]): Outcome(**run["outcome"]) for run in self.read()["runs"]}

    def put(self, setting: Setting, outcome: Outcome) -> None:
        content = self.read()
        content["runs"].append({"setting": asdict(setting), "outcome": asdict(outcome)})
        self.write(content)


def carry_out(store: Store, settings: Iterable[Setting], minutes: float) -> None:
    """Runs what is not stored yet, and prints each result; begins none after `minutes`."""
    stored, bench, started = store.runs(), Bench(), time.monotonic()
    for setting in settings:
        if setting in stored or time.monotonic() - started > 60 * minutes:
            continue
        begun = time.process_time()
        factors = STRATEGIES[setting.strategy]
        run = GossipRun(bench, setting, factors).run if factors else None
        outcome = run() if run else synchronous(bench, setting)
        outcome.cpu_s = round(time.process_time() - begun, 1)
        store.put(setting, outcome)
        print(f"{outcome.of_mean[-1][1]:.4f}  {setting}", flush=True)


def order(seeds: Sequence[int]) -> list[Setting]:
    strategies = [strategy for strategy in STRATEGIES if strategy != "factored"]
    return [Setting(strategy, seed) for seed in seeds for strategy in strategies]


def bound(seeds: Sequence[int]) -> list[Setting]:
    strategies = ("DiLoCo", "GlobalM1LocalM2", "GlobalM1", "pairwise")
    return [Setting(strategy, seed, plain=True) for seed in seeds for strategy in strategies]


def failing(seeds: Sequence[int]) -> list[Setting]:
    return [
        Setting(strategy, seed, share)
        for seed in seeds
        for strategy in ("GlobalM1", "factored", "GlobalM1LocalM2", "pairwise", "DiLoCo")
        for share in SHARES_FAILING
    ]


STUDIES: dict[str, Callable[[Sequence[int]], list[Setting]]] = {
    "order": order,
    "bound": bound,
    "failing": failing,
}


def main() -> None:
    """Parses the command line and runs one study, or reports on what is stored."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gossip",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", choices=["noise", *STUDIES, "report"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, default=1e6, help="after which no run begins")
    parser.add_argument("--results", type=Path, default=RESULTS / "gossip.json")
    args = parser.parse_args()
    store = Store(args.results)
    torch.set_num_threads(1)
    if args.study == "noise":
        store.write({**store.read(), "noise": noise_limits()})
    elif args.study == "report":
        from benchmarks.gossip_report import write_report

        write_report(args.results)
    else:
        carry_out(store, STUDIES[args.study](args.seeds), args.minutes)


if __name__ == "__main__":
    main()
