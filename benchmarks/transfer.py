"""What a joiner's state costs it: bytes fetched over the size of the state, on links of several
speeds, from one, two and four donors, and what a donor costs that dies on the way.

    python -m benchmarks.transfer

Donors serve a file over HTTP on loopback; between them and the joiner lies one downlink, a bucket
of bytes that all connections share. While the state travels, a merge is made every
`MERGE_INTERVAL_S`, of half a byte per parameter: those made meanwhile are fetched afterwards, until
the joiner stands at the head. The plain fetch beside it is one GET of the whole, over an equal
link. A donor dies by its connections being reset.

The cost of what guards a state is measured too: writing a merge so that it outlives a power cut,
and hashing a state before it is built upon.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from yarl import URL

from benchmarks.empty_shelf import EmptyShelf
from benchmarks.swarm import machine, table, write
from p2pdiloco_bootstrap.serving import Body, Traffic, serving_on_tcp
from p2pdiloco_bootstrap.shelf import (
    exchange_application,
    merge_path,
    state_path,
)
from p2pdiloco_daemon.exchange import Chunk, Exchange
from p2pdiloco_daemon.fetch import CHUNK_BYTES, Gathering
from p2pdiloco_daemon.status.view import JsonObject
from p2pdiloco_daemon.storage.replica import make_state, require_sound
from p2pdiloco_daemon.storage.store import Store

RESULTS = Path(__file__).parent / "results" / "transfer"
PARAMETERS = 1_000_000
"""Of one fragment."""
STATE_BYTES = 8 * PARAMETERS
MERGE_BYTES = PARAMETERS // 2
MERGE_INTERVAL_S = 4.0
LINKS_MBIT_S = (5, 20, 100)
NUM_DONORS = (1, 2, 4)
KILLS_PERCENT = (10, 50, 90)
KILL_LINK_MBIT_S = 20
PIECE_BYTES = 16 * 1024
WRITES = 30

STATE = random.Random(1).randbytes(STATE_BYTES)
MERGE = random.Random(2).randbytes(MERGE_BYTES)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=32).hexdigest()


STATE_PATH = state_path(0, 1, _digest(STATE))
MERGE_PATH = merge_path(0, 2, _digest(MERGE))


class _Shelf(EmptyShelf):
    """The same state and the same merge under any name."""

    async def merge(self, fragment: int, version: int, digest: str) -> Body | None:
        return MERGE

    async def state(self, fragment: int, version: int, digest: str) -> Body | None:
        return STATE


# ---------------------------------------------------------------- the link


@dataclass
class Downlink:
    """Lets so many bytes per second through, of all connections together."""

    bytes_per_s: float
    free_at: float = 0.0

    async def take(self, num_bytes: int) -> None:
        now = time.monotonic()
        self.free_at = max(self.free_at, now) + num_bytes / self.bytes_per_s
        await asyncio.sleep(max(0.0, self.free_at - now))


@dataclass
class Line:
    """A donor behind the link: a relay whose connections can be cut."""

    url: str
    is_dead: bool = False
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def die(self) -> None:
        self.is_dead = True
        for writer in self.writers:
            writer.transport.abort()


@asynccontextmanager
async def _behind(link: Downlink, donor_url: str) -> AsyncIterator[Line]:
    port = urlsplit(donor_url).port

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if line.is_dead:
            writer.transport.abort()
            return
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        line.writers += [writer, up_writer]
        with suppress(ConnectionError):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_copy(reader, up_writer, None))
                tasks.create_task(_copy(up_reader, writer, link))

    server = await asyncio.start_server(relay, "127.0.0.1", 0, limit=2 * PIECE_BYTES)
    line = Line(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server:
        yield line
        line.die()


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Downlink | None
) -> None:
    with suppress(ConnectionError):
        while piece := await reader.read(PIECE_BYTES):
            if link:
                await link.take(len(piece))
            writer.write(piece)
            await writer.drain()
    writer.close()


class _Joiner(Exchange):
    """Does what it was told as bytes of the state arrive."""

    def __init__(self, session: aiohttp.ClientSession, lines: list[Line]) -> None:
        self.down = Traffic()
        super().__init__(session, self.down, lambda name, path: URL(lines[int(name)].url + path))
        self.donors = [str(number) for number in range(len(lines))]
        self.on_bytes: Callable[[int], None] = lambda received: None

    async def fetch_chunk(self, donor: str, chunk: Chunk) -> None:
        def arrived() -> None:
            chunk.progress()
            self.on_bytes(self.down.down["state"])

        await super().fetch_chunk(donor, replace(chunk, progress=arrived))


@asynccontextmanager
async def _joiner(num_donors: int, mbit_s: float) -> AsyncIterator[tuple[_Joiner, list[Line]]]:
    link = Downlink(mbit_s * 1e6 / 8)
    async with AsyncExitStack() as stack:
        lines = []
        for _ in range(num_donors):
            application = exchange_application(_Shelf(), Traffic())
            url = await stack.enter_async_context(serving_on_tcp(application))
            lines.append(await stack.enter_async_context(_behind(link, url)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield _Joiner(session, lines), lines


# ---------------------------------------------------------------- what is measured


async def _join(num_donors: int, mbit_s: float) -> JsonObject:
    """From nothing to the head of a fragment that is merged meanwhile."""
    async with _joiner(num_donors, mbit_s) as (joiner, _):
        started = time.monotonic()
        body = Gathering(STATE_BYTES)
        await joiner.fetch(joiner.donors, STATE_PATH, STATE_BYTES, _digest(STATE), body=body)
        state_s, merges = time.monotonic() - started, 0
        while merges < int((time.monotonic() - started) / MERGE_INTERVAL_S):
            await joiner.fetch(joiner.donors, MERGE_PATH, MERGE_BYTES, _digest(MERGE))
            merges += 1
        return {
            "link_mbit_s": mbit_s,
            "donors": num_donors,
            "state_s": state_s,
            "state_mb_s": STATE_BYTES / state_s / 1e6,
            "state_bytes": joiner.down.down["state"],
            "merges": merges,
            "at_head_s": time.monotonic() - started,
            "bytes_over_state": joiner.down.down.total() / STATE_BYTES,
        }


async def _plain(mbit_s: float) -> float:
    """MB/s of one GET."""
    async with _joiner(1, mbit_s) as (joiner, _):
        started = time.monotonic()
        await joiner.get("0", STATE_PATH, STATE_BYTES)
        return STATE_BYTES / (time.monotonic() - started) / 1e6


async def _killed_at(percent: int) -> JsonObject:
    """Three donors, of which the first dies when so much has arrived."""
    async with _joiner(3, KILL_LINK_MBIT_S) as (joiner, lines):

        def kill(received: int) -> None:
            if received >= STATE_BYTES * percent // 100 and not lines[0].is_dead:
                lines[0].die()

        joiner.on_bytes = kill
        started, body = time.monotonic(), Gathering(STATE_BYTES)
        await joiner.fetch(joiner.donors, STATE_PATH, STATE_BYTES, _digest(STATE), body=body)
        return {
            "killed_at_percent": percent,
            "took_s": time.monotonic() - started,
            "wasted_bytes": joiner.down.down["state"] - STATE_BYTES,
        }


def _guards() -> JsonObject:
    """Milliseconds: a merge written so that it outlives a power cut, a state hashed."""
    values = np.random.default_rng(1).standard_normal((2, PARAMETERS)).astype(np.float32)
    state = make_state(0, 1, values[0].copy(), values[1].copy())
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as directory,
        Store(Path(directory), 1) as store,
    ):
        written = [
            _ms(lambda version=version: store.save_merge(0, version, MERGE, bytes(1000)))  # type: ignore[misc]
            for version in range(1, WRITES + 1)
        ]
    hashed = [_ms(lambda: require_sound(state)) for _ in range(WRITES)]
    return {
        "merge_bytes": MERGE_BYTES,
        "write_ms_median": statistics.median(written),
        "write_ms_max": max(written),
        "state_bytes": STATE_BYTES,
        "hash_ms_median": statistics.median(hashed),
        "hash_mb_s": STATE_BYTES / statistics.median(hashed) / 1e3,
    }


def _ms(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


async def measure() -> JsonObject:
    plain = {mbit_s: await _plain(mbit_s) for mbit_s in LINKS_MBIT_S}
    joins = [await _join(num, mbit_s) for mbit_s in LINKS_MBIT_S for num in NUM_DONORS]
    for join in joins:
        join["over_plain"] = join["state_mb_s"] / plain[join["link_mbit_s"]]
    return {
        **machine(),
        "parameters": PARAMETERS,
        "chunk_bytes": CHUNK_BYTES,
        "merge_interval_s": MERGE_INTERVAL_S,
        "plain_mb_s": plain,
        "joins": joins,
        "kills": [await _killed_at(percent) for percent in KILLS_PERCENT],
        "guards": await asyncio.to_thread(_guards),
    }


def report(result: JsonObject) -> str:
    joins = [
        [
            f"{j['link_mbit_s']} Mbit/s",
            str(j["donors"]),
            f"{j['state_mb_s']:.2f} MB/s",
            f"{j['over_plain']:.2f}",
            f"{j['merges']}",
            f"{j['at_head_s']:.1f} s",
            f"{j['bytes_over_state']:.2f}",
        ]
        for j in result["joins"]
    ]
    kills = [
        [f"{k['killed_at_percent']} %", f"{k['wasted_bytes'] / 1e6:.2f} MB", f"{k['took_s']:.1f} s"]
        for k in result["kills"]
    ]
    guards = result["guards"]
    conditions = (
        f"A fragment of {result['parameters'] / 1e6:.0f} million parameters (8 MB), a merge of "
        f"0.5 MB every {result['merge_interval_s']:.0f} s, all processes on one machine, load "
        f"average {result['load_average']:.1f}."
    )
    cost = (
        f"A merge of {guards['merge_bytes'] / 1e6:.1f} MB is on disk after "
        f"{guards['write_ms_median']:.0f} ms (median; {guards['write_ms_max']:.0f} ms at most); "
        f"a state of {guards['state_bytes'] / 1e6:.0f} MB is hashed in "
        f"{guards['hash_ms_median']:.0f} ms ({guards['hash_mb_s']:.0f} MB/s)."
    )
    columns = [
        "link",
        "donors",
        "state",
        "over one plain GET",
        "merges made meanwhile",
        "at the head after",
        "bytes over the state's",
    ]
    deaths = f"Of three donors the first dies, on {KILL_LINK_MBIT_S} Mbit/s:"
    tables = [table(columns, joins), deaths, table(["dies at", "fetched twice", "took"], kills)]
    return "\n\n".join([conditions, *tables, cost])


def main() -> None:
    result = asyncio.run(measure())
    write(RESULTS, result, report(result))


if __name__ == "__main__":
    main()
