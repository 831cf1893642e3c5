"""What the nodes left on disk: their states' digests, how good the model was before and is now, a
sample.

A child process, because it loads torch and the model, and the supervisor only watches.
"""

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from pydantic import BaseModel, ConfigDict

from p2pdiloco.optim.fragments import fragments_of
from p2pdiloco.optim.merge import norm
from p2pdiloco.protocol.lineage import unpack_record
from p2pdiloco.spec import ModelSpec, RunSpec
from p2pdiloco_daemon.children.bound import bound_command
from p2pdiloco_daemon.genesis import genesis_path, read_signed_spec
from p2pdiloco_daemon.storage.replica import FragmentState, Vector, unpack_state
from p2pdiloco_daemon.storage.store import Store

if TYPE_CHECKING:
    from p2pdiloco.rl.checks import Rulebook
    from p2pdiloco.rl.episodes import Episode

_PROMPT = "In the beginning "
_SAMPLE_TOKENS = 300


class Request(BaseModel):
    """What the child is asked."""

    model_config = ConfigDict(frozen=True)

    bootstrap: Path
    nodes: dict[str, Path]
    """Directories of the nodes to compare; the first one's model is exported and evaluated."""
    checkpoint: Path
    """Where to export to; what is there is replaced."""


class Findings(BaseModel):
    """What it answers."""

    model_config = ConfigDict(frozen=True)

    loss_before: float | None = None
    """Nats per byte of the whole held-out text, with the genesis weights; None in an rl run."""
    loss_after: float | None = None
    """The same, with the exported checkpoint."""
    reward_before: float | None = None
    """Mean of tasks that no step had, with the genesis weights; None if the run reads text."""
    reward_after: float | None = None
    """The same, with the exported checkpoint."""
    sample: str
    """What the model writes; of an rl run a whole trajectory."""
    checkpoint: str
    state_digests: dict[str, list[str]]
    """Per node, of anchor and momentum of each fragment, computed anew from their values."""
    disagreement: float
    """Of the nodes' anchors: mean distance of two, as a share of their length; 0 for replicas."""
    tokens_in_records: int
    """Merged, by the first node's records: what all contributors' ledgers must sum to."""


async def evaluate(request: Request) -> Findings:
    """Runs the child; it is ended when this is cancelled."""
    child = await asyncio.create_subprocess_exec(
        *bound_command("p2pdiloco_daemon.demo.evaluation"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # more threads are slower on a busy machine
    )
    try:
        output, complaint = await child.communicate(request.model_dump_json().encode())
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        raise RuntimeError(f"the evaluation failed:\n{complaint.decode(errors='replace')}")
    return Findings.model_validate_json(output)


def examine(request: Request) -> Findings:
    """What the child does. Imports torch."""
    from p2pdiloco_daemon.export import newest_states, write_checkpoint

    signed = read_signed_spec(request.bootstrap)
    assert signed, "the bootstrap peer has run"
    spec, fragments = signed.spec, fragments_of(signed.spec)
    states = {
        name: newest_states(spec, fragments, directory) for name, directory in request.nodes.items()
    }
    shutil.rmtree(request.checkpoint, ignore_errors=True)
    newest = next(iter(states.values()))
    write_checkpoint(spec, fragments, [state.anchor for state in newest], request.checkpoint)
    with tempfile.TemporaryDirectory() as scratch:
        before = Path(scratch) / "genesis"
        write_checkpoint(spec, fragments, _genesis_anchors(request.bootstrap, spec), before)
        checkpoints = before, request.checkpoint
        scores = _rewards(spec, checkpoints) if spec.rl else _losses(spec, checkpoints)
    return Findings(
        **scores,
        checkpoint=str(request.checkpoint),
        state_digests={name: [state.digest for state in found] for name, found in states.items()},
        disagreement=_disagreement(list(states.values())),
        tokens_in_records=_tokens_in_records(next(iter(request.nodes.values())), len(fragments)),
    )


def _disagreement(nodes: Sequence[Sequence[FragmentState]]) -> float:
    from p2pdiloco.learn.disagreement import parameter_disagreement

    vectors = [np.concatenate([state.anchor for state in states]) for states in nodes]
    length = norm(vectors[0])
    return parameter_disagreement(vectors) / length if length else 0.0


def _tokens_in_records(directory: Path, num_fragments: int) -> int:
    total = 0
    with Store(directory, num_fragments, read_only=True) as store:
        for fragment in range(num_fragments):
            stored = store.load(fragment)
            assert stored, "its state was read before"
            record = stored.merges[-1].record if stored.merges else stored.record
            total += unpack_record(record).tokens_total if record else 0
    return total


class _Scores(TypedDict, total=False):
    loss_before: float
    loss_after: float
    reward_before: float
    reward_after: float
    sample: str


def _losses(spec: RunSpec, checkpoints: tuple[Path, Path]) -> _Scores:
    """Nats per byte of the whole held-out text with each of the models."""
    from p2pdiloco.learn.evaluate import held_out_loss
    from p2pdiloco.learn.models import build_model
    from p2pdiloco.learn.text import BLOCK_BYTES, open_text
    from p2pdiloco_daemon.export import sample_checkpoint

    text, length = open_text(spec.data), spec.data.sequence_length
    # as many windows as lie side by side in a block: every token counts once
    windows_per_block = max(1, BLOCK_BYTES // length)
    loaded = (build_model(ModelSpec(checkpoint=str(path)), 0, length) for path in checkpoints)
    before, after = (held_out_loss(model, text, length, windows_per_block) for model in loaded)
    continued = sample_checkpoint(checkpoints[1], _PROMPT, _SAMPLE_TOKENS, spec.seed)
    return {"loss_before": before, "loss_after": after, "sample": _PROMPT + continued}


def _rewards(spec: RunSpec, checkpoints: tuple[Path, Path]) -> _Scores:
    """Mean of as many tasks as a step has trajectories, with each of the models."""
    from p2pdiloco.rl.rules import rulebook_of

    rules = rulebook_of(spec, "evaluation", 0)
    tasks = replace(rules.tasks, num_groups=rules.tasks.num_trajectories, group_size=1)
    rules = replace(rules, tasks=tasks)
    before, after = (_played(spec, path, rules) for path in checkpoints)
    return {
        "reward_before": fmean(episode.reward for episode in before),
        "reward_after": fmean(episode.reward for episode in after),
        "sample": rules.tokenizer.decode(after[0].tokens),
    }


def _played(spec: RunSpec, checkpoint: Path, rules: "Rulebook") -> "list[Episode]":
    from p2pdiloco.learn.models import build_model
    from p2pdiloco.rl.alone import play_step
    from p2pdiloco.rollout.engine import Engine, Limits

    model = build_model(ModelSpec(checkpoint=str(checkpoint)), 0, spec.data.sequence_length)
    limits = Limits(num_waiting_max=rules.tasks.num_trajectories)
    return play_step(Engine(model.eval(), limits, time.monotonic), rules)


def _genesis_anchors(directory: Path, spec: RunSpec) -> list[Vector]:
    assert spec.genesis, "a verified spec is complete"
    return [
        unpack_state(
            bytearray(genesis_path(directory, fragment.index).read_bytes()),
            fragment.index,
            fragment.size,
            digest,
        ).anchor
        for fragment, digest in zip(fragments_of(spec), spec.genesis.state_digests, strict=True)
    ]


def _main() -> int:
    request = Request.model_validate_json(sys.stdin.buffer.read())
    sys.stdout.write(examine(request).model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(_main())
