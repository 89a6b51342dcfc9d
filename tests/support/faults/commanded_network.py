"""A network between processes that tests command: a forwarder for each way from one to another."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

# A command to the network takes much less.
COMMAND_S = 60.0
Spoil = Callable[[bytes], bytes]


@dataclass(eq=False)
class Route:
    """The connections that one process dials to another process, and what befalls their bytes."""

    target: str
    address: str = ""
    flows: list[list[asyncio.StreamWriter]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_single: int = 0  # bytes that still travel one by one
    left: int | None = None  # bytes until the connection that carries the last byte is cut
    is_reset: bool = False  # how the connection is cut then
    num_cuts: int = 0
    spoil: Spoil | None = None


class Network:
    """A forwarder for each direction between two links, which tests command."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._routes: list[Route] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def _run(self, step: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(step, self._loop).result(COMMAND_S)

    def route(self, target: str) -> Route:
        """Return a new way to a link."""
        return self._run(self._open(target))

    async def _open(self, target: str) -> Route:
        route = Route(target)
        route.gate.set()

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            with suppress(OSError):
                await self._meet(route, reader, writer)
            writer.transport.abort()
            self._tasks.discard(task)

        server = await asyncio.start_server(meet, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        route.address = f"{host}:{port}"
        self._servers.append(server)
        self._routes.append(route)
        return route

    async def _meet(
        self, route: Route, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        host, port = route.target.split(":")
        there, outer = await asyncio.open_connection(host, int(port))
        flow = [writer, outer]
        route.flows.append(flow)
        try:
            await asyncio.gather(
                self._carry(route, flow, reader, outer), self._carry(route, flow, there, writer)
            )
        finally:
            outer.transport.abort()
            if flow in route.flows:
                route.flows.remove(flow)

    async def _carry(
        self,
        route: Route,
        flow: list[asyncio.StreamWriter],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        while chunk := await reader.read(1 << 16):
            await route.gate.wait()
            if route.spoil is not None:
                chunk = route.spoil(chunk)
            if route.left is not None:
                chunk = chunk[: route.left]
                route.left -= len(chunk)
            single = chunk[: route.num_single]
            route.num_single -= len(single)
            for at in range(len(single)):
                writer.write(single[at : at + 1])
                await asyncio.sleep(0)
            writer.write(chunk[len(single) :])
            await writer.drain()
            if route.left == 0:
                route.left = None
                self._cut(route, [flow], route.is_reset)
                return
        await route.gate.wait()
        writer.write_eof()

    def cut(self, route: Route, is_single: bool, is_reset: bool, at: int = 0) -> int:
        """End connections, all of them or a single one by its age; return their number."""

        async def step() -> int:
            flows = route.flows[at : at + 1] if is_single else list(route.flows)
            return self._cut(route, flows, is_reset)

        return self._run(step())

    @staticmethod
    def _cut(route: Route, flows: list[list[asyncio.StreamWriter]], is_reset: bool) -> int:
        for flow in flows:
            for writer in flow:
                if is_reset:
                    at_once = struct.pack("ii", 1, 0)
                    with suppress(OSError):
                        one = writer.get_extra_info("socket")
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                writer.transport.abort()
            if flow in route.flows:
                route.flows.remove(flow)
                route.num_cuts += 1
        return len(flows)

    def set(self, route: Route, **values: Any) -> None:
        """Change what befalls the next bytes; ``is_held`` stops the bytes or lets them go on."""

        async def step() -> None:
            for name, value in values.items():
                if name != "is_held":
                    setattr(route, name, value)
                elif value:
                    route.gate.clear()
                else:
                    route.gate.set()

        self._run(step())

    def close(self) -> None:
        async def step() -> None:
            for server in self._servers:
                server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)

        self._run(step())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
