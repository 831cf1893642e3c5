"""What a node says of the shares that its learner was done with."""

from p2pdiloco_daemon.learner.learner import Learned
from p2pdiloco_daemon.rl.lesson_report import LessonReport
from p2pdiloco_daemon.status import view


def test_before_the_first_share_nothing_is_known() -> None:
    assert LessonReport().status() == view.Learning()


def test_shares_add_up_and_the_last_one_is_shown() -> None:
    report = LessonReport()
    report.take(Learned(0, 16, 12, 0, 0.25, 1e-3, -0.1))
    report.take(Learned(1, 16, 4, 12, 0.5, 2e-3, -0.2))
    assert report.status() == view.Learning(
        step=1, reward=0.5, drift=2e-3, episodes=32, learnt_from=16, dropped=12
    )
    assert report.rewards.points() == ((0, 0.25), (1, 0.5))


def test_a_share_that_nothing_was_learnt_from_has_no_drift() -> None:
    report = LessonReport()
    report.take(Learned(3, 16, 0, 16, 0.5, 0.0, 0.0))
    assert report.status().drift is None
