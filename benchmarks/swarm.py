"""A swarm of real processes for the other benchmarks to look at, and what its machine says of them.

Bootstrap peer and nodes are started as a person would start them, in a temporary directory, on
loopback, and are all ended afterwards. Not here: what is measured.
"""

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.cli.new import write_draft
from p2pdiloco_daemon.demo.processes import (
    HERE,
    Home,
    NodeProcess,
    bootstrap_peer,
    end,
    start_node,
)
from p2pdiloco_daemon.status.app import ACTION_HEADER
from p2pdiloco_daemon.status.view import JsonObject

START_TIMEOUT_S = 120.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Node:
    """A node's processes, and its status page."""

    started: NodeProcess
    session: aiohttp.ClientSession

    async def status(self) -> JsonObject:
        url = f"http://127.0.0.1:{self.started.port}/api/status"
        async with self.session.get(url) as response:
            told: JsonObject = await response.json()
            return told

    async def settle(self) -> None:
        """Asks it to stop training and come to rest."""
        url = f"http://127.0.0.1:{self.started.port}/api/settle"
        async with self.session.post(url, headers={ACTION_HEADER: "1"}):
            pass

    async def until(self, condition: Callable[[JsonObject], bool]) -> JsonObject:
        """The first status that meets the condition; TimeoutError with the last one told."""
        told: JsonObject = {}
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while True:
                    try:
                        told = await self.status()
                        if condition(told):
                            return told
                    except aiohttp.ClientError:
                        pass  # still starting
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            what = told.get("sentence", "nothing")
            raise TimeoutError(
                f"{self.started.name} has not come so far; it says: {what}"
            ) from error

    @property
    def daemon(self) -> psutil.Process:
        return psutil.Process(self.started.process.pid)

    @property
    def p2pd(self) -> psutil.Process:
        return self._child(lambda command: Path(command[0]).name == "p2pd")

    @property
    def learner(self) -> psutil.Process:
        return self._child(lambda command: "p2pdiloco_daemon.learner.process" in " ".join(command))

    @property
    def forkserver(self) -> psutil.Process:
        return self._child(lambda command: "forkserver" in command[0])

    def _child(self, is_wanted: Callable[[list[str]], bool]) -> psutil.Process:
        (child,) = (child for child in self.daemon.children() if is_wanted(child.cmdline()))
        return child


class Swarm:
    """Nodes of one run; made by `running_swarm`."""

    def __init__(self, directory: Path, invite: str, session: aiohttp.ClientSession) -> None:
        self.nodes: list[Node] = []
        self._directory = directory
        self._invite = invite
        self._session = session
        self._frozen: list[psutil.Process] = []

    async def join(self, name: str, home: Home = HERE) -> Node:
        """Starts a node; again under the same name, it goes on where it ended."""
        process = await start_node(self._directory / name, free_port(), self._invite, home)
        node = Node(process, self._session)
        self.nodes.append(node)
        return node

    async def leave(self, node: Node) -> None:
        self.nodes.remove(node)
        await end([node.started])

    async def kill(self, node: Node) -> None:
        """`kill -9` of its daemon; what it started ends by itself."""
        self.nodes.remove(node)
        node.started.process.kill()
        await node.started.process.wait()
        await end([node.started])

    def freeze(self, nodes: Sequence[Node]) -> None:
        """SIGSTOP for what talks to the network: connections stay open, nothing answers."""
        for node in nodes:
            for process in (node.daemon, node.p2pd):
                process.suspend()
                self._frozen.append(process)

    def thaw(self) -> None:
        while self._frozen:
            self._frozen.pop().resume()

    async def end(self) -> None:
        self.thaw()
        await end([node.started for node in self.nodes])


@asynccontextmanager
async def running_swarm(spec: RunSpec) -> AsyncIterator[Swarm]:
    """A bootstrap peer, no node yet; takes everything down."""
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-benchmark-") as name:
        directory = Path(name)
        write_draft(directory / "run.toml", spec)
        first = bootstrap_peer(
            directory / "run.toml", directory / "bootstrap", directory / "bootstrap.log"
        )
        async with first as invite, aiohttp.ClientSession() as session:
            swarm = Swarm(directory, invite, session)
            try:
                yield swarm
            finally:
                await swarm.end()


def merged(num_merges: int) -> Callable[[JsonObject], bool]:
    """A condition: that many merges."""
    return lambda told: told["merges_total"] >= num_merges


def merged_together(num_merges: int) -> Callable[[JsonObject], bool]:
    """A condition: that many merges, and another node at hand."""
    return lambda told: told["state"] == "training" and told["merges_total"] >= num_merges


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def machine() -> JsonObject:
    """What else to know about figures: cores, and how busy the machine was."""
    return {"cpus": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1)}


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write(path: Path, result: JsonObject, report: str) -> None:
    """Keeps a benchmark's figures as `path`.json and what it says about them as `path`.md."""
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(report + "\n")
    print(report)
