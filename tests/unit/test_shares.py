"""Shares of steps: their parts, in which order they are learnt from, and what is dropped."""

from dataclasses import replace

from rl_builders import episode

from p2pdiloco.rl.episodes import Episode
from p2pdiloco.rl.shares import SHARES_MAX, Part, Shares
from p2pdiloco.rl.step import Gradient

H, GROUP = 2, 4


def shares(version: int | None = 5, *, lag_max: int = 1) -> Shares:
    made = Shares(H, GROUP, lag_max, "dapo")
    if version is not None:
        made.stand_on(version)
    return made


def group(number: int, rewards: tuple[float, ...], step: int = 5) -> list[Episode]:
    return [
        replace(episode(reward, version=step, trajectory=number * GROUP + i), step=step)
        for i, reward in enumerate(rewards)
    ]


MIXED = group(0, (1.0, 0.0, 1.0, 0.0))
ALIKE = group(1, (0.5, 0.5, 0.5, 0.5))


def make_step(taken_from: Shares) -> Part:
    """As a learner does."""
    part = taken_from.take()
    num_tokens = part.num_tokens if part.chosen else 0
    taken_from.learnt(part, Gradient(-0.5, num_tokens, 0.25) if part.chosen else None)
    return part


def test_a_share_makes_as_many_parts_as_a_period_has_steps() -> None:
    some = shares()
    some.add(5, [*MIXED, *ALIKE])
    parts = [make_step(some) for _ in range(H)]
    assert [(len(part.chosen), len(part.alike)) for part in parts] == [(2, 2), (2, 2)]
    assert [part.num_tokens for part in parts] == [12, 12]
    assert not some.has_part


def test_what_became_of_a_share_is_told_when_it_ends() -> None:
    some = shares()
    some.add(5, [*MIXED, *ALIKE])
    make_step(some)
    assert some.take_ended() == []
    make_step(some)
    [lesson] = some.take_ended()
    assert (lesson.step, lesson.num_episodes) == (5, 8)
    assert (lesson.num_learnt_from, lesson.num_dropped) == (4, 0)
    assert (lesson.reward, lesson.drift, lesson.loss) == (0.5, 0.25, -0.5)
    assert some.take_ended() == []


def test_episodes_that_are_all_alike_make_their_steps() -> None:
    some = shares()
    some.add(5, ALIKE)
    assert [make_step(some).chosen for _ in range(H)] == [[], []]
    [lesson] = some.take_ended()
    assert (lesson.num_learnt_from, lesson.num_dropped, lesson.loss) == (0, 0, 0.0)


def test_one_episode_makes_its_steps() -> None:
    some = shares()
    some.add(5, MIXED[:1])
    assert [make_step(some).num_tokens for _ in range(H)] == [3, 0]


def test_a_share_without_episodes_makes_its_steps_and_is_not_told_of() -> None:
    some = shares()
    some.add(5, [])
    assert [make_step(some).num_tokens for _ in range(H)] == [0, 0]
    assert not some.has_part
    assert some.take_ended() == []


def test_a_share_waits_for_its_version() -> None:
    some = shares(version=None)
    some.add(5, MIXED)
    assert not some.has_part
    some.stand_on(4)
    assert not some.has_part
    some.stand_on(5)
    assert some.has_part


def test_the_older_share_is_learnt_from_first() -> None:
    some = shares()
    some.add(5, MIXED)
    some.add(6, group(0, (1.0, 0.0), step=6))
    make_step(some)
    some.stand_on(6)
    assert make_step(some).chosen[0].episode.step == 5
    assert make_step(some).chosen[0].episode.step == 6


def test_what_is_left_of_a_share_that_is_too_old_is_dropped_and_told() -> None:
    some = shares()
    some.add(5, MIXED)
    make_step(some)
    some.stand_on(7)
    assert not some.has_part
    [lesson] = some.take_ended()
    assert (lesson.num_learnt_from, lesson.num_dropped) == (2, 2)


def test_a_share_that_comes_too_late_is_dropped_and_told() -> None:
    some = shares(version=7)
    some.add(5, MIXED)
    assert not some.has_part
    [lesson] = some.take_ended()
    assert (lesson.num_episodes, lesson.num_learnt_from, lesson.num_dropped) == (4, 0, 4)


def test_what_came_before_is_not_learnt_from_again() -> None:
    some = shares()
    some.add(5, MIXED)
    some.add(5, [*MIXED, *ALIKE])
    taken = [make_step(some) for _ in range(2 * H)]
    assert sum(len(part.chosen) + len(part.alike) for part in taken) == 8
    assert not some.has_part


def test_no_more_shares_wait_than_may() -> None:
    some = shares(version=None)
    for step in range(SHARES_MAX + 1):
        some.add(step, group(0, (1.0, 0.0), step=step))
    assert [lesson.step for lesson in some.take_ended()] == [0]
