import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from p2pdiloco.compress.codec import encode
from p2pdiloco.compress.quantize import WireFormat
from p2pdiloco.errors import PayloadError
from p2pdiloco.optim.fragments import plan_fragments
from p2pdiloco.optim.outer import nesterov_step
from p2pdiloco_daemon.storage.replica import (
    Replica,
    StaleBaseError,
    StateDamagedError,
    genesis,
    make_state,
    pack_state,
    packed_state_bytes,
    payload_digest,
    unpack_state,
)

SIZE = 1000
FRAGMENTS = plan_fragments({"a": (900,), "b": (100,)}, 1, [])
Vector = npt.NDArray[np.float32]


def weights(seed: int = 0, scale: float = 0.02) -> Vector:
    return (np.random.default_rng(seed).standard_normal(SIZE) * scale).astype(np.float32)


def new_replica(
    wire: WireFormat = "int8",
    paced_inner_steps: int | None = None,
    *,
    may_stand_still: bool = False,
) -> Replica:
    replica = Replica(
        FRAGMENTS,
        outer_learning_rate=0.7,
        outer_momentum=0.5,
        wire=wire,
        merge_rule="rda",
        paced_inner_steps=paced_inner_steps,
        may_stand_still=may_stand_still,
    )
    replica.put(genesis(0, weights()))
    return replica


def contribution(replica: Replica, seed: int) -> bytes:
    state = replica.state(0)
    assert state is not None
    return replica.encode_outer_gradient(0, state.version, state.anchor + weights(seed, 1e-3))


def test_the_period_of_a_merge_counts_in_a_paced_run_alone() -> None:
    paced, usual = new_replica(paced_inner_steps=12), new_replica()
    payload = contribution(usual, 1)
    states = {
        (replica is paced, period): replica.apply(0, 1, payload, period)
        for replica in (paced, usual)
        for period in (6, 12)
    }
    assert states[True, 6].digest != states[True, 12].digest
    assert states[False, 6].digest == states[False, 12].digest == states[True, 12].digest


def test_genesis_is_version_zero_without_momentum() -> None:
    anchor = weights()
    state = genesis(0, anchor)
    assert state.version == 0 and not state.momentum.any()
    assert state.anchor.tobytes() == anchor.tobytes()
    anchor[0] = 5
    assert state.anchor[0] != 5


def test_two_replicas_that_apply_the_same_merges_agree_to_the_last_bit() -> None:
    one, two = new_replica(), new_replica()
    for version in range(1, 6):
        received = [
            one.decode_contribution(0, contribution(one, 10 * version + m)) for m in range(3)
        ]
        payload = one.merge(0, [(delta, 1.0 + m) for m, delta in enumerate(received)])
        states = [replica.apply(0, version, payload) for replica in (one, two)]
        for replica, state in zip((one, two), states, strict=True):
            replica.put(state)
        assert states[0].digest == states[1].digest
        assert states[0].anchor.tobytes() == states[1].anchor.tobytes()
        assert states[0].momentum.tobytes() == states[1].momentum.tobytes()


def test_applying_a_lone_float32_contribution_is_the_outer_step_on_it() -> None:
    replica, local = new_replica("float32"), weights(1)
    delta = weights() - local
    part = replica.decode_contribution(0, replica.encode_outer_gradient(0, 0, local))
    state = replica.apply(0, 1, replica.merge(0, [(part, 3.0)]))
    anchor, momentum = nesterov_step(weights(), np.zeros(SIZE, np.float32), delta, 0.7, 0.5)
    assert (state.version, state.digest) == (1, make_state(0, 1, anchor, momentum).digest)


def test_apply_does_not_put() -> None:
    replica = new_replica()
    held = replica.state(0)
    replica.apply(0, 1, contribution(replica, 1))
    assert replica.state(0) is held


def test_a_gradient_from_another_base_is_refused() -> None:
    with pytest.raises(StaleBaseError, match="held at version 0, not 1"):
        new_replica().encode_outer_gradient(0, 1, weights())


@pytest.mark.parametrize("version", [0, 2])
def test_a_merge_out_of_order_is_refused(version: int) -> None:
    replica = new_replica()
    with pytest.raises(StaleBaseError):
        replica.apply(0, version, contribution(replica, 1))


def test_nothing_works_before_the_first_state() -> None:
    replica = Replica(
        FRAGMENTS, outer_learning_rate=0.7, outer_momentum=0.5, wire="int8", merge_rule="rda"
    )
    assert replica.state(0) is None
    with pytest.raises(StaleBaseError, match="not held yet"):
        replica.decode_contribution(0, encode(weights(), "int8"))


def test_a_contribution_of_another_shape_is_refused() -> None:
    with pytest.raises(PayloadError, match="999 values"):
        new_replica().decode_contribution(0, encode(weights()[:999], "int8"))


def test_a_learner_that_has_not_moved_contributes_nothing() -> None:
    replica = new_replica()
    state = replica.state(0)
    assert state
    with pytest.raises(PayloadError, match="nothing of fragment 0 has changed since v0"):
        replica.encode_outer_gradient(0, 0, state.anchor)


def test_a_zero_contribution_is_refused() -> None:
    with pytest.raises(PayloadError, match="zero"):
        new_replica().decode_contribution(0, encode(np.zeros(SIZE, np.float32), "int8"))


