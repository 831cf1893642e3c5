"""The worker's loop with a small engine, a socket pair and no process."""

import contextlib
import itertools
import json
import os
import socket
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import get_args

import pytest
from rollout_builders import POSITIONS, VOCABULARY, small_model

from p2pdiloco.optim.fragments import Fragment, plan_fragments
from p2pdiloco.rollout.engine import Engine, Limits
from p2pdiloco_daemon.children.channel import MessageReader, pack
from p2pdiloco_daemon.children.shared_memory import SharedTensors, memory_bytes, open_memory_file
from p2pdiloco_daemon.rollouts.messages import (
    Cancel,
    Command,
    Finished,
    Installed,
    InstallWeights,
    Load,
    Message,
    Progressed,
    Refused,
    Speeds,
    Stop,
    Submit,
)
from p2pdiloco_daemon.rollouts.process import NO_VERSION, Answer, Control, RolloutProcess


class LetterTokenizer:
    """Token i is the i-th character from "!" on."""

    vocabulary_size = VOCABULARY

    def encode(self, text: bytes) -> list[int]:
        return [byte - 33 for byte in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(33 + token) for token in tokens)


class Stage:
    """A worker with the daemon's end of its socket; its model is of random weights."""

    def __init__(self, **limits: int) -> None:
        model = small_model(seed=1)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.fragments: tuple[Fragment, ...] = plan_fragments(shapes, 2, ())
        self._values = {name: p.detach().numpy() for name, p in model.named_parameters()}
        sizes = [fragment.size for fragment in self.fragments]
        memory_fd = open_memory_file(memory_bytes(sizes))
        self.memory = SharedTensors(memory_fd, sizes)
        os.close(memory_fd)
        self.engine: Engine = Engine(
            small_model(), Limits(**limits), _ticking(), version=NO_VERSION
        )
        self._ours, self._theirs = socket.socketpair()
        self._process = RolloutProcess(
            Control(self._theirs),
            self.memory,
            self.fragments,
            self.engine,
            LetterTokenizer(),
            POSITIONS,
        )

    def weights(self, version: int = 7) -> InstallWeights:
        for fragment, vector in zip(self.fragments, self.memory.incoming, strict=True):
            for slot in fragment.slots:
                vector[slot.span] = self._values[slot.name].ravel()
        return InstallWeights(version)

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()

    def send(self, *commands: Command) -> None:
        self._ours.sendall(b"".join(pack(command) for command in commands))

    def turn(self) -> None:
        self._process.turn()

    def run(self) -> None:
        self._process.run()

    def play(self, *commands: Command) -> list[Message]:
        """What the worker answers to these, until it has nothing left to do."""
        messages = self.told(*commands)
        return [message for message in messages if not isinstance(message, Load | Speeds)]

    def told(self, *commands: Command) -> list[Message]:
        """Besides, what it reports of itself."""
        self.send(*commands)
        self._process.turn()
        while self.engine.has_work:
            self._process.turn()
        reader: MessageReader[Message] = MessageReader(get_args(Message))
        self._ours.setblocking(False)
        messages: list[Message] = []
        with contextlib.suppress(BlockingIOError):
            while data := self._ours.recv(1 << 16):
                messages += reader.feed(data)
        self._ours.setblocking(True)
        return messages


def _ticking() -> Callable[[], float]:
    """A clock by which everything takes a millisecond."""
    ticks = itertools.count()
    return lambda: next(ticks) / 1000


def submit(number: int = 1, prompt: str = "ABC", **changes: object) -> Submit:
    asked = Submit(
        id=number,
        prompt=prompt,
        prompt_tokens=b"",
        trajectory="",
        num_tokens_max=12,
        seed=5,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        stops="[]",
    )
    return replace(asked, **changes)  # type: ignore[arg-type]


def text_of(messages: list[Message]) -> str:
    return "".join(message.text for message in messages if isinstance(message, Progressed))


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """With limits of the engine as the test's parameter."""
    with contextlib.closing(Stage(**getattr(request, "param", {}))) as opened:
        yield opened


def test_without_weights_requests_are_refused_for_now(stage: Stage) -> None:
    [refused] = stage.play(submit())
    assert isinstance(refused, Refused) and refused.is_busy
    assert "no weights yet" in refused.reason


