"""What a swarm would learn from rollouts, in one process: no network, no clock, nothing that fails.

    python -m benchmarks.rl_learning plain --seed 1
    python -m benchmarks.rl_learning held --seed 1 --set rl.kl_weight=0.04
    python -m benchmarks.rl_learning "small sums" --environment sums:9 --steps 300

Each step is played with one engine, its groups are dealt to as many learners as there would be
nodes, each makes the inner steps of its share, and their outer gradients are merged: the arithmetic
of the daemons without codec and checks. Says the mean reward of the steps, and now and then that of
tasks that no step has. The spec is that of `p2pdiloco demo --task rl`, with what the environment
needs (`rl_settings`), changed by `--set`. Each call adds its run to the others' figures.
"""

import argparse
import copy
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.rl_settings import spec_of
from benchmarks.swarm import table, write
from p2pdiloco.learn.models import build_model, embedding_names, parameter_shapes
from p2pdiloco.optim.fragments import plan_fragments
from p2pdiloco.optim.merge import Vector, merge, token_weight
from p2pdiloco.optim.outer import nesterov_step
from p2pdiloco.rl.alone import play_step
from p2pdiloco.rl.assignment import SHARED, StepTasks
from p2pdiloco.rl.episodes import Episode
from p2pdiloco.rl.loop import RlLoop, shares_of
from p2pdiloco.rl.rules import rulebook_of
from p2pdiloco.rl.shares import Lesson, Shares
from p2pdiloco.rollout.engine import Engine, Limits
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "rl_learning"

EVALUATE_EVERY = 20
"""Steps."""

WHAT = (
    "`benchmarks/rl_learning.py` says how. `before`, `best` and `after` are the mean reward of 256"
    " tasks that no step has: with the first weights, at the best of the looks that are taken"
    f" every {EVALUATE_EVERY} steps, and at the end; between them the mean reward of the steps, in"
    " thirds."
)
NUM_UNSEEN = 256
"""Tasks of an evaluation, one trajectory each."""
ROWS_MAX = 256


@dataclass(frozen=True, slots=True)
class Learner:
    """A node's."""

    loop: RlLoop
    shares: Shares


class Swarm:
    """`anchor` and `momentum` are what all nodes hold after `version` merges."""

    def __init__(self, spec: RunSpec, num_learners: int) -> None:
        self.version = 0
        self._spec = spec
        self._model = _model(spec)
        plan = plan_fragments(parameter_shapes(self._model), 1, embedding_names(self._model))
        (self._fragment,) = plan
        self._learners = []
        for _ in range(num_learners):
            shares = shares_of(spec)
            self._learners.append(Learner(RlLoop(_model(spec), shares, spec, plan), shares))
        limits = Limits(num_rows_max=ROWS_MAX, num_waiting_max=4096)
        self._engine = Engine(copy.deepcopy(self._model).eval(), limits, time.process_time)
        self.anchor = np.empty(self._fragment.size, np.float32)
        self._learners[0].loop.read_fragment(0, self.anchor)
        self._momentum = np.zeros_like(self.anchor)

    def step(self) -> tuple[list[Episode], list[Lesson]]:
        """Plays, learns and merges."""
        rules = rulebook_of(self._spec, f"benchmark {self._spec.seed}", self.version)
        episodes = play_step(self._engine, rules)
        lessons, deltas, weights = [], [], []
        for number, learner in enumerate(self._learners):
            groups = range(number, rules.tasks.num_groups, len(self._learners))
            share = [e for e in episodes if rules.tasks.group_of(e.trajectory) in groups]
            lessons += self._learn(learner, share)
            local = np.empty_like(self.anchor)
            learner.loop.read_fragment(0, local)
            deltas.append(self.anchor - local)
            weights.append(token_weight(learner.loop.tokens[0], learner.loop.steps[0]))
        self._take(merge(deltas, weights, self._fragment, self._spec.sync.merge))
        return episodes, lessons

    def unseen(self) -> float:
        """Mean reward of tasks that no step has."""
        rules = rulebook_of(self._spec, "evaluation", self.version)
        tasks = StepTasks("evaluation", self.version, SHARED, NUM_UNSEEN, 1)
        return fmean(e.reward for e in play_step(self._engine, replace(rules, tasks=tasks)))

    def _learn(self, learner: Learner, share: Sequence[Episode]) -> list[Lesson]:
        learner.loop.overwrite_fragment(0, self.anchor)
        learner.shares.stand_on(self.version)
        learner.shares.add(self.version, share)
        while learner.shares.has_part:
            learner.loop.step()
        return learner.shares.take_ended()

    def _take(self, delta: Vector) -> None:
        outer = self._spec.outer
        self.anchor, self._momentum = nesterov_step(
            self.anchor, self._momentum, delta, outer.learning_rate, outer.momentum
        )
        self.version += 1
        weights = {
            slot.name: torch.from_numpy(self.anchor[slot.span]).view(slot.shape)
            for slot in self._fragment.slots
        }
        self._engine.swap(weights, self.version)


