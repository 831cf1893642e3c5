"""Goodput of swarms that run the production protocol."""

import pytest

from p2pdiloco.simulation.goodput import Question, run_table
from p2pdiloco.simulation.goodput_decoupled import merge_under_failures
from p2pdiloco.simulation.goodput_failures import YEAR_S, Cluster
from p2pdiloco.simulation.goodput_mixed import run_mixed
from p2pdiloco.simulation.goodput_volunteers import run_volunteers


@pytest.mark.parametrize(("learners", "chips"), [(2, 600_000), (4, 2_400_000)])
def test_decoupled_cells_come_close_to_the_paper(learners: int, chips: int) -> None:
    """One short seed; with three all cells are within 3 points (`benchmarks.goodput`)."""
    question = Question(chips=(chips,), learners=(learners,), seeds=1)
    cell = list(run_table(question))[-1]
    assert cell.row == f"M={learners}"
    assert cell.difference is not None
    assert cell.merging
    assert abs(cell.difference) < 0.04, cell
    assert cell.merging.num_merges > 20
    assert cell.merging.num_contributions >= cell.merging.num_merges
    assert round(cell.uptime, 3) == 1.0 or learners < 4


def test_without_failures_nothing_is_lost() -> None:
    merging = merge_under_failures(
        Cluster(interruption_s=1e6 * YEAR_S), num_chips=1000, num_learners=3, seed=1
    )
    assert merging.efficiency == pytest.approx(1.0, abs=0.02)
    assert merging.num_contributions / merging.num_merges > 2.8
    assert merging.longest_pause_s < 2.5


def test_nobody_waits_for_slower_accelerators_and_grace_takes_them_in() -> None:
    waiting, first, grace = run_mixed(seed=1)
    assert waiting.goodput == pytest.approx(0.84, abs=0.01)
    assert first.goodput == grace.goodput == 1.0
    assert first.contributors < 3
    assert grace.contributors > 7


def test_volunteers_at_home_merge_without_a_central_syncer() -> None:
    result = run_volunteers(num_volunteers=12, hours=0.2, seed=3)
    assert result.uptime == 1.0
    assert 0.9 < result.computing <= 1.0
    assert 0 < result.merged < result.computing
    assert result.merges_per_hour > 20
    assert sum(result.fates.values()) == pytest.approx(1.0)
