"""What every backend of the rollout worker must do, whatever computes its logits.

The tests of vLLM run where it is installed: `pip install p2pdiloco[vllm]`, or a build for CPUs.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import count

import pytest
import torch
from rollout_builders import (
    POSITIONS,
    drain,
    generate,
    requests,
    small_model,
    tokens_by_the_rule,
    tokens_of,
)
from transformers import PreTrainedModel

from p2pdiloco.rollout.backend import Backend
from p2pdiloco.rollout.engine import Engine, Limits
from p2pdiloco.rollout.request import Finish, Progress, QueueFull, Request, Token
from p2pdiloco.rollout.sampling import Sampling

LIMITS = Limits(num_rows_max=4, num_waiting_max=10, cache_bytes=1 << 25)
VLLM = pytest.param(
    "vllm",
    marks=[
        pytest.mark.skipif(
            find_spec("vllm") is None,
            reason="vLLM is not installed: pip install 'p2pdiloco[vllm]'",
        ),
        pytest.mark.filterwarnings("ignore"),
        pytest.mark.timeout(600),
    ],
)


def model_of(seed: int, tied: bool = False) -> PreTrainedModel:
    """Its heads are of a size that vLLM has kernels for."""
    return small_model(seed, hidden_size=128, scale=5.0, tied=tied)


@pytest.fixture(params=["torch", VLLM])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Idle, with the weights of `model_of(0)` as version 0."""
    made = make(request.param)
    made.swap(dict(model_of(0).named_parameters()), version=0)
    yield made
    for index in range(20):
        made.cancel(f"r{index}")
    while made.has_work:
        made.step()


@cache
def make(name: str, tied: bool = False) -> Backend:
    """One of a kind for all tests: vLLM takes long to start."""
    ticks = count()
    if name == "torch":
        return Engine(model_of(0, tied), LIMITS, lambda: next(ticks) / 1000)
    from p2pdiloco.rollout.vllm_engine import VllmEngine

    return VllmEngine(model_of(0, tied), LIMITS, lambda: next(ticks) / 1000, length_max=POSITIONS)


def test_tokens_and_log_probabilities_are_those_of_the_rule(backend: Backend) -> None:
    wanted = requests(10, num_tokens=12)
    answers = generate(backend, wanted)
    for request in wanted:
        expected = list(tokens_by_the_rule(model_of(0), request))
        answer = answers[request.id]
        assert [token.token for token in answer] == [choice.token for choice in expected]
        logprobs = [choice.logprob for choice in expected]
        assert [token.logprob for token in answer] == pytest.approx(logprobs, abs=1e-4)
    assert backend.referee.num_exceeded == 0


def test_neither_order_nor_company_changes_tokens(backend: Backend) -> None:
    wanted = requests(8, num_tokens=10, shared_tokens=40)
    together = tokens_of(generate(backend, wanted))
    assert tokens_of(generate(backend, wanted[::-1])) == together
    for request in wanted[:3]:
        assert tokens_of(generate(backend, [request])) == {request.id: together[request.id]}


def test_what_the_referee_decides_is_the_same(backend: Backend) -> None:
    wanted = requests(5, num_tokens=10)
    expected = tokens_of(generate(backend, wanted))
    margin, num_verdicts = backend.referee.margin, backend.referee.num_verdicts
    backend.referee.margin = 0.1
    assert tokens_of(generate(backend, wanted)) == expected
    backend.referee.margin = margin
    assert backend.referee.num_verdicts > num_verdicts


def test_a_stop_token_is_the_last(backend: Backend) -> None:
    [request] = requests(1, num_tokens=20)
    full = tokens_of(generate(backend, [request]))[request.id]
    backend.submit(replace(request, stop_tokens=frozenset({full[5]})))
    tokens: list[int] = []
    while backend.has_work:
        for progress in backend.step():
            tokens += [token.token for token in progress.tokens]
            finish = progress.finish
    assert tokens == full[: full.index(full[5]) + 1]
    assert finish is Finish.STOP