def test_where_steps_may_teach_nothing_a_merge_of_nothing_makes_the_next_version() -> None:
    replica = new_replica(may_stand_still=True)
    before = replica.state(0)
    assert before
    payload = replica.encode_outer_gradient(0, 0, before.anchor)
    delta = replica.decode_contribution(0, payload)
    merged = replica.merge(0, [(delta, 4.0), (delta.copy(), 1.0)])
    after = replica.apply(0, 1, merged)
    assert np.array_equal(after.anchor, before.anchor)
    assert (after.version, after.digest == before.digest) == (1, False)


def test_a_huge_contribution_is_refused() -> None:
    with pytest.raises(PayloadError, match=r"norm 6\.\d+e\+08; at most 12\.4 is plausible"):
        new_replica().decode_contribution(0, encode(weights() * np.float32(1e9), "int8"))


def test_a_huge_merge_is_refused() -> None:
    with pytest.raises(PayloadError, match="plausible"):
        new_replica().apply(0, 1, encode(weights() * np.float32(1e9), "int8"))


def test_a_diverged_learner_is_not_encoded() -> None:
    with pytest.raises(PayloadError, match="not finite"):
        new_replica().encode_outer_gradient(0, 0, np.full(SIZE, np.nan, np.float32))


def test_a_fragment_that_starts_at_zero_can_move() -> None:
    replica = new_replica()
    replica.put(genesis(0, np.zeros(SIZE, np.float32)))
    assert replica.decode_contribution(0, encode(weights(1, 1e-2), "int8")).any()


def test_no_payload_is_longer_than_announced() -> None:
    replica = new_replica()
    assert len(contribution(replica, 1)) <= replica.payload_bytes_max(0)


def test_a_state_cannot_be_changed() -> None:
    state = genesis(0, weights())
    with pytest.raises(ValueError, match="read-only"):
        state.anchor[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.version = 2  # type: ignore[misc]


def test_the_digest_covers_everything() -> None:
    a, b = weights(1), weights(2)
    states = [make_state(0, 1, a, b), make_state(1, 1, a, b), make_state(0, 2, a, b)]
    states += [make_state(0, 1, b, a), make_state(0, 1, a, a)]
    assert len({state.digest for state in states}) == len(states)


def test_a_packed_state_comes_back() -> None:
    state = make_state(3, 7, weights(1), weights(2))
    packed = pack_state(state)
    assert len(packed) == packed_state_bytes(SIZE)
    for buffer in (packed, bytearray(packed), memoryview(packed)):
        got = unpack_state(buffer, 3, SIZE, state.digest)
        assert (got.fragment, got.version, got.digest) == (3, 7, state.digest)
        assert not got.anchor.flags.writeable and not got.momentum.flags.writeable


@pytest.mark.parametrize("length", [0, 10, 24, 8023, 8025])
def test_a_packed_state_of_another_length_is_refused(length: int) -> None:
    packed = pack_state(genesis(0, weights())) + b"\0"
    with pytest.raises(PayloadError, match="bytes; 1000 values take 8024"):
        unpack_state(packed[:length], 0, SIZE, "")


def test_a_packed_state_of_another_fragment_is_refused() -> None:
    state = genesis(0, weights())
    with pytest.raises(PayloadError, match="fragment 0, 1000 values; expected"):
        unpack_state(pack_state(state), 1, SIZE, state.digest)


def test_a_flipped_bit_in_a_packed_state_is_refused() -> None:
    state = genesis(0, weights())
    for place in (8, 100, 8000):
        packed = bytearray(pack_state(state))
        packed[place] ^= 1
        with pytest.raises(PayloadError, match="digest"):
            unpack_state(packed, 0, SIZE, state.digest)


def test_a_packed_state_with_nan_is_refused_whatever_its_digest() -> None:
    state = make_state(0, 1, np.full(SIZE, np.nan, np.float32), weights())
    with pytest.raises(PayloadError, match="not finite"):
        unpack_state(pack_state(state), 0, SIZE, state.digest)


def test_a_state_of_another_size_is_not_held() -> None:
    with pytest.raises(PayloadError, match="3 values for fragment 0; expected 1000"):
        new_replica().put(genesis(0, np.ones(3, np.float32)))


def test_the_payload_digest_is_blake2b_256() -> None:
    assert payload_digest(b"") == (
        "0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8"
    )


# -------------------------------------------------------------------- memory that went wrong


@pytest.mark.parametrize("which", ["anchor", "momentum"])
def test_a_flipped_bit_is_found_before_anything_is_built_upon_it(which: str) -> None:
    replica = new_replica()
    payload = contribution(replica, 1)
    state = replica.state(0)
    assert state
    values = getattr(state, which)
    values.setflags(write=True)
    values.view(np.uint32)[SIZE // 2] ^= 1
    with pytest.raises(StateDamagedError, match="fragment 0 v0 was damaged in memory") as caught:
        replica.apply(0, 1, payload)
    assert caught.value.state is state
    with pytest.raises(StateDamagedError):
        replica.encode_outer_gradient(0, 0, weights(1))
    replica.decode_contribution(0, payload)  # builds on nothing of ours
    replica.put(genesis(0, weights()))
    assert replica.apply(0, 1, payload).version == 1


def test_a_peer_is_not_refused_for_the_length_of_a_damaged_anchor() -> None:
    replica = new_replica()
    payload, state = contribution(replica, 1), replica.state(0)
    assert state
    state.anchor.setflags(write=True)
    state.anchor[0] = np.nan
    with pytest.raises(StateDamagedError):
        replica.decode_contribution(0, payload)
