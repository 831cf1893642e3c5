"""Runs a demo from the first process to the verdict."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from p2pdiloco.errors import UserError
from p2pdiloco_daemon.demo.display import Display
from p2pdiloco_daemon.demo.evaluation import Request, evaluate
from p2pdiloco_daemon.demo.polling import StatusReader
from p2pdiloco_daemon.demo.processes import Home, NodeProcess, bootstrap_peer, end, start_node
from p2pdiloco_daemon.demo.verdict import NodeOutcome, result
from p2pdiloco_daemon.status.view import JsonObject

SETTLE_TIMEOUT_S = 60.0
"""For rounds in flight to end and merges to reach everybody, once training has stopped, on a
machine that may be slow and busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    spec_file: Path
    """With the owner's key beside it."""
    directory: Path
    """Of the bootstrap peer, the nodes and their logs."""
    checkpoint: Path
    """The exported model; replaced."""
    num_nodes: int
    first_port: int
    minutes: float | None
    home: Home


class StopRequests:
    """Ctrl-C and SIGTERM, counted: to stop training, then not to wait, then to drop everything,
    which no more of them may disturb.
    """

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._cancel = cancel
        self._is_cancelled = False

    def add(self) -> None:
        if self._is_cancelled:
            return
        if self.hurry.is_set():
            self._is_cancelled = True
            self._cancel()
        elif self.stop.is_set():
            self.hurry.set()
        else:
            self.stop.set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # SIGHUP: the terminal was closed; the nodes must not outlive it
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self.add)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


async def run_demo(options: DemoOptions, display: Display) -> JsonObject:
    """The demo's JSON object; UserError if no node came up, CancelledError if none had time to."""
    display.say("starting the bootstrap peer and making the first weights ...")
    task = asyncio.current_task()
    assert task
    requests = StopRequests(task.cancel)
    requests.hurry.set()  # nothing is trained yet: the first one drops everything
    with requests.listening():
        outcomes = await _train(options, display, requests)
        if not outcomes:
            if requests.stop.is_set():
                raise asyncio.CancelledError
            raise UserError(f"no node came up; {_last_words(options.directory)}")
        display.say("evaluating what came out ...")
        requests.hurry.set()  # nothing to hurry from here on: the next one drops the evaluation
        return result(await evaluate(_request(options, outcomes)), outcomes)


def _request(options: DemoOptions, outcomes: Sequence[NodeOutcome]) -> Request:
    """What to evaluate: the nodes that live, or what is left of the first one."""
    living = [outcome.name for outcome in outcomes if outcome.end is None]
    return Request(
        bootstrap=options.directory / "bootstrap",
        nodes={name: options.directory / name for name in living or [outcomes[0].name]},
        checkpoint=options.checkpoint,
    )


async def _train(
    options: DemoOptions, display: Display, requests: StopRequests
) -> list[NodeOutcome]:
    """Runs the processes until the end; the outcome of each node that ever had the model."""
    directory = options.directory
    bootstrap = bootstrap_peer(
        options.spec_file, directory / "bootstrap", directory / "bootstrap.log", options.home
    )
    async with (
        bootstrap as invite,
        _nodes(options, invite) as nodes,
        aiohttp.ClientSession() as session,
    ):
        display.say("; ".join(f"{node.name}: http://127.0.0.1:{node.port}/" for node in nodes))
        reader = StatusReader(session, nodes)
        requests.hurry.clear()
        await _watch(nodes, reader, requests, options.minutes, display)
        display.say("settling: training stops, merges in flight reach everybody ...")
        settled = await _settle(reader, requests)
        return [
            NodeOutcome(node.name, reader.latest[node.name], node.end, settled)
            for node in nodes
            if node.name in reader.latest and has_model(reader.latest[node.name])
        ]


def has_model(told: JsonObject) -> bool:
    """Whether the node has received all of the model; before, there is nothing to look into."""
    return bool(told["fragments"]) and all(part["version"] >= 0 for part in told["fragments"])


@contextlib.asynccontextmanager
async def _nodes(options: DemoOptions, invite: str) -> AsyncIterator[list[NodeProcess]]:
    """The nodes, started at once, and all ended afterwards."""
    nodes: list[NodeProcess] = []
    try:
        for index in range(options.num_nodes):
            directory = options.directory / f"node-{index + 1}"
            port = options.first_port + index
            nodes.append(await start_node(directory, port, invite, options.home))
        yield nodes
    finally:
        await end(nodes)


async def _watch(
    nodes: list[NodeProcess],
    reader: StatusReader,
    requests: StopRequests,
    minutes: float | None,
    display: Display,
) -> None:
    """Shows the nodes once a second until the time is up, somebody asks to stop, or all ended."""
    started = time.monotonic()
    with display.watching():
        while not requests.stop.is_set() and any(node.end is None for node in nodes):
            elapsed_s = time.monotonic() - started
            if minutes is not None and elapsed_s >= minutes * 60:
                return
            await reader.refresh()
            display.show(nodes, reader.latest, _headline(elapsed_s, minutes))
            await _wait(requests.stop, 1)


async def _settle(reader: StatusReader, requests: StopRequests) -> bool:
    """Whether all living nodes came to rest at the same versions in time. They are asked again and
    again: one that was busy has not heard it.
    """
    now = asyncio.get_running_loop().time
    deadline = now() + SETTLE_TIMEOUT_S
    while True:
        await reader.settle()
        await reader.refresh()
        if reader.settled():
            return True
        if requests.hurry.is_set() or now() >= deadline:
            return False
        await _wait(requests.hurry, 0.5)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def _headline(elapsed_s: float, minutes: float | None) -> str:
    minute, second = divmod(int(elapsed_s), 60)
    end = "Ctrl-C ends the demo" if minutes is None else f"ends after {minutes:g} min, or at Ctrl-C"
    return f"{minute}:{second:02d} of training; {end}"


def _last_words(directory: Path) -> str:
    """The last line of the first node's log that says something, and where the logs are."""
    log = directory / "node-1.log"
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")
    return f"the last line of {log} is: {last}"
