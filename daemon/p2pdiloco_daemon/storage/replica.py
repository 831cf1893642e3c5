"""The node's host copy of the swarm's parameters: anchor and outer momentum of every fragment.

Not the learner's weights (those live in its process) and not the disk (store.py). All functions
here are arithmetic that may take seconds on a large model; the shell calls them in one worker
thread. A `FragmentState` never changes after it was made, so any thread may read one without a
lock.

Every replica applies the same payloads in the same order and gets the same bits, momentum included:
`state_digest` is how nodes notice when that fails. Host memory: 8 bytes per parameter.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from p2pdiloco.compress.codec import decode, encode, max_encoded_bytes
from p2pdiloco.compress.quantize import WireFormat
from p2pdiloco.errors import P2PDilocoError, PayloadError
from p2pdiloco.optim.fragments import Fragment
from p2pdiloco.optim.merge import MergeRule, merge, norm
from p2pdiloco.optim.outer import OuterStep, outer_step

Vector: TypeAlias = npt.NDArray[np.float32]
"""A flat float32 vector, a fragment's tensors in plan order."""

Buffer: TypeAlias = bytes | bytearray | memoryview

NORM_RATIO_MAX = 20.0
"""An outer gradient longer than this many times its anchor is refused. Honest ones stay far below:
the worst seen is an embedding drawn with deviation 0.02 that AdamW moves by a few times its own
length in its first round. Garbage that passes as float32 is usually many powers of ten above.
"""

ANCHOR_RMS_MIN = 0.01
"""For that bound an anchor counts as at least this long per sqrt(element): biases start at zero."""

_MAGIC = b"PDS1"
_HEADER = struct.Struct("<4sIQQ")
"""Magic, fragment, version, number of values; then anchor and momentum, float32 each."""


class StateDamagedError(P2PDilocoError):
    """Memory has changed under a state that nobody wrote to: its bytes are not its digest's."""

    def __init__(self, state: "FragmentState") -> None:
        super().__init__(
            f"fragment {state.fragment} v{state.version} was damaged in memory: its bytes no "
            f"longer give its digest {state.digest[:8]}"
        )
        self.state = state


class StaleBaseError(P2PDilocoError):
    """The replica holds another version than the caller counted on; ask for the newest again."""


@dataclass(frozen=True, slots=True)
class FragmentState:
    """A fragment at a version; immutable, its arrays too."""

    fragment: int
    version: int
    """How many merges made it; 0 is genesis."""
    anchor: Vector
    momentum: Vector
    digest: str
    """blake2b-256, hex, over fragment, version, anchor and momentum."""


