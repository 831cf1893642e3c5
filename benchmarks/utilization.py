"""What the strategies make of slow links: the share of its time that a learner takes steps.

    python -m benchmarks.utilization [STRATEGY ...]      measures; default: all of them
    python -m benchmarks.utilization diloco --links 3.5 --window 100
    python -m benchmarks.utilization report              the table of what was measured

Real daemons in network namespaces, each behind an up- and downlink of the same shaped rate, train
the 1 M model with learners that take a step by the clock (`paced_learner`). A swarm is started
once per strategy and its links are narrowed step by step. Beside utilization stands the model of
Factored Gossip DiLoCo, u = Tc / (max(Tc, T1) + T2), with Tc = H steps and the times that the bytes
of a round take on the link, each member's uplink shared by those it serves.

Our gossip does not wait for a late Mix1 but goes on stepping, so its utilization is not what the
link costs; the length of its rounds is, which is told beside it.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.lab import Host, Lab, open_lab
from benchmarks.paced_learner import STEP_S
from benchmarks.swarm import machine, table, write
from p2pdiloco.spec import RunSpec, SyncSpec
from p2pdiloco_daemon.cli.new import write_draft
from p2pdiloco_daemon.demo.processes import Home, NodeProcess, bootstrap_peer, end, start_node
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "utilization"
NODES = 4
INNER_STEPS = 12
START_S = 500.0
SETTLE_S = 12.0
"""On a link that has just been narrowed, before anything is measured."""
WINDOW_S = 36.0
LINKS_MBIT_S = (10.0, 5.0, 2.5)
PARAMETERS = 1_020_000
VECTOR_BYTES = PARAMETERS * 1.0
"""In int8."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "diloco": {"strategy": "diloco", "num_fragments": 1},
    "GlobalM1LocalM2": {"strategy": "gossip", "num_fragments": 1, "mix": "GlobalM1LocalM2"},
    "GlobalM1": {"strategy": "gossip", "num_fragments": 1, "mix": "GlobalM1"},
    "pairwise": {"strategy": "gossip", "num_fragments": 1, "mix": "pairwise"},
    "factored": {"strategy": "factored", "num_fragments": 1, "quorum": 3},
    "quorum": {"strategy": "quorum", "num_fragments": 6, "quorum": 2},
}


def predicted(strategy: str, mbit_s: float) -> float | None:
    """u of the model; None where it says nothing."""
    compute_s, vector_s = INNER_STEPS * STEP_S, VECTOR_BYTES * 8 / (mbit_s * 1e6)
    others = NODES - 1
    match strategy:
        case "diloco":  # all outer gradients into one downlink, the merge out of one uplink
            return compute_s / (compute_s + 2 * others * vector_s)
        case "GlobalM1":
            return compute_s / max(compute_s, others * vector_s)
        case "GlobalM1LocalM2":
            return compute_s / (max(compute_s, others * vector_s) + vector_s)
        case "pairwise":
            return compute_s / max(compute_s, vector_s)
        case "factored":  # starts to one partner, outer gradients to all
            return compute_s / (max(compute_s, vector_s) + others * vector_s)
    return None


def free_of(home: Home) -> Home:
    """The same place, for a node with a paced learner."""
    return Home(home.listen, (*home.prefix, sys.executable, "-m", "benchmarks.paced_node"))


async def measure(
    strategy: str, links_mbit_s: Sequence[float], window_s: float
) -> list[JsonObject]:
    spec = RunSpec(
        name="utilization", sync=SyncSpec(inner_steps=INNER_STEPS, **STRATEGIES[strategy])
    )
    with open_lab() as lab, tempfile.TemporaryDirectory(prefix="p2pdiloco-utilization-") as name:
        directory = Path(name)
        write_draft(directory / "run.toml", spec)
        first = lab.public("first")
        hosts = [lab.public(f"node{i}") for i in range(NODES)]
        home = Home(first.address, first.prefix)
        bootstrap = bootstrap_peer(
            directory / "run.toml", directory / "bootstrap", directory / "bootstrap.log", home
        )
        async with bootstrap as invite:
            nodes: list[NodeProcess] = []
            try:
                for i, host in enumerate(hosts):
                    at = free_of(Home(host.address, host.prefix))
                    nodes.append(await start_node(directory / f"n{i}", 8100 + i, invite, at))
                await _until_merged(hosts)
                return [
                    await _window(strategy, lab, hosts, mbit_s, window_s) for mbit_s in links_mbit_s
                ]
            finally:
                await end(nodes)


async def _window(
    strategy: str, lab: Lab, hosts: list[Host], mbit_s: float, window_s: float
) -> JsonObject:
    for host in hosts:
        lab.narrow(host, mbit_s)
    await asyncio.sleep(SETTLE_S)
    before = await _statuses(hosts)
    started = asyncio.get_running_loop().time()
    await asyncio.sleep(window_s)
    after = await _statuses(hosts)
    row = _row(strategy, mbit_s, before, after, asyncio.get_running_loop().time() - started)
    print(json.dumps(row), flush=True)
    return row


