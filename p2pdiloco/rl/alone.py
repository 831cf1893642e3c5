"""A whole step on one engine, where nothing is placed or sent."""

from p2pdiloco.rl.checks import Rulebook
from p2pdiloco.rl.conversation import Conversation
from p2pdiloco.rl.episodes import Episode
from p2pdiloco.rollout.backend import Backend
from p2pdiloco.rollout.request import Token


def play_step(engine: Backend, rules: Rulebook) -> list[Episode]:
    """All episodes of a step, by trajectory. `engine` must have room for as many requests."""
    open_ones = [rules.conversation(i) for i in range(rules.tasks.num_trajectories)]
    episodes: list[Episode] = []
    while open_ones:
        _play_turn(engine, open_ones)
        episodes += [c.episode for c in open_ones if c.episode is not None]
        open_ones = [c for c in open_ones if c.episode is None]
    return sorted(episodes, key=lambda episode: episode.trajectory)


def _play_turn(engine: Backend, conversations: list[Conversation]) -> None:
    by_id = {conversation.request().id: conversation for conversation in conversations}
    answers: dict[str, list[Token]] = {name: [] for name in by_id}
    for conversation in conversations:
        engine.submit(conversation.request())
    while engine.has_work:
        for progress in engine.step():
            answers[progress.id] += progress.tokens
    for name, conversation in by_id.items():
        conversation.answered(answers[name])
