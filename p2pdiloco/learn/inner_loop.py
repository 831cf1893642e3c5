"""One learner: AdamW steps on its own stream, and fragments that can be read and overwritten.

It never waits and knows no network. Counters say what each fragment has seen since it was last
received; Adam's moments outlive an overwrite, and the learning rate follows the cumulative steps
(Decoupled DiLoCo, arXiv 2604.21428, leaves both open).

Shapes: B sequences, S tokens, V vocabulary, n elements of a fragment.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from p2pdiloco.errors import StoreError, UserError
from p2pdiloco.optim.fragments import Fragment
from p2pdiloco.spec import InnerSpec

BF16_MIN_PARAMETERS = 5_000_000
"""Below this many parameters bf16 autocast won nothing on any machine tried."""

COSINE_FLOOR = 0.1
"""The share of the learning rate at which the cosine schedule stays."""


_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW, each of its parameter's shape."""


class Stream(Protocol):
    """Where batches come from; `text.TextStream` is one."""

    cursor: int

    def next_batch(self, batch_size: int) -> npt.NDArray[np.int64]:
        """int64 [B, S + 1]"""


@dataclass(frozen=True, slots=True)
class StepResult:
    """loss: mean nats per token; tokens: predicted tokens learnt from, 0 if the step was skipped"""

    loss: float
    tokens: int


class InnerLoop:
    """A model in training. `steps[p]` and `tokens[p]` count since fragment p was last received."""

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
        self.model = model.to(device)
        self.num_steps = 0
        self.steps = [0] * len(fragments)
        self.tokens = [0] * len(fragments)
        self._stream = stream
        self._spec = spec
        self.fragments = tuple(fragments)
        self._device = torch.device(device)
        self._bf16 = bf16
        self._fused = self._device.type in ("cpu", "cuda")
        self._parameters = dict(model.named_parameters())
        _check_plan(self.fragments, self._parameters)
        self._optimizer = _make_optimizer(self._parameters, spec, self._fused)

    @property
    def cursor(self) -> int:
        """Windows drawn from the stream so far."""
        return self._stream.cursor

    def step(self) -> StepResult:
        """One AdamW step; a step with a gradient that is not finite is skipped, not counted."""
        batch = torch.from_numpy(self._stream.next_batch(self._spec.batch_size)).to(self._device)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(self._spec, self.num_steps)
        self.num_steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            loss = next_token_loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._spec.clip_norm)
        if not math.isfinite(norm.item()):
            return StepResult(loss.item(), 0)
        self._optimizer.step()
        num_tokens = batch[:, 1:].numel()
        for p in range(len(self.fragments)):
            self.steps[p] += 1
            self.tokens[p] += num_tokens
        return StepResult(loss.item(), num_tokens)

    def read_fragment(self, p: int, out: npt.NDArray[np.float32]) -> None:
        """Copies fragment p into `out`, f32 [n]."""
        target = torch.from_numpy(_checked(out, self.fragments[p]))
        for slot in self.fragments[p].slots:
            target[slot.span].copy_(self._parameters[slot.name].detach().flatten())

    def overwrite_fragment(self, p: int, values: npt.NDArray[np.float32]) -> None:
        """Sets fragment p to `values`, f32 [n], and its counters to zero."""
        source = torch.from_numpy(_checked(values, self.fragments[p]))
        with torch.no_grad():
            for slot in self.fragments[p].slots:
                self._parameters[slot.name].copy_(source[slot.span].view(slot.shape))
        self.steps[p] = self.tokens[p] = 0

    def add_to_fragment(self, p: int, values: npt.NDArray[np.float32]) -> None:
        """Adds `values`, f32 [n], to fragment p; its counters go on."""
        change = torch.from_numpy(_checked(values, self.fragments[p]))
        with torch.no_grad():
            for slot in self.fragments[p].slots:
                parameter = self._parameters[slot.name]
                parameter.add_(change[slot.span].view(slot.shape).to(parameter.device))

    def save(self, path: Path) -> None:
        """Writes Adam's moments, the stream's cursor and the step count; not the weights.

        The old file stays until the new one is complete.
        """
        state = self._optimizer.state
        tensors = {
            f"{key}/{name}": value.detach().to("cpu", copy=True).contiguous()
            for name, parameter in self._parameters.items()
            for key, value in state.get(parameter, {}).items()
        }
        tensors["num_steps"] = torch.tensor(self.num_steps)
        tensors["cursor"] = torch.tensor(self.cursor)
        unfinished = path.with_name(path.name + ".tmp")
        try:
            save_file(tensors, unfinished)
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            unfinished.unlink(missing_ok=True)
            raise StoreError(
                f"the learner's checkpoint {path} cannot be written ({error}); free some disk space"
            ) from error

    def load(self, path: Path) -> None:
        """The inverse of `save`; the weights come by `overwrite_fragment`. Else StoreError."""
        try:
            tensors = load_file(path)
            num_steps, cursor = (int(tensors.pop(key)) for key in ("num_steps", "cursor"))
            state = self._state_from(tensors)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise StoreError(
                f"{path} is no usable checkpoint of this model's learner ({error}); remove it to"
                " start with fresh Adam moments"
            ) from error
        for parameter, moments in state.items():
            self._optimizer.state[parameter] = moments
        self.num_steps, self._stream.cursor = num_steps, cursor

    def _state_from(
        self, tensors: dict[str, torch.Tensor]
    ) -> dict[torch.nn.Parameter, dict[str, torch.Tensor]]:
        state = {}
        for name, parameter in self._parameters.items():
            if f"step/{name}" not in tensors:
                continue  # never had a gradient
            moments = {key: tensors.pop(f"{key}/{name}") for key in ("step", *_MOMENTS)}
            if any(moments[key].shape != parameter.shape for key in _MOMENTS):
                raise ValueError(f"the moments of {name} are not of shape {tuple(parameter.shape)}")
            state[parameter] = {key: moments[key].to(self._device) for key in _MOMENTS}
            # The fused AdamW counts on the parameter's device, the others on the CPU.
            state[parameter]["step"] = moments["step"].to(self._device if self._fused else "cpu")
        if tensors:
            raise ValueError(f"the model has no tensor for {min(tensors)}")
        return state


