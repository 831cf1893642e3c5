"""How late a daemon's event loop gets while a large state is served to a peer and fetched from one.

    python -m benchmarks.loop_lag

Two processes with real hosts (p2pd, libp2p streams on loopback) and real holdings of the same model
of 25 million parameters: 200 MB of anchors and momenta, in memory and on disk. For `PHASE_S` each:
idle; one serves and the other fetches; both serve and fetch. A fetch is what a joiner does with
every fragment, again and again: chunks from the donor, digest, into a replica, onto the disk.
Lag is what a timer is late, as the daemon itself measures it (`p2pdiloco_daemon.lag`).
"""

import asyncio
import json
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import psutil

from benchmarks.empty_shelf import EmptyShelf
from benchmarks.swarm import machine, table, write
from p2pdiloco.optim.fragments import Fragment, TensorSlot
from p2pdiloco_bootstrap.host import Host, HostOptions, open_host
from p2pdiloco_bootstrap.serving import Body, Traffic
from p2pdiloco_bootstrap.shelf import exchange_application, state_path
from p2pdiloco_daemon.exchange import Check, Exchange
from p2pdiloco_daemon.lag import LagMonitor
from p2pdiloco_daemon.status.view import JsonObject
from p2pdiloco_daemon.storage.holdings import Holdings
from p2pdiloco_daemon.storage.replica import (
    FragmentState,
    Replica,
    genesis,
    packed_state_bytes,
    unpack_state,
)
from p2pdiloco_daemon.storage.store import Store

RESULTS = Path(__file__).parent / "results" / "loop_lag"
PARAMETERS = 25_000_000
FRAGMENTS = 6
SIZE = PARAMETERS // FRAGMENTS
PHASE_S = 20.0
"""Four hundred ticks of the lag monitor."""
PHASES = {
    "idle": (False, False),
    "first serves, second fetches": (False, True),
    "both serve and fetch": (True, True),
}
"""Whether the first process and the second one fetch."""
TARGET_P99_MS = 50.0


async def measure() -> JsonObject:
    """p50, p99 and worst lag of both processes in each phase, and what was fetched meanwhile."""
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-benchmark-") as name:
        async with AsyncExitStack() as stack:
            peers = [
                await stack.enter_async_context(_peer_process(Path(name) / str(number)))
                for number in range(2)
            ]
            greetings = [await _hear(peer) for peer in peers]
            for peer, greeting in zip(peers, reversed(greetings), strict=True):
                _say(peer, greeting)
            phases = {}
            for phase, fetching in PHASES.items():
                load = machine()["load_average"]
                for peer, fetches in zip(peers, fetching, strict=True):
                    _say(peer, {"fetch": fetches})
                first, second = [await _hear(peer) for peer in peers]
                phases[phase] = {"first": first, "second": second, "load_average": load}
    return {"parameters": PARAMETERS, "phase_s": PHASE_S, **machine(), "phases": phases}


def report(result: JsonObject) -> str:
    rows = [
        [
            phase,
            which,
            *(f"{told[figure]:.1f}" for figure in ("p50_ms", "p99_ms", "max_ms")),
            f"{told['fetched_mb_s']:.0f}",
            f"{told['cpu_share']:.0%}",
            lags["load_average"],
        ]
        for phase, lags in result["phases"].items()
        for which, told in lags.items()
        if which != "load_average"
    ]
    columns = ["phase", "process", "lag p50 ms", "p99", "max", "fetched MB/s", "CPU", "load"]
    return "\n".join(
        [
            (
                f"Event-loop lag with {result['parameters'] / 1e6:.0f} million parameters "
                f"({8 * result['parameters'] / 1e6:.0f} MB of state), {result['cpus']} cores; "
                f"target: p99 under {TARGET_P99_MS:.0f} ms."
            ),
            "",
            table(columns, rows),
        ]
    )


@asynccontextmanager
async def _peer_process(directory: Path) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.loop_lag", str(directory)), stdin=PIPE, stdout=PIPE
    )
    try:
        yield process
    finally:
        assert process.stdin
        process.stdin.close()
        await process.wait()


async def _hear(peer: Process) -> JsonObject:
    assert peer.stdout
    told: JsonObject = json.loads(await peer.stdout.readline())
    return told


def _say(peer: Process, words: JsonObject) -> None:
    assert peer.stdin
    peer.stdin.write(json.dumps(words).encode() + b"\n")


