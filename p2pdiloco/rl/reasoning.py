"""Single-turn tasks of `reasoning-gym`: an optional package, no network.

Of one version of the package: with another, the same seed may ask something else, and an honest
peer that has it would seem to play tasks that nobody gave it.

Only generators that compare an answer with the right one, as the package does unless it is told
otherwise, or in a way that was read: some evaluate it as Python, and answers of peers are scored
here.
"""

import importlib.metadata
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from p2pdiloco.errors import UserError
from p2pdiloco.rl.environments import Ended, Environment, Outcome

VERSION = "0.1.25"

UNREPEATABLE = frozenset({"isomorphic_strings", "list_functions", "ransom_note"})
"""They go through sets of strings, whose order is another in each process: the questions of a seed
differ, and every node would find that the others play tasks of their own."""

SCORERS_READ = frozenset({"chain_sum", "products"})
"""They compare numbers, by `decimal`."""

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
        """What is not a share of one counts as none."""
        score = float(self.dataset.score_answer(answer.strip(), self.entry))
        return Ended(min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0)


class ReasoningGym:
    """One generator of the package; the question of a seed is the one that it makes from it."""

    def __init__(self, name: str, settings: Mapping[str, object] | None = None) -> None:
        try:
            import reasoning_gym

            found = importlib.metadata.version("reasoning-gym")
        except ImportError as error:
            raise UserError(
                "the task needs the package reasoning-gym; install it with"
                " pip install 'p2pdiloco[reasoning]'"
            ) from error
        if found != VERSION:
            raise UserError(
                f"the task needs reasoning-gym {VERSION}, because the same tasks must be asked on"
                f" all nodes, got {found}; install it with pip install reasoning-gym=={VERSION}"
            )
        self._create: Callable[..., _Dataset] = reasoning_gym.create_dataset
        self._name, self._settings = name, dict(settings or {})
        try:
            dataset = self._dataset(0)
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(f"reasoning-gym does not make {name!r}: {error}") from error
        if name in UNREPEATABLE:
            raise UserError(
                f"{name!r} does not make the same questions of a seed in every process; choose"
                " another generator: all nodes must be asked the same"
            )
        plain = reasoning_gym.factory.ProceduralDataset.score_answer
        if type(dataset).score_answer is not plain and name not in SCORERS_READ:
            raise UserError(
                f"{name!r} does more with an answer than compare it; choose another generator:"
                " answers of peers are scored here"
            )

    def begin(self, seed: int) -> Environment:
        dataset = self._dataset(seed)
        entry = dataset[0]
        return _Scored(f"{entry['question']}\n", dataset, entry)

    def _dataset(self, seed: int) -> _Dataset:
        return self._create(self._name, size=1, seed=seed, **self._settings)
