"""What the nodes left on disk: their states' digests, the model's loss before and after, a sample.

A child process, because it loads torch and the model, and the supervisor only watches.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from p2pdiloco.optim.fragments import fragments_of
from p2pdiloco.optim.merge import norm
from p2pdiloco.protocol.lineage import unpack_record
from p2pdiloco.spec import ModelSpec, RunSpec
from p2pdiloco_daemon.bound import bound_command
from p2pdiloco_daemon.genesis import genesis_path, read_signed_spec
from p2pdiloco_daemon.replica import FragmentState, Vector, unpack_state
from p2pdiloco_daemon.store import Store

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

    loss_before: float
    """Nats per byte of the whole held-out text, with the genesis weights."""
    loss_after: float
    """The same, with the exported checkpoint."""
    sample: str
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
    from p2pdiloco_daemon.export import newest_states, sample_checkpoint, write_checkpoint

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
        loss_before, loss_after = _losses(spec, (before, request.checkpoint))
    continued = sample_checkpoint(request.checkpoint, _PROMPT, _SAMPLE_TOKENS, spec.seed)
    return Findings(
        loss_before=loss_before,
        loss_after=loss_after,
        sample=_PROMPT + continued,
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


def _losses(spec: RunSpec, checkpoints: Sequence[Path]) -> list[float]:
    """Nats per byte of the whole held-out text with each of the models."""
    from p2pdiloco.learn.evaluate import held_out_loss
    from p2pdiloco.learn.models import build_model
    from p2pdiloco.learn.text import BLOCK_BYTES, open_text

    text, length = open_text(spec.data), spec.data.sequence_length
    # as many windows as lie side by side in a block: every token counts once
    windows_per_block = max(1, BLOCK_BYTES // length)
    loaded = (build_model(ModelSpec(checkpoint=str(path)), 0, length) for path in checkpoints)
    return [held_out_loss(model, text, length, windows_per_block) for model in loaded]


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
