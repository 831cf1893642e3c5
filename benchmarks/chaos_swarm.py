"""A swarm of real daemons to which faults are done, and that is mended again.

Each node runs in a network namespace of its own where the machine allows that (`lab`), else on
loopback, where nobody can be cut off; its directory is a small file system of its own where the
machine allows that, else no disk can be filled. `missing` says what was left out. Everything is
started as a person starts it, and ended by process id. Not here: what must hold (`chaos_watch`).
"""

import asyncio
import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks import lab
from benchmarks.chaos_faults import HARMLESS_FOR_LEARNERS, Fault, Kind
from benchmarks.swarm import free_port
from p2pdiloco.spec import DataSpec, InnerSpec, ModelSpec, RunSpec, SyncSpec
from p2pdiloco_daemon.children.forkserver import Forkserver
from p2pdiloco_daemon.cli.new import write_draft
from p2pdiloco_daemon.demo.processes import Home, NodeProcess, bootstrap_peer, start_node
from p2pdiloco_daemon.status.app import ACTION_HEADER
from p2pdiloco_daemon.status.view import JsonObject

SPEC = RunSpec(
    name="chaos",
    model=ModelSpec(
        config={
            "model_type": "llama",
            "vocab_size": 256,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "tie_word_embeddings": True,
        }
    ),
    data=DataSpec(sequence_length=32),
    inner=InnerSpec(batch_size=2),
    sync=SyncSpec(inner_steps=32, num_fragments=3, term_merges=2),
)
"""Steps of a few milliseconds, so that merges come several times a second."""

DISK_BYTES = 16 << 20
"""Of a node's own file system: some hundred times what it keeps."""

STATUS_TIMEOUT = aiohttp.ClientTimeout(total=2)

GONE_S = 120.0
"""For the processes of a killed daemon to end. It takes 0.2 s, but a learner that is still
importing torch notices only afterwards: 8 seconds of a core, on a busy machine a minute."""

CHILD_S = 120.0
"""For a daemon that was just started to start what is to be killed."""

LEAVE_S = 60.0
"""For an orderly leave, in which a busy machine may be slow."""

POLL_S = 0.1


class Broken(AssertionError):
    """Something that was promised does not hold."""


