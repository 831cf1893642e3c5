"""Which episodes of a step are learnt from, and the tensors they become.

An episode is too old if one of its tokens was chosen by a policy more than `lag_max` versions
behind; that allowance is for stragglers, whose tokens the importance ratio corrects (losses.py). A
group whose rewards are all alike has no advantage and is left out (DAPO does the same).

Shapes: B episodes, T tokens of the longest of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from p2pdiloco.rl.episodes import Episode
from p2pdiloco.rl.losses import Totals, Variant, advantages


@dataclass(frozen=True, slots=True)
class Weighted:
    """An episode and its advantage in its group."""

    episode: Episode
    advantage: float


@dataclass(slots=True)
class Selection:
    """What a step learns from, and what became of the rest."""

    chosen: list[Weighted] = field(default_factory=list)
    num_too_old: int = 0
    alike: list[Episode] = field(default_factory=list)
    """Of groups without differences, of one episode too."""

    def totals(self, num_tokens_max: int) -> Totals:
        """`num_tokens_max` are those that one trajectory may generate."""
        return totals_of(self.chosen, num_tokens_max)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward pass sees. Rows are padded at the end with token 0."""

    tokens_BT: Tensor
    """int64"""
    behaviour_BT: Tensor
    """float32, log-probabilities; 0 where nothing was generated."""
    mask_BT: Tensor
    """float32, 1 where the policy chose the token."""
    advantages_B: Tensor


def select(
    groups: Iterable[Sequence[Episode]], version: int, lag_max: int, variant: Variant
) -> Selection:
    """`version` is the policy's that learns. Episodes may be missing from a group."""
    selection = Selection()
    for group in groups:
        fresh = [episode for episode in group if version - episode.oldest_version <= lag_max]
        selection.num_too_old += len(group) - len(fresh)
        weights = advantages([e.reward for e in fresh], variant) if fresh else []
        if not any(weights):
            selection.alike += fresh
            continue
        selection.chosen += [Weighted(e, w) for e, w in zip(fresh, weights, strict=True)]
    return selection


def totals_of(chosen: Sequence[Weighted], num_tokens_max: int) -> Totals:
    """`num_tokens_max` are those that one trajectory may generate."""
    num_tokens = sum(weighted.episode.num_generated for weighted in chosen)
    return Totals(len(chosen), num_tokens, num_tokens_max)


def batches(chosen: Sequence[Weighted], num_tokens_max: int) -> Iterator[Batch]:
    """Episodes of similar length together, so that little is padding: at most so many tokens in a
    batch, padding included; one that is longer has a batch of its own."""
    part: list[Weighted] = []
    for weighted in sorted(chosen, key=lambda w: len(w.episode.tokens)):
        if part and len(weighted.episode.tokens) * (len(part) + 1) > num_tokens_max:
            yield _batch(part)
            part = []
        part.append(weighted)
    if part:
        yield _batch(part)


def _batch(part: Sequence[Weighted]) -> Batch:
    shape = len(part), max(len(weighted.episode.tokens) for weighted in part)
    tokens_BT = torch.zeros(shape, dtype=torch.int64)
    behaviour_BT, mask_BT = torch.zeros(shape), torch.zeros(shape)
    for row, weighted in enumerate(part):
        episode = weighted.episode
        tokens_BT[row, : len(episode.tokens)] = torch.tensor(episode.tokens)
        for answer in episode.answers:
            behaviour_BT[row, answer.start : answer.end] = torch.tensor(answer.logprobs)
            mask_BT[row, answer.start : answer.end] = 1.0
    return Batch(
        tokens_BT, behaviour_BT, mask_BT, torch.tensor([weighted.advantage for weighted in part])
    )
