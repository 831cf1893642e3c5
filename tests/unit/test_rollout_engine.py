from dataclasses import replace
from itertools import count

import pytest
import torch
from rollout_builders import (
    VOCABULARY,
    drain,
    generate,
    requests,
    small_engine,
    small_model,
    tokens_by_the_rule,
    tokens_of,
)
from transformers import GPT2Config, GPT2LMHeadModel

from p2pdiloco.rollout.cache import Cache
from p2pdiloco.rollout.engine import Engine, Limits
from p2pdiloco.rollout.request import Finish, QueueFull, Request, Token
from p2pdiloco.rollout.sampling import Sampling
from p2pdiloco.rollout.suffix import SuffixDrafter


def test_tokens_are_those_of_the_rule_applied_to_each_sequence_alone() -> None:
    engine = small_engine(drafter=SuffixDrafter(), num_rows_max=8)
    wanted = requests(10, num_tokens=24)
    answers = tokens_of(generate(engine, wanted))
    for request in wanted:
        expected = [choice.token for choice in tokens_by_the_rule(small_model(), request)]
        assert answers[request.id] == expected


def workload() -> list[Request]:
    """640 tokens, prompts that begin alike, every kind of sampling."""
    return requests(32, num_tokens=20, shared_tokens=20)


@pytest.fixture(scope="module")
def one_by_one() -> dict[str, list[int]]:
    """Each sequence alone, nothing drafted or chunked."""
    return tokens_of(generate(small_engine(num_rows_max=1), workload()))


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_drafts_and_batches_do_not_change_tokens(
    one_by_one: dict[str, list[int]], num_rows: int
) -> None:
    drafter = SuffixDrafter()
    for answer in one_by_one.values():
        drafter.learn(answer)
    engine = small_engine(drafter=drafter, num_rows_max=num_rows)
    assert tokens_of(generate(engine, workload())) == one_by_one


@pytest.mark.parametrize("num_rows", [8, 32])
def test_batches_do_not_change_tokens(one_by_one: dict[str, list[int]], num_rows: int) -> None:
    engine = small_engine(num_rows_max=num_rows)
    assert tokens_of(generate(engine, workload())) == one_by_one


@pytest.mark.parametrize("chunk_tokens", [5, 40])
def test_chunks_of_prompts_do_not_change_tokens(
    one_by_one: dict[str, list[int]], chunk_tokens: int
) -> None:
    engine = small_engine(num_rows_max=12, chunk_tokens=chunk_tokens)
    assert tokens_of(generate(engine, workload())) == one_by_one


def test_reused_prefixes_do_not_change_tokens(one_by_one: dict[str, list[int]]) -> None:
    engine = small_engine(num_rows_max=4)
    wanted = workload()
    assert tokens_of(generate(engine, wanted)) == one_by_one
    num_stored = engine.cache.prefixes.num_slots
    assert tokens_of(generate(engine, wanted)) == one_by_one
    assert num_stored == engine.cache.prefixes.num_slots > 32 * 24


def test_a_wide_margin_sends_choices_to_the_referee_and_changes_nothing(
    one_by_one: dict[str, list[int]],
) -> None:
    engine = small_engine(num_rows_max=8, drafter=SuffixDrafter())
    engine.referee.margin = 0.1
    wanted = workload()[:8]
    answers = tokens_of(generate(engine, wanted))
    assert answers == {request.id: one_by_one[request.id] for request in wanted}
    assert engine.referee.num_verdicts > 5
    assert engine.referee.num_exceeded == 0


def test_weights_in_half_precision_give_the_same_tokens_in_any_batch() -> None:
    answers = []
    for num_rows in (1, 5):
        engine = small_engine(small_model().bfloat16(), num_rows_max=num_rows)
        answers.append(tokens_of(generate(engine, requests(5, num_tokens=12))))
        assert engine.referee.num_verdicts > 5
    assert answers[0] == answers[1]


def test_without_the_referee_rounding_would_change_tokens() -> None:
    wanted = requests(6, num_tokens=24, samplings=(Sampling(seed=1), Sampling(seed=2)))
    expected = tokens_of(generate(small_engine(small_model().bfloat16()), wanted))
    careless = small_engine(small_model().bfloat16())
    careless.referee.margin = 0.0
    assert tokens_of(generate(careless, wanted)) != expected


def test_log_probabilities_are_those_of_a_plain_pass() -> None:
    engine = small_engine(num_rows_max=4, drafter=SuffixDrafter(), chunk_tokens=16)
    wanted = requests(10)
    answers = generate(engine, wanted)
    for request in wanted:
        answer = answers[request.id]
        tokens = [*request.prompt, *(token.token for token in answer)]
        logits_TV = small_model()(input_ids=torch.tensor([tokens])).logits[0]
        logprobs_TV = (logits_TV / (request.sampling.temperature or 1.0)).log_softmax(dim=-1)
        places = range(len(request.prompt) - 1, len(tokens) - 1)
        expected = [logprobs_TV[p, tokens[p + 1]].item() for p in places]
        assert [token.logprob for token in answer] == pytest.approx(expected, abs=1e-4)


