"""A large swarm costs each node as much as a small one. Counted, never timed: calls and messages in
virtual time are the same on any machine.
"""

from collections import Counter

import pytest

from p2pdiloco.protocol.election import Drawing
from p2pdiloco.protocol.membership import Member
from p2pdiloco.protocol.wire import Message
from p2pdiloco.simulation.machine import Machine
from p2pdiloco.simulation.network import Quality
from p2pdiloco.simulation.world import Swarm, World

FROM_S = 12.0
UNTIL_S = 20.0


class Counted(World):
    """Counts messages."""

    def __init__(self, num_machines: int):
        super().__init__(1, Swarm(num_machines=num_machines, network=Quality(), step_s=1.5))
        self.messages: Counter[str] = Counter()

    def send(self, machine: Machine, peer: str, message: Message) -> None:
        self.messages[message.kind] += 1
        super().send(machine, peer, message)  # type: ignore[arg-type]


def per_node_second(num_machines: int, patch: pytest.MonkeyPatch) -> tuple[float, float, float]:
    """(messages sent, looks at whether a member lives, drawings for all members) of a node
    in a second of its ordinary life.
    """
    looks: Counter[str] = Counter()
    alive, draw = Member.alive, Drawing._draw

    def counted_alive(member: Member, now: float) -> bool:
        looks["alive"] += 1
        return alive(member, now)

    def counted_draw(drawing: Drawing) -> object:
        looks["drawn"] += 1
        return draw(drawing)

    world = Counted(num_machines)
    world.start_all(spread_s=2.0)
    world.run(until=FROM_S)
    world.messages.clear()
    patch.setattr(Member, "alive", counted_alive)
    patch.setattr(Drawing, "_draw", counted_draw)
    world.run(until=UNTIL_S)
    patch.undo()
    world.checkers.one_lineage()
    share = num_machines * (UNTIL_S - FROM_S)
    return world.messages.total() / share, looks["alive"] / share, looks["drawn"] / share


def test_a_node_of_a_large_swarm_has_no_more_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    few = per_node_second(40, monkeypatch)
    many = per_node_second(120, monkeypatch)
    assert many[0] < 1.5 * few[0], "messages"
    assert many[1] < 1.5 * few[1], "looks at whether a member lives"
    assert many[2] < 1.5 * few[2] + 1, "drawings for all members"
