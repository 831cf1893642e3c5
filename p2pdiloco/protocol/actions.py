"""What a node wants done. Each says which event answers it; `Send` and `Note` have no answer."""

from dataclasses import dataclass

from p2pdiloco.protocol.events import SnapshotInfo
from p2pdiloco.protocol.lineage import Contributor, Record
from p2pdiloco.protocol.naming import MixId, PeerId, RoundId
from p2pdiloco.protocol.topology import Row
from p2pdiloco.protocol.wire import Message


@dataclass(frozen=True, slots=True)
class Send:
    """Best effort; the protocol repeats what matters with the next heartbeat."""

    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log and the page that a person can read."""

    text: str


@dataclass(frozen=True, slots=True)
class PrepareContribution:
    """Snapshot the fragment at the learner's next boundary where it stands on `round.version - 1`,
    and encode it.

    With `hold` the learner then stands still until it receives a state of the fragment.

    Answer: ContributionPrepared or ContributionFailed. Replaces an earlier contribution of the same
    fragment.
    """

    round: RoundId
    hold: bool = False


@dataclass(frozen=True, slots=True)
class DropContribution:
    """Nobody will pull it any more."""

    fragment: int


@dataclass(frozen=True, slots=True)
class PullContribution:
    """Fetch and check a contribution (possibly our own). Answer: ContributionPulled or
    PullFailed.
    """

    round: RoundId
    peer: PeerId


@dataclass(frozen=True, slots=True)
class MergeRound:
    """Merge what was pulled, weighted by its counters, encode once, apply it. Answer: RoundMerged
    or MergeFailed.
    """

    round: RoundId
    parts: tuple[Contributor, ...]


@dataclass(frozen=True, slots=True)
class DropRound:
    """Free what was pulled for this round; a merge that was not committed is undone."""

    round: RoundId


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """Keep the record of our own merge with its payload; it is served from now on."""

    record: Record


@dataclass(frozen=True, slots=True)
class FetchRecords:
    """Answer: RecordsFetched or RecordsFailed. `peer` may be this node: its disk is a donor too."""

    peer: PeerId
    fragment: int
    after_version: int


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Load `snapshot` if there is one, then apply the merges of `records` in order.

    All bytes may come from our own disk or any of `donors`. `vouching` are the records that lead to
    the snapshot, as far as they are known, its own last; none at version 0.

    Answer: StateReached for the snapshot and for each record, or CatchUpFailed, after which nothing
    more comes.
    """

    fragment: int
    snapshot: SnapshotInfo | None
    vouching: tuple[Record, ...]
    records: tuple[Record, ...]
    donors: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class InstallFragment:
    """Give the learner our state of this version. Answer: FragmentInstalled (or LearnerStopped)."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class OpenMix:
    """Serve our start of this round to these partners, and to nobody else; what was kept for the
    fragment's earlier exchanges is dropped.
    """

    mix: MixId
    partners: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class FetchMix:
    """Answer: MixFetched or MixFailed."""

    mix: MixId
    peer: PeerId


@dataclass(frozen=True, slots=True)
class CutRound:
    """Have the learner stand still after the step in hand, and serve its outer gradient of this
    round to these partners. Answer: RoundCut or RoundUnfinished.
    """

    fragment: int
    round: int
    partners: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class FinishRound:
    """The outer step: on our start mixed with those of `starts`, with our outer gradient mixed with
    those of `outers`, if it was cut. The learner goes on from there.

    Answer: FragmentInstalled and RoundFinished, both of `version`; or RoundUnfinished.
    """

    fragment: int
    round: int
    version: int
    starts: Row
    outers: Row | None


@dataclass(frozen=True, slots=True)
class TakeValues:
    """Copy what the learner has made of `version` of the fragment, for these partners to fetch.
    Answer: ValuesTaken or ValuesLost.
    """

    fragment: int
    round: int
    version: int
    partners: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class BlendValues:
    """Have the learner add the weighted differences of the partners' values to its own; its
    counters go on. Answer: ValuesBlended or ValuesLost.
    """

    fragment: int
    round: int
    row: Row


Action = (
    Send
    | Note
    | PrepareContribution
    | DropContribution
    | PullContribution
    | MergeRound
    | DropRound
    | CommitRecord
    | FetchRecords
    | CatchUp
    | InstallFragment
    | OpenMix
    | FetchMix
    | CutRound
    | FinishRound
    | TakeValues
    | BlendValues
)
