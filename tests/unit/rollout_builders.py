"""Small models, requests and engines for the tests of the rollout engine."""

import random
from collections.abc import Iterator, Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from p2pdiloco.rollout.backend import Backend
from p2pdiloco.rollout.engine import Engine, Limits
from p2pdiloco.rollout.request import Finish, Request, Token
from p2pdiloco.rollout.sampling import Choice, Sampling, decide, noise_key
from p2pdiloco.rollout.suffix import Drafter
from p2pdiloco.rollout.verify import canonical_logits

VOCABULARY = 61
POSITIONS = 512
SAMPLINGS = (
    Sampling(seed=1),
    Sampling(seed=2, temperature=0.0),
    Sampling(seed=3, temperature=0.7, top_k=5),
    Sampling(seed=4, temperature=1.3, top_p=0.8),
    Sampling(seed=5, temperature=0.4, top_k=20, top_p=0.6),
)


def small_model(
    seed: int = 0, *, hidden_size: int = 48, scale: float = 8.0, tied: bool = False
) -> PreTrainedModel:
    """Two layers, grouped heads, and logits of several units, so that choices are neither uniform
    nor all alike."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(scale)
    return model.eval()


def small_engine(
    model: PreTrainedModel | None = None,
    *,
    drafter: Drafter | None = None,
    version: int = 0,
    **limits: int,
) -> Engine:
    return Engine(
        model or small_model(), Limits(**limits), _no_clock, drafter=drafter, version=version
    )


def requests(
    number: int,
    *,
    num_tokens: int = 32,
    prompt_tokens: int = 24,
    shared_tokens: int = 0,
    samplings: Sequence[Sampling] = SAMPLINGS,
    seed: int = 7,
) -> list[Request]:
    """Prompts that begin alike and repeat themselves a little; answers of one length."""
    rng = random.Random(seed)
    shared = tuple(rng.choices(range(VOCABULARY), k=shared_tokens))
    return [
        Request(
            id=f"r{index}",
            trajectory=f"t{index}",
            prompt=shared + tuple(rng.choices(range(9), k=prompt_tokens - index % 5)),
            num_tokens_max=num_tokens,
            sampling=samplings[index % len(samplings)],
        )
        for index in range(number)
    ]


def generate(engine: Backend, wanted: Sequence[Request]) -> dict[str, list[Token]]:
    """All answers, by request id. Submits as the queue allows."""
    for request in wanted:
        engine.submit(request)
    return drain(engine)


def drain(engine: Backend) -> dict[str, list[Token]]:
    """Steps until nothing is left to do."""
    answers: dict[str, list[Token]] = {}
    finishes: dict[str, Finish] = {}
    while engine.has_work:
        for progress in engine.step():
            assert progress.id not in finishes
            answers.setdefault(progress.id, []).extend(progress.tokens)
            if progress.finish is not None:
                finishes[progress.id] = progress.finish
    assert finishes.keys() == answers.keys()
    return answers


def tokens_of(answers: dict[str, list[Token]]) -> dict[str, list[int]]:
    return {name: [token.token for token in answer] for name, answer in answers.items()}


def tokens_by_the_rule(model: PreTrainedModel, request: Request) -> Iterator[Choice]:
    """The definition: one float64 pass per token, over the sequence alone."""
    tokens = list(request.prompt)
    for _ in range(request.num_tokens_max):
        key = noise_key(request.sampling.seed, request.trajectory, len(tokens))
        logits_1V = canonical_logits(model, tokens, num_last=1)
        [choice] = decide(logits_1V, [request.sampling], [key], margin=0.0)
        tokens.append(choice.token)
        yield choice


def _no_clock() -> float:
    return 0.0
