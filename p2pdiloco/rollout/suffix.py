"""Drafts from what was written before: SuffixDecoding (arXiv 2411.04975).

If the end of a sequence occurred before, what followed then is a good guess at what follows now.
Each request looks in its own text and in the texts that the swarm has finished. Continuations are
followed by frequency: with count(w) the occurrences of w, the chance of token t after w is
count(wt) / count(w), that of a path is the product, and the score of a draft is the sum of its path
chances: the tokens it may be expected to save. A match of p tokens may be followed for as many
tokens (`FACTOR` times p) while the path's chance is at least `CHANCE_MIN`. Of all matches the best
score wins; ties go to the longer match, then to the request's own text.

The paper keeps a suffix tree. A suffix automaton (Blumer et al. 1985) counts the same occurrences
with at most two states per token, none of them for a suffix that always stands in the same longer
one; all lengths of match that such a state stands for have the same continuations, so only the
longest is looked at. Automata cannot forget, so the window over the swarm's texts is a few of them,
of which the oldest is dropped whole, and counts are not added up across them.

Drafts never change tokens (verify.py), so texts may come from anybody and from any policy.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

FACTOR = 1.0
CHANCE_MIN = 0.1
"""Both as published implementations have them."""
DEPTH = 64
"""Nested repeats looked at, and tokens of context that a new automaton is shown. It bounds the work
per token on text like "aaaa"; matches themselves may be longer."""
NUM_GENERATIONS = 4


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens and, for each, its chance if those before it are right."""

    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    score: float = 0.0


class Drafter(Protocol):
    """What the engine needs of a source of drafts."""

    def start(self, request: str, prompt: Sequence[int]) -> None:
        """A request begins."""

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        """Its text has grown."""

    def read(self, request: str) -> None:
        """Catches up with what it was told of this request and of others, which `draft` would do
        else: once for each token."""

    def draft(self, request: str, num_tokens_max: int) -> Draft:
        """A guess at what follows; empty if there is none."""

    def stop(self, request: str) -> None:
        """It has ended; one that never started is ignored."""

    def learn(self, tokens: Sequence[int]) -> None:
        """A finished response, from here or from another node."""


