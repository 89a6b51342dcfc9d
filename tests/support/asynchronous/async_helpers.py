"""A server in a thread and small workers for the tests of asynchronous training."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import zmq
from choice_groups import grouped
from torch import Tensor, nn

from diloco_comm import ops
from diloco_comm.asynchronous.link import read_status
from diloco_comm.asynchronous.messages import Kind, Message, pack, parse
from diloco_comm.asynchronous.rules import Immediate, ServerRule
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.worker import AsyncDiLoCo
from diloco_comm.methods.outer import SGD
from diloco_comm.ops.wire import Layout

PLAIN = Immediate(outer=SGD(1.0))

# Messages of a worker with the model Flat, sent by a test.
HELLO = {"worker": "peer", "layout": 5, "sizes": [7]}
PUSH = {"wire": "fp32", "block_size": 256, "steps": 1, "seconds": 0.1, "is_start": False}


class Flat(nn.Module):
    """Parameters that a test moves by hand, in two tensors of odd shape."""

    def __init__(self, size: int = 7, value: float = 1.0) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((size - 1,), value))
        self.b = nn.Parameter(torch.full((1,), value))

    def values(self) -> Tensor:
        return torch.cat([self.a.detach(), self.b.detach()])

    @torch.no_grad()
    def descend(self, g: Tensor) -> None:
        """Move so that the pseudo-gradient of the round grows by ``g``."""
        self.a -= g[:-1]
        self.b -= g[-1:]


def attach(server: str, name: str, size: int = 7, **options: Any) -> tuple[Flat, AsyncDiLoCo]:
    model = Flat(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"wire": "fp32", "timeout": 20.0, "attach": False, **options}
    return model, AsyncDiLoCo(model, optimizer, server=server, name=name, **grouped(options))


@contextmanager
def serving(rule: ServerRule = PLAIN, **options: Any):
    server = AsyncServer(rule, **{"sync_every": 1, **options})
    with server:
        yield server


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def status(server: AsyncServer | str) -> dict:
    return read_status(server if isinstance(server, str) else server.address, timeout=20.0)


class Peer:
    """A DEALER socket that sends any message."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)

    def say(self, message: Message) -> None:
        self.socket.send_multipart(pack(message))

    def say_raw(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def hear(self, seconds: float = 20.0, *, skip: tuple[Kind, ...] = ()) -> Message | None:
        """Return the next message of a kind that is not skipped."""
        while self.socket.poll(int(1000 * seconds)):
            message = parse(self.socket.recv_multipart())
            if message.kind not in skip:
                return message
        return None

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def tcp(address: str) -> socket.socket:
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20)


class Relay:
    """A wire to a server that a test can cut without a word to either end, as a lost host does."""

    def __init__(self, address: str) -> None:
        self._server = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._is_cut = self._is_over = self._is_shut = False
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def cut(self, *, shut: bool = False) -> None:
        """Carry no further byte of the present connections, and leave the connections open.

        Args:
            shut: New connections wait for ``open``.
        """
        self._is_shut = shut
        self._is_cut = True
        wait_until(lambda: not self._pairs)

    def open(self) -> None:
        """Carry new connections again."""
        self._is_shut = False

    def _carry(self) -> None:
        silent: list[socket.socket] = []
        while not self._is_over:
            doors = [] if self._is_shut else [self._listener]
            ready, _, _ = select.select([*doors, *self._pairs], [], [], 0.01)
            if self._is_cut:
                silent += self._pairs
                self._pairs.clear()
                self._is_cut = False
                continue
            for one in ready:
                if one is self._listener:
                    here, there = one.accept()[0], tcp(self._server)
                    self._pairs |= {here: there, there: here}
                elif one in self._pairs:
                    self._pass_on(one)
        for one in (*silent, *self._pairs, self._listener):
            one.close()

    def _pass_on(self, one: socket.socket) -> None:
        try:
            data = one.recv(1 << 16)
            if data:
                self._pairs[one].sendall(data)
                return
        except OSError:
            pass
        other = self._pairs.pop(one)
        del self._pairs[other]
        one.close()
        other.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over = True
        self._thread.join()


def start_by_hand(peer: Peer, worker: str = "peer") -> None:
    """Attach by hand to a server with parameters."""
    peer.say(Message(Kind.HELLO, meta={**HELLO, "worker": worker}))
    assert peer.hear().kind == Kind.WELCOME


def push_by_hand(peer: Peer, body: bytes, seq: int = 1, version: int = 0) -> Message:
    peer.say(Message(Kind.PUSH, seq, version, meta=PUSH))
    # Who is done with a round is told by itself what to go on from.
    answer = peer.hear(skip=(Kind.READY,))
    if answer.kind != Kind.WANT:
        return answer
    peer.say(Message(Kind.RUN, seq, 0, 0, 0, body=body))
    return peer.hear(skip=(Kind.READY,))


def payload(values: list[float]) -> bytes:
    """One run of 1024 elements on the fp32 wire."""
    return np.array([*values, *[0.0] * (1024 - len(values))], np.float32).tobytes()


def encode(values: Tensor, layout: Layout, *, base: Tensor | None = None) -> Tensor:
    """Return values, or base - values, encoded as the layout says: uint8 [payload_bytes]."""
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    ops.encode(base, [values], payload, *layout.whole)
    return payload
