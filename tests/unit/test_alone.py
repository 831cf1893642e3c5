"""A whole step on one engine."""

from rl_builders import RULES, TASKS, generated
from rollout_builders import small_engine, small_model

from p2pdiloco.rl.alone import play_step
from p2pdiloco.rl.checks import story


def test_a_step_is_played_to_its_end() -> None:
    model = small_model()
    episodes = play_step(small_engine(model), RULES)
    assert [episode.trajectory for episode in episodes] == list(range(TASKS.num_trajectories))
    assert all(story(episode, RULES) is None for episode in episodes)
    assert episodes[1].tokens == generated(small_model(), trajectory=1).tokens