class Replica:
    """The newest state of each fragment that this node holds, and the maths on it."""

    def __init__(
        self,
        fragments: Sequence[Fragment],
        *,
        outer_learning_rate: float,
        outer_momentum: float,
        wire: WireFormat,
        merge_rule: MergeRule,
        norm_ratio_max: float = NORM_RATIO_MAX,
        paced_inner_steps: int | None = None,
        may_stand_still: bool = False,
    ) -> None:
        """`paced_inner_steps`: H, in a run whose periods vary around it. `may_stand_still`: steps
        may teach nothing, as those of rollouts that are rewarded alike; elsewhere an outer gradient
        that is zero is a fault."""
        self.fragments = tuple(fragments)
        self._outer_learning_rate = outer_learning_rate
        self._outer_momentum = outer_momentum
        self._wire = wire
        self._merge_rule = merge_rule
        self._norm_ratio_max = norm_ratio_max
        self._paced_inner_steps = paced_inner_steps
        self._may_stand_still = may_stand_still
        self._states: list[FragmentState | None] = [None] * len(self.fragments)

    def state(self, fragment: int) -> FragmentState | None:
        """The held state; None before the first `put`."""
        return self._states[fragment]

    def put(self, state: FragmentState) -> None:
        """Hold this state from now on; PayloadError if it has another size than the fragment."""
        size = self.fragments[state.fragment].size
        if state.anchor.shape != (size,) or state.momentum.shape != (size,):
            raise PayloadError(
                f"a state of {state.anchor.size} values for fragment {state.fragment}; "
                f"expected {size}"
            )
        self._states[state.fragment] = state

    def payload_bytes_max(self, fragment: int) -> int:
        """No contribution or merge of the fragment is longer; what a download may take at most."""
        return max_encoded_bytes(self.fragments[fragment].size, self._wire)

    def encode_outer_gradient(self, fragment: int, base_version: int, local: Vector) -> bytes:
        """The learner's contribution: anchor - local, encoded.

        `local` float32[size] started from `base_version`. StaleBaseError if another version is
        held, StateDamagedError if it is not what it was; PayloadError if the learner's values are
        not finite, or all the anchor's where others would refuse that.
        """
        anchor = self._base(fragment, base_version).anchor
        assert local.shape == anchor.shape and local.dtype == np.float32
        with np.errstate(over="ignore"):  # encode refuses what overflows
            delta = anchor - local
        if not (self._may_stand_still or delta.any()):
            raise PayloadError(f"nothing of fragment {fragment} has changed since v{base_version}")
        return encode(delta, self._wire)

    def decode_contribution(self, fragment: int, payload: Buffer) -> Vector:
        """A peer's outer gradient, float32[size], not longer than plausible, and not zero unless
        steps may teach nothing.

        PayloadError otherwise.
        """
        delta = decode(payload, self.fragments[fragment].size, self._wire)
        self.check_outer_gradient(fragment, delta)
        return delta

    def check_outer_gradient(self, fragment: int, delta: Vector) -> None:
        """PayloadError if it, or this part of it, is longer than plausible, or zero."""
        length = norm(delta)
        if length == 0 and not self._may_stand_still:
            raise PayloadError(f"an outer gradient of fragment {fragment} that is zero")
        self._check_length(length, self._newest(fragment))

    def merge(self, fragment: int, parts: Sequence[tuple[Vector, float]]) -> bytes:
        """The merged outer gradient of (outer gradient, weight) parts, encoded once for
        everybody.
        """
        merged = merge(
            [delta for delta, _ in parts],
            [weight for _, weight in parts],
            self.fragments[fragment],
            self._merge_rule,
        )
        return encode(merged, self._wire)

    def apply(
        self, fragment: int, version: int, payload: Buffer, period_steps: int | None = None
    ) -> FragmentState:
        """The state that the merge payload makes of the held one; the caller decides to `put` it.
        `period_steps` are those of the merge's record; only a paced run needs them.

        StaleBaseError unless version - 1 is held, StateDamagedError if it is not what it was.
        PayloadError if the payload does not decode, is longer than any merge of admitted
        contributions, or leads to values that are not finite.
        """
        base = self._base(fragment, version - 1)
        delta = decode(payload, self.fragments[fragment].size, self._wire)
        self._check_length(norm(delta) / 2, base)  # quantizing twice may lengthen it
        step = self._outer_step(period_steps)
        anchor, momentum = outer_step(base.anchor, base.momentum, delta, step)
        _check_finite(anchor, momentum)
        return make_state(fragment, version, anchor, momentum)

    def _outer_step(self, period_steps: int | None) -> OuterStep:
        rate, momentum = self._outer_learning_rate, self._outer_momentum
        if self._paced_inner_steps is None:
            return OuterStep.usual(rate, momentum)
        assert period_steps is not None, "in a paced run every merge has its period"
        return OuterStep.after(rate, momentum, period_steps, self._paced_inner_steps)

    def check_partner(self, fragment: int, vector: Vector) -> None:
        """PayloadError unless another node's parameters are as near to ours as an outer gradient
        may be long.
        """
        state = self._newest(fragment)
        with np.errstate(over="ignore"):
            self._check_length(norm(vector - state.anchor), state)

    def _newest(self, fragment: int) -> FragmentState:
        state = self._states[fragment]
        if state is None:
            raise StaleBaseError(f"fragment {fragment} is not held yet; fetch its state first")
        return state

    def _base(self, fragment: int, version: int) -> FragmentState:
        """The held state, hashed anew: on what was damaged since, everybody would build."""
        state = self._newest(fragment)
        if state.version != version:
            raise StaleBaseError(
                f"fragment {fragment} is held at version {state.version}, not {version}"
            )
        require_sound(state)
        return state

    def _check_length(self, length: float, state: FragmentState) -> None:
        floor = ANCHOR_RMS_MIN * state.anchor.size**0.5
        longest = self._norm_ratio_max * max(norm(state.anchor), floor)
        if not length <= longest:
            require_sound(state)  # else the fault is ours
            raise PayloadError(
                f"an outer gradient of fragment {state.fragment} with norm {length:.3g}; "
                f"at most {longest:.3g} is plausible"
            )