class Node:
    """A node over all its lives."""

    def __init__(self, directory: Path, invite: str, host: lab.Host | None, home: Home) -> None:
        self.directory = directory
        self.lives = 0
        self.disturbances = 0
        """Beginnings and ends of faults that keep its learner from stepping, or from telling."""
        self._invite = invite
        self._host = host
        self._home = home
        self._port = host.call(free_port) if host else free_port()
        self._started: NodeProcess | None = None
        self._family: dict[int, psutil.Process] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=self._new_socket, force_close=True),
            timeout=STATUS_TIMEOUT,
        )

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def host(self) -> lab.Host:
        assert self._host, "nodes are in a lab"
        return self._host

    @property
    def log(self) -> Path:
        return self.directory.with_suffix(".log")

    @property
    def started(self) -> NodeProcess:
        assert self._started, f"{self.name} was never started"
        return self._started

    @property
    def daemon(self) -> psutil.Process:
        return psutil.Process(self.started.process.pid)

    @property
    def learner(self) -> psutil.Process:
        return self._child("p2pdiloco_daemon.learner.process")

    @property
    def p2pd(self) -> psutil.Process:
        return self._child("p2pd")

    async def start(self) -> None:
        self.lives += 1
        self._started = await start_node(self.directory, self._port, self._invite, self._home)

    async def status(self) -> JsonObject | None:
        """None while it starts, is stopped, busy or dead."""
        try:
            async with self._session.get(self._url("status")) as response:
                status: JsonObject = await response.json()
                return status
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def settle(self) -> None:
        """Asks it to stop training; whether it heard that, its status tells."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(self._url("settle"), headers={ACTION_HEADER: "1"}):
                pass

    def family(self) -> list[psutil.Process]:
        """Daemon, p2pd and learner, and whatever else it started in this life that still lives."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self.daemon, *self.daemon.children(recursive=True)):
                self._family[process.pid] = process
        return [process for process in self._family.values() if _lives(process)]

    async def ends(self, kind: Kind) -> None:
        """Its daemon, in the way of that kind of fault."""
        await (self.leave() if kind is Kind.LEAVE else self.kill())
        if kind is Kind.KILL_DAEMON_AND_DISK:
            self.wipe()

    async def kill(self) -> None:
        """`kill -9` of the daemon alone; the others must end by themselves."""
        self.family()
        self.started.process.kill()
        await self._ends()

    async def leave(self) -> None:
        """SIGTERM."""
        self.family()
        self.started.process.terminate()
        try:
            async with asyncio.timeout(LEAVE_S):
                code = await self.started.process.wait()
        except TimeoutError:
            raise Broken(f"{self.name} has not left {LEAVE_S:.0f} s after SIGTERM") from None
        if code != 0:
            raise Broken(f"{self.name} left with exit code {code}")
        await self._ends()
        if sockets := [path.name for path in self.directory.iterdir() if path.is_socket()]:
            raise Broken(f"{self.name} left and its sockets stay: {sockets}")

    def wipe(self) -> None:
        for path in self.directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    async def end(self) -> None:
        """Whatever is left of it."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._started:
            await self._started.process.wait()
        await self._session.close()

    async def _ends(self) -> None:
        deadline = time.monotonic() + GONE_S
        while orphans := self.family():
            if time.monotonic() > deadline:
                raise Broken(f"{self.name} has ended and its processes live on: {orphans}")
            await asyncio.sleep(POLL_S)
        await self.started.process.wait()
        self._family.clear()

    def _child(self, name: str) -> psutil.Process:
        for child in self.daemon.children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if name in (child.name(), *" ".join(child.cmdline()).split()):
                    return child
        raise LookupError(f"{self.name} has no {name} just now")

    def _new_socket(self, info: tuple[object, ...]) -> socket.socket:
        make = functools.partial(socket.socket, socket.AF_INET, socket.SOCK_STREAM)
        return self._host.call(make) if self._host else make()

    def _url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._port}/api/{name}"


class ChaosSwarm:
    """A bootstrap peer and nodes; made by `running_chaos_swarm`."""

    def __init__(self, root: Path, nodes: Mapping[str, Node], laboratory: lab.Lab | None) -> None:
        self.root = root
        self.nodes = nodes
        self.missing: list[str] = []
        """Which faults cannot be had here, and why."""
        self._lab = laboratory

    def possible(self, faults: Sequence[Fault]) -> list[Fault]:
        """Those of the faults that can be done here."""
        without = set()
        if self._lab is None:
            without.add(Kind.CUT_OFF)
        if not _own_disks():
            without.add(Kind.FILL_DISK)
        return [fault for fault in faults if fault.kind not in without]

    async def inflict(self, fault: Fault) -> None:
        """Does it, and undoes it."""
        await asyncio.sleep(fault.at_s)
        nodes = [self.nodes[name] for name in fault.nodes]
        with _marked(nodes, fault.kind):
            match fault.kind:
                case Kind.KILL_LEARNER | Kind.KILL_P2PD:
                    for node in nodes:
                        await kill_child(node, fault.kind)
                case Kind.STOP_DAEMON | Kind.STOP_LEARNER | Kind.STOP_P2PD | Kind.STOP_NODE:
                    with _stopped(nodes, fault.kind):
                        await asyncio.sleep(fault.for_s)
                case Kind.FILL_DISK:
                    with _full_disks(nodes):
                        await asyncio.sleep(fault.for_s)
                case Kind.CUT_OFF:
                    with self._cut_off(nodes):
                        await asyncio.sleep(fault.for_s)
                case _:
                    await together(node.ends(fault.kind) for node in nodes)
                    await asyncio.sleep(fault.for_s)
                    for node in nodes:
                        await node.start()

    @contextlib.contextmanager
    def _cut_off(self, nodes: Sequence[Node]) -> Iterator[None]:
        assert self._lab
        inside = [node.host for node in nodes]
        outside = [host for host in self._lab.hosts.values() if host not in inside]
        self._lab.cut(inside, outside)
        try:
            yield
        finally:
            self._lab.mend()


async def kill_child(node: Node, kind: Kind) -> None:
    """`kill -9` of the learner or p2pd, as soon as there is one."""
    deadline = time.monotonic() + CHILD_S
    while True:
        try:
            (node.learner if kind is Kind.KILL_LEARNER else node.p2pd).kill()
            return
        except (LookupError, psutil.NoSuchProcess):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(POLL_S)


@contextlib.contextmanager
def _stopped(nodes: Sequence[Node], kind: Kind) -> Iterator[None]:
    """SIGSTOP, then SIGCONT."""
    processes = [process for node in nodes for process in _processes(node, kind)]
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def _processes(node: Node, kind: Kind) -> list[psutil.Process]:
    match kind:
        case Kind.STOP_DAEMON:
            return [node.daemon]
        case Kind.STOP_LEARNER:
            return [node.learner]
        case Kind.STOP_P2PD:
            return [node.p2pd]
        case _:
            return node.family()


@contextlib.contextmanager
def _full_disks(nodes: Sequence[Node]) -> Iterator[None]:
    fillers = [node.directory / "filler" for node in nodes]
    try:
        for filler in fillers:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
        yield
    finally:
        for filler in fillers:
            filler.unlink(missing_ok=True)


@contextlib.contextmanager
def _marked(nodes: Sequence[Node], kind: Kind) -> Iterator[None]:
    """Counts what excuses a learner from stepping."""
    excused = 0 if kind in HARMLESS_FOR_LEARNERS else 1
    for node in nodes:
        node.disturbances += excused
    try:
        yield
    finally:
        for node in nodes:
            node.disturbances += excused


async def together(calls: Iterable[Coroutine[Any, Any, object]]) -> None:
    """All at once; the first that fails ends the others, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(call)
    except ExceptionGroup as group:
        raise group.exceptions[0] from group


