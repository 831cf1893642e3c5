"""Rules of a step: what the spec of a run says, the same for everybody."""

from collections.abc import Sequence

import pytest

from p2pdiloco.errors import UserError
from p2pdiloco.rl import rules
from p2pdiloco.rl.assignment import SHARED
from p2pdiloco.rl.checks import story
from p2pdiloco.rl.environments import Guess, Sums
from p2pdiloco.rl.rules import limits_of, rulebook_of, step_of, task_of
from p2pdiloco.rl.tools import sums_with_calculator
from p2pdiloco.rollout.request import Token
from p2pdiloco.spec import DataSpec, RlSpec, RunSpec, SyncSpec


def spec_of(**rl: object) -> RunSpec:
    return RunSpec(
        name="a",
        data=DataSpec(sequence_length=96),
        sync=SyncSpec(num_fragments=1),
        rl=RlSpec.model_validate(rl),
    )


def test_each_environment_has_its_task() -> None:
    assert task_of(spec_of(turns_max=3)) == Guess(turns_max=3)
    assert task_of(spec_of(environment="sums")) == Sums()
    assert task_of(spec_of(environment="sums:9")) == Sums(largest=9)
    assert task_of(spec_of(environment="calculator")) == sums_with_calculator()
    assert task_of(spec_of(environment="calculator:99")) == sums_with_calculator(99)


def test_a_trajectory_has_as_many_tokens_as_a_sequence() -> None:
    limits = limits_of(spec_of(turns_max=3, answer_tokens_max=5))
    assert (limits.turns_max, limits.answer_tokens_max, limits.tokens_max) == (3, 5, 96)


def test_a_steps_tasks_are_everybodys_and_of_one_version() -> None:
    book = rulebook_of(spec_of(num_groups=2, group_size=3), "run", 7)
    assert (book.tasks.run_id, book.tasks.step, book.tasks.owner) == ("run", 7, SHARED)
    assert book.tasks.num_trajectories == 6
    assert book.versions == {7}
    assert book.policy.stop_token == ord("\n")


def test_its_conversations_ask_the_environment() -> None:
    conversation = rulebook_of(spec_of(), "run", 7).conversation(0)
    assert bytes(conversation.tokens).startswith(b"Guess 0 to 9")
    assert conversation.request().num_tokens_max == 1


def test_a_tool_of_the_spec_answers_within_a_trajectory_that_checks_out() -> None:
    spec = spec_of(environment="calculator", answer_tokens_max=16)
    book = rulebook_of(spec, "run", 7)
    conversation = book.conversation(0)
    manual, _, question = bytes(conversation.tokens).decode().partition("\n")
    a, b = question.removesuffix("=").split("+")
    assert manual == "calc: 1+2 works out a sum."
    conversation.answered(written(f"calc: {a}+{b}\n"))
    told = f"{int(a) + int(b)}\n"
    assert bytes(conversation.tokens).decode().endswith(f"calc: {a}+{b}\n{told}")
    conversation.answered(written(told))
    assert conversation.episode is not None
    assert conversation.episode.reward == 1.0
    assert story(conversation.episode, book) is None


def written(answer: str) -> list[Token]:
    return [Token(byte, -0.5, 7) for byte in answer.encode()]


class _Splitting:
    """Makes two tokens of a line break."""

    vocabulary_size = 256

    def encode(self, text: bytes) -> list[int]:
        return [0, 1]

    def decode(self, tokens: Sequence[int]) -> str:
        return ""


def test_a_line_break_of_two_tokens_cannot_end_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_tokenizer", lambda data: _Splitting())
    with pytest.raises(UserError, match="makes 2 tokens of a line break"):
        rulebook_of(spec_of(), "run", 7)


def test_what_is_placed_has_the_prompt_of_each_group() -> None:
    step = step_of(rulebook_of(spec_of(num_groups=2, group_size=3), "run", 7))
    assert (step.number, step.group_size) == (7, 3)
    assert step.prompt_tokens == (len("Guess 0 to 9.\n"),) * 2


def test_a_prompt_without_room_for_an_answer_counts_as_the_most_there_may_be() -> None:
    short = spec_of(num_groups=2).model_copy(update={"data": DataSpec(sequence_length=8)})
    assert step_of(rulebook_of(short, "run", 7)).prompt_tokens == (8, 8)
