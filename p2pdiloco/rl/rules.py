"""What the spec of an rl run says, as the parts of this room take it.

All nodes derive the same from it, so nobody has to send rules to anybody.
"""

from functools import cache

from p2pdiloco.errors import UserError
from p2pdiloco.learn.text import Tokenizer, open_tokenizer
from p2pdiloco.protocol.turns import Step
from p2pdiloco.rl.assignment import SHARED, StepTasks
from p2pdiloco.rl.checks import Rulebook
from p2pdiloco.rl.conversation import Limits, Policy
from p2pdiloco.rl.environments import Guess, Sums, Task
from p2pdiloco.rl.losses import LossRules
from p2pdiloco.rl.reasoning import ReasoningGym
from p2pdiloco.rl.tools import sums_with_calculator
from p2pdiloco.spec import DataSpec, RlSpec, RunSpec


def rl_of(spec: RunSpec) -> RlSpec:
    """The table that makes the run an rl run."""
    assert spec.rl is not None, "the run learns from text"
    return spec.rl


def task_of(spec: RunSpec) -> Task:
    """UserError if it needs a package that is missing or does not make it."""
    rl = rl_of(spec)
    return _task(rl.environment, rl.turns_max)


def limits_of(spec: RunSpec) -> Limits:
    """Of each trajectory."""
    rl = rl_of(spec)
    return Limits(
        turns_max=rl.turns_max,
        answer_tokens_max=rl.answer_tokens_max,
        tokens_max=spec.data.sequence_length,
    )


def loss_rules_of(spec: RunSpec) -> LossRules:
    rl = rl_of(spec)
    return LossRules(variant=rl.variant, kl_weight=rl.kl_weight)


def rulebook_of(spec: RunSpec, run_id: str, step: int) -> Rulebook:
    """Of one step, all of whose tokens are chosen by the policy of the same version."""
    rl = rl_of(spec)
    tokenizer = _tokenizer(spec.data)
    return Rulebook(
        tasks=StepTasks(run_id, step, SHARED, rl.num_groups, rl.group_size),
        task=task_of(spec),
        tokenizer=tokenizer,
        policy=Policy(temperature=rl.temperature, stop_token=_line_break(tokenizer)),
        limits=limits_of(spec),
        versions=frozenset({step}),
    )


def step_of(rules: Rulebook) -> Step:
    """What a dispatcher places of it. A prompt that leaves no room for an answer counts as many
    tokens as a trajectory may have: it is given up (`placement`)."""
    tasks = rules.tasks
    first_ones = range(0, tasks.num_trajectories, tasks.group_size)
    return Step(
        number=tasks.step,
        prompt_tokens=tuple(_prompt_tokens(rules, first) for first in first_ones),
        group_size=tasks.group_size,
    )


def _prompt_tokens(rules: Rulebook, trajectory: int) -> int:
    try:
        return len(rules.conversation(trajectory).tokens)
    except ValueError:
        return rules.limits.tokens_max


@cache
def _task(environment: str, turns_max: int) -> Task:
    name, _, setting = environment.partition(":")
    if name == "guess":
        return Guess(turns_max=turns_max)
    if name == "sums":
        return Sums(int(setting)) if setting else Sums()
    if name == "calculator":
        return sums_with_calculator(int(setting)) if setting else sums_with_calculator()
    return ReasoningGym(setting)


@cache
def _tokenizer(data: DataSpec) -> Tokenizer:
    return open_tokenizer(data)


def _line_break(tokenizer: Tokenizer) -> int:
    tokens = tokenizer.encode(b"\n")
    if len(tokens) != 1:
        raise UserError(
            f"the tokenizer makes {len(tokens)} tokens of a line break, which ends an answer;"
            " choose one that makes one of it"
        )
    return int(tokens[0])
