"""What is found out about forged episodes."""

import random
from dataclasses import replace

import pytest
from rl_builders import (
    LIMITS,
    POLICY,
    RULES,
    STOP,
    episode,
    generated,
    say,
    so_far,
    told,
    with_token,
)
from rollout_builders import small_model

from p2pdiloco.rl.checks import Reason, Refusal, resume, story
from p2pdiloco.rl.episodes import Answer, Episode
from p2pdiloco.rl.replay import replay, sampled
from p2pdiloco.rollout.verify import Referee

HONEST = told("ab.", "c.", "ddd.")
BEGUN = so_far("ab.", "c.")


def reason(refusal: Refusal | None) -> Reason | None:
    return None if refusal is None else refusal.reason


def moved(answer: Answer, by: int) -> Answer:
    return replace(answer, start=answer.start + by)


@pytest.mark.parametrize("answers", [("ab.", "c.", "ddd."), ("abcdef", "c.", "dddddd")])
def test_an_honest_story_is_believed(answers: tuple[str, ...]) -> None:
    assert story(told(*answers), RULES) is None


@pytest.mark.parametrize(
    ("forged", "expected"),
    [
        (replace(HONEST, step=6), Reason.NOT_ASSIGNED),
        (replace(HONEST, trajectory=6), Reason.NOT_ASSIGNED),
        (with_token(HONEST, 0, 7), Reason.WRONG_PROMPT),
        (with_token(HONEST, 9, 7), Reason.WRONG_STORY),
        (with_token(HONEST, 9, RULES.tokenizer.vocabulary_size), Reason.UNKNOWN_TOKEN),
        (replace(HONEST, reward=0.5), Reason.WRONG_REWARD),
        (replace(HONEST, is_cut=True), Reason.WRONG_END),
        (replace(HONEST, tokens=(*HONEST.tokens, 1)), Reason.WRONG_STORY),
        (
            replace(HONEST, answers=HONEST.answers[:2], tokens=HONEST.tokens[:14]),
            Reason.WRONG_STORY,
        ),
        (replace(HONEST, answers=HONEST.answers[:2], tokens=HONEST.tokens[:18]), Reason.WRONG_END),
        (with_token(HONEST, 6, STOP), Reason.WRONG_LENGTH),
        (with_token(HONEST, 7, 3), Reason.WRONG_LENGTH),
    ],
)
def test_a_forged_story_is_refused_by_name(forged: Episode, expected: Reason) -> None:
    assert reason(story(forged, RULES)) is expected


def test_a_policy_that_the_step_does_not_allow_is_refused() -> None:
    later = replace(RULES, versions=frozenset({1, 2}))
    assert story(HONEST, later) == Refusal(Reason.WRONG_VERSION, 5)


def test_an_answer_beyond_its_limit_is_refused() -> None:
    strict = replace(RULES, limits=replace(LIMITS, answer_tokens_max=3))
    assert reason(story(HONEST, strict)) is Reason.WRONG_LENGTH


def test_nothing_is_told_of_a_task_whose_prompt_leaves_no_room() -> None:
    """Nobody was asked for it, so nobody has it; a peer may claim to."""
    tight = replace(RULES, limits=replace(LIMITS, tokens_max=5))
    assert reason(story(HONEST, tight)) is Reason.NOT_ASSIGNED
    assert resume(BEGUN, tight) == Refusal(Reason.NOT_ASSIGNED, 0)


def test_turns_after_the_end_are_refused() -> None:
    last = HONEST.answers[-1]
    longer = replace(
        HONEST,
        tokens=HONEST.tokens + HONEST.tokens[last.start :],
        answers=(*HONEST.answers, moved(last, 4)),
    )
    assert reason(story(longer, RULES)) is Reason.WRONG_END


def test_a_resumed_conversation_goes_on_as_if_it_had_stayed() -> None:
    conversation = resume(BEGUN, RULES)
    assert not isinstance(conversation, Refusal)
    assert conversation.turn == 2
    assert conversation.so_far() == BEGUN
    conversation.answered(say("ddd."))
    assert conversation.episode == HONEST


