"""The rollout worker: generates with the policy it was given, one step after the other.

Between two steps it takes commands: new requests, cancellations, new weights. Without work it waits
for the next command. It leaves when told to, or when the control socket closes because the daemon
is gone.

Started by `rollouts` as `p2pdiloco_daemon.rollouts.process CONTROL_FD MEMORY_FD`, bound to it (see
`bound`); the first message on the control socket is `Start`.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never, get_args

import torch
from transformers import PreTrainedModel

from p2pdiloco.errors import P2PDilocoError
from p2pdiloco.learn.models import build_model
from p2pdiloco.learn.text import Tokenizer, open_tokenizer
from p2pdiloco.optim.fragments import Fragment, fragments_of
from p2pdiloco.rl.rules import rulebook_of
from p2pdiloco.rollout.backend import Backend
from p2pdiloco.rollout.engine import Engine, Limits
from p2pdiloco.rollout.request import Finish, Progress, QueueFull, Request, Token
from p2pdiloco.rollout.sampling import Sampling
from p2pdiloco.rollout.suffix import SuffixDrafter
from p2pdiloco.spec import RunSpec
from p2pdiloco_daemon.children.background import work_in_background
from p2pdiloco_daemon.children.channel import ChannelError, MessageReader, pack
from p2pdiloco_daemon.children.shared_memory import SharedTensors
from p2pdiloco_daemon.rollouts.backends import TORCH
from p2pdiloco_daemon.rollouts.messages import (
    Cancel,
    Check,
    Command,
    Finished,
    Installed,
    InstallWeights,
    Load,
    Message,
    Play,
    Progressed,
    Ready,
    Refused,
    Speeds,
    Start,
    Stop,
    Submit,
)
from p2pdiloco_daemon.rollouts.turns import Turns

LOAD_PERIOD_S = 0.2
SPEEDS_PERIOD_S = 1.0
_NEWEST = 0.1
"""Weight of a new measurement."""
READ_BYTES = 1 << 16
NO_VERSION = -1
"""Of the policy before the first weights."""

Clock = Callable[[], float]


class Control:
    """The worker's end of the socket. Sending waits for the daemon, which always reads; so what is
    kept here stays small."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader: MessageReader[Command] = MessageReader(get_args(Command))

    def commands(self, *, wait: bool) -> list[Command]:
        """Those that have arrived; `wait` for some. EOFError once the daemon is gone."""
        if not select.select([self._socket], [], [], None if wait else 0)[0]:
            return []
        try:
            data = self._socket.recv(READ_BYTES)
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return self._reader.feed(data)

    def post(self, message: Message) -> None:
        try:
            self._socket.sendall(pack(message))
        except ConnectionError as error:
            raise EOFError from error


