"""Real daemons under kills, stops, partitions, full disks: what must hold, and how soon again.

    python -m benchmarks.chaos --seed 7         one episode on a new swarm of 4 nodes
    python -m benchmarks.chaos --seeds 0-99     as many, one after the other, on one living swarm
    python -m benchmarks.chaos --recovery 40    so many kills of each kind, one at a time

An episode draws its faults from its seed, waits until they are over, and then until all nodes train
together again on one lineage. A promise that breaks ends the run with the seed and its faults.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.chaos_faults import Fault, Kind, draw
from benchmarks.chaos_swarm import (
    SPEC,
    Broken,
    ChaosSwarm,
    Node,
    kill_child,
    running_chaos_swarm,
    together,
)
from benchmarks.chaos_watch import LOOK_EVERY_S, Look, Watch
from benchmarks.swarm import machine, table, write
from p2pdiloco.optim.fragments import fragments_of
from p2pdiloco.simulation import promises
from p2pdiloco_daemon.children.forkserver import COMMANDS, Forkserver, running_forkserver
from p2pdiloco_daemon.genesis import read_signed_spec
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "chaos"
NUM_NODES = 4

START_S = 600.0
"""For the first nodes to train: four times torch, at once, on two cores."""

HEAL_S = 600.0
"""From the end of the last fault until all train together again. A start alone takes 13 seconds of
a core, and on a machine where sixteen programs share two of them it took 90 s; a slow machine gets
several times as long."""

SETTLE_S = 300.0

KILLS = (Kind.KILL_LEARNER, Kind.KILL_P2PD, Kind.KILL_DAEMON, Kind.KILL_DAEMON_AND_DISK)

BESIDE_A_KILL_S = 20.0
"""Gaps between merges that begin so soon after a kill are not usual ones."""


@dataclass(slots=True)
class Episode:
    """What came of a seed."""

    seed: int
    faults: Sequence[Fault]
    left_out: Sequence[Fault]
    moved_on_s: float = 0.0
    """From the end of the last fault until each fragment was merged anew."""
    healed_s: float = 0.0
    """Until all nodes trained together again."""

    def summary(self) -> JsonObject:
        return {
            "seed": self.seed,
            "faults": [str(fault) for fault in self.faults],
            "left_out": [str(fault) for fault in self.left_out],
            "moved_on_s": round(self.moved_on_s, 2),
            "healed_s": round(self.healed_s, 2),
        }


@dataclass(slots=True)
class Recoveries:
    """Seconds, by what was killed."""

    to_contribution: dict[Kind, list[float]] = field(
        default_factory=lambda: {kind: [] for kind in KILLS}
    )
    pauses: list[float] = field(default_factory=list)
    """Longest gap between merges of the others after their synchronizer was killed."""
    usual_gaps: list[float] = field(default_factory=list)


async def play(swarm: ChaosSwarm, watch: Watch, seed: int) -> Episode:
    """One episode; Broken names its seed."""
    faults = draw(seed, list(swarm.nodes))
    possible = swarm.possible(faults)
    episode = Episode(seed, possible, [fault for fault in faults if fault not in possible])
    try:
        await _beside(_suffer_and_heal(swarm, watch, episode), watch)
    except Broken as broken:
        drawn = "\n  ".join(map(str, faults))
        raise Broken(
            f"seed {seed}: {broken}\nIts faults:\n  {drawn}\n"
            f"Logs are under {swarm.root}. Again: python -m benchmarks.chaos --seed {seed}"
        ) from broken
    return episode


async def _suffer_and_heal(swarm: ChaosSwarm, watch: Watch, episode: Episode) -> None:
    await together(swarm.inflict(fault) for fault in episode.faults)
    await watch.look()
    over = dict(watch.looks)  # of who is down, what it had before
    episode.moved_on_s = await watch.moves_on(over, HEAL_S)
    episode.healed_s = episode.moved_on_s + await watch.heals(over, HEAL_S)


async def _beside(work: Coroutine[Any, Any, None], watch: Watch) -> None:
    """Runs `work` while the watch looks on; the first to fail ends both."""
    tasks = [asyncio.create_task(work), asyncio.create_task(watch.keep_looking())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def settle_and_leave(swarm: ChaosSwarm, watch: Watch) -> JsonObject:
    """The last promises: one head, the same bytes on every disk, all leave without a trace."""
    sights = await watch.settles(SETTLE_S)
    merged = sum(sight.tokens.merged for sight in sights)
    in_lineage = sum(held.tokens_total for held in sights[0].fragments if held)
    if broken := promises.at_most("tokens that ledgers call merged", merged, in_lineage):
        raise Broken(broken)
    await together(node.leave() for node in swarm.nodes.values())
    digests = {name: state_digests(swarm, node) for name, node in swarm.nodes.items()}
    if len({tuple(each) for each in digests.values()}) != 1:
        raise Broken(f"after settling the states on disk differ: {digests}")
    leftovers = [p for end in ("*.tmp", "*.sock", "*.part") for p in swarm.root.rglob(end)]
    leftovers = [path for path in leftovers if "first" not in path.parts]
    if leftovers:
        raise Broken(f"all have left, and there still are {leftovers}")
    return {"merged_by_ledgers": merged, "merged_by_lineage": in_lineage}


def state_digests(swarm: ChaosSwarm, node: Node) -> list[str]:
    """Of anchor and momentum of each fragment, from the values on the node's disk."""
    from p2pdiloco_daemon.export import newest_states  # imports torch

    signed = read_signed_spec(swarm.root / "first")
    assert signed, "the bootstrap peer has run"
    fragments = fragments_of(signed.spec)
    return [state.digest for state in newest_states(signed.spec, fragments, node.directory)]


