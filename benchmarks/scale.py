"""What a large swarm costs, in the core and on the wire, counted in the simulator.

    python -m benchmarks.scale                 # an event of the core; swarms of 100 and 300
    python -m benchmarks.scale --hour          # 1,000 nodes for one virtual hour
    python -m benchmarks.scale --hour --minutes 10   # a stretch of it, and what the hour would cost

Volunteers: home links, half of them behind a router that nobody can dial, clocks up to 3 % off,
learners whose steps take 1.4 to 2.6 s, each fragment merged about once in three minutes. In the
hour 20 % of the nodes crash; each comes back ten minutes later with its disk. The simulator has no
tensors and packs no messages: bytes are counted by packing one message in fifty, with peer ids as
long as real ones. Learners take up to eight steps in one event while nothing waits for a boundary.
"""

import argparse
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, quantiles

import psutil

from benchmarks.swarm import machine, table, write
from p2pdiloco.protocol import events
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.node import Node
from p2pdiloco.protocol.wire import (
    PROTOCOL_VERSION,
    SIGHTINGS_MAX,
    Committed,
    Head,
    Heartbeat,
    Message,
    Sighting,
    pack,
)
from p2pdiloco.simulation.machine import KeyedSigner, Machine
from p2pdiloco.simulation.network import HOME_LINKS
from p2pdiloco.simulation.world import Swarm, World
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "scale"
MEMBERS = (10, 100, 1000)
SWARMS = (100, 300)
HOUR_NODES = 1000
FRAGMENTS = 12
START_S = 60.0
"""All nodes start within this."""
WARM_S = 240.0
WINDOW_S = 180.0
"""In which each fragment is merged about once."""
LEAST_MINUTES = (WARM_S + WINDOW_S) / 60
HOUR_S = 3600.0
PACKED = 50
ID_CHARS = 52
"""Of a real peer id."""
AWAY_S = 600.0
CHURN = 0.2
"""Crashes per node and hour."""


def volunteers(num: int) -> Swarm:
    return Swarm(
        num_machines=num,
        num_fragments=FRAGMENTS,
        inner_steps=90,
        overlap_steps=8,
        quorum=8,
        step_s=2.0,
        links=HOME_LINKS,
        quiet_steps=8,
        persist_s=30.0,
        discovery_s=60.0,
    )


# -------------------------------------------------------------------- one node


