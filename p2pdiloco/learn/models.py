"""Causal language models: presets, any transformers configuration, any checkpoint.

All weights are float32 and all are trained. Only safetensors weights are read, and no code from a
checkpoint is run.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import JsonValue
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from p2pdiloco.errors import UserError
from p2pdiloco.spec import ModelSpec

BYTE_VOCABULARY = 256

_PRESETS: Mapping[str, Mapping[str, int]] = {
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "intermediate_size": 344,
    },
    "small": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "intermediate_size": 1024,
    },
}
"""Byte-level Llamas with tied embeddings: 1.02 and 10.7 million parameters."""


_NOT_ARCHITECTURE = ("architectures", "dtype", "transformers_version", "_name_or_path")
"""What a config.json says about its file rather than about the model."""


def build_model(spec: ModelSpec, seed: int, sequence_length: int) -> torch.nn.Module:
    """The model with float32 weights on the CPU, in training mode.

    New weights depend on the seed alone on one machine, but not across instruction sets: a run's
    genesis weights are made once and handed out as data. `sequence_length` is the trained length;
    a preset knows no positions beyond it, because RoPE does not reach beyond what was trained.
    """
    if spec.checkpoint is not None:
        return _load_checkpoint(spec.checkpoint, sequence_length)
    config = build_config(spec, sequence_length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    return model.train()


def build_config(spec: ModelSpec, sequence_length: int) -> PretrainedConfig:
    """The transformers configuration of a preset or of the spec's own `config` table."""
    if spec.config is not None:
        config = _config_from_table(spec.config)
        _check_positions(config, sequence_length)
        return config
    if spec.preset is None:
        raise UserError("model.checkpoint has no configuration of its own to build from")
    return LlamaConfig(
        vocab_size=BYTE_VOCABULARY,
        max_position_embeddings=sequence_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        **_PRESETS[spec.preset],
    )


def config_table(model: torch.nn.Module) -> dict[str, JsonValue]:
    """The model's configuration as `ModelSpec.config` takes it."""
    table = json.loads(model.config.to_json_string(use_diff=True))  # type: ignore[union-attr, operator]
    return {name: value for name, value in table.items() if name not in _NOT_ARCHITECTURE}


def parameter_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of every trained tensor; tied tensors appear once, under their first name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def num_parameters(model: torch.nn.Module) -> int:
    """Trained scalars; tied tensors count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def embedding_names(model: torch.nn.Module) -> frozenset[str]:
    """The tensors with a row per token or position: embeddings and, where it is not tied, the head.

    Rows of one token point the same way on all learners, so these tensors are merged by plain mean.
    """
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    weights = [table.weight for table in tables] + _head_weights(model)
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if any(parameter is weight for weight in weights)
    )


def _head_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if find_head is not None else None
    return [] if head is None else [head.weight]


def _config_from_table(table: Mapping[str, object]) -> PretrainedConfig:
    options = dict(table)
    model_type = options.pop("model_type", None)
    if not isinstance(model_type, str):
        raise UserError(
            "model.config needs model_type, the name of a transformers architecture such as"
            f' "llama" or "qwen3_moe"; got {model_type!r}'
        )
    try:
        config = AutoConfig.for_model(model_type, **options)
    except (KeyError, ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(
            f"model.config does not describe a {model_type!r} model of transformers:"
            f" {_shortened(error)}"
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(
            f"model.config.model_type {model_type!r} is no causal language model;"
            ' choose an architecture such as "llama"'
        )
    return config


def _load_checkpoint(source: str, sequence_length: int) -> torch.nn.Module:
    """A directory with config.json and *.safetensors, or a name on the Hugging Face hub."""
    if source.startswith((".", "/", "~")) and not Path(source).expanduser().is_dir():
        raise UserError(
            f"model.checkpoint {source!r} is not a directory; expected one with config.json"
            " and model.safetensors, or a name on the Hugging Face hub"
        )
    directory = Path(source).expanduser()
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            directory if directory.is_dir() else source,
            dtype=torch.float32,
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        raise UserError(
            f"model.checkpoint {source!r} cannot be loaded: {_shortened(error)}"
        ) from error
    _check_positions(model.config, sequence_length)
    return model.train()


def _check_positions(config: PretrainedConfig, sequence_length: int) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < sequence_length:
        raise UserError(
            f"data.sequence_length is {sequence_length}, but the model knows {positions} positions;"
            " shorten the sequences or raise max_position_embeddings"
        )


def _shortened(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
