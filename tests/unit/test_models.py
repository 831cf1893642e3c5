"""Models from specs."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue

from p2pdiloco.errors import UserError
from p2pdiloco.learn.models import (
    build_model,
    config_table,
    embedding_names,
    num_parameters,
    parameter_shapes,
)
from p2pdiloco.spec import ModelSpec

UNTIED: dict[str, JsonValue] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}


def test_tiny_has_a_million_parameters_and_one_tied_embedding() -> None:
    model = build_model(ModelSpec(preset="tiny"), 0, 128)
    assert num_parameters(model) == 1_022_336
    assert embedding_names(model) == {"model.embed_tokens.weight"}
    assert parameter_shapes(model)["model.embed_tokens.weight"] == (256, 128)
    assert model.config.max_position_embeddings == 128  # type: ignore[union-attr]


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    state_before = torch.random.get_rng_state()
    first, second = (build_model(ModelSpec(config=UNTIED), 5, 64) for _ in range(2))
    other = build_model(ModelSpec(config=UNTIED), 6, 64)
    weights = [next(model.parameters()) for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(state_before, torch.random.get_rng_state())


def test_an_untied_head_counts_as_an_embedding() -> None:
    model = build_model(ModelSpec(config=UNTIED), 0, 64)
    assert embedding_names(model) == {"model.embed_tokens.weight", "lm_head.weight"}


def test_a_mixture_of_experts_config_is_built() -> None:
    config: dict[str, JsonValue] = UNTIED | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    model = build_model(ModelSpec(config=config), 0, 64)
    assert any("experts" in name for name in parameter_shapes(model))


def test_a_checkpoint_gives_its_weights_back(tmp_path: Path) -> None:
    saved = build_model(ModelSpec(config=UNTIED), 0, 64)
    saved.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = build_model(ModelSpec(checkpoint=str(tmp_path)), 9, 64)
    assert parameter_shapes(loaded) == parameter_shapes(saved)
    assert all(map(torch.equal, loaded.parameters(), saved.parameters()))


@pytest.mark.parametrize("spec", [ModelSpec(config=UNTIED), ModelSpec(preset="tiny")])
def test_a_model_is_built_again_from_its_configuration_alone(spec: ModelSpec) -> None:
    model = build_model(spec, 0, 64)
    again = build_model(ModelSpec(config=config_table(model)), 0, 64)
    assert parameter_shapes(again) == parameter_shapes(model)
    assert all(map(torch.equal, again.parameters(), model.parameters()))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec(config={"model_type": "nonsense"}), "describe a 'nonsense' model"),
        (ModelSpec(config={"model_type": "vit"}), "no causal language model"),
        (ModelSpec(config=UNTIED | {"hidden_size": "wide"}), "does not describe"),
        (ModelSpec(config=UNTIED | {"max_position_embeddings": 32}), "knows 32 positions"),
        (ModelSpec(checkpoint="./nowhere"), "is not a directory"),
    ],
)
def test_bad_specs_say_what_is_wrong(spec: ModelSpec, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(spec, 0, 64)


def test_a_checkpoint_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    build_model(ModelSpec(config=UNTIED), 0, 64).save_pretrained(tmp_path)  # type: ignore[operator]
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be loaded: Error while deserializing header"):
        build_model(ModelSpec(checkpoint=str(tmp_path)), 0, 64)


def test_a_checkpoint_whose_config_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(UNTIED | {"hidden_size": "wide"}))
    with pytest.raises(UserError, match="cannot be loaded: Validation error"):
        build_model(ModelSpec(checkpoint=str(tmp_path)), 0, 64)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded"):
        build_model(ModelSpec(checkpoint=str(tmp_path)), 0, 64)
