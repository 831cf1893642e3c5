"""Tools for the policy: a turn that calls one gets its result, and the trajectory goes on.

A call is a whole answer of the form `NAME: ARGUMENT`, on one line. Everything else goes to the
environment. Tools are pure functions of untrusted text, with bounds of their own.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from p2pdiloco.rl.environments import Ended, Environment, Observed, Outcome, Sums, Task

Tool: TypeAlias = Callable[[str], str]
"""What it says to an argument. Never raises; an argument that makes no sense gets a sentence."""

RESULT_CHARS_MAX = 2000
"""A longer result is cut: it would fill the context."""
ARGUMENT_CHARS_MAX = 2000


@dataclass(slots=True)
class _WithTools:
    environment: Environment
    manual: str
    tools: Mapping[str, Tool]
    calls_max: int
    calls: int = 0

    @property
    def prompt(self) -> str:
        return self.manual + self.environment.prompt

    def act(self, answer: str) -> Outcome:
        name, colon, argument = answer.strip().partition(":")
        is_line = "\n" not in argument and len(argument) <= ARGUMENT_CHARS_MAX
        if not colon or name not in self.tools or not is_line:
            return self.environment.act(answer)
        if self.calls == self.calls_max:
            return Ended(0.0)
        self.calls += 1
        return Observed(self.tools[name](argument.strip(" "))[:RESULT_CHARS_MAX] + "\n")


@dataclass(frozen=True, slots=True)
class WithTools:
    """A task whose policy may call tools `calls_max` times; one more call ends it with 0."""

    task: Task
    manual: str
    """What the policy reads before the task: how it calls the tools."""
    tools: Mapping[str, Tool]
    calls_max: int = 4

    def begin(self, seed: int) -> Environment:
        return _WithTools(self.task.begin(seed), self.manual, self.tools, self.calls_max)


_SUM = re.compile(r" *(-?\d{1,9}) *([-+*]) *(-?\d{1,9}) *", re.ASCII)


def calculator(argument: str) -> str:
    """One operation on two whole numbers of up to nine digits."""
    parts = _SUM.fullmatch(argument)
    if parts is None:
        return "not a sum"
    a, b = int(parts[1]), int(parts[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[parts[2]])


def sums_with_calculator(largest: int = 9999) -> WithTools:
    """Sums that one call works out and another turn answers."""
    return WithTools(Sums(largest), "calc: 1+2 works out a sum.\n", {"calc": calculator})