def test_an_answer_comes_in_parts_with_tokens_logprobs_and_versions(stage: Stage) -> None:
    installed, *parts, finished = stage.play(stage.weights(), submit())
    assert isinstance(installed, Installed) and installed.version == 7
    assert finished == Finished(1, "length", prompt_tokens=3)
    tokens: list[int] = []
    for part in parts:
        assert isinstance(part, Progressed)
        tokens += array("i", part.tokens)
        assert len(array("f", part.logprobs)) == len(array("q", part.versions))
        assert set(array("q", part.versions)) == {7}
    assert len(tokens) == 12
    assert text_of(parts) == LetterTokenizer().decode(tokens)


def test_a_prompt_of_tokens_is_the_same_as_its_text(stage: Stage) -> None:
    tokens = array("i", LetterTokenizer().encode(b"ABC")).tobytes()
    by_text = stage.play(stage.weights(), submit())
    by_tokens = stage.play(submit(2, prompt="", prompt_tokens=tokens))
    assert text_of(by_text) == text_of(by_tokens) != ""


def test_a_stop_ends_the_answer_and_is_not_part_of_it(stage: Stage) -> None:
    whole = text_of(stage.play(stage.weights(), submit()))
    stop = whole[6:8]
    *parts, finished = stage.play(submit(2, stops=json.dumps([stop])))
    assert finished == Finished(2, "stop", prompt_tokens=3)
    assert text_of(parts) == whole[: whole.index(stop)]
    assert not stage.engine.has_work


def test_what_can_never_run_is_refused_for_good(stage: Stage) -> None:
    stage.play(stage.weights())
    bad = [submit(num_tokens_max=600), submit(prompt="", prompt_tokens=b"\xff\xff\xff\x7f")]
    for asked, reason in zip(
        bad, ("trained on 512 tokens; the prompt has 3", "one of the 61"), strict=True
    ):
        [refused] = stage.play(asked)
        assert isinstance(refused, Refused) and not refused.is_busy
        assert reason in refused.reason


def test_a_new_policy_takes_over_in_mid_answer(stage: Stage) -> None:
    stage.play(stage.weights())
    stage.send(submit())
    for _ in range(4):
        stage.turn()
    versions: list[int] = []
    for message in stage.play(stage.weights(version=8)):
        if isinstance(message, Progressed):
            versions += array("q", message.versions)
    assert versions == [7] * 4 + [8] * 8


def test_the_cache_that_is_reported_is_what_running_requests_leave_for_prefixes(
    stage: Stage,
) -> None:
    idle = speeds_with_a_policy(stage.told(stage.weights()))
    assert idle.cache_tokens == stage.engine.cache_tokens
    stage.send(submit())
    for _ in range(4):
        stage.turn()
    left = stage.engine.prefix_tokens
    assert left < idle.cache_tokens
    assert speeds_with_a_policy(stage.told(stage.weights(version=8))).cache_tokens == left


def speeds_with_a_policy(messages: list[Message]) -> Speeds:
    """Those that were told when it was installed."""
    [place] = [i for i, message in enumerate(messages) if isinstance(message, Installed)]
    speeds = messages[place - 1]
    assert isinstance(speeds, Speeds)
    return speeds


@pytest.mark.parametrize("stage", [{"num_waiting_max": 2}], indirect=True)
def test_a_full_queue_refuses_for_now(stage: Stage) -> None:
    stage.play(stage.weights())
    told = stage.play(submit(1), submit(2), submit(3))
    [refused] = [message for message in told if isinstance(message, Refused)]
    assert refused.id == 3 and refused.is_busy
    assert sum(isinstance(message, Finished) for message in told) == 2


def test_a_cancelled_request_says_nothing_more(stage: Stage) -> None:
    stage.play(stage.weights())
    assert stage.play(submit(), Cancel(1)) == []
    assert not stage.engine.scheduler.running


def test_stop_ends_the_loop(stage: Stage) -> None:
    stage.send(Stop())
    stage.run()


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["ab", "cd"], [], ["ab", "cd"]),
        (["ab", "cd"], ["bx"], ["a", "bcd"]),
        (["ab", "cd"], ["bc"], ["a", ""]),
        (["a\ufffd"], [], ["a\ufffd"]),
    ],
)
def test_text_is_shown_once_no_stop_can_take_it_back(
    pieces: list[str], stops: list[str], shown: list[str]
) -> None:
    answer = Answer(PlainTokenizer(), stops, prompt_tokens=1)
    told = [
        answer.extend([ord(c) for c in piece], is_last=index == len(pieces) - 1)[1]
        for index, piece in enumerate(pieces)
    ]
    assert told == shown


class PlainTokenizer(LetterTokenizer):
    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))
