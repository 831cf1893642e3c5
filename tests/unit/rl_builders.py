"""Small tasks, policies and episodes for the tests of reinforcement learning."""

from collections.abc import Sequence
from dataclasses import replace

from rollout_builders import POSITIONS, small_engine
from transformers import PreTrainedModel

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.rl.assignment import StepTasks
from p2pdiloco.rl.checks import Rulebook
from p2pdiloco.rl.conversation import Limits, Policy
from p2pdiloco.rl.environments import Ended, Environment, Observed, Outcome
from p2pdiloco.rl.episodes import Answer, Episode
from p2pdiloco.rollout.request import Token

STOP = 0
TASKS = StepTasks("run", 5, PeerId("node"), num_groups=2, group_size=3)
LIMITS = Limits(turns_max=3, answer_tokens_max=6, tokens_max=POSITIONS)
POLICY = Policy(temperature=0.9, top_p=0.95, stop_token=STOP)


class SmallTokenizer:
    """Letters from a on are tokens from 1 on, of a vocabulary of 61; the stop token is a full
    stop."""

    vocabulary_size = 61

    def encode(self, text: bytes) -> list[int]:
        return [STOP if byte == ord(".") else byte - 96 for byte in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join("." if token == STOP else chr(token + 96) for token in tokens)


class Counting:
    """Says "more" to two answers and rewards the third by its length."""

    prompt = "begin"

    def __init__(self) -> None:
        self.answers: list[str] = []

    def act(self, answer: str) -> Outcome:
        self.answers.append(answer)
        return Ended(1.0 / len(answer)) if len(self.answers) == 3 else Observed("more")


class CountingTask:
    def begin(self, seed: int) -> Environment:
        return Counting()


RULES = Rulebook(
    tasks=TASKS,
    task=CountingTask(),
    tokenizer=SmallTokenizer(),
    policy=POLICY,
    limits=LIMITS,
    versions=frozenset({0}),
)


def say(text: str, version: int = 0) -> list[Token]:
    """An answer of these letters."""
    return [Token(token, -0.5, version) for token in SmallTokenizer().encode(text.encode())]


def told(*answers: str, rules: Rulebook = RULES, trajectory: int = 1) -> Episode:
    """The episode of these answers."""
    conversation = rules.conversation(trajectory)
    for answer in answers:
        conversation.answered(say(answer))
    assert conversation.episode is not None
    return conversation.episode


def so_far(*answers: str, rules: Rulebook = RULES, trajectory: int = 1) -> Episode:
    """The episode so far after these answers."""
    conversation = rules.conversation(trajectory)
    for answer in answers:
        conversation.answered(say(answer))
    return conversation.so_far()


def generated(model: PreTrainedModel, rules: Rulebook = RULES, trajectory: int = 1) -> Episode:
    """What the engine makes of the trajectory."""
    engine = small_engine(model)
    conversation = rules.conversation(trajectory)
    while conversation.episode is None:
        engine.submit(conversation.request())
        answer: list[Token] = []
        while engine.has_work:
            answer += [token for progress in engine.step() for token in progress.tokens]
        conversation.answered(answer)
    return conversation.episode


def with_token(episode: Episode, position: int, token: int) -> Episode:
    tokens = list(episode.tokens)
    tokens[position] = token
    return replace(episode, tokens=tuple(tokens))


def episode(
    reward: float = 1.0, *, prompt: int = 2, answer: int = 3, version: int = 0, trajectory: int = 0
) -> Episode:
    """One answer of so many tokens."""
    return Episode(
        step=5,
        trajectory=trajectory,
        tokens=tuple(range(1, prompt + answer + 1)),
        answers=(Answer(prompt, (-0.5,) * answer, (version,) * answer),),
        reward=reward,
    )
