"""The run spec: what a run trains and how, as its owner decides it.

`spec_file.py` reads it from TOML; `signed_spec.py` is what travels. Without genesis weights it is a
draft, with them a run.
"""

import json
import math
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from p2pdiloco.protocol.turns import HELD_MAX
from p2pdiloco.protocol.wire import FRAGMENTS_MAX, PROTOCOL_VERSION

TRAJECTORY_TOKENS_MAX = 1 << 16
"""A packed trajectory, up to 12 bytes per token, must fit one message of 1 MiB."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Share = Annotated[float, Field(ge=0, lt=1)]


def _finite(table: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Numbers deep in a table are not those of fields, of which pydantic sees to it."""
    try:
        json.dumps(table, allow_nan=False)
    except ValueError:
        raise ValueError("numbers must be finite, got NaN or infinity") from None
    return table


_ModelConfig: TypeAlias = Annotated[dict[str, JsonValue], AfterValidator(_finite)]


class _Section(BaseModel):
    """One table of the spec: frozen, no unknown keys, no conversions ("3" is not 3), no NaN."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # `p2pdiloco new` writes them as the file's comments
    )


class ModelSpec(_Section):
    """Which model: exactly one of a preset, a transformers config, a checkpoint to start from."""

    preset: Literal["tiny", "small"] | None = None
    """Llamas over 256 byte tokens. `tiny`: 128 wide, 5 layers, 4 heads, 1.02 M parameters; `small`:
    384 wide, 6 layers, 6 heads, 10.7 M parameters."""
    config: _ModelConfig | None = None
    """The content of a transformers config.json, with its `model_type`."""
    checkpoint: str | None = None
    """A directory in Hugging Face format, or a name on the hub; its weights become the genesis."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"set exactly one of preset, config, checkpoint; got {got}")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError('a config needs its model_type, for example model_type = "llama"')
        return self


class DataSpec(_Section):
    """Which text. Every node draws its own deterministic stream from it."""

    source: Literal["kjv", "files", "datasets"] = "kjv"
    """`kjv`: the King James Bible, which ships in a package; `files`: `paths` on each node's disk;
    `datasets`: `dataset` through the `datasets` library."""
    paths: tuple[str, ...] = ()
    """Text files or directories of them, for source = "files"."""
    dataset: str | None = None
    """A name on the hub or a local directory, for source = "datasets"."""
    dataset_config: str | None = None
    """Which configuration of the dataset, where it has several."""
    split: str = "train"
    text_column: str = "text"
    tokenizer: str = "bytes"
    """`bytes`: one token per byte; else a Hugging Face tokenizer: a directory or a hub name."""
    sequence_length: int = Field(default=128, ge=8, le=1 << 20)
    """Tokens per sequence, in training, evaluation and sampling alike; of a whole trajectory where
    there is an rl table."""

    @model_validator(mode="after")
    def _source_has_what_it_needs(self) -> Self:
        if (self.source == "files") != bool(self.paths):
            raise ValueError('paths and source = "files" belong together: set both or neither')
        if (self.source == "datasets") != (self.dataset is not None):
            raise ValueError('dataset and source = "datasets" belong together: set both or neither')
        return self


