import pytest
import torch
from rollout_builders import small_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from p2pdiloco.rollout import lean
from p2pdiloco.rollout.lean import lean_pass
from p2pdiloco.rollout.packed import Segment, forward, in_pass_order, prepare
from p2pdiloco.rollout.rows import Rows
from p2pdiloco.rollout.verify import plain_logits

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def tied_model() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).eval()


@pytest.mark.parametrize("large", [1, lean.LARGE])
@pytest.mark.parametrize("build", [small_model, tied_model])
def test_a_lean_pass_gives_the_logits_of_the_modules(
    build: type, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean, "LARGE", large)
    model: PreTrainedModel = build()
    prepare(model)
    segments = in_pass_order([Segment(0, 0, range(40, 0, -1)), Segment(1, 0, [1, 2, 3])])
    answers = []
    for passing in (lambda *parts: forward(model, *parts), lean_pass(model)):
        assert passing is not None
        rows = Rows(model)
        rows.resize(2, 64)
        first = passing(segments, rows, [0, 2, 42])
        then = passing([Segment(0, 40, [5]), Segment(1, 3, [6, 7])], rows, range(3))
        answers.append(torch.cat([first, then]))
    torch.testing.assert_close(*answers, atol=2e-5, rtol=0)


def test_weights_that_are_overwritten_in_place_are_seen() -> None:
    model, other = tied_model(), tied_model()
    prepare(model)
    passing = lean_pass(model)
    assert passing is not None
    model.load_state_dict(other.state_dict())
    rows = Rows(model)
    rows.resize(1, 64)
    logits_TV = passing([Segment(0, 0, range(9))], rows, range(9))
    torch.testing.assert_close(logits_TV, plain_logits(other, range(9)), atol=2e-5, rtol=0)


def test_other_architectures_have_no_lean_pass() -> None:
    assert lean_pass(Qwen3ForCausalLM(Qwen3Config(**SHAPE))) is None
    biased = LlamaConfig(**SHAPE, attention_bias=True)
    assert lean_pass(LlamaForCausalLM(biased)) is None
