"""What the wire costs: bytes, speed and error of each format on a real outer gradient.

    python -m benchmarks.codec            the 1M model; "small" after it for 10.7M parameters

The gradient is genesis minus the weights after 24 AdamW steps on the King James Bible, one learner,
all tensors in one vector. Speeds are megabytes of float32 per second of CPU time, the best of
`REPEATS`; the error is the L2 norm of the difference over the norm of the gradient.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch

from p2pdiloco.compress.codec import decode, encode
from p2pdiloco.compress.quantize import WireFormat
from p2pdiloco.learn.inner_loop import InnerLoop
from p2pdiloco.learn.models import build_model, embedding_names, parameter_shapes
from p2pdiloco.learn.text import TextStream, open_text
from p2pdiloco.optim.fragments import plan_fragments
from p2pdiloco.spec import DataSpec, InnerSpec, ModelSpec

RESULTS = Path(__file__).parent / "results" / "codec.json"
INNER_STEPS = 24
REPEATS = 7

Result = TypeVar("Result")


def main() -> None:
    torch.set_num_threads(1)
    preset = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    gradient = outer_gradient(ModelSpec.model_validate({"preset": preset}))
    rows = {wire: measure(gradient, wire) for wire in get_args(WireFormat)}
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    stored[preset] = {"parameters": gradient.size, "cpus": os.cpu_count(), "formats": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
    print(report(gradient.size, rows))


def outer_gradient(spec: ModelSpec) -> npt.NDArray[np.float32]:
    """float32 [number of parameters]"""
    data = DataSpec()
    model = build_model(spec, seed=0, sequence_length=data.sequence_length)
    (fragment,) = plan_fragments(parameter_shapes(model), 1, embedding_names(model))
    stream = TextStream(open_text(data), data.sequence_length, seed=0, node_key="benchmark")
    loop = InnerLoop(model, stream, InnerSpec(), [fragment])
    before, after = np.empty(fragment.size, np.float32), np.empty(fragment.size, np.float32)
    loop.read_fragment(0, before)
    for _ in range(INNER_STEPS):
        loop.step()
    loop.read_fragment(0, after)
    return before - after


def measure(gradient: npt.NDArray[np.float32], wire: WireFormat) -> dict[str, float]:
    payload, encode_s = best_of(lambda: encode(gradient, wire))
    restored, decode_s = best_of(lambda: decode(payload, gradient.size, wire))
    megabytes = gradient.nbytes / 1e6
    return {
        "bytes_share": len(payload) / gradient.nbytes,
        "bits_per_value": len(payload) * 8 / gradient.size,
        "encode_mb_s": megabytes / encode_s,
        "decode_mb_s": megabytes / decode_s,
        "relative_error": float(np.linalg.norm(restored - gradient) / np.linalg.norm(gradient)),
    }


def best_of(work: Callable[[], Result]) -> tuple[Result, float]:
    """What the work returns, and the CPU seconds of its fastest run."""
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        result = work()
        seconds.append(time.process_time() - start)
    return result, min(seconds)


def report(num_values: int, rows: dict[WireFormat, dict[str, float]]) -> str:
    lines = [
        f"outer gradient of {num_values:,} parameters after {INNER_STEPS} steps, one thread",
        "| wire | bits/value | of float32 | encode MB/s | decode MB/s | relative L2 error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for wire, row in rows.items():
        lines.append(
            f"| {wire} | {row['bits_per_value']:.2f} | {row['bytes_share']:.1%} "
            f"| {row['encode_mb_s']:.0f} | {row['decode_mb_s']:.0f} | {row['relative_error']:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
