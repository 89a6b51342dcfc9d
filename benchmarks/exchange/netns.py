"""Measure over a real TCP link of a given rate, and of a round trip and a loss if they are given.

    sudo python -m benchmarks.exchange.netns --world 4 --rate 1gbit -- -b 64M -e 64M --wire int8
    sudo python -m benchmarks.exchange.netns --rate 100mbit --round-trip 80 \\
        --benchmark exchange.one_port -- against-gloo -b 32M -n 3

Every rank lives in a network namespace of its own, and a further namespace holds the bridge that
joins them, so nothing of the host's network is touched. ``tc tbf`` shapes each rank's link in both
directions, like the network card of a host. Everything is removed at the end, also after Ctrl-C.

A link with a round trip needs no netem. Each rank has a namespace with a TUN device. One process
reads the packets of all devices, and hands each packet on when the link of its sender would have
delivered that packet: after the packets before it, at the rate of the link, and after half of the
round trip. Beyond 200 Mbit/s that process is the limit.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any

from benchmarks.support.common import benchmark_command, run_workers, stoppable
from benchmarks.support.namespaces import Namespaces, address, call, missing_tools
from diloco_comm_tools.common.workers import die_with_launcher

INTERFACE = "dlnet"
# The shaper refills its bucket once a timer tick: a smaller bucket at 1 Gbit/s limits the rate.
_BURST_SECONDS = 0.008
_MIN_BURST_BYTES = 128 * 1024
_QUEUE_SECONDS = 0.05
_MTU = 1500
# From linux/if_tun.h.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# The version in the first byte of a packet.
_IPV4 = 4


def missing() -> str | None:
    """Say why shaped links between namespaces cannot be made here; None when they can."""
    if reason := missing_tools("ip", "tc"):
        return reason
    try:
        # Containers may allow namespaces but not bridges, or lack the kernel's module for tbf.
        with Network(1, 1000.0):
            return None
    except RuntimeError as error:
        return f"this kernel or container does not allow shaped links: {error}"


class Network(Namespaces):
    """`world` namespaces around one bridge, whose links have a rate; a context manager.

    Args:
        world: Number of ranks.
        mbits: Rate of each rank's link in Mbit/s (1e6 bits); None leaves it unlimited.
    """

    def __init__(self, world: int, mbits: float | None) -> None:
        super().__init__(world, "dl", INTERFACE)
        self.world, self.mbits = world, mbits

    @property
    def description(self) -> str:
        if self.mbits is None:
            return "network namespaces, veth, unlimited"
        return f"simulated: {self.mbits:g} Mbit/s each way by tc tbf, network namespaces, veth"

    @property
    def burst_bytes(self) -> int:
        """Bytes that pass unshaped after an idle time; 0 when the link is unlimited."""
        if self.mbits is None:
            return 0
        return max(int(self.mbits * 1e6 / 8 * _BURST_SECONDS), _MIN_BURST_BYTES)

    def build(self) -> None:
        super().build()
        if self.mbits is None:
            return
        for rank, name in enumerate(self.names):
            self._shape(name, INTERFACE)
            self._shape(self.hub, f"port{rank}")

    def _shape(self, namespace: str, device: str) -> None:
        assert self.mbits is not None
        queue_bytes = int(self.mbits * 1e6 / 8 * _QUEUE_SECONDS) + 4 * 65536
        limit = ["limit", str(self.burst_bytes + queue_bytes)]
        shaper = ["tbf", "rate", f"{self.mbits:g}mbit", "burst", str(self.burst_bytes), *limit]
        call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shaper)

    def run(self, command: list[str], **options: Any) -> None:
        """Run one process of `command` in each namespace, as `common.run_workers`.

        The command is told what the link is (``--link``) and, where the link has shapers, how many
        bytes empty their buckets (``--drain``), without which a short transfer would go faster than
        the link.
        """
        env = {"MASTER_ADDR": address(0), "MASTER_PORT": "29500"}
        # Addresses here have no names, and c10d warns about each.
        env |= {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        prefixes = [["ip", "netns", "exec", name] for name in self.names]
        command = [*command, "--link", self.description]
        if self.burst_bytes:
            command += ["--drain", str(2 * self.burst_bytes)]
        run_workers(command, self.world, prefixes=prefixes, env=env, **options)


def parse_rate(text: str) -> float | None:
    """Read ``1gbit``, ``100mbit`` or ``unlimited`` as Mbit/s."""
    text = text.lower()
    if text == "unlimited":
        return None
    for suffix, scale in (("gbit", 1000.0), ("mbit", 1.0)):
        if text.endswith(suffix):
            with contextlib.suppress(ValueError):
                return float(text.removesuffix(suffix)) * scale
    raise argparse.ArgumentTypeError(f"a rate like 1gbit, 100mbit or unlimited, not {text!r}")


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


def missing_tun() -> str:
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
    add("--world", type=int, default=2, help="ranks, one namespace each")
    add("--rate", type=parse_rate, default="1gbit", help="each way: 1gbit | 100mbit | unlimited")
    add("--round-trip", type=float, metavar="MS", help="from rank to rank and back")
    add("--loss", type=float, default=0.0, metavar="SHARE", help="of the packets, such as .01")
    add("--queue", type=float, default=0.2, metavar="S", help="longest wait of a packet")
    add("--congestion", default="", metavar="NAME", help="bbr, cubic, ...; default: the machine's")
    add("--timeout", type=float, default=600.0, metavar="S", help="for the benchmark")
    add("--benchmark", default="exchange.all_reduce", metavar="ROOM.NAME", help="run by each rank")
    add("arguments", nargs="*", help="arguments of the benchmark, after --")
    args = parser.parse_args()
    is_long = args.round_trip is not None
    if is_long and args.rate is None:
        parser.error("a link with a round trip needs a rate, such as 100mbit")
    if reason := missing_tun() if is_long else missing():
        print(f"# skipped: {reason}")
        return 0
    network = Network(args.world, args.rate)
    if is_long:
        network = LongNetwork(
            args.rate,
            world=args.world,
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
