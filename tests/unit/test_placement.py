"""The dispatcher of a step: what it does at each event."""

import pytest
from placement_builders import (
    ALICE,
    ANSWER,
    BOB,
    CAROL,
    PROMPT,
    after,
    dispatcher,
    ended,
    finished,
    held,
    load,
    places,
    ready,
    report,
    step,
    turn,
)

from p2pdiloco.protocol.placement import COLLECT_S, TRIES_MAX, Placement, Rules
from p2pdiloco.protocol.trajectories import Stage
from p2pdiloco.protocol.turns import (
    Event,
    GiveUp,
    Held,
    Holding,
    Place,
    Step,
    TimePassed,
    TurnFailed,
    TurnRevoked,
    Withdraw,
    WorkerLost,
)

WAR = Rules(form="war")


def test_a_trajectory_is_placed_turn_by_turn_to_its_end() -> None:
    placement, actions = dispatcher()
    assert actions == [Place(ALICE, turn(0, 0))]
    assert after(placement, finished(ALICE, 0, 0)) == []
    assert after(placement, ready(0, 1)) == [Place(ALICE, turn(0, 1))]
    assert after(placement, finished(ALICE, 0, 1), ended(0, 1)) == []
    assert placement.is_done
    assert placement.deadline is None


def test_nothing_is_placed_while_nobody_is_there() -> None:
    placement = Placement(step(), Rules(), 0.0)
    assert placement.handle(TimePassed(), 1.0) == []
    assert after(placement, report(BOB)) == [Place(BOB, turn(0))]


def test_events_of_another_step_or_an_unknown_trajectory_are_ignored() -> None:
    placement, _ = dispatcher()
    other, _ = dispatcher(step(number=8))
    assert after(placement, ended(5, 0)) == []
    assert after(other, ended(0, 0), finished(ALICE, 0)) == []
    assert not other.is_done


def test_under_low_load_the_replica_with_fewest_requests_is_taken() -> None:
    _, actions = dispatcher(step(4, 1), WAR, workers=[])
    placement = Placement(step(4, 1), WAR, 0.0, ask=[ALICE, BOB])
    after(placement, report(ALICE), now=0.0)
    actions = after(placement, report(BOB), now=0.0)
    assert places(actions) == {0: ALICE, 1: BOB, 2: ALICE, 3: BOB}


def test_under_low_load_a_trajectory_stays_where_it_began() -> None:
    placement, _ = dispatcher(step(2, 1), WAR)
    after(placement, report(BOB))
    assert after(placement, finished(ALICE, 0), ready(0, 1)) == [Place(ALICE, turn(0, 1))]


def test_a_full_replica_gets_no_more_than_its_rows() -> None:
    placement, actions = dispatcher(step(6, 1))
    assert len(actions) == 4
    assert places(after(placement, finished(ALICE, 0), ended(0, 0))) == {4: ALICE}


def test_while_all_replicas_are_full_the_dispatcher_sleeps() -> None:
    placement = Placement(step(10, 1), WAR, 0.0)
    after(placement, report(ALICE, load(rows=2)), now=0.0)
    for now in (0.5, 1.0, 1.5):
        after(placement, TimePassed(), now=now)
        assert placement.deadline is not None and placement.deadline > now


@pytest.mark.parametrize(
    "claimed", [Held(turn(0, 1), Holding.READY, 0), held(0, 99, Holding.READY)]
)
def test_a_report_of_what_cannot_be_is_ignored(claimed: Held) -> None:
    placement, _ = dispatcher(step())
    before = placement.trajectories[0].turn
    after(placement, report(ALICE, load(held=[claimed])))
    assert placement.trajectories[0].turn == before


def test_what_acts_keeps_its_place_in_the_window() -> None:
    placement, _ = dispatcher(step(6, 1))
    assert after(placement, finished(ALICE, 0)) == []


def test_a_cache_that_is_full_takes_no_new_trajectory() -> None:
    placement = Placement(step(4, 1), Rules(), 0.0)
    assert len(after(placement, report(ALICE, load(cache=500)))) == 2


def test_a_trajectory_too_long_for_the_cache_still_runs_alone() -> None:
    placement = Placement(step(2, 1), Rules(), 0.0)
    assert len(after(placement, report(ALICE, load(cache=50)))) == 1


def test_a_trajectory_begins_where_its_group_s_prompt_is_cached() -> None:
    placement = Placement(step(2, 2), Rules(), 0.0, ask=[ALICE, BOB])
    after(placement, report(ALICE, load(held=[held(0, 0, Holding.ACTING)])))
    at_bob = [held(2, 0, Holding.ACTING)]
    assert places(after(placement, report(BOB, load(held=at_bob)))) == {1: ALICE, 3: BOB}


def test_a_slow_replica_is_left_idle_if_the_fast_one_ends_sooner() -> None:
    placement = Placement(step(1, 5), Rules(), 0.0, ask=[ALICE, BOB])
    after(placement, report(ALICE, load(speed=100.0)))
    placed = places(after(placement, report(BOB, load(speed=0.01))))
    assert placed == dict.fromkeys(range(4), ALICE)


