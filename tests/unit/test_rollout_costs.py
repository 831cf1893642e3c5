from itertools import pairwise

import pytest

from p2pdiloco.rollout.costs import WIDTHS, CostTable, Reliability, Searching, paying_lengths


def linear_table(per_step: float, per_token: float) -> CostTable:
    """Costs in units of 0.1 ms."""
    table = CostTable()
    table.measure([1, 8, 32], lambda batch, width: 1e-4 * (per_step + per_token * batch * width))
    return table


def test_between_its_cells_a_table_is_linear() -> None:
    table = linear_table(5.0, 1.0)
    for batch, num_tokens in ((1, 4), (8, 56), (8, 8), (20, 100)):
        assert table.seconds(batch, num_tokens) == pytest.approx(1e-4 * (5 + num_tokens))


def test_beyond_its_cells_a_table_is_proportional() -> None:
    table = linear_table(0.0, 2.0)
    assert table.seconds(64, 64) == pytest.approx(128e-4)
    assert table.seconds(1, 34) == pytest.approx(68e-4)


def test_what_would_take_long_is_not_measured() -> None:
    asked: list[tuple[int, int]] = []

    def timed(batch: int, width: int) -> float:
        asked.append((batch, width))
        return 0.1 * batch * width

    table = CostTable()
    table.measure([1, 4, 16], timed)
    assert asked == [(1, 1), (1, 2), (1, 3), (4, 1)]
    assert table.seconds(1, 17) == pytest.approx(1.7)


def test_real_steps_correct_the_table() -> None:
    table = linear_table(1.0, 0.0)
    for _ in range(100):
        table.observe(8, 8, 3e-4)
    assert table.seconds(8, 8) == pytest.approx(3e-4, rel=0.05)
    assert table.seconds(1, 1) == pytest.approx(1e-4)


def test_one_hiccup_counts_little() -> None:
    table = linear_table(1.0, 0.0)
    table.observe(8, 8, 1000.0)
    assert table.seconds(8, 8) < 1.2e-4


def test_more_tokens_never_seem_cheaper() -> None:
    table = CostTable()
    seconds = dict(zip(WIDTHS, (2.0, 1.0, 3.0, 2.5, 4.0, 5.0), strict=True))
    table.measure([1], lambda _batch, width: seconds[width])
    costs = [table.seconds(1, num_tokens) for num_tokens in range(1, 18)]
    assert costs == sorted(costs)


def test_free_tokens_are_all_tried() -> None:
    assert paying_lengths([[0.9, 0.5, 0.1]], 1, lambda _batch, _tokens: 1.0) == [3]


def test_dear_tokens_are_not_tried() -> None:
    assert paying_lengths([[0.9, 0.5]], 1, lambda _batch, tokens: float(tokens)) == [0]


def test_the_likeliest_tokens_of_the_batch_are_tried_first() -> None:
    cost = linear_table(1.0, 0.25).seconds
    assert paying_lengths([[0.9, 0.85, 0.1], [0.3], []], 3, cost) == [2, 0, 0]


def test_a_full_batch_drafts_less_than_a_small_one() -> None:
    cost = linear_table(10.0, 1.0).seconds
    chances = [0.6, 0.4, 0.3, 0.2]
    small = paying_lengths([chances] * 1, 1, cost)
    full = paying_lengths([chances] * 32, 32, cost)
    assert small == [4]
    assert sum(full) < 32


def test_chances_that_do_not_hold_are_no_longer_believed() -> None:
    reliability = Reliability()
    assert reliability.chance(0.95) == pytest.approx(0.95)
    for index in range(400):
        reliability.observe(0.95, held=index % 4 == 0)
    assert reliability.chance(0.95) == pytest.approx(0.25, abs=0.03)
    assert reliability.chance(0.45) == pytest.approx(0.45)


def test_reliability_follows_a_change() -> None:
    reliability = Reliability()
    for held in (True, False):
        for _ in range(2000):
            reliability.observe(0.5, held=held)
    assert reliability.chance(0.5) < 0.1


def test_a_path_is_as_likely_as_all_its_tokens() -> None:
    assert Reliability().path_chances([0.5, 1.0, 0.5]) == pytest.approx([0.5, 0.5, 0.25])


def test_drafts_that_save_more_than_looking_takes_are_always_looked_for() -> None:
    searching = Searching()
    for saved_s in (3e-3, 0.0) * 10:
        assert searching.num_due(8) == 8
        searching.took(8, 8e-3, 8 * saved_s)
    assert all(searching.num_due(8) == 8 for _ in range(50))


def test_the_less_drafts_save_the_fewer_steps_look_for_them() -> None:
    searching, looked = Searching(), []
    for step in range(100):
        if searching.num_due(1):
            looked.append(step)
            searching.took(1, 1e-3, 0.0)
    pauses = [after - before for before, after in pairwise(looked)]
    assert pauses[:6] == [2, 3, 5, 9, 17, 17]


def test_drafts_that_begin_to_save_are_looked_for_in_each_step_again() -> None:
    searching = Searching()
    for _ in range(10):
        searching.took(8, 8e-3, 0.0)
    searching.took(4, 4e-3, 0.4)
    assert all(searching.num_due(8) == 8 for _ in range(50))


def test_after_a_pause_a_few_sequences_show_whether_drafts_save() -> None:
    searching = Searching()
    searching.took(32, 0.1, 0.0)
    assert [searching.num_due(32) for _ in range(2)] == [0, 4]
    assert searching.num_due(3) == 3
