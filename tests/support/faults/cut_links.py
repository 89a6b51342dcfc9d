"""Replicas in network namespaces of their own, whose links can be cut in pairs.

    with Site(3) as site:           # 3 namespaces around a bridge, which is the store's host
        enter(site.names[0])        # in a worker: its later connections leave from there
        site.cut(1, 2)

The store stays within everybody's reach. Nothing of the host's network is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from benchmarks.support.namespaces import NETWORK, Namespaces, address, call, missing_tools

INTERFACE = "dlcut"
HUB = f"{NETWORK}.254"
_CLONE_NEWNET = 0x40000000


def missing() -> str:
    """Say why namespaces cannot be made here; empty when they can."""
    if reason := missing_tools("ip"):
        return reason
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


class Site(Namespaces):
    """``world`` namespaces around one bridge; a context manager."""

    def __init__(self, world: int) -> None:
        super().__init__(world, "dlc", INTERFACE, HUB)

    def cut(self, a: int, b: int, how: str = "both ways") -> None:
        """Drop what two of them send to each other.

        Args:
            how: "both ways" or "one way" (from a to b) where it is sent; "isolated": on the bridge,
                where the sender does not notice.
        """
        if how == "isolated":
            for rank in (a, b):
                port = ["link", "set", "dev", f"port{rank}", "type", "bridge_slave"]
                call("ip", "-n", self.hub, *port, "isolated", "on")
            return
        for here, there in ((a, b), (b, a))[: 1 if how == "one way" else 2]:
            call("ip", "-n", self.names[here], "route", "add", "blackhole", address(there))

    def heal(self, a: int, b: int) -> None:
        """Undo the cuts "both ways" and "one way" between two of them."""
        for here, there in ((a, b), (b, a)):
            with contextlib.suppress(RuntimeError):
                call("ip", "-n", self.names[here], "route", "del", "blackhole", address(there))