def test_a_trajectory_moves_to_where_it_ends_clearly_sooner_between_two_turns() -> None:
    placement, _ = dispatcher()
    assert after(placement, report(BOB, load(speed=100.0))) == []
    assert after(placement, finished(ALICE, 0)) == []
    assert after(placement, ready(0, 1)) == [Place(BOB, turn(0, 1))]


def test_a_turn_that_waits_at_a_full_home_is_taken_by_another() -> None:
    placement = Placement(step(1, 2), Rules(), 0.0)
    waits = load(rows=1, held=[held(0, 1, Holding.GENERATING), held(1, 1, Holding.READY)])
    assert after(placement, report(ALICE, waits)) == []
    assert after(placement, report(BOB, load(rows=1))) == [Place(BOB, turn(1, 1))]


def test_a_turn_stays_at_home_if_its_history_is_dear_to_compute() -> None:
    placement, _ = dispatcher(step(2, 1), workers=[ALICE])
    after(placement, report(BOB, load(speed=1.05)))
    after(placement, finished(ALICE, 0))
    assert after(placement, ready(0, 1)) == [Place(ALICE, turn(0, 1))]


def test_a_lost_worker_s_turns_are_placed_again() -> None:
    placement, _ = dispatcher(step(1, 2))
    after(placement, finished(ALICE, 0))
    assert after(placement, WorkerLost(ALICE, "silent")) == []
    assert after(placement, report(BOB)) == [Place(BOB, turn(0)), Place(BOB, turn(1))]


def test_a_failed_turn_is_tried_again_but_not_for_ever() -> None:
    placement, _ = dispatcher()
    failed = TurnFailed(ALICE, turn(0), "out of memory")
    for _ in range(TRIES_MAX - 1):
        assert after(placement, failed) == [Place(ALICE, turn(0))]
    [given_up] = after(placement, failed)
    assert given_up == GiveUp(0, "turn 0 failed 4 times: out of memory")
    assert placement.is_done


def test_tries_are_counted_for_each_turn_apart() -> None:
    placement, _ = dispatcher()
    for number in range(3):
        for _ in range(TRIES_MAX - 1):
            after(placement, TurnFailed(ALICE, turn(0, number), "busy"))
        after(placement, finished(ALICE, 0, number), ready(0, number + 1))
    assert not placement.is_done


def test_a_turn_that_takes_too_long_is_withdrawn_and_placed_again() -> None:
    placement, _ = dispatcher()
    deadline = placement.deadline
    assert deadline is not None
    assert placement.handle(TimePassed(), deadline - 0.1) == []
    withdraw, place = placement.handle(TimePassed(), deadline)
    reason = f"generating for {deadline:.0f} s"
    assert withdraw == Withdraw(ALICE, turn(0), reason, is_overdue=True)
    assert place == Place(ALICE, turn(0))


def test_an_environment_that_hangs_costs_one_turn() -> None:
    placement, _ = dispatcher(rules=Rules(act_s_max=9.0))
    after(placement, finished(ALICE, 0), now=1.0)
    assert placement.deadline == 10.0
    assert placement.handle(TimePassed(), 10.0) == [
        Withdraw(ALICE, turn(0), "acting for 9 s", is_overdue=True),
        Place(ALICE, turn(0)),
    ]


def test_an_answer_that_comes_after_its_withdrawal_still_counts() -> None:
    placement, _ = dispatcher()
    after(placement, WorkerLost(ALICE, "silent"))
    after(placement, report(BOB))
    assert after(placement, finished(ALICE, 0)) == [
        Withdraw(BOB, turn(0), "another worker is further")
    ]
    assert after(placement, finished(BOB, 0)) == []
    assert placement.trajectories[0].worker == ALICE


def test_news_that_comes_twice_changes_nothing() -> None:
    placement, _ = dispatcher(step(2, 1))
    once: list[Event] = [finished(ALICE, 0), ready(0, 1), finished(ALICE, 0, 1), ended(0, 1)]
    after(placement, *once)
    assert after(placement, *once, ended(0, 1), ready(0, 2)) == []
    assert placement.trajectories[0].stage is Stage.ENDED
    assert placement.trajectories[0].turn == 1


def test_a_trajectory_beyond_its_turns_is_given_up() -> None:
    placement, _ = dispatcher(rules=Rules(turns_max=1))
    after(placement, finished(ALICE, 0))
    assert after(placement, ready(0, 1)) == [GiveUp(0, "more than 1 turns")]


def test_a_trajectory_beyond_its_tokens_is_given_up() -> None:
    placement, _ = dispatcher(rules=Rules(tokens_max=PROMPT + ANSWER))
    after(placement, finished(ALICE, 0))
    assert after(placement, ready(0, 1)) == [GiveUp(0, "130 tokens; at most 120 are allowed")]


