"""The picture of `p2pdiloco simulate`."""

from pathlib import Path

import pytest

from p2pdiloco.simulation.goodput import PUBLISHED, Cell
from p2pdiloco_daemon.goodput_plot import draw_goodput, short


def cells() -> list[Cell]:
    return [
        Cell(row, chips, share / 100, None, None, 1.0, 1.0, share / 100, None)
        for (row, chips), share in PUBLISHED.items()
    ]


@pytest.mark.parametrize(("count", "words"), [(12, "12"), (150_000, "150k"), (2_400_000, "2.4M")])
def test_large_counts_are_short(count: int, words: str) -> None:
    assert short(count) == words


def test_the_picture_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw_goodput(cells(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    draw_goodput(cells(), tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
