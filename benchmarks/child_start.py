"""How soon a learner is there: forked, against executed, as a node starts one that has died.

    python -m benchmarks.child_start [--times 5]

Both kinds by turns, on this machine, tiny preset: seconds from the order to the first word of a
learner that has built its model and read its text (`Ready`), and processor seconds that it took by
then. The forkserver has done its imports before, as in a node that has lived for a while.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import get_args

import psutil

from benchmarks.made_up import made_up_spec
from benchmarks.swarm import machine, table, write
from p2pdiloco.optim.fragments import fragments_of
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.children.channel import MessageReader
from p2pdiloco_daemon.children.child import Child, start_child
from p2pdiloco_daemon.children.forkserver import Forkserver, running_forkserver
from p2pdiloco_daemon.children.shared_memory import memory_bytes, open_memory_file
from p2pdiloco_daemon.learner.learner import Learner
from p2pdiloco_daemon.learner.messages import Command, Message, Ready, Start
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "child_start"
PATIENCE_S = 120.0


async def seconds_to_ready(
    spec: RunSpec, memory_fd: int, directory: str, forkserver: Forkserver | None
) -> tuple[float, float]:
    """(seconds, processor seconds)"""
    started = time.perf_counter()
    child: Child[Command] = await start_child(
        Learner.name, Learner.module, 1, memory_fd, forkserver
    )
    child.send(Start(spec.model_dump_json(), directory, "benchmark", "cpu", 1, 1 << 30))
    reader: MessageReader[Message] = MessageReader(get_args(Message))
    async with asyncio.timeout(PATIENCE_S):
        while data := await child.reader.read(1 << 16):
            if any(isinstance(message, Ready) for message in reader.feed(data)):
                break
    taken = time.perf_counter() - started, sum(psutil.Process(child.process.pid).cpu_times()[:2])
    child.kill()
    await child.keep_last_words()
    await child.process.wait()
    child.writer.close()
    return taken


async def measure(times: int, forkserver: Forkserver | None) -> JsonObject:
    spec = made_up_spec(RunSpec(name="child-start"))
    memory_fd = open_memory_file(memory_bytes([f.size for f in fragments_of(spec)]))
    taken: JsonObject = {"forked": [], "executed": []}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
        await seconds_to_ready(spec, memory_fd, directory, forkserver)
        for _ in range(times):
            for kind, server in ("forked", forkserver), ("executed", None):
                taken[kind].append(await seconds_to_ready(spec, memory_fd, directory, server))
    os.close(memory_fd)
    return {**machine(), **taken}


def report(result: JsonObject) -> str:
    middle = {
        kind: [median(column) for column in zip(*result[kind], strict=True)]
        for kind in ("executed", "forked")
    }
    rows = [[kind, *(f"{seconds:.1f}" for seconds in columns)] for kind, columns in middle.items()]
    ratios = [a / b for a, b in zip(middle["executed"], middle["forked"], strict=True)]
    rows.append(["ratio", *(f"{ratio:.1f}" for ratio in ratios)])
    return "\n".join(
        [
            (
                f"Medians of {len(result['forked'])}; {result['cpus']} cores, load average "
                f"{result['load_average']}."
            ),
            "",
            table(["learner", "s to Ready", "processor s"], rows),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    with running_forkserver() as forkserver:
        result = asyncio.run(measure(arguments.times, forkserver))
    write(RESULTS, result, report(result))


if __name__ == "__main__":
    main()
