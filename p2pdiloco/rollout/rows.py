"""The working key-value cache: one row of slots per running sequence.

Slot p of a row holds the token at position p, so a row is valid up to its sequence's length and has
no holes: the slots of a rejected draft lie beyond the length and are overwritten. Rows are dense:
when a sequence leaves, the last row moves into its place, and a step attends over one span of rows
without gathering. All rows are as long as the longest needs; the geometry changes when it must.

Shapes: K key-value heads, D head size, B slots of a stored span, C layers.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

LENGTH_STEP = 64
"""Row lengths are multiples of this, so that sequences of similar length share a geometry."""


class Rows:
    """Keys and values [rows, K, slots, D] of each layer. Unused slots are finite, never NaN."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        heads = config.num_attention_heads
        self._num_heads: int = getattr(config, "num_key_value_heads", None) or heads
        self._head_size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._num_layers: int = config.num_hidden_layers
        parameter = next(model.parameters())
        self.dtype: torch.dtype = parameter.dtype
        self.device: torch.device = parameter.device
        self.num_rows = self.length = 0
        self.layers = self._allocated(0, 0)

    @property
    def slot_bytes(self) -> int:
        """Memory of one token's keys and values in all layers."""
        scalars = 2 * self._num_layers * self._num_heads * self._head_size
        return scalars * self.dtype.itemsize

    @property
    def num_slots(self) -> int:
        """Slots allocated now."""
        return self.num_rows * self.length

    def resize(self, num_rows: int, length: int) -> None:
        """Takes this geometry; what lies within both the old and the new one stays."""
        kept_rows, kept_length = min(num_rows, self.num_rows), min(length, self.length)
        for index, (keys, values) in enumerate(self.layers):
            self.layers[index] = (
                self._resized(keys, num_rows, length, kept_rows, kept_length),
                self._resized(values, num_rows, length, kept_rows, kept_length),
            )
        self.num_rows, self.length = num_rows, length

    def move(self, source: int, target: int, length: int) -> None:
        """Row `target` becomes a copy of the first `length` slots of row `source`."""
        for pair in self.layers:
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]

    def stored(self, row: int, start: int, end: int) -> Tensor:
        """A copy of these slots of a row: [C, 2, K, B, D]."""
        return torch.stack(
            [torch.stack([tensor[row, :, start:end] for tensor in pair]) for pair in self.layers]
        )

    def load(self, row: int, slots: Tensor) -> None:
        """Fills the first slots of a row with [C, 2, K, B, D]."""
        length = slots.shape[3]
        for (keys, values), stored in zip(self.layers, slots, strict=True):
            keys[row, :, :length], values[row, :, :length] = stored[0], stored[1]

    def _allocated(self, num_rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        return [
            (self._zeros(num_rows, length), self._zeros(num_rows, length))
            for _ in range(self._num_layers)
        ]

    def _resized(
        self, old: Tensor, num_rows: int, length: int, kept_rows: int, kept_length: int
    ) -> Tensor:
        new = self._zeros(num_rows, length)
        new[:kept_rows, :, :kept_length] = old[:kept_rows, :, :kept_length]
        return new

    def _zeros(self, num_rows: int, length: int) -> Tensor:
        return torch.zeros(
            num_rows, self._num_heads, length, self._head_size, dtype=self.dtype, device=self.device
        )
