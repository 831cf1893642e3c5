"""The learner's end of the control socket; it never keeps a step waiting."""

import select
import socket
from collections import deque
from time import perf_counter
from typing import get_args

from p2pdiloco_daemon.children.channel import MessageReader, pack
from p2pdiloco_daemon.learner.messages import Command, Message, StepsDone
from p2pdiloco_daemon.learner.stopwatch import Clock

REPORT_PERIOD_S = 0.2
"""Each message wakes the daemon, on a busy machine in place of the learner (0.4 ms measured); and a
GPU that makes hundreds of steps a second must not keep it awake."""

READ_BYTES = 1 << 16

DRAIN_S = 0.5
"""A daemon that stops its learner reads until the end; one that hangs must not hold it back."""


class Control:
    """The control socket, never waited for but in `wait`.

    `StepsDone` in a row become one until they are due or something else is sent; so do those that
    the daemon does not take. All other messages answer a command, so what is kept stays small.
    """

    def __init__(self, connection: socket.socket, clock: Clock = perf_counter) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._clock = clock
        self._report_at = clock()
        self._reader: MessageReader[Command] = MessageReader(get_args(Command))
        self._waiting: deque[Message] = deque()
        self._unsent = b""

    def wait(self) -> None:
        """Until there is something to read, or to send that could not be sent before."""
        self._flush()
        writable = [self._socket] if self._unsent else []
        select.select([self._socket], writable, [])

    def commands(self) -> list[Command]:
        """Those that have arrived; EOFError once the daemon is gone."""
        if self._clock() >= self._report_at:
            self._flush()
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return self._reader.feed(data)

    def post(self, message: Message) -> None:
        """Sends it, now or at a later boundary; order is kept."""
        match message, self._waiting[-1] if self._waiting else None:
            case StepsDone(), StepsDone() as earlier:
                self._waiting[-1] = _sum(earlier, message)
            case StepsDone(), _:
                self._waiting.append(message)
            case _:
                self._waiting.append(message)
                self._flush()

    def drain(self) -> None:
        """Before leaving: sends what is left, if the daemon takes it soon."""
        self._socket.settimeout(DRAIN_S)
        self._flush()

    def _flush(self) -> None:
        self._report_at = self._clock() + REPORT_PERIOD_S
        while self._unsent or self._waiting:
            self._unsent = self._unsent or pack(self._waiting.popleft())
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except (BlockingIOError, TimeoutError):
                return
            except ConnectionError as error:
                raise EOFError from error


def _sum(earlier: StepsDone, later: StepsDone) -> StepsDone:
    return StepsDone(
        step=later.step,
        steps=earlier.steps + later.steps,
        tokens=earlier.tokens + later.tokens,
        step_s=earlier.step_s + later.step_s,
        stall_s=earlier.stall_s + later.stall_s,
        loss=later.loss,
        step_queued_s=earlier.step_queued_s + later.step_queued_s,
        stall_queued_s=earlier.stall_queued_s + later.stall_queued_s,
    )
