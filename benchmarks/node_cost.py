"""What a volunteer's machine pays for a node: processor and memory of its processes.

    python -m benchmarks.node_cost

Three nodes of the tiny model on this machine, merging all the time; nobody looks at their pages.
Memory is the proportional set size where Linux tells it: pages that several processes share, torch
above all, are divided among them, so that they add up. A machine that runs one node only pays
more of them: the resident size is the upper bound.
"""

import asyncio
from pathlib import Path
from statistics import median

import psutil

from benchmarks.swarm import Node, machine, merged_together, running_swarm, table, write
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "node_cost"
NODES = 3
WINDOW_S = 30.0
PROCESSES = {
    "daemon": "daemon",
    "p2pd": "network (p2pd)",
    "learner": "learner",
    "forkserver": "forkserver",
}


async def measure() -> JsonObject:
    async with running_swarm(RunSpec(name="node-cost")) as swarm:
        nodes = [await swarm.join(f"node-{number}") for number in range(1, NODES + 1)]
        for node in nodes:
            await node.until(merged_together(6))
        before = [(await node.status(), _used(node)) for node in nodes]
        started = asyncio.get_running_loop().time()
        await asyncio.sleep(WINDOW_S)
        after = [(_used(node), await node.status()) for node in nodes]
        seconds = asyncio.get_running_loop().time() - started
        rows = [
            _row(told_before, used_before, used_after, told_after, seconds) | _memory(node)
            for node, (told_before, used_before), (used_after, told_after) in zip(
                nodes, before, after, strict=True
            )
        ]
    return {**machine(), "seconds": seconds, "nodes": rows}


def _processes(node: Node) -> dict[str, psutil.Process]:
    return {name: getattr(node, name) for name in PROCESSES}


def _used(node: Node) -> dict[str, tuple[float, int]]:
    """Processor seconds and voluntary switches, each of which ends in a wakeup."""
    used = {}
    for name, process in _processes(node).items():
        with process.oneshot():
            times, switches = process.cpu_times(), process.num_ctx_switches()
        used[name] = (times.user + times.system, switches.voluntary)
    return used


def _row(
    told_before: JsonObject,
    before: dict[str, tuple[float, int]],
    after: dict[str, tuple[float, int]],
    told_after: JsonObject,
    seconds: float,
) -> JsonObject:
    row: JsonObject = {
        "merges": told_after["merges_total"] - told_before["merges_total"],
        "steps": told_after["learner"]["step"] - told_before["learner"]["step"],
        "disk_bytes": told_after["checkpoint"]["bytes_on_disk"],
        "loop_lag_p99_ms": told_after["loop_lag"]["p99_ms"],
    }
    for name in PROCESSES:
        row[f"{name}_cores"] = (after[name][0] - before[name][0]) / seconds
        row[f"{name}_wakeups_s"] = (after[name][1] - before[name][1]) / seconds
    return row


def _memory(node: Node) -> JsonObject:
    memory: JsonObject = {}
    for name, process in _processes(node).items():
        full = process.memory_full_info()
        memory[f"{name}_rss_bytes"] = full.rss
        memory[f"{name}_pss_bytes"] = getattr(full, "pss", full.rss)
    return memory


def report(result: JsonObject) -> str:
    nodes = result["nodes"]

    def middle(name: str) -> float:
        return float(median(node[name] for node in nodes))

    rows = [
        [
            title,
            f"{middle(f'{name}_cores'):.1%}",
            f"{middle(f'{name}_wakeups_s'):.0f}",
            f"{middle(f'{name}_pss_bytes') / 1e6:.0f}",
            f"{middle(f'{name}_rss_bytes') / 1e6:.0f}",
        ]
        for name, title in PROCESSES.items()
    ]
    beside = sum(middle(f"{name}_cores") for name in PROCESSES if name != "learner")
    columns = ["process", "of a core", "wakeups/s", "memory, MB", "resident, MB"]
    return "\n".join(
        [
            (
                f"One node of a swarm of {len(nodes)}, tiny model, medians over the nodes; "
                f"{result['cpus']} cores shared by all, load average {result['load_average']}, "
                f"{middle('merges') / result['seconds']:.1f} merges and "
                f"{middle('steps') / result['seconds']:.1f} steps per second."
            ),
            "",
            table(columns, rows),
            "",
            (
                f"Beside the learner: {beside:.1%} of a core, "
                f"{1000 * beside * result['seconds'] / middle('merges'):.0f} ms of processor time "
                f"per merge; {middle('disk_bytes') / 1e6:.0f} MB on disk."
            ),
        ]
    )


def main() -> None:
    result = asyncio.run(measure())
    write(RESULTS, result, report(result))


if __name__ == "__main__":
    main()
