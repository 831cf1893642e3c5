from p2pdiloco_daemon.rollouts.messages import Finished, Installed, Load, Played, Ready
from p2pdiloco_daemon.rollouts.report import RolloutReport
from p2pdiloco_daemon.rollouts.worker import Died
from p2pdiloco_daemon.status.view import Rollouts, RolloutState


def load(tokens: int, drafted: int = 0, held: int = 0) -> Load:
    return Load(
        running=1,
        waiting=2,
        cache_share=0.1,
        version=3,
        tokens=tokens,
        drafted=drafted,
        held=held,
        busy_s=1.0,
    )


def test_events_add_up_to_what_the_page_says() -> None:
    report = RolloutReport()
    assert report.status(0.0).state is RolloutState.STARTING
    for event in (Ready("cpu"), Installed(3, 0.1), load(20, 8, 6), Finished(1, "stop", 4)):
        report.take(event, 1.0)
    assert report.status(1.0) == Rollouts(
        state=RolloutState.SERVING,
        served=1,
        tokens=20,
        tokens_per_s=0.0,
        draft_acceptance=0.75,
        running=1,
        waiting=2,
        policy_version=3,
    )


def test_a_turn_of_a_trajectory_is_an_answer_too() -> None:
    report = RolloutReport()
    report.take(Played(1, 1, False, 20, 0, b"episode"), 1.0)
    assert report.status(1.0).served == 1


def test_counts_go_on_when_a_worker_is_started_again() -> None:
    report = RolloutReport()
    report.take(load(20), 1.0)
    report.take(Died("killed", 1.0), 2.0)
    told = report.status(2.0)
    assert (told.state, told.restarts, told.last_error) == (RolloutState.RESTARTING, 1, "killed")
    assert (told.tokens, told.running, told.policy_version) == (20, 0, None)
    report.take(load(5), 3.0)
    assert report.status(3.0).tokens == 25


def test_the_rate_is_of_the_last_ten_seconds() -> None:
    report = RolloutReport()
    for second in range(0, 40, 2):
        report.take(load(100 * second), float(second))
    assert report.status(38.0).tokens_per_s == 100.0
    assert report.status(60.0).tokens_per_s == 0.0
