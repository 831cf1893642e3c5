"""Environments and tools: what they say to what the policy writes."""

import importlib.metadata
import importlib.util
import sys
import types

import pytest

from p2pdiloco.errors import UserError
from p2pdiloco.rl.environments import Ended, Environment, Guess, Observed, Sums, number_in
from p2pdiloco.rl.reasoning import ReasoningGym
from p2pdiloco.rl.tools import WithTools, calculator

has_reasoning_gym = importlib.util.find_spec("reasoning_gym") is not None


def secret_of(task: Guess, seed: int) -> int:
    for number in range(task.numbers):
        if task.begin(seed).act(str(number)) == Ended(1.0):
            return number
    raise AssertionError("no number is right")


def search(environment: Environment, low: int = 0, high: int = 9) -> Ended:
    """By halves."""
    guess = (low + high) // 2
    outcome = environment.act(f"{guess}\n")
    if isinstance(outcome, Ended):
        return outcome
    if outcome.text == "more\n":
        return search(environment, guess + 1, high)
    return search(environment, low, guess - 1)


def test_a_seed_always_makes_the_same_environment() -> None:
    task = Guess()
    assert [secret_of(task, seed) for seed in range(20)] == [
        secret_of(task, seed) for seed in range(20)
    ]
    assert {secret_of(task, seed) for seed in range(60)} == set(range(10))


def test_searching_by_halves_always_finds_the_number() -> None:
    assert all(search(Guess().begin(seed)).reward > 0.5 for seed in range(40))


def test_a_number_found_later_is_worth_less() -> None:
    task = Guess()
    secret = secret_of(task, 3)
    environment = task.begin(3)
    environment.act(str((secret + 1) % 10))
    assert environment.act(str(secret)) == Ended(0.875)


def test_a_vain_search_is_worth_its_last_distance() -> None:
    task = Guess(turns_max=1)
    near = (secret_of(Guess(), 5) + 1) % 10
    outcome = task.begin(5).act(str(near))
    assert isinstance(outcome, Ended)
    assert 0 <= outcome.reward < 0.2


def test_guesses_before_one_that_is_none_are_worth_a_little() -> None:
    environment = Guess().begin(3)
    environment.act(str((secret_of(Guess(), 3) + 1) % 10))
    assert environment.act("what?") == Ended(0.05)


@pytest.mark.parametrize("answer", ["", "seven", "10", "-1", "1 2", "9" * 5000, "\u0663", "1e3"])
def test_what_is_no_number_in_range_ends_the_guessing(answer: str) -> None:
    assert Guess().begin(0).act(answer) == Ended(0.0)


@pytest.mark.parametrize(
    ("text", "number"), [(" 12\n", 12), ("-3", -3), ("--3", None), ("+3", None), ("1_0", None)]
)
def test_a_number_is_digits_and_nothing_else(text: str, number: int | None) -> None:
    assert number_in(text) == number


def test_a_right_sum_is_worth_most_and_a_number_a_little() -> None:
    task = Sums(largest=9)
    environment = task.begin(1)
    a, b = environment.prompt.removesuffix("=").split("+")
    assert environment.act(f"{int(a) + int(b)}\n") == Ended(1.0)
    assert environment.act("123456") == Ended(0.05)
    assert environment.act("1 and") == Ended(0.02)
    assert environment.act("0000") == Ended(0.02)
    assert environment.act("what?") == Ended(0.0)


def test_a_tool_answers_its_call_and_the_environment_all_else() -> None:
    environment = WithTools(Sums(), "", {"calc": calculator}).begin(2)
    a, b = environment.prompt.removesuffix("=").split("+")
    result = environment.act(f"calc: {a}+{b}\n")
    assert result == Observed(f"{int(a) + int(b)}\n")
    assert environment.act(result.text) == Ended(1.0)


def test_a_tool_that_is_not_there_is_an_answer_like_any_other() -> None:
    assert WithTools(Sums(), "", {"calc": calculator}).begin(2).act("search: me") == Ended(0.0)


@pytest.mark.parametrize(
    "answer", ["calc:\n1+1", "calc: 1+1\n2", "calc:" + " " * 5000 + "1", "calc"]
)
def test_what_is_no_call_goes_to_the_environment(answer: str) -> None:
    assert WithTools(Sums(), "", {"calc": calculator}).begin(2).act(answer) == Ended(0.0)


def test_how_a_tool_is_called_stands_before_the_task() -> None:
    bare, with_tools = Sums().begin(2), WithTools(Sums(), "calc: 1+2\n", {}).begin(2)
    assert with_tools.prompt == f"calc: 1+2\n{bare.prompt}"


def test_calls_are_bounded() -> None:
    environment = WithTools(Sums(), "", {"calc": calculator}, calls_max=2).begin(2)
    assert environment.act("calc: 1+1") == Observed("2\n")
    assert environment.act("calc: nonsense") == Observed("not a sum\n")
    assert environment.act("calc: 1+1") == Ended(0.0)


@pytest.mark.parametrize(
    ("argument", "result"),
    [
        ("12+30", "42"),
        ("3 * -4", "-12"),
        ("5-7", "-2"),
        ("9**9", "not a sum"),
        ("1/0", "not a sum"),
    ],
)
def test_the_calculator_knows_three_operations(argument: str, result: str) -> None:
    assert calculator(argument) == result


@pytest.mark.skipif(has_reasoning_gym, reason="the package is here")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(UserError, match=r"p2pdiloco\[reasoning\]"):
        ReasoningGym("chain_sum")


def test_another_version_of_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", types.ModuleType("reasoning_gym"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.26")
    with pytest.raises(UserError, match=r"needs reasoning-gym 0\.1\.25.*got 0\.1\.26"):
        ReasoningGym("chain_sum")


@pytest.mark.skipif(not has_reasoning_gym, reason="needs the extra `reasoning`")
def test_questions_of_the_package_are_scored() -> None:
    task = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2})
    environment = task.begin(4)
    assert environment.prompt == task.begin(4).prompt != task.begin(5).prompt
    numbers = environment.prompt.strip().rsplit(":", 1)[-1].replace("=", "").replace("?", "")
    result = calculator(numbers)
    assert environment.act(result) == Ended(1.0)
    assert environment.act("no idea") != Ended(1.0)
    with pytest.raises(UserError, match="nonesuch"):
        ReasoningGym("nonesuch")


@pytest.mark.skipif(not has_reasoning_gym, reason="needs the extra `reasoning`")
def test_a_generator_whose_scorer_may_evaluate_answers_is_refused() -> None:
    with pytest.raises(UserError, match="does more with an answer"):
        ReasoningGym("string_insertion")


@pytest.mark.skipif(not has_reasoning_gym, reason="needs the extra `reasoning`")
def test_a_generator_that_asks_something_else_in_each_process_is_refused() -> None:
    with pytest.raises(UserError, match="in every process"):
        ReasoningGym("ransom_note")