def test_when_the_step_s_time_is_up_everything_open_is_given_up() -> None:
    placement, _ = dispatcher(step(2, 1), Rules(step_s_max=50.0))
    after(placement, finished(ALICE, 0), ended(0, 0))
    assert placement.deadline == 50.0
    reason = "the step's time is up"
    assert placement.handle(TimePassed(), 50.0) == [
        Withdraw(ALICE, turn(1), reason),
        GiveUp(1, reason),
    ]
    assert placement.is_done


def test_who_takes_over_waits_for_the_workers_reports() -> None:
    placement = Placement(step(2, 1), Rules(), 0.0, ask=[ALICE, BOB])
    assert after(placement, report(ALICE)) == []
    assert placement.deadline == COLLECT_S
    assert places(placement.handle(TimePassed(), COLLECT_S)) == {0: ALICE, 1: ALICE}


def test_who_takes_over_goes_on_from_what_is_held() -> None:
    placement = Placement(step(1, 5), Rules(), 0.0, ask=[ALICE, BOB])
    at_alice = [
        held(0, 3, Holding.GENERATING),
        held(1, 2, Holding.READY),
        held(2, 1, Holding.ACTING),
    ]
    assert after(placement, report(ALICE, load(held=at_alice))) == []
    at_bob = [held(3, 4, Holding.ENDED), held(1, 1, Holding.ACTING)]
    actions = after(placement, report(BOB, load(held=at_bob)))
    assert Withdraw(BOB, turn(1, 1), "the trajectory went on elsewhere") in actions
    assert {a.turn for a in actions if isinstance(a, Place)} == {turn(1, 2), turn(4, 0)}
    assert [t.stage.value for t in placement.trajectories] == [
        "generating",
        "generating",
        "acting",
        "ended",
        "generating",
    ]
    assert after(placement, finished(ALICE, 0, 3), ended(0, 3)) == []
    assert placement.trajectories[0].stage is Stage.ENDED


def test_a_report_makes_up_for_a_message_that_was_lost() -> None:
    placement, _ = dispatcher()
    is_ready = load(held=[held(0, 1, Holding.READY)])
    assert after(placement, report(ALICE, is_ready)) == [Place(ALICE, turn(0, 1))]


def test_a_report_that_is_older_than_what_is_known_does_no_harm() -> None:
    placement, _ = dispatcher()
    after(placement, finished(ALICE, 0), ready(0, 1))
    stale = load(held=[held(0, 0, Holding.GENERATING)])
    assert after(placement, report(ALICE, stale)) == []


def test_a_worker_that_was_lost_may_come_back() -> None:
    placement, _ = dispatcher()
    after(placement, WorkerLost(ALICE, "silent"), report(CAROL), WorkerLost(CAROL, "left"))
    assert after(placement, report(ALICE)) == [Place(ALICE, turn(0))]


def test_an_overdue_turn_goes_before_one_that_is_cached_better() -> None:
    for wait_s_max, chosen in ((100.0, 1), (5.0, 0)):
        placement = Placement(step(1, 3), Rules(wait_s_max=wait_s_max), 0.0)
        busy = [held(2, 0, Holding.GENERATING), held(1, 2, Holding.ACTING)]
        after(placement, report(ALICE, load(rows=1, held=busy)), ready(0, 1), now=0.0)
        after(placement, ready(1, 3), now=9.0)
        placed = places(after(placement, finished(ALICE, 2), ended(2, 0), now=9.0))
        assert placed == {chosen: ALICE}


def test_a_revoked_turn_is_generated_again_though_the_trajectory_had_ended() -> None:
    placement, _ = dispatcher()
    after(placement, finished(ALICE, 0, 0), ready(0, 1))
    after(placement, finished(ALICE, 0, 1), ended(0, 1))
    assert placement.is_done
    assert after(placement, TurnRevoked(turn(0, 1), 130)) == [Place(ALICE, turn(0, 1))]
    assert not placement.is_done


def test_a_turn_built_on_a_revoked_one_is_withdrawn() -> None:
    placement, _ = dispatcher()
    after(placement, finished(ALICE, 0, 0), ready(0, 1))
    withdrawn, placed = after(placement, TurnRevoked(turn(0, 0), PROMPT))
    assert isinstance(withdrawn, Withdraw)
    assert withdrawn.turn == turn(0, 1)
    assert placed == Place(ALICE, turn(0, 0))


def test_what_was_never_taken_in_cannot_be_revoked() -> None:
    placement, _ = dispatcher()
    assert after(placement, TurnRevoked(turn(0, 1), 130), TurnRevoked(turn(5), PROMPT)) == []


def test_a_prompt_that_leaves_no_room_for_an_answer_is_given_up_at_once() -> None:
    too_long = Step(number=7, prompt_tokens=(PROMPT, 500), group_size=1)
    placement, actions = dispatcher(too_long, Rules(tokens_max=500))
    assert actions == [Place(ALICE, turn(0))]
    after(placement, finished(ALICE, 0), ended(0, 0))
    assert placement.is_done
