"""What came of each run of the quality study, and the file in which that is kept."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.quality_settings import Setting


@dataclass(slots=True)
class Outcome:
    """curve: (step, held-out nats per byte); merged: mean number of contributions per merge."""

    curve: list[tuple[int, float]] = field(default_factory=list)
    merged: float | None = None
    payload_bytes: float | None = None
    """Mean size of one learner's contribution."""
    goodput: float | None = None
    """Share of the learners' virtual time in which they took steps rather than waited."""
    cpu_s: float = 0.0

    def at(self, step: int) -> float | None:
        return dict(self.curve).get(step)


class Store:
    """All outcomes by setting, in one JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Outcome]:
        """Setting key -> outcome; also what another process has stored meanwhile."""
        if not self.path.exists():
            return {}
        runs = json.loads(self.path.read_text())["runs"]
        return {_key(run["setting"]): _outcome(run["outcome"]) for run in runs}

    def find(self, setting: Setting, step: int) -> float | None:
        outcome = self.read().get(_key(asdict(setting)))
        return outcome.at(step) if outcome else None

    def get(self, setting: Setting) -> Outcome | None:
        return self.read().get(_key(asdict(setting)))

    def put(self, setting: Setting, outcome: Outcome) -> None:
        runs = self.read()
        runs[_key(asdict(setting))] = outcome
        content = [
            {"setting": json.loads(key), "outcome": asdict(value)} for key, value in runs.items()
        ]
        self.path.parent.mkdir(exist_ok=True)
        unfinished = self.path.with_suffix(f".{os.getpid()}.tmp")
        lines = ",\n".join(json.dumps(run) for run in content)
        unfinished.write_text(f'{{"runs": [\n{lines}\n]}}\n')
        os.replace(unfinished, self.path)


def _key(setting: dict[str, Any]) -> str:
    return json.dumps(setting, sort_keys=True)


def _outcome(fields: dict[str, Any]) -> Outcome:
    return Outcome(**{**fields, "curve": [(int(step), loss) for step, loss in fields["curve"]]})
