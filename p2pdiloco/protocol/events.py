"""What can happen to a node. Each is named in the past; the shell or the simulator makes them."""

from dataclasses import dataclass

from p2pdiloco.protocol.lineage import Record
from p2pdiloco.protocol.naming import MixId, PeerId, RoundId
from p2pdiloco.protocol.pacer import Served
from p2pdiloco.protocol.policies import Pressure
from p2pdiloco.protocol.wire import Message


@dataclass(frozen=True, slots=True)
class Woke:
    """The deadline that the node asked for has passed."""


@dataclass(frozen=True, slots=True)
class MessageArrived:
    sender: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class PeersFound:
    """Discovery has looked; `peers` may be empty, and may have been known before."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class StepsDone:
    """The learner took inner steps; `tokens` of all of them, `step_s` seconds each; `loss` of the
    last one in nats per token, if it is known. It is no number if that step went wrong.
    """

    steps: int
    tokens: int
    step_s: float
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class MachineMeasured:
    """What shares this machine, every second; `served` is None while nothing here tells of requests
    that it answers.
    """

    pressure: Pressure
    served: Served | None = None


@dataclass(frozen=True, slots=True)
class LearnerStarted:
    """A learner process is ready to receive fragments; it holds none yet."""


@dataclass(frozen=True, slots=True)
class LearnerStopped:
    """The learner process died; what it had learnt since the last snapshots is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class FragmentInstalled:
    """The learner overwrote a fragment at a step boundary; `tokens` it had counted on the version
    before.
    """

    fragment: int
    version: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ContributionPrepared:
    """Answers PrepareContribution: the encoded outer gradient lies ready, made after `steps` inner
    steps.
    """

    round: RoundId
    steps: int
    tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ContributionFailed:
    """Answers PrepareContribution."""

    round: RoundId
    reason: str


@dataclass(frozen=True, slots=True)
class ContributionPulled:
    """Answers PullContribution: decoded and checked, with the counters it came with."""

    round: RoundId
    peer: PeerId
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PullFailed:
    """Answers PullContribution; `hostile` when the bytes were wrong, not merely absent."""

    round: RoundId
    peer: PeerId
    reason: str
    hostile: bool = False


@dataclass(frozen=True, slots=True)
class RoundMerged:
    """Answers MergeRound: the payload lies ready to be served; applying it here gave
    `state_digest`.
    """

    round: RoundId
    payload_digest: str
    payload_bytes: int
    state_digest: str


@dataclass(frozen=True, slots=True)
class MergeFailed:
    """Answers MergeRound."""

    round: RoundId
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A whole state that a donor can serve: at version 0 the genesis weights, which have no
    record.
    """

    version: int
    state_digest: str


@dataclass(frozen=True, slots=True)
class RecordsFetched:
    """Answers FetchRecords: the donor's newest records, ascending and contiguous, and the states it
    can serve.

    Of the state `begun` something is here already: an earlier catch-up did not get all of it.
    """

    peer: PeerId
    fragment: int
    records: tuple[Record, ...]
    snapshots: tuple[SnapshotInfo, ...]
    begun: SnapshotInfo | None = None


@dataclass(frozen=True, slots=True)
class RecordsFailed:
    """Answers FetchRecords."""

    peer: PeerId
    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class StateReached:
    """Progress of a CatchUp: the replica now holds `version`, by loading a snapshot or applying
    `record`.
    """

    fragment: int
    version: int
    state_digest: str
    record: Record | None


@dataclass(frozen=True, slots=True)
class CatchUpFailed:
    """Ends a CatchUp; `diverged` when our own state led to another digest than the record's."""

    fragment: int
    reason: str
    diverged: bool = False


@dataclass(frozen=True, slots=True)
class StateDamaged:
    """The state that we hold of this version is no longer what it was: memory went wrong. Comes
    beside the failure of the action that was to build on it.
    """

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class MixFetched:
    """Answers FetchMix: the partner's vector is here, decoded and checked."""

    mix: MixId
    peer: PeerId


@dataclass(frozen=True, slots=True)
class MixFailed:
    """Answers FetchMix; `hostile` when the bytes were wrong, not merely absent."""

    mix: MixId
    peer: PeerId
    reason: str
    hostile: bool = False


@dataclass(frozen=True, slots=True)
class RoundCut:
    """Answers CutRound: the learner stands still and its outer gradient lies ready."""

    fragment: int
    round: int


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """Answers FinishRound: the learner goes on from the start of round `version`, whose state is
    held and has this digest. FragmentInstalled came before.
    """

    fragment: int
    version: int
    state_digest: str


@dataclass(frozen=True, slots=True)
class RoundUnfinished:
    """Answers CutRound or FinishRound: the state is as it was, what the learner holds unknown."""

    fragment: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class ValuesTaken:
    """Answers TakeValues: partners may fetch the copy."""

    fragment: int
    round: int


@dataclass(frozen=True, slots=True)
class ValuesBlended:
    """Answers BlendValues: the learner has added what partners differ by."""

    fragment: int
    round: int


@dataclass(frozen=True, slots=True)
class ValuesLost:
    """Answers TakeValues or BlendValues: the learner died, or stands on another version."""

    fragment: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class WrongBytes:
    """A donor sent bytes that are not those of the digest it was asked for."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class DispatcherIdle:
    """In an rl run: the synchronizer dispatches no rollouts, so no round will be due."""

    reason: str


@dataclass(frozen=True, slots=True)
class SettleAsked:
    """Open and join no more rounds; reach the newest heads and stay there."""


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """The owner stops this node."""


Event = (
    Woke
    | MessageArrived
    | PeersFound
    | StepsDone
    | MachineMeasured
    | LearnerStarted
    | LearnerStopped
    | FragmentInstalled
    | ContributionPrepared
    | ContributionFailed
    | ContributionPulled
    | PullFailed
    | RoundMerged
    | MergeFailed
    | RecordsFetched
    | RecordsFailed
    | StateReached
    | CatchUpFailed
    | StateDamaged
    | MixFetched
    | MixFailed
    | RoundCut
    | RoundFinished
    | RoundUnfinished
    | ValuesTaken
    | ValuesBlended
    | ValuesLost
    | WrongBytes
    | DispatcherIdle
    | SettleAsked
    | LeaveAsked
)
