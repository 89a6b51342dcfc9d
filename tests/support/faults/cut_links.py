"""Replicas in network namespaces of their own, whose links can be cut in pairs.

    with Site(3) as site:           # 3 namespaces around a bridge, which is the store's host
        enter(site.names[0])        # in a worker: its later connections leave from there
        site.cut(1, 2)

The store stays within everybody's reach. Nothing of the host's network is touched.

    with Homes(3) as homes:         # each namespace behind a router of its own
        enter(homes.names[0])
"""

from __future__ import annotations

import contextlib

from benchmarks.support import namespaces
from benchmarks.support.namespaces import NETWORK, Namespaces, address, call, missing_tools

INTERFACE = "dlcut"
HUB = f"{NETWORK}.254"
# Translates the addresses of what leaves a home, and lets no connection in.
_ROUTER = """
table ip home {
    chain out {
        type nat hook postrouting priority srcnat
        oifname "wan" masquerade
    }
    chain in {
        type filter hook forward priority filter
        iifname "wan" ct state new drop
    }
    chain own {
        type filter hook input priority filter
        iifname "wan" ct state new drop
    }
}
"""


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


def missing_for_homes() -> str:
    """Say why homes behind routers cannot be made here; empty when they can."""
    if reason := missing() or missing_tools("nft"):
        return reason.replace("package iproute2", "packages iproute2 and nftables")
    try:
        with Homes(1):
            return ""
    except RuntimeError as error:
        return f"this kernel or container does not allow routers: {error}"


def enter(namespace: str) -> None:
    """Move the calling thread, and threads that it starts from now on, into a namespace."""
    namespaces.enter(namespace, INTERFACE)


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


class Homes(Namespaces):
    """``world`` namespaces, each behind a router on one bridge; a context manager.

    All have the same private address, as at many homes. They reach the bridge's address, and
    nobody can dial them.

    Attributes:
        names: The namespaces behind the routers.
    """

    def __init__(self, world: int) -> None:
        super().__init__(world, "dlr", "wan", HUB)
        self._routers = list(self.names)

    def build(self) -> None:
        super().build()
        self.names = [f"{router}h" for router in self._routers]
        for router, home in zip(self._routers, self.names, strict=True):
            call("ip", "netns", "add", home)
            peer = ["peer", "name", "lan", "netns", router]
            call("ip", "-n", home, "link", "add", INTERFACE, "type", "veth", *peer)
            for name, device, own in ((home, INTERFACE, "10.0.0.2"), (router, "lan", "10.0.0.1")):
                call("ip", "-n", name, "addr", "add", f"{own}/24", "dev", device)
                call("ip", "-n", name, "link", "set", device, "up")
            call("ip", "-n", home, "link", "set", "lo", "up")
            call("ip", "-n", home, "route", "add", "default", "via", "10.0.0.1")
            within = ["ip", "netns", "exec", router]
            call(*within, "sysctl", "-w", "net.ipv4.ip_forward=1")
            call(*within, "nft", _ROUTER)

    def close(self) -> None:
        """Delete the namespaces, and with them all that is inside; never raises."""
        self.names = [*self.names, *self._routers]
        super().close()