def _model(spec: RunSpec) -> PreTrainedModel:
    model = build_model(spec.model, spec.seed, spec.data.sequence_length)
    assert isinstance(model, PreTrainedModel)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="under which the figures are kept")
    parser.add_argument("--environment", default="guess", help="as in the spec")
    parser.add_argument("--checkpoint", type=Path, help="what the run begins with")
    parser.add_argument("--set", nargs="*", default=[], metavar="TABLE.KEY=VALUE", help="in JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--learners", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draft = spec_of(arguments.environment, arguments.checkpoint)
    spec = changed(draft, [f"seed={arguments.seed}", *arguments.set])
    run = learn(Swarm(spec, arguments.learners), arguments.steps)
    run["settings"] = [arguments.environment, *arguments.set]
    kept = arguments.results.with_suffix(".json")
    results: dict[str, JsonObject] = json.loads(kept.read_text()) if kept.exists() else {}
    results[f"{arguments.name}, seed {arguments.seed}"] = run
    write(arguments.results, results, report(results))


def changed(spec: RunSpec, settings: Sequence[str]) -> RunSpec:
    """With `table.key=value` in JSON; a string may stand without quotes."""
    values = spec.model_dump(mode="json", exclude_none=True)
    for setting in settings:
        place, _, text = setting.partition("=")
        *tables, key = place.split(".")
        table = values
        for name in tables:
            table = table[name]
        try:
            table[key] = json.loads(text)
        except json.JSONDecodeError:
            table[key] = text
    return RunSpec.model_validate_json(json.dumps(values))


def learn(swarm: Swarm, num_steps: int) -> JsonObject:
    """Prints the curve, and returns it."""
    started = time.process_time()
    rewards: list[float] = []
    curve = [(0, swarm.unseen())]
    while swarm.version < num_steps:
        episodes, lessons = swarm.step()
        rewards.append(fmean(episode.reward for episode in episodes))
        if swarm.version % EVALUATE_EVERY == 0:
            curve.append((swarm.version, swarm.unseen()))
            print(
                f"{time.process_time() - started:6.1f} s  step {swarm.version:4}"
                f"  reward {fmean(rewards[-EVALUATE_EVERY:]):.3f}  unseen {curve[-1][1]:.3f}"
                f"  drift {fmean(lesson.drift for lesson in lessons):.1e}"
                f"  surprise {_surprise(episodes):.2f}",
                flush=True,
            )
    return {"rewards": rewards, "unseen": curve, "cpu_s": time.process_time() - started}


def _surprise(episodes: Sequence[Episode]) -> float:
    """Nats per token that the policy chose: an estimate of its entropy."""
    return -fmean(logprob for episode in episodes for _, logprob, _ in episode.chosen())


def report(results: Mapping[str, JsonObject]) -> str:
    rows = [
        (
            name,
            " ".join(run["settings"]),
            len(run["rewards"]),
            f"{run['unseen'][0][1]:.3f}",
            *(f"{value:.3f}" for value in _thirds(run["rewards"])),
            f"{max(value for _, value in run['unseen']):.3f}",
            f"{run['unseen'][-1][1]:.3f}",
            f"{run['cpu_s'] / 60:.1f}",
        )
        for name, run in results.items()
    ]
    columns = (
        "run",
        "settings",
        "steps",
        "before",
        "first third",
        "second",
        "last",
        "best",
        "after",
        "CPU minutes",
    )
    return "\n".join(
        [
            "# What a swarm would learn from rollouts, in one process",
            "",
            WHAT,
            "",
            table(columns, rows),
        ]
    )


def _thirds(values: Sequence[float]) -> Iterator[float]:
    for part in np.array_split(values, 3):
        yield float(part.mean())


if __name__ == "__main__":
    main()