def genesis(fragment: int, anchor: Vector) -> FragmentState:
    """Version 0 of a fragment: the starting weights, no momentum. Copies `anchor`."""
    return make_state(fragment, 0, anchor.astype(np.float32), np.zeros(anchor.size, np.float32))


def make_state(fragment: int, version: int, anchor: Vector, momentum: Vector) -> FragmentState:
    """Seal the arrays, which the caller gives away, and digest them."""
    anchor.setflags(write=False)
    momentum.setflags(write=False)
    digest = state_digest(fragment, version, anchor, momentum)
    return FragmentState(fragment, version, anchor, momentum, digest)


def make_finite_state(
    fragment: int, version: int, anchor: Vector, momentum: Vector
) -> FragmentState:
    """The same; PayloadError for values that are not finite."""
    _check_finite(anchor, momentum)
    return make_state(fragment, version, anchor, momentum)


def state_digest(fragment: int, version: int, anchor: Vector, momentum: Vector) -> str:
    """What a merge record and the run spec call the state's digest."""
    hasher = hashlib.blake2b(b"state" + struct.pack("<IQ", fragment, version), digest_size=32)
    hasher.update(anchor.data)
    hasher.update(momentum.data)
    return hasher.hexdigest()


def require_sound(state: FragmentState) -> None:
    """StateDamagedError unless the arrays are those that were digested."""
    if state_digest(state.fragment, state.version, state.anchor, state.momentum) != state.digest:
        raise StateDamagedError(state)


def payload_digest(payload: Buffer) -> str:
    """What a merge record calls the digest of its payload: blake2b-256, hex."""
    return hashlib.blake2b(payload, digest_size=32).hexdigest()


def packed_state_bytes(num_values: int) -> int:
    """The exact length of a packed state of that many values."""
    return _HEADER.size + 8 * num_values


def state_parts(state: FragmentState) -> tuple[Buffer, ...]:
    """The packed state as buffers to be written one after the other, without a copy."""
    header = _HEADER.pack(_MAGIC, state.fragment, state.version, state.anchor.size)
    return header, state.anchor.data.cast("B"), state.momentum.data.cast("B")


def pack_state(state: FragmentState) -> bytes:
    """The bytes that donors serve and the store keeps."""
    return b"".join(state_parts(state))


def unpack_state(buffer: Buffer, fragment: int, num_values: int, digest: str) -> FragmentState:
    """The state that `pack_state` packed; PayloadError unless it is exactly the one expected.

    The state's arrays lie in `buffer`, which the caller gives away. Every size is checked first.
    """
    view = memoryview(buffer).cast("B")
    if len(view) != packed_state_bytes(num_values):
        raise PayloadError(
            f"a packed state of {len(view)} bytes; {num_values} values take "
            f"{packed_state_bytes(num_values)}"
        )
    magic, got_fragment, version, count = _HEADER.unpack_from(view)
    if (magic, got_fragment, count) != (_MAGIC, fragment, num_values):
        raise PayloadError(
            f"a packed state with header {magic!r}, fragment {got_fragment}, {count} values; "
            f"expected {_MAGIC!r}, fragment {fragment}, {num_values} values"
        )
    anchor, momentum = np.frombuffer(view, np.float32, offset=_HEADER.size).reshape(2, num_values)
    state = make_state(fragment, version, anchor, momentum)
    if state.digest != digest:
        raise PayloadError(f"a packed state with digest {state.digest}; expected {digest}")
    _check_finite(anchor, momentum)
    return state


def _check_finite(anchor: Vector, momentum: Vector) -> None:
    if not (np.isfinite(anchor).all() and np.isfinite(momentum).all()):
        raise PayloadError("a state whose values are not finite; expected numbers")
