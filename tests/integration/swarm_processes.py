"""Real daemons on loopback or in a lab, started as a person does, and ended by process ids."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import psutil
from forked import ForkedDaemon, fork_daemon

from p2pdiloco_bootstrap.app import PEER_KEY
from p2pdiloco_bootstrap.control_sockets import remove_leftovers
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_bootstrap.invite import PREFIX
from p2pdiloco_daemon.status.app import ACTION_HEADER
from p2pdiloco_daemon.status.view import JsonObject
from p2pdiloco_daemon.storage.place import IDENTITY_FILE

T = TypeVar("T")

PATIENCE_S = 400.0
"""On a slow machine that runs other things too, where importing torch alone may take minutes."""

LEAVE_S = 60.0
"""A node promises to be out within ten seconds; here others may have the processors just then."""

_COMMAND = "p2pdiloco_daemon.cli.main"

NUM_FRAGMENTS = 3
SPEC = f"""
name = "small"
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
tie_word_embeddings = true
[data]
sequence_length = 32
[inner]
batch_size = 2
[sync]
inner_steps = 8
num_fragments = {NUM_FRAGMENTS}
term_merges = 2
"""


def wait_until(what: str, condition: Callable[[], T | None], timeout_s: float = PATIENCE_S) -> T:
    """The first value of `condition` that is true; it is asked five times a second."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.2)


class Machine(Protocol):
    """Where a process runs: here, or on a host of `benchmarks.lab`."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before its command, to execute it there."""

    @property
    def network(self) -> Path | None:
        """What it enters otherwise."""

    def call(self, function: Callable[[], T]) -> T:
        """The result of `function`, whose sockets are those of the machine."""


class Loopback:
    """This machine, of which a node then uses the loopback interface only."""

    prefix: tuple[str, ...] = ()
    network = None

    def call(self, function: Callable[[], T]) -> T:
        return function()


LOOPBACK = Loopback()


def listen_host(machine: Machine) -> str:
    return "127.0.0.1" if machine is LOOPBACK else "0.0.0.0"


class Daemon:
    """A `p2pdiloco` process and what it started; its output is in `log`."""

    def __init__(
        self, directory: Path, arguments: Sequence[str], machine: Machine = LOOPBACK
    ) -> None:
        self.directory = directory
        self.machine = machine
        self.log = directory.with_suffix(".log")
        home = directory.parent / "home"
        environment = {"HOME": str(home), "PYTHONUNBUFFERED": "1"}
        self.process: ForkedDaemon | subprocess.Popen[bytes]
        with self.log.open("ab") as log:
            if sys.platform == "linux":
                self.process = fork_daemon(arguments, log.fileno(), environment, machine.network)
            else:
                self.process = subprocess.Popen(
                    [
                        *machine.prefix,
                        sys.executable,
                        "-m",
                        "p2pdiloco_daemon.cli.main",
                        *arguments,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, **environment},
                )
        self._children: list[psutil.Process] = []

    def children(self) -> list[psutil.Process]:
        """All that it ever started and that was seen here."""
        with contextlib.suppress(psutil.NoSuchProcess):
            living = psutil.Process(self.process.pid).children(recursive=True)
            self._children += [child for child in living if child not in self._children]
        return self._children

    def kill(self) -> None:
        """`kill -9`, of the daemon alone."""
        self.children()
        self.process.kill()
        self.process.wait()

    def leave(self) -> None:
        """SIGTERM, after which it must be gone soon."""
        self.children()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(LEAVE_S)

    def orphans(self) -> list[psutil.Process]:
        """What it started and that lives on."""
        return [child for child in self.children() if is_running(child)]

    def left_nothing(self) -> bool:
        return not self.orphans()

    def end(self) -> None:
        """Whatever is left of it."""
        self.kill()
        for child in self.orphans():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        for key in (IDENTITY_FILE, PEER_KEY):
            remove_leftovers(self.directory / key)


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


_RUNS: dict[str, dict[Path, bytes]] = {}
"""By description: what its owner has made of it. To make first weights takes seconds, and all tests
with the same description may have the same."""


def _contents(root: Path, *patterns: str) -> dict[Path, bytes]:
    found = [path for pattern in patterns for path in root.glob(pattern)]
    return {path.relative_to(root): path.read_bytes() for path in found}


def _restore(contents: Mapping[Path, bytes], root: Path) -> None:
    for path, content in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


class BootstrapProcess(Daemon):
    """The first peer of a run; `invite` is good as long as it lives.

    Again in the same `root` it is the same peer, at the same address where `port` is named.
    """

    def __init__(
        self, root: Path, machine: Machine = LOOPBACK, port: int = 0, spec: str = SPEC
    ) -> None:
        described = root / "run.toml"
        described.write_text(spec)
        directory = root / "boot"
        if not directory.exists():
            _restore(_RUNS.get(spec, {}), root)
        Identity.load_or_create(root / "run.key")
        directory.with_suffix(".log").unlink(missing_ok=True)
        where = ["--dir", str(directory), "--listen", listen_host(machine), "--port", str(port)]
        super().__init__(directory, ["bootstrap", str(described), *where], machine)
        self.invite = wait_until("the invite", self._read_invite)
        if spec not in _RUNS:
            _RUNS[spec] = _contents(root, "run.key", "boot/run.spec", "boot/genesis/*")

    def _read_invite(self) -> str | None:
        assert self.process.poll() is None, self.log.read_text()
        lines = self.log.read_text().splitlines()
        return next((line for line in lines if line.startswith(PREFIX)), None)