def _row(
    strategy: str,
    mbit_s: float,
    before: list[JsonObject],
    after: list[JsonObject],
    seconds: float,
) -> JsonObject:
    def grown(*path: str) -> list[float]:
        return [_at(b, path) - _at(a, path) for a, b in zip(before, after, strict=True)]

    rounds = [
        sum(f["version"] for f in b["fragments"]) - sum(f["version"] for f in a["fragments"])
        for a, b in zip(before, after, strict=True)
    ]
    fragments = len(after[0]["fragments"])
    processed, merged = sum(grown("tokens", "processed")), sum(grown("tokens", "merged"))
    closed = [r for told in after for r in told["rounds"] if r["seconds_ago"] < seconds]
    together = [len(r["contributors"]) for r in closed]
    return {
        "strategy": strategy,
        "mbit_s": mbit_s,
        "seconds": round(seconds, 1),
        "utilization": round(sum(grown("learner", "step")) * STEP_S / (NODES * seconds), 3),
        "steps_per_round": round(
            sum(grown("learner", "step")) / max(1, sum(rounds)) * fragments, 1
        ),
        "merged_share": round(merged / processed, 3) if processed else None,
        "members_per_round": round(sum(together) / len(together), 2) if together else None,
        "megabytes_sent_per_node": round(sum(grown("traffic", "sent_bytes")) / NODES / 1e6, 2),
        "parameters_apart": [
            told["disagreement"]["parameters_share"] for told in after if told["disagreement"]
        ],
        "load_average": round(os.getloadavg()[0], 1),
    }


def _at(told: JsonObject, path: tuple[str, ...]) -> float:
    value: Any = told
    for key in path:
        value = value[key]
    return float(value)


async def _until_merged(hosts: list[Host]) -> None:
    async with asyncio.timeout(START_S):
        while True:
            try:
                told = await _statuses(hosts)
            except (aiohttp.ClientError, OSError):
                told = []
            if told and all(t["merges_total"] >= 2 and t["learner"]["step"] > 2 for t in told):
                return
            await asyncio.sleep(1.0)


async def _statuses(hosts: list[Host]) -> list[JsonObject]:
    return [await asyncio.to_thread(_status, host, 8100 + i) for i, host in enumerate(hosts)]


def _status(host: Host, port: int) -> JsonObject:
    """In the host's namespace, where its page is."""
    from urllib.request import urlopen

    def read() -> JsonObject:
        with urlopen(f"http://127.0.0.1:{port}/api/status", timeout=10) as response:
            told: JsonObject = json.load(response)
            return told

    return host.call(read)


def report(result: JsonObject) -> str:
    columns = [
        "strategy", "Mbit/s", "utilization", "model", "steps per round", "members per round",
        "tokens merged", "MB sent per node and minute", "s", "load",
    ]  # fmt: skip
    rows = [
        [
            row["strategy"],
            f"{row['mbit_s']:g}",
            f"{row['utilization']:.0%}",
            f"{model:.0%}" if (model := predicted(row["strategy"], row["mbit_s"])) else "-",
            row["steps_per_round"],
            row["members_per_round"],
            f"{row['merged_share']:.0%}" if row["merged_share"] is not None else "-",
            f"{row['megabytes_sent_per_node'] * 60 / row['seconds']:.1f}",
            f"{row['seconds']:.0f}",
            f"{row['load_average']:.0f}",
        ]
        for row in sorted(result["rows"], key=_place)
    ]
    return (
        f"# Utilization on slow links\n\n{NODES} nodes, 1.02 M parameters, int8, H = {INNER_STEPS} "
        f"steps of {STEP_S} s by the clock; every node behind an up- and downlink of this rate. "
        f"One window of so many seconds each, at this load average of the machine; "
        f"`python -m benchmarks.utilization`.\n\n"
        f"{table(columns, rows)}\n"
    )


def _place(row: JsonObject) -> tuple[int, float]:
    return list(STRATEGIES).index(row["strategy"]), -row["mbit_s"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--links", type=float, nargs="+", default=LINKS_MBIT_S, help="Mbit/s")
    parser.add_argument("--window", type=float, default=WINDOW_S, help="seconds")
    options = parser.parse_args()
    what = options.what
    path = RESULTS.with_suffix(".json")
    kept: JsonObject = json.loads(path.read_text()) if path.exists() else {"rows": []}
    for strategy in [] if what == ["report"] else what:
        rows = asyncio.run(measure(strategy, options.links, options.window))
        measured = [(strategy, mbit_s) for mbit_s in options.links]
        others = [r for r in kept["rows"] if (r["strategy"], r["mbit_s"]) not in measured]
        kept = {**machine(), "rows": others + rows}
        write(RESULTS, kept, report(kept))
    write(RESULTS, kept, report(kept))


if __name__ == "__main__":
    main()