async def play_all(seeds: Sequence[int], forkserver: Forkserver | None) -> JsonObject:
    """Episodes on one swarm, with what it came to."""
    episodes = []
    async with running_chaos_swarm(NUM_NODES, forkserver=forkserver) as swarm:
        watch = Watch(swarm)
        await watch.heals({}, START_S)
        for seed in seeds:
            started = time.monotonic()
            episode = await play(swarm, watch, seed)
            episodes.append(episode.summary() | {"took_s": round(time.monotonic() - started, 1)})
            print(json.dumps(episodes[-1]), flush=True)
        tokens = await settle_and_leave(swarm, watch)
        return {**machine(), "left_out": swarm.missing, "tokens": tokens, "episodes": episodes}


# -------------------------------------------------------------------- how soon again


async def recover(kills: int) -> JsonObject:
    """Kills one thing at a time, and waits until its node has been merged again."""
    recoveries = Recoveries()
    async with running_chaos_swarm(NUM_NODES) as swarm:
        watch = Watch(swarm)
        await watch.heals({}, START_S)
        moments: list[float] = []
        for number in range(kills):
            for kind in KILLS:
                node = _victim(swarm, watch, kind, number)
                moments.append(time.monotonic())
                await _beside(_kill_and_wait(swarm, watch, kind, node, recoveries), watch)
                print(kind.name, node.name, recoveries.to_contribution[kind][-1], flush=True)
                await watch.heals({}, HEAL_S)
        recoveries.usual_gaps = _usual_gaps(sorted(watch.merges.values()), moments)
        await settle_and_leave(swarm, watch)
    return {**machine(), **_figures(recoveries)}


def _victim(swarm: ChaosSwarm, watch: Watch, kind: Kind, number: int) -> Node:
    """For a kill of a daemon the synchronizer of the moment, else one after the other."""
    nodes = list(swarm.nodes.values())
    if kind is Kind.KILL_DAEMON:
        for look in watch.looks.values():
            post = look.status["synchronizer"]
            for node in nodes:
                if post and watch.looks[node.name].status["peer_id"] == post["peer"]:
                    return node
    return nodes[(number + KILLS.index(kind)) % len(nodes)]


async def _kill_and_wait(
    swarm: ChaosSwarm, watch: Watch, kind: Kind, node: Node, recoveries: Recoveries
) -> None:
    before = watch.looks[node.name]
    killed = time.monotonic()
    if kind in (Kind.KILL_LEARNER, Kind.KILL_P2PD):
        await kill_child(node, kind)
    else:
        await swarm.inflict(Fault(kind, (node.name,), 0.0, 0.0))
    while not _is_back(before, now := watch.looks[node.name]):
        await _look_again(killed, f"{node.name} is not back")
    peer, back = now.status["peer_id"], now.at
    while watch.contributed.get(peer, 0.0) < back:
        await _look_again(killed, f"{node.name} is not merged")
    recoveries.to_contribution[kind].append(watch.contributed[peer] - killed)
    if kind is Kind.KILL_DAEMON:
        recoveries.pauses.append(_longest_gap(sorted(watch.merges.values()), killed))


async def _look_again(killed: float, what: str) -> None:
    if time.monotonic() - killed > HEAL_S:
        raise Broken(f"{what} {HEAL_S:.0f} s after the kill")
    await asyncio.sleep(LOOK_EVERY_S)


def _is_back(before: Look, now: Look) -> bool:
    """Whether what was killed runs again."""
    lives = [(look.learner_life, look.status["network"]["restarts"]) for look in (before, now)]
    network = now.status["network"]["connected"]
    return lives[0] != lives[1] and network and now.status["learner"]["state"] == "training"