class Answer:
    """The text of one request as it grows: what may be shown of it, and where it stops."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self._tokenizer = tokenizer
        self._stops = stops
        self._tokens: list[int] = []
        self._shown = 0
        """Characters."""
        self.is_stopped = False

    def extend(self, tokens: Sequence[int], *, is_last: bool) -> tuple[int, str]:
        """-> (how many of the tokens belong to the answer, the text that may be shown now)."""
        before = len(self._tokens)
        self._tokens += tokens
        text = self._tokenizer.decode(self._tokens) if tokens else ""
        if any(stop in text for stop in self._stops):
            return self._stop_in(before)
        return len(tokens), self._show(text if is_last else text[: self._certain(text)])

    def _stop_in(self, before: int) -> tuple[int, str]:
        """At the first token after `before` with which a stop is there."""
        for end in range(before + 1, len(self._tokens) + 1):
            text = self._tokenizer.decode(self._tokens[:end])
            ends = [place for stop in self._stops if (place := text.find(stop)) >= 0]
            if ends:
                break
        self.is_stopped = True
        return end - before, self._show(text[: min(ends)])

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new

    def _certain(self, text: str) -> int:
        """Characters that neither the rest of a character nor a stop can still take back."""
        end = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        for stop in self._stops:
            for length in range(min(len(stop) - 1, end), 0, -1):
                if text.endswith(stop[:length], 0, end):
                    end -= length
                    break
        return end


class Stretch:
    """How much longer steps take by the wall's clock than by the engine's, which may count the time
    of this process alone."""

    def __init__(self) -> None:
        self._wall_s = self._engine_s = 0.0

    def observe(self, wall_s: float, engine_s: float) -> None:
        self._wall_s += _NEWEST * (wall_s - self._wall_s)
        self._engine_s += _NEWEST * (engine_s - self._engine_s)

    @property
    def factor(self) -> float:
        return self._wall_s / self._engine_s if self._engine_s else 1.0


class RolloutProcess:
    """The main loop: commands, then a step."""

    def __init__(
        self,
        control: Control,
        memory: SharedTensors,
        fragments: Sequence[Fragment],
        engine: Backend,
        tokenizer: Tokenizer,
        length_max: int,
        turns: Turns | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """`length_max` is what the model is trained on: beyond it, it babbles. `turns` are of an rl
        run only."""
        self._length_max = length_max
        self._control = control
        self._memory = memory
        self._fragments = fragments
        self._engine = engine
        self._tokenizer = tokenizer
        self._turns = turns
        self._clock = clock
        self._answers: dict[str, Answer] = {}
        """By id of the request."""
        self._num_tokens = 0
        self._busy_s = 0.0
        self._stretch = Stretch()
        self._load_at = self._speeds_at = clock()
        self._told: Load | None = None
        self._stopping = False

    def run(self) -> None:
        """Until `Stop` or until the daemon is gone."""
        try:
            while not self._stopping:
                self.turn()
        except EOFError:
            pass

    def turn(self) -> None:
        """What has been asked, waited for if there is no work; then a step."""
        self._tell_load()
        has_checks = self._turns is not None and self._turns.has_checks
        for command in self._control.commands(wait=not (self._engine.has_work or has_checks)):
            self._take(command)
        if self._engine.has_work:
            self._step()
        if self._turns is not None and self._turns.has_checks:
            self._turns.check_next()

    def _take(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Play() | Check():
                self._take_up(command)
            case Cancel():
                if self._answers.pop(str(command.id), None):
                    self._engine.cancel(str(command.id))
                elif self._turns is not None:
                    self._turns.cancel(command.id)
            case InstallWeights():
                self._install(command)
            case Stop():
                self._stopping = True
            case Start():
                raise ChannelError("a worker is started once, got Start again")
            case _:
                assert_never(command)

    def _take_up(self, wanted: Play | Check) -> None:
        if self._turns is None:
            reason = "the run learns from text; it has no trajectories"
            self._control.post(Refused(wanted.id, reason, is_busy=False))
        elif isinstance(wanted, Play):
            self._turns.play(wanted)
        else:
            self._turns.check(wanted)

    def _submit(self, wanted: Submit) -> None:
        if self._engine.version == NO_VERSION:
            reason = "the worker has no weights yet; ask again in some seconds"
            self._control.post(Refused(wanted.id, reason, is_busy=True))
            return
        try:
            request = self._request(wanted)
            self._engine.submit(request)
        except QueueFull as error:
            self._control.post(Refused(wanted.id, str(error), is_busy=True))
        except ValueError as error:
            self._control.post(Refused(wanted.id, str(error), is_busy=False))
        else:
            self._answers[request.id] = Answer(
                self._tokenizer, json.loads(wanted.stops), len(request.prompt)
            )

    def _request(self, wanted: Submit) -> Request:
        if wanted.prompt:
            prompt = tuple(int(t) for t in self._tokenizer.encode(wanted.prompt.encode()))
        else:
            prompt = tuple(_numbers("i", wanted.prompt_tokens))
        if len(prompt) + wanted.num_tokens_max > self._length_max:
            raise ValueError(
                f"the model is trained on {self._length_max} tokens; the prompt has {len(prompt)}"
                f" and the answer may get {wanted.num_tokens_max}: shorten one of them"
            )
        sampling = Sampling(
            seed=wanted.seed,
            temperature=wanted.temperature,
            top_k=wanted.top_k or None,
            top_p=wanted.top_p,
        )
        return Request(
            id=str(wanted.id),
            trajectory=wanted.trajectory,
            prompt=prompt,
            num_tokens_max=wanted.num_tokens_max,
            sampling=sampling,
        )

    def _install(self, command: InstallWeights) -> None:
        started = self._clock()
        weights = {
            slot.name: torch.from_numpy(vector[slot.span]).view(slot.shape)
            for fragment, vector in zip(self._fragments, self._memory.incoming, strict=True)
            for slot in fragment.slots
        }
        is_first = self._engine.version == NO_VERSION
        self._engine.swap(weights, command.version)
        if is_first:
            self._engine.calibrate()
        if self._turns is not None:
            self._turns.policy_changed()
        self._tell_speeds()
        self._control.post(Installed(command.version, self._clock() - started))

    def _step(self) -> None:
        started, engine_s = self._clock(), self._engine.busy_s
        for progress in self._engine.step():
            answer = self._answers.get(progress.id)
            if answer is not None:
                self._tell(progress, answer)
            elif self._turns is not None:
                self._num_tokens += len(progress.tokens)
                self._turns.take(progress)
        busy_s = self._clock() - started
        self._busy_s += busy_s
        self._stretch.observe(busy_s, self._engine.busy_s - engine_s)
        if self._clock() >= self._speeds_at + SPEEDS_PERIOD_S:
            self._tell_speeds()

    def _tell(self, progress: Progress, answer: Answer) -> None:
        """Its tokens, up to a stop; and the end, if that is reached."""
        number, finish = int(progress.id), progress.finish
        tokens = [token.token for token in progress.tokens]
        num_tokens, text = answer.extend(tokens, is_last=finish is not None)
        self._num_tokens += num_tokens
        self._control.post(_progressed(number, text, progress.tokens[:num_tokens]))
        if answer.is_stopped and finish is None:
            self._engine.cancel(progress.id)
            finish = Finish.STOP
        if finish is not None:
            del self._answers[progress.id]
            reason = Finish.STOP if answer.is_stopped else finish
            self._control.post(Finished(number, reason.value, answer.prompt_tokens))

    def _tell_load(self) -> None:
        """At most every `LOAD_PERIOD_S`, and before it falls silent; only what is news."""
        now, engine = self._clock(), self._engine
        if now < self._load_at and engine.has_work:
            return
        load = Load(
            running=engine.num_running,
            waiting=engine.num_waiting,
            cache_share=engine.cache_share,
            version=engine.version,
            tokens=self._num_tokens,
            drafted=engine.num_drafted,
            held=engine.num_held,
            busy_s=self._busy_s,
        )
        if load != self._told:
            self._control.post(load)
        self._told, self._load_at = load, now + LOAD_PERIOD_S

    def _tell_speeds(self) -> None:
        engine, factor = self._engine, self._stretch.factor
        pace = engine.pace.token_s
        self._control.post(
            Speeds(
                num_rows=engine.num_rows_of(self._length_max),
                cache_tokens=engine.prefix_tokens,
                prefill_tokens_per_s=engine.pace.prefill_tokens_per_s / factor,
                batches=_bytes("i", [batch for batch, _seconds in pace]),
                token_s=_bytes("f", [seconds * factor for _batch, seconds in pace]),
            )
        )
        self._speeds_at = self._clock()


def _progressed(number: int, text: str, tokens: Sequence[Token]) -> Progressed:
    return Progressed(
        number,
        text,
        _bytes("i", [token.token for token in tokens]),
        _bytes("f", [token.logprob for token in tokens]),
        _bytes("q", [token.version for token in tokens]),
    )


def _bytes(kind: str, numbers: Sequence[float]) -> bytes:
    column = array(kind, numbers)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _numbers(kind: str, column: bytes) -> list[int]:
    numbers = array(kind, column)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def main(control_fd: int, memory_fd: int) -> None:
    """Runs one worker; returns when it was told to leave or the daemon is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (control_fd, memory_fd):
        os.set_inheritable(fd, False)
    control = Control(socket.socket(fileno=control_fd))
    try:
        process = _build(_receive_start(control), control, memory_fd)
    except EOFError:
        return
    work_in_background()
    process.run()


