"""A learner of episodes: it moves towards what was rewarded, counts, and can be resumed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rl_builders import TASKS, generated
from rollout_builders import small_model

from p2pdiloco.learn.models import embedding_names, parameter_shapes
from p2pdiloco.optim.fragments import plan_fragments
from p2pdiloco.rl.episodes import Episode
from p2pdiloco.rl.loop import RlLoop, shares_of
from p2pdiloco.rl.shares import Shares
from p2pdiloco.spec import InnerSpec, RlSpec, RunSpec, SyncSpec

RL = RlSpec(num_groups=2, group_size=3, temperature=0.9)
SPEC = RunSpec(
    name="a",
    inner=InnerSpec(learning_rate=1e-2, warmup_steps=0, weight_decay=0.0),
    sync=SyncSpec(num_fragments=1, inner_steps=2, overlap_steps=1),
    rl=RL,
)
"""Steps of TASKS."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    """Of one step, what the small model generates; every other one is rewarded."""
    model = small_model()
    made = [generated(model, trajectory=i) for i in range(TASKS.num_trajectories)]
    return [replace(e, reward=float(e.trajectory % 2)) for e in made]


def make_loop(**rl: float) -> tuple[RlLoop, Shares]:
    model = small_model().requires_grad_()
    fragments = plan_fragments(parameter_shapes(model), 1, embedding_names(model))
    spec = SPEC.model_copy(update={"rl": RL.model_copy(update=rl)})
    shares = shares_of(spec)
    shares.stand_on(0)
    return RlLoop(model, shares, spec, fragments), shares


def values_of(loop: RlLoop) -> np.ndarray:
    out = np.empty(loop.fragments[0].size, np.float32)
    loop.read_fragment(0, out)
    return out


def test_a_share_is_learnt_from_in_as_many_steps_as_a_period_has(episodes: list[Episode]) -> None:
    loop, shares = make_loop()
    shares.add(0, episodes)
    before = values_of(loop)
    results = [loop.step() for _ in range(2)]
    assert not shares.has_part
    generated_tokens = sum(episode.num_generated for episode in episodes)
    assert sum(result.tokens for result in results) == generated_tokens
    assert (loop.num_steps, loop.steps, loop.tokens) == (2, [2], [generated_tokens])
    assert not np.array_equal(values_of(loop), before)


def test_it_moves_towards_what_was_rewarded(episodes: list[Episode]) -> None:
    """Whoever stands where it has come to finds the same episodes off policy, and the better ones
    likelier."""
    loop, shares = make_loop()
    shares.add(0, episodes)
    losses = [loop.step().loss for _ in range(2)]
    moved, its_shares = make_loop()
    moved.overwrite_fragment(0, values_of(loop))
    its_shares.add(0, episodes)
    assert sum(moved.step().loss for _ in range(2)) < sum(losses)
    [lesson] = its_shares.take_ended()
    assert lesson.drift > 0


def test_a_part_without_differences_moves_nothing_and_counts(episodes: list[Episode]) -> None:
    loop, shares = make_loop()
    shares.add(0, [replace(episode, reward=0.5) for episode in episodes])
    before = values_of(loop)
    results = [loop.step() for _ in range(2)]
    assert np.array_equal(values_of(loop), before)
    assert loop.steps == [2]
    assert all(result.loss == 0.0 and result.tokens > 0 for result in results)


def test_a_part_whose_gradient_is_not_finite_is_skipped_and_makes_its_step(
    episodes: list[Episode],
) -> None:
    """Nothing else comes before the next merge: who waits for its steps would wait for ever."""
    loop, shares = make_loop()
    loop.overwrite_fragment(0, np.full(loop.fragments[0].size, np.nan, np.float32))
    shares.add(0, episodes)
    assert [loop.step().tokens for _ in range(2)] == [0, 0]
    assert (loop.steps, loop.tokens) == ([2], [0])
    [lesson] = shares.take_ended()
    assert (lesson.num_learnt_from, lesson.num_dropped) == (0, 0)


def test_a_restart_goes_on_with_the_moments_and_the_next_share(
    episodes: list[Episode], tmp_path: Path
) -> None:
    straight, shares = make_loop()
    shares.add(0, episodes)
    straight.step()
    straight.save(tmp_path / "inner")
    restarted, new_shares = make_loop()
    restarted.load(tmp_path / "inner")
    restarted.overwrite_fragment(0, values_of(straight))
    assert (restarted.num_steps, new_shares.has_part) == (1, False)
    new_shares.add(0, episodes)
    assert new_shares.has_part
    restarted.step()
    assert restarted.num_steps == 2


def test_what_it_is_held_to_is_replaced_after_so_many_merges(episodes: list[Episode]) -> None:
    """An even version is a new reference; on the odd one after it, the loss has a distance to the
    one before already where the learner begins."""
    loop, shares = make_loop(kl_weight=10.0, reference_steps=2)
    losses = []
    for step in range(3):
        loop.overwrite_fragment(0, values_of(loop))
        shares.stand_on(step)
        shares.add(step, [replace(e, step=step) for e in episodes])
        free, its_shares = make_loop()
        free.overwrite_fragment(0, values_of(loop))
        its_shares.stand_on(step)
        its_shares.add(step, [replace(e, step=step) for e in episodes])
        losses.append(loop.step().loss - free.step().loss)
        loop.step()
    assert losses[0] == pytest.approx(0.0, abs=1e-5)
    assert losses[1] > 1e-3
    assert losses[2] == pytest.approx(0.0, abs=1e-5)
