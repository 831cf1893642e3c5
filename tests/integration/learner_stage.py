"""A real learner process, all that it says, and a way to wait for more."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from p2pdiloco.optim.fragments import Fragment, fragments_of
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.learner.learner import (
    Died,
    Installed,
    Learner,
    LearnerEvent,
    LearnerOptions,
    Ready,
    StepsDone,
    running_learner,
)

START_S = 400.0
"""On a slow machine that runs other tests too, where importing torch alone may take minutes."""

E = TypeVar("E", bound=LearnerEvent)


class Stage:
    """A learner, everything it said, and a way to wait for more."""

    def __init__(self, options: LearnerOptions) -> None:
        self.options = options
        self.events: list[LearnerEvent] = []
        self.learner: Learner
        self.news = asyncio.Event()
        self.values = initial_values(options.fragments)

    def hear(self, event: LearnerEvent) -> None:
        self.events.append(event)
        self.news.set()

    def install_all(self, version: int) -> None:
        for p, values in enumerate(self.values):
            self.learner.install(p, version, values)

    async def next(
        self,
        kind: type[E] | tuple[type[E], ...],
        since: int = 0,
        where: Callable[[E], bool] = lambda event: True,
    ) -> E:
        """The first event of a kind from position `since` on, waited for if need be."""
        async with asyncio.timeout(START_S):
            while True:
                for event in self.events[since:]:
                    if isinstance(event, kind) and where(event):
                        return event
                self.news.clear()
                await self.news.wait()

    async def installed_all(self, version: int) -> Installed:
        """Waits until every fragment was installed anew; the last of the receipts."""
        wanted = set(range(len(self.values)))
        since = len(self.events)
        while True:
            event = await self.next(Installed, since)
            since = self.events.index(event, since) + 1
            wanted.discard(event.fragment)
            if not wanted and event.version == version:
                return event

    async def steps(self, count: int) -> None:
        """Waits for at least so many more steps."""
        since = len(self.events)
        while count > 0:
            done = await self.next(StepsDone, since)
            since = self.events.index(done, since) + 1
            count -= done.steps


def initial_values(fragments: tuple[Fragment, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.normal(0, 0.02, fragment.size).astype(np.float32) for fragment in fragments]


@asynccontextmanager
async def open_stage(directory: Path, spec: RunSpec) -> AsyncIterator[Stage]:
    stage = Stage(
        LearnerOptions(
            spec=spec,
            fragments=fragments_of(spec),
            directory=directory,
            node_key="node",
            eval_every_steps=1_000_000,
        )
    )
    with ThreadPoolExecutor(1) as executor:
        async with running_learner(stage.options, stage.hear, executor) as learner:
            stage.learner = learner
            await stage.next((Ready, Died))
            yield stage
