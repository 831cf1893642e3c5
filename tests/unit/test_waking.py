"""How a life begins after another."""

import pytest

from p2pdiloco_daemon.waking import INCARNATION_MAX, next_incarnation


@pytest.mark.parametrize(("before", "number"), [(7, 1000), (1000, 1001), (5000, 5001), (0, 1000)])
def test_a_life_is_newer_than_the_last_and_than_a_lost_one(before: int, number: int) -> None:
    assert next_incarnation(before, now=1000.9) == number


@pytest.mark.parametrize("damage", [None, -1, INCARNATION_MAX, 10**400, 2.5, "7", [1]], ids=repr)
def test_a_damaged_number_is_not_built_upon(damage: object) -> None:
    assert next_incarnation(damage, now=1000.0) == 1000
