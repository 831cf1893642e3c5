"""The picture of `p2pdiloco simulate`: goodput over chips, one line a row, published values beside.

matplotlib is the `benchmarks` extra, imported only when a picture is wanted.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from p2pdiloco.errors import UserError
from p2pdiloco.simulation.goodput import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
COLOURS = ("#8c8c8c", "#444444", "#9ecae1", "#4a98c9", "#1f6cb0", "#08306b")
"""Data parallel in grey, learners from light to dark blue."""
MORE_COLOURS = ("#b2182b", "#762a83", "#1b7837", "#e08214")


def require_plot(path: Path) -> None:
    """UserError now rather than after minutes of simulation."""
    if path.suffix not in FORMATS:
        raise UserError(f"--plot: expected a file that ends in .png or .svg, got {path}")
    if find_spec("matplotlib") is None:
        raise UserError(
            "--plot needs matplotlib, which is not installed: "
            "python -m pip install 'p2pdiloco[benchmarks]'"
        )


def draw_goodput(cells: Sequence[Cell], path: Path) -> None:
    """Raises OSError when the file cannot be written."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "goodput"
    figure, axes = pyplot.subplots(figsize=(8, 5), facecolor="white")
    rows = list(dict.fromkeys(cell.row for cell in cells))
    colours = dict(zip(rows, (*COLOURS, *MORE_COLOURS * len(rows)), strict=False))
    ends = []
    for row in rows:
        line = sorted((cell for cell in cells if cell.row == row), key=lambda cell: cell.chips)
        chips = [cell.chips for cell in line]
        shares = [100 * cell.goodput for cell in line]
        axes.plot(chips, shares, color=colours[row], lw=2)
        intervals = [(c.chips, 100 * c.low, 100 * c.high) for c in line if c.low and c.high]
        if intervals:
            axes.fill_between(*zip(*intervals, strict=True), color=colours[row], alpha=0.2, lw=0)
        points = [(cell.chips, 100 * cell.published) for cell in line if cell.published]
        if points:
            axes.scatter(
                *zip(*points, strict=True), s=34, zorder=3, lw=1.4, fc="white", ec=colours[row]
            )
        ends.append((shares[-1], row))
    right = max(cell.chips for cell in cells)
    ends.sort()
    for height, (_, row) in zip(_apart([end for end, _ in ends]), ends, strict=True):
        axes.annotate(
            _label(row),
            (right, height),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            color=colours[row],
            fontweight="bold",
            annotation_clip=False,
        )
    _dress(axes, sorted({cell.chips for cell in cells}))
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _dress(axes: "Axes", chips: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(chips, [short(count) for count in chips])
    axes.minorticks_off()
    axes.set_ylim(0, 100)
    axes.set_yticks(range(0, 101, 20), [f"{share} %" for share in range(0, 101, 20)])
    axes.set_xlabel("chips")
    axes.set_title(
        "Goodput under failures: lines simulated, circles as published",
        loc="left",
        fontsize=11,
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _apart(heights: Sequence[float], least: float = 4.5) -> list[float]:
    """Ascending heights of labels, moved up where they would overlap."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + least) if moved else height)
    return moved


def _label(row: str) -> str:
    names = {"rigid": "data parallel, rigid", "elastic": "data parallel, elastic"}
    return names.get(row, f"{row} learners".replace("M=", ""))


def short(count: int) -> str:
    """1500000 as 1.5M."""
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:g}{letter}"
    return str(count)
