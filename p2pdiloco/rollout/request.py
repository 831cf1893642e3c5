"""What is asked of the engine, what it answers, and what it keeps meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from p2pdiloco.errors import P2PDilocoError
from p2pdiloco.rollout.sampling import Sampling


class QueueFull(P2PDilocoError):
    """As many requests wait as may; ask again later or elsewhere."""


class Finish(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn: tokens that continue a prompt."""

    id: str
    """Unique among the requests of an engine at one time."""
    trajectory: str
    """With seed and position it names the noise; turns of one trajectory share it."""
    prompt: tuple[int, ...]
    """The whole trajectory so far."""
    num_tokens_max: int
    sampling: Sampling
    stop_tokens: frozenset[int] = frozenset()
    """The first of these that is generated is the last token."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(
                f"request {self.id!r} has an empty prompt; it needs one token at least"
            )
        if self.num_tokens_max < 1:
            raise ValueError(
                f"request {self.id!r} asks for {self.num_tokens_max} tokens; expected 1 or more"
            )

    @property
    def length_max(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + self.num_tokens_max


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    token: int
    logprob: float
    """In the trainer's convention (sampling.py), under the policy of `version`."""
    version: int
    """Of the policy that chose it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step added to a request."""

    id: str
    tokens: tuple[Token, ...]
    finish: Finish | None = None
    num_reused: int = 0
    """Of the prompt, tokens that did not have to be computed."""


@dataclass(eq=False, slots=True)
class Running:
    """A request that is waiting or has a row."""

    request: Request
    tokens: list[int]
    """Prompt and answer so far."""
    num_held: int = 0
    """Leading tokens whose keys and values its row holds. The newest token is never among them."""
    num_reused: int = 0
    """Of the prompt, tokens that did not have to be computed."""

    @classmethod
    def of(cls, request: Request) -> "Running":
        return cls(request, list(request.prompt))

    @property
    def num_pending(self) -> int:
        """Tokens that the model has still to see before it can give the next one."""
        return len(self.tokens) - self.num_held

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.request.length_max - len(self.tokens)

    def commit(self, tokens: Sequence[int]) -> Finish | None:
        """Appends up to the end of the answer; says whether it is reached. May drop a tail."""
        for token in tokens:
            self.tokens.append(token)
            if token in self.request.stop_tokens:
                return Finish.STOP
            if self.num_left == 0:
                return Finish.LENGTH
        return None
