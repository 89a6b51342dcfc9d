"""Addresses of servers, and which of them other machines can reach."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def parse_address(address: str, scheme: str = "tcp") -> tuple[str, int]:
    """Return host and port of ``scheme://host:port``; an IPv6 address comes without brackets.

    Raises:
        ValueError: If the address is not of that form.
    """
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != scheme or not parts.hostname or port is None:
        raise ValueError(f"the address must be {scheme}://host:port, got {address!r}")
    return parts.hostname, port


def is_loopback(address: str, scheme: str = "tcp") -> bool:
    """Whether ``scheme://host:port`` cannot be reached from other machines.

    Raises:
        ValueError: If the address is not of that form.
    """
    host, _ = parse_address(address, scheme)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_keys(address: str, keys: object, insecure: bool, *, maker: str) -> None:
    """Make sure that an address which other machines reach has keys, or that none are wanted.

    Args:
        address: ``tcp://host:port``.
        keys: Folder of keys, or None.
        insecure: The caller wants no keys.
        maker: The command that makes keys, for the error.

    Raises:
        ValueError: If the address is not of its form, or is open without keys.
    """
    if keys is None and not insecure and not is_loopback(address):
        raise ValueError(
            f"{address} can be reached from other machines: give keys= (made by `{maker}`), "
            "or insecure=True to let in whoever finds the port"
        )
