"""What an engine says of its speed."""

import itertools
import random

import pytest
from rollout_builders import generate, requests, small_model

from p2pdiloco.rollout.costs import CostTable
from p2pdiloco.rollout.engine import Engine, Limits
from p2pdiloco.rollout.pace import Pace


def pace() -> Pace:
    """Of an engine whose steps take a millisecond per token."""
    costs = CostTable()
    costs.measure([1, 2, 4], lambda batch, width: batch * width / 1000)
    return Pace(costs)


def test_without_work_a_token_takes_what_the_table_says() -> None:
    assert dict(pace().token_s) == {1: 0.001, 2: 0.002, 4: 0.004}


def test_drafts_that_hold_make_a_token_shorter() -> None:
    measured = pace()
    for _ in range(100):
        measured.decoded(2, 8, 0.004)
    assert dict(measured.token_s) == pytest.approx({1: 0.001, 2: 0.001, 4: 0.004}, rel=1e-3)


def test_one_hiccup_says_little() -> None:
    measured = pace()
    measured.decoded(1, 1, 10.0)
    assert dict(measured.token_s)[1] < 0.0012


def test_prompts_count_by_their_tokens() -> None:
    measured = pace()
    assert measured.prefill_tokens_per_s == 0
    measured.prefilled(100, 0.1)
    assert measured.prefill_tokens_per_s == pytest.approx(1000)
    for _ in range(100):
        measured.prefilled(100, 0.2)
    assert measured.prefill_tokens_per_s == pytest.approx(500, rel=1e-2)


def test_before_calibration_there_is_nothing_to_say() -> None:
    unmeasured = Pace(CostTable())
    unmeasured.decoded(1, 1, 0.1)
    assert unmeasured.token_s == ()


def test_an_engine_measures_itself_as_it_works() -> None:
    rng, ticks = random.Random(1), itertools.count()
    engine = Engine(small_model(), Limits(num_rows_max=4), lambda: next(ticks) * 1e-3)
    engine.calibrate()
    assert [batch for batch, _seconds in engine.pace.token_s] == [1, 2, 4]
    assert engine.pace.prefill_tokens_per_s == pytest.approx(256_000)
    generate(engine, requests(2, num_tokens=8, seed=rng.randrange(9)))
    assert engine.busy_s > 0
    assert engine.pace.prefill_tokens_per_s < 256_000
    assert engine.num_rows_of(512) == 4