# ---------------------------------------------------------------- one of the two processes


class _Shelf(EmptyShelf):
    """Serves states, as a node does; there is nothing else."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings

    async def state(self, fragment: int, version: int, digest: str) -> Body | None:
        return await self._holdings.state_body(fragment, version, digest)


async def _be_a_peer(directory: Path) -> None:
    """Greets with its address, hears the other's, then measures once per line until the end."""
    loop, traffic = asyncio.get_running_loop(), Traffic()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    await asyncio.to_thread(directory.mkdir)
    async with AsyncExitStack() as stack:
        worker = stack.enter_context(ThreadPoolExecutor(1, "worker"))
        disk = stack.enter_context(ThreadPoolExecutor(1, "disk"))
        stores = [
            stack.enter_context(Store(directory / name, FRAGMENTS))
            for name in ("served", "fetched")
        ]
        served, fetched = (Holdings(_empty_replica(), store, worker, disk) for store in stores)
        for state in _states():
            served.replica.put(state)
            await served.disk.run(served.store.save_snapshot, state, None)
        options = HostOptions(identity_path=directory / "peer.key", listen=("127.0.0.1", 0))
        host = await stack.enter_async_context(open_host(options))
        application = exchange_application(_Shelf(served), traffic)
        await stack.enter_async_context(host.serving(application))
        print(json.dumps({"peer": host.peer_id, "addresses": await host.addresses()}), flush=True)
        other = json.loads(await commands.readline())
        await host.connect(other["peer"], other["addresses"])
        while line := await commands.readline():
            donor = other["peer"] if json.loads(line)["fetch"] else None
            print(json.dumps(await _phase(host, served, fetched, traffic, donor)), flush=True)


async def _phase(
    host: Host, served: Holdings, fetched: Holdings, traffic: Traffic, donor: str | None
) -> JsonObject:
    lag, fetched_before, process = LagMonitor(), traffic.down["state"], psutil.Process()
    process.cpu_percent()
    async with asyncio.TaskGroup() as tasks:
        measuring = tasks.create_task(lag.run(), name="lag")
        if donor:
            fetching = _fetch_all(Exchange(host.session(), traffic), served, fetched, donor)
            background = tasks.create_task(fetching, name="fetch")
        await asyncio.sleep(PHASE_S)
        measuring.cancel()
        if donor:
            background.cancel()
    return {
        "p50_ms": lag.percentile_ms(0.5),
        "p99_ms": lag.percentile_ms(0.99),
        "max_ms": lag.percentile_ms(1.0),
        "fetched_mb_s": (traffic.down["state"] - fetched_before) / PHASE_S / 1e6,
        "cpu_share": process.cpu_percent() / 100,
    }


async def _fetch_all(exchange: Exchange, served: Holdings, fetched: Holdings, donor: str) -> None:
    """What `NodeShell` does to take a state from a donor, for one fragment after the other. The
    donor serves what we serve."""
    while True:
        for state in filter(None, map(served.replica.state, range(FRAGMENTS))):
            p, size = state.fragment, state.anchor.size
            checked: list[FragmentState] = []
            await exchange.fetch(
                [donor],
                state_path(p, 0, state.digest),
                packed_state_bytes(size),
                state.digest,
                check=_unpacking(p, size, checked),
            )
            fetched.load(checked[-1], (), (), None)


def _unpacking(fragment: int, size: int, checked: list[FragmentState]) -> Check:
    return lambda data, digest: checked.append(unpack_state(data, fragment, size, digest))


def _empty_replica() -> Replica:
    fragments = tuple(
        Fragment(p, (TensorSlot(f"weights.{p}", (SIZE,), 0, False),)) for p in range(FRAGMENTS)
    )
    return Replica(
        fragments, outer_learning_rate=0.7, outer_momentum=0.5, wire="int8", merge_rule="rda"
    )


def _states() -> list[FragmentState]:
    """The same in both processes."""
    return [
        genesis(p, np.random.default_rng(p).standard_normal(SIZE, np.float32))
        for p in range(FRAGMENTS)
    ]


def main() -> None:
    if len(sys.argv) > 1:
        asyncio.run(_be_a_peer(Path(sys.argv[1])))
        return
    result = asyncio.run(measure())
    write(RESULTS, result, report(result))


if __name__ == "__main__":
    main()
