import random
from collections.abc import Sequence

import pytest

from p2pdiloco.rollout.suffix import CHANCE_MIN, Draft, SuffixDrafter


def drafted(prompt: Sequence[int], *learned: Sequence[int], num_tokens_max: int = 8) -> Draft:
    drafter = SuffixDrafter()
    for text in learned:
        drafter.learn(text)
    drafter.start("r", prompt)
    return drafter.draft("r", num_tokens_max)


def draft_by_counting(prompt: Sequence[int], texts: Sequence[Sequence[int]], limit: int) -> Draft:
    """The published score, by looking at every place of every text."""
    best = Draft()
    for length in range(len(prompt), 0, -1):
        tokens: list[int] = []
        chances: list[float] = []
        path, score = 1.0, 0.0
        suffix = list(prompt[-length:])
        while len(tokens) < min(limit, length):
            counts = _continuations([*suffix, *tokens], texts)
            whole = _occurrences([*suffix, *tokens], texts)
            if not counts:
                break
            token = max(counts, key=lambda candidate: (counts[candidate], -candidate))
            chance = counts[token] / whole
            path *= chance
            if path < CHANCE_MIN:
                break
            tokens.append(token)
            chances.append(chance)
            score += path
        if score > best.score:
            best = Draft(tokens, chances, score)
    return best


def _occurrences(wanted: Sequence[int], texts: Sequence[Sequence[int]]) -> int:
    size = len(wanted)
    return sum(
        list(text[i : i + size]) == list(wanted)
        for text in texts
        for i in range(len(text) - size + 1)
    )


def _continuations(wanted: Sequence[int], texts: Sequence[Sequence[int]]) -> dict[int, int]:
    tokens = {token for text in texts for token in text}
    counts = {token: _occurrences([*wanted, token], texts) for token in tokens}
    return {token: count for token, count in counts.items() if count}


def test_what_followed_before_is_drafted() -> None:
    draft = drafted([7, 1, 2, 3], [1, 2, 3, 4, 5, 6, 9])
    assert draft == Draft([4, 5, 6], [1.0, 1.0, 1.0], 3.0)


def test_a_draft_is_as_long_as_its_match_at_most() -> None:
    assert drafted([8, 3], [1, 2, 3, 4, 5, 6]).tokens == [4]


def test_a_request_repeats_itself() -> None:
    assert drafted([1, 2, 3, 4, 9, 1, 2, 3]).tokens == [4, 9, 1]


def test_the_more_frequent_continuation_wins() -> None:
    draft = drafted([1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4])
    assert draft.tokens == [4]
    assert draft.chances == pytest.approx([2 / 3])


def test_a_longer_match_knows_better() -> None:
    draft = drafted([5, 1, 2], [5, 1, 2, 3], [1, 2, 4], [1, 2, 4])
    assert (draft.tokens, draft.score) == ([3], 1.0)


def test_texts_do_not_run_into_each_other() -> None:
    assert drafted([2], [1, 2], [3, 4]).tokens == []


def test_nothing_known_drafts_nothing() -> None:
    assert drafted([1, 2, 3]) == Draft()


def test_scores_and_chances_are_those_of_counting_occurrences() -> None:
    rng = random.Random(3)
    num_drafts = 0
    for _ in range(60):
        texts = [rng.choices(range(4), k=rng.randint(1, 30)) for _ in range(3)]
        prompt = rng.sample(range(5), k=4)
        found = drafted(prompt, *texts, num_tokens_max=5)
        expected = draft_by_counting(prompt, texts, 5)
        assert found.score == pytest.approx(expected.score)
        num_drafts += bool(found.tokens)
    assert num_drafts > 30


def test_texts_learned_while_a_request_runs_are_found_as_if_before() -> None:
    rng = random.Random(4)
    for _ in range(40):
        texts = [rng.choices(range(4), k=20) for _ in range(6)]
        text = rng.choices(range(4), k=30)
        late = SuffixDrafter()
        late.start("r", [9])
        for index, token in enumerate(text):
            if index % 5 == 0:
                late.learn(texts[index // 5])
                late.draft("r", 4)
            late.extend("r", [token])
        early = SuffixDrafter()
        for known in texts:
            early.learn(known)
        early.start("r", [9, *text])
        assert late.draft("r", 6).score == pytest.approx(early.draft("r", 6).score)


def test_the_window_forgets_the_oldest_texts() -> None:
    drafter = SuffixDrafter(window_tokens=400)
    for start in range(0, 5000, 50):
        drafter.learn(range(start, start + 50))
        assert drafter.num_tokens <= 400
    drafter.start("old", [1, 2, 3])
    assert drafter.draft("old", 8).tokens == []
    drafter.start("new", [4960, 4961, 4962])
    assert drafter.draft("new", 8).tokens == [4963, 4964, 4965]


def test_a_text_longer_than_the_window_keeps_its_end() -> None:
    drafter = SuffixDrafter(window_tokens=100)
    drafter.learn(range(1000))
    assert drafter.num_tokens <= 100
    drafter.start("r", [990, 991])
    assert drafter.draft("r", 8).tokens == [992, 993]


def test_the_same_token_for_ever_is_no_trap() -> None:
    draft = drafted([1] * 3000, [1] * 3000)
    assert draft.tokens == [1] * 8


def test_a_request_that_ended_is_forgotten() -> None:
    drafter = SuffixDrafter()
    drafter.start("r", [1, 2])
    drafter.stop("r")
    drafter.stop("never started")
    assert drafter.num_requests == 0
