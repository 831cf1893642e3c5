"""What a merge and the talk around it cost on the wire, counted in a swarm of two real nodes.

    python -m benchmarks.wire

For each wire format a run of the tiny model: bytes of the outer gradients pulled and of the merges
fetched, as the nodes' own counters have them, over the parameters in them. The counters leave out
HTTP headers, encryption and the DHT; in the first run the bytes on the interface tell what those
add. That needs a network namespace of its own, which Linux gives to root; without it, it is left
out.
"""

import asyncio
import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections import Counter
from pathlib import Path

import psutil

from benchmarks.swarm import Node, machine, merged_together, running_swarm, table, write
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "wire"
FORMATS = ("int8", "int4", "bf16")
WINDOW_S = 15.0
LOOK_S = 1.5
"""The page tells of the last 20 rounds only."""
CONTROL = ("message", "records")
HIVEMIND_KB_S = 65
"""Sent by each peer of a hivemind run that only trains: DHT, progress reports, matchmaking."""

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


async def measure(own_network: bool) -> JsonObject:
    rows: JsonObject = {}
    for wire in FORMATS:
        spec = RunSpec.model_validate({"name": f"wire-{wire}", "sync": {"wire": wire}})
        async with running_swarm(spec) as swarm:
            nodes = [await swarm.join("first"), await swarm.join("second")]
            for node in nodes:
                await node.until(merged_together(6))
            rows[wire] = await _tensor_bytes(nodes)
            if wire == FORMATS[0]:
                rows[wire] |= await _control_bytes(nodes, own_network)
    return {**machine(), "window_s": WINDOW_S, "formats": rows}


async def _tensor_bytes(nodes: list[Node]) -> JsonObject:
    """Bytes and parameters of what was pulled and fetched in a window."""
    before = [await node.status() for node in nodes]
    known = {key for told in before for key in _merges(told)}
    rounds: dict[tuple[int, int], JsonObject] = {}
    async with asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(asyncio.sleep(WINDOW_S), name="window")
        while not ending.done():
            await asyncio.sleep(LOOK_S)
            after = [await node.status() for node in nodes]
            for told in after:
                rounds |= _merges(told)
    sizes = [fragment["num_values"] for fragment in before[0]["fragments"]]
    new = [told for key, told in rounds.items() if key not in known]
    grown = _grown(before, after)
    return {
        "merges": len(new),
        "merge_bytes": grown["merge"],
        "merge_parameters": sum(sizes[told["fragment"]] for told in new),
        "contribution_bytes": grown["contribution"],
        "contribution_parameters": sum(
            sizes[told["fragment"]] * len(set(told["contributors"]) - {told["synchronizer"]})
            for told in new
        ),
    }


async def _control_bytes(nodes: list[Node], own_network: bool) -> JsonObject:
    """Per second and node; nobody looks at the pages meanwhile, which would be on the wire too."""
    before = [await node.status() for node in nodes]
    started, sent = asyncio.get_running_loop().time(), _interface_bytes()
    await asyncio.sleep(WINDOW_S)
    seconds, sent = asyncio.get_running_loop().time() - started, _interface_bytes() - sent
    grown = _grown(before, [await node.status() for node in nodes])
    share = seconds * len(nodes)
    told: JsonObject = {"control_bytes_s": sum(grown[kind] for kind in CONTROL) / share}
    if own_network:
        tensors = sum(grown.values()) - sum(grown[kind] for kind in CONTROL)
        told |= {"tensor_bytes_s": tensors / share, "interface_bytes_s": sent / share}
    return told


def _merges(told: JsonObject) -> dict[tuple[int, int], JsonObject]:
    """By fragment and version: what the page tells of rounds that ended in a merge."""
    return {
        (seen["fragment"], seen["version"]): seen
        for seen in told["rounds"]
        if seen["outcome"] == "merged"
    }


def _grown(before: list[JsonObject], after: list[JsonObject]) -> Counter[str]:
    """Bytes that all nodes have received, by kind."""
    grown = Counter[str]()
    for told in after:
        grown.update(_received(told))
    for told in before:
        grown.subtract(_received(told))
    return grown


def _received(told: JsonObject) -> dict[str, int]:
    by_kind = told["traffic"]["by_kind"]
    return {kind: count["received_bytes"] for kind, count in by_kind.items()}


def report(result: JsonObject) -> str:
    rows = [
        [
            wire,
            row["merges"],
            _bits(row["contribution_bytes"], row["contribution_parameters"]),
            _bits(row["merge_bytes"], row["merge_parameters"]),
        ]
        for wire, row in result["formats"].items()
    ]
    columns = ["wire", "merges", "outer gradient, bits per parameter", "merge, bits per parameter"]
    told = result["formats"][FORMATS[0]]
    control = f"Control messages: {told['control_bytes_s'] / 1e3:.1f} kB/s and node"
    if "interface_bytes_s" in told:
        rest = told["interface_bytes_s"] - told["tensor_bytes_s"]
        control += (
            f"; all that is no tensor, with headers, encryption, acknowledgements and DHT, the "
            f"bootstrap peer's included: {rest / 1e3:.1f} kB/s and node on the interface, beside "
            f"{told['tensor_bytes_s'] / 1e3:.0f} kB/s of tensors"
        )
    return "\n".join(
        [
            (
                f"Two nodes, tiny model, {result['window_s']:.0f} s of each format, load average "
                f"{result['load_average']}. In brackets: how much smaller than 4 bytes. One merge "
                "more or less at the window's ends is an error of a few percent."
            ),
            "",
            table(columns, rows),
            "",
            f"{control}. A hivemind run: {HIVEMIND_KB_S} kB/s.",
        ]
    )


def _bits(num_bytes: int, parameters: int) -> str:
    bits = 8 * num_bytes / parameters
    return f"{bits:.2f} ({32 / bits:.1f}x)"


# ---------------------------------------------------------------- the network


def _enter_own_network() -> bool:
    """A loopback interface that nobody else uses, for this process and all it starts."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    return True


def _interface_bytes() -> int:
    """All that the loopback interface has carried, packet headers included."""
    counters = psutil.net_io_counters(pernic=True)
    return sum(told.bytes_sent for name, told in counters.items() if name.startswith("lo"))


def main() -> None:
    own_network = _enter_own_network()
    result = asyncio.run(measure(own_network))
    write(RESULTS, result, report(result))


if __name__ == "__main__":
    main()
