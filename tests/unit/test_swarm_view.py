"""Whom a dispatcher asks and gives shares to, as the core knows them."""

from types import SimpleNamespace
from typing import cast

from protocol_builders import A, B, C, Script, heads_at, make_records, training

from p2pdiloco_daemon.node import NodeShell
from p2pdiloco_daemon.rl.swarm_view import SwarmView


def view_of(script: Script) -> SwarmView:
    return SwarmView(cast("NodeShell", SimpleNamespace(node=script.node)))


def test_all_who_live_are_asked_this_node_first() -> None:
    view = view_of(training(B, C, version=2))
    assert view.workers() == [A, B, C]
    assert set(view.learners()) == {A, B, C}


def test_who_holds_another_state_of_the_same_version_is_not_asked() -> None:
    script = training(B, C, version=2)
    view = view_of(script)
    head, other = heads_at([make_records(2, fragment=p) for p in (0, 1)])
    script.now += 1.0
    script.beat(C, heads=(head._replace(digest="f" * 64), other))
    assert view.workers() == [A, B]
    assert set(view.learners()) == {A, B}


def test_a_state_is_named_as_in_heartbeats() -> None:
    head, _ = heads_at([make_records(2, fragment=p) for p in (0, 1)])
    assert view_of(training(B, C, version=2)).head == head.digest


def test_who_is_behind_or_ahead_may_come_to_stand_here() -> None:
    script = training(B, C, version=2)
    head, other = heads_at([make_records(2, fragment=p) for p in (0, 1)])
    script.now += 1.0
    script.beat(C, heads=(head._replace(version=1, digest="f" * 64), other))
    assert view_of(script).workers() == [A, B, C]


def test_who_dispatches_for_another_state_of_our_version_does_not_dispatch_for_us() -> None:
    script = training(B, version=2)
    view = view_of(script)
    register = script.node.state.registers[0]
    while view.dispatcher != B:
        register.fence = (0, register.attempt_in(0) + 1)
    head, other = heads_at([make_records(2, fragment=p) for p in (0, 1)])
    script.now += 1.0
    script.beat(B, heads=(head._replace(digest="f" * 64), other))
    assert view.dispatcher is None
