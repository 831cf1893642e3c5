"""Steps, counters, fragments and resuming."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from p2pdiloco.errors import StoreError, UserError
from p2pdiloco.learn.inner_loop import InnerLoop, bf16_is_faster
from p2pdiloco.learn.local_model import learning_rate_at
from p2pdiloco.learn.models import build_model, embedding_names, parameter_shapes
from p2pdiloco.learn.text import ByteTokenizer, Text, TextStream, split_text
from p2pdiloco.optim.fragments import Fragment, plan_fragments
from p2pdiloco.spec import InnerSpec, ModelSpec

SEQUENCE = 16
SPEC = InnerSpec(batch_size=2, warmup_steps=4)
MODEL = ModelSpec(
    config={
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "tie_word_embeddings": True,
    }
)


@pytest.fixture(scope="module")
def text() -> Text:
    return split_text(bytes(np.arange(60 * 4096, dtype=np.uint32) % 251), ByteTokenizer())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_loop(text: Text, spec: InnerSpec = SPEC, num_fragments: int = 3) -> InnerLoop:
    model = build_model(MODEL, 0, SEQUENCE)
    fragments = plan_fragments(parameter_shapes(model), num_fragments, embedding_names(model))
    return InnerLoop(model, TextStream(text, SEQUENCE, 0, "node"), spec, fragments)


def read_all(loop: InnerLoop) -> list[np.ndarray]:
    sizes = [fragment.size for fragment in loop.fragments]
    values = [np.empty(size, np.float32) for size in sizes]
    for p, out in enumerate(values):
        loop.read_fragment(p, out)
    return values


def test_steps_learn_and_count(text: Text) -> None:
    loop = make_loop(text)
    results = [loop.step() for _ in range(30)]
    assert results[-1].loss < results[0].loss - 0.2
    assert results[0].tokens == 2 * SEQUENCE
    assert loop.steps == [30] * 3
    assert loop.tokens == [30 * 2 * SEQUENCE] * 3
    assert (loop.num_steps, loop.cursor) == (30, 60)


def test_two_loops_from_one_seed_are_bit_identical(text: Text) -> None:
    first, second = make_loop(text), make_loop(text)
    for _ in range(5):
        assert first.step() == second.step()
    assert all(map(np.array_equal, read_all(first), read_all(second)))


def test_an_overwrite_touches_its_fragment_alone(text: Text) -> None:
    loop = make_loop(text)
    loop.step()
    before = read_all(loop)
    values = np.linspace(-1, 1, before[1].size, dtype=np.float32)
    loop.overwrite_fragment(1, values)
    after = read_all(loop)
    assert np.array_equal(after[1], values)
    assert np.array_equal(after[0], before[0])
    assert np.array_equal(after[2], before[2])
    assert (loop.steps, loop.tokens) == ([1, 0, 1], [2 * SEQUENCE, 0, 2 * SEQUENCE])


def test_an_overwrite_keeps_the_adam_moments(text: Text, tmp_path: Path) -> None:
    loop = make_loop(text)
    loop.step()
    loop.save(tmp_path / "before")
    for p, values in enumerate(read_all(loop)):
        loop.overwrite_fragment(p, np.zeros_like(values))
    loop.save(tmp_path / "after")
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()


def resume(loop: InnerLoop, text: Text, path: Path) -> InnerLoop:
    """A fresh loop with the checkpoint and the weights of `loop`, as after a restart."""
    loop.save(path)
    fresh = make_loop(text)
    fresh.load(path)
    for p, values in enumerate(read_all(loop)):
        fresh.overwrite_fragment(p, values)
    return fresh


def test_a_resumed_resume_equals_an_uninterrupted_run(text: Text, tmp_path: Path) -> None:
    straight, halting = make_loop(text), make_loop(text)
    for _ in range(9):
        straight.step()
    for part in range(3):
        for _ in range(3):
            halting.step()
        halting = resume(halting, text, tmp_path / f"{part}.safetensors")
    assert all(map(np.array_equal, read_all(straight), read_all(halting)))
    straight.save(tmp_path / "straight")
    halting.save(tmp_path / "halting")
    assert (tmp_path / "straight").read_bytes() == (tmp_path / "halting").read_bytes()
    assert straight.step() == halting.step()


def test_a_checkpoint_before_the_first_step_is_usable(text: Text, tmp_path: Path) -> None:
    assert resume(make_loop(text), text, tmp_path / "new").step() == make_loop(text).step()


@pytest.mark.parametrize("damage", ["truncated", "empty", "absent", "other model"])
def test_a_bad_checkpoint_is_refused_and_changes_nothing(
    text: Text, tmp_path: Path, damage: str
) -> None:
    loop, path = make_loop(text), tmp_path / "inner.safetensors"
    loop.step()
    loop.save(path)
    good = path.read_bytes()
    match damage:
        case "truncated":
            path.write_bytes(good[: len(good) // 2])
        case "empty":
            path.write_bytes(b"")
        case "absent":
            path.unlink()
        case _:
            path.write_bytes(good.replace(b"exp_avg/model.norm", b"exp_avg/model.nerm"))
    expected = make_loop(text)
    fresh = make_loop(text)
    with pytest.raises(StoreError, match="no usable checkpoint"):
        fresh.load(path)
    assert fresh.step() == expected.step()


def test_a_directory_that_cannot_be_written_is_a_store_error(text: Text, tmp_path: Path) -> None:
    loop = make_loop(text)
    with pytest.raises(StoreError, match="cannot be written"):
        loop.save(tmp_path / "absent" / "inner")


def test_a_step_with_an_infinite_gradient_is_skipped(text: Text) -> None:
    loop = make_loop(text)
    broken = np.full(loop.fragments[1].size, np.nan, np.float32)
    loop.overwrite_fragment(1, broken)
    before = read_all(loop)
    assert loop.step().tokens == 0
    assert loop.steps == [0, 0, 0]
    assert np.array_equal(before[2], read_all(loop)[2])


def test_wrong_vectors_are_refused(text: Text) -> None:
    loop = make_loop(text)
    size = loop.fragments[0].size
    with pytest.raises(ValueError, match=rf"float32 \[{size}\]"):
        loop.overwrite_fragment(0, np.zeros(size + 1, np.float32))
    with pytest.raises(ValueError, match="got float64"):
        loop.read_fragment(0, np.zeros(size))  # type: ignore[arg-type]


def test_a_plan_of_another_model_is_refused(text: Text) -> None:
    fragments = plan_fragments({"a": (2, 3), "b": (4,)}, 2, [])
    with pytest.raises(UserError, match="another model"):
        InnerLoop(
            build_model(MODEL, 0, SEQUENCE), TextStream(text, SEQUENCE, 0, "x"), SPEC, fragments
        )


def test_the_learning_rate_warms_up_and_stays() -> None:
    spec = InnerSpec(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate_at(spec, step) for step in (0, 1, 3, 4, 9999)] == [0.25, 0.5, 1, 1, 1]


def test_the_cosine_schedule_ends_at_a_tenth() -> None:
    spec = InnerSpec(learning_rate=1.0, warmup_steps=0, schedule="cosine", decay_steps=100)
    rates = [learning_rate_at(spec, step) for step in (0, 50, 100, 500)]
    assert rates == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_small_models_stay_in_float32() -> None:
    assert not bf16_is_faster(1_000_000, "cpu", clock=lambda: 0.0)


@pytest.mark.parametrize(("seconds", "expected"), [((1.0, 2.0), True), ((1.0, 1.1), False)])
def test_bf16_is_chosen_where_it_clearly_wins(seconds: tuple[float, float], expected: bool) -> None:
    ticks = iter([0.0, seconds[0], 0.0, seconds[1]])
    assert bf16_is_faster(10_000_000, "cpu", clock=lambda: next(ticks)) is expected


def test_bf16_steps_learn(text: Text) -> None:
    plain = make_loop(text)
    loop = InnerLoop(
        plain.model, TextStream(text, SEQUENCE, 0, "x"), SPEC, plain.fragments, bf16=True
    )
    losses = [loop.step().loss for _ in range(20)]
    assert losses[-1] < losses[0]


def test_fragments_cover_the_model(text: Text) -> None:
    loop = make_loop(text)
    fragments: tuple[Fragment, ...] = loop.fragments
    assert sum(fragment.size for fragment in fragments) == sum(
        parameter.numel() for parameter in loop.model.parameters()
    )
