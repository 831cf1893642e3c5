"""The benchmark of learning in one process: its settings, its transcripts, what it reports."""

import random
from dataclasses import replace

import pytest

from benchmarks.rl_learning import changed, report
from benchmarks.rl_settings import spec_of
from benchmarks.rl_warm_start import transcript
from p2pdiloco.rl.checks import story
from p2pdiloco.rl.rules import loss_rules_of, rulebook_of
from p2pdiloco_daemon.cli.demo import GUESSING


def test_the_guessing_game_is_learnt_as_in_the_demo() -> None:
    assert spec_of("guess") == GUESSING


@pytest.mark.parametrize("environment", ["sums:9", "calculator", "reasoning-gym:gcd"])
def test_every_answer_has_room_in_its_spec(environment: str) -> None:
    spec = changed(spec_of(environment), [])
    assert spec.rl is not None
    assert (spec.rl.environment, spec.rl.turns_max) == (
        environment,
        4 if environment == "calculator" else 1,
    )


def test_settings_are_changed_as_they_are_named() -> None:
    spec = changed(GUESSING, ["seed=3", "rl.variant=grpo", "rl.kl_weight=0.04"])
    assert spec.seed == 3
    rules = loss_rules_of(spec)
    assert (rules.variant, rules.kl_weight, rules.clip_high) == ("grpo", 0.04, 0.2)


def test_transcripts_are_true_and_half_of_their_players_call_the_tool() -> None:
    rules = rulebook_of(spec_of("calculator"), "run", 3)
    rules = replace(rules, tasks=replace(rules.tasks, num_groups=64, group_size=1))
    rng = random.Random(0)
    played = [transcript(i, rules, rng) for i in range(64)]
    assert all(story(episode, rules) is None for episode in played)
    right = [episode for episode in played if episode.reward == 1.0]
    assert 16 < len(right) < 48
    assert {len(episode.answers) for episode in right} == {2}


def test_the_report_has_a_line_for_each_run() -> None:
    run = {
        "settings": ["guess"],
        "rewards": [0.0, 0.25, 0.5],
        "unseen": [(0, 0.01), (20, 0.4), (40, 0.3)],
        "cpu_s": 90.0,
    }
    assert (
        "| plain, seed 0 | guess | 3 | 0.010 | 0.000 | 0.250 | 0.500 | 0.400 | 0.300 | 1.5 |"
    ) in report({"plain, seed 0": run})
