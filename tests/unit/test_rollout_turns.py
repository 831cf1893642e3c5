"""What the rollout process answers to turns and checks, with a small engine and no socket."""

from collections.abc import Collection
from dataclasses import replace

import pytest
from rl_builders import RULES, TASKS, episode, generated, so_far, told, with_token
from rollout_builders import small_engine, small_model

from p2pdiloco.rl.checks import Rulebook
from p2pdiloco.rl.episodes import Episode, pack, unpack
from p2pdiloco_daemon.rollouts.messages import Check, Checked, Message, Play, Played, Refused
from p2pdiloco_daemon.rollouts.turns import Turns

STEP = TASKS.step


def rulebook(step: int) -> Rulebook:
    return replace(RULES, tasks=replace(TASKS, step=step), versions=frozenset({step}))


def made(trajectory: int = 1) -> Episode:
    """What the policy of the step makes."""
    episode = generated(small_model(), rulebook(STEP), trajectory)
    answers = tuple(replace(a, versions=(STEP,) * len(a.versions)) for a in episode.answers)
    return replace(episode, answers=answers)


class Worker:
    """`told` is what it said."""

    def __init__(self, version: int | None = STEP) -> None:
        self.told: list[Message] = []
        self.model = small_model()
        self.engine = small_engine(small_model(), version=-1)
        self.turns = Turns(self.engine, rulebook, self.told.append)
        if version is not None:
            self.install(version)

    def install(self, version: int) -> None:
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        self.engine.swap(weights, version)
        self.turns.policy_changed()

    def work(self) -> list[Message]:
        while self.engine.has_work:
            for progress in self.engine.step():
                self.turns.take(progress)
        while self.turns.has_checks:
            self.turns.check_next()
        return self.told

    def checked(
        self, *episodes: bytes, ended: bool = True, replayed: Collection[int] = ()
    ) -> list[str]:
        for number, data in enumerate(episodes):
            self.turns.check(Check(number, STEP, data, ended, number in replayed))
        return [message.refusal for message in self.work() if isinstance(message, Checked)]


def play(number: int = 1, step: int = STEP, turn: int = 0, history: bytes = b"") -> Play:
    return Play(number, step, trajectory=1, turn=turn, history=history)


def test_a_trajectory_is_played_to_its_end() -> None:
    worker, history = Worker(), b""
    for turn in range(3):
        worker.turns.play(play(turn, turn=turn, history=history))
        played = worker.work()[-1]
        assert isinstance(played, Played) and played.id == turn
        history = played.episode
        assert played.num_tokens == len(unpack(history).tokens)
        assert (played.turn, played.has_ended) == [(1, False), (2, False), (2, True)][turn]
    assert unpack(history).tokens == made().tokens
    assert worker.checked(history, replayed={0}) == [""]


def test_a_turn_of_a_later_step_is_for_later_and_of_an_older_one_for_nobody() -> None:
    worker = Worker()
    worker.turns.play(play(1, step=STEP + 1))
    worker.turns.play(play(2, step=STEP - 1))
    later, older = worker.told
    assert isinstance(later, Refused) and later.is_busy
    assert isinstance(older, Refused) and not older.is_busy
    assert "is none of step 5" in older.reason


def test_without_a_policy_nothing_is_played_or_checked() -> None:
    worker = Worker(version=None)
    worker.turns.play(play())
    assert worker.checked(pack(made())) == []
    assert all(isinstance(told, Refused) and told.is_busy for told in worker.told)
    assert len(worker.told) == 2


def test_a_new_policy_voids_what_is_being_generated() -> None:
    worker = Worker()
    worker.turns.play(play())
    worker.engine.step()
    worker.install(STEP + 1)
    [refused] = worker.work()
    assert isinstance(refused, Refused) and not refused.is_busy
    assert "is that of step 6 now" in refused.reason
    worker.turns.play(play(2, step=STEP + 1))
    assert isinstance(worker.work()[-1], Played)


def test_a_withdrawn_turn_and_a_withdrawn_check_are_not_answered() -> None:
    worker = Worker()
    worker.turns.play(play(1))
    worker.turns.check(Check(2, STEP, pack(made()), ended=True, replayed=True))
    worker.turns.cancel(1)
    worker.turns.cancel(2)
    assert worker.work() == []


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"garbage", "a malformed episode"),
        (pack(told("ab.", "c.", "ddd.")), "of policies that the step does not allow"),
        (pack(replace(made(), reward=0.0)), "its reward is another"),
    ],
)
def test_what_is_wrong_with_an_episode_is_said(data: bytes, reason: str) -> None:
    [refusal] = Worker().checked(data)
    assert reason in refusal


def test_only_what_is_replayed_is_known_to_be_of_the_policy() -> None:
    honest = made()
    place = honest.answers[0].start
    forged = pack(with_token(honest, place, honest.tokens[place] % 60 + 1))
    believed, refused = Worker().checked(forged, forged, replayed={1})
    assert believed == ""
    assert "would not have chosen" in refused


def test_tokens_of_a_policy_that_is_gone_are_not_replayed() -> None:
    worker, honest = Worker(version=STEP + 1), made()
    place = honest.answers[0].start
    forged = with_token(honest, place, honest.tokens[place] % 60 + 1)
    assert worker.checked(pack(forged), replayed={0}) == [""]


def test_an_episode_so_far_is_not_taken_for_one_that_has_ended_nor_the_other_way_round() -> None:
    begun = so_far("ab.", rules=rulebook(0))
    begun = replace(begun, step=STEP, answers=(replace(begun.answers[0], versions=(STEP,) * 3),))
    assert Worker().checked(pack(begun), ended=False) == [""]
    assert "ends before or after its end" in Worker().checked(pack(begun))[0]
    assert "ends before or after its end" in Worker().checked(pack(made()), ended=False)[0]
    assert Worker().checked(pack(episode(version=STEP)), ended=False) != [""]