class NodeProcess(Daemon):
    """One `p2pdiloco join`; without `invite` it goes on with the run of its directory.

    Its page is on `port`, or on a free one that it takes itself and tells of in its log, which it
    goes on with where the directory had one before.
    """

    def __init__(
        self,
        directory: Path,
        invite: str | None = None,
        port: int = 0,
        machine: Machine = LOOPBACK,
        options: Sequence[str] = (),
    ) -> None:
        log = directory.with_suffix(".log")
        self._log_start = log.stat().st_size if log.exists() else 0
        self._page: str | None = None
        listen = f"{listen_host(machine)}:0"
        where = ["--dir", str(directory), "--port", str(port), "--listen", listen]
        arguments = ["join", *([invite] if invite else []), *where, *options]
        super().__init__(directory, arguments, machine)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def page(self) -> str:
        """The address of its page, soon."""
        return wait_until(f"the page of {self.directory.name}", self._find_page)

    def _find_page(self) -> str | None:
        if self._page is None:
            with self.log.open(errors="replace") as log:
                log.seek(self._log_start)
                told = re.search(r"the status page is at (\S+)/\n", log.read())
            self._page = told[1] if told else None
        return self._page

    def status(self) -> JsonObject | None:
        """None while it starts, is busy or dead."""
        page = self._find_page()
        if page is None:
            return None
        try:
            status: JsonObject = json.loads(self.ask(f"{page}/api/status", timeout_s=2))
            return status
        except (OSError, ValueError, http.client.HTTPException):
            return None

    def get(self) -> JsonObject:
        """Its status, soon."""
        return wait_until(f"a status of {self.directory.name}", self.status)

    def post(self, name: str, body: bytes = b"") -> None:
        """An action that its page offers."""
        url, headers = f"{self.page}/api/{name}", {ACTION_HEADER: "1"}
        self.ask(urllib.request.Request(url, body, headers, method="POST"))

    def settle(self) -> None:
        self.post("settle")

    def versions(self) -> list[int]:
        """Of its fragments, -1 for one that it does not hold; none while it starts or is busy."""
        status = self.status()
        return [f["version"] for f in status["fragments"]] if status else []

    def trains(self) -> bool:
        status = self.status()
        return bool(status and status["state"] == "training" and status["learner"]["step_s"])

    def sees(self, count: int) -> bool:
        """Whether it trains among so many nodes that can contribute, itself included."""
        status = self.status()
        members = status["members"] if status else []
        return self.trains() and sum(m["ready"] and m["alive"] for m in members) == count

    def learner(self) -> psutil.Process | None:
        return self._child("p2pdiloco_daemon.learner.process")

    def rollout_worker(self) -> psutil.Process | None:
        return self._child("p2pdiloco_daemon.rollouts.process")

    def _child(self, module: str) -> psutil.Process | None:
        return next((c for c in self.children() if is_running(c) and _runs(c, module)), None)

    def network_process(self) -> psutil.Process | None:
        return next((c for c in self.children() if is_running(c) and c.name() == "p2pd"), None)

    def sockets(self) -> list[Path]:
        return [path for path in self.directory.iterdir() if path.is_socket()]

    def words(self) -> str:
        return self.log.read_text(errors="replace")

    def ask(self, request: str | urllib.request.Request, timeout_s: float = PATIENCE_S) -> bytes:
        """The answer of its page; HTTPError for a refusal."""

        def ask() -> bytes:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer: bytes = response.read()
                return answer

        return self.machine.call(ask)


def all_reached(versions: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether each fragment has its version or a later one; what nobody told of has none."""
    return bool(versions) and all(v >= w for v, w in zip(versions, wanted, strict=True))


def settle_on_one_lineage(nodes: Sequence[NodeProcess]) -> None:
    """Training stops; returns when all have come to rest at the same heads."""
    for node in nodes:
        node.settle()

    def agreed() -> bool:
        found = [status for node in nodes if (status := node.status())]
        heads = [[(f["version"], f["digest"]) for f in status["fragments"]] for status in found]
        settled = [status["state"] == "settled" for status in found]
        one = len(found) == len(nodes) and all(settled) and all(h == heads[0] for h in heads)
        return one and all(digest for _version, digest in heads[0])

    wait_until("one lineage", agreed)


def _runs(process: psutil.Process, module: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return module in " ".join(process.cmdline()).split()  # what is forked has one word there
    return False
