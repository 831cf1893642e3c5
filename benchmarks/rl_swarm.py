"""What a swarm learns from its own rollouts, while nodes are killed, and with one that cheats.

    python -m benchmarks.rl_swarm calm                 eight minutes
    python -m benchmarks.rl_swarm kills --minutes 4
    python -m benchmarks.rl_swarm cheat
    python -m benchmarks.rl_swarm calm --environment sums
    python -m benchmarks.rl_swarm calm --environment calculator --checkpoint DIRECTORY

Real daemons on this machine, as `p2pdiloco demo --task rl` starts them; each call measures one of
the three and keeps the others' figures.

    calm     three nodes, left alone
    kills    one of the three is killed (kill -9) every minute, in turn, and started again 5 s later
    cheat    three honest nodes, and one that gives the best answer to every task and says that the
             policy chose it (`rl_cheat`)

The environment is the guessing game unless another is named, with the settings of `rl_settings`;
where a checkpoint is named (`rl_warm_start` makes one), it is what the run begins with.

Reward over time is the mean of all shares of a step, as the learners' nodes tell it; forged
episodes that nobody saw through count with their rewards. What was learnt is therefore measured
again at the end: tasks that no step had, played with the model that the nodes agree on.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import aiohttp

from benchmarks.rl_settings import spec_of
from benchmarks.swarm import Swarm, machine, running_swarm, table, write
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.demo.evaluation import Findings, Request, evaluate
from p2pdiloco_daemon.demo.processes import Home
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "rl_swarm"

WHAT = (
    "Three nodes on one machine guess a number below ten, or do what the arm names"
    " (`benchmarks/rl_swarm.py` says how). `before` and `after` are the mean reward of 128 tasks"
    " that no step had, with the first weights and with those at the end."
)
NAMES = ("node-1", "node-2", "node-3")
CHEAT = "cheat"
ARMS = ("calm", "kills", "cheat")
LOOK_EVERY_S = 2.0
KILL_EVERY_S = 60.0
AWAY_S = 5.0


@dataclass
class Curve:
    """What was seen of a run."""

    rewards: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    """step -> node -> mean reward of its share."""
    versions: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, newest version that any node holds), by growing version."""
    kills: list[tuple[float, str]] = field(default_factory=list)
    blamed: list[tuple[float, str]] = field(default_factory=list)
    """When which event named a node that was not true."""
    names: dict[str, str] = field(default_factory=dict)
    """Of nodes, by the end of their peer ids that events call them by."""

    def look(self, at_s: float, node: str, told: JsonObject) -> None:
        self.names[told["peer_id"][-8:]] = node
        for step, reward in told["reward_curve"]:
            self.rewards[step][node] = reward
        version = max((f["version"] for f in told["fragments"]), default=0)
        if version > (self.versions[-1][1] if self.versions else 0):
            self.versions.append((at_s, version))
        known = {text for _, text in self.blamed}
        for event in told["events"]:
            text = f"{node}: {event['text']}"
            if "not true" in text and text not in known:
                self.blamed.append((at_s - event["seconds_ago"], text))

    def accusations(self) -> list[tuple[float, str]]:
        """`blamed`, with the names of nodes."""
        return [(at_s, self._named(text)) for at_s, text in self.blamed]

    def _named(self, text: str) -> str:
        for peer, name in self.names.items():
            text = text.replace(peer, name)
        return text

    def per_minute(self) -> list[tuple[int, int, float | None]]:
        """(minute, steps that ended in it, mean reward of them)."""
        minutes: dict[int, list[int]] = defaultdict(list)
        before = 0
        for at_s, version in self.versions:
            minutes[int(at_s // 60)] += range(before, version)
            before = version
        return [
            (minute, len(steps), _mean([r for s in steps for r in self.rewards[s].values()]))
            for minute, steps in sorted(minutes.items())
        ]

    def gaps_s(self) -> list[float]:
        """From each kill to the next new version."""
        return [
            next((at - kill for at, _ in self.versions if at > kill), float("nan"))
            for kill, _ in self.kills
        ]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


async def measure(arm: str, minutes: float, spec: RunSpec) -> JsonObject:
    async with running_swarm(spec) as swarm:
        for name in NAMES:
            await swarm.join(name)
        if arm == "cheat":
            await swarm.join(CHEAT, Home(prefix=(sys.executable, "-m", "benchmarks.rl_cheat")))
        honest = [node for node in swarm.nodes if node.started.name != CHEAT]
        for node in honest:
            await node.until(lambda told: told["state"] == "training")
        curve = await _watched(swarm, arm, 60 * minutes)
        request = _request(swarm)
        await _settle_and_leave(swarm)
        findings = await evaluate(request)
    return _document(arm, minutes, curve, findings)


async def _watched(swarm: Swarm, arm: str, seconds: float) -> Curve:
    curve, started, back_at = Curve(), time.monotonic(), float("inf")
    next_kill_s = KILL_EVERY_S if arm == "kills" else float("inf")
    while (now_s := time.monotonic() - started) < seconds:
        for node in list(swarm.nodes):
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # it starts, or is dead
                curve.look(now_s, node.started.name, await node.status())
        if now_s >= next_kill_s:
            name = NAMES[len(curve.kills) % len(NAMES)]
            await swarm.kill(next(n for n in swarm.nodes if n.started.name == name))
            curve.kills.append((now_s, name))
            next_kill_s, back_at = now_s + KILL_EVERY_S, now_s + AWAY_S
        if now_s >= back_at:
            await swarm.join(curve.kills[-1][1])
            back_at = float("inf")
        await asyncio.sleep(LOOK_EVERY_S)
    if back_at < float("inf"):
        await swarm.join(curve.kills[-1][1])
    return curve


async def _settle_and_leave(swarm: Swarm) -> None:
    """So that all hold the same versions."""
    for node in swarm.nodes:
        await node.until(lambda told: told["state"] in ("training", "isolated"))
    for node in swarm.nodes:
        await node.settle()
    for node in swarm.nodes:
        await node.until(lambda told: told["state"] == "settled")
    for node in list(swarm.nodes):
        await swarm.leave(node)


def _request(swarm: Swarm) -> Request:
    first = swarm.nodes[0].started.directory
    return Request(
        bootstrap=first.parent / "bootstrap",
        nodes={node.started.name: node.started.directory for node in swarm.nodes},
        checkpoint=first.parent / "checkpoint",
    )


def _document(arm: str, minutes: float, curve: Curve, findings: Findings) -> JsonObject:
    return {
        "arm": arm,
        "minutes": minutes,
        "machine": machine(),
        "per_minute": curve.per_minute(),
        "versions": curve.versions,
        "kills": curve.kills,
        "gaps_s": curve.gaps_s(),
        "blamed": curve.accusations(),
        "reward_before": findings.reward_before,
        "reward_after": findings.reward_after,
        "anchors_identical": len({tuple(d) for d in findings.state_digests.values()}) == 1,
    }


def report(results: Mapping[str, JsonObject]) -> str:
    arms = sorted(results, key=lambda name: (ARMS.index(name.split(",")[0]), name))
    ends = [
        (
            arm,
            results[arm]["minutes"],
            results[arm]["versions"][-1][1] if results[arm]["versions"] else 0,
            f"{results[arm]['reward_before']:.3f}",
            f"{results[arm]['reward_after']:.3f}",
            "yes" if results[arm]["anchors_identical"] else "no",
            len(results[arm]["kills"]),
            _longest(results[arm]["gaps_s"]),
        )
        for arm in arms
    ]
    curves = {arm: {m: (n, r) for m, n, r in results[arm]["per_minute"]} for arm in arms}
    minutes = sorted({minute for curve in curves.values() for minute in curve})
    rows = [(minute + 1, *(_cell(curves[arm].get(minute)) for arm in arms)) for minute in minutes]
    blamed = [f"- {arm}, {at:.0f} s: {text}" for arm in arms for at, text in results[arm]["blamed"]]
    return "\n".join(
        [
            "# A swarm that learns from its own rollouts",
            "",
            WHAT,
            "",
            table(
                (
                    "arm",
                    "minutes",
                    "steps",
                    "before",
                    "after",
                    "replicas identical",
                    "kills",
                    "longest wait after one",
                ),
                ends,
            ),
            "",
            "Mean reward of the steps that ended in each minute, and how many did:",
            "",
            table(("minute", *arms), rows),
            "",
            *(["What nodes said of forged turns:", "", *blamed] if blamed else []),
        ]
    )


def _longest(gaps_s: Sequence[float]) -> str:
    return f"{max(gaps_s):.0f} s" if gaps_s else "-"


def _cell(of_minute: tuple[int, float | None] | None) -> str:
    if of_minute is None or of_minute[1] is None:
        return "-"
    return f"{of_minute[1]:.3f} ({of_minute[0]})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--environment", default="guess", help="as in the spec")
    parser.add_argument("--checkpoint", type=Path, help="what the run begins with")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    environment = arguments.environment
    if arguments.arm == "cheat" and environment != "guess":
        parser.error("the cheat knows the guessing game only")
    spec = spec_of(environment, arguments.checkpoint)
    kept = arguments.results.with_suffix(".json")
    results: dict[str, JsonObject] = json.loads(kept.read_text()) if kept.exists() else {}
    name = arguments.arm if environment == "guess" else f"{arguments.arm}, {environment}"
    results[name] = asyncio.run(measure(arguments.arm, arguments.minutes, spec))
    write(arguments.results, results, report(results))


if __name__ == "__main__":
    main()
