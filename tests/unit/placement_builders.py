"""Steps, workers and turns for the tests of placement."""

from collections.abc import Iterable

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.placement import Placement, Rules
from p2pdiloco.protocol.turns import (
    Action,
    Event,
    Held,
    Holding,
    Load,
    LoadReported,
    Place,
    Step,
    TrajectoryEnded,
    TurnFinished,
    TurnId,
    TurnReady,
)

ALICE, BOB, CAROL = PeerId("alice"), PeerId("bob"), PeerId("carol")
PROMPT = 100
ANSWER = 20
OBSERVED = 10


def step(num_groups: int = 1, group_size: int = 1, number: int = 7) -> Step:
    return Step(number=number, prompt_tokens=(PROMPT,) * num_groups, group_size=group_size)


def turn(trajectory: int, number: int = 0) -> TurnId:
    return TurnId(7, trajectory, number)


def load(
    *,
    rows: int = 4,
    cache: int = 10_000,
    speed: float = 1.0,
    held: Iterable[Held] = (),
) -> Load:
    """A replica that needs 10 ms per token, alone or in a batch, and computes 1,000 prompt tokens
    in a second; `speed` times faster."""
    return Load(
        num_rows=rows,
        cache_tokens=cache,
        prefill_tokens_per_s=1000 * speed,
        token_s=((1, 0.01 / speed), (64, 0.01 / speed)),
        held=tuple(held),
    )


def report(worker: PeerId, of: Load | None = None) -> LoadReported:
    return LoadReported(worker, of or load(), 0.01)


def held(trajectory: int, number: int, holding: Holding) -> Held:
    return Held(turn(trajectory, number), holding, PROMPT + number * (ANSWER + OBSERVED))


def finished(worker: PeerId, trajectory: int, number: int = 0) -> TurnFinished:
    before = PROMPT + number * (ANSWER + OBSERVED)
    return TurnFinished(worker, turn(trajectory, number), before + ANSWER, before - OBSERVED)


def ready(trajectory: int, number: int) -> TurnReady:
    return TurnReady(turn(trajectory, number), PROMPT + number * (ANSWER + OBSERVED))


def ended(trajectory: int, number: int) -> TrajectoryEnded:
    return TrajectoryEnded(turn(trajectory, number))


def dispatcher(
    of: Step | None = None, rules: Rules | None = None, workers: Iterable[PeerId] = (ALICE,)
) -> tuple[Placement, list[Action]]:
    """At time 0, after these workers have reported."""
    placement = Placement(of or step(), rules or Rules(), 0.0)
    actions = [a for worker in workers for a in placement.handle(report(worker), 0.0)]
    return placement, actions


def after(placement: Placement, *events: Event, now: float = 1.0) -> list[Action]:
    """All that is to be done when these have happened."""
    return [action for event in events for action in placement.handle(event, now)]


def places(actions: Iterable[Action]) -> dict[int, PeerId]:
    """The worker of each trajectory placed."""
    return {a.turn.trajectory: a.worker for a in actions if isinstance(a, Place)}
