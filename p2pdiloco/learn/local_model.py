"""A model in training, as every kind of learner has it: AdamW, and fragments that can be read and
overwritten.

Counters say what each fragment has seen since it was last received; Adam's moments outlive an
overwrite, and the learning rate follows the cumulative steps (Decoupled DiLoCo, arXiv 2604.21428,
leaves both open). What a step learns from is the subclass's: text (`inner_loop.py`) or episodes
(`p2pdiloco.rl.loop`).

Shapes: n elements of a fragment.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from p2pdiloco.errors import StoreError, UserError
from p2pdiloco.optim.fragments import Fragment
from p2pdiloco.spec import InnerSpec

COSINE_FLOOR = 0.1
"""The share of the learning rate at which the cosine schedule stays."""


_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW, each of its parameter's shape."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """loss: what the step minimizes, of text mean nats per token; tokens: predicted ones that the
    step was made of, 0 if it was skipped"""

    loss: float
    tokens: int


class LocalModel:
    """`steps[p]` and `tokens[p]` count since fragment p was last received."""

    cursor: int = 0
    """Where a subclass that reads a stream is in it; saved with the rest."""

    def __init__(
        self,
        model: torch.nn.Module,
        spec: InnerSpec,
        fragments: Sequence[Fragment],
        device: torch.device | str = "cpu",
    ) -> None:
        self.model = model.to(device)
        self.num_steps = 0
        self.steps = [0] * len(fragments)
        self.tokens = [0] * len(fragments)
        self.fragments = tuple(fragments)
        self._spec = spec
        self._device = torch.device(device)
        self._fused = self._device.type in ("cpu", "cuda")
        self._parameters = dict(model.named_parameters())
        _check_plan(self.fragments, self._parameters)
        self._optimizer = _make_optimizer(self._parameters, spec, self._fused)

    def _begin_step(self) -> None:
        """Before the gradient is made."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(self._spec, self.num_steps)
        self.num_steps += 1
        self._optimizer.zero_grad(set_to_none=True)

    def _end_step(self, num_tokens: int) -> int:
        """Follows the gradient; returns the tokens that count. A step with a gradient that is not
        finite is skipped, not counted."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._spec.clip_norm)
        if not math.isfinite(norm.item()):
            return 0
        self._optimizer.step()
        self._count(num_tokens)
        return num_tokens

    def _count(self, num_tokens: int) -> None:
        for p in range(len(self.fragments)):
            self.steps[p] += 1
            self.tokens[p] += num_tokens

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
        """Writes Adam's moments, the step count and the cursor; not the weights.

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
        self.num_steps, self.cursor = num_steps, cursor

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


def learning_rate_at(spec: InnerSpec, step: int) -> float:
    """Of the local step with this number, from 0: linear warm-up, then constant or cosine."""
    warmup = min(1.0, (step + 1) / spec.warmup_steps) if spec.warmup_steps else 1.0
    if spec.schedule == "constant":
        return spec.learning_rate * warmup
    progress = (step - spec.warmup_steps) / (spec.decay_steps - spec.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    return spec.learning_rate * warmup * (COSINE_FLOOR + (1 - COSINE_FLOOR) * cosine)


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