class SuffixDrafter:
    """SuffixDecoding in plain Python, some 10 us per token learned or drafted.

    What it is told is read when a draft is asked for: where drafts do not pay, little is spent.
    """

    def __init__(self, window_tokens: int = 1 << 18) -> None:
        """Remembers at most the last `window_tokens` learned; a token takes about 0.5 kB."""
        self._generation_tokens = max(1, window_tokens // NUM_GENERATIONS)
        self._generations: deque[_Automaton] = deque(maxlen=NUM_GENERATIONS)
        self._unread: deque[Sequence[int]] = deque()
        """Pieces of finished responses that are in no automaton yet."""
        self._num_unread = 0
        self._texts: dict[str, _Text] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens in memory of finished responses."""
        return self._num_read + self._num_unread

    @property
    def _num_read(self) -> int:
        return sum(automaton.num_tokens for automaton in self._generations)

    @property
    def num_requests(self) -> int:
        """Requests that have started and not stopped."""
        return len(self._texts)

    def start(self, request: str, prompt: Sequence[int]) -> None:
        self._texts[request] = text = _Text()
        text.extend(prompt)

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        self._texts[request].extend(tokens)

    def stop(self, request: str) -> None:
        self._texts.pop(request, None)

    def learn(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), self._generation_tokens):
            piece = tokens[start : start + self._generation_tokens]
            self._unread.append(piece)
            self._num_unread += len(piece)
        self._forget()

    def read(self, request: str) -> None:
        while self._unread:
            self._take_in(self._unread.popleft())
        self._texts[request].read()

    def draft(self, request: str, num_tokens_max: int) -> Draft:
        self.read(request)
        best = Draft()
        for matches in self._texts[request].matches(self._generations):
            draft = _best_draft(matches, num_tokens_max)
            if draft.score > best.score:
                best = draft
        return best

    def _forget(self) -> None:
        """What is too much for the window: the oldest first, an automaton whole."""
        window_tokens = self._generation_tokens * NUM_GENERATIONS
        while self._generations and self.num_tokens > window_tokens:
            self._generations.popleft()
        while self._num_unread > window_tokens:
            self._num_unread -= len(self._unread.popleft())

    def _take_in(self, tokens: Sequence[int]) -> None:
        self._num_unread -= len(tokens)
        newest = self._generations[-1] if self._generations else None
        if newest is None or newest.num_tokens + len(tokens) > self._generation_tokens:
            newest = _Automaton()
            self._generations.append(newest)
        newest.begin()
        for token in tokens:
            newest.append(token)


class _Automaton:
    """The suffix automaton of several texts. State 0 is the empty string; each other state stands
    for the substrings that end at the same places, of lengths (length[link], length]."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        """Occurrences."""
        self.num_tokens = 0
        self.last = 0
        """The state of the whole current text."""

    def begin(self) -> None:
        """The next token starts a new text."""
        self.last = 0

    def append(self, token: int) -> None:
        self.num_tokens += 1
        self.last = self._step(token)
        for state in self.suffixes(self.last):
            self.count[state] += 1

    def suffixes(self, state: int) -> Iterator[int]:
        """The state and its suffix links up to, but without, the empty string; at most `DEPTH`."""
        for _ in range(DEPTH):
            if state <= 0:
                return
            yield state
            state = self.link[state]

    def _step(self, token: int) -> int:
        known = self.next[self.last].get(token)
        if known is not None:
            return self._with_length(known, self.last, token)
        new = self._add(self.length[self.last] + 1, {}, 0)
        state = self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._with_length(self.next[state][token], state, token)
        else:
            self.link[new] = 0
        return new

    def _with_length(self, target: int, source: int, token: int) -> int:
        """The state of the longest string of `source` and `token`; split off `target` if needed."""
        length = self.length[source] + 1
        if self.length[target] == length:
            return target
        split = self._add(length, dict(self.next[target]), self.count[target])
        self.link[split], self.link[target] = self.link[target], split
        state = source
        while state >= 0 and self.next[state].get(token) == target:
            self.next[state][token] = split
            state = self.link[state]
        return split

    def _add(self, length: int, following: dict[int, int], count: int) -> int:
        self.next.append(following)
        self.link.append(-1)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1


@dataclass(slots=True)
class _Cursor:
    """The longest suffix of a growing text that occurs in an automaton."""

    automaton: _Automaton
    state: int = 0
    length: int = 0

    def advance(self, token: int) -> None:
        """The text has grown by a token."""
        automaton = self.automaton
        self._settle()
        while self.state > 0 and token not in automaton.next[self.state]:
            self.state = automaton.link[self.state]
            self.length = automaton.length[self.state]
        following = automaton.next[self.state].get(token)
        if following is not None:
            self.state, self.length = following, self.length + 1
            self._settle()

    def matches(self) -> Iterator["_Match"]:
        """Longest first."""
        self._settle()
        length = self.length
        for state in self.automaton.suffixes(self.state):
            yield _Match(self.automaton, state, length, self.automaton.count[state])
            length = self.automaton.length[self.automaton.link[state]]

    def _settle(self) -> None:
        """The automaton may have split the state since: the shorter strings are now in its link."""
        links, lengths = self.automaton.link, self.automaton.length
        while self.state > 0 and self.length <= lengths[links[self.state]]:
            self.state = links[self.state]


@dataclass(frozen=True, slots=True)
class _Match:
    """The last `length` tokens of a text, found `count` times before with something after them."""

    automaton: _Automaton
    state: int
    length: int
    count: int

    def draft(self, num_tokens_max: int) -> Draft:
        """The most frequent continuation; of equals the smaller token."""
        following, counts = self.automaton.next, self.automaton.count
        tokens: list[int] = []
        chances: list[float] = []
        score, path, state, count = 0.0, 1.0, self.state, self.count
        while len(tokens) < num_tokens_max and following[state] and count > 0:
            token, state = max(following[state].items(), key=lambda it: (counts[it[1]], -it[0]))
            chance = min(1.0, counts[state] / count)
            path, count = path * chance, counts[state]
            if path < CHANCE_MIN:
                break
            tokens.append(token)
            chances.append(chance)
            score += path
        return Draft(tokens, chances, score)


class _Text:
    """One request's text, and where it stands in the swarm's."""

    def __init__(self) -> None:
        self._own = _Automaton()
        self._unread: list[int] = []
        self._recent: deque[int] = deque(maxlen=DEPTH)
        self._cursors: list[_Cursor] = []

    def extend(self, tokens: Iterable[int]) -> None:
        self._unread += tokens

    def matches(self, generations: Iterable[_Automaton]) -> Iterator[Iterator[_Match]]:
        """Of its own earlier text, then of each generation, the newest first."""
        yield self._own_matches()
        self._follow(generations)
        for cursor in reversed(self._cursors):
            yield cursor.matches()

    def read(self) -> None:
        """Takes in what `extend` was given, before anything is asked."""
        for token in self._unread:
            self._own.append(token)
            self._recent.append(token)
            for cursor in self._cursors:
                cursor.advance(token)
        self._unread.clear()

    def _own_matches(self) -> Iterator[_Match]:
        """The end of the text itself has nothing after it and is not counted."""
        own = self._own
        for state in own.suffixes(own.last):
            if own.count[state] > 1:
                yield _Match(own, state, own.length[state], own.count[state] - 1)

    def _follow(self, generations: Iterable[_Automaton]) -> None:
        known = {id(cursor.automaton): cursor for cursor in self._cursors}
        self._cursors = [
            known.get(id(automaton)) or self._new_cursor(automaton) for automaton in generations
        ]

    def _new_cursor(self, automaton: _Automaton) -> _Cursor:
        cursor = _Cursor(automaton)
        for token in self._recent:
            cursor.advance(token)
        return cursor


def _best_draft(matches: Iterable[_Match], num_tokens_max: int) -> Draft:
    """Of matches from long to short; a draft cannot score more than it may have tokens."""
    best = Draft()
    for match in matches:
        limit = min(num_tokens_max, int(FACTOR * match.length))
        if best.score >= limit:
            break
        draft = match.draft(limit)
        if draft.score > best.score:
            best = draft
    return best