def event_costs_us(num_members: int) -> JsonObject:
    """Median processor time of an event in the core of one node that knows so many members, all
    ready and on its heads: their heartbeats, inner steps of its own learner, and its own heartbeat.
    """
    world = World(1, volunteers(1))
    (host,) = world.machines.values()
    node = Node(world._config(host), KeyedSigner(host.name), random.Random(1), 0.0)
    peers = [PeerId(f"peer-{i:04d}") for i in range(num_members)]
    digests = node.state.config.genesis_digests
    node.handle(events.PeersFound(tuple(peers)), 0.0)
    for p, digest in enumerate(digests):
        _reach(node, p, digest)
    node.handle(events.LearnerStarted(), 0.0)
    for p in range(FRAGMENTS):
        node.handle(events.FragmentInstalled(p, 0, 0), 0.0)
    others = World(2, volunteers(num_members))
    costs: dict[str, list[float]] = {"heartbeat": [], "steps": [], "own heartbeat": []}
    now = 1.0
    for sequence in range(1, 1 + max(12, 3000 // num_members)):
        for index, peer in enumerate(peers):
            now += 1.0 / num_members
            beat = _heartbeat(others.rng, peers, sequence, digests)
            costs["heartbeat"].append(_cost(node, events.MessageArrived(peer, beat), now))
            if index % 10 == 0:
                costs["steps"].append(_cost(node, events.StepsDone(1, 256, 1.5), now))
        now = max(now, node.deadline or now)
        costs["own heartbeat"].append(_cost(node, events.Woke(), now))
    return {kind: round(1e6 * median(seconds), 1) for kind, seconds in costs.items()}


def _reach(node: Node, fragment: int, digest: str) -> None:
    donor = node.state.config.genesis_donors[0]
    snapshot = events.SnapshotInfo(0, digest)
    node.follower.ask(node.state.registers[fragment], donor)
    node.handle(events.RecordsFetched(donor, fragment, (), (snapshot,)), 0.0)
    node.handle(events.StateReached(fragment, 0, digest, None), 0.0)


def _heartbeat(
    rng: random.Random, peers: Sequence[PeerId], sequence: int, digests: Sequence[str]
) -> Heartbeat:
    named = rng.sample(peers, min(SIGHTINGS_MAX, len(peers)))
    return Heartbeat(
        run_id="simulation",
        protocol_version=PROTOCOL_VERSION,
        incarnation=1,
        sequence=sequence,
        name="someone",
        ready=True,
        uplink_mb_s=1.0,
        step_s=1.5,
        tokens_per_s=170.0,
        local_steps=(1,) * len(digests),
        heads=tuple(Head(0, digest, 0) for digest in digests),
        sightings=tuple(Sighting(peer, 1, sequence, True, 1.0) for peer in named),
        attempts=(0,) * len(digests),
    )


def _cost(node: Node, event: events.Event, now: float) -> float:
    started = time.process_time()
    node.handle(event, now)
    return time.process_time() - started


# -------------------------------------------------------------------- a swarm


class Counted(World):
    """Counts messages and their bytes, and how long records are on their way."""

    def __init__(self, seed: int, swarm: Swarm):
        super().__init__(seed, swarm)
        self.messages: Counter[str] = Counter()
        self.packed: Counter[str] = Counter()
        self.packed_bytes: Counter[str] = Counter()
        self.spread_s: list[float] = []
        self._committed_at: dict[str, float] = {}

    def send(self, machine: Machine, peer: PeerId, message: Message) -> None:
        self.messages[message.kind] += 1
        if self.messages[message.kind] % PACKED == 1:
            self.packed[message.kind] += 1
            self.packed_bytes[message.kind] += _num_bytes(message)
        super().send(machine, peer, message)

    def handle(self, machine: Machine, event: events.Event) -> None:
        num = len(self.records)
        super().handle(machine, event)
        if len(self.records) > num:
            self._committed_at[next(reversed(self.records))] = self.now
        if isinstance(event, events.StateReached) and event.record:
            committed_at = self._committed_at.get(event.record.digest)
            if committed_at is not None and self.now - committed_at < AWAY_S:
                self.spread_s.append(self.now - committed_at)

    def control_bytes(self) -> float:
        return sum(
            self.messages[kind] * self.packed_bytes[kind] / self.packed[kind]
            for kind in self.messages
        )

    def churn(self, share_per_hour: float) -> None:
        """From now on machines crash at this rate, and come back."""
        mean_s = HOUR_S / (share_per_hour * len(self.machines))

        def crash() -> None:
            victim = self.rng.choice(self.up)
            self.crash(victim)
            self.at(self.now + AWAY_S, lambda: self.start(victim))
            self.at(self.now + self.rng.expovariate(1 / mean_s), crash)

        self.at(self.now + self.rng.expovariate(1 / mean_s), crash)


def _num_bytes(message: Message) -> int:
    num_ids = 0
    if isinstance(message, Heartbeat):
        num_ids = len(message.sightings)
    elif isinstance(message, Committed):
        num_ids = 1 + len(message.record.contributors) + len(message.record.refused)
    return len(pack(message)) + num_ids * (ID_CHARS - len("machine-000"))


def measure_swarm(num: int, warm_s: float, window_s: float, churn: float = 0.0) -> JsonObject:
    """After a start of `warm_s` virtual seconds, what a window of the life of a swarm costs."""
    memory = psutil.Process().memory_info().rss
    world = Counted(1, volunteers(num))
    world.start_all(spread_s=START_S)
    started_cpu, started = time.process_time(), time.monotonic()
    _run(world, warm_s)
    start_cpu_s = time.process_time() - started_cpu
    if churn:
        world.churn(churn)
    merges, forks, events_before = len(world.records), world.checkers.forks, world.num_events
    messages, control = world.messages.total(), world.control_bytes()
    world.spread_s.clear()
    steps = sum(m.learner.steps_total for m in world.machines.values())
    cpu = time.process_time()
    _run(world, warm_s + window_s)
    cpu_s = time.process_time() - cpu
    node_seconds = num * window_s
    new = list(world.records.values())[merges:]
    cuts = quantiles(world.spread_s, n=100)
    steps = sum(m.learner.steps_total for m in world.machines.values()) - steps
    return {
        "nodes": num,
        "fragments": FRAGMENTS,
        "churn_per_hour": churn,
        "warm_s": warm_s,
        "window_s": window_s,
        "start_cpu_s": round(start_cpu_s, 1),
        "cpu_s": round(cpu_s, 1),
        "wall_s": round(time.monotonic() - started, 1),
        "cpu_s_per_minute": round(60 * cpu_s / window_s, 1),
        "events_per_node_s": round((world.num_events - events_before) / node_seconds, 2),
        "messages_per_node_s": round((world.messages.total() - messages) / node_seconds, 2),
        "control_bytes_per_node_s": round((world.control_bytes() - control) / node_seconds),
        "rss_bytes_per_node": (psutil.Process().memory_info().rss - memory) // num,
        "merges": len(new),
        "merges_per_fragment_minute": round(60 * len(new) / window_s / FRAGMENTS, 2),
        "contributors": round(mean(len(r.contributors) for r in new), 1) if new else 0.0,
        "merged_share": _merged_share(world, merges, window_s),
        "forks": world.checkers.forks - forks,
        "spread_p50_s": round(cuts[49], 2),
        "spread_p99_s": round(cuts[98], 2),
        "spread_max_s": round(max(world.spread_s), 2),
        "steps_per_node_minute": round(60 * steps / node_seconds, 2),
        "alive_share": _alive_share(world),
        "refusals": dict(_refusals(world).most_common(8)),
        "synchronizers": len({r.synchronizer for r in new}),
    }


def _run(world: World, until: float) -> None:
    while world.now < until:
        world.run(min(until, world.now + 60.0))
        print(
            f"{len(world.machines)} nodes, {world.now:.0f} s: {time.process_time():.0f} s of "
            f"processor time, {len(world.records)} merges, {world.checkers.forks} forks, "
            f"{psutil.Process().memory_info().rss / 1e6:.0f} MB",
            flush=True,
        )


def _merged_share(world: World, first: int, window_s: float) -> float:
    """The share of what learners without rest process in the window that is in some merge of it."""
    new = list(world.records.values())[first:]
    merged = sum(record.tokens for record in new)
    if not new:
        return 0.0
    per_s = sum(m.learner.tokens_per_step / m.learner.step_s for m in world.machines.values())
    return round(merged / (FRAGMENTS * per_s * window_s), 3)


def _alive_share(world: World) -> float:
    """How much of the swarm the median node holds for alive."""
    shares = [
        sum(m.alive(node.state.now) for m in node.state.membership.members.values())
        / max(1, len(world.up) - 1)
        for host in world.up
        if (node := host.node)
    ]
    return round(median(shares), 3)


def _refusals(world: World) -> Counter[str]:
    refusals: Counter[str] = Counter()
    for host in world.up:
        if host.node:
            refusals += host.node.state.refusals
    return refusals


# -------------------------------------------------------------------- what it says


COLUMNS = {
    "nodes": "nodes",
    "churn_per_hour": "crashes per node and hour",
    "cpu_s_per_minute": "processor s per virtual minute",
    "rss_bytes_per_node": "memory per node, kB",
    "messages_per_node_s": "messages per node and s",
    "control_bytes_per_node_s": "control, kB/s per node",
    "merges_per_fragment_minute": "merges per fragment and minute",
    "contributors": "contributors",
    "merged_share": "tokens merged",
    "forks": "forks",
    "spread_p50_s": "spread p50, s",
    "spread_p99_s": "p99, s (those who were away included)",
}


def report(result: JsonObject) -> str:
    lines = [
        (
            f"Simulated volunteers, {FRAGMENTS} fragments, H = 90 steps of about 2 s, K = 8, "
            f"home links; load average {result['load_average']} on {result['cpus']} cores, one "
            f"used."
        )
    ]
    if costs := result.get("event_us"):
        kinds = list(next(iter(costs.values())))
        rows = [[num, *(costs[num][kind] for kind in kinds)] for num in costs]
        lines += ["", "Processor time of an event in the core, median, us:", ""]
        lines += [table(["members", *kinds], rows)]
    swarms = [*result.get("swarms", []), *result.get("hours", {}).values()]
    if swarms:
        rows = [[_cell(name, swarm[name]) for name in COLUMNS] for swarm in swarms]
        lines += ["", table(list(COLUMNS.values()), rows)]
    for hour in result.get("hours", {}).values():
        lines += [
            "",
            (
                f"{hour['nodes']} nodes for {hour['window_s'] / 60:.0f} virtual minutes after a "
                f"start of {hour['warm_s']:.0f} s, {hour['churn_per_hour']:.0%} crashing per hour: "
                f"{hour['start_cpu_s'] + hour['cpu_s']:.0f} s of processor time, "
                f"{hour['wall_s']:.0f} s by the clock, {hour['merges']} merges by "
                f"{hour['synchronizers']} synchronizers, {hour['forks']} forks. Who crashed is "
                f"away for {AWAY_S:.0f} s, which counts as the time that a record was on its way."
            ),
        ]
        if (minutes := (hour["warm_s"] + hour["window_s"]) / 60) < HOUR_S / 60:
            lines += [
                "",
                (
                    f"Projected, not run: an hour of this would take "
                    f"{_hour_s(hour) / 60:.0f} minutes of processor time; {minutes:.0f} virtual "
                    f"minutes were run."
                ),
            ]
    return "\n".join(lines)


def _hour_s(hour: JsonObject) -> float:
    """Processor time of a whole hour at the pace of the window."""
    rest_s = HOUR_S - hour["warm_s"]
    return float(hour["start_cpu_s"] + hour["cpu_s_per_minute"] * rest_s / 60)


def _cell(name: str, value: float) -> str:
    if name in ("rss_bytes_per_node", "control_bytes_per_node_s"):
        return f"{value / 1e3:.1f}"
    if name in ("churn_per_hour", "merged_share"):
        return f"{value:.0%}"
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hour", action="store_true", help="1,000 nodes for one virtual hour")
    parser.add_argument("--minutes", type=float, default=60.0, help="end it after so many")
    arguments = parser.parse_args()
    if not LEAST_MINUTES <= arguments.minutes <= 60:
        parser.error(f"--minutes: expected {LEAST_MINUTES:g} to 60, got {arguments.minutes:g}")
    gc.disable()  # nothing here is garbage but by reference counts; millions of objects live
    kept = RESULTS.with_suffix(".json")
    result: JsonObject = json.loads(kept.read_text()) if kept.exists() else {}
    if arguments.hour:
        hour = measure_swarm(HOUR_NODES, WARM_S, 60 * arguments.minutes - WARM_S, CHURN)
        result["hours"] = {f"{arguments.minutes:g} minutes": hour}
    else:
        result["event_us"] = {str(num): event_costs_us(num) for num in MEMBERS}
        result["swarms"] = [measure_swarm(num, WARM_S, WINDOW_S) for num in SWARMS]
    result |= machine()
    write(RESULTS, result, report(result))


if __name__ == "__main__":
    main()