def next_token_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token; batch: int64 [B, S + 1]."""
    logits_bsv = model(input_ids=batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits_bsv.flatten(0, 1).float(), batch[:, 1:].flatten()
    )


def learning_rate_at(spec: InnerSpec, step: int) -> float:
    """Of the local step with this number, from 0: linear warm-up, then constant or cosine."""
    warmup = min(1.0, (step + 1) / spec.warmup_steps) if spec.warmup_steps else 1.0
    if spec.schedule == "constant":
        return spec.learning_rate * warmup
    progress = (step - spec.warmup_steps) / (spec.decay_steps - spec.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    return spec.learning_rate * warmup * (COSINE_FLOOR + (1 - COSINE_FLOOR) * cosine)


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


def _make_optimizer(
    parameters: dict[str, torch.nn.Parameter], spec: InnerSpec, fused: bool
) -> torch.optim.AdamW:
    """Weight decay applies to matrices only, not to norms and biases."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=spec.learning_rate,
        betas=spec.betas,
        fused=fused,
    )


def _check_plan(fragments: tuple[Fragment, ...], parameters: dict[str, torch.nn.Parameter]) -> None:
    planned = {slot.name: slot.shape for fragment in fragments for slot in fragment.slots}
    actual = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if planned != actual:
        names = sorted(
            name for name in planned.keys() | actual.keys() if planned.get(name) != actual.get(name)
        )
        raise UserError(
            f"the fragments were planned for another model: {len(names)} tensors differ, the first"
            f" is {names[0]} ({planned.get(names[0])} planned, {actual.get(names[0])} in the model)"
        )


def _checked(values: npt.NDArray[np.float32], fragment: Fragment) -> npt.NDArray[np.float32]:
    if values.shape != (fragment.size,) or values.dtype != np.float32:
        raise ValueError(
            f"fragment {fragment.index} is float32 [{fragment.size}], got {values.dtype}"
            f" {list(values.shape)}"
        )
    return values
