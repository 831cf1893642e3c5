"""Which relays a host keeps slots at, and when it asks whether it can be dialed."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import cached_property
from typing import Any

import pytest
from virtual_clock import run_virtual

from p2pdiloco_bootstrap import protobuf, reachability
from p2pdiloco_bootstrap.control import Control
from p2pdiloco_bootstrap.identity import Identity, base58_decode
from p2pdiloco_bootstrap.reachability import (
    PUNCH_PAUSE_S,
    PUNCHES_AFTER_S,
    REFUSAL_S,
    RENEW_S,
    Reachability,
    dial_request,
)
from p2pdiloco_bootstrap.relay import Slot

GOOD, SMALL = Slot(4 << 30, ()), Slot(128 << 10, ())


class FakeControl(Control):
    """A p2pd with connections to `peers`, some of which relay."""

    def __init__(self) -> None:
        self.own: list[str] = []
        self.closed: list[str] = []
        self.peers: dict[str, tuple[str, ...]] = {}
        self.slots: dict[str, Slot] = {}
        self.asked: list[str] = []

    def add(self, peer: str, slot: Slot | None, at: str = "/ip4/44.128.1.2/tcp/1") -> None:
        self.peers[peer] = (at,)
        if slot:
            self.slots[peer] = slot

    async def addresses(self) -> list[str]:
        return self.own

    async def disconnect(self, peer: str) -> None:
        self.closed.append(peer)

    async def connections(self) -> dict[str, tuple[str, ...]]:
        return self.peers


class Watched:
    """A host's reachability, with what it made known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bootstraps: tuple[str, ...] = ()) -> None:
        self.control = FakeControl()
        self.changes = 0
        self._bootstraps = bootstraps

        async def reserve(control: Control, relay: str) -> Slot:
            self.control.asked.append(relay)
            if relay not in self.control.slots:
                raise ConnectionError("no relay")
            return self.control.slots[relay]

        monkeypatch.setattr(reachability, "reserve", reserve)

    @cached_property
    def it(self) -> Reachability:
        return Reachability(
            self.control, "me", self._bootstraps, asks=False, on_change=self._changed
        )

    def _changed(self) -> None:
        self.changes += 1

    def relays(self) -> set[str]:
        return {address.split("/")[6] for address in self.it.relayed_addresses()}


