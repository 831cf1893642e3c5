"""How a demo has its nodes come to rest."""

from typing import cast

from virtual_clock import run_virtual

from p2pdiloco_daemon.demo import supervisor
from p2pdiloco_daemon.demo.polling import StatusReader
from p2pdiloco_daemon.demo.supervisor import SETTLE_TIMEOUT_S, StopRequests


class Nodes:
    """They settle once they have heard that they should; the first `num_missed` times they are too
    busy.
    """

    def __init__(self, num_missed: float) -> None:
        self._num_missed = num_missed
        self._num_asked = 0

    async def settle(self) -> None:
        self._num_asked += 1

    async def refresh(self) -> None:
        pass

    def settled(self) -> bool:
        return self._num_asked > self._num_missed


def settles(nodes: Nodes, requests: StopRequests) -> bool:
    return run_virtual(supervisor._settle(cast("StatusReader", nodes), requests))


def test_a_node_that_was_too_busy_to_hear_it_is_asked_again() -> None:
    assert settles(Nodes(num_missed=SETTLE_TIMEOUT_S), StopRequests(lambda: None))


def test_nodes_that_never_hear_it_are_not_waited_for_in_a_hurry_nor_for_ever() -> None:
    assert not settles(Nodes(num_missed=float("inf")), StopRequests(lambda: None))
    hurried = StopRequests(lambda: None)
    hurried.add()
    hurried.add()
    assert not settles(Nodes(num_missed=1), hurried)
