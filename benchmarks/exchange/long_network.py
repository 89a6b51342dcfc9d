"""Measure over a link with a rate, a delay and a loss, between network namespaces, without netem.

    sudo python -m benchmarks.exchange.long_network --rate 100mbit --round-trip 80 -- -b 32M -n 3

Each rank has a namespace with a TUN device. One process reads the packets of all devices, and hands
each packet on when the link of its sender would have delivered that packet: after the packets
before it, at the rate of the link, and after half of the round trip. Beyond 200 Mbit/s that process
is the limit.
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
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.exchange.netns import INTERFACE, Network, parse_rate
from benchmarks.support.common import benchmark_command, stoppable
from benchmarks.support.namespaces import address, call, missing_tools
from diloco_comm_tools.common.workers import die_with_launcher

_MTU = 1500
# From linux/if_tun.h.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# The version in the first byte of a packet.
_IPV4 = 4


@dataclass
class Way:
    """The packets of one sender, each with its arrival and the device of its receiver."""

    is_free_at: float = 0.0
    under_way: deque[tuple[float, int, bytes]] = field(default_factory=deque)


class LongNetwork(Network):
    """Namespaces whose packets take time, and may be lost; a context manager.

    Args:
        world: Number of ranks.
        mbits: Rate in Mbit/s (1e6 bits), each way.
        round_trip_ms: Milliseconds from one rank to the other and back, beside the queues.
        loss: Share of the packets that the link loses, in [0, 1).
        queue_s: Seconds that a packet may wait for the packets before it; one that would wait
            longer is lost.
        congestion: Congestion control of the namespaces, or "" for the machine's.
    """

    def __init__(
        self,
        mbits: float,
        *,
        world: int = 2,
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
        devices = {}
        for rank, name in enumerate(self.names):
            call("ip", "netns", "add", name)
            made = f"{INTERFACE}{os.getpid()}{rank}"
            devices[socket.inet_aton(address(rank))] = _tun(made)
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
            die_with_launcher()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                self._carry(devices)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        for device in devices.values():
            os.close(device)

    def close(self) -> None:
        if self._carrier:
            os.kill(self._carrier, signal.SIGKILL)
            os.waitpid(self._carrier, 0)
            self._carrier = 0
        super().close()

    def _carry(self, devices: Mapping[bytes, int]) -> None:
        """Hand packets on for ever, from device to device by address."""
        ways = {device: Way() for device in devices.values()}
        draw = random.Random(0).random
        events = select.epoll()
        for device in ways:
            events.register(device, select.EPOLLIN)
        while True:
            due = [way.under_way[0][0] for way in ways.values() if way.under_way]
            wait_s = min(due, default=float("inf")) - time.monotonic()
            for device, _ in events.poll(max(0.0, min(wait_s, 1.0))):
                way, now = ways[device], time.monotonic()
                for packet in _packets(device):
                    begin = max(now, way.is_free_at)
                    target = devices.get(packet[16:20]) if packet[0] >> 4 == _IPV4 else None
                    if target is None or begin - now > self.queue_s:
                        continue
                    way.is_free_at = begin + len(packet) / self.rate
                    if draw() >= self.loss:
                        arrival = way.is_free_at + self.round_trip_ms / 2e3
                        way.under_way.append((arrival, target, packet))
            now = time.monotonic()
            for way in ways.values():
                while way.under_way and way.under_way[0][0] <= now:
                    _put(*way.under_way.popleft()[1:])


def _tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(
            device, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI)
        )
    except OSError:
        os.close(device)
        raise
    return device


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
        # Containers may allow namespaces without TUN devices, or neither.
        with LongNetwork(1.0):
            return ""
    except (OSError, RuntimeError) as error:
        return f"this kernel or container does not allow TUN devices in namespaces: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rate", type=parse_rate, default="100mbit", help="each way")
    add("--round-trip", type=float, default=80.0, metavar="MS", help="from rank to rank and back")
    add("--loss", type=float, default=0.0, metavar="SHARE", help="of the packets, such as .01")
    add("--queue", type=float, default=0.2, metavar="S", help="longest wait of a packet")
    add("--congestion", default="", metavar="NAME", help="bbr, cubic, ...; default: the machine's")
    add("--timeout", type=float, default=600.0, metavar="S", help="for the benchmark")
    add("--benchmark", default="exchange.link_against_gloo", metavar="ROOM.NAME")
    add("arguments", nargs="*", help="arguments of the benchmark, after --")
    args = parser.parse_args()
    if args.rate is None:
        parser.error("a long link needs a rate, such as 100mbit")
    if reason := missing():
        print(f"# skipped: {reason}")
        return 0
    network = LongNetwork(
        args.rate,
        round_trip_ms=args.round_trip,
        loss=args.loss,
        queue_s=args.queue,
        congestion=args.congestion,
    )
    with stoppable(), network:
        network.run(benchmark_command(args.benchmark, *args.arguments), timeout_s=args.timeout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
