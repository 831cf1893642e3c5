"""The learners of the quality study, alone or as a swarm in virtual time.

All learners live in this process and are stepped in the order of a virtual clock whose unit is the
median learner's step. A merge is launched every H/P units; a learner answers at its next step
boundary; when the round closes, the outer gradients go through codec, merge, codec and outer step;
`sync_steps` later the new fragment is there, and each learner overwrites its own at its next
boundary. That is what the daemons do, less the network. The swarm is judged by its anchors, which
an export holds.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.joint_stream import JointStream
from benchmarks.quality_outcomes import Outcome
from benchmarks.quality_settings import Setting
from p2pdiloco.compress.codec import decode, encode
from p2pdiloco.learn.evaluate import held_out_loss
from p2pdiloco.learn.inner_loop import InnerLoop
from p2pdiloco.learn.models import build_model, embedding_names, parameter_shapes
from p2pdiloco.learn.text import Text, TextStream, open_text
from p2pdiloco.optim.fragments import Fragment, plan_fragments
from p2pdiloco.optim.merge import merge, token_weight
from p2pdiloco.optim.outer import nesterov_step
from p2pdiloco.spec import DataSpec, InnerSpec, ModelSpec, SyncSpec

EVALUATE_EVERY = 100
"""Steps of the median learner."""
WINDOWS_PER_BLOCK = 8
"""20 held-out blocks, 8 windows of 128 bytes in each: the same 20 kB for every run."""

Vector = npt.NDArray[np.float32]


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