def _longest_gap(merges: Sequence[float], killed: float) -> float:
    """Of those that end after the kill and begin before `BESIDE_A_KILL_S` have passed."""
    gaps = [
        later - earlier
        for earlier, later in pairwise(merges)
        if later > killed and earlier < killed + BESIDE_A_KILL_S
    ]
    return max(gaps, default=0.0)


def _usual_gaps(merges: Sequence[float], kills: Sequence[float]) -> list[float]:
    return [
        later - earlier
        for earlier, later in pairwise(merges)
        if not any(killed <= later and earlier <= killed + BESIDE_A_KILL_S for killed in kills)
    ]


def _figures(recoveries: Recoveries) -> JsonObject:
    return {
        "to_contribution_s": {
            kind.name.lower(): _spread(seconds)
            for kind, seconds in recoveries.to_contribution.items()
        },
        "pause_of_the_others_s": _spread(recoveries.pauses),
        "usual_gap_s": _spread(recoveries.usual_gaps),
    }


def _spread(seconds: Sequence[float]) -> JsonObject:
    if len(seconds) < 2:
        return {"n": len(seconds), "all": [round(each, 2) for each in seconds]}
    return {
        "n": len(seconds),
        "median": round(median(seconds), 2),
        "p95": round(quantiles(seconds, n=20, method="inclusive")[-1], 2),
        "max": round(max(seconds), 2),
    }


# -------------------------------------------------------------------- report


def _keep(part: str, result: JsonObject) -> None:
    """Replaces one part of the kept result, and the report of all parts."""
    path = RESULTS.with_suffix(".json")
    kept: JsonObject = json.loads(path.read_text()) if path.exists() else {}
    kept[part] = result
    write(RESULTS, kept, _report(kept))


def _report(kept: JsonObject) -> str:
    lines = ["# Real processes under chaos", ""]
    lines += [f"{NUM_NODES} nodes, {SPEC.sync.num_fragments} fragments, one machine.", ""]
    if seeds := kept.get("seeds"):
        lines += _report_of_seeds(seeds)
    if recovery := kept.get("recovery"):
        lines += _report_of_recovery(recovery)
    return "\n".join(lines)


def _report_of_seeds(seeds: JsonObject) -> list[str]:
    episodes = seeds["episodes"]
    faults = [fault for episode in episodes for fault in episode["faults"]]
    counts = [[kind.value, sum(kind.value in fault for fault in faults)] for kind in Kind]
    times = [
        [name, *(_spread([e[key] for e in episodes])[stat] for stat in ("median", "p95", "max"))]
        for name, key in (("each fragment merged anew", "moved_on_s"), ("all train", "healed_s"))
    ]
    left_out = "; ".join(seeds["left_out"]) or "nothing"
    return [
        f"## {len(episodes)} seeds, no promise broken",
        "",
        f"Load {seeds['load_average']} on {seeds['cpus']} cores. Left out: {left_out}.",
        "",
        table(["fault", "times"], counts),
        "",
        "Seconds after the last fault of an episode:",
        "",
        table(["until", "median", "p95", "max"], times),
        "",
    ]


def _report_of_recovery(recovery: JsonObject) -> list[str]:
    rows = [
        [Kind[name.upper()].value, *spread.values()]
        for name, spread in recovery["to_contribution_s"].items()
    ]
    columns = ["n", "median", "p95", "max"]
    gaps = [
        ["after the synchronizer's daemon was killed", *recovery["pause_of_the_others_s"].values()],
        ["usual", *recovery["usual_gap_s"].values()],
    ]
    return [
        "## From a kill to the first merged contribution of that node",
        "",
        f"Seconds; load {recovery['load_average']} on {recovery['cpus']} cores.",
        "",
        table(["killed", *columns], rows),
        "",
        "Longest gap between two merges of the others, in seconds:",
        "",
        table(["gap", *columns], gaps),
    ]


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def _play(seeds: Sequence[int]) -> JsonObject:
    with running_forkserver(COMMANDS) as forkserver:
        return asyncio.run(play_all(seeds, forkserver))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=(__doc__ or "").splitlines()[0]
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, metavar="N", help="one episode; keeps no result")
    what.add_argument("--seeds", type=_seeds, metavar="A-B", help="episodes A to B")
    what.add_argument("--recovery", type=int, metavar="N", help="kills of each kind")
    arguments = parser.parse_args()
    try:
        if arguments.seed is not None:
            _play([arguments.seed])
        elif arguments.seeds:
            _keep("seeds", _play(arguments.seeds))
        else:
            _keep("recovery", asyncio.run(recover(arguments.recovery)))
    except Broken as broken:
        print(broken, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
