"""A learner process that takes steps by the clock, for nodes of `benchmarks.paced_node`.

Several real learners on few cores would measure how they share them. This one sleeps through its
steps and moves its parameters by noise, so that what is left to measure is what the network takes.
Daemon, exchange, shared memory and the loop at the boundaries between steps are the real ones.
"""

import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from p2pdiloco.learn.local_model import StepResult
from p2pdiloco.learn.predictions import BUCKETS, POSITIONS
from p2pdiloco.optim.fragments import Fragment, fragments_of
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.children.shared_memory import SharedTensors
from p2pdiloco_daemon.learner.control import Control
from p2pdiloco_daemon.learner.messages import Ready
from p2pdiloco_daemon.learner.process import LearnerProcess, receive_start

Vector = npt.NDArray[np.float32]

STEP_S = 0.5
TOKENS_PER_STEP = 1000
DRIFT = 1e-3
"""Of each parameter, in each step, either way: about what AdamW moves them by."""


@dataclass
class PacedTrainer:
    """Takes `STEP_S` for a step."""

    fragments: Sequence[Fragment]
    num_steps: int = 0
    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(os.getpid())
        self.values: list[Vector] = [np.zeros(f.size, np.float32) for f in self.fragments]
        self.drifts: list[Vector] = [
            rng.normal(0, DRIFT, f.size).astype(np.float32) for f in self.fragments
        ]
        self.steps = [0] * len(self.fragments)
        self.tokens = [0] * len(self.fragments)
        self.rng = rng

    def step(self) -> StepResult:
        ends = time.perf_counter() + STEP_S
        self.num_steps += 1
        for p, values in enumerate(self.values):
            values += np.roll(self.drifts[p], int(self.rng.integers(len(values))))
            self.steps[p] += 1
            self.tokens[p] += TOKENS_PER_STEP
        time.sleep(max(0.0, ends - time.perf_counter()))
        return StepResult(loss=1.0, tokens=TOKENS_PER_STEP)

    def read_fragment(self, p: int, out: Vector) -> None:
        out[:] = self.values[p]

    def overwrite_fragment(self, p: int, values: Vector) -> None:
        self.values[p][:] = values
        self.steps[p] = self.tokens[p] = 0

    def add_to_fragment(self, p: int, values: Vector) -> None:
        self.values[p] += values

    def save(self, path: Path) -> None:
        pass


class NoJudge:
    def held_out_loss(self) -> float:
        return 1.0

    def predictions(self) -> bytes:
        return np.full((POSITIONS, BUCKETS), 1 / BUCKETS, "<f2").tobytes()


def run_learner(control_fd: int, memory_fd: int) -> None:
    control = Control(socket.socket(fileno=control_fd))
    start = receive_start(control)
    fragments = fragments_of(RunSpec.model_validate_json(start.spec))
    memory = SharedTensors(memory_fd, [fragment.size for fragment in fragments])
    control.post(Ready(sum(f.size for f in fragments), start.device, 0))
    trainer, judge = PacedTrainer(fragments), NoJudge()
    LearnerProcess(control, memory, trainer, judge, Path("unused"), 1 << 30).run()


if __name__ == "__main__":
    run_learner(int(sys.argv[1]), int(sys.argv[2]))
