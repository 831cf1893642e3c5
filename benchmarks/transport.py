"""What libp2p streams cost beside plain TCP: the same application, client and bytes over both.

    python -m benchmarks.transport

A second process serves 64 MiB on loopback, over a libp2p stream and on a TCP socket; fetches of
all of it over the two alternate. Both directions of the encryption, two p2pd and two Pythons share
this machine's CPUs, so over a real link the difference is smaller. Messages go one after another.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Mapping
from contextlib import AbstractAsyncContextManager
from hashlib import blake2b
from pathlib import Path

import aiohttp
from yarl import URL

from benchmarks.empty_shelf import EmptyShelf
from p2pdiloco_bootstrap.host import Host, HostOptions, open_host
from p2pdiloco_bootstrap.serving import Traffic, serving_on_tcp
from p2pdiloco_bootstrap.shelf import (
    exchange_application,
    merge_path,
)
from p2pdiloco_daemon.exchange import Exchange

RESULTS = Path(__file__).parent / "results" / "transport.json"
BODY = bytes(range(256)) * (64 << 12)
DIGEST = blake2b(BODY, digest_size=32).hexdigest()
REPEATS = 7
MESSAGES = 500
MESSAGE = bytes(300)


class OneBody(EmptyShelf):
    """A shelf with nothing but `BODY`."""

    async def merge(self, fragment: int, version: int, digest: str) -> bytes:
        return BODY


def main() -> None:
    if len(sys.argv) > 1:
        asyncio.run(serve(Path(sys.argv[1])))
        return
    with tempfile.TemporaryDirectory() as directory:
        rows = asyncio.run(measure(Path(directory)))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"cpus": os.cpu_count(), "transports": rows}, indent=1) + "\n")
    print(report(rows))


async def serve(directory: Path) -> None:
    """The other process: says where it listens, then serves until its input closes."""
    application = [
        exchange_application(OneBody(), Traffic(), lambda peer, body: True) for _ in range(2)
    ]
    async with (
        open_loopback_host(directory / "server.key") as host,
        host.serving(application[0]),
        serving_on_tcp(application[1]) as url,
    ):
        place = {"peer": host.peer_id, "addresses": await host.addresses(), "url": url}
        print(json.dumps(place), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def open_loopback_host(identity_path: Path) -> AbstractAsyncContextManager[Host]:
    return open_host(HostOptions(identity_path=identity_path, listen=("127.0.0.1", 0)))


async def measure(directory: Path) -> dict[str, dict[str, float]]:
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.transport",
        str(directory),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        place = json.loads(await server.stdout.readline())
        async with (
            open_loopback_host(directory / "client.key") as host,
            aiohttp.ClientSession() as session,
        ):
            await host.connect(place["peer"], place["addresses"])
            exchanges = {
                "libp2p": Exchange(host.session(), Traffic()),
                "tcp": Exchange(session, Traffic(), lambda peer, path: URL(place["url"] + path)),
            }
            return await measure_all(exchanges, place["peer"])
    finally:
        server.stdin.close()
        await server.wait()


async def measure_all(exchanges: Mapping[str, Exchange], peer: str) -> dict[str, dict[str, float]]:
    path = merge_path(0, 1, DIGEST)
    get_s, fetch_s, send_s = (defaultdict[str, list[float]](list) for _ in range(3))
    for _ in range(REPEATS):
        for name, exchange in exchanges.items():
            get_s[name].append(await timed(exchange.get(peer, path, len(BODY))))
            fetch_s[name].append(await timed(exchange.fetch([peer], path, len(BODY), DIGEST)))
    for _ in range(MESSAGES):
        for name, exchange in exchanges.items():
            send_s[name].append(await timed(exchange.send(peer, MESSAGE)))
    return {name: summary(get_s[name], fetch_s[name], send_s[name]) for name in exchanges}


async def timed(call: Awaitable[object]) -> float:
    """Seconds that `call` takes."""
    started = time.perf_counter()
    await call
    return time.perf_counter() - started


def summary(get_s: list[float], fetch_s: list[float], send_s: list[float]) -> dict[str, float]:
    return {
        "get_mb_per_s": len(BODY) / 1e6 / statistics.median(get_s),
        "fetch_mb_per_s": len(BODY) / 1e6 / statistics.median(fetch_s),
        "message_ms_median": 1e3 * statistics.median(send_s),
        "message_ms_p99": 1e3 * sorted(send_s)[len(send_s) * 99 // 100],
    }


def report(rows: Mapping[str, Mapping[str, float]]) -> str:
    lines = [
        f"{name:8}{row['get_mb_per_s']:10.0f}{row['fetch_mb_per_s']:12.0f}"
        f"{row['message_ms_median']:14.2f}{row['message_ms_p99']:10.2f}"
        for name, row in rows.items()
    ]
    return "\n".join(["        get MB/s  fetch MB/s  message ms p50       p99", *lines])


if __name__ == "__main__":
    main()
