"""What the daemon and its rollout worker say to each other.

As between daemon and learner (`learner_channel`): frames over a socket pair, and one float32 vector
per fragment in shared memory, here for weights on their way to the worker. Columns of numbers
travel as their bytes.

Not here: when to say what. That is `rollouts` (the daemon's side) and `rollout_process`.
"""

from dataclasses import dataclass

# Commands, from the daemon to the worker.


@dataclass(frozen=True, slots=True)
class Start:
    """The first message, and the only one before `Ready`."""

    spec: str
    """The run spec as JSON."""
    device: str
    threads: int
    rows_max: int
    waiting_max: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Submit:
    """A prompt to go on from; answered by `Progressed` and at last by `Finished` or `Refused`."""

    id: int
    prompt: str
    """As text; empty if `prompt_tokens` are given."""
    prompt_tokens: bytes
    """int32, little-endian."""
    trajectory: str
    num_tokens_max: int
    seed: int
    temperature: float
    top_k: int
    """0 for all."""
    top_p: float
    stops: str
    """JSON list of texts: the first that the answer contains ends it, and is not part of it."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants the answer any more; `Finished` may cross it on the way, else none comes."""

    id: int


@dataclass(frozen=True, slots=True)
class InstallWeights:
    """The shared vectors hold a whole policy; answered by `Installed`, until then not written."""

    version: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave."""


Command = Start | Submit | Cancel | InstallWeights | Stop


# Events, from the worker to the daemon.


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker is up, with no weights yet."""

    device: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """What was added to an answer. Stops and half characters hold text back, not tokens."""

    id: int
    text: str
    tokens: bytes
    """int32, little-endian."""
    logprobs: bytes
    """float32, little-endian."""
    versions: bytes
    """Of the policy that chose each token: int64, little-endian."""


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer is complete."""

    id: int
    reason: str
    """"stop" or "length"."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that cannot be, or cannot be now."""

    id: int
    reason: str
    is_busy: bool
    """It may be asked again later."""


@dataclass(frozen=True, slots=True)
class Installed:
    """The policy has changed, between two steps."""

    version: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the worker is; the counts go on from its start."""

    running: int
    waiting: int
    cache_share: float
    version: int
    tokens: int
    """Generated."""
    drafted: int
    held: int
    """Of the drafted tokens, those that the model confirmed."""
    busy_s: float
    """Spent in steps."""


Message = Ready | Progressed | Finished | Refused | Installed | Load
