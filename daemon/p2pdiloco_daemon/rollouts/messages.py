"""What the daemon and its rollout worker say to each other.

As between daemon and learner (`learner.messages`), and one float32 vector per fragment in shared
memory, here for weights on their way to the worker. Columns of numbers travel as their bytes.

Not here: when to say what. That is `rollouts` (the daemon's side) and `rollouts.process`.
"""

from dataclasses import dataclass

# Commands, from the daemon to the worker.


@dataclass(frozen=True, slots=True)
class Start:
    """The first message, and the only one before `Ready`."""

    spec: str
    """The run spec as JSON."""
    run_id: str
    device: str
    threads: int
    rows_max: int
    waiting_max: int
    cache_bytes: int
    backend: str
    """One of `backends.BACKENDS`."""


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
class Play:
    """A turn of a trajectory; answered by `Played` or `Refused`."""

    id: int
    """Of the same numbers as those of `Submit` and `Check`."""
    step: int
    trajectory: int
    turn: int
    history: bytes
    """A packed episode so far, or empty before the first turn."""


@dataclass(frozen=True, slots=True)
class Check:
    """Wanted: whether a packed episode of a step may be believed; answered by `Checked`."""

    id: int
    step: int
    episode: bytes
    ended: bool
    """Whether it must have ended, or must not."""
    replayed: bool
    """Whether its tokens are to be looked at, too."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants the answer any more; it may cross this on the way, else none comes."""

    id: int


@dataclass(frozen=True, slots=True)
class InstallWeights:
    """The shared vectors hold a whole policy; answered by `Installed`, until then not written."""

    version: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave."""


Command = Start | Submit | Play | Check | Cancel | InstallWeights | Stop


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
class Played:
    """A turn is generated, and the environment has acted on it."""

    id: int
    turn: int
    """The one that is next, or that was the last."""
    has_ended: bool
    num_tokens: int
    """Of the trajectory now."""
    num_reused: int
    """Of the prompt, tokens that did not have to be computed."""
    episode: bytes
    """Packed; so far, if it has not ended."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What is wrong with an episode, as a sentence; empty if nothing was found."""

    id: int
    refusal: str


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


@dataclass(frozen=True, slots=True)
class Speeds:
    """What the engine can do, as `turns.Load` has it; measured on this policy, or one before it."""

    num_rows: int
    cache_tokens: int
    prefill_tokens_per_s: float
    batches: bytes
    """int32, little-endian."""
    token_s: bytes
    """One for each of them: float32, little-endian."""


Message = Ready | Progressed | Finished | Played | Checked | Refused | Installed | Load | Speeds
