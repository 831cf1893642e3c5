"""The window of a replica: up while there is room, down when trajectories evict each other."""

from p2pdiloco.protocol.window import CYCLE, DECREASE, INCREASE, Window


def observe(window: Window, hit: float, use: float, turns: int = CYCLE) -> float:
    for _ in range(turns):
        window.observe(hit, use)
    return window.size


def test_it_grows_while_the_cache_has_room() -> None:
    assert observe(Window(8.0), hit=0.1, use=0.3) == 8 + INCREASE


def test_it_shrinks_when_a_full_cache_misses() -> None:
    assert observe(Window(8.0), hit=0.3, use=0.95) == 8 * DECREASE


def test_a_full_cache_that_hits_is_left_alone() -> None:
    assert observe(Window(8.0), hit=0.95, use=0.95) == 8


def test_nothing_changes_before_a_cycle_is_over() -> None:
    assert observe(Window(8.0), hit=0.0, use=1.0, turns=CYCLE - 1) == 8


def test_each_cycle_averages_its_own_turns() -> None:
    window = Window(8.0)
    observe(window, hit=0.0, use=1.0)
    assert observe(window, hit=1.0, use=1.0) == 8 * DECREASE


def test_it_is_never_below_one() -> None:
    window = Window(2.0)
    observe(window, hit=0.0, use=1.0, turns=20 * CYCLE)
    assert window.size == 1.0
    window.bound(0)
    assert window.size == 1.0


def test_it_does_not_grow_beyond_what_is_wanted() -> None:
    window = Window(30.0)
    window.bound(12)
    assert window.size == 12
