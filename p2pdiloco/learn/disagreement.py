"""How far workers have drifted apart: in what they predict, and in their parameters.

Factored Gossip DiLoCo (arXiv 2606.22768) watches the Jensen-Shannon distance between the workers'
output distributions on a fixed probe batch, which foretells loss spikes where the distance of
parameters does not (`predictions.prediction_distance`). Of several workers it is the mean over all
pairs. The paper's exact averaging was not at hand; pairs are our choice, since a pair is what two
nodes that have just exchanged parameters can measure.

Shapes: B sequences, S tokens, N = B S positions, V vocabulary.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from p2pdiloco.learn.predictions import prediction_distance
from p2pdiloco.learn.text import Text
from p2pdiloco.optim.merge import norm

Worker = TypeVar("Worker")


def probe_batch(text: Text, sequence_length: int, num_sequences: int) -> torch.Tensor:
    """int64 [num_sequences, S] of held-out text, the same on every node that has the same text: the
    beginnings of blocks spread evenly over what is held out. S is shorter than `sequence_length`
    only where a block has fewer tokens.
    """
    width = min(sequence_length, *(len(part) for part in text.held_out))
    blocks = np.linspace(0, len(text.held_out) - 1, num_sequences).astype(int)
    starts = [text.held_out[block].start for block in blocks]
    rows = [text.tokens[start : start + width] for start in starts]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


@torch.no_grad()
def output_distributions(model: torch.nn.Module, probe: torch.Tensor) -> npt.NDArray[np.float32]:
    """f32 [N, V]: each next token's probability."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    logits_bsv = model(input_ids=probe.to(device), use_cache=False).logits
    model.train(was_training)
    probabilities: npt.NDArray[np.float32] = (
        torch.softmax(logits_bsv.float().flatten(0, 1), dim=-1).cpu().numpy()
    )
    return probabilities


def output_disagreement(distributions: Sequence[npt.NDArray[np.float32]]) -> float:
    """Jensen-Shannon distance, mean over pairs; each of `distributions` is f32 [N, V]."""
    return _mean_over_pairs(distributions, prediction_distance)


def parameter_disagreement(vectors: Sequence[npt.NDArray[np.float32]]) -> float:
    """Euclidean distance of the workers' flat parameters, mean over pairs."""
    return _mean_over_pairs(vectors, lambda a, b: norm(a - b))


def _mean_over_pairs(
    workers: Sequence[Worker], distance: Callable[[Worker, Worker], float]
) -> float:
    """0 for a worker alone."""
    distances = [distance(a, b) for a, b in itertools.combinations(workers, 2)]
    return sum(distances) / len(distances) if distances else 0.0
