"""What the nodes left on disk: their anchors' digests, the model's loss before and after, a sample.

A child process, because it loads torch and the model, and the supervisor only watches.
"""

import asyncio
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

_SAMPLE_PROMPT = "In the beginning "
_SAMPLE_TOKENS = 300


class Request(BaseModel):
    """What the child is asked."""

    model_config = ConfigDict(frozen=True)

    bootstrap: Path
    nodes: dict[str, Path]
    """Directories of the nodes to compare; the first one's model is evaluated and exported."""
    checkpoint: Path
    """Where to export to; what is there is replaced."""


class Findings(BaseModel):
    """What it answers."""

    model_config = ConfigDict(frozen=True)

    loss_before: float
    """Nats per byte of the whole held-out text, with the genesis weights."""
    loss_after: float
    sample: str
    checkpoint: str
    state_digests: dict[str, list[str]]
    """Per node, of anchor and momentum of each fragment, computed anew from their values."""


async def evaluate(request: Request) -> Findings:
    """Runs the child; it is ended when this is cancelled."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "p2pdiloco_daemon.demo.evaluation"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, complaint = await child.communicate(request.model_dump_json().encode())
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode != 0:
        raise RuntimeError(f"the evaluation failed:\n{complaint.decode(errors='replace')}")
    return Findings.model_validate_json(output)
