"""Objects from process to process over a socket.

They are pickled, so the two must trust each other as a process trusts its child.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable
from typing import Any

_LENGTH_BYTES = 8


class Channel(asyncio.Protocol):
    """One end, in an event loop. What is sent before the other end reads waits in memory."""

    def __init__(
        self, on_message: Callable[[Any], None], on_lost: Callable[[], None] = lambda: None
    ) -> None:
        """``on_lost``: the other end is closed, or this one has been."""
        self._on_message = on_message
        self._on_lost = on_lost
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.Event()

    async def open(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)

    def send(self, message: object) -> None:
        """Nothing happens once the channel is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    async def close(self) -> None:
        """Close when all that was sent has been read."""
        if self._transport is not None:
            self._transport.close()
            await self._closed.wait()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        begin = 0
        while (end := self._end_of_message(begin)) is not None:
            message = pickle.loads(memoryview(self._received)[begin + _LENGTH_BYTES : end])
            begin = end
            self._on_message(message)
        # All at once: a step's deltas often come together with those of the step before.
        del self._received[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()
        self._on_lost()

    def _end_of_message(self, begin: int) -> int | None:
        """Where the message that begins there ends, if all of it has come."""
        body = begin + _LENGTH_BYTES
        if len(self._received) < body:
            return None
        end = body + int.from_bytes(self._received[begin:body], "big")
        return end if len(self._received) >= end else None


def frame(message: object) -> bytes:
    """A message as it stands on the socket."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def receive(sock: socket.socket) -> Any:
    """The next message of a socket that no channel has taken over; waits for it.

    Raises EOFError where the other end is closed.
    """
    length = int.from_bytes(_read(sock, _LENGTH_BYTES), "big")
    return pickle.loads(_read(sock, length))


def _read(sock: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = sock.recv(min(length - len(data), 2**20))
        if not piece:
            raise EOFError("the other end is closed")
        data += piece
    return bytes(data)
