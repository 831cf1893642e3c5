"""What a node tells about itself: one frozen tree for page, JSON, metrics and command line.

The names here are the names in `GET /api/status` and are kept stable: fields may be added, none is
renamed or changes its unit. Durations are seconds from monotonic clocks (`_s`), counts are whole
numbers, `None` means "not known yet". Not here: how any of it is measured, and how it is shown.
Other modules use these short names qualified: `view.Learner`, `view.Fragment`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, TypeAlias

CURVE_POINTS_MAX = 500
"""Points sent per curve: more than a screen has columns for, and still only 10 KB of JSON."""
ROUNDS_MAX = 20
EVENTS_MAX = 50
MEMBERS_MAX = 200
"""Rows that page and event loop bear each second; `num_members` counts those not listed too."""

CurvePoint: TypeAlias = tuple[int, float]
"""(inner step, value)."""
JsonObject: TypeAlias = dict[str, Any]


class NodeState(StrEnum):
    """What the node as a whole is doing; the page shows it as the colour of its sentence."""

    STARTING = "starting"
    FETCHING = "fetching"
    """Taking the current state of the fragments from donors."""
    TRAINING = "training"
    ISOLATED = "isolated"
    """Training locally: no other node can be reached."""
    PAUSED = "paused"
    SETTLED = "settled"
    """Asked to stop training; everything merged that can be, anchors at rest."""
    STOPPING = "stopping"
    ERROR = "error"


class LearnerState(StrEnum):
    """What the learner child process is doing."""

    STARTING = "starting"
    WAITING = "waiting"
    """Running, and not stepping until every fragment was installed once."""
    TRAINING = "training"
    IDLE = "idle"
    """Has learnt from all that was rolled out for it, and waits for more."""
    PAUSED = "paused"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class RolloutState(StrEnum):
    """What the rollout worker is doing."""

    STARTING = "starting"
    WAITING = "waiting"
    """Running, and without weights yet."""
    SERVING = "serving"
    RESTARTING = "restarting"


class FragmentSync(StrEnum):
    """How this node's copy of a fragment stands against the newest the swarm is known to have."""

    IN_SYNC = "in_sync"
    BEHIND = "behind"
    DIVERGED = "diverged"
    """Our state at this version is not the lineage's: being replaced by fetching."""
    FETCHING = "fetching"
    EMPTY = "empty"


