"""`p2pdiloco simulate`: goodput and uptime of a run under failures, before anybody pays for it."""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from p2pdiloco.errors import UserError
from p2pdiloco.simulation.goodput import (
    CHIPS,
    LEARNERS,
    RIGID,
    Cell,
    Question,
    run_table,
    to_json,
)
from p2pdiloco.simulation.goodput_failures import YEAR_S, Cluster
from p2pdiloco.simulation.goodput_mixed import Mixed, run_mixed
from p2pdiloco.simulation.goodput_parallel import RESOLUTION_S
from p2pdiloco.simulation.goodput_volunteers import Volunteers, run_volunteers
from p2pdiloco_daemon.goodput_plot import draw_goodput, require_plot, short

VOLUNTEERS_MIN, VOLUNTEERS_MAX = 2, 4000
HOURS_MAX = 1000.0

_CLUSTER_OPTIONS = {
    "slice_chips": "chips that are out of use together when one fails",
    "return_s": "mean time until a failed slice works again",
    "standby_s": "how long a returned slice waits for a stop that takes it in",
    "scale_down_s": "mean stop of an elastic job, or of a learner, after a failure",
    "scale_up_s": "mean stop that takes returned slices in",
    "restart_s": "mean stop of a rigid job after a failure",
    "replace_s": "mean time on top to obtain another slice where none stands by",
    "step_s": "time of an inner step",
    "step_spread": "relative spread of step times between learners",
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "simulate",
        help="goodput and uptime under failures: data parallel against decoupled learners",
        description="Lets chips fail and return, and tells which share of their time is spent on "
        "useful training: rigid and elastic data parallel, and decoupled learners that run the "
        "production protocol in virtual time. Without options it reproduces the table of the "
        "Decoupled DiLoCo paper, cell by cell. With --volunteers it simulates people at home "
        "instead.",
    )
    parser.add_argument(
        "--chips", type=int, nargs="+", default=list(CHIPS), metavar="N", help="in the whole run"
    )
    parser.add_argument(
        "--learners",
        type=int,
        nargs="+",
        default=list(LEARNERS),
        metavar="M",
        help="a row for each (default: %(default)s)",
    )
    parser.add_argument(
        "--interruption-years",
        type=_years,
        default=1.0,
        metavar="YEARS",
        help="mean time between interruptions of one chip (default: %(default)s)",
    )
    defaults = Cluster()
    for name, words in _CLUSTER_OPTIONS.items():
        default = getattr(defaults, name)
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=type(default),
            default=default,
            metavar="S" if name.endswith("_s") else "X",
            help=f"{words} (default: %(default)s)",
        )
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="repetitions; more make the 95 %% intervals narrower (default: %(default)s)",
    )
    parser.add_argument(
        "--volunteers", type=int, metavar="N", help="a swarm of N people at home instead"
    )
    parser.add_argument(
        "--hours", type=float, default=1.0, help="of the volunteers (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the table: .png or .svg")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for option, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path:
            _require_writable(option, path)
    if arguments.volunteers is not None:
        return _run_volunteers(arguments)
    if arguments.plot:
        require_plot(arguments.plot)
    question = Question(
        cluster=_cluster(arguments),
        chips=tuple(sorted(set(arguments.chips))),
        learners=tuple(sorted(set(arguments.learners))),
        seeds=arguments.seeds,
    )
    with Console(stderr=True).status("") as status:

        def tell(row: str, chips: int) -> None:
            status.update(f"{_title(row)}, {short(chips)} chips")

        cells = list(run_table(question, tell))
        status.update("two kinds of accelerator")
        mixed = run_mixed(seed=0)
    console = Console()
    _print_cells(console, question, cells)
    _print_merging(console, question, cells)
    _print_mixed(console, mixed)
    if arguments.json:
        _write("--json", arguments.json, lambda path: _dump(path, to_json(question, cells, mixed)))
    if arguments.plot:
        _write("--plot", arguments.plot, lambda path: draw_goodput(cells, path))
    return 0


def _years(text: str) -> float:
    try:
        years = float(text)
    except ValueError:
        years = float("nan")
    if not 0 < years <= 1e6:
        raise argparse.ArgumentTypeError(f"expected a number of years above 0, got {text!r}")
    return years


def _cluster(arguments: argparse.Namespace) -> Cluster:
    values = {name: getattr(arguments, name) for name in _CLUSTER_OPTIONS}
    return Cluster(interruption_s=arguments.interruption_years * YEAR_S, **values)


# ---------------------------------------------------------------- files


def _require_writable(option: str, path: Path) -> None:
    """UserError now rather than after minutes of simulation."""
    if path.is_dir():
        raise UserError(f"{option}: {path} is a directory; name a file")
    if not path.parent.is_dir():
        raise UserError(f"{option}: the directory {path.parent} does not exist; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{option}: {path} cannot be written; choose another file")


