"""What the network costs a learner: its step time while it merges, and while nothing answers.

    python -m benchmarks.step_time

Two runs of real processes train the tiny model side by side. In one, a node is alone: its network
is idle. In the other, two nodes merge all the time. In turns of `WINDOW_S`, one of those two is
busy with the other one, or black-holed: daemon and p2pd of the other are stopped (SIGSTOP), so that
connections stay open and every request hangs, while its learner goes on using the same CPU.

Each figure is divided by that of the node alone in the same window, so that whatever else the
machine does hits both. "On a core" is the time of a step without what it waited for a core (Linux
tells); with more learners than cores the wall time says how the kernel shared them out.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.swarm import (
    Node,
    Swarm,
    machine,
    merged,
    merged_together,
    running_swarm,
    table,
    write,
)
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.status.view import JsonObject

RESULTS = Path(__file__).parent / "results" / "step_time"
WINDOW_S = 12.0
"""Longer than any request may hang, shorter than the whole is boring."""
ROUNDS = 3
TARGET_STALL = 0.01


@dataclass(frozen=True, slots=True)
class Window:
    """What a learner did in a window, per step or as a share."""

    step_ms: float
    step_on_core_ms: float
    stall_share: float
    """Of the time that the learner had a core."""
    stall_share_wall: float
    """Of the wall time, preemptions by other programs included."""
    steps: int
    merges: int
    sent_bytes: int

    @classmethod
    def between(cls, before: JsonObject, after: JsonObject) -> "Window":
        def grew(name: str) -> float:
            return float(after["learner"][name] - before["learner"][name])

        steps = int(grew("step"))
        step_s, stall_s = grew("compute_s"), grew("stall_s")
        step_core_s = step_s - grew("compute_queued_s")
        stall_core_s = stall_s - grew("stall_queued_s")
        return cls(
            step_ms=1000 * step_s / steps,
            step_on_core_ms=1000 * step_core_s / steps,
            stall_share=stall_core_s / (step_core_s + stall_core_s),
            stall_share_wall=stall_s / (step_s + stall_s),
            steps=steps,
            merges=after["merges_total"] - before["merges_total"],
            sent_bytes=after["traffic"]["sent_bytes"] - before["traffic"]["sent_bytes"],
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """One window of the node under test and of the node alone."""

    tested: Window
    alone: Window
    load_average: float

    def ratio(self, name: str) -> float:
        tested: float = getattr(self.tested, name)
        alone: float = getattr(self.alone, name)
        return tested / alone


async def measure() -> dict[str, list[Pair]]:
    spec = RunSpec(name="step-time")
    async with running_swarm(spec) as lonely, running_swarm(spec) as pair:
        alone = await lonely.join("alone")
        tested, other = await pair.join("tested"), await pair.join("other")
        await alone.until(merged(4))
        for node in (tested, other):
            await node.until(merged_together(4))
        pairs: dict[str, list[Pair]] = {"busy": [], "black-holed": []}
        for _ in range(ROUNDS):
            pairs["busy"].append(await _window(tested, alone))
            pair.freeze([other])
            pairs["black-holed"].append(await _window(tested, alone))
            pair.thaw()
            await _merge_again(pair, tested, other)
        return pairs


async def _window(tested: Node, alone: Node) -> Pair:
    before = [await node.status() for node in (tested, alone)]
    await asyncio.sleep(WINDOW_S)
    after = [await node.status() for node in (tested, alone)]
    windows = [Window.between(*told) for told in zip(before, after, strict=True)]
    return Pair(windows[0], windows[1], machine()["load_average"])


async def _merge_again(pair: Swarm, tested: Node, other: Node) -> None:
    """Until both have merged with each other again."""
    for node in (tested, other):
        told = await node.status()
        await node.until(merged_together(told["merges_total"] + 4))


def report(result: JsonObject) -> str:
    windows: dict[str, list[Pair]] = result["pairs"]
    alone = [pair.alone for pairs in windows.values() for pair in pairs]
    rows = [_row("idle (alone)", alone, None)]
    rows += [_row(name, [pair.tested for pair in pairs], pairs) for name, pairs in windows.items()]
    columns = ["network", "step on a core, ms", "ratio", "wall ms", "ratio", "stall", "stall, wall"]
    columns += ["merges/s", "kB/s sent"]
    loads = [pair.load_average for pairs in windows.values() for pair in pairs]
    return "\n".join(
        [
            (
                f"Step time of a learner ({ROUNDS} rounds of {WINDOW_S:.0f} s windows in turns, "
                f"three learners on {result['cpus']} cores, load average "
                f"{min(loads):.1f}-{max(loads):.1f}). Medians, with (least-greatest) of all "
                "windows; ratios to the node alone in the same window."
            ),
            "",
            table(columns, rows),
            "",
            (
                f"Stall is the time between steps; target: under {TARGET_STALL:.0%} of the time "
                "that the learner has a core. By the wall it also counts what other programs took "
                "meanwhile, which depends on how full the machine is."
            ),
        ]
    )


def _row(name: str, windows: Sequence[Window], pairs: Sequence[Pair] | None) -> list[object]:
    def spread(values: Sequence[float], form: str) -> str:
        low, middle, high = min(values), median(values), max(values)
        return f"{middle:{form}} ({low:{form}}-{high:{form}})"

    def ratios(figure: str) -> str:
        return spread([pair.ratio(figure) for pair in pairs], ".3f") if pairs else "1"

    return [
        name,
        spread([window.step_on_core_ms for window in windows], ".1f"),
        ratios("step_on_core_ms"),
        f"{median(window.step_ms for window in windows):.1f}",
        ratios("step_ms"),
        spread([window.stall_share for window in windows], ".2%"),
        f"{median(window.stall_share_wall for window in windows):.2%}",
        f"{median(window.merges / WINDOW_S for window in windows):.1f}",
        f"{median(window.sent_bytes / WINDOW_S / 1e3 for window in windows):.0f}",
    ]


def _plain(pair: Pair) -> dict[str, Any]:
    return {
        "tested": {name: getattr(pair.tested, name) for name in Window.__slots__},
        "alone": {name: getattr(pair.alone, name) for name in Window.__slots__},
        "load_average": pair.load_average,
    }


def main() -> None:
    pairs = asyncio.run(measure())
    result = {"window_s": WINDOW_S, **machine()}
    text = report({**result, "pairs": pairs})
    plain = {name: [_plain(pair) for pair in told] for name, told in pairs.items()}
    write(RESULTS, {**result, "windows": plain}, text)


if __name__ == "__main__":
    main()