class Role(StrEnum):
    LEARNER = "learner"
    BOOTSTRAP = "bootstrap"
    """Helps others to join; trains nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    id: str
    """Hex digest of the signed run spec."""
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    state: LearnerState = LearnerState.STARTING
    step: int = 0
    tokens_per_s: float | None = None
    step_s: float | None = None
    """Recent wall time of one inner step."""
    loss: float | None = None
    """Recent training loss, nats per token."""
    held_out_loss: float | None = None
    """Nats per byte of text that nobody trains on."""
    device: str | None = None
    num_parameters: int | None = None
    stall_share: float = 0.0
    """What the swarm takes of the learner's time, 0..1: (stall_s - stall_queued_s) over that and
    (compute_s - compute_queued_s)."""
    compute_s: float = 0.0
    """In inner steps, since the daemon started."""
    compute_queued_s: float = 0.0
    """Part of `compute_s` in which other programs had the cores that the learner could have used:
    how busy this machine is. Linux tells; elsewhere it stays 0."""
    stall_s: float = 0.0
    """Between the steps: installs, snapshots, messages, checkpoints; evaluations do not count."""
    stall_queued_s: float = 0.0
    """Part of `stall_s`, as `compute_queued_s`."""
    evaluation_s: float = 0.0
    """Spent on the held-out loss. With `compute_s` and `stall_s` that is all a learner does: what
    is missing from the time that passed, it waited."""
    restarts: int = 0
    last_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """What this node's learner makes of rollouts; None in the status of a run that reads text."""

    step: int | None = None
    """Of the last share that it was done with."""
    reward: float | None = None
    """Mean of that share's episodes, 0 to 1."""
    drift: float | None = None
    """How far the policy that learnt was from the one that was rolled out: an estimate of the
    divergence, nats per token."""
    episodes: int = 0
    """In all shares so far."""
    learnt_from: int = 0
    """Of these, those with an advantage; groups whose rewards are all alike have none."""
    dropped: int = 0
    """Of these, those that were too old when their turn came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedWorker:
    """What a rollout worker gave to this node, in this life of it."""

    peer: str
    turns: int
    tokens: int
    cached_share: float | None
    """Of the prompts' tokens, those that its cache had."""
    failures: int
    lies: int
    """Turns that were not true."""
    last_problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatching:
    """The step that this node has rolled out; None in the status of a run that reads text."""

    step: int | None = None
    """None while another node dispatches."""
    phase: str = "waiting"
    """"waiting", "rolling out" or "sharing"."""
    trajectories: Mapping[str, int] = field(default_factory=dict)
    """How many of the step's are "waiting", "generating", "acting", "ended", "given up"."""
    groups_waiting: int = 0
    """That no learner has taken yet."""
    workers: Sequence[DispatchedWorker] = ()
    """Who gave most comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What this node generates for others; None in the status of a node that does not."""

    state: RolloutState = RolloutState.STARTING
    served: int = 0
    """Answers given to their end; in an rl run turns of trajectories, too."""
    refused: int = 0
    tokens: int = 0
    """Generated since the daemon started."""
    tokens_per_s: float = 0.0
    """Over the last ten seconds."""
    draft_acceptance: float | None = None
    """Share of drafted tokens that the model confirmed."""
    running: int = 0
    waiting: int = 0
    policy_version: int | None = None
    """Merges in the weights that it generates with."""
    restarts: int = 0
    last_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLedger:
    """Where every token this node processed has gone.

    One token trains all P fragments and each fragment is merged apart, so the unit is one token in
    one fragment. `processed = merged + pending + rejected + lost`, exactly.
    """

    processed: int = 0
    merged: int = 0
    pending: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    """Reason -> count: offered, and not taken into a merge."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Reason -> count: gone by a crash, or merged into a lineage that lost."""
    unit: str = "token-fragments"

    @property
    def rejected_total(self) -> int:
        return sum(self.rejected.values())

    @property
    def lost_total(self) -> int:
        return sum(self.lost.values())

    @property
    def adds_up(self) -> bool:
        accounted = self.merged + self.pending + self.rejected_total + self.lost_total
        return self.processed == accounted


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronizer:
    peer: str
    is_self: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One finished or abandoned merge of one fragment."""

    fragment: int
    version: int
    """The version it made, or would have made."""
    term: int
    attempt: int
    synchronizer: str
    contributors: Sequence[str]
    outcome: str
    """One word, for example "merged", "abandoned", "superseded"."""
    reason: str
    """Why it closed as it did, one sentence for a reader."""
    seconds_ago: float
    duration_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    index: int
    version: int
    head_version: int
    """The newest version known in the swarm."""
    state: FragmentSync
    num_values: int
    digest: str | None = None
    """First characters of the state digest: equal on all nodes that hold this version. None while
    nothing is held, and for the moment in which the version changes."""
    record_digest: str | None = None
    """Digest of the merge record that made this version; None for version 0."""
    local_steps: int = 0
    """Inner steps since this fragment was last overwritten."""
    merged_tokens: int = 0
    """Tokens of all merges in the lineage of this version: what all nodes' `merged` must add up
    to.
    """
    damaged_times: int = 0
    """How often this node found its copy damaged in memory, since it started."""
    mended_s_ago: float | None = None
    """When a copy that was damaged, or had diverged, was last replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    peer: str
    name: str
    """Chosen by that peer: arbitrary text from a stranger."""
    is_self: bool = False
    alive: bool = True
    ready: bool = True
    """Holds every fragment and can take part in a round."""
    role: Role = Role.LEARNER
    versions_behind: int | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    last_heard_s: float | None = None
    """Seconds since it was last heard of; 0 for this node."""
    is_synchronizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteCount:
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    sent_bytes: int = 0
    received_bytes: int = 0
    by_kind: Mapping[str, ByteCount] = field(default_factory=dict)
    """What the bytes were for ("message", "contribution", "merge", "state", ...)."""
    upload_limit_bytes_per_s: float | None = None
    """Bodies leave no faster, so that messages are not stuck behind them; None while the link was
    never full.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NextSync:
    """Of one fragment: when it is merged next, as far as this machine is concerned."""

    fragment: int
    steps: int
    """Inner steps since it was last received."""
    opens: int
    """Steps after which it may be merged."""
    closes: int
    """Steps after which nothing puts it off any more."""
    asks_for_time: bool
    reason: str
    """Why this node wants it merged now, or waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Of an answer's latency at the load of now."""

    bound_s: float | None
    """95 % of the answers should take no longer; None if that cannot be said."""
    late: float | None
    """The share of answers that took longer than the target."""
    coverage: float | None
    """Of the newest answers, the share that kept the bound given for them; wanted are 0.95."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """When merges come in a run that leaves slack, and what that rests on."""

    policy: str
    sentence: str
    """The fragment that is nearest to its next merge, and why it is merged or waits."""
    pressure: Mapping[str, float] = field(default_factory=dict)
    """What shares this machine ("link", "serving", "checkpoint", "owner"), from 0 to 1."""
    fragments: Sequence[NextSync] = ()
    target_s: float | None = None
    """What an answer served here should take at most; None while nothing is served here."""
    quiet: Bound | None = None
    """Of answers with no transfer or merge in flight."""
    syncing: Bound | None = None
    """Of answers with one."""
    answers_total: int = 0
    relearned: int = 0
    """How often the machine turned out to be another one than it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The process that carries this node's connections."""

    connected: bool = True
    """False while it is started again."""
    restarts: int = 0
    last_error: str | None = None
    """Why it ended last."""
    reach: str | None = None
    """How others reach this node, in a sentence: dialed, through which relays, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLag:
    """How late the daemon's event loop was, over the last minute or so."""

    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    last_saved_s_ago: float | None = None
    error: str | None = None
    """Why the last save failed; None once one succeeded again."""
    bytes_on_disk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """How far this node and those that it mixes with are apart, in a run that gossips."""

    outputs: float | None = None
    """Jensen-Shannon distance of what the learners predict on a fixed probe, 0..1, mean over the
    partners that were asked last; it foretells spikes of the loss."""
    parameters: float | None = None
    """Euclidean distance of the parameters when they were last mixed, before it."""
    parameters_share: float | None = None
    """The same, as a share of the length of all parameters."""
    curve: Sequence[CurvePoint] = ()
    """(inner step, `outputs`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of what happened, for people."""

    seconds_ago: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    protocol_version: int
    app_version: str
    peer_id: str
    node_name: str
    run: Run
    state: NodeState
    sentence: str
    """What this node is doing, in one sentence that a volunteer understands."""
    uptime_s: float
    page_url: str | None = None
    learner: Learner = field(default_factory=Learner)
    loss_curve: Sequence[CurvePoint] = ()
    """(inner step, training loss in nats per token)."""
    held_out_curve: Sequence[CurvePoint] = ()
    """(inner step, held-out loss in nats per byte)."""
    reward_curve: Sequence[CurvePoint] = ()
    """(step of the swarm, mean reward of this node's share of it)."""
    tokens: TokenLedger = field(default_factory=TokenLedger)
    learning: Learning | None = None
    rollouts: Rollouts | None = None
    dispatching: Dispatching | None = None
    merges_total: int = 0
    """Merges applied by this process."""
    first_merge_s: float | None = None
    """Seconds from the start of the process to its first applied merge; None before it."""
    term: int = 0
    attempt: int = 0
    synchronizer: Synchronizer | None = None
    disagreement: Disagreement | None = None
    """None in a run with synchronizers, where all replicas are the same to the last bit."""
    rounds: Sequence[Round] = ()
    """Newest first."""
    pacing: Pacing | None = None
    """None in a run whose merges come as soon as they are due."""
    fragments: Sequence[Fragment] = ()
    members: Sequence[Member] = ()
    """This node included."""
    traffic: Traffic = field(default_factory=Traffic)
    network: Network = field(default_factory=Network)
    loop_lag: LoopLag = field(default_factory=LoopLag)
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Reason -> how many messages or payloads of other peers were refused for it."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    events: Sequence[Event] = ()
    """Newest first."""

    def to_json(self) -> JsonObject:
        """The document of `GET /api/status`: plain types, lists bounded, no NaN or infinity."""
        bounded = dataclasses.replace(
            self,
            loss_curve=self.loss_curve[-CURVE_POINTS_MAX:],
            held_out_curve=self.held_out_curve[-CURVE_POINTS_MAX:],
            reward_curve=self.reward_curve[-CURVE_POINTS_MAX:],
            rounds=self.rounds[:ROUNDS_MAX],
            members=self.members[:MEMBERS_MAX],
            events=self.events[:EVENTS_MAX],
        )
        document: JsonObject = _plain(bounded)
        document["num_members"] = len(self.members)
        document["tokens"] |= {
            "rejected_total": self.tokens.rejected_total,
            "lost_total": self.tokens.lost_total,
            "adds_up": self.tokens.adds_up,
        }
        return document


def _plain(value: object) -> Any:
    """`value` as JSON types. A number that JSON cannot write becomes null, never broken JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, int | str):
        return value
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise TypeError(f"a status holds no {type(value).__name__}")
