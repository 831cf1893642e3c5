"""Which tensors Mix2 takes, and how they travel."""

import numpy as np
import pytest

from p2pdiloco.learn.models import build_model, embedding_names, parameter_shapes
from p2pdiloco.optim.fragments import Fragment, TensorSlot, plan_fragments
from p2pdiloco.optim.mixing import end_tensors, part_of
from p2pdiloco.spec import ModelSpec

N = 600
FRAGMENT = Fragment(0, (TensorSlot("a", (20, 20), 0, False), TensorSlot("b", (200,), 400, True)))


def test_mix2_needs_embedding_head_and_the_two_shallowest_layers() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.experts.7.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.10.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    slots = [TensorSlot(name, (2,), 0, name in (names[0], names[-1])) for name in names]
    assert end_tensors(slots) == {names[0], names[1], names[2], names[-1]}


def test_the_ends_are_two_fifths_of_the_tiny_model() -> None:
    """The paper's subset was 43 % of its parameters."""
    model = build_model(ModelSpec(preset="tiny"), 0, 128)
    (whole,) = plan_fragments(parameter_shapes(model), 1, embedding_names(model))
    part = part_of(whole, end_tensors(whole.slots))
    assert part.layout.size / whole.size == pytest.approx(0.42, abs=0.01)


def test_a_part_travels_as_a_vector_of_its_own() -> None:
    whole = np.arange(N, dtype=np.float32)
    part = part_of(FRAGMENT, {"b", "elsewhere"})
    assert part.layout.slots == (TensorSlot("b", (200,), 0, True),)
    assert part.take(whole).tolist() == whole[400:].tolist()
    changed = part.put(whole, np.zeros(200, np.float32))
    assert changed.tolist() == [*range(400), *[0] * 200]
    assert whole[400] == 400


def test_a_fragment_may_hold_none_of_the_part() -> None:
    part, whole = part_of(FRAGMENT, {"elsewhere"}), np.arange(N, dtype=np.float32)
    assert part.layout.size == 0
    assert part.put(whole, part.take(whole)).tolist() == whole.tolist()