def _receive_start(control: Control) -> Start:
    while not (commands := control.commands(wait=True)):
        pass
    match commands:
        case [Start() as start]:
            return start
    raise ChannelError(f"expected Start and nothing else, got {commands!r:.80}")


def _build(start: Start, control: Control, memory_fd: int) -> RolloutProcess:
    torch.set_num_threads(start.threads)
    spec = RunSpec.model_validate_json(start.spec)
    fragments = fragments_of(spec)
    model = build_model(spec.architecture, spec.seed, spec.data.sequence_length).to(start.device)
    limits = Limits(
        cache_bytes=start.cache_bytes,
        num_rows_max=start.rows_max,
        num_waiting_max=start.waiting_max,
    )
    engine = _backend(start.backend, model, limits, spec.data.sequence_length)
    memory = SharedTensors(memory_fd, [fragment.size for fragment in fragments])
    turns = None
    if spec.rl is not None:
        turns = Turns(engine, partial(rulebook_of, spec, start.run_id), control.post)
    tokenizer, length_max = open_tokenizer(spec.data), spec.data.sequence_length
    control.post(Ready(start.device))
    return RolloutProcess(control, memory, fragments, engine, tokenizer, length_max, turns)


def _backend(name: str, model: PreTrainedModel, limits: Limits, length_max: int) -> Backend:
    on_cpu = model.device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    if name == TORCH:
        return Engine(model, limits, clock, drafter=SuffixDrafter(), version=NO_VERSION)
    from p2pdiloco.rollout.vllm_engine import VllmEngine  # not there unless asked for

    return VllmEngine(model, limits, clock, length_max=length_max, version=NO_VERSION)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except P2PDilocoError as error:
        sys.exit(str(error))