class InnerSpec(_Section):
    """The inner optimizer, AdamW, as every learner runs it between merges."""

    learning_rate: float = Field(default=3e-3, gt=0, le=1)
    """The highest: reached after the warm-up."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of Adam's first and second moment."""
    weight_decay: float = Field(default=0.1, ge=0, le=1)
    """Decoupled from the gradient; matrices only."""
    warmup_steps: int = Field(default=20, ge=0)
    """Local steps of linear warm-up; the learning rate follows the node's own cumulative steps."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What comes after the warm-up."""
    decay_steps: int = Field(default=4000, ge=1)
    """Local steps after which `cosine` has come down to a tenth of the learning rate, and stays."""
    batch_size: int = Field(default=4, ge=1)
    """Sequences per step and node."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""

    @model_validator(mode="after")
    def _decay_after_warmup(self) -> Self:
        if self.schedule == "cosine" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps must be larger than warmup_steps = {self.warmup_steps}, "
                f"got {self.decay_steps}"
            )
        return self


class OuterSpec(_Section):
    """The outer optimizer, SGD with Nesterov momentum, as every replica applies it to a merge."""

    learning_rate: float = Field(default=0.5, gt=0, le=10)
    momentum: Share = 0.3
    """0 merges by plain steps."""


class SyncSpec(_Section):
    """When and how learners are merged (Decoupled DiLoCo; the symbols are the paper's)."""

    strategy: Literal["quorum", "gossip", "factored", "diloco"] = "quorum"
    """`quorum`: a synchronizer, which rotates, merges what a quorum of learners offers; `gossip`:
    there is none, every node mixes its parameters with partners (`mix`) and makes its own outer
    step; `factored`: so, and the step is on the outer gradients of all who have theirs when the
    quorum is met and the grace window over, for which learners wait; `diloco`: all merge at once
    and wait for each other, to compare with."""
    inner_steps: int = Field(default=12, ge=1, le=1_000_000)
    """H: inner steps of the median learner between two merges of the same fragment."""
    num_fragments: int = Field(default=6, ge=1, le=FRAGMENTS_MAX)
    """P: fragments of the model, merged one after the other, one every H/P steps."""
    overlap_steps: int = Field(default=2, ge=1)
    """tau: inner steps behind which one merge may hide; also the most rounds in flight."""
    quorum: int = Field(default=1, ge=1)
    """K: contributions without which a round does not close. For factored: outer gradients, one's
    own among them, after which a learner waits for the grace window alone."""
    grace_factor: float = Field(default=0.8, gt=0, lt=1)
    """gamma: the part of the measured slack that a round may wait for more than the quorum."""
    merge: Literal["rda", "mean"] = "rda"
    """`rda`: average radius and direction apart; `mean`: plain average (embeddings always)."""
    wire: Literal["float32", "bf16", "int8", "int4"] = "int8"
    """What an outer gradient becomes on its way, before zstd."""
    term_merges: int = Field(default=4, ge=1, le=10_000)
    """Merges after which the synchronizers rotate."""
    mix: Literal["GlobalM1", "GlobalM1LocalM2", "pairwise", "hypercube", "exponential", "ring"] = (
        "hypercube"
    )
    """For gossip and factored: with whom a node mixes its parameters while it trains. `GlobalM1`:
    everybody (of more than 16, groups of so many); `GlobalM1LocalM2`: so, and learners then wait
    for the outer gradients of a group; `pairwise`: one, drawn anew in each round; `hypercube`: one,
    in turns; `exponential`: two, in turns; `ring`: the same two."""
    gossip_below_quorum: bool = False
    """For quorum: whether nodes that are fewer than the quorum mix their learners' values by gossip
    until more are back. Nothing is merged meanwhile, and no token is lost."""
    mix_group: int = Field(default=2, ge=2, le=64)
    """For GlobalM1LocalM2: members of a group, drawn anew in each round."""
    mix2_tensors: Literal["all", "ends"] = "all"
    """For GlobalM1LocalM2 and factored: of which tensors the outer gradients are waited for.
    `ends`: embedding, head and the two shallowest layers, which the paper found to suffice."""
    mix_wire: Literal["float32", "bf16", "int8", "int4"] = "int8"
    """For gossip and factored: what parameters become on their way; with partners that return,
    their change."""
    pacing: Literal[
        "fixed", "tokens", "load", "pressure-gate", "workload-aware", "calibrated", "random"
    ] = "fixed"
    """When, within the slack, a merge comes: `fixed` at once; `calibrated` when it disturbs what
    else a machine serves least, as measured there; `tokens`, `load`, `pressure-gate` and
    `workload-aware` as published; `random`, with which the others are compared."""
    pacing_tokens: int = Field(default=1_000_000, ge=1)
    """For pacing `tokens`: what a learner trains on before it asks for no more time."""
    slack_steps: int = Field(default=0, ge=0)
    """Inner steps by which a merge may be put off where pacing is not fixed. A period then has
    between inner_steps - slack_steps and inner_steps + slack_steps, and inner_steps on average."""

    @model_validator(mode="after")
    def _strategy_fits(self) -> Self:
        if self.strategy == "diloco" and self.num_fragments != 1:
            raise ValueError(
                f"num_fragments must be 1 for diloco, which merges the whole model at once, "
                f"got {self.num_fragments}"
            )
        if self.strategy == "factored" and self.mix == "GlobalM1LocalM2":
            raise ValueError(
                "mix must name one mix for factored, whose other is of the quorum, got "
                "GlobalM1LocalM2; GlobalM1 is its first half"
            )
        if self.strategy != "quorum" and self.pacing != "fixed":
            raise ValueError(
                f"pacing must be fixed for {self.strategy}, got {self.pacing}; quorum can be paced"
            )
        return self

    @property
    def gossips(self) -> bool:
        """Whether each node holds a state of its own, and there is no synchronizer."""
        return self.strategy in ("gossip", "factored")

    @model_validator(mode="after")
    def _slack_fits(self) -> Self:
        if self.slack_steps >= self.inner_steps:
            raise ValueError(
                f"slack_steps must be smaller than inner_steps = {self.inner_steps}, "
                f"got {self.slack_steps}"
            )
        if (self.pacing == "fixed") != (self.slack_steps == 0):
            raise ValueError(
                f"slack_steps must be {'0' if self.pacing == 'fixed' else 'above 0'} for pacing "
                f"{self.pacing}, got {self.slack_steps}"
            )
        return self

    @model_validator(mode="after")
    def _periods_fit(self) -> Self:
        if self.num_fragments > self.inner_steps:
            raise ValueError(
                f"num_fragments must be at most inner_steps = {self.inner_steps} (one fragment is "
                f"launched every inner_steps/num_fragments steps), got {self.num_fragments}"
            )
        if self.overlap_steps >= self.inner_steps:
            raise ValueError(
                f"overlap_steps must be smaller than inner_steps = {self.inner_steps}, "
                f"got {self.overlap_steps}"
            )
        return self


class RlSpec(_Section):
    """Reinforcement learning in place of text: what is rolled out, and how it is learnt from.

    Step s is rolled out by the whole swarm with version s of the model; what comes of it is shared
    out, each learner makes inner_steps steps of its share, and their merge is version s + 1.
    """

    environment: str = Field(
        default="guess",
        pattern=r"^(guess|(sums|calculator)(:[1-9][0-9]{0,7})?|reasoning-gym:[a-z0-9_]{1,64})$",
    )
    """`guess`: find a number below ten, told more or less; `sums`: add two numbers below a hundred;
    `calculator`: add two numbers below ten thousand, with a tool that does (`rl/tools.py`);
    `sums:9`, `calculator:99`: of up to that; `reasoning-gym:NAME`: questions of that generator of
    the package."""
    num_groups: int = Field(default=8, ge=1, le=HELD_MAX)
    """Tasks of a step."""
    group_size: int = Field(default=16, ge=2, le=HELD_MAX)
    """Trajectories of each task: their rewards are compared with each other."""
    turns_max: int = Field(default=4, ge=1, le=1024)
    """Answers that a trajectory may have."""
    answer_tokens_max: int = Field(default=1, ge=1, le=1 << 16)
    """Of one answer, which a line break ends sooner. A number below ten is one token of bytes."""
    temperature: float = Field(default=1.0, ge=0.001, le=2)
    """At which answers are drawn. Logits are divided by it, in float32 where they are learnt from:
    far below, that overflows."""
    variant: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """How the loss is averaged, how far up it is clipped (0.28 in dapo, else 0.2), and whether
    advantages are divided by their deviation (not in dr_grpo)."""
    kl_weight: float = Field(default=0.0, ge=0, le=10)
    """Of the KL term that holds the policy to an older one: 0.04 in GRPO's paper, none in those of
    dapo and dr_grpo. Costs a forward pass and a copy of the model."""
    reference_steps: int = Field(default=16, ge=1)
    """Merges after which that older one is replaced by the newest."""
    lag_max: int = Field(default=1, ge=0, le=64)
    """Merges by which the model that learns may be ahead of the one that was rolled out. What is
    older is dropped; the importance ratio corrects the rest."""
    replayed_share: float = Field(default=0.05, ge=0, le=1)
    """Of what peers rolled out, whose tokens are computed again by whoever takes it in. All of it
    has its story checked."""

    @model_validator(mode="after")
    def _step_is_bounded(self) -> Self:
        if self.num_groups * self.group_size > HELD_MAX:
            raise ValueError(
                f"a step has at most {HELD_MAX} trajectories, got num_groups {self.num_groups} * "
                f"group_size {self.group_size}"
            )
        return self


class LimitsSpec(_Section):
    """Bounds that all nodes of a run must share."""

    max_contributors: int = Field(default=64, ge=1, le=64)
    """Contributions that one merge admits; they are listed in its record, whose size is bounded."""


class TensorLayout(_Section):
    """A trained tensor of the model: with all of them every node can tell the fragments apart."""

    name: str = Field(min_length=1, max_length=256)
    shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(max_length=8)
    is_embedding: bool = False


class GenesisSpec(_Section):
    """The weights everybody starts from; written by `p2pdiloco bootstrap`, never by hand."""

    num_parameters: int = Field(ge=1)
    tensors: tuple[TensorLayout, ...] = Field(min_length=1)
    """Their layout, so that a daemon needs no model code to follow the run."""
    config: _ModelConfig | None = None
    """Of the checkpoint that the run started from: only the owner needs the checkpoint itself."""
    state_digests: tuple[Digest, ...]
    """Of each fragment's version 0, in fragment order."""

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        counted = sum(math.prod(tensor.shape) for tensor in self.tensors)
        if counted != self.num_parameters:
            raise ValueError(f"num_parameters must be {counted}, got {self.num_parameters}")
        return self


class RunSpec(_Section):
    """The whole spec. Without `genesis` it is a draft, with it a run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Lower-case letters, digits and dashes; also names the directory of a node."""
    seed: int = Field(default=0, ge=0, lt=1 << 32)
    """Of the first weights and of every node's order through the text."""
    protocol_version: int = Field(default=PROTOCOL_VERSION, ge=1)
    model: ModelSpec = ModelSpec(preset="tiny")
    data: DataSpec = DataSpec()
    inner: InnerSpec = InnerSpec()
    outer: OuterSpec = OuterSpec()
    sync: SyncSpec = SyncSpec()
    rl: RlSpec | None = None
    limits: LimitsSpec = LimitsSpec()
    genesis: GenesisSpec | None = None

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.sync.quorum > self.limits.max_contributors:
            raise ValueError(
                f"sync.quorum must be at most limits.max_contributors = "
                f"{self.limits.max_contributors}, got {self.sync.quorum}"
            )
        if self.genesis and len(self.genesis.state_digests) != self.sync.num_fragments:
            raise ValueError(
                f"genesis.state_digests must name {self.sync.num_fragments} fragments, "
                f"got {len(self.genesis.state_digests)}"
            )
        return self

    @model_validator(mode="after")
    def _rl_fits(self) -> Self:
        if self.rl is None:
            return self
        if self.sync.strategy != "quorum":
            raise ValueError(f"rl needs sync.strategy quorum, got {self.sync.strategy}")
        if self.sync.num_fragments != 1:
            raise ValueError(
                "rl needs sync.num_fragments 1, because a step is rolled out with one version of "
                f"the whole model, got {self.sync.num_fragments}"
            )
        if self.sync.pacing != "fixed" or self.sync.gossip_below_quorum:
            raise ValueError("rl needs sync.pacing fixed and no sync.gossip_below_quorum")
        if self.data.sequence_length > TRAJECTORY_TOKENS_MAX:
            raise ValueError(
                f"rl needs data.sequence_length, of a whole trajectory, to be at most "
                f"{TRAJECTORY_TOKENS_MAX}, got {self.data.sequence_length}"
            )
        if self.rl.answer_tokens_max >= self.data.sequence_length:
            raise ValueError(
                f"rl.answer_tokens_max must be smaller than data.sequence_length = "
                f"{self.data.sequence_length}, which a whole trajectory may have, "
                f"got {self.rl.answer_tokens_max}"
            )
        return self

    @property
    def architecture(self) -> ModelSpec:
        """What a node builds to train or export: never a checkpoint, whose weights are genesis."""
        config = self.genesis.config if self.genesis else None
        return ModelSpec(config=config) if config is not None else self.model

    def with_genesis(self, genesis: GenesisSpec) -> "RunSpec":
        """The draft completed to a run."""
        return RunSpec(**{**dict(self), "genesis": genesis})
