"""The demo's processes: one bootstrap peer and N nodes, each as one that a person has started.

Where it can be they are forked from a process that has imported what all of them need.

Each runs in a session of its own, so that Ctrl-C in the terminal reaches the supervisor alone. Each
holds the reading end of a pipe whose other end the supervisor has: when that closes, even by a
`kill -9`, they leave in order.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from p2pdiloco.errors import UserError
from p2pdiloco_bootstrap.control_sockets import remove_leftovers
from p2pdiloco_bootstrap.invite import PREFIX
from p2pdiloco_daemon.children.forkserver import ForkedProcess, Forkserver, reading
from p2pdiloco_daemon.demo.forked_command import written_order
from p2pdiloco_daemon.storage.place import IDENTITY_FILE

logger = logging.getLogger(__name__)

BOOTSTRAP_TIMEOUT_S = 600.0
"""Importing torch, making the first weights and starting a host take 10 s; on a machine with six
times more to do than cores, and from a cold disk, over two minutes."""

STOP_TIMEOUT_S = 10.0
"""What a node may take to leave before it is killed."""


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """A node; its directory is named as the node."""

    directory: Path
    port: int
    """Of its status page."""
    process: Process | ForkedProcess

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def end(self) -> str | None:
        """How the process ended, in words; None while it runs."""
        code = self.process.returncode
        if code is None:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


@dataclass(frozen=True, slots=True)
class Home:
    """Where processes run and are reached: this machine's loopback, unless said otherwise."""

    listen: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    """What to put before a command, to execute it elsewhere than here."""
    forkserver: Forkserver | None = None
    """Of `COMMANDS`, where there is one; what cannot be forked is executed."""
    network: Path | None = None
    """The namespace that a forked process enters."""


HERE = Home()


@contextlib.asynccontextmanager
async def bootstrap_peer(
    spec_file: Path, directory: Path, log: Path, home: Home = HERE
) -> AsyncIterator[str]:
    """The first peer, running; gives its invite."""
    where = ["--dir", str(directory), "--listen", home.listen, "--port", "0"]
    arguments = ["bootstrap", str(spec_file), *where]
    process = await _start(arguments, log, home, reads_output=True)
    try:
        async with asyncio.timeout(BOOTSTRAP_TIMEOUT_S):
            invite = await _read_invite(process)
        assert process.stdout is not None
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(_drain(process.stdout), name="drain bootstrap output")
            yield invite
            draining.cancel()
    except TimeoutError as error:
        raise UserError(
            f"the bootstrap peer gave no invite within {BOOTSTRAP_TIMEOUT_S:.0f} s, as when the "
            f"machine is busy with other programs; what it says is in {log}"
        ) from error
    finally:
        await stop([process])


async def start_node(directory: Path, port: int, invite: str, home: Home = HERE) -> NodeProcess:
    """One `p2pdiloco join`."""
    where = ["--dir", str(directory), "--port", str(port), "--listen", f"{home.listen}:0"]
    process = await _start(["join", invite, *where], directory.with_suffix(".log"), home)
    return NodeProcess(directory, port, process)


async def end(nodes: Sequence[NodeProcess]) -> None:
    """Stops those that still run, and takes away what those that were killed left behind."""
    await stop([node.process for node in nodes])
    for node in nodes:
        remove_leftovers(node.directory / IDENTITY_FILE)


async def stop(processes: Sequence[Process | ForkedProcess]) -> None:
    """SIGTERM, then after STOP_TIMEOUT_S SIGKILL, for those that still run."""
    running = [process for process in processes if process.returncode is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            for process in running:
                await process.wait()
    except TimeoutError:
        kill(running)
        for process in running:
            await process.wait()


def kill(processes: Sequence[Process | ForkedProcess]) -> None:
    """SIGKILL for those that still run."""
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


@functools.cache
def supervisor_pipe() -> int:
    """The reading end of a pipe that nobody writes to and that this process alone keeps open."""
    reading, _ = os.pipe()
    return reading


async def _start(
    arguments: Sequence[str], log: Path, home: Home, reads_output: bool = False
) -> Process | ForkedProcess:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as log_file:
        if home.forkserver:
            try:
                return await _fork(home.forkserver, arguments, home, log_file, reads_output)
            except OSError as error:
                logger.warning("%s is executed, since it cannot be forked: %s", arguments[0], error)
        return await _execute(arguments, home, log_file, reads_output)


async def _fork(
    forkserver: Forkserver,
    arguments: Sequence[str],
    home: Home,
    log: IO[bytes],
    reads_output: bool,
) -> ForkedProcess:
    said, output = socket.socketpair()
    with said, output, written_order(arguments, home.network, os.environ) as order:
        written = (output if reads_output else log).fileno()
        fds = (order.fileno(), written, supervisor_pipe())
        process = await forkserver.fork("p2pdiloco_daemon.demo.forked_command", log.fileno(), fds)
        if reads_output:
            process.stdout = await reading(said.dup())
        return process


async def _execute(
    arguments: Sequence[str], home: Home, log: IO[bytes], reads_output: bool
) -> Process:
    return await asyncio.create_subprocess_exec(
        *(*home.prefix, sys.executable, "-P"),  # a json.py in the working directory is not json
        *("-m", "p2pdiloco_daemon.cli.main", *arguments),
        *("--supervisor-fd", str(supervisor_pipe())),
        pass_fds=(supervisor_pipe(),),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE if reads_output else log,
        stderr=log,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


async def _read_invite(process: Process | ForkedProcess) -> str:
    assert process.stdout is not None
    async for line in process.stdout:
        text = line.decode(errors="replace").strip()
        if text.startswith(PREFIX):
            return text
    raise UserError(f"the bootstrap peer ended with {await process.wait()}; see its log")


async def _drain(stream: asyncio.StreamReader) -> None:
    """A pipe that nobody reads fills up and blocks its writer."""
    while await stream.read(65536):
        pass
