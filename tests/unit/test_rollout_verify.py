import pytest
import torch
from rollout_builders import small_model
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from p2pdiloco.rollout.packed import Segment, forward, in_pass_order, prepare
from p2pdiloco.rollout.rows import Rows
from p2pdiloco.rollout.sampling import Choice, Sampling
from p2pdiloco.rollout.verify import Position, Referee, canonical_logits, plain_logits, settle


def sure(token: int) -> Choice:
    return Choice(token, -1.0, certain=True)


def open_choice(token: int) -> Choice:
    return Choice(token, -1.0, certain=False)


def never(_index: int) -> Choice:
    raise AssertionError("the referee was asked")


def test_drafted_tokens_are_kept_up_to_the_first_wrong_one() -> None:
    choices = [sure(5), sure(6), sure(7), sure(8)]
    assert settle([5, 9, 7], choices, never) == choices[:2]


def test_a_draft_that_holds_brings_one_token_more() -> None:
    choices = [sure(5), sure(6), sure(7)]
    assert settle([5, 6], choices, never) == choices


def test_the_referee_is_asked_only_where_it_matters() -> None:
    asked = []

    def verdict(index: int) -> Choice:
        asked.append(index)
        return sure(6)

    choices = [sure(5), open_choice(9), sure(7), open_choice(3)]
    assert settle([5, 9, 7], choices, verdict) == [sure(5), sure(6)]
    assert asked == [1]


def test_packed_sequences_have_the_logits_of_plain_ones() -> None:
    model = small_model()
    expected = [model(input_ids=torch.tensor([list(range(n))])).logits[0] for n in (50, 9, 20)]
    prepare(model)
    rows = Rows(model)
    rows.resize(4, 64)
    forward(model, [Segment(3, 0, range(12))], rows, [])
    segments = [Segment(0, 0, range(50)), Segment(1, 0, range(9)), Segment(3, 12, range(12, 20))]
    ordered = in_pass_order(segments)
    assert [s.row for s in ordered] == [1, 3, 0]
    logits_TV = forward(model, ordered, rows, range(67))
    torch.testing.assert_close(logits_TV[:9], expected[1], atol=2e-5, rtol=0)
    torch.testing.assert_close(logits_TV[9:17], expected[2][12:], atol=2e-5, rtol=0)
    torch.testing.assert_close(logits_TV[17:], expected[0], atol=2e-5, rtol=0)


def test_canonical_logits_are_those_of_the_model_in_double_precision() -> None:
    model = small_model()
    exact_V = small_model().double()(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1]
    prepare(model)
    torch.testing.assert_close(canonical_logits(model, [1, 2, 3], num_last=1)[0], exact_V)
    assert next(model.parameters()).dtype == torch.float32


def test_tied_embeddings_are_doubled_together() -> None:
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    prepare(model)
    exact, rounded = canonical_logits(model, [1, 2]), plain_logits(model, [1, 2])
    torch.testing.assert_close(exact, rounded.double(), atol=1e-5, rtol=0)


def test_an_error_beyond_the_margin_is_counted_and_widens_it() -> None:
    model = small_model()
    prepare(model)
    referee = Referee(model)
    assert 0 < referee.margin < 1e-3
    position = Position(Sampling(), 0, lambda: [1, 2, 3])
    exact_V = canonical_logits(model, [1, 2, 3], num_last=1)[0]
    referee.verdict(position, exact_V)
    assert (referee.num_verdicts, referee.num_exceeded) == (1, 0)
    referee.verdict(position, exact_V + 0.5)
    assert (referee.num_verdicts, referee.num_exceeded) == (2, 1)
    assert referee.margin == pytest.approx(4.0)


def test_a_model_with_a_sliding_window_is_refused() -> None:
    config = MistralConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    model = MistralForCausalLM(config).eval()
    prepare(model)
    with pytest.raises(ValueError, match="full causal attention"):
        plain_logits(model, [1, 2])
