"""A state from several donors, real processes that are killed in the middle of it.

What a dead donor costs is counted in bytes: at most the chunks that it was asked for.
"""

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import aiohttp
import donor_process
import pytest
from yarl import URL

from p2pdiloco_bootstrap.serving import Traffic
from p2pdiloco_bootstrap.shelf import state_path
from p2pdiloco_daemon import fetch
from p2pdiloco_daemon.exchange import Chunk, Exchange, Fetched, FetchFailed
from p2pdiloco_daemon.fetch import CHUNK_BYTES, WORKERS_PER_DONOR, Gathering

pytestmark = pytest.mark.loopback

NUM_BYTES = (24 << 20) + 1000
DATA = random.Random(3).randbytes(NUM_BYTES)
DIGEST = blake2b(DATA, digest_size=32).hexdigest()
PATH = state_path(0, 8, DIGEST)
IN_FLIGHT_BYTES = WORKERS_PER_DONOR * CHUNK_BYTES
"""What one donor is asked for at a time."""


class Donor:
    """A process that serves `DATA`."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, donor_process.__file__, str(path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = ""

    def wait_until_it_serves(self) -> None:
        assert self._process.stdout
        self.url = self._process.stdout.readline().strip()
        assert self.url, "the donor ended"

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


class Transfer(Exchange):
    """Fetches from donors by name, and does what a test wants as bytes arrive."""

    def __init__(self, session: aiohttp.ClientSession, donors: dict[str, Donor]) -> None:
        self.down = Traffic()
        super().__init__(session, self.down, lambda name, path: URL(donors[name].url + path))
        self._names = list(donors)
        self.on_bytes: Callable[[], None] = lambda: None

    @property
    def received(self) -> int:
        return self.down.down["state"]

    async def run(self, body: Gathering) -> Fetched:
        return await self.fetch(self._names, PATH, NUM_BYTES, DIGEST, body=body)

    async def fetch_chunk(self, donor: str, chunk: Chunk) -> None:
        def arrived() -> None:
            chunk.progress()
            self.on_bytes()

        await super().fetch_chunk(donor, replace(chunk, progress=arrived))


@pytest.fixture(scope="module")
def state_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("donors") / "state"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def donors(state_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Donor]]:
    """Three; on a loaded machine none of them counts as slow, which would ask twice for a chunk."""
    monkeypatch.setattr(fetch, "STALLED_S", 1e9)
    monkeypatch.setattr(fetch, "PATIENCE_S", 1e9)
    started = {name: Donor(state_file) for name in ("anna", "bert", "cleo")}
    try:
        for donor in started.values():
            donor.wait_until_it_serves()
        yield started
    finally:
        for donor in started.values():
            donor.kill()


@pytest.mark.parametrize("percent", [10, 50, 90])
def test_a_donor_killed_on_the_way_costs_at_most_the_chunks_it_was_asked_for(
    donors: dict[str, Donor], percent: int
) -> None:
    victim = donors["anna"]

    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            transfer, body = Transfer(session, donors), Gathering(NUM_BYTES)

            def kill_at_last() -> None:
                if transfer.received >= NUM_BYTES * percent // 100 and victim.is_alive:
                    victim.kill()

            transfer.on_bytes = kill_at_last
            fetched = await transfer.run(body)
            assert fetched.data == DATA
            assert not victim.is_alive
            assert {"bert", "cleo"} <= set(fetched.bytes_by_donor)
            assert 0 <= transfer.received - NUM_BYTES <= IN_FLIGHT_BYTES

    asyncio.run(main())


def test_when_all_donors_have_died_each_ones_reason_is_told_and_the_rest_is_fetched_later(
    donors: dict[str, Donor], state_file: Path
) -> None:
    later = Donor(state_file)
    deaths = {"anna": 10, "bert": 50, "cleo": 90}

    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            transfer, body = Transfer(session, donors), Gathering(NUM_BYTES)

            def kill_one_by_one() -> None:
                for name, percent in deaths.items():
                    due = transfer.received >= NUM_BYTES * percent // 100
                    if due and donors[name].is_alive:
                        donors[name].kill()

            transfer.on_bytes = kill_one_by_one
            with pytest.raises(FetchFailed, match=r"none of 3 donors gave /v1/state/0/8/") as told:
                await transfer.run(body)
            assert set(told.value.reasons) == set(deaths)
            assert all(name in str(told.value) and why for name, why in told.value.reasons.items())
            assert told.value.liars == ()
            kept = body.num_bytes_here
            assert 0 <= transfer.received - kept <= 3 * IN_FLIGHT_BYTES
            assert kept >= NUM_BYTES * 90 // 100 - 3 * IN_FLIGHT_BYTES

            rest = Transfer(session, {"dora": later})
            fetched = await rest.run(body)
            assert fetched.data == DATA
            assert rest.received == NUM_BYTES - kept
            assert fetched.bytes_by_donor["dora"] == NUM_BYTES - kept

    try:
        later.wait_until_it_serves()
        asyncio.run(main())
    finally:
        later.kill()
