"""Which run the benchmarks of learning from rollouts make of an environment."""

from pathlib import Path

from p2pdiloco.spec import DataSpec, ModelSpec, RlSpec, RunSpec
from p2pdiloco_daemon.cli.demo import GUESSING

_ANSWERS = {"guess": (4, 1), "sums": (1, 4), "calculator": (4, 16), "reasoning-gym": (1, 1)}
"""By the first word of an environment: turns, and bytes of one answer."""
_GYM_TOKENS = 224
"""Of a question of reasoning-gym with its answer; the others are shorter than the demo's 96."""


def spec_of(environment: str, checkpoint: Path | None = None) -> RunSpec:
    """The spec of `p2pdiloco demo --task rl` with another environment, and with what that needs;
    with a checkpoint, it begins with that model."""
    kind = environment.partition(":")[0]
    turns_max, answer_tokens_max = _ANSWERS[kind]
    rl = RlSpec(environment=environment, turns_max=turns_max, answer_tokens_max=answer_tokens_max)
    is_long = kind == "reasoning-gym"
    data = DataSpec(sequence_length=_GYM_TOKENS) if is_long else GUESSING.data
    model = ModelSpec(checkpoint=str(checkpoint)) if checkpoint else GUESSING.model
    return GUESSING.model_copy(update={"rl": rl, "data": data, "model": model})
