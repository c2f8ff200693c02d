"""The process of an engine: builds it and does what its server's process says.

``python -m loramux.engine.child FD PARENT``: a socket, and the process id of who started it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from loramux.engine import messages
from loramux.engine.channel import Channel, frame, receive
from loramux.engine.interface import Service
from loramux.engine.own_process import keep_steps_steady
from loramux.errors import LoramuxError
from loramux.types import Delta

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int) -> None:
    """Build a service as the first two messages say, and serve it until the other end is closed."""
    sock = socket.socket(fileno=fd)
    die_with(parent)
    # Ctrl-C goes to all processes of a terminal and a unit's stop to all of a unit's; requests that
    # run are to finish first, and when they have the parent knows. What a hangup means, too.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        sys.path[:] = receive(sock)
        build: Callable[[], Service] = receive(sock)
    except EOFError:
        return
    try:
        service = build()
    except LoramuxError as error:
        sock.sendall(frame(messages.NotStarted(error)))
        return
    asyncio.run(_Host(service).run(sock))


def die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, however that ends.

    Elsewhere than on Linux the end of the socket is what tells, which nobody reads while a model is
    loaded.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")


class _Host:
    """Carries out calls one beside the other and passes on what the service says."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._channel = Channel(self._receive, self._stop)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._stopped = asyncio.Event()

    async def run(self, sock: socket.socket) -> None:
        await self._channel.open(sock)
        starting = asyncio.create_task(self._start())
        stopped = asyncio.create_task(self._stopped.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        try:
            await starting
            await stopped
        except LoramuxError as error:
            self._channel.send(messages.NotStarted(error))
        except asyncio.CancelledError:
            pass
        finally:
            stopped.cancel()
            await self._service.stop()
            await self._channel.close()

    async def _start(self) -> None:
        await self._service.start(self)
        keep_steps_steady()
        self._channel.send(
            messages.Started(
                self._service.base_name,
                self._service.max_model_len,
                await self._service.adapters(),
                await self._service.stats(),
            )
        )

    # What the service says.

    def deliver(self, deltas: Sequence[Delta]) -> None:
        self._channel.send(messages.pack(deltas))

    def end(self, failure: str) -> None:
        self._channel.send(messages.Ended(failure))

    # What the other process says.

    def _receive(self, message: Any) -> None:
        match message:
            case messages.Call(number):
                task = asyncio.create_task(self._answer(message))
                self._tasks[number] = task
                task.add_done_callback(lambda _: self._tasks.pop(number))
            case messages.Cancel(number):
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            case messages.Abort(request_id):
                self._service.abort(request_id)
            case messages.Stop():
                self._stop()
            case _:
                raise AssertionError(f"no message to an engine: {message!r}")

    async def _answer(self, call: messages.Call) -> None:
        try:
            value = await self._carry_out(call)
        except LoramuxError as error:
            self._channel.send(messages.Error(call.number, error))
        except Exception as error:
            log.exception("%s has failed", call.method)
            told = RuntimeError(f"{type(error).__name__}: {error}")
            self._channel.send(messages.Error(call.number, told))
        else:
            self._channel.send(messages.Result(call.number, value))

    async def _carry_out(self, call: messages.Call) -> Any:
        assert call.method in messages.CALLS, call.method
        if call.method == messages.CODEC_KEY:
            return (await self._service.text_of(*call.args)).key
        return await getattr(self._service, call.method)(*call.args, **call.options)

    def _stop(self) -> None:
        self._stopped.set()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
