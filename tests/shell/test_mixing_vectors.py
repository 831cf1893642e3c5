"""Vectors for partners: whom they are for, what they are the difference to, and what is refused."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from memory_swarm import FRAGMENTS, GENESIS, A, B, C, mixing_of, open_holdings
from virtual_clock import run_virtual

from p2pdiloco.compress.codec import encode
from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.actions import FinishRound
from p2pdiloco.protocol.naming import MixId
from p2pdiloco.protocol.topology import Row
from p2pdiloco_bootstrap.shelf import MixVector
from p2pdiloco_daemon.mixing import Mixing
from p2pdiloco_daemon.storage.replica import StaleBaseError, make_state

P = 0
HALVES = Row(0.5, {B: 0.5})
SIZE = FRAGMENTS[P].size


def start(version: int) -> MixId:
    return MixId(P, version, "start")


def hold(mixing: Mixing, version: int, shift: float = 0.0) -> None:
    """A state of fragment P, offered to B."""
    rng = np.random.default_rng(version)
    values = GENESIS[P].anchor + rng.normal(shift, 0.01, SIZE).astype(np.float32)
    mixing._holdings.hold_own(make_state(P, version, values, np.zeros(SIZE, np.float32)))
    mixing.open(start(version), (B,))


def play(tmp_path: Path, scenario: Callable[[Mixing, Mixing], Awaitable[None]]) -> None:
    async def main() -> None:
        async with open_holdings(tmp_path / A) as ours, open_holdings(tmp_path / B) as theirs:
            pair = [mixing_of(ours, A), mixing_of(theirs, B)]
            for mixing in pair:
                mixing._settings = replace(mixing._settings, start_wire="int4")
            await scenario(*pair)

    run_virtual(main())


def test_a_partner_gets_the_difference_to_what_it_holds(tmp_path: Path) -> None:
    async def scenario(ours: Mixing, theirs: Mixing) -> None:
        hold(theirs, 1)
        hold(ours, 1)
        whole = await ours.vector_for(B, start(1), None)
        assert whole and whole.held is None
        await theirs.take(start(1), A, whole, None)
        kept = theirs.held(start(2), A)
        assert kept and kept[0] == 1
        hold(ours, 2)
        difference = await ours.vector_for(B, start(2), 1)
        assert difference and difference.held == 1
        assert len(difference.payload) < len(whole.payload)
        theirs._held[P].clear()  # others came meanwhile
        await theirs.take(start(2), A, difference, kept)
        held = theirs._held[P][A][1]
        own = ours._swaps[P, "start"].own
        assert np.abs(held - own).max() < 0.01  # a tenth of what changed, not of the values

    play(tmp_path, scenario)


def test_who_names_what_it_was_never_sent_gets_the_whole(tmp_path: Path) -> None:
    async def scenario(ours: Mixing, _: Mixing) -> None:
        hold(ours, 1)
        for held in (None, 7):
            vector = await ours.vector_for(B, start(1), held)
            assert vector and vector.held is None

    play(tmp_path, scenario)


def test_a_partner_that_has_ours_from_before_a_restart_is_mixed_with_at_both_ends(
    tmp_path: Path,
) -> None:
    async def scenario(ours: Mixing, _: Mixing) -> None:
        hold(ours, 1)
        own = ours._swaps[P, "start"].own
        await ours.take(start(1), B, MixVector(None, encode(own + np.float32(0.2), "int8")), None)
        mixed = ours._mixed_start(FinishRound(P, 1, 2, HALVES, None))[1]
        assert np.abs(mixed - own - 0.1).max() < 0.01

    play(tmp_path, scenario)


def test_a_round_whose_state_was_replaced_is_not_finished(tmp_path: Path) -> None:
    async def scenario(ours: Mixing, _: Mixing) -> None:
        hold(ours, 1)
        outer = MixId(P, 1, "outer")
        await ours.cut(outer, GENESIS[P].anchor, (B,))
        ours.open(start(1), (B,))
        with pytest.raises(StaleBaseError):
            await ours.finish_cut(FinishRound(P, 1, 2, HALVES, HALVES))
        hold(ours, 2)
        with pytest.raises(StaleBaseError):
            await ours.cut(outer, GENESIS[P].anchor, (B,))

    play(tmp_path, scenario)


def test_nobody_else_and_no_other_round_is_served(tmp_path: Path) -> None:
    async def scenario(ours: Mixing, _: Mixing) -> None:
        hold(ours, 1)
        assert await ours.vector_for(C, start(1), None) is None
        assert await ours.vector_for(B, start(2), None) is None
        assert await ours.vector_for(B, MixId(P, 1, "outer"), None) is None

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        encode(np.ones(SIZE + 1, np.float32), "int8"),
        encode(np.full(SIZE, 1e9, np.float32), "int8"),
    ],
)
def test_wrong_vectors_are_refused(tmp_path: Path, payload: bytes) -> None:
    async def scenario(ours: Mixing, _: Mixing) -> None:
        hold(ours, 1)
        with pytest.raises(PeerError):
            await ours.take(start(1), B, MixVector(None, payload), None)

    play(tmp_path, scenario)
