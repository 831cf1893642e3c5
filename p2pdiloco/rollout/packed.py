"""One forward pass over the new tokens of many sequences, packed without padding.

A transformers model runs on one row of T tokens, those of all sequences one after another, with
explicit positions, so its matrix products see no padding. Only attention knows sequences: our
attention function (`ATTENTION`, chosen by `prepare`) writes the new keys and values into the
working cache and attends group by group. A group is a span of cache rows whose queries are padded
to one width. Any architecture of transformers works whose layers call the attention interface with
full causal attention: Llama, Qwen2 and 3, Mistral without a window, and their kind.

Called without a `packed` argument the same model is a plain causal model on one or more sequences.

Shapes: T new tokens of the pass, R rows of a group, W its width, L its longest context, H heads,
K key-value heads, D head size, V vocabulary.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from p2pdiloco.rollout.rows import Rows

ATTENTION = "p2pdiloco_packed"
WIDTH_SHARED_MAX = 32
"""Segments up to this long share one padded group over all rows; a longer one is a group by itself,
so that a chunk of a prompt does not pad the others."""


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one sequence: they follow the `start` tokens that its row already holds."""

    row: int
    start: int
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        """Tokens of the sequence that the row holds after the pass."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows [first, first + R) attend together. Padding repeats the pass's first token; its result
    is dropped."""

    first: int
    num_rows: int
    tokens: slice
    """Of the pass, those of the group."""
    length: int
    """L."""
    source_RW: Tensor | None
    """Index of the token of the pass at each padded place. None if there is no padding and the
    tokens come in the order of the rows."""
    place_T: Tensor
    """Flat padded place of each token of the group, in the order of the pass."""
    mask_R1WL: Tensor | None
    """0 where a query sees a slot, -inf elsewhere. Padding sees slot 0. None if all is seen."""


