"""How far workers have drifted apart: in what they predict, and in their parameters.

Factored Gossip DiLoCo (arXiv 2606.22768) watches the Jensen-Shannon distance between the workers'
output distributions, which foretells loss spikes where the distance of parameters does not. On a
fixed probe batch, for two workers with next-token distributions p, q at each of N positions:

    JS(p, q) = sqrt( 1/N sum over positions of ( KL(p | m) + KL(q | m) ) / 2 ),  m = (p + q) / 2

with logarithms to base 2: 0 if they always say the same, 1 if they never do. Of several workers it
is the mean over all pairs. The paper's exact averaging was not at hand; pairs are our choice, since
a pair is what two nodes that have just exchanged parameters can measure.

Shapes: B sequences, S tokens, N = B S positions, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from p2pdiloco.learn.text import Text
from p2pdiloco.optim.merge import norm

Worker = TypeVar("Worker")


def probe_batch(text: Text, sequence_length: int, num_sequences: int) -> torch.Tensor:
    """int64 [num_sequences, sequence_length] of held-out text, the same on every node that has the
    same text: the beginnings of blocks spread evenly over what is held out.
    """
    blocks = np.linspace(0, len(text.held_out) - 1, num_sequences).astype(int)
    starts = [text.held_out[block].start for block in blocks]
    rows = [text.tokens[start : start + sequence_length] for start in starts]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


@torch.no_grad()
def output_distributions(model: torch.nn.Module, probe: torch.Tensor) -> torch.Tensor:
    """f32 [N, V] on the CPU: the logarithm of each next token's probability."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    logits_bsv = model(input_ids=probe.to(device), use_cache=False).logits
    model.train(was_training)
    return torch.log_softmax(logits_bsv.float().flatten(0, 1), dim=-1).cpu()


def output_disagreement(distributions: Sequence[torch.Tensor]) -> float:
    """Jensen-Shannon distance, mean over pairs; each of `distributions` is f32 [N, V], in nats."""
    return _mean_over_pairs(distributions, jensen_shannon_distance)


def jensen_shannon_distance(p_nv: torch.Tensor, q_nv: torch.Tensor) -> float:
    """0 to 1, of log-probabilities in nats."""
    middle_nv = torch.logaddexp(p_nv, q_nv) - math.log(2)
    terms = _information(p_nv, middle_nv) + _information(q_nv, middle_nv)
    divergence_bits = terms / (2 * math.log(2))
    return math.sqrt(min(1.0, max(0.0, divergence_bits)))


def parameter_disagreement(vectors: Sequence[npt.NDArray[np.float32]]) -> float:
    """Euclidean distance of the workers' flat parameters, mean over pairs."""
    return _mean_over_pairs(vectors, lambda a, b: norm(a - b))


def _information(p_nv: torch.Tensor, middle_nv: torch.Tensor) -> float:
    """KL(p | middle) in nats, mean over positions; an impossible token adds nothing."""
    terms_nv = p_nv.exp() * (p_nv - middle_nv).nan_to_num(nan=0.0, neginf=0.0)
    return float(terms_nv.sum(dim=-1, dtype=torch.float64).mean())


def _mean_over_pairs(
    workers: Sequence[Worker], distance: Callable[[Worker, Worker], float]
) -> float:
    """0 for a worker alone."""
    distances = [distance(a, b) for a, b in itertools.combinations(workers, 2)]
    return sum(distances) / len(distances) if distances else 0.0
