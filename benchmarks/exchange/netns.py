"""Measure over a real TCP link of a given rate: network namespaces, a bridge and ``tc tbf``.

    sudo python -m benchmarks.exchange.netns --world 4 --rate 1gbit -- -b 64M -e 64M --wire int8

Every rank lives in a network namespace of its own, and a further namespace holds the bridge that
joins them, so nothing of the host's network is touched. Each rank's link is shaped in both
directions, like the network card of a host. Everything is removed at the end, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from benchmarks.support.common import benchmark_command, run_workers, stoppable
from benchmarks.support.namespaces import Namespaces, address, call, missing_tools

INTERFACE = "dlnet"
# The shaper refills its bucket once a timer tick: a smaller bucket at 1 Gbit/s limits the rate.
_BURST_SECONDS = 0.008
_MIN_BURST_BYTES = 128 * 1024
_QUEUE_SECONDS = 0.05


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2, help="ranks, one namespace each")
    parser.add_argument(
        "--rate", type=parse_rate, default="1gbit", help="1gbit | 100mbit | unlimited"
    )
    parser.add_argument(
        "--benchmark",
        default="exchange.all_reduce",
        metavar="ROOM.NAME",
        help="benchmark run in every namespace",
    )
    parser.add_argument("arguments", nargs="*", help="arguments of the benchmark, after --")
    args = parser.parse_args()
    reason = missing()
    if reason:
        print(f"# skipped: {reason}")
        return 0
    with stoppable(), Network(args.world, args.rate) as network:
        network.run(benchmark_command(args.benchmark, *args.arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