def test_an_answer_ends_at_its_length_and_where_the_model_ends(backend: Backend) -> None:
    [request] = requests(1, num_tokens=3)
    prompt = request.prompt * (POSITIONS // len(request.prompt) + 1)
    longest = replace(request, id="r1", prompt=prompt[: POSITIONS - 2], num_tokens_max=2)
    backend.submit(request)
    backend.submit(longest)
    finishes: dict[str, Finish | None] = {}
    num_tokens = {"r0": 0, "r1": 0}
    while backend.has_work:
        for progress in backend.step():
            num_tokens[progress.id] += len(progress.tokens)
            finishes[progress.id] = progress.finish
    assert num_tokens == {"r0": 3, "r1": 2}
    assert finishes == {"r0": Finish.LENGTH, "r1": Finish.LENGTH}


def test_cancelled_requests_end_and_the_others_do_not_notice(backend: Backend) -> None:
    wanted = requests(7, num_tokens=12)
    expected = tokens_of(generate(backend, wanted))
    for request in wanted:
        backend.submit(request)
    answers: dict[str, list[int]] = {request.id: [] for request in wanted}
    for _ in range(3):
        for progress in backend.step():
            answers[progress.id] += [token.token for token in progress.tokens]
    assert (backend.num_running, backend.num_waiting) == (4, 3)
    assert 0 < backend.cache_share < 1
    for name in ("r1", "r5", "never heard of"):
        backend.cancel(name)
    assert (backend.num_running, backend.num_waiting) == (3, 2)
    cancelled = []
    while backend.has_work:
        for progress in backend.step():
            answers[progress.id] += [token.token for token in progress.tokens]
            if progress.finish is Finish.CANCELLED:
                cancelled.append(progress.id)
    assert cancelled == ["r1", "r5"]
    for name in ("r0", "r2", "r3", "r4", "r6"):
        assert answers[name] == expected[name]
    assert answers["r1"] == expected["r1"][: len(answers["r1"])]
    assert not answers["r5"]


def test_new_weights_take_over_in_mid_answer(backend: Backend) -> None:
    samplings = (Sampling(seed=1), Sampling(seed=4, temperature=1.3, top_p=0.8))
    wanted = requests(6, num_tokens=12, samplings=samplings)
    for request in wanted:
        backend.submit(request)
    answers: dict[str, list[Token]] = {request.id: [] for request in wanted}
    for _ in range(5):
        for progress in backend.step():
            answers[progress.id] += progress.tokens
    backend.swap(dict(model_of(1).named_parameters()), version=1)
    assert backend.version == 1
    for name, rest in drain(backend).items():
        answers[name] += rest
    for request in wanted:
        answer = answers[request.id]
        assert len(answer) == request.num_tokens_max
        old = [token for token in answer if token.version == 0]
        assert [token.version for token in answer] == [0] * len(old) + [1] * (12 - len(old))
        seen = request.prompt + tuple(token.token for token in old)
        rest_request = replace(request, prompt=seen, num_tokens_max=12 - len(old))
        expected = [choice.token for choice in tokens_by_the_rule(model_of(1), rest_request)]
        assert [token.token for token in answer[len(old) :]] == expected
    assert any(answer[0].version == 0 for answer in answers.values())
    assert any(answer[0].version == 1 for answer in answers.values())


def test_weights_of_another_model_are_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="are of another model"):
        backend.swap({"lm_head.weight": torch.zeros(1)}, version=1)


def test_a_full_queue_refuses(backend: Backend) -> None:
    *allowed, one_too_many = requests(11)
    for request in allowed:
        backend.submit(request)
    with pytest.raises(QueueFull, match="10 requests wait, at most 10 may"):
        backend.submit(one_too_many)
    backend.step()
    backend.submit(one_too_many)


def test_a_request_that_can_never_run_is_refused(backend: Backend) -> None:
    [request] = requests(1)
    with pytest.raises(ValueError, match="one of the 61 that the model knows"):
        backend.submit(replace(request, prompt=(0, 61)))
    with pytest.raises(ValueError, match="knows 512 positions"):
        backend.submit(replace(request, num_tokens_max=500))
    backend.submit(request)
    with pytest.raises(ValueError, match="give each its own id"):
        backend.submit(request)


def test_a_second_turn_reuses_what_this_policy_computed_and_no_other(backend: Backend) -> None:
    [first] = requests(1, prompt_tokens=300, num_tokens=8)
    answer = tokens_of(generate(backend, [first]))[first.id]
    prompt = (*first.prompt, *answer, 3, 1, 4)
    second = replace(first, prompt=prompt, num_tokens_max=4)
    assert 128 <= num_reused(backend, second) < len(prompt)
    backend.swap(dict(model_of(1).named_parameters()), version=1)
    assert num_reused(backend, second) == 0


@pytest.mark.parametrize("name", ["torch", VLLM])
def test_a_head_that_is_the_embedding_follows_new_weights(name: str) -> None:
    """As in the presets."""
    backend = make(name, tied=True)
    for seed in (0, 1):
        model = model_of(seed, tied=True)
        backend.swap(dict(model.named_parameters()), version=seed)
        wanted = requests(3, num_tokens=6)
        answers = tokens_of(generate(backend, wanted))
        for request in wanted:
            expected = [choice.token for choice in tokens_by_the_rule(model, request)]
            assert answers[request.id] == expected


def num_reused(backend: Backend, request: Request) -> int:
    backend.submit(request)
    reused = {progress.num_reused for progress in _until_idle(backend)}
    assert len(reused) == 1
    return reused.pop()


def _until_idle(backend: Backend) -> Iterator[Progress]:
    while backend.has_work:
        yield from backend.step()


def test_its_pace_is_known_once_it_is_calibrated(backend: Backend) -> None:
    backend.calibrate()
    assert [batch for batch, _seconds in backend.pace.token_s] == [1, 2, 4]
    assert all(seconds > 0 for _batch, seconds in backend.pace.token_s)
    assert backend.pace.prefill_tokens_per_s > 0
    assert backend.num_rows_of(POSITIONS) == 4
    assert backend.cache_tokens >= 4 * POSITIONS
    assert 1 <= backend.prefix_tokens <= backend.cache_tokens
    [request] = requests(1, num_tokens=6)
    busy_s = backend.busy_s
    expected = [choice.token for choice in tokens_by_the_rule(model_of(0), request)]
    assert tokens_of(generate(backend, [request])) == {request.id: expected}
    assert backend.busy_s > busy_s
