"""The demo's swarm for half an hour with a kill every 20 s: does anything grow, or stay behind?

    python -m benchmarks.soak                 30 minutes
    python -m benchmarks.soak --minutes 2     a try

Daemons, learners and p2pd are killed in turn. The daemon of node-1 and the bootstrap peer are
spared, so that they live through all of it: a leak that comes with each lost learner, network
process or peer shows in them. Private memory (USS), descriptors and threads of every process are
read every 5 s; memory is fitted by least squares over all lives of a kind, each with an intercept
of its own, from a minute after its start on.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import psutil

from benchmarks.chaos import HEAL_S, START_S, settle_and_leave
from benchmarks.chaos_faults import Fault, Kind
from benchmarks.chaos_swarm import Broken, ChaosSwarm, running_chaos_swarm
from benchmarks.chaos_watch import Watch
from benchmarks.swarm import machine, table, write
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "soak"

NUM_NODES = 3
KILL_EVERY_S = 20.0
SAMPLE_EVERY_S = 5.0
WARM_UP_S = 60.0
DISK_BYTES = 512 << 20

SPARED = "node-1"
LONG_LIVED = f"daemon of {SPARED}"
KINDS = (LONG_LIVED, "daemon", "learner", "p2pd", "bootstrap daemon", "bootstrap p2pd")
KILLS = (Kind.KILL_DAEMON, Kind.KILL_LEARNER, Kind.KILL_P2PD)


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    at_s: float
    kind: str
    pid: int
    age_s: float
    mb: float
    descriptors: int
    threads: int


async def soak(minutes: float, seed: int) -> JsonObject:
    before = _traces()
    spec = RunSpec(name="demo")
    async with running_chaos_swarm(NUM_NODES, spec, DISK_BYTES) as swarm:
        watch = Watch(swarm)
        await watch.heals({}, START_S)
        started = time.monotonic()
        samples: list[Sample] = []
        disk_mb: list[float] = []
        kills: list[str] = []
        sampling = asyncio.create_task(_keep_sampling(swarm, watch, started, samples, disk_mb))
        killing = asyncio.create_task(_keep_killing(swarm, random.Random(seed), kills))
        await asyncio.wait(
            (sampling, killing), timeout=60 * minutes, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (sampling, killing):
            task.cancel()
        await asyncio.wait((sampling, killing))
        for task in (sampling, killing):
            if not task.cancelled():
                task.result()
        await watch.heals({}, HEAL_S)
        tokens = await settle_and_leave(swarm, watch)
        logs_mb = {path.stem: path.stat().st_size / 1e6 for path in swarm.root.glob("*.log")}
    return {
        **machine(),
        "minutes": minutes,
        "kills": len(kills),
        "tokens": tokens,
        "kinds": {kind: _figures([s for s in samples if s.kind == kind]) for kind in KINDS},
        "disk_mb": {"first": disk_mb[0], "last": disk_mb[-1], "most": max(disk_mb)},
        "logs_mb": logs_mb,
        "left_behind": sorted(_traces() - before),
        "samples": [asdict(sample) for sample in samples],
    }


async def _keep_killing(swarm: ChaosSwarm, rng: random.Random, kills: list[str]) -> None:
    while True:
        await asyncio.sleep(KILL_EVERY_S)
        kind = KILLS[len(kills) % len(KILLS)]
        names = [name for name in swarm.nodes if kind is not Kind.KILL_DAEMON or name != SPARED]
        name = rng.choice(names)
        await swarm.inflict(Fault(kind, (name,), 0.0, 0.0))
        kills.append(name)
        print(f"{len(kills)}: {name}: {kind.value}", flush=True)


async def _keep_sampling(
    swarm: ChaosSwarm, watch: Watch, started: float, samples: list[Sample], disk_mb: list[float]
) -> None:
    while True:
        looks = await watch.look()
        told = [look.status["checkpoint"]["bytes_on_disk"] / 1e6 for look in looks.values()]
        if told:
            disk_mb.append(max(told))
        for kind, process in _processes(swarm):
            try:
                samples.append(_sample(kind, process, started))
            except psutil.NoSuchProcess:
                continue
        await asyncio.sleep(SAMPLE_EVERY_S)


def _processes(swarm: ChaosSwarm) -> Iterable[tuple[str, psutil.Process]]:
    """All of the swarm, with what they are; a starting learner may not know its name yet."""
    for node in swarm.nodes.values():
        for process in node.family():
            if process.pid == node.started.process.pid:
                yield LONG_LIVED if node.name == SPARED else "daemon", process
            else:
                yield "p2pd" if _name(process) == "p2pd" else "learner", process
    for process in psutil.Process().children():
        if "bootstrap" in _command(process):
            yield "bootstrap daemon", process
            for child in process.children():
                yield "bootstrap p2pd", child


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _sample(kind: str, process: psutil.Process, started: float) -> Sample:
    with process.oneshot():
        return Sample(
            at_s=round(time.monotonic() - started, 1),
            kind=kind,
            pid=process.pid,
            age_s=round(time.time() - process.create_time(), 1),
            mb=round(process.memory_full_info().uss / 1e6, 2),
            descriptors=process.num_fds(),
            threads=process.num_threads(),
        )


def _figures(samples: Sequence[Sample]) -> JsonObject:
    """Of one kind of process."""
    warm = [sample for sample in samples if sample.age_s >= WARM_UP_S]
    lives: dict[int, list[Sample]] = defaultdict(list)
    for sample in warm:
        lives[sample.pid].append(sample)
    slope, error = _slope([life for life in lives.values() if len(life) > 2])
    return {
        "processes": len({sample.pid for sample in samples}),
        "longest_life_s": max((sample.age_s for sample in samples), default=0.0),
        "mb": round(fmean(sample.mb for sample in warm), 1) if warm else None,
        "mb_per_hour": slope,
        "mb_per_hour_error": error,
        "descriptors": _first_last_most([sample.descriptors for sample in warm]),
        "threads": _first_last_most([sample.threads for sample in warm]),
    }


def _slope(lives: Sequence[Sequence[Sample]]) -> tuple[float | None, float | None]:
    """MB per hour and its standard error: one slope for all, an intercept for each."""
    centred, num = [], 0
    for life in lives:
        t = fmean(sample.at_s for sample in life)
        m = fmean(sample.mb for sample in life)
        centred += [(sample.at_s - t, sample.mb - m) for sample in life]
        num += len(life) - 1
    squares = sum(t * t for t, _ in centred)
    products = sum(t * m for t, m in centred)
    if not squares or num < 2:
        return None, None
    slope = products / squares
    rest = sum((m - slope * t) ** 2 for t, m in centred)
    return round(3600 * slope, 2), round(3600 * (rest / (num - 1) / squares) ** 0.5, 2)


def _first_last_most(counts: Sequence[int]) -> list[int]:
    return [counts[0], counts[-1], max(counts)] if counts else []


def _traces() -> set[str]:
    """What processes that were killed may leave: files for all to see, and orphans."""
    places = [*Path("/tmp").glob("p2pdiloco-*"), *Path("/tmp").glob("hivemind*")]
    places += Path("/dev/shm").glob("*") if Path("/dev/shm").exists() else []
    orphans = {
        f"process {process.info['pid']}: {' '.join(process.info['cmdline'] or [])[:120]}"
        for process in psutil.process_iter(["pid", "ppid", "cmdline", "name"])
        if process.info["ppid"] == 1
        and (process.info["name"] == "p2pd" or "p2pdiloco_daemon" in str(process.info["cmdline"]))
    }
    return {str(place) for place in places} | orphans


def report(result: JsonObject) -> str:
    rows = [
        [
            kind,
            figures["processes"],
            round(figures["longest_life_s"]),
            figures["mb"],
            f"{figures['mb_per_hour']} ± {figures['mb_per_hour_error']}",
            "/".join(map(str, figures["descriptors"])),
            "/".join(map(str, figures["threads"])),
        ]
        for kind, figures in result["kinds"].items()
    ]
    columns = ["process", "lives", "longest, s", "MB", "MB per hour", "descriptors", "threads"]
    disk, tokens = result["disk_mb"], result["tokens"]
    logs = ", ".join(f"{name} {mb:.1f}" for name, mb in sorted(result["logs_mb"].items()))
    left_behind = ", ".join(result["left_behind"]) or "nothing"
    conditions = (
        f"{NUM_NODES} nodes of the demo, {result['kills']} kills; load {result['load_average']} on "
        f"{result['cpus']} cores. Memory is private (USS), from {WARM_UP_S:.0f} s after a start "
        "on; descriptors and threads: first, last, most."
    )
    on_disk = (
        f"Largest directory: {disk['first']:.1f} MB at first, {disk['last']:.1f} MB at the end, "
        f"{disk['most']:.1f} MB at most. Logs, in MB: {logs}."
    )
    afterwards = (
        f"Left behind: {left_behind}. Afterwards all settled on one head with the same bytes on "
        f"every disk; {tokens['merged_by_ledgers']} tokens are merged by the ledgers, "
        f"{tokens['merged_by_lineage']} by the lineage."
    )
    title = f"# {result['minutes']:g} minutes with a kill every {KILL_EVERY_S:.0f} s"
    return "\n\n".join([title, conditions, table(columns, rows), on_disk, afterwards])


def plot(result: JsonObject) -> None:
    """Memory of every process over time."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for number, kind in enumerate(KINDS):
        lives: dict[int, list[JsonObject]] = defaultdict(list)
        for sample in result["samples"]:
            if sample["kind"] == kind:
                lives[sample["pid"]].append(sample)
        for count, life in enumerate(lives.values()):
            axes.plot(
                [sample["at_s"] / 60 for sample in life],
                [sample["mb"] for sample in life],
                color=f"C{number}",
                linewidth=1,
                label=kind if count == 0 else None,
            )
    axes.set_xlabel("minutes")
    axes.set_ylabel("private memory, MB")
    axes.legend(fontsize="small", loc="upper right")
    figure.tight_layout()
    figure.savefig(RESULTS.with_suffix(".svg"))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="which nodes are killed")
    arguments = parser.parse_args()
    try:
        result = asyncio.run(soak(arguments.minutes, arguments.seed))
    except Broken as broken:
        print(broken, file=sys.stderr)
        return 1
    plot(result)
    del result["samples"]  # the plot has them
    write(RESULTS, result, report(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
