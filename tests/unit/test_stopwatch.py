import time
from itertools import count

from p2pdiloco_daemon.learner.stopwatch import Stopwatch, queued_clock


def test_a_stopwatch_tells_the_time_and_how_much_of_it_others_had_the_cores() -> None:
    watch = Stopwatch(count(0.0, 1.0).__next__, count(0.0, 0.25).__next__)
    for _ in range(3):
        with watch.running():
            pass
    assert watch.take() == (3.0, 0.75)
    assert watch.take() == (0.0, 0.0)


def test_time_without_a_core_is_at_most_the_time() -> None:
    watch = Stopwatch(time.perf_counter, queued_clock())
    with watch.running():
        sum(range(100_000))
    spent_s, queued_s = watch.take()
    assert 0 <= queued_s <= spent_s
