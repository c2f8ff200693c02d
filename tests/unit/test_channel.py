"""Messages between processes, and what can be one."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux import errors
from loramux.engine import messages
from loramux.engine.channel import Channel, frame, receive
from loramux.errors import LoramuxError
from loramux.types import Delta, RequestId, TokenLogprobs, Waited

pytestmark = pytest.mark.anyio

MESSAGES = [["a"], {"b": 2}, "", b"x" * 300_000, None]


class Transport(asyncio.Transport):
    """Of a channel that is fed by hand."""


def fed(pieces: list[bytes]) -> list[Any]:
    found: list[Any] = []
    channel = Channel(found.append)
    channel.connection_made(Transport())
    for piece in pieces:
        channel.data_received(piece)
    return found


@given(st.lists(st.integers(1, 400), max_size=30))
def test_messages_come_out_whole_however_the_bytes_are_cut(sizes: list[int]) -> None:
    sent = [["a"], {"b": 2}, "", b"x" * 500, None]
    data, pieces = b"".join(map(frame, sent)), []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    assert fed([*pieces, data]) == sent


async def test_both_ends_send_and_hear_the_end() -> None:
    here, there = socket.socketpair()
    found: dict[str, list[Any]] = {"here": [], "there": []}
    lost = asyncio.Event()
    one, other = Channel(found["here"].append, lost.set), Channel(found["there"].append)
    await one.open(here)
    await other.open(there)
    for message in MESSAGES:
        one.send(message)
        other.send(message)
    await other.close()  # which lets all that was sent be read first
    await lost.wait()
    assert found["here"] == MESSAGES
    one.send("to nobody")


def test_a_socket_without_a_channel_is_read_message_by_message() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(frame("first") + frame("second"))
        here.close()
        assert (receive(there), receive(there)) == ("first", "second")
        with pytest.raises(EOFError):
            receive(there)


def test_deltas_are_the_same_after_the_way() -> None:
    deltas = [
        Delta(RequestId("a"), 0, "é", (5,), waited=Waited(0.5, 0.25)),
        Delta(
            RequestId("b"), 1, "", (7, 8), (TokenLogprobs(7, -0.5, ((7, -0.5),)),), "stop", "x",
            (None, TokenLogprobs(1, -2.0)), "why",
        ),
    ]  # fmt: skip
    packed = pickle.loads(pickle.dumps(messages.pack(deltas)))
    assert messages.unpack(packed) == deltas


def all_errors() -> Iterator[LoramuxError]:
    """One of each kind, with something in each field."""
    given: dict[str, Any] = {
        "reasons": ["one", "two"], "retry_after_seconds": 1.5, "allowed": 2, "param": "prompt",
    }  # fmt: skip
    for kind in vars(errors).values():
        if not (isinstance(kind, type) and issubclass(kind, LoramuxError)):
            continue
        code = kind.__init__.__code__ if "__init__" in vars(kind) else None
        if code is None:
            yield kind("what and why")
            continue
        names = code.co_varnames[1 : code.co_argcount]
        only = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
        yield kind(*(given.get(n, n) for n in names), **{n: given[n] for n in only})


@pytest.mark.parametrize("error", [*all_errors()], ids=lambda error: type(error).__name__)
def test_errors_are_the_same_after_the_way(error: LoramuxError) -> None:
    told = pickle.loads(pickle.dumps(error))
    assert type(told) is type(error)
    assert (str(told), told.args, vars(told)) == (str(error), error.args, vars(error))
