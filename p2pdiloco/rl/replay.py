"""Whether the policy chose the tokens of an episode: one prefill, for a random sample of them.

With the assigned noise each token must be the one that the policy of its version chooses, and its
log-probability that policy's. Noise is a pure function (rollout/sampling.py), so there is one right
token at almost every place. Where the float32 logits of this machine leave it open, a float64 pass
decides, as in the engine (verify.py); what even that leaves open passes. What both checks prove
together stands in `checks.py`.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from p2pdiloco.rl.checks import Reason, Refusal, Rulebook
from p2pdiloco.rl.episodes import Episode
from p2pdiloco.rollout.sampling import decide, noise_key
from p2pdiloco.rollout.verify import canonical_logits, plain_logits

LOGPROB_TOLERANCE = 1e-2
"""Of a token's log-probability: float32 on other hardware stays far below, another policy above."""
AGREEMENT = 1e-5
"""In logits: what two machines' float64 passes differ by, with room (verify.py)."""
PLACES_AT_ONCE = 256
"""Places that are looked at together: each takes several rows as wide as the vocabulary."""
VERDICTS_MAX = 8
"""Float64 passes per episode and policy, so that no episode can make its check dear."""


def replay(
    episode: Episode,
    rules: Rulebook,
    models: Mapping[int, PreTrainedModel],
    margin: float,
) -> Refusal | None:
    """None if all tokens of these versions are what the policy chooses. Tokens of other versions
    are not looked at. `margin` is what float32 logits may be wrong by (`Referee.margin`).
    """
    for version, model in models.items():
        chosen = [(p, logprob) for p, logprob, of in episode.chosen() if of == version]
        if chosen and (refusal := _replay(episode, rules, model, chosen, margin)):
            return refusal
    return None


def sampled(episodes: Iterable[Episode], share: float, rng: random.Random) -> list[Episode]:
    """Those to replay. `rng` must be the checker's own secret, or a cheat could tell which."""
    return [episode for episode in episodes if rng.random() < share]


@torch.inference_mode()
def _replay(
    episode: Episode,
    rules: Rulebook,
    model: PreTrainedModel,
    chosen: Sequence[tuple[int, float]],
    margin: float,
) -> Refusal | None:
    logits_TV = plain_logits(model, episode.tokens[: chosen[-1][0]])
    sampling = rules.policy.sampling(rules.tasks)
    name = rules.tasks.noise_name(episode.trajectory)
    wrong: list[Refusal] = []
    open_places: list[tuple[int, int]] = []
    for first in range(0, len(chosen), PLACES_AT_ONCE):
        places = chosen[first : first + PLACES_AT_ONCE]
        positions = [position for position, _logprob in places]
        logits_NV = logits_TV[[p - 1 for p in positions]]
        keys = [noise_key(sampling.seed, name, position) for position in positions]
        choices = decide(logits_NV, [sampling] * len(keys), keys, margin)
        for position, key, choice in zip(positions, keys, choices, strict=True):
            if not choice.certain:
                open_places.append((position, key))
            elif choice.token != episode.tokens[position]:
                wrong.append(Refusal(Reason.WRONG_TOKEN, position))
        divisor = sampling.temperature or 1.0
        wrong += _wrong_logprobs(episode, places, logits_NV, divisor, margin)
    for position, key in open_places[:VERDICTS_MAX]:
        exact_1V = canonical_logits(model, episode.tokens[:position], num_last=1)
        [verdict] = decide(exact_1V, [sampling], [key], AGREEMENT)
        if verdict.certain and verdict.token != episode.tokens[position]:
            wrong.append(Refusal(Reason.WRONG_TOKEN, position))
    return min(wrong, key=lambda refusal: refusal.position, default=None)


def _wrong_logprobs(
    episode: Episode,
    chosen: Sequence[tuple[int, float]],
    logits_NV: Tensor,
    divisor: float,
    margin: float,
) -> Iterator[Refusal]:
    tokens = [episode.tokens[position] for position, _claimed in chosen]
    tokens_N1 = torch.tensor(tokens, device=logits_NV.device)[:, None]
    logprobs_N = (logits_NV.double() / divisor).log_softmax(dim=1).gather(1, tokens_N1)[:, 0]
    tolerance = LOGPROB_TOLERANCE + 2 * margin / divisor
    for (position, claimed), logprob in zip(chosen, logprobs_N.tolist(), strict=True):
        if abs(claimed - logprob) > tolerance:
            yield Refusal(Reason.WRONG_LOGPROB, position)
