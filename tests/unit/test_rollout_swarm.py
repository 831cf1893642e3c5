"""Dispatcher, engines and conversations together: the same episodes wherever turns are placed."""

from collections import deque
from collections.abc import Sequence

import pytest
from placement_builders import ALICE, BOB, CAROL, load
from rl_builders import RULES
from rollout_builders import small_engine, small_model
from transformers import PreTrainedModel

from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.protocol.placement import Placement, Rules
from p2pdiloco.protocol.turns import (
    Event,
    LoadReported,
    Place,
    Step,
    TrajectoryEnded,
    TurnFinished,
    TurnId,
    TurnReady,
    WorkerLost,
)
from p2pdiloco.rl.checks import story
from p2pdiloco.rl.episodes import Episode
from p2pdiloco.rollout.request import Token

TASKS = RULES.tasks


class Swarm:
    """Engines in this process; a turn's answer comes back when its engine has made all of it."""

    def __init__(self, model: PreTrainedModel, workers: Sequence[PeerId]) -> None:
        self.conversations = [RULES.conversation(i) for i in range(TASKS.num_trajectories)]
        prompts = [len(c.tokens) for c in self.conversations[:: TASKS.group_size]]
        step = Step(number=TASKS.step, prompt_tokens=tuple(prompts), group_size=TASKS.group_size)
        self.placement = Placement(step, Rules(), 0.0, ask=workers)
        self.engines = {worker: small_engine(model) for worker in workers}
        self.turns_at = dict.fromkeys(workers, 0)
        self._events: deque[Event] = deque(LoadReported(w, load(rows=2), 0.01) for w in workers)
        self._placed: dict[str, tuple[PeerId, TurnId]] = {}
        self._answers: dict[str, list[Token]] = {}

    def run(self, *, lose_after: int = -1) -> list[Episode]:
        """Loses a worker after so many turns."""
        num_turns = 0
        while not self.placement.is_done:
            while self._events:
                for action in self.placement.handle(self._events.popleft(), float(num_turns)):
                    if isinstance(action, Place):
                        self._submit(action)
            if 0 <= lose_after <= num_turns and len(self.engines) > 1:
                worker = min(self.engines)
                del self.engines[worker]
                self._events.append(WorkerLost(worker, "gone"))
            for worker, engine in self.engines.items():
                for progress in engine.step():
                    self._answers[progress.id] += progress.tokens
                    if progress.finish is not None:
                        num_turns += 1
                        self._finished(worker, progress.id)
        episodes = [conversation.episode for conversation in self.conversations]
        return [episode for episode in episodes if episode is not None]

    def _submit(self, place: Place) -> None:
        request = self.conversations[place.turn.trajectory].request()
        self._placed[request.id] = place.worker, place.turn
        self._answers[request.id] = []
        self.engines[place.worker].submit(request)

    def _finished(self, worker: PeerId, request_id: str) -> None:
        placed_at, turn = self._placed[request_id]
        assert placed_at == worker
        self.turns_at[worker] += 1
        conversation = self.conversations[turn.trajectory]
        before = len(conversation.tokens)
        answer = self._answers[request_id]
        conversation.answered(answer)
        self._events.append(TurnFinished(worker, turn, before + len(answer), 0))
        if conversation.episode is not None:
            self._events.append(TrajectoryEnded(turn))
        else:
            following = TurnId(turn.step, turn.trajectory, turn.turn + 1)
            self._events.append(TurnReady(following, len(conversation.tokens)))


def assert_same(ours: Sequence[Episode], theirs: Sequence[Episode]) -> None:
    """Log-probabilities differ by the rounding of float32."""
    assert [(e.tokens, e.reward) for e in ours] == [(e.tokens, e.reward) for e in theirs]
    for one, other in zip(ours, theirs, strict=True):
        logprobs = [logprob for _, logprob, _ in other.chosen()]
        assert [logprob for _, logprob, _ in one.chosen()] == pytest.approx(logprobs, abs=1e-3)


def test_one_and_three_replicas_make_the_same_episodes() -> None:
    model = small_model()
    alone = Swarm(model, [ALICE]).run()
    swarm = Swarm(model, [ALICE, BOB, CAROL])
    assert_same(swarm.run(), alone)
    assert len(alone) == TASKS.num_trajectories
    assert all(swarm.turns_at.values())
    assert all(story(episode, RULES) is None for episode in alone)


def test_a_worker_lost_in_the_middle_changes_no_episode() -> None:
    model = small_model()
    swarm = Swarm(model, [ALICE, BOB])
    assert_same(swarm.run(lose_after=3), Swarm(model, [BOB]).run())
    assert list(swarm.engines) == [BOB]