def _write(option: str, path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise UserError(
            f"{option}: {path} cannot be written: {error.strerror}; choose another file"
        ) from error


def _dump(path: Path, figures: object) -> None:
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- on the terminal


def _title(row: str) -> str:
    if row.startswith("M="):
        return f"decoupled, {row}"
    return "data parallel, rigid" if row == RIGID else "data parallel, elastic"


def _print_cells(console: Console, question: Question, cells: Sequence[Cell]) -> None:
    compared = any(cell.published is not None for cell in cells)
    table = Table(title="Goodput, and uptime below", title_justify="left", show_lines=True)
    table.add_column("")
    for chips in question.chips:
        table.add_column(f"{short(chips)} chips", justify="right")
    for row in question.rows:
        line = [cell for cell in cells if cell.row == row]
        table.add_row(_title(row), *map(_cell_text, line))
    console.print(table)
    if compared:
        console.print("In brackets: the paper's value, and how far ours is from it, in points.")
    console.print(
        f"Goodput: share of chip time in finished steps, ± half the 95 % interval over "
        f"{question.seeds} seeds. Uptime: share of {RESOLUTION_S:.0f} s slots in which anybody "
        f"trains."
    )


def _cell_text(cell: Cell) -> str:
    text = f"{cell.goodput:.1%}"
    if cell.low is not None and cell.high is not None:
        text += f" ± {50 * (cell.high - cell.low):.1f}"
    if cell.published is not None and cell.difference is not None:
        text += f"\n({100 * cell.published:.0f}, {100 * cell.difference:+.1f})"
    return text + f"\nup {cell.uptime:.1%}"


def _print_merging(console: Console, question: Question, cells: Sequence[Cell]) -> None:
    """What the protocol did in the decoupled rows."""
    if not question.learners:
        return
    table = Table(title="What the protocol made of it", title_justify="left")
    for head in ("", "merges", "contributors per merge", "tokens merged", "of the time left"):
        table.add_column(head, justify="right" if head else "left")
    for cell in cells:
        merging = cell.merging
        if merging:
            table.add_row(
                f"{cell.row}, {short(cell.chips)} chips",
                f"{merging.num_merges}",
                f"{merging.num_contributions / max(1, merging.num_merges):.1f}",
                f"{merging.merged_tokens / max(1, merging.processed_tokens):.0%}",
                f"{merging.efficiency:.1%}",
            )
    console.print(table)
    console.print(
        "No learner ever waited: the simulator checks it after every event. Of the time left: how "
        "much of the time between failures went into finished steps, after starting and catching "
        "up."
    )


def _print_mixed(console: Console, mixed: Sequence[Mixed]) -> None:
    title = "Two kinds of accelerator, 18 % apart, each step varying by 10 %"
    table = Table(title=title, title_justify="left")
    for head in ("", "goodput", "published", "contributors per merge"):
        table.add_column(head, justify="right" if head else "left")
    for policy in mixed:
        table.add_row(
            policy.policy,
            f"{policy.goodput:.0%}",
            f"{policy.published:.0%}",
            f"{policy.contributors:.1f}",
        )
    console.print(table)


# ---------------------------------------------------------------- volunteers


def _run_volunteers(arguments: argparse.Namespace) -> int:
    if not VOLUNTEERS_MIN <= arguments.volunteers <= VOLUNTEERS_MAX:
        raise UserError(
            f"--volunteers: expected a whole number from {VOLUNTEERS_MIN} to {VOLUNTEERS_MAX}, "
            f"got {arguments.volunteers}"
        )
    if not 0 < arguments.hours <= HOURS_MAX:
        raise UserError(
            f"--hours: expected a number above 0, at most {HOURS_MAX:g}, got {arguments.hours:g}"
        )
    if arguments.plot:
        raise UserError("--plot draws the table of chips; leave it out with --volunteers")
    with Console(stderr=True).status(f"{arguments.volunteers} volunteers"):
        result = run_volunteers(arguments.volunteers, arguments.hours, seed=0)
    if result.online == 0:
        raise UserError(
            f"none of {arguments.volunteers} volunteers happened to be online in "
            f"{arguments.hours:g} h; give more --volunteers or more --hours"
        )
    _print_volunteers(Console(), result)
    if arguments.json:
        _write("--json", arguments.json, lambda path: _dump(path, asdict(result)))
    return 0


def _print_volunteers(console: Console, result: Volunteers) -> None:
    title = f"{result.num_volunteers} volunteers for {result.hours:g} h, no central syncer"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for words, value in (
        ("online at a time", f"{result.online:.1f}"),
        ("who came meanwhile", f"{result.joins}"),
        ("online time spent on inner steps", f"{result.computing:.1%}"),
        ("online time whose steps were merged", f"{result.merged:.1%}"),
        ("the same, median node", f"{result.merged_median:.1%}"),
        ("uptime", f"{result.uptime:.1%}"),
        ("merges per hour", f"{result.merges_per_hour:.0f}"),
        ("contributors per merge", f"{result.contributors:.1f}"),
        *((f"tokens {fate}", f"{share:.1%}") for fate, share in result.fates.items()),
    ):
        table.add_row(words, value)
    console.print(table)
