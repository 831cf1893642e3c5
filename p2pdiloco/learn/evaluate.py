"""What a model is worth: held-out loss in nats per byte, and text that it writes.

Neither ever looks further than the trained sequence length: a model with rotary positions falls
apart beyond it.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch

from p2pdiloco.errors import UserError
from p2pdiloco.learn.inner_loop import next_token_loss
from p2pdiloco.learn.text import Text, Tokenizer

_BATCH_TOKENS = 8192
"""Tokens per evaluation batch: the logits of a 50,000-token vocabulary then take 1.6 GB."""


@torch.no_grad()
def held_out_loss(
    model: torch.nn.Module, text: Text, sequence_length: int, windows_per_block: int = 4
) -> float:
    """Mean nats per byte of held-out text, over windows spread evenly in each held-out block.

    Per byte, not per token, so that models with different tokenizers compare.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for batch in _held_out_batches(text, sequence_length, windows_per_block):
        loss = next_token_loss(model, torch.from_numpy(batch).to(device))
        total += loss.item() * len(batch)
        count += len(batch)
    model.train(was_training)
    return total / count / text.held_out_bytes_per_token


@torch.no_grad()
def sample_text(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    sequence_length: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """The prompt's continuation by `num_tokens` sampled tokens; temperature 0 takes the likeliest.

    Each token is drawn after a whole forward pass over the last `sequence_length` tokens: slow, but
    the same on every model, and always with all the context the model was trained for. UserError
    where the model's predictions are no numbers, or the prompt has no tokens.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = [int(token) for token in tokenizer.encode(prompt.encode() or b"\n")]
    num_prompt = len(tokens)
    if not tokens:
        raise UserError(f"the tokenizer makes nothing of the prompt {prompt!r:.80}; give another")
    try:
        for _ in range(num_tokens):
            window = torch.tensor([tokens[-sequence_length:]], device=device)
            logits = model(input_ids=window, use_cache=False).logits[0, -1].float().cpu()
            tokens.append(_drawn(logits, temperature, generator))
    finally:
        model.train(was_training)
    return tokenizer.decode(tokens[num_prompt:])


def _drawn(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """float32 [vocabulary] -> a token; UserError where the largest is no finite number."""
    if not math.isfinite(largest := float(logits.max())):
        raise UserError(
            f"the model writes nothing: a prediction is {largest}, expected a finite number; its "
            "training has diverged or its weights are damaged, so take those of an earlier time"
        )
    if temperature == 0:
        return int(logits.argmax())
    odds = torch.softmax(logits / temperature, 0)
    return int(torch.multinomial(odds, 1, generator=generator))


def _held_out_batches(
    text: Text, sequence_length: int, windows_per_block: int
) -> Iterator[np.ndarray]:
    """int64 [B, S + 1]; S is shorter than trained only where a block has fewer tokens."""
    width = min(sequence_length + 1, *(len(part) for part in text.held_out))
    starts = [
        int(start)
        for part in text.held_out
        for start in np.linspace(part.start, part.stop - width, windows_per_block)
    ]
    batch_size = max(1, _BATCH_TOKENS // width)
    for first in range(0, len(starts), batch_size):
        rows = [text.tokens[at : at + width] for at in starts[first : first + batch_size]]
        yield np.stack(rows).astype(np.int64)
