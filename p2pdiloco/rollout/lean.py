"""The packed pass of a Llama with little Python: a third of the calls, the same mathematics.

A small model spends most of a step in the layers' Python, not in arithmetic. For the architecture
most used (`model_type` "llama" as presets and most checkpoints have it) this pass calls the same
kernels without the modules: normalization is one call, and queries, keys and values are one matrix
product, as are gate and up. Their weights become views of joint tensors, so that what overwrites a
parameter in place is seen here; nothing is kept twice.

Its logits differ from the modules' in the last bits only, which the referee (verify.py) allows for;
`lean_pass` gives None for models that it does not know for sure.

Shapes: T tokens of the pass, N wanted ones, E width, H query heads, K key-value heads, D head size.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu
from transformers import LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from p2pdiloco.rollout.packed import Packed, Segment
from p2pdiloco.rollout.rows import Rows

LARGE = 1 << 20
"""Elements of a weight that stays in no cache from one step to the next."""

Pass = Callable[[Sequence[Segment], Rows, Sequence[int]], Tensor]
"""Logits [N, V] at the wanted tokens; the rows then hold the keys and values of all."""


def lean_pass(model: PreTrainedModel) -> Pass | None:
    """The pass of this model, if it is a plain Llama; its weights are joined, in place."""
    config = model.config
    plain = (
        type(model) is LlamaForCausalLM
        and config.hidden_act == "silu"
        and not config.attention_bias
        and not config.mlp_bias
    )
    return _LeanLlama(model) if plain else None


class _LeanLlama:
    def __init__(self, model: PreTrainedModel) -> None:
        decoder = model.model
        self._rotary = decoder.rotary_emb
        head = _weight(model.lm_head)
        head.data = _laid_out(head.data)
        self._embedding = _weight(decoder.embed_tokens)
        self._layers = [_Layer(layer, model.config) for layer in decoder.layers]
        self._norm = _Norm(decoder.norm, model.config)
        self._head = head

    def __call__(self, segments: Sequence[Segment], rows: Rows, wanted: Sequence[int]) -> Tensor:
        packed = Packed(segments, rows)
        hidden_TE = self._embedding[packed.tokens_T]
        cos_1TD, sin_1TD = self._rotary(hidden_TE, packed.positions_T[None])
        turns = cos_1TD[0, :, None], sin_1TD[0, :, None]
        for index, layer in enumerate(self._layers):
            hidden_TE = layer(hidden_TE, packed, index, turns)
        if len(wanted) < len(hidden_TE):
            hidden_TE = hidden_TE[torch.tensor(wanted, dtype=torch.int64, device=rows.device)]
        return linear(self._norm(hidden_TE), self._head)


class _Layer:
    def __init__(self, layer: nn.Module, config: PretrainedConfig) -> None:
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        self._head_size: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self._num_queries: int = config.num_attention_heads
        self._num_turned: int = config.num_attention_heads + config.num_key_value_heads
        self._before_attention = _Norm(layer.get_submodule("input_layernorm"), config)
        self._before_mlp = _Norm(layer.get_submodule("post_attention_layernorm"), config)
        self._qkv = _joined(attention, "q_proj", "k_proj", "v_proj")
        self._output = _weight(attention.get_submodule("o_proj"))
        self._gate_up = _joined(mlp, "gate_proj", "up_proj")
        self._down = _weight(mlp.get_submodule("down_proj"))

    def __call__(
        self, hidden_TE: Tensor, packed: Packed, index: int, turns: tuple[Tensor, Tensor]
    ) -> Tensor:
        num_tokens = len(hidden_TE)
        joint = linear(self._before_attention(hidden_TE), self._qkv)
        joint_THD = joint.view(num_tokens, -1, self._head_size)
        turned_THD = _turned(joint_THD[:, : self._num_turned], *turns)
        attended_THD = packed.attend(
            index,
            turned_THD[:, : self._num_queries],
            turned_THD[:, self._num_queries :],
            joint_THD[:, self._num_turned :],
            self._head_size**-0.5,
        )
        hidden_TE = hidden_TE + linear(attended_THD.reshape(num_tokens, -1), self._output)
        gate, up = linear(self._before_mlp(hidden_TE), self._gate_up).chunk(2, dim=-1)
        return hidden_TE + linear(silu(gate) * up, self._down)


class _Norm:
    def __init__(self, norm: nn.Module, config: PretrainedConfig) -> None:
        self._weight = _weight(norm)
        self._epsilon: float = config.rms_norm_eps

    def __call__(self, hidden_TE: Tensor) -> Tensor:
        return rms_norm(hidden_TE, self._weight.shape, self._weight, self._epsilon)


def _turned(heads_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, of the two halves of each head."""
    low, high = heads_THD.chunk(2, dim=-1)
    return heads_THD * cos + torch.cat((-high, low), dim=-1) * sin


def _weight(module: nn.Module) -> nn.Parameter:
    return module.get_parameter("weight")


def _joined(module: nn.Module, *names: str) -> Tensor:
    """One weight, of which those of the module's projections become views."""
    weights = [_weight(module.get_submodule(name)) for name in names]
    joint = _laid_out(torch.cat([weight.data for weight in weights]))
    ends = list(accumulate(len(weight) for weight in weights))
    for weight, end in zip(weights, ends, strict=True):
        weight.data = joint[end - len(weight) : end]
    return joint


def _laid_out(weight_NK: Tensor) -> Tensor:
    """The same matrix, where it is large and wide with its columns one after the other: products
    with few rows then read it twice as fast (measured with MKL, 3072 by 576 and 49152 by 576).
    """
    num_outputs, num_inputs = weight_NK.shape
    if num_outputs < 2 * num_inputs or weight_NK.numel() < LARGE:
        return weight_NK
    return weight_NK.t().contiguous().t()