def play(script: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await script()

    run_virtual(main())


def test_two_relays_are_kept_bootstrap_peers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Watched(monkeypatch, bootstraps=("boot",))
    for peer in ("ann", "bob", "cyd", "boot"):
        host.control.add(peer, GOOD)

    async def script() -> None:
        await host.it.look()
        await host.it.look()

    play(script)
    assert host.control.asked[0] == "boot" and len(host.control.asked) == 2
    assert "boot" in host.relays() and len(host.relays()) == 2
    assert host.changes == 1


def test_a_relay_that_is_gone_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Watched(monkeypatch)
    for peer in ("ann", "bob"):
        host.control.add(peer, GOOD)

    async def script() -> None:
        await host.it.look()
        del host.control.peers["ann"]
        host.control.add("cyd", GOOD)
        await host.it.look()

    play(script)
    assert host.relays() == {"bob", "cyd"}
    assert host.changes == 2


def test_a_relay_that_cuts_bodies_off_is_not_used_and_asked_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Watched(monkeypatch)
    host.control.add("ann", SMALL)
    host.control.add("bob", None)

    async def script() -> None:
        await host.it.look()
        await host.it.look()
        assert sorted(host.control.asked) == ["ann", "bob"]
        assert not host.relays()
        assert "no relay yet" in host.it.sentence()
        await asyncio.sleep(REFUSAL_S[0])
        host.control.slots["ann"] = GOOD
        await host.it.look()

    play(script)
    assert host.relays() == {"ann"}


def test_a_peer_behind_a_relay_is_not_asked_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Watched(monkeypatch)
    host.control.add("ann", GOOD, "/ip4/44.128.1.2/tcp/1/p2p/x/p2p-circuit")
    play(lambda: host.it.look())
    assert not host.control.asked


def test_a_slot_is_renewed_and_given_up_when_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Watched(monkeypatch)
    host.control.add("ann", GOOD)

    async def script() -> None:
        await host.it.look()
        await asyncio.sleep(RENEW_S)
        await host.it.look()
        assert host.control.asked == ["ann", "ann"] and host.relays() == {"ann"}
        host.control.slots["ann"] = SMALL
        await asyncio.sleep(RENEW_S)
        await host.it.look()

    play(script)
    assert not host.relays()
    assert host.changes == 2


def test_whoever_can_be_dialed_gives_its_slots_up(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Watched(monkeypatch)
    host.control.add("ann", GOOD)

    async def script() -> None:
        await host.it.look()
        host.it.dialable = True
        await host.it.look()

    play(script)
    assert not host.relays()
    assert host.it.sentence() == "other nodes can dial this one"


RELAYED = "/ip4/44.128.1.2/tcp/1/p2p/x/p2p-circuit"


def test_relayed_connections_are_closed_when_holes_can_be_punched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Watched(monkeypatch)
    host.control.add("ann", None, RELAYED)
    host.control.add("bob", None)

    async def script() -> None:
        await host.it.look()
        await asyncio.sleep(PUNCHES_AFTER_S)
        await host.it.look()
        assert not host.control.closed
        host.control.own = ["/ip4/44.128.5.2/tcp/8600", "/ip4/192.168.1.2/tcp/8600"]
        host.it.dialable = False
        await host.it.look()
        await host.it.look()
        assert host.control.closed == ["ann"]

    play(script)


def test_a_hole_that_was_not_punched_is_tried_again_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Watched(monkeypatch)
    host.control.own = ["/ip4/44.128.5.2/tcp/8600"]
    host.control.add("ann", None, RELAYED)
    first_s = PUNCH_PAUSE_S[0]

    async def script() -> None:
        host.it.dialable = False
        await host.it.look()
        await asyncio.sleep(PUNCHES_AFTER_S)
        await host.it.look()
        host.control.add("cyd", None, RELAYED)  # p2pd tries a new one by itself
        await host.it.look()
        assert host.control.closed == ["ann"]
        await asyncio.sleep(first_s)
        await host.it.look()
        assert host.control.closed == ["ann", "ann", "cyd"]
        host.control.closed.clear()
        for _ in range(24):
            await asyncio.sleep(3600.0)
            await host.it.look()
        assert 4 <= host.control.closed.count("ann") <= 10

    play(script)


def test_addresses_that_the_relay_names_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Watched(monkeypatch)
    host.control.add("ann", Slot(4 << 30, ("/ip4/44.128.9.9/tcp/5/p2p/ann/p2p-circuit",)))
    play(lambda: host.it.look())
    assert host.it.relayed_addresses() == ["/ip4/44.128.9.9/tcp/5/p2p/ann/p2p-circuit"]


def test_the_question_whether_we_can_be_dialed_is_an_autonat_message() -> None:
    peer = Identity.generate().peer_id
    length, *message = dial_request(peer, [b"one", b"two"])
    assert length == len(message)
    fields = protobuf.unpack(bytes(message))
    info = protobuf.unpack(protobuf.bytes_in(protobuf.unpack(protobuf.bytes_in(fields, 2)), 1))
    assert fields[1] == [0] and info == {1: [base58_decode(peer)], 2: [b"one", b"two"]}


@pytest.mark.parametrize(
    ("answer", "status"),
    [("0801" + "1a02" + "0800", 0), ("0801" + "1a02" + "0864", 100), ("0801", None), ("", None)],
)
def test_the_answer_has_a_status(answer: str, status: int | None) -> None:
    assert reachability.dial_status(bytes.fromhex(answer)) == status
