import dataclasses
import os
from typing import get_args

import msgpack
import numpy as np
import pytest

from p2pdiloco_daemon.children.channel import MESSAGE_BYTES_MAX, ChannelError, MessageReader, pack
from p2pdiloco_daemon.children.shared_memory import SharedTensors, memory_bytes, open_memory_file
from p2pdiloco_daemon.learner import messages
from p2pdiloco_daemon.learner.messages import (
    Command,
    Evaluate,
    Install,
    Message,
    Start,
    StepsDone,
    episodes_in,
    pieces_of_share,
)

START = Start("{}", "/tmp", "node", "cpu", 1, 100)


def command_reader() -> MessageReader[Command]:
    return MessageReader(get_args(Command))


def message_reader() -> MessageReader[Message]:
    return MessageReader(get_args(Message))


def test_messages_come_out_as_they_went_in() -> None:
    commands: list[Command] = [START, Install(1, 7, 3), Evaluate()]
    assert command_reader().feed(b"".join(pack(command) for command in commands)) == commands


def test_frames_may_arrive_in_any_pieces() -> None:
    reader = message_reader()
    message = StepsDone(1, 1, 512, 0.25, 1e-5, float("inf"), 0.125, 0.0)
    stream = pack(message) * 2
    received = [found for byte in stream for found in reader.feed(bytes([byte]))]
    assert received == [message, message]


def test_a_share_comes_out_of_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PIECE_BYTES_MAX", 10)
    pieces = list(pieces_of_share(7, [b"first episode", b"", b"third"]))
    assert [piece.is_last for piece in pieces] == [False, False, True]
    assert {piece.step for piece in pieces} == {7}
    whole = b"".join(piece.piece for piece in pieces)
    assert episodes_in(whole) == [b"first episode", b"", b"third"]


@pytest.mark.parametrize("share", [{}, [1], ["text"], 7])
def test_anything_else_is_no_share(share: object) -> None:
    with pytest.raises(ChannelError, match="no list of episodes"):
        episodes_in(msgpack.packb(share))


def test_every_field_is_a_kind_the_channel_checks() -> None:
    kinds = (*get_args(Command), *get_args(Message))
    types = {field.type for kind in kinds for field in dataclasses.fields(kind)}
    assert types == {int, float, str, bool, bytes}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb("Install"),
        msgpack.packb(["Nothing"]),
        msgpack.packb(["Install", 1, 2]),
        msgpack.packb(["Install", 1, 2, "3"]),
        msgpack.packb(["Install", 1, 2, True]),
        msgpack.packb(["StepsDone", 1, 1, 1, 1.0, 1.0, 1.0]),
        msgpack.packb([1, 2, 3]),
        msgpack.packb({"Install": [1, 2, 3]}),
    ],
)
def test_anything_else_is_a_channel_error(body: bytes) -> None:
    with pytest.raises(ChannelError):
        command_reader().feed(len(body).to_bytes(4, "big") + body)


def test_a_frame_that_announces_too_much_is_refused_at_once() -> None:
    with pytest.raises(ChannelError, match=f"at most {MESSAGE_BYTES_MAX} bytes"):
        command_reader().feed((MESSAGE_BYTES_MAX + 1).to_bytes(4, "big"))


def test_both_sides_see_the_same_vectors_and_none_overlap() -> None:
    sizes = (3, 1, 4)
    fd = open_memory_file(memory_bytes(sizes))
    ours, theirs = SharedTensors(fd, sizes), SharedTensors(fd, sizes)
    os.close(fd)
    for number, vector in enumerate(ours.incoming + ours.outgoing):
        vector[:] = number
    seen = theirs.incoming + theirs.outgoing
    assert [vector.tolist() for vector in seen] == [
        [float(number)] * size for number, size in enumerate(sizes + sizes)
    ]
    assert all(vector.dtype == np.float32 for vector in seen)
