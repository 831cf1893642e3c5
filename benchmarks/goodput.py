"""Goodput under failures against the table of the Decoupled DiLoCo paper, cell by cell.

    python -m benchmarks.goodput            what results/goodput.json lacks, then the report
    python -m benchmarks.goodput report     the report alone

What `p2pdiloco simulate` does, with its defaults, then the two kinds of accelerator, then people at
home. Each part is stored when it is done; remove the file to begin anew.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.swarm import table
from p2pdiloco.simulation.goodput import CHIPS, LEARNERS, Cell, Question, run_table
from p2pdiloco.simulation.goodput_decoupled import Merging
from p2pdiloco.simulation.goodput_failures import Cluster
from p2pdiloco.simulation.goodput_mixed import Mixed, run_mixed
from p2pdiloco.simulation.goodput_volunteers import Volunteers, run_volunteers
from p2pdiloco_daemon.goodput_plot import draw_goodput, short

RESULTS = Path(__file__).parent / "results" / "goodput"
VOLUNTEERS = ((24, 1.0), (60, 1.0))
"""People and hours."""


class Store:
    """Everything in one JSON file."""

    def __init__(self, path: Path):
        self.path = path
        self.content: dict[str, Any] = (
            json.loads(path.read_text())
            if path.exists()
            else {"cells": [], "mixed": [], "volunteers": []}
        )

    def cells(self) -> list[Cell]:
        return [_cell(fields) for fields in self.content["cells"]]

    def mixed(self) -> list[Mixed]:
        return [Mixed(**fields) for fields in self.content["mixed"]]

    def volunteers(self) -> list[Volunteers]:
        return [Volunteers(**fields) for fields in self.content["volunteers"]]

    def put(self, part: str, fields: dict[str, Any]) -> None:
        self.content[part].append(fields)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")
        print(fields, flush=True)


def _cell(fields: dict[str, Any]) -> Cell:
    known = {name: value for name, value in fields.items() if name != "difference"}
    merging = known.pop("merging")
    return Cell(**known, merging=Merging(**merging) if merging else None)


def measure(store: Store) -> None:
    done = {(cell.row, cell.chips) for cell in store.cells()}
    for learners in ((), *((number,) for number in LEARNERS)):
        question = Question(learners=learners)
        rows = question.rows[-1:] if learners else question.rows
        if any((row, chips) not in done for row in rows for chips in question.chips):
            for cell in run_table(question):
                if cell.row in rows and (cell.row, cell.chips) not in done:
                    store.put("cells", cell.to_json())
    if not store.mixed():
        for policy in run_mixed(seed=0):
            store.put("mixed", asdict(policy))
    for people, hours in VOLUNTEERS[len(store.volunteers()) :]:
        store.put("volunteers", asdict(run_volunteers(people, hours, seed=0)))


# ---------------------------------------------------------------- the report


def report(store: Store) -> str:
    parts = [
        "# Goodput under failures",
        _table_of_cells(store.cells()),
        _reading(store.cells()),
        _calibration(),
        _protocol(store.cells()),
        _mixed(store.mixed()),
        _volunteers(store.volunteers()),
    ]
    return "\n\n".join(parts)


def _table_of_cells(cells: Sequence[Cell]) -> str:
    return (
        "Published, ours ± half the 95 % interval of the mean over 3 seeds (difference), in "
        "percent:\n\n" + _by_chips(cells, _cell_text)
    )


def _by_chips(cells: Sequence[Cell], text: Callable[[Cell], str]) -> str:
    """One row of the table per row, one column per size; empty where nothing is stored yet."""
    known = {(cell.row, cell.chips): text(cell) for cell in cells}
    rows = [
        [_NAMES.get(row, f"decoupled, {row}"), *(known.get((row, chips), "") for chips in CHIPS)]
        for row in dict.fromkeys(cell.row for cell in cells)
    ]
    return table(["", *(f"{short(chips)} chips" for chips in CHIPS)], rows)


_NAMES = {"rigid": "data parallel, rigid", "elastic": "data parallel, elastic"}


def _cell_text(cell: Cell) -> str:
    assert cell.published and cell.difference is not None and cell.low and cell.high
    half = 50 * (cell.high - cell.low)
    ours = f"{100 * cell.goodput:.1f} ± {half:.1f} ({100 * cell.difference:+.1f})"
    return f"{100 * cell.published:.0f}, {ours}"


def _reading(cells: Sequence[Cell]) -> str:
    worst = max(cells, key=lambda cell: abs(cell.difference or 0))
    within = sum(abs(cell.difference or 0) <= WITHIN for cell in cells)
    return (
        f"{within} of {len(cells)} cells are within 3 points; the worst is {worst.row} at "
        f"{short(worst.chips)} chips, {100 * (worst.difference or 0):+.1f}. Uptime in percent: "
        "share of 10 s slots in which anybody trained, and of all instants:\n\n"
        + _by_chips(cells, lambda c: f"{100 * c.uptime:.2f}, {100 * c.uptime_instant:.2f}")
        + "\n\nGoodput is the share of the allocated chip time spent on inner steps that were "
        "finished: stops, chips out of use, torn steps, a learner's start and catching up do not "
        "count. A finished step whose tokens a merge overwrote does count, as in the paper; "
        "the share of tokens that were merged is below."
    )


WITHIN = 0.03


def _calibration() -> str:
    cluster = asdict(Cluster())
    rows = [[name, f"{value:g}"] for name, value in cluster.items()]
    return (
        "## What was calibrated\n\nThe paper prints neither recovery nor rescale times. These, the "
        "same for all rows, were chosen once so that the table comes out; `interruption_s`, a "
        "year, is the paper's, and step, slice and return time are plausible values that hardly "
        "matter. "
        "`scale_down_s`, `scale_up_s` and `standby_s` decide the elastic row and, by the same "
        "process, all decoupled ones; `restart_s` and `replace_s` the rigid one. So the table "
        "fits 30 cells with five numbers; it is no measurement of anybody's cluster. What the fit "
        "says: stops of 15 to 20 s where a job can shrink, of more than a minute where it cannot, "
        "and at high failure rates returned slices ride along with stops that happen "
        "anyway.\n\n" + table(["parameter", "default"], rows)
    )


def _protocol(cells: Sequence[Cell]) -> str:
    rows = [
        [
            cell.row,
            short(cell.chips),
            f"{merging.window_s:.0f}",
            merging.num_merges,
            f"{merging.num_contributions / merging.num_merges:.1f}",
            f"{merging.merged_tokens / merging.processed_tokens:.0%}",
            f"{merging.efficiency:.1%}",
            f"{merging.longest_pause_s:.1f}",
            merging.num_forks,
        ]
        for cell in cells
        if (merging := cell.merging)
    ]
    heads = [
        "learners",
        "chips",
        "seconds",
        "merges",
        "contributors per merge",
        "tokens merged",
        "efficiency",
        "longest pause, s",
        "forks",
    ]
    return (
        "## What the protocol made of it\n\nThe decoupled rows run `p2pdiloco.protocol` in virtual "
        "time, with every promise checked after every event: that no learner waits, among others. "
        "*Efficiency*: finished steps, of what fitted between the failures. *Tokens merged*: of "
        "those that the ledgers of the living nodes know; the rest was lost with killed learners, "
        "overwritten, or is pending. Few chips fail in windows this short, so the failure "
        "process alone, followed for 10,000 failures, gives the time left; goodput is the "
        "product.\n\n" + table(heads, rows)
    )


def _mixed(mixed: Sequence[Mixed]) -> str:
    rows = [
        [
            policy.policy,
            f"{policy.published:.0%}",
            f"{policy.goodput:.1%}",
            f"{policy.contributors:.1f}",
        ]
        for policy in mixed
    ]
    return (
        "## Two kinds of accelerator\n\n4 learners and 4 whose steps take 18 % longer, each step "
        "varying by 10 %. What it does to the model is in `quality.md`.\n\n"
        + table(["", "published goodput", "goodput", "contributors per merge"], rows)
    )


def _volunteers(results: Sequence[Volunteers]) -> str:
    intro = (
        "## Volunteers, no central syncer\n\nSessions of 3 h and absences of 6 h in the mean, "
        "heavy-tailed; 10 to 40 Mbit/s up; the preset `small` (10.7 M parameters, int8), steps of "
        "5 to 15 s, H = 24, P = 6; half of the sessions end without goodbye."
    )
    rows = [
        [
            result.num_volunteers,
            f"{result.hours:.1f}",
            f"{result.online:.1f}",
            result.joins,
            f"{result.computing:.1%}",
            f"{result.merged:.1%}",
            f"{result.uptime:.1%}",
            f"{result.merges_per_hour:.0f}",
            f"{result.contributors:.1f}",
        ]
        for result in results
    ]
    heads = [
        "people",
        "hours",
        "online",
        "joins",
        "computing",
        "merged",
        "uptime",
        "merges/h",
        "contributors per merge",
    ]
    reading = (
        "*Computing* and *merged*: share of online time spent on inner steps, and on steps that "
        "came into the model."
    )
    parts = [intro, table(heads, rows), reading]
    for result in results:
        fates = [[fate, f"{share:.1%}"] for fate, share in result.fates.items()]
        parts.append(f"Tokens of {result.num_volunteers} people:\n\n{table(['fate', ''], fates)}")
    return "\n\n".join(parts)


def main() -> None:
    store = Store(RESULTS.with_suffix(".json"))
    if sys.argv[1:] != ["report"]:
        measure(store)
    RESULTS.with_suffix(".md").write_text(report(store) + "\n")
    draw_goodput(store.cells(), RESULTS.with_suffix(".svg"))


if __name__ == "__main__":
    main()
