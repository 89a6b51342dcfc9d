"""Replicas in network namespaces of their own, whose links can be cut in pairs.

    with Site(3) as site:           # 3 namespaces around a bridge, which is the store's host
        enter(site.names[0])        # in a worker: its later connections leave from there
        site.cut(1, 2)

The store stays within everybody's reach. Nothing of the host's network is touched.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys

INTERFACE = "dlcut"
# RFC 5737 documentation addresses: they never belong to a real host.
_NETWORK = "192.0.2"
HUB = f"{_NETWORK}.254"
_CLONE_NEWNET = 0x40000000


def missing() -> str:
    """Say why namespaces cannot be made here; empty when they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command 'ip' (package iproute2) is not installed"
    try:
        with Site(2) as site:
            site.cut(0, 1, "isolated")
    except RuntimeError as error:
        return f"this kernel or container does not allow namespaces with a bridge: {error}"
    return ""


def enter(namespace: str) -> None:
    """Move the calling thread, and threads that it starts from now on, into a namespace."""
    file = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(file, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace} failed")
    finally:
        os.close(file)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


class Site:
    """``world`` namespaces around one bridge; a context manager."""

    def __init__(self, world: int) -> None:
        stem = f"dlc{os.getpid()}"
        self.hub = f"{stem}hub"
        self.names = [f"{stem}n{rank}" for rank in range(world)]

    def __enter__(self) -> Site:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        _run("ip", "netns", "add", self.hub)
        _run("ip", "-n", self.hub, "link", "add", "name", "hub", "type", "bridge")
        _run("ip", "-n", self.hub, "addr", "add", f"{HUB}/24", "dev", "hub")
        for device in ("hub", "lo"):
            _run("ip", "-n", self.hub, "link", "set", device, "up")
        for rank, name in enumerate(self.names):
            port = f"port{rank}"
            _run("ip", "netns", "add", name)
            peer = ["peer", "name", port, "netns", self.hub]
            _run("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", *peer)
            _run("ip", "-n", self.hub, "link", "set", port, "master", "hub", "up")
            _run("ip", "-n", name, "addr", "add", f"{self._address(rank)}/24", "dev", INTERFACE)
            for device in (INTERFACE, "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")

    @staticmethod
    def _address(rank: int) -> str:
        return f"{_NETWORK}.{rank + 1}"

    def cut(self, a: int, b: int, how: str = "both ways") -> None:
        """Drop what two of them send to each other.

        Args:
            how: "both ways" or "one way" (from a to b) where it is sent; "isolated": on the bridge,
                where the sender does not notice.
        """
        if how == "isolated":
            for rank in (a, b):
                port = ["link", "set", "dev", f"port{rank}", "type", "bridge_slave"]
                _run("ip", "-n", self.hub, *port, "isolated", "on")
            return
        for here, there in ((a, b), (b, a))[: 1 if how == "one way" else 2]:
            _run("ip", "-n", self.names[here], "route", "add", "blackhole", self._address(there))

    def close(self) -> None:
        """Delete the namespaces, and with them all that is inside; never raises."""
        for name in [*self.names, self.hub]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)!r} failed: {done.stderr.strip()}")
