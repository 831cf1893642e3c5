"""How long messages wait while bodies fill an uplink, with the bucket and without it.

    python -m benchmarks.uplink

Two real hosts (p2pd, as a node has it) in network namespaces; the uplink of one carries a few
Mbit/s. The other fetches states from it all the time, two chunks at once as a joiner does, and
twice a second the one sends the other a message, which heartbeats are. In turns of `PHASE_S`.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lab import Rate, open_lab
from benchmarks.swarm import machine, table
from p2pdiloco.protocol.uplink import Uplink
from p2pdiloco_bootstrap.host import HostOptions, open_host
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_bootstrap.serving import Traffic
from p2pdiloco_bootstrap.shelf import Contribution, RecordsPage, exchange_application, state_path
from p2pdiloco_daemon.exchange import Exchange, ExchangeError

RESULTS = Path(__file__).parent / "results" / "uplink"
UPLINK_MBIT = 4.0
PORT = 7101
BODY = bytes(range(256)) * (16 << 12)
"""16 MiB: half a minute of the link."""
DIGEST = blake2b(BODY, digest_size=32).hexdigest()
IDLE_S, PHASE_S, LEARN_S = 8.0, 60.0, 20.0
"""Messages alone; a turn; what of it is left out while the rate is found."""


class _Open(Uplink):
    """A bucket that never fills."""

    def _adapt(self, now: float) -> None:
        pass


class _Shelf:
    async def spec(self) -> bytes:
        return b""

    async def records(self, fragment: int, since: int) -> RecordsPage | None:
        return None

    async def merge(self, fragment: int, version: int, digest: str) -> None:
        return None

    async def state(self, fragment: int, version: int, digest: str) -> bytes:
        return BODY

    async def contribution(
        self, peer: str, fragment: int, version: int, term: int, attempt: int
    ) -> Contribution | None:
        return None


async def home(directory: Path, other: str) -> None:
    """Serves, and sends messages; writes what they took."""
    options = HostOptions(identity_path=directory / "home.key", listen=("0.0.0.0", PORT))
    found: dict[str, Any] = {}
    traffic = Traffic()
    async with open_host(options) as host:
        exchange = Exchange(host.session(), traffic)
        async with host.serving(exchange_application(_Shelf(), traffic, lambda peer, body: True)):
            (directory / "ready").touch()
            while not await _send(exchange, other):  # noqa: ASYNC110 (it may not be up)
                await asyncio.sleep(0.5)
            for name, uplink in (("without", _Open()), ("with the bucket", Uplink())):
                traffic.uplink = uplink
                (directory / "go").unlink(missing_ok=True)
                idle = await _messages(exchange, other, IDLE_S)
                (directory / "go").touch()
                await _messages(exchange, other, LEARN_S)
                before, started = traffic.up["state"], time.monotonic()
                took = await _messages(exchange, other, PHASE_S - LEARN_S)
                sent = traffic.up["state"] - before
                found[name] = {
                    "idle_s": idle,
                    "took_s": took,
                    "mbit": 8e-6 * sent / (time.monotonic() - started),
                    "rate_mbit": 8e-6 * uplink.rate if uplink.rate else None,
                }
    (directory / "found.json").write_text(json.dumps(found))


async def _send(exchange: Exchange, other: str) -> float | None:
    """Seconds; None if it did not arrive."""
    started = time.monotonic()
    with suppress(ExchangeError):
        await exchange.send(other, bytes(400))
        return time.monotonic() - started
    return None


async def _messages(exchange: Exchange, other: str, seconds: float) -> list[float | None]:
    end, sending = time.monotonic() + seconds, []
    while time.monotonic() < end:
        sending.append(asyncio.create_task(_send(exchange, other)))
        await asyncio.sleep(0.5)
    return [await task for task in sending]


async def away(directory: Path, other: str, address: str) -> None:
    """Takes messages; fetches while it should."""
    options = HostOptions(
        identity_path=directory / "away.key", listen=("0.0.0.0", PORT), bootstraps=(address,)
    )
    traffic = Traffic()
    async with open_host(options) as host:
        exchange = Exchange(host.session(), traffic)
        async with host.serving(exchange_application(_Shelf(), traffic, lambda peer, body: True)):
            while not (directory / "found.json").exists():
                await asyncio.sleep(0.2)
                if (directory / "go").exists():
                    with suppress(ExchangeError):
                        path = state_path(0, 1, DIGEST)
                        await exchange.fetch([other], path, len(BODY), DIGEST)


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, open_lab() as lab:
        directory = Path(name)
        ids = {
            host: Identity.load_or_create(directory / f"{host}.key").peer_id
            for host in ("home", "away")
        }
        here = lab.public("home", Rate(up=UPLINK_MBIT))
        there = lab.public("away")
        address = f"/ip4/{here.address}/tcp/{PORT}/p2p/{ids['home']}"
        command = [sys.executable, "-m", "benchmarks.uplink"]
        arguments = {
            "home": ["home", name, ids["away"], ""],
            "away": ["away", name, ids["home"], address],
        }
        serving = subprocess.Popen([*here.prefix, *command, *arguments["home"]])
        try:
            while not (directory / "ready").exists():
                time.sleep(0.2)
            asking = subprocess.Popen([*there.prefix, *command, *arguments["away"]])
            try:
                if serving.wait(timeout=3 * PHASE_S + 60):
                    raise SystemExit("the serving host failed")
            finally:
                asking.kill()
                asking.wait()
        finally:
            serving.kill()
            serving.wait()
        return {**json.loads((directory / "found.json").read_text()), "machine": machine()}


def report(found: dict[str, Any]) -> str:
    rows = []
    for name in ("without", "with the bucket"):
        took = found[name]["took_s"]
        arrived = sorted(seconds for seconds in took if seconds is not None)
        rows.append(
            [
                name,
                f"{1e3 * median(arrived):.0f}" if arrived else "-",
                f"{1e3 * arrived[int(0.95 * len(arrived))]:.0f}" if arrived else "-",
                f"{len(took) - len(arrived)} of {len(took)}",
                f"{found[name]['mbit']:.2f}",
            ]
        )
    idle_s = median(s for s in found["without"]["idle_s"] if s)
    columns = ["", "median, ms", "95 %, ms", "lost", "bodies, Mbit/s"]
    return (
        f"# Messages beside bodies\n\nAn uplink of {UPLINK_MBIT} Mbit/s, on which a message alone "
        f"takes {1e3 * idle_s:.0f} ms. Load average {found['machine']['load_average']} on "
        f"{found['machine']['cpus']} cores.\n\n" + table(columns, rows) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", nargs="?", choices=["home", "away"])
    parser.add_argument("arguments", nargs="*")
    args = parser.parse_args()
    if args.part == "home":
        asyncio.run(home(Path(args.arguments[0]), args.arguments[1]))
    elif args.part == "away":
        directory, other, address = args.arguments
        asyncio.run(away(Path(directory), other, address))
    else:
        found = measure()
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(report(found))
        print(report(found))


if __name__ == "__main__":
    main()
