"""Measure over a real TCP link of a given rate: network namespaces, a bridge and ``tc tbf``.

    sudo python benchmarks/netns.py --world 4 --rate 1gbit -- -b 64M -e 64M --wire int8,int4

Every rank lives in a network namespace of its own, and a further namespace holds the bridge that
joins them, so nothing of the host's network is touched. Each rank's link is shaped in both
directions, like the network card of a host. Everything is removed at the end, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import run_workers, stoppable

INTERFACE = "dlnet"
# RFC 5737 documentation addresses: they never belong to a real host.
_NETWORK = "192.0.2"
# The shaper refills its bucket once a timer tick: a smaller bucket at 1 Gbit/s limits the rate.
_BURST_SECONDS = 0.008
_MIN_BURST_BYTES = 128 * 1024
_QUEUE_SECONDS = 0.05


def missing() -> str | None:
    """Say why shaped links between namespaces cannot be made here; None when they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool!r} (package iproute2) is not installed"
    try:
        # Containers may allow namespaces but not bridges, or lack the kernel's module for tbf.
        with Network(1, 1000.0):
            return None
    except RuntimeError as error:
        return f"this kernel or container does not allow shaped links: {error}"


class Network:
    """`world` namespaces around one bridge; a context manager.

    Args:
        world: Number of ranks.
        mbits: Rate of each rank's link in Mbit/s (1e6 bits); None leaves it unlimited.
    """

    def __init__(self, world: int, mbits: float | None) -> None:
        self.world = world
        self.mbits = mbits
        stem = f"dl{os.getpid()}"
        self.switch = f"{stem}sw"
        self.names = [f"{stem}n{rank}" for rank in range(world)]

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

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "name", "hub", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "hub", "up")
        for rank, name in enumerate(self.names):
            port = f"port{rank}"
            _run("ip", "netns", "add", name)
            peer = ["peer", "name", port, "netns", self.switch]
            _run("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", *peer)
            _run("ip", "-n", self.switch, "link", "set", port, "master", "hub", "up")
            _run("ip", "-n", name, "addr", "add", f"{_NETWORK}.{rank + 1}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if self.mbits is not None:
                self._shape(name, INTERFACE)
                self._shape(self.switch, port)

    def _shape(self, namespace: str, device: str) -> None:
        assert self.mbits is not None
        queue_bytes = int(self.mbits * 1e6 / 8 * _QUEUE_SECONDS) + 4 * 65536
        limit = ["limit", str(self.burst_bytes + queue_bytes)]
        shaper = ["tbf", "rate", f"{self.mbits:g}mbit", "burst", str(self.burst_bytes), *limit]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shaper)

    def close(self) -> None:
        """Delete the namespaces, and with them all that is inside; never raises."""
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def run(self, command: list[str], **options: Any) -> None:
        """Run one process of `command` in each namespace, as `common.run_workers`.

        The command is told what the link is (``--link``) and how many bytes empty the shapers'
        buckets (``--drain``), without which a short transfer would go faster than the link.
        """
        env = {"MASTER_ADDR": f"{_NETWORK}.1", "MASTER_PORT": "29500"}
        # Addresses here have no names, and c10d warns about each.
        env |= {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        prefixes = [["ip", "netns", "exec", name] for name in self.names]
        command = [*command, "--link", self.description, "--drain", str(2 * self.burst_bytes)]
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


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)!r} failed: {done.stderr.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2, help="ranks, one namespace each")
    parser.add_argument(
        "--rate", type=parse_rate, default="1gbit", help="1gbit | 100mbit | unlimited"
    )
    parser.add_argument("--script", default="exchange.py", help="benchmark run in every namespace")
    parser.add_argument("arguments", nargs="*", help="arguments of the benchmark, after --")
    args = parser.parse_args()
    reason = missing()
    if reason:
        print(f"# skipped: {reason}")
        return 0
    script = str(Path(__file__).with_name(args.script))
    with stoppable(), Network(args.world, args.rate) as network:
        network.run([sys.executable, script, *args.arguments])
    return 0


if __name__ == "__main__":
    sys.exit(main())
