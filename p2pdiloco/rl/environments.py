"""What the policy acts on: text out, text in, a reward at the end.

A task makes environments; the one for a seed is always the same, and it answers the same actions
with the same text and reward, without clock, network or randomness beyond its seed. So a trajectory
that is lost can be run again anywhere, and a reward that a peer reports can be recomputed.

What the policy writes is untrusted text: it is parsed, never evaluated.
"""

import random
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Observed:
    """The trajectory goes on with this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The trajectory is over. Rewards are between 0 and 1."""

    reward: float


Outcome: TypeAlias = Observed | Ended


class Environment(Protocol):
    """One trajectory's world."""

    @property
    def prompt(self) -> str:
        """What the policy reads first."""

    def act(self, answer: str) -> Outcome:
        """Takes in a turn of the policy. Not called again after the end."""


class Task(Protocol):
    """A kind of environment."""

    def begin(self, seed: int) -> Environment:
        """The environment of this seed."""


_GUESS_REWARD = 0.05
"""Of each valid guess before one that is not."""


@dataclass(slots=True)
class _Guessing:
    prompt: str
    secret: int
    numbers: int
    turns_max: int
    turns: int = 0

    def act(self, answer: str) -> Outcome:
        guess = number_in(answer)
        if guess is None or not 0 <= guess < self.numbers:
            return Ended(_GUESS_REWARD * self.turns)
        self.turns += 1
        if guess == self.secret:
            return Ended(1.0 - 0.5 * (self.turns - 1) / self.turns_max)
        if self.turns == self.turns_max:
            return Ended(0.2 * (1 - abs(guess - self.secret) / self.numbers))
        return Observed("more\n" if self.secret > guess else "less\n")


@dataclass(frozen=True, slots=True)
class Guess:
    """Multi-turn: find a secret number, told after each guess whether it is more or less.

    The sooner it is found the higher the reward, from 1 down to a half; the last guess of a vain
    search is worth up to 0.2 by its distance. An answer that is no number in range ends it, and the
    guesses before it are worth a little, so that a policy that knows nothing can begin to learn.
    """

    numbers: int = 10
    turns_max: int = 4

    def begin(self, seed: int) -> Environment:
        secret = random.Random(f"guess {seed}").randrange(self.numbers)
        prompt = f"Guess 0 to {self.numbers - 1}.\n"
        return _Guessing(prompt, secret, self.numbers, self.turns_max)


_BEGINNING_REWARD = 0.02
"""Of an answer that is no number and begins like one, or has zeros before it: else four of them,
which need no line break, are learnt and nothing after them."""


@dataclass(frozen=True, slots=True)
class _Question:
    prompt: str
    solution: int

    def act(self, answer: str) -> Outcome:
        number = number_in(answer)
        if number is None or str(number) != answer.strip():
            return Ended(_BEGINNING_REWARD if number_in(answer[:1]) is not None else 0.0)
        if number == self.solution:
            return Ended(1.0)
        return Ended(0.1 if len(str(number)) == len(str(self.solution)) else 0.05)


@dataclass(frozen=True, slots=True)
class Sums:
    """Single-turn: add two numbers. A wrong number is worth a little, and still less what begins
    with a digit and is none, so that there is something to learn from before the first right one;
    with a calculator (`tools.py`) it has several turns."""

    largest: int = 99

    def begin(self, seed: int) -> Environment:
        rng = random.Random(f"sums {seed}")
        a, b = rng.randint(0, self.largest), rng.randint(0, self.largest)
        return _Question(f"{a}+{b}=", a + b)


def number_in(answer: str) -> int | None:
    """The answer as a number, if it is nothing else: up to nine digits, a sign, spaces around."""
    text = answer.strip()
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 9):
        return None
    return int(text)
