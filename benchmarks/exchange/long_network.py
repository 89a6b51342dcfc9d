"""Measure over links with a rate, a delay and a loss, in network namespaces, without netem.

    sudo python -m benchmarks.exchange.long_network --rate 100mbit --round-trip 80 -- -b 32M -n 3

Each namespace has a TUN device. One process reads the packets of all devices, and hands each packet
on when the link would have delivered that packet: the sender's line and the receiver's line take
the packet one after the other at the rate of the link, and the way between the lines takes half of
the round trip. Beyond 200 Mbit/s that process is the limit.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections import deque

from benchmarks.exchange.netns import INTERFACE, Network, parse_rate
from benchmarks.support.common import benchmark_command, stoppable
from benchmarks.support.namespaces import address, call, missing_tools

_MTU = 1500
# From linux/if_tun.h.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# The version in the first byte of a packet, and the place of the last byte of its target.
_IPV4, _DESTINATION = 4, 19


class LongNetwork(Network):
    """`world` namespaces whose packets take time, and may be lost; a context manager.

    Args:
        world: Number of ranks.
        mbits: Rate of each rank's line in Mbit/s (1e6 bits), each way.
        round_trip_ms: Milliseconds from one rank to another and back, beside the time in queues.
        loss: Share of the packets that the way between two lines loses, in [0, 1).
        queue_s: Seconds that a packet may wait for its line; one that would wait longer is lost.
        congestion: Congestion control of the namespaces, or "" for the machine's.
    """

    def __init__(
        self,
        world: int,
        mbits: float,
        *,
        round_trip_ms: float = 0.0,
        loss: float = 0.0,
        queue_s: float = 0.2,
        congestion: str = "",
    ) -> None:
        super().__init__(world, mbits)
        self.rate = mbits * 1e6 / 8
        self.round_trip_ms, self.loss, self.queue_s = round_trip_ms, loss, queue_s
        self.congestion = congestion
        self._carrier = 0

    @property
    def description(self) -> str:
        words = [f"{self.mbits:g} Mbit/s each way", f"round trip {self.round_trip_ms:g} ms"]
        words += [f"loss {100 * self.loss:g} %", f"queue {self.queue_s:g} s", self.congestion]
        return f"simulated: {', '.join(filter(None, words))}; namespaces, TUN devices"

    @property
    def burst_bytes(self) -> int:
        return 0

    def build(self) -> None:
        devices = []
        for rank, name in enumerate(self.names):
            call("ip", "netns", "add", name)
            device, made = _tun(f"{INTERFACE}{rank}")
            devices.append(device)
            call("ip", "link", "set", made, "netns", name)
            call("ip", "-n", name, "link", "set", made, "name", INTERFACE, "mtu", str(_MTU))
            call("ip", "-n", name, "addr", "add", f"{address(rank)}/24", "dev", INTERFACE)
            for interface in (INTERFACE, "lo"):
                call("ip", "-n", name, "link", "set", interface, "up")
            if self.congestion:
                file = "/proc/sys/net/ipv4/tcp_congestion_control"
                call("ip", "netns", "exec", name, "sh", "-c", f"echo {self.congestion} >{file}")
        self._carrier = os.fork()
        if self._carrier == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                self._carry(devices)
            finally:
                os._exit(1)
        for device in devices:
            os.close(device)

    def close(self) -> None:
        if self._carrier:
            os.kill(self._carrier, signal.SIGKILL)
            os.waitpid(self._carrier, 0)
            self._carrier = 0
        super().close()

    def _carry(self, devices: list[int]) -> None:
        """Hand packets on for ever."""
        ways: dict[int, deque[tuple[float, bytes]]] = {device: deque() for device in devices}
        sends = dict.fromkeys(devices, 0.0)  # when the line of a device is free
        takes = dict.fromkeys(devices, 0.0)
        by_address = {
            socket.inet_aton(address(rank))[3]: device for rank, device in enumerate(devices)
        }
        draw = random.Random(0).random
        events = select.epoll()
        for device in devices:
            events.register(device, select.EPOLLIN)
        while True:
            now = time.monotonic()
            first = min((way[0][0] for way in ways.values() if way), default=now + 1.0)
            for device, _ in events.poll(max(0.0, first - now)):
                for packet in _packets(device):
                    now = time.monotonic()
                    target = by_address.get(packet[_DESTINATION])
                    start = max(now, sends[device])
                    if packet[0] >> 4 != _IPV4 or target is None or start - now > self.queue_s:
                        continue
                    sends[device] = start + len(packet) / self.rate
                    arrival = sends[device] + self.round_trip_ms / 2e3
                    start = max(arrival, takes[target])
                    if draw() < self.loss or start - arrival > self.queue_s:
                        continue
                    takes[target] = start + len(packet) / self.rate
                    ways[target].append((takes[target], packet))
            now = time.monotonic()
            for device, way in ways.items():
                while way and way[0][0] <= now:
                    _put(device, way.popleft()[1])


def _tun(name: str) -> tuple[int, str]:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI)
    made = fcntl.ioctl(device, _TUNSETIFF, request)
    return device, made[:16].rstrip(b"\0").decode()


def _packets(device: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < 64:
        try:
            found.append(os.read(device, 65536))
        except BlockingIOError:
            break
    return found


def _put(device: int, packet: bytes) -> None:
    try:
        os.write(device, packet)
    except OSError:
        return  # the device's queue is full, or its namespace ends


def missing() -> str:
    """Say why such links cannot be made here; empty when they can."""
    if reason := missing_tools("ip"):
        return reason
    try:
        os.close(_tun(f"{INTERFACE}x")[0])
    except OSError as error:
        return f"this kernel or container allows no TUN device: {error}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--world", type=int, default=2, help="ranks, one namespace each")
    add("--rate", type=parse_rate, default="100mbit", help="of each rank's line, each way")
    add("--round-trip", type=float, default=80.0, metavar="MS", help="from rank to rank and back")
    add("--loss", type=float, default=0.0, metavar="SHARE", help="of the packets, such as .01")
    add("--queue", type=float, default=0.2, metavar="S", help="longest wait of a packet")
    add("--congestion", default="", metavar="NAME", help="bbr, cubic, ...; default: the machine's")
    add("--benchmark", default="exchange.link_against_gloo", metavar="ROOM.NAME")
    add("arguments", nargs="*", help="arguments of the benchmark, after --")
    args = parser.parse_args()
    if args.rate is None:
        parser.error("a long link needs a rate, such as 100mbit")
    if reason := missing():
        print(f"# skipped: {reason}")
        return 0
    network = LongNetwork(
        args.world,
        args.rate,
        round_trip_ms=args.round_trip,
        loss=args.loss,
        queue_s=args.queue,
        congestion=args.congestion,
    )
    with stoppable(), network:
        network.run(benchmark_command(args.benchmark, *args.arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