def test_a_stop_token_ends_the_answer_even_inside_a_draft() -> None:
    [request] = requests(1, num_tokens=40)
    full = tokens_of(generate(small_engine(), [request]))[request.id]
    stop = full[20]
    stopping = replace(request, stop_tokens=frozenset({stop}))
    drafter = SuffixDrafter()
    drafter.learn(full)
    engine = small_engine(drafter=drafter)
    answer = tokens_of(generate(engine, [stopping]))[request.id]
    assert answer == full[: full.index(stop) + 1]


def test_drafts_of_a_known_answer_save_most_passes() -> None:
    [request] = requests(1, num_tokens=64)
    full = tokens_of(generate(small_engine(), [request]))[request.id]
    drafter = SuffixDrafter()
    drafter.learn(full)
    engine = small_engine(drafter=drafter)
    engine.submit(request)
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert num_steps < 24


def test_a_calibrated_engine_gives_the_same_tokens() -> None:
    ticks = count()
    wanted = workload()[:8]
    limits = Limits(num_rows_max=8)
    engine = Engine(small_model(), limits, lambda: next(ticks) / 1000, drafter=SuffixDrafter())
    engine.calibrate()
    assert engine.costs.batches == [1, 2, 4, 8]
    assert engine.cache.rows.num_slots == 0
    assert tokens_of(generate(engine, wanted)) == tokens_of(generate(small_engine(), wanted))


@pytest.mark.parametrize("positions", [8, 64])
def test_a_model_that_learnt_its_positions_is_timed_within_them(positions: int) -> None:
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=positions, vocab_size=VOCABULARY)
    config.bos_token_id = config.eos_token_id = None
    ticks = count()
    engine = Engine(GPT2LMHeadModel(config), Limits(num_rows_max=2), lambda: next(ticks) / 1000)
    engine.calibrate()
    assert engine.costs.batches == [1, 2]


def test_a_second_turn_computes_only_what_is_new() -> None:
    engine = small_engine()
    [first] = requests(1)
    answer = tokens_of(generate(engine, [first]))[first.id]
    prompt = (*first.prompt, *answer, 3, 1, 4)
    engine.submit(replace(first, id="second", prompt=prompt, num_tokens_max=4))
    engine.step()
    assert engine.scheduler.running[0].num_reused == (len(prompt) - 4) // 16 * 16


def test_the_first_of_a_group_computes_the_prompt_for_all() -> None:
    engine = small_engine(num_rows_max=8, chunk_tokens=32)
    [first] = requests(1, prompt_tokens=100)
    for index in range(8):
        engine.submit(replace(first, id=f"r{index}", trajectory=f"t{index}"))
    num_prompt_tokens = 0
    while engine.scheduler.waiting:
        works = engine.schedule()
        num_prompt_tokens += sum(len(w.segment.tokens) for w in works if w.segment.start < 99)
        engine.postprocess(works, engine.run(works))
    assert num_prompt_tokens <= 100 + 7 * 4


def test_cancelled_requests_give_their_memory_back() -> None:
    drafter = SuffixDrafter()
    engine = small_engine(num_rows_max=4, drafter=drafter)
    for request in requests(6):
        engine.submit(request)
    engine.step()
    for index in range(6):
        engine.cancel(f"r{index}")
    engine.cancel("never heard of")
    assert engine.cache.rows.num_slots == 0
    assert drafter.num_requests == 0
    ended = engine.step()
    assert [(p.id, p.finish) for p in ended] == [(f"r{i}", Finish.CANCELLED) for i in range(6)]
    assert not engine.has_work


def test_an_idle_engine_has_its_whole_cache_for_prefixes() -> None:
    engine = small_engine()
    assert engine.prefix_tokens == engine.cache_tokens


def test_rows_that_run_leave_less_room_for_prefixes() -> None:
    engine = small_engine(num_rows_max=8)
    wanted = requests(8, num_tokens=400)
    for request in wanted:
        engine.submit(request)
    rooms = []
    for _ in range(300):
        engine.step()
        rooms.append(engine.prefix_tokens)
    assert engine.num_running == 8
    assert rooms == sorted(rooms, reverse=True)
    num_row_slots = engine.cache.rows.num_slots
    assert num_row_slots >= 8 * 400
    assert rooms[-1] == pytest.approx(engine.cache_tokens - num_row_slots, rel=0.01)


