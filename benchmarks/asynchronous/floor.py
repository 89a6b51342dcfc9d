"""What ZeroMQ alone takes for the bytes of a round trip: no codec, no model, no protocol."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import zmq

from diloco_comm.asynchronous.messages import MAX_BODY


class Courier:
    """Carry as many bytes as a round trip by ZeroMQ, in messages of the same size, and no more."""

    def __init__(self, port: int, up: int) -> None:
        self.up = up
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._bytes = torch.zeros(up, dtype=torch.uint8).numpy().data

    def carry(self, down: int) -> None:
        for begin in range(0, self.up, MAX_BODY):
            self._socket.send(self._bytes[begin : begin + MAX_BODY], copy=False)
        self._socket.send(str(down).encode())
        while down > 0:
            down -= len(self._socket.recv(copy=False))

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def carrying() -> Iterator[int]:
    """Answer couriers on a port of this process, from one thread like the server's."""
    context, done = zmq.Context(), threading.Event()
    socket = context.socket(zmq.ROUTER)
    socket.sndhwm = socket.rcvhwm = 0
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    source = torch.zeros(MAX_BODY, dtype=torch.uint8).numpy().data

    def answer() -> None:
        while not done.is_set():
            if not socket.poll(50):
                continue
            peer, body = socket.recv_multipart(copy=False)
            if len(body) > 20:
                continue
            for begin in range(0, down := int(body.bytes), MAX_BODY):
                part = source[: min(MAX_BODY, down - begin)]
                socket.send_multipart([peer.bytes, part], copy=False)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield port
    finally:
        done.set()
        thread.join()
        context.destroy(linger=0)
