"""What the daemon and its learner process say to each other.

Fragments travel in the memory that both share: a message says when a vector may be read, another
when it may be written again; nothing else guards the memory.

Not here: when to say what. That is `learner.learner` (the daemon's side) and `learner.process`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgpack

from p2pdiloco_daemon.children.channel import ChannelError

PIECE_BYTES_MAX = 1 << 18
"""Of a share on its way; the learner reads one between two steps."""

# Commands, from the daemon to the learner.


@dataclass(frozen=True, slots=True)
class Start:
    """The first message, and the only one before `Ready`: all of a learner but its weights."""

    spec: str
    """The run spec as JSON."""
    directory: str
    """Where the inner checkpoint is kept."""
    node_key: str
    device: str
    threads: int
    eval_every_steps: int


@dataclass(frozen=True, slots=True)
class Install:
    """`incoming[fragment]` holds this version; answered by `Installed`, until then not written."""

    fragment: int
    version: int
    serial: int
    """Counts the installs of this fragment that were asked for, replaced ones too."""


@dataclass(frozen=True, slots=True)
class EndRound:
    """`incoming[fragment]` holds the base from which the next round starts: at the first boundary
    after a step, `outgoing` takes the local values, which become base + share * local, this
    version. Answered by `RoundEnded`; until then neither vector is written.
    """

    fragment: int
    version: int
    serial: int
    share: float


@dataclass(frozen=True, slots=True)
class Blend:
    """`incoming[fragment]` holds what to add to the local values, if they grew from this version;
    counters go on. Answered by `Blended`.
    """

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Wanted: the local values that grew from `base_version`, after the install `serial`."""

    request_id: int
    fragment: int
    base_version: int
    serial: int
    hold: bool = False
    """Whether to stand still afterwards, until the fragment is installed."""


@dataclass(frozen=True, slots=True)
class ReleaseSnapshot:
    """`outgoing[fragment]` was read and may be written again."""

    fragment: int


@dataclass(frozen=True, slots=True)
class SetPaused:
    paused: bool


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Answered by `Evaluated` once the model is complete."""


@dataclass(frozen=True, slots=True)
class Learn:
    """A piece of a share of a step to learn from, see `pieces_of_share`; answered by `Learned` when
    the whole share has been learnt from or dropped. More pieces follow until one `is_last`.
    """

    step: int
    piece: bytes
    is_last: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Save the inner checkpoint and leave."""


Command = (
    Start
    | Install
    | EndRound
    | Blend
    | TakeSnapshot
    | ReleaseSnapshot
    | SetPaused
    | Evaluate
    | Learn
    | Stop
)


# Events, from the learner to the daemon.


@dataclass(frozen=True, slots=True)
class Ready:
    """A learner process is up, with no weights yet: install every fragment."""

    num_parameters: int
    device: str
    step: int
    """Inner steps that its checkpoint remembers."""


@dataclass(frozen=True, slots=True)
class StepsDone:
    """One or more inner steps. One whose gradient was not finite is skipped: it has no tokens."""

    step: int
    """Cumulative inner steps of this node."""
    steps: int
    tokens: int
    step_s: float
    """Compute and data, all `steps` together."""
    stall_s: float
    """Between the steps: messages, installs, snapshots, checkpoints."""
    loss: float
    """Of the last step, nats per token."""
    step_queued_s: float = 0.0
    """The part of `step_s` in which the learner could have run and other programs had the cores."""
    stall_queued_s: float = 0.0
    """The same part of `stall_s`: not the swarm's doing, but that of a busy machine."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A fragment was overwritten at a step boundary. Its counters, then reset, stood at this.

    Their tokens are the sum of the `StepsDone` since the receipt before; skipped steps are not
    among their steps.
    """

    fragment: int
    version: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """`outgoing[fragment]` holds the values that the round ended with, after so many steps and
    tokens; the learner has gone on with `version`. Read them, then send `ReleaseSnapshot`.
    """

    fragment: int
    version: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Blended:
    """`done` if the local values had grown from the version that was named."""

    fragment: int
    done: bool


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """`outgoing[fragment]` holds the local values; read them, then send `ReleaseSnapshot`."""

    request_id: int
    fragment: int
    base_version: int
    serial: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SnapshotRefused:
    request_id: int
    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The held-out loss of the local model."""

    loss: float
    """Nats per byte."""
    step: int
    seconds: float
    predictions: bytes = b""
    """Of a run that gossips, as `p2pdiloco.learn.predictions` packs them."""


@dataclass(frozen=True, slots=True)
class Idle:
    """In an rl run: nothing to learn from is left; told once, until the next step."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What became of a share; see `p2pdiloco.rl.shares.Lesson`."""

    step: int
    num_episodes: int
    num_learnt_from: int
    num_dropped: int
    reward: float
    drift: float
    loss: float


@dataclass(frozen=True, slots=True)
class Saving:
    """The inner checkpoint is being written between two steps, or has been."""

    under_way: bool


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """The inner checkpoint could not be written or read; training goes on."""

    reason: str


Message = (
    Ready
    | StepsDone
    | Installed
    | RoundEnded
    | Blended
    | SnapshotTaken
    | SnapshotRefused
    | Evaluated
    | Idle
    | Learned
    | Saving
    | CheckpointFailed
)


def pieces_of_share(step: int, episodes: Sequence[bytes]) -> Iterator[Learn]:
    """Packed episodes (`p2pdiloco.rl.episodes`) as the commands that bring them."""
    whole = bytes(msgpack.packb(list(episodes)))
    for start in range(0, len(whole), PIECE_BYTES_MAX):
        end = start + PIECE_BYTES_MAX
        yield Learn(step, whole[start:end], is_last=end >= len(whole))


def episodes_in(share: bytes) -> list[bytes]:
    """Of the joined pieces; ChannelError if they are none."""
    match msgpack.unpackb(share):
        case [*episodes] if all(type(episode) is bytes for episode in episodes):
            return episodes
    raise ChannelError(f"a share of {len(share)} bytes is no list of episodes")
