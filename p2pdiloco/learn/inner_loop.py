"""A learner of text: AdamW steps on its own stream.

Shapes: B sequences, S tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from p2pdiloco.learn.local_model import LocalModel, StepResult
from p2pdiloco.optim.fragments import Fragment
from p2pdiloco.spec import InnerSpec

BF16_MIN_PARAMETERS = 5_000_000
"""Below this many parameters bf16 autocast won nothing on any machine tried."""


class Stream(Protocol):
    """Where batches come from; `text.TextStream` is one."""

    cursor: int

    def next_batch(self, batch_size: int) -> npt.NDArray[np.int64]:
        """int64 [B, S + 1]"""


class InnerLoop(LocalModel):
    """It never waits and knows no network."""

    def __init__(
        self,
        model: torch.nn.Module,
        stream: Stream,
        spec: InnerSpec,
        fragments: Sequence[Fragment],
        device: torch.device | str = "cpu",
        *,
        bf16: bool = False,
    ) -> None:
        super().__init__(model, spec, fragments, device)
        self._stream = stream
        self._bf16 = bf16

    @property
    def cursor(self) -> int:
        """Windows drawn from the stream so far."""
        return self._stream.cursor

    @cursor.setter
    def cursor(self, value: int) -> None:
        self._stream.cursor = value

    def step(self) -> StepResult:
        """One AdamW step; a step with a gradient that is not finite is skipped, not counted."""
        batch = torch.from_numpy(self._stream.next_batch(self._spec.batch_size)).to(self._device)
        self._begin_step()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            loss = next_token_loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return StepResult(loss.item(), self._end_step(batch[:, 1:].numel()))


def next_token_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token; batch: int64 [B, S + 1]."""
    logits_bsv = model(input_ids=batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits_bsv.flatten(0, 1).float(), batch[:, 1:].flatten()
    )


def bf16_is_faster(
    num_parameters: int, device: torch.device | str, clock: Callable[[], float]
) -> bool:
    """Whether to train under bf16 autocast, measured on this device; `clock` gives seconds.

    Models below BF16_MIN_PARAMETERS stay in float32. A win must be clear (a fifth), since bf16
    costs precision.
    """
    if num_parameters < BF16_MIN_PARAMETERS or torch.device(device).type == "mps":
        return False
    probe = torch.nn.Linear(1024, 1024, device=device)
    inputs = torch.ones(1024, 1024, device=device)

    def seconds(enabled: bool) -> float:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=enabled):
            probe(inputs).sum().item()
            start = clock()
            for _ in range(4):
                probe(inputs).sum().item()
            return clock() - start

    return 1.2 * seconds(True) < seconds(False)
