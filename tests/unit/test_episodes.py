"""Trajectories: how they are made, and their bytes."""

from collections.abc import Mapping
from dataclasses import replace

import msgpack
import pytest
from rl_builders import LIMITS, RULES, STOP, TASKS, episode, say, so_far, told

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.rl.assignment import StepTasks
from p2pdiloco.rl.episodes import EPISODE_BYTES_MAX, Answer, Episode, pack, unpack


def test_a_conversation_goes_on_until_the_environment_ends_it() -> None:
    conversation = RULES.conversation(1)
    for text in ("ab.", "c."):
        conversation.answered(say(text))
        assert conversation.episode is None
    conversation.answered(say("ddd."))
    ended = conversation.episode
    assert ended is not None
    assert (ended.step, ended.trajectory, ended.reward, ended.is_cut) == (5, 1, 0.25, False)
    assert [(answer.start, answer.end) for answer in ended.answers] == [(5, 8), (12, 14), (18, 22)]


def test_a_turn_is_asked_for_with_all_that_was_said() -> None:
    conversation = RULES.conversation(1)
    conversation.answered(say("ab."))
    request = conversation.request()
    assert request.prompt == tuple(conversation.tokens)
    assert request.id == "5/node/1/1"
    assert request.trajectory == "5/node/1"
    assert request.stop_tokens == {STOP}
    assert request.num_tokens_max == LIMITS.answer_tokens_max


def test_an_answer_as_long_as_it_may_be_is_heard_as_it_is() -> None:
    assert told("abcdef", "c.", "dddddd").reward == pytest.approx(1 / 6)


def test_an_answer_that_the_trajectory_s_limit_cut_is_not_heard() -> None:
    cut = told("abcde", rules=replace(RULES, limits=replace(LIMITS, tokens_max=10)))
    assert cut.is_cut
    assert cut.reward == 0


@pytest.mark.parametrize("limits", [{"turns_max": 2}, {"tokens_max": 18}])
def test_a_trajectory_at_its_limit_is_cut(limits: Mapping[str, int]) -> None:
    rules = replace(RULES, limits=replace(LIMITS, **limits))
    cut = told("ab.", "c.", rules=rules)
    assert cut.is_cut
    assert cut.reward == 0


@pytest.mark.parametrize("tokens_max", [9, 11, 12])
def test_no_trajectory_has_more_tokens_than_it_may_whatever_the_environment_says(
    tokens_max: int,
) -> None:
    """Prompt and answer are eight tokens, "more" would be four; a model may know no position
    beyond."""
    cut = told("ab.", rules=replace(RULES, limits=replace(LIMITS, tokens_max=tokens_max)))
    assert cut.is_cut
    assert len(cut.tokens) <= tokens_max


def test_an_answer_of_one_token_may_follow_what_the_environment_says() -> None:
    rules = replace(RULES, limits=replace(LIMITS, tokens_max=13))
    assert len(so_far("ab.", rules=rules).tokens) == 12


def test_the_last_turn_may_not_outgrow_the_trajectory() -> None:
    rules = replace(RULES, limits=replace(LIMITS, tokens_max=7))
    assert rules.conversation(0).request().num_tokens_max == 2
    with pytest.raises(ValueError, match="leaves no room"):
        replace(RULES, limits=replace(LIMITS, tokens_max=5)).conversation(0)


def test_tasks_follow_from_run_step_and_owner() -> None:
    again = StepTasks("run", 5, PeerId("node"), num_groups=2, group_size=3)
    others = [
        replace(TASKS, run_id="another"),
        replace(TASKS, step=6),
        replace(TASKS, owner=PeerId("someone")),
    ]
    seeds = [TASKS.environment_seed(i) for i in range(6)]
    assert seeds == [again.environment_seed(i) for i in range(6)]
    assert len(set(seeds[:3])) == len(set(seeds[3:])) == 1
    assert len({seeds[0], seeds[3], *(o.environment_seed(0) for o in others)}) == 5
    assert len({TASKS.noise_seed(), *(o.noise_seed() for o in others)}) == 4
    assert len({TASKS.noise_name(i) for i in range(6)}) == 6


def test_an_episode_survives_the_wire() -> None:
    original = told("ab.", "c.", "ddd.")
    assert unpack(pack(original)) == original


def test_the_bound_on_bytes_admits_the_longest_episode() -> None:
    longest = Episode(
        step=5,
        trajectory=0,
        tokens=(1,) * (1 << 17),
        answers=(Answer(1, (-0.5,) * ((1 << 17) - 1), (0,) * ((1 << 17) - 1)),),
        reward=0.0,
    )
    packed = pack(longest)
    assert len(packed) <= EPISODE_BYTES_MAX
    assert unpack(packed).num_generated == (1 << 17) - 1


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": b"123"},
        {"tokens": "text"},
        {"starts": [], "ends": []},
        {"starts": [0]},
        {"starts": [3]},
        {"ends": [9]},
        {"ends": [2]},
        {"starts": [2, 3], "ends": [4, 5]},
        {"logprobs": b""},
        {"logprobs": b"\x00\x00\xc0\x7f" * 3},
        {"logprobs": b"\x00\x00\x80\x3f" * 3},
        {"versions": b"\x00" * 8},
        {"reward": 1.5},
        {"reward": float("nan")},
        {"step": -1},
        {"step": True},
        {"trajectory": 1 << 60},
        {"extra": 1},
    ],
)
def test_a_malformed_episode_is_refused(change: dict[str, object]) -> None:
    table = msgpack.unpackb(pack(episode()))
    with pytest.raises(PeerError, match="malformed episode"):
        unpack(msgpack.packb({**table, **change}))


@pytest.mark.parametrize("data", [b"", b"\x93\x01", b"[" * 999, msgpack.packb([1, 2])])
def test_bytes_that_are_no_episode_are_refused(data: bytes) -> None:
    with pytest.raises(PeerError, match="malformed episode"):
        unpack(data)


def test_bytes_beyond_the_bound_are_not_read() -> None:
    with pytest.raises(PeerError, match="at most"):
        unpack(bytes(EPISODE_BYTES_MAX + 1))