class Packed:
    """Where the tokens of one pass stand. The segments come `in_pass_order`."""

    def __init__(self, segments: Sequence[Segment], rows: Rows) -> None:
        self._rows = rows
        device = rows.device
        self.positions_T = torch.tensor(
            [p for s in segments for p in range(s.start, s.end)], device=device
        )
        self.tokens_T = torch.tensor([t for s in segments for t in s.tokens], device=device)
        self._rows_T = torch.tensor([s.row for s in segments for _ in s.tokens], device=device)
        self._groups = self._grouped(segments)

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scaling: float
    ) -> Tensor:
        """Stores the new keys and values of the layer; the attention output [T, H, D]."""
        keys, values = self._rows.layers[layer]
        keys[self._rows_T, :, self.positions_T] = key_TKD
        values[self._rows_T, :, self.positions_T] = value_TKD
        outputs = [_attend_group(group, query_THD, keys, values, scaling) for group in self._groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _grouped(self, segments: Sequence[Segment]) -> list[_Group]:
        groups: list[_Group] = []
        num_shared = sum(1 for s in segments if len(s.tokens) <= WIDTH_SHARED_MAX)
        if num_shared:
            groups.append(self._group(segments[:num_shared], 0))
        offset = sum(len(s.tokens) for s in segments[:num_shared])
        for segment in segments[num_shared:]:
            groups.append(self._group([segment], offset))
            offset += len(segment.tokens)
        return groups

    def _group(self, segments: Sequence[Segment], offset: int) -> _Group:
        """The group of these segments, whose tokens begin at `offset` in the pass."""
        device = self._rows.device
        first = min(s.row for s in segments)
        num_rows = max(s.row for s in segments) + 1 - first
        width = max(len(s.tokens) for s in segments)
        source = [[0] * width for _ in range(num_rows)]
        position = [[0] * width for _ in range(num_rows)]
        place: list[int] = []
        start = offset
        for segment in segments:
            row, num_tokens = segment.row - first, len(segment.tokens)
            source[row][:num_tokens] = range(offset, offset + num_tokens)
            position[row][:num_tokens] = range(segment.start, segment.end)
            place += range(row * width, row * width + num_tokens)
            offset += num_tokens
        is_whole = place == list(range(num_rows * width))
        return _Group(
            first,
            num_rows,
            slice(start, offset),
            max(s.end for s in segments),
            None if is_whole else torch.tensor(source, device=device),
            torch.tensor(place, device=device),
            self._mask(position, max(s.end for s in segments)),
        )

    def _mask(self, position: Sequence[Sequence[int]], length: int) -> Tensor | None:
        if all(place == length - 1 for row in position for place in row):
            return None
        position_RW = torch.tensor(position, device=self._rows.device)
        slot_L = torch.arange(length, device=self._rows.device)
        shape = (len(position), 1, len(position[0]), length)
        mask_R1WL = torch.zeros(shape, dtype=self._rows.dtype, device=self._rows.device)
        return mask_R1WL.masked_fill_(slot_L > position_RW[:, None, :, None], float("-inf"))


def in_pass_order(segments: Sequence[Segment]) -> list[Segment]:
    """The order in which `Packed` takes segments: those that share a group first."""
    return sorted(segments, key=lambda segment: len(segment.tokens) > WIDTH_SHARED_MAX)


def prepare(model: PreTrainedModel) -> None:
    """Makes the model ready for `forward` and `forward_alone`, in place: evaluation, no gradients,
    our attention."""
    AttentionInterface.register(ATTENTION, _attention)
    model.set_attn_implementation(ATTENTION)
    model.eval().requires_grad_(False)


def num_positions(model: PreTrainedModel) -> int:
    """Tokens of the longest sequence that the model has positions for. Some have learnt a vector of
    each, and know none beyond."""
    known: int | None = getattr(model.config, "max_position_embeddings", None)
    return known or sys.maxsize


def forward(
    model: PreTrainedModel, segments: Sequence[Segment], rows: Rows, wanted: Sequence[int]
) -> Tensor:
    """Logits [len(wanted), V] at these tokens of the pass; the rows then hold its keys, values."""
    packed = Packed(segments, rows)
    logits: Tensor = model(
        input_ids=packed.tokens_T[None],
        position_ids=packed.positions_T[None],
        use_cache=False,
        logits_to_keep=torch.tensor(wanted, dtype=torch.int64, device=rows.device),
        packed=packed,
    ).logits
    return logits[0]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    packed: Packed | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_options: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, T, D] to output [B, T, H, D]."""
    if sliding_window is not None or softcap is not None or attention_mask is not None:
        raise ValueError(
            "the rollout engine computes full causal attention; this model's layers ask for a"
            " sliding window, soft-capped logits or a mask. Generate with another architecture"
        )
    if packed is not None:
        layer: int = module.layer_idx  # type: ignore[assignment]
        query_THD, key_TKD, value_TKD = (each[0].transpose(0, 1) for each in (query, key, value))
        return packed.attend(layer, query_THD, key_TKD, value_TKD, scaling)[None], None
    output = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2), None


def _attend_group(
    group: _Group, query_THD: Tensor, keys: Tensor, values: Tensor, scaling: float
) -> Tensor:
    """Output [tokens of the group, H, D]."""
    rows, length = slice(group.first, group.first + group.num_rows), group.length
    if group.source_RW is None:
        query_RWHD = query_THD[group.tokens].reshape(group.num_rows, -1, *query_THD.shape[1:])
    else:
        query_RWHD = query_THD[group.source_RW]
    output_RHWD = scaled_dot_product_attention(
        query_RWHD.transpose(1, 2),
        keys[rows, :, :length],
        values[rows, :, :length],
        attn_mask=group.mask_R1WL,
        scale=scaling,
        enable_gqa=query_THD.shape[1] != keys.shape[1],
    )
    output_PHD = output_RHWD.transpose(1, 2).flatten(0, 1)
    return output_PHD if group.source_RW is None else output_PHD[group.place_T]
