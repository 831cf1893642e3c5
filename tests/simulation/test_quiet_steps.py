"""Learners whose quiet steps are simulated in one event train, merge and answer like all others."""

from p2pdiloco.simulation.learner import LearnerModel
from p2pdiloco.simulation.world import Swarm, World


def run(quiet_steps: int) -> World:
    swarm = Swarm(num_machines=4, inner_steps=40, step_spread=0.0, quiet_steps=quiet_steps)
    world = World(1, swarm)
    world.start_all()
    world.run(until=120.0)
    world.checkers.one_lineage()
    return world


def test_quiet_steps_are_steps_that_cost_no_events() -> None:
    usual, quiet = run(quiet_steps=1), run(quiet_steps=8)
    assert quiet.num_events < 0.8 * usual.num_events
    for one, other in zip(usual.machines.values(), quiet.machines.values(), strict=True):
        assert abs(one.learner.steps_total - other.learner.steps_total) < 0.1 * 120 / 0.6
    assert abs(len(usual.records) - len(quiet.records)) <= len(usual.records) // 4
    quiet.settle()
    quiet.run(until=135.0)
    quiet.checkers.one_head()
    quiet.checkers.ledgers_meet_lineages()


def ahead() -> LearnerModel:
    """In a stretch of eight steps of half a second that began at 10 s."""
    learner = LearnerModel(1, step_s=0.5, tokens_per_step=1)
    learner.stepping, learner.pace_s, learner.num_ahead, learner.next_boundary = True, 0.5, 8, 14.0
    return learner


def test_a_stretch_is_cut_at_the_next_boundary() -> None:
    learner = ahead()
    assert learner.cut_short(11.2)
    assert (learner.num_ahead, learner.next_boundary) == (3, 11.5)
    assert not learner.cut_short(11.3)


def test_the_last_step_of_a_stretch_is_not_cut() -> None:
    learner = ahead()
    assert not learner.cut_short(13.8)
    assert (learner.num_ahead, learner.next_boundary) == (8, 14.0)


def test_a_learner_that_stood_still_past_its_boundary_is_not_cut() -> None:
    learner = ahead()
    assert not learner.cut_short(20.0)
    assert learner.next_boundary == 14.0
