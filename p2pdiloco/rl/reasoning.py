"""The single-turn tasks of `reasoning-gym`: an optional package, 106 generators, no network."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from p2pdiloco.errors import UserError
from p2pdiloco.rl.environments import Ended, Environment, Outcome

Entry: TypeAlias = Mapping[str, object]


class _Dataset(Protocol):
    def __getitem__(self, index: int) -> Entry: ...

    def score_answer(self, answer: str, entry: Entry) -> float: ...


@dataclass(frozen=True, slots=True)
class _Scored:
    prompt: str
    dataset: _Dataset
    entry: Entry

    def act(self, answer: str) -> Outcome:
        """The package's scorers take any text; what is not a share of one counts as none."""
        score = float(self.dataset.score_answer(answer.strip(), self.entry))
        return Ended(min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0)


class ReasoningGym:
    """One generator of the package; the question of a seed is the one that it makes from it."""

    def __init__(self, name: str, settings: Mapping[str, object] | None = None) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise UserError(
                "the task needs the package reasoning-gym; install it with"
                " pip install 'p2pdiloco[reasoning]'"
            ) from error
        self._create: Callable[..., _Dataset] = reasoning_gym.create_dataset
        self._name, self._settings = name, dict(settings or {})
        try:
            self._dataset(0)
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(f"reasoning-gym does not make {name!r}: {error}") from error

    def begin(self, seed: int) -> Environment:
        dataset = self._dataset(seed)
        entry = dataset[0]
        return _Scored(f"{entry['question']}\n", dataset, entry)

    def _dataset(self, seed: int) -> _Dataset:
        return self._create(self._name, size=1, seed=seed, **self._settings)