def test_rows_that_fill_the_cache_leave_room_for_one_token_of_prefixes() -> None:
    model = small_model()
    engine = small_engine(model, cache_bytes=64 * Cache(model, 0).rows.slot_bytes)
    for number in range(60):
        [request] = requests(1, num_tokens=40, seed=number)
        generate(engine, [request])
    assert engine.prefix_tokens == 1


def test_a_lull_of_a_few_steps_hardly_changes_the_room_for_prefixes() -> None:
    engine = small_engine(num_rows_max=8)
    generate(engine, requests(8, num_tokens=100))
    before = engine.prefix_tokens
    generate(engine, requests(1, num_tokens=5))
    taken, took = (engine.cache_tokens - room for room in (engine.prefix_tokens, before))
    assert 0.7 * took < taken < took


def test_a_cancelled_request_does_not_disturb_the_others() -> None:
    wanted = requests(6)
    expected = tokens_of(generate(small_engine(), wanted))
    engine = small_engine()
    for request in wanted:
        engine.submit(request)
    early: dict[str, list[int]] = {}
    for _ in range(10):
        for progress in engine.step():
            early.setdefault(progress.id, []).extend(t.token for t in progress.tokens)
    engine.cancel("r1")
    rest = tokens_of(drain(engine))
    for name in ("r0", "r2", "r3", "r4", "r5"):
        assert early[name] + rest[name] == expected[name]


def test_a_full_queue_refuses() -> None:
    engine = small_engine(num_rows_max=2, num_waiting_max=3)
    *allowed, one_too_many = requests(4)
    for request in allowed:
        engine.submit(request)
    with pytest.raises(QueueFull, match="3 requests wait, at most 3 may"):
        engine.submit(one_too_many)


def test_a_request_that_can_never_run_is_refused() -> None:
    [request] = requests(1)
    with pytest.raises(ValueError, match="one of the 61 that the model knows"):
        small_engine().submit(replace(request, prompt=(0, 61)))
    with pytest.raises(ValueError, match="knows 512 positions"):
        small_engine().submit(replace(request, num_tokens_max=500))
    with pytest.raises(ValueError, match="give the cache more memory"):
        small_engine(cache_bytes=1 << 14).submit(request)


def test_an_id_that_is_in_use_is_refused() -> None:
    engine = small_engine()
    [request] = requests(1)
    engine.submit(request)
    with pytest.raises(ValueError, match="give each its own id"):
        engine.submit(request)


def test_little_memory_makes_requests_wait_but_changes_nothing(
    one_by_one: dict[str, list[int]],
) -> None:
    engine = small_engine(cache_bytes=400 * 192 * 2, num_rows_max=32)
    for request in workload():
        engine.submit(request)
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for progress in engine.step():
            answers.setdefault(progress.id, []).extend(t.token for t in progress.tokens)
        assert engine.cache.num_slots <= engine.cache.num_slots_max
    assert answers == one_by_one


def test_new_weights_take_over_in_mid_answer() -> None:
    engine = small_engine(drafter=SuffixDrafter(), version=4)
    wanted = requests(4, samplings=(Sampling(seed=1), Sampling(seed=4, temperature=1.3, top_p=0.8)))
    for request in wanted:
        engine.submit(request)
    answers: dict[str, list[Token]] = {request.id: [] for request in wanted}
    for _ in range(9):
        for progress in engine.step():
            answers[progress.id] += progress.tokens
    new = small_model(seed=1)
    engine.swap(dict(new.named_parameters()), version=5)
    for name, rest in drain(engine).items():
        answers[name] += rest
    for request in wanted:
        answer = answers[request.id]
        old = [token for token in answer if token.version == 4]
        assert 9 <= len(old) < len(answer)
        assert [token.version for token in answer] == sorted(token.version for token in answer)
        seen = request.prompt + tuple(token.token for token in old)
        rest_request = replace(request, prompt=seen, num_tokens_max=len(answer) - len(old))
        expected = [choice.token for choice in tokens_by_the_rule(new, rest_request)]
        assert [token.token for token in answer[len(old) :]] == expected


def test_new_weights_of_another_shape_are_refused() -> None:
    engine = small_engine()
    with pytest.raises(ValueError, match="are of another model"):
        engine.swap({"lm_head.weight": torch.zeros(1)}, version=1)


def test_prefixes_of_old_weights_are_forgotten() -> None:
    engine = small_engine()
    wanted = requests(2)
    generate(engine, wanted)
    engine.swap(dict(small_model(seed=1).named_parameters()), version=1)
    assert engine.cache.num_slots == 0
    expected = tokens_of(generate(small_engine(small_model(seed=1)), wanted))
    assert tokens_of(generate(engine, wanted)) == expected
