"""The benchmark of a swarm that learns from rollouts: its cheat, and what it makes of statuses."""

from benchmarks.rl_cheat import best_end
from benchmarks.rl_swarm import Curve, report
from p2pdiloco.protocol.turns import TurnId
from p2pdiloco.rl.checks import story
from p2pdiloco.rl.rules import rulebook_of
from p2pdiloco_daemon.cli.demo import GUESSING
from p2pdiloco_daemon.status.view import JsonObject


def status(version: int, rewards: list[tuple[int, float]], *events: str) -> JsonObject:
    return {
        "peer_id": "12D3KooWabcdefgh",
        "reward_curve": rewards,
        "fragments": [{"version": version}],
        "events": [{"seconds_ago": 1.0, "text": text} for text in events],
    }


def test_the_cheats_stories_are_true_and_its_rewards_the_best() -> None:
    rules = rulebook_of(GUESSING, "run", 3)
    for trajectory in range(4):
        forged = best_end(TurnId(3, trajectory, 0), b"", rules)
        assert story(forged, rules) is None
        assert forged.reward == 1.0


def test_rewards_belong_to_the_minute_in_which_their_step_ended() -> None:
    curve = Curve()
    curve.look(50.0, "node-1", status(1, [(0, 0.25)]))
    curve.look(59.0, "node-2", status(1, [(0, 0.75)]))
    curve.look(70.0, "node-1", status(3, [(0, 0.25), (1, 0.5), (2, 1.0)]))
    assert curve.per_minute() == [(0, 1, 0.5), (1, 2, 0.75)]


def test_after_a_kill_the_next_version_ends_the_wait() -> None:
    curve = Curve()
    curve.look(50.0, "node-1", status(1, []))
    curve.kills.append((60.0, "node-2"))
    curve.look(68.5, "node-1", status(2, []))
    assert curve.gaps_s() == [8.5]


def test_what_was_said_of_forged_turns_is_kept_once() -> None:
    curve = Curve()
    for at_s in (50.0, 52.0):
        said = "abcdefgh gave a turn that is not true"
        curve.look(at_s, "node-1", status(1, [], "fragment 0 merged", said))
    assert curve.accusations() == [(49.0, "node-1: node-1 gave a turn that is not true")]


def test_the_report_has_a_column_for_each_arm() -> None:
    document = {
        "minutes": 1,
        "versions": [(50.0, 1)],
        "per_minute": [(0, 1, 0.5)],
        "kills": [],
        "gaps_s": [],
        "blamed": [(49.0, "node-1: not true")],
        "reward_before": 0.01,
        "reward_after": 0.5,
        "anchors_identical": True,
    }
    text = report({"calm": document, "cheat": document})
    assert "| minute | calm | cheat |" in text
    assert "| 1 | 0.500 (1) | 0.500 (1) |" in text
    assert "- cheat, 49 s: node-1: not true" in text