@pytest.mark.parametrize(
    ("forged", "expected"),
    [
        (replace(BEGUN, step=6), Reason.NOT_ASSIGNED),
        (with_token(BEGUN, 0, 7), Reason.WRONG_PROMPT),
        (with_token(BEGUN, 9, 7), Reason.WRONG_STORY),
        (with_token(BEGUN, len(BEGUN.tokens) - 1, 7), Reason.WRONG_STORY),
        (replace(BEGUN, tokens=BEGUN.tokens[:-1]), Reason.WRONG_STORY),
        (replace(BEGUN, tokens=(*BEGUN.tokens, 1)), Reason.WRONG_STORY),
        (replace(BEGUN, reward=0.1), Reason.WRONG_REWARD),
        (replace(BEGUN, is_cut=True), Reason.WRONG_END),
        (HONEST, Reason.WRONG_END),
    ],
)
def test_words_that_nobody_said_are_not_resumed(forged: Episode, expected: Reason) -> None:
    resumed = resume(forged, RULES)
    assert reason(resumed if isinstance(resumed, Refusal) else None) is expected


def test_what_the_engine_makes_passes_both_checks() -> None:
    model = small_model()
    margin = Referee(model).margin
    for trajectory in range(6):
        made = generated(model, trajectory=trajectory)
        assert story(made, RULES) is None
        assert replay(made, RULES, {0: model}, margin) is None


def test_another_machine_s_rounding_is_no_reason_to_refuse() -> None:
    model = small_model()
    for trajectory in range(3):
        made = generated(model, trajectory=trajectory)
        assert replay(made, RULES, {0: model}, margin=0.05) is None


def test_one_other_token_is_found_and_its_place_named() -> None:
    model = small_model()
    made = generated(model)
    position = made.answers[0].start
    forged = with_token(made, position, made.tokens[position] % 60 + 1)
    assert replay(forged, RULES, {0: model}, 1e-4) == Refusal(Reason.WRONG_TOKEN, position)


def test_another_model_temperature_or_seed_is_found() -> None:
    model = small_model()
    made = generated(model)
    elsewhere = generated(small_model(seed=1))
    hotter = generated(model, replace(RULES, policy=replace(POLICY, temperature=1.5)))
    reseeded = generated(model, replace(RULES, tasks=replace(RULES.tasks, run_id="other")))
    for forged in (elsewhere, hotter, reseeded):
        assert forged.tokens != made.tokens
        found = reason(replay(forged, RULES, {0: model}, 1e-4))
        assert found in (Reason.WRONG_TOKEN, Reason.WRONG_LOGPROB)


def test_a_log_probability_that_is_made_up_is_found() -> None:
    model = small_model()
    made = generated(model)
    first = made.answers[0]
    forged = replace(first, logprobs=(first.logprobs[0] - 0.5, *first.logprobs[1:]))
    refusal = replay(replace(made, answers=(forged, *made.answers[1:])), RULES, {0: model}, 1e-4)
    assert refusal == Refusal(Reason.WRONG_LOGPROB, first.start)


def test_tokens_of_versions_without_a_model_are_not_looked_at() -> None:
    assert replay(HONEST, RULES, {}, 1e-4) is None
    assert replay(HONEST, RULES, {3: small_model()}, 1e-4) is None


def test_the_sample_follows_the_share() -> None:
    episodes = [episode(trajectory=i) for i in range(1000)]
    assert 150 < len(sampled(episodes, 0.2, random.Random(1))) < 250
    assert sampled(episodes, 0.0, random.Random(1)) == []
    assert sampled(episodes, 1.0, random.Random(1)) == episodes


def test_a_refusal_says_what_and_where() -> None:
    assert str(Refusal(Reason.WRONG_REWARD, 7)) == "its reward is another (token 7)"