@contextlib.asynccontextmanager
async def running_chaos_swarm(
    num_nodes: int,
    spec: RunSpec = SPEC,
    disk_bytes: int = DISK_BYTES,
    forkserver: Forkserver | None = None,
) -> AsyncIterator[ChaosSwarm]:
    """Nodes that were just started, node-1 first; takes everything down, and leaves the logs if
    anything failed. Nodes that the forkserver forks are there sooner, with all else alike.
    """
    async with contextlib.AsyncExitStack() as stack:
        root = stack.enter_context(_root())
        why_no_lab = lab.why_not()
        laboratory = None if why_no_lab else stack.enter_context(lab.open_lab())
        hosts = {
            name: laboratory.public(name) if laboratory else None
            for name in ("first", *(f"node-{number}" for number in range(1, num_nodes + 1)))
        }
        write_draft(root / "run.toml", spec)
        home = _home_on(hosts.pop("first"), forkserver)
        invite = await stack.enter_async_context(
            bootstrap_peer(root / "run.toml", root / "first", root / "first.log", home)
        )
        nodes = {}
        for name, host in hosts.items():
            stack.enter_context(_directory(root / name, disk_bytes))
            nodes[name] = Node(root / name, invite, host, _home_on(host, forkserver))
            stack.push_async_callback(nodes[name].end)
        swarm = ChaosSwarm(root, nodes, laboratory)
        if why_no_lab:
            swarm.missing.append(f"{Kind.CUT_OFF.value}: {why_no_lab}")
        if not _own_disks():
            swarm.missing.append(f"{Kind.FILL_DISK.value}: mounting a file system needs root")
        for node in nodes.values():
            await node.start()
        yield swarm


def _home_on(host: lab.Host | None, forkserver: Forkserver | None) -> Home:
    if host is None:
        return Home(forkserver=forkserver)
    return Home("0.0.0.0", host.prefix, forkserver, host.network)


@contextlib.contextmanager
def _root() -> Iterator[Path]:
    """A temporary directory, which stays for whoever looks for the reason if anything fails."""
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    yield root
    shutil.rmtree(root)


@contextlib.contextmanager
def _directory(path: Path, disk_bytes: int) -> Iterator[None]:
    """An empty directory, on a file system of its own if that can be had."""
    path.mkdir()
    if not _own_disks():
        yield
        return
    _mount(path, disk_bytes)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@functools.cache
def _own_disks() -> bool:
    """Whether this process may mount a file system."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as trial:
        try:
            _mount(Path(trial), DISK_BYTES)
        except (OSError, subprocess.CalledProcessError):
            return False
        subprocess.run(["umount", trial], check=True)
    return True


def _mount(path: Path, num_bytes: int) -> None:
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "chaos", str(path)]
    subprocess.run(command, check=True, capture_output=True)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
