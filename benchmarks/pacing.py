"""What the moment of a sync costs whoever is served by the same machine.

    python -m benchmarks.pacing live bursty 1 --out RUN       a run of real processes, three minutes
    python -m benchmarks.pacing shown RUN...                  what live runs measured, by policy
    python -m benchmarks.pacing replay bursty RUN...          policies on many seeds, replayed
    python -m benchmarks.pacing staleness                     the published sign of staleness
    python -m benchmarks.pacing report                        the tables, from what is stored

Live: a server that answers by real torch inference, a learner and a node that syncs share this
machine (`pacing_parts`), behind a shaped uplink; in blocks of random order every policy has the
same number of windows, each with one sync. Replay: the same policies, on what live runs measured
(`pacing_replay`). `--calibrate` of `live` has all windows at random, to be replayed.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import pacing_progress as progress
from benchmarks.lab import Rate, open_lab
from benchmarks.pacing_parts import BURST_RATE, QUIET_RATE, SLACK_STEPS, STEPS_PER_PERIOD, Schedule
from benchmarks.pacing_replay import (
    POLICIES,
    Outcome,
    Replay,
    Trace,
    mean_and_half_width,
)
from benchmarks.swarm import table
from p2pdiloco.protocol.policies import Moment, Pressure, WorkloadAware, decide

RESULTS = Path(__file__).parent / "results" / "pacing"
UPLINK_MBIT, DOWNLINK_MBIT = 16.0, 50.0
TARGET_S = 0.3
START_S = 3.0
SEEDS = 30
FIRST_SEED = 100
"""The policies were worked on with the seeds below."""
REPLAY_S = 600.0


# -------------------------------------------------------------------- live


def run_live(kind: str, seed: int, seconds: float, calibrate: bool, directory: Path) -> None:
    directory.mkdir(parents=True)
    with open_lab() as lab:
        home = lab.public("home", Rate(up=UPLINK_MBIT, down=DOWNLINK_MBIT))
        away = lab.public("away")
        shared = ["--home", home.address, "--away", away.address, "--kind", kind]
        shared += ["--seed", str(seed), "--seconds", str(seconds), "--target", str(TARGET_S)]
        shared += ["--calibrate"] * calibrate

        def start(host: str, part: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "benchmarks.pacing_parts", part, *shared]
            return subprocess.Popen(
                [*lab.hosts[host].prefix, *command, "--out", str(directory / f"{part}.json")]
            )

        processes: list[subprocess.Popen[bytes]] = []
        try:
            for host, part in (("home", "serve"), ("home", "node"), ("away", "load")):
                processes.append(start(host, part))
            while len(list(directory.glob("*.ready"))) < 3:
                time.sleep(0.2)
            epoch = time.monotonic() + START_S
            (directory / "unfinished").write_text(str(epoch))
            (directory / "unfinished").rename(directory / "epoch")
            for process in processes[1:]:
                if process.wait(timeout=seconds + 60) != 0:
                    raise SystemExit("a process failed")
        finally:
            for process in processes:
                process.kill()
                process.wait()
    setting = {"kind": kind, "seed": seed, "seconds": seconds, "epoch": epoch, "target_s": TARGET_S}
    (directory / "setting.json").write_text(json.dumps(setting))


def read_run(directory: Path) -> tuple[Any, Any, Any]:
    """-> (node, answers, setting)"""
    node, answers, setting = (
        json.loads((directory / f"{name}.json").read_text()) for name in ("node", "load", "setting")
    )
    return node, answers, setting


def show_live(directories: Sequence[Path]) -> dict[str, Any]:
    """By policy: syncs, answers during them, how many of those were late, steps per second."""
    found: dict[str, list[list[float]]] = {}
    late = total = 0
    for node, answers, setting in map(read_run, directories):
        done = [(sent, sent + took, took > setting["target_s"]) for sent, took, *_ in answers]
        late, total = late + sum(was for *_, was in done), total + len(done)
        for sync in node["syncs"]:
            during = [was for a, b, was in done if a < sync["end"] and sync["start"] < b]
            took_s = sync["end"] - sync["start"]
            found.setdefault(sync["policy"], []).append([len(during), sum(during), took_s])
    rows = {
        name: {
            "syncs": len(each),
            "answers_during": sum(a for a, _, _ in each),
            "late_during": sum(b for _, b, _ in each),
            "sync_s": fmean(c for _, _, c in each),
        }
        for name, each in found.items()
    }
    return {"late": late, "answers": total, "policies": rows}


# -------------------------------------------------------------------- replayed


def replay(kind: str, directories: Sequence[Path], seeds: int) -> dict[str, Any]:
    trace = Trace.of([read_run(directory) for directory in directories])
    fresh = range(FIRST_SEED, FIRST_SEED + seeds)
    schedules = [Schedule.drawn(kind, seed, REPLAY_S) for seed in fresh]
    outcomes = {
        name: [
            Replay(trace, schedule, TARGET_S, BURST_RATE, schedule.seed).run(make)
            for schedule in schedules
        ]
        for name, make in POLICIES.items()
    }
    rows = {name: _row(each, outcomes) for name, each in outcomes.items()}
    return {"trace": _describe(trace), "kind": kind, "seeds": seeds, "policies": rows}


def _describe(trace: Trace) -> dict[str, float]:
    return {
        "answers_quiet": len(trace.quiet),
        "answers_syncing": len(trace.syncing),
        "service_s": fmean(service_s for service_s, _ in trace.quiet),
        "sync_s": fmean(trace.sync_s),
        "step_s": trace.step_s,
    }


def _row(each: Sequence[Outcome], outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    def against(other: str) -> tuple[float, float]:
        pairs = zip(each, outcomes[other], strict=True)
        return mean_and_half_width([a.percent - b.percent for a, b in pairs])

    during = sum(o.answers_syncing for o in each)
    return {
        "late_percent": mean_and_half_width([o.percent for o in each]),
        "against_random": against("random"),
        "against_oracle": against("oracle"),
        "late_during_percent": 100 * sum(o.late_syncing for o in each) / max(1, during),
        "syncs": fmean(o.syncs for o in each),
        "period_steps": fmean([p for o in each for p in o.periods] or [0]),
        "staleness_s": fmean([s for o in each for s in o.staleness_s] or [0]),
        "coverage": [fmean(o.coverage.get(key) or 0.0 for o in each) for key in (False, True)],
        "relearned": sum(o.relearned for o in each),
    }


def staleness() -> dict[str, Any]:
    """The published controller free to run, in the setting that it was published for: min_h 128,
    max_h 512, 2,048 tokens per step, a state that grows old while serving presses. How old does
    the state get before a sync, with either sign of staleness?
    """
    rows = {}
    for name, weight in (("as published", -0.25), ("older is likelier", 0.25)):
        for pressure in (0.1, 0.3, 0.5, 0.7):
            steps = []
            for seed in range(SEEDS):
                rng = random.Random(seed)
                steps.append(_steps_until_sync(WorkloadAware(staleness=weight), pressure, rng))
            rows[f"{name}, serving at {pressure}"] = mean_and_half_width(steps)
    return rows


def _steps_until_sync(policy: WorkloadAware, serving: float, rng: random.Random) -> int:
    """A step takes 4 s, so that 512 of them last as long as staleness counts in full; the loss
    falls by some 0.05 in 256 steps.
    """
    moment = Moment(fragment=0, version=1, steps=0, tokens=0, opens=128, closes=512, step_s=4.0)
    fall_per_step = rng.uniform(0.5, 1.5) * 0.05 / 256
    while True:
        moment = replace(
            moment,
            steps=moment.steps + 1,
            tokens=moment.tokens + 2048,
            staleness_s=moment.staleness_s + 4.0,
            loss_fall=moment.loss_fall + fall_per_step,
            pressure=Pressure(serving=min(1.0, max(0.0, rng.gauss(serving, 0.1)))),
        )
        if decide(policy, moment).sync:
            return moment.steps


# -------------------------------------------------------------------- tables


def report() -> str:
    replayed = sorted(RESULTS.glob("replay_*.json"))
    parts = ["# Pacing", *(_replay_table(json.loads(path.read_text())) for path in replayed)]
    if (path := RESULTS / "live.json").exists():
        parts.append(_live_table(json.loads(path.read_text())))
    if (path := RESULTS / "staleness.json").exists():
        rows = [[name, _pm(value)] for name, value in json.loads(path.read_text()).items()]
        parts.append(
            "## Staleness\n\nThe published workload-aware controller with the published bounds of "
            "128 and 512 steps, serving at a mean pressure: steps until a sync, 95 % confidence "
            f"over {SEEDS} seeds.\n\n" + table(["", "steps until a sync"], rows)
        )
    if (path := RESULTS / "progress.json").exists():
        parts.append("## Progress\n\n" + progress.report(json.loads(path.read_text())))
    return "\n\n".join(parts) + "\n"


def _replay_table(found: dict[str, Any]) -> str:
    trace = found["trace"]
    rows = [
        [
            name,
            f"{row['syncs']:.1f}",
            _pm(row["late_percent"]),
            _pm(row["against_random"]),
            _pm(row["against_oracle"]),
            f"{row['late_during_percent']:.0f}",
            f"{row['period_steps']:.1f}",
        ]
        for name, row in found["policies"].items()
    ]
    columns = ["policy", "syncs", "late, %", "against random", "against oracle"]
    columns += ["late during syncs, %", "steps per period"]
    ours = found["policies"]["calibrated"]
    return (
        f"## Replayed, {found['kind']}\n\n"
        f"{found['seeds']} seeds of {REPLAY_S:.0f} s, {QUIET_RATE} to {BURST_RATE} requests per "
        f"second, target {1e3 * TARGET_S:.0f} ms, a sync every {STEPS_PER_PERIOD} steps with "
        f"{SLACK_STEPS} of slack. From a live trace of {trace['answers_quiet']} answers without a "
        f"sync and {trace['answers_syncing']} during one: {1e3 * trace['service_s']:.0f} ms of "
        f"service, {trace['sync_s']:.1f} s per sync, {1e3 * trace['step_s']:.0f} ms per step. "
        f"Points of per cent, 95 % confidence over seeds, differences paired. Coverage of the "
        f"calibrated bounds: {100 * ours['coverage'][0]:.1f} % without, "
        f"{100 * ours['coverage'][1]:.1f} % during a sync; relearned {ours['relearned']} times.\n\n"
        + table(columns, rows)
    )


def _live_table(found: dict[str, Any]) -> str:
    rows = [
        [name, row["syncs"], row["answers_during"], row["late_during"], f"{row['sync_s']:.1f}"]
        for name, row in sorted(found["policies"].items())
    ]
    return (
        f"## Live\n\nOn a machine with much other work (load average about ten on two cores); "
        f"{found['late']} of {found['answers']} answers were late in all. So few syncs show that "
        "all parts work together, not which policy is better.\n\n"
        + table(["policy", "syncs", "answers during", "late of them", "s per sync"], rows)
    )


def _pm(value: Sequence[float]) -> str:
    return f"{value[0]:.2f} ± {value[1]:.2f}"


def _write(name: str, found: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    live = commands.add_parser("live")
    live.add_argument("kind", choices=["bursty", "wave"])
    live.add_argument("seed", type=int)
    live.add_argument("--seconds", type=float, default=180)
    live.add_argument("--calibrate", action="store_true")
    live.add_argument("--out", type=Path, required=True)
    shown = commands.add_parser("shown")
    shown.add_argument("runs", type=Path, nargs="+")
    replayed = commands.add_parser("replay")
    replayed.add_argument("kind", choices=["bursty", "wave"])
    replayed.add_argument("runs", type=Path, nargs="+")
    replayed.add_argument("--seeds", type=int, default=SEEDS)
    commands.add_parser("staleness")
    commands.add_parser("report")
    args = parser.parse_args()
    match args.command:
        case "live":
            run_live(args.kind, args.seed, args.seconds, args.calibrate, args.out)
        case "shown":
            _write("live", show_live(args.runs))
        case "replay":
            _write(f"replay_{args.kind}", replay(args.kind, args.runs, args.seeds))
        case "staleness":
            _write("staleness", staleness())
        case "report":
            RESULTS.with_suffix(".md").write_text(report())


if __name__ == "__main__":
    main()
