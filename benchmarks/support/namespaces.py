"""Network namespaces around one bridge, one namespace a rank.

Nothing of the host's network is touched. Making the namespaces needs Linux, root and the command
``ip`` (package iproute2).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

# RFC 5737 documentation addresses: they never belong to a real host.
NETWORK = "192.0.2"
# From linux/sched.h.
_CLONE_NEWNET = 0x40000000


def missing_tools(*tools: str) -> str:
    """Say what making namespaces lacks here; empty when nothing is missing."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in tools:
        if shutil.which(tool) is None:
            return f"the command {tool!r} (package iproute2) is not installed"
    return ""


def call(*words: str) -> None:
    """Run a command; RuntimeError with its error output when it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)!r} failed: {done.stderr.strip()}")


def address(rank: int) -> str:
    """Return the address of a rank's interface."""
    return f"{NETWORK}.{rank + 1}"


def enter(namespace: str, interface: str) -> None:
    """Move the calling thread, and threads that it starts from now on, into a namespace."""
    file = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(file, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace} failed")
    finally:
        os.close(file)
    os.environ["GLOO_SOCKET_IFNAME"] = interface


def opened_connections() -> int:
    """Return how many TCP connections the namespace of this process has opened since its begin."""
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, values = [line.split() for line in lines if line.startswith("Tcp:")]
    return int(values[names.index("ActiveOpens")])


class Namespaces:
    """`world` namespaces, each with one interface, and one more that holds their bridge.

    A context manager: all namespaces are deleted at its end, also after Ctrl-C.

    Args:
        world: Number of ranks.
        stem: What the names of the namespaces begin with, beside this process's number.
        interface: Name of the interface in each rank's namespace.
        bridge_address: An address for the bridge itself, or "" for none.

    Attributes:
        hub: Name of the namespace of the bridge, whose ports are ``port0``, ``port1``, ...
        names: Names of the ranks' namespaces.
    """

    def __init__(self, world: int, stem: str, interface: str, bridge_address: str = "") -> None:
        stem = f"{stem}{os.getpid()}"
        self.hub = f"{stem}hub"
        self.names = [f"{stem}n{rank}" for rank in range(world)]
        self._interface, self._bridge_address = interface, bridge_address

    def __enter__(self) -> Self:
        try:
            self.build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def build(self) -> None:
        """Make the namespaces, the bridge and the interfaces."""
        call("ip", "netns", "add", self.hub)
        call("ip", "-n", self.hub, "link", "add", "name", "hub", "type", "bridge")
        if self._bridge_address:
            call("ip", "-n", self.hub, "addr", "add", f"{self._bridge_address}/24", "dev", "hub")
        for device in ("hub", "lo"):
            call("ip", "-n", self.hub, "link", "set", device, "up")
        for rank, name in enumerate(self.names):
            port = f"port{rank}"
            call("ip", "netns", "add", name)
            peer = ["peer", "name", port, "netns", self.hub]
            call("ip", "-n", name, "link", "add", self._interface, "type", "veth", *peer)
            call("ip", "-n", self.hub, "link", "set", port, "master", "hub", "up")
            call("ip", "-n", name, "addr", "add", f"{address(rank)}/24", "dev", self._interface)
            for device in (self._interface, "lo"):
                call("ip", "-n", name, "link", "set", device, "up")

    def close(self) -> None:
        """Delete the namespaces, and with them all that is inside; never raises."""
        for name in [*self.names, self.hub]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
