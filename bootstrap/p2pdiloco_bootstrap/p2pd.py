"""The child process p2pd: hivemind's build of go-libp2p, which carries all our traffic.

We start it ourselves rather than through `hivemind.P2P.create`, for three things it cannot do:
control sockets in a directory of ours, no signal from the terminal's Ctrl-C before we have said
goodbye, and bootstrap peers that may be down without failing the start.
"""

import asyncio
import importlib.resources
import logging
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from p2pdiloco.errors import UserError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 20.0
"""A start takes 0.4 s; a busy machine with a cold disk is given fifty times that."""

STOP_TIMEOUT_S = 2.0
"""After SIGTERM; then SIGKILL. p2pd keeps nothing that would need saving."""

_LINES_KEPT = 20
"""Last lines of output, for the message when p2pd ends by itself."""


class DaemonEnded(ConnectionError):
    """p2pd has ended though nobody asked it to."""


class NetworkDaemon:
    """A running p2pd."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ended(self) -> DaemonEnded:
        """Returns when the process has ended, with the reason as an exception to raise."""
        code = await self._process.wait()
        last = f"; its last words: {self._lines[-1]}" if self._lines else ""
        return DaemonEnded(
            f"the network process p2pd (pid {self.pid}) ended with code {code}{last}"
        )

    async def _read_until_ready(self) -> None:
        while line := await self._read_line():
            if line.startswith("Peer ID:"):
                return
        if await self._process.wait() < 0:  # by a signal: it has found nothing wrong itself
            raise await self.wait_ended()
        raise _start_failed("\n".join(self._lines))

    async def _drain(self) -> None:
        """Reads to the end: a child whose pipe is full would stop."""
        while await self._read_line():
            pass

    async def _read_line(self) -> str:
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
        except ValueError:  # longer than the reader's limit of 64 KiB
            return "(a line too long to keep)"
        text = line.decode(errors="replace").rstrip("\n")
        if line:
            self._lines.append(text)
            log.debug("p2pd: %s", text)
        return text or (" " if line else "")

    async def _stop(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:  # stopped by SIGSTOP, or stuck
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def running_p2pd(
    arguments: Sequence[str], one_thread: bool = False
) -> AsyncIterator[NetworkDaemon]:
    """p2pd, ready to be spoken to; UserError when it cannot start, `DaemonEnded` when it is killed
    before it could. It is gone afterwards.
    """
    with importlib.resources.as_file(
        importlib.resources.files("hivemind.hivemind_cli") / "p2pd"
    ) as binary:
        daemon = NetworkDaemon(await _spawn(binary, arguments, one_thread))
        drain: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await daemon._read_until_ready()
            drain = asyncio.create_task(daemon._drain(), name="p2pd output")
            yield daemon
        except TimeoutError as error:
            if drain is not None:  # the body's own, not the start's
                raise
            raise UserError(
                f"the network process p2pd did not start in {START_TIMEOUT_S:.0f} s; "
                "is this machine out of memory or its disk stuck? Then try again"
            ) from error
        finally:
            await daemon._stop()
            if drain is not None:
                await drain


async def _spawn(
    binary: Path, arguments: Sequence[str], one_thread: bool
) -> asyncio.subprocess.Process:
    environment = os.environ | {"GOLOG_LOG_LEVEL": "error"}
    if one_thread:
        environment["GOMAXPROCS"] = "1"
    try:
        return await asyncio.create_subprocess_exec(
            str(binary),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            process_group=0,  # a Ctrl-C in the terminal is for us; we stop p2pd last
        )
    except OSError as error:
        raise UserError(
            f"cannot start the network process {binary}: {error.strerror}; "
            "reinstall hivemind for this machine (Linux or macOS; on Windows use WSL)"
        ) from error


def _start_failed(output: str) -> UserError:
    if taken := re.search(r"listen (?:tcp|udp)\S* (\S+): bind: address already in use", output):
        return UserError(
            f"{taken[1]} is in use by another program (perhaps another node); "
            "stop that one or choose another port"
        )
    if denied := re.search(r"listen \S+ (\S+): bind: (.+)", output):
        return UserError(
            f"cannot listen on {denied[1]}: {denied[2]}; choose another address or port"
        )
    return UserError(
        f"the network process p2pd did not start: {output[-500:] or 'it said nothing'}; "
        "check the addresses in the configuration"
    )
