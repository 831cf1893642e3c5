"""A model as a policy: what it may be asked, and how new weights get into it."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from p2pdiloco.rollout.packed import num_positions
from p2pdiloco.rollout.request import Request


def require_answerable(model: PreTrainedModel, request: Request) -> None:
    """ValueError for what the model can never answer."""
    positions = num_positions(model)
    if request.length_max > positions:
        raise ValueError(
            f"request {request.id!r} may grow to {request.length_max} tokens, but the model"
            f" knows {positions} positions; shorten the prompt or ask for fewer tokens"
        )
    vocabulary: int = model.config.vocab_size
    if not all(0 <= token < vocabulary for token in request.prompt):
        raise ValueError(
            f"request {request.id!r} has a token that is not one of the {vocabulary} that the"
            " model knows"
        )


@torch.inference_mode()
def overwrite(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Gives the model these weights, in place. ValueError if they are of another model."""
    parameters = dict(model.named_parameters())
    if weights.keys() != parameters.keys():
        raise ValueError(
            "the new weights are of another model: they lack"
            f" {sorted(parameters.keys() - weights.keys())[:3]} and add"
            f" {sorted(weights.keys() - parameters.keys())[:3]}"
        )
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
