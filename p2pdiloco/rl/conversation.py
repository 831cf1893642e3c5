"""One trajectory in the making: the turns between policy and environment.

Tokens go in and out as tokens: what the policy chose is never decoded and encoded again, so the
learner sees exactly what was generated. `request` is the next turn for the engine; `answered` takes
in what it gave, and lets the environment act.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from p2pdiloco.learn.text import Tokenizer
from p2pdiloco.rl.assignment import StepTasks
from p2pdiloco.rl.environments import Ended, Task
from p2pdiloco.rl.episodes import Answer, Episode
from p2pdiloco.rollout.request import Request, Token
from p2pdiloco.rollout.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a trajectory may take. One that comes to a limit is cut and has the reward 0."""

    turns_max: int
    answer_tokens_max: int
    tokens_max: int
    """Of the whole trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How answers are drawn and where they stop; the same for all nodes of a run."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_token: int
    """Ends a turn, and belongs to it."""

    def sampling(self, tasks: StepTasks) -> Sampling:
        return Sampling(
            seed=tasks.noise_seed(),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )


class Conversation:
    """`episode` is None until the end."""

    def __init__(
        self,
        tasks: StepTasks,
        trajectory: int,
        task: Task,
        tokenizer: Tokenizer,
        policy: Policy,
        limits: Limits,
    ) -> None:
        self.tokens: list[int] = []
        self.episode: Episode | None = None
        self._tasks = tasks
        self._trajectory = trajectory
        self._environment = task.begin(tasks.environment_seed(trajectory))
        self._tokenizer = tokenizer
        self._policy = policy
        self._limits = limits
        self._answers: list[Answer] = []
        self.tokens += self._encoded(self._environment.prompt)
        if self._num_left < 1:
            raise ValueError(
                f"a prompt of {len(self.tokens)} tokens leaves no room for an answer within"
                f" {limits.tokens_max}; raise the limit or choose a shorter task"
            )

    @property
    def turn(self) -> int:
        """The number of the next turn, from 0."""
        return len(self._answers)

    def request(self) -> Request:
        """The next turn."""
        assert self.episode is None, "the trajectory has ended"
        name = self._tasks.noise_name(self._trajectory)
        return Request(
            id=f"{name}/{self.turn}",
            trajectory=name,
            prompt=tuple(self.tokens),
            num_tokens_max=min(self._limits.answer_tokens_max, self._num_left),
            sampling=self._policy.sampling(self._tasks),
            stop_tokens=frozenset({self._policy.stop_token}),
        )

    def answered(self, answer: Sequence[Token]) -> None:
        """The turn as it was generated, at least one token, with its stop token if it has one.

        One that was as long as an answer may be ends without; the environment hears it as it is.
        What the trajectory's own limit cut it does not hear; and what it says where no other answer
        may follow is not written.
        """
        chosen = [token.token for token in answer]
        logprobs = tuple(token.logprob for token in answer)
        versions = tuple(token.version for token in answer)
        self._answers.append(Answer(len(self.tokens), logprobs, versions))
        self.tokens += chosen
        is_whole = chosen[-1] == self._policy.stop_token
        if not is_whole and len(chosen) < self._limits.answer_tokens_max:
            self._end(0.0, is_cut=True)
            return
        outcome = self._environment.act(self._tokenizer.decode(chosen))
        if isinstance(outcome, Ended):
            self._end(outcome.reward, is_cut=False)
            return
        words = self._encoded(outcome.text)
        if self.turn == self._limits.turns_max or len(words) >= self._num_left:
            self._end(0.0, is_cut=True)
            return
        self.tokens += words

    def so_far(self) -> Episode:
        """An episode that goes on, as another worker may resume it (checks.py): at least one
        answer, and what the environment said to the last."""
        assert self.episode is None, "the trajectory has ended"
        return self._episode(0.0, is_cut=False)

    @property
    def _num_left(self) -> int:
        return self._limits.tokens_max - len(self.tokens)

    def _encoded(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text.encode())]

    def _end(self, reward: float, *, is_cut: bool) -> None:
        self.episode = self._episode(reward, is_cut=is_cut)

    def _episode(self, reward: float, *, is_cut: bool) -> Episode:
        return Episode(
            step=self._tasks.step,
            trajectory=self._trajectory,
            tokens=tuple(self.tokens),
            answers=tuple(self._answers),
            reward=reward,
            is_cut=is_cut,
        )
