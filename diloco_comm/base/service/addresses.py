"""Addresses of servers and links, and which of them other machines can reach."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from .. import env

# "host:port"; a host with colons of its own, as IPv6 has, stands in brackets.
_PLACE = re.compile(r"(?:\[([^\[\]\s]+)\]|([^\[\]:/@\s]+)):([0-9]{1,5})")
_MOST_PORT = 65535
# "scheme://[user[:password]@]host:port".
_PROXY = re.compile(r"(http|socks5)://(?:([^:@/\s]*)(?::([^@/\s]*))?@)?([^@/\s]+?)/?")
# Bytes of a user and of a password, which SOCKS5 counts in one byte.
_MOST_CREDENTIAL = 255


def parse_address(
    name: str, address: object, *, scheme: str = "tcp", listens: bool = False
) -> tuple[str, int]:
    """Return host and port of ``tcp://host:port`` or ``host:port``.

    An IPv6 address, as in "[::]:29700", has brackets, and is returned without them.

    Args:
        name: The argument, for the error.
        scheme: A scheme other than tcp must stand before the host.
        listens: Port 0 is any free port.

    Raises:
        ValueError: If the address is not of that form, or its port is out of range.
        TypeError: If the address is no string.
    """
    least = 0 if listens else 1
    text = address.removeprefix(f"{scheme}://") if isinstance(address, str) else ""
    found = _PLACE.fullmatch(text) if scheme == "tcp" or text != address else None
    port = -1 if found is None else int(found[3])
    if found is None or not least <= port <= _MOST_PORT:
        form, example = f"{scheme}://host:port", f"{scheme}://192.0.2.1:29400"
        if listens:
            form, example = "host:port", "0.0.0.0:29700"
        raise (ValueError if isinstance(address, str) else TypeError)(
            f'{name} must be {form} with a port from {least} to {_MOST_PORT}, such as "{example}", '
            f"got {address!r}"
        )
    return found[1] or found[2], port


def with_scheme(address: str) -> str:
    """Return an address with its scheme before it: tcp where none is given."""
    return address if "://" in address else f"tcp://{address}"


def is_loopback(host: str) -> bool:
    """Whether a host cannot be reached from other machines."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_to_bind(listen: str, keys: object, insecure: bool, *, maker: str) -> str:
    """Return the ``tcp://host:port`` at which a server listens.

    An address that other machines reach must have keys, or none must be wanted.

    Args:
        listen: ``host:port``.
        keys: Folder of keys, or None.
        insecure: The caller wants no keys.
        maker: The command that makes keys, for the error.

    Raises:
        ValueError: If ``listen`` is not of its form, or is open without keys.
        TypeError: If ``listen`` is no string.
    """
    host, port = parse_address("listen", listen, listens=True)
    if keys is None and not insecure and not is_loopback(host):
        raise ValueError(
            f"{listen} can be reached from other machines: give keys= (made by `{maker}`), "
            "or insecure=True to let in whoever finds the port"
        )
    return tcp_address(host, port)


def name_of_place(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around a host that has colons."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tcp_address(host: str, port: int) -> str:
    """Return ``tcp://host:port``, as addresses are printed."""
    return f"tcp://{name_of_place(host, port)}"


class Proxy(NamedTuple):
    """A proxy, as ``_C`` takes it. Its text has no password."""

    scheme: str
    host: str
    port: int
    user: str | None
    password: str

    def __repr__(self) -> str:
        return f"{self.scheme}://{name_of_place(self.host, self.port)}"


def proxy_of(text: str | None) -> Proxy | None:
    """Return the parts of ``http://host:port`` or ``socks5://host:port``; None for None.

    ``user:password@`` may stand before the host; other characters than letters, digits and
    ``-._~`` are written there as ``%`` and two hexadecimal digits. If the text has a user alone,
    the password comes from the environment, where no character is written in that way.

    Raises:
        ValueError: If the text is not of that form; the message has no password.
        TypeError: If it is no string.
    """
    if text is None:
        return None
    if not isinstance(text, str):
        raise TypeError(f"proxy must be a string, got {type(text).__name__}")
    found = _PROXY.fullmatch(text)
    place = None if found is None else _PLACE.fullmatch(found[4])
    port = 0 if place is None else int(place[3])
    if found is None or place is None or not 1 <= port <= _MOST_PORT:
        raise ValueError(
            'proxy must be "http://host:port" or "socks5://host:port", where "user:password@" may '
            f"stand before the host, got {shown_proxy(text)!r}"
        )
    user = None if found[2] is None else unquote(found[2])
    where = f"of proxy={shown_proxy(text)!r}"
    password, place_of_password = unquote(found[3] or ""), where
    if user is not None and found[3] is None:
        password, place_of_password = env.proxy_password(), f"in {env.PROXY_PASSWORD}"
    for name, value in (
        (f"user {where}", user or ""),
        (f"password {place_of_password}", password),
    ):
        if len(value.encode()) > _MOST_CREDENTIAL or not value.isprintable():
            raise ValueError(
                f"the {name} must have at most {_MOST_CREDENTIAL} bytes, and no control characters"
            )
    if user is not None and ":" in user and found[1] == "http":
        raise ValueError(f"the user {where} has a colon, which no user of an HTTP proxy can have")
    return Proxy(found[1], place[1] or place[2], port, user, password)


def check_no_password(proxy: str | None) -> None:
    """Make sure that a proxy on a command line has no password, which other users could read there.

    Raises:
        ValueError: If the proxy has a password.
    """
    if ":" in (proxy or "").partition("://")[2].rpartition("@")[0]:
        raise ValueError(
            "proxy must have no password on the command line, which other users of this machine "
            f"can read: give user@host:port, and the password in {env.PROXY_PASSWORD}"
        )


def shown_proxy(text: str) -> str:
    """Return a proxy, well written or not, without what may be a password."""
    scheme, mark, rest = text.rpartition("://")
    _, at, place = rest.rpartition("@")
    if not re.fullmatch(r"(\[[^\[\]\s]*\]|[^\[\]:\s]*)(:[0-9]*)?/?", place):
        place = place.partition(":")[0] + ":..."
    return f"{scheme.partition(':')[0]}{mark}{'...@' if at else ''}{place}"


def check_link(
    backend: str | None,
    listen: str | None,
    advertise: str | None,
    keys: str | Path | None = None,
    relay: str | None = None,
    proxy: str | None = None,
) -> None:
    """Check where a link listens, and where the others find it; see ``diloco_comm.Link``.

    Raises:
        ValueError: If the choices do not go together, or one of them is no place.
        TypeError: If one of them is no string.
    """
    proxy_of(proxy)
    shown = None if proxy is None else shown_proxy(proxy)
    own = {"listen": listen, "advertise": advertise, "keys": keys, "relay": relay, "proxy": shown}
    for name, value in own.items():
        if value is not None and backend != "tcp":
            given = "no backend" if backend is None else f"backend={backend!r}"
            text = repr(str(value) if isinstance(value, Path) else value)
            raise ValueError(f'{name}={text} needs link=Link(backend="tcp"), got {given}')
    if not isinstance(keys, str | Path | None):
        raise TypeError(f"keys must be a folder or a file NAME.key_secret, got {keys!r}")
    if relay is not None:
        _check_relay(relay, listen, advertise)
    own_port = None if listen in (None, "") else parse_address("listen", listen, listens=True)[1]
    if advertise is None:
        return
    if advertise == "":
        if own_port is not None:
            raise ValueError(
                f'advertise="" says that no replica can dial this one, and listen={listen!r} that '
                "some can: leave one of the two out"
            )
        return
    host, _ = parse_address("advertise", advertise)
    if is_wildcard(host):
        raise ValueError(f"advertise must name a host that the others can dial, got {advertise!r}")
    if not own_port:
        got = "no listen" if listen is None else f"listen={listen!r}"
        raise ValueError(
            f"advertise={advertise!r} needs listen= with the port to which that address leads, "
            f"got {got}"
        )


def _check_relay(relay: str, listen: str | None, advertise: str | None) -> None:
    parse_address("relay", relay)
    for name, value in (("listen", listen), ("advertise", advertise)):
        if value:
            raise ValueError(
                f"relay={relay!r} is for a process that nobody can dial, and {name}={value!r} says "
                "that some can: leave one of the two out"
            )


def link_places(
    listen: str | None,
    advertise: str | None,
    own_host: Callable[[], str],
    relay: str | None = None,
) -> tuple[str, str]:
    """Return the host:port where a link listens and tells the others, where "" is nowhere.

    In the second address, port 0 stands for the port at which the link then listens.

    Args:
        listen, advertise, relay: As ``check_link`` has checked.
        own_host: Returns the host for choices that are None; it may look a name up.
    """
    if relay is not None or listen == "" or (listen is None and advertise == ""):
        return "", ""
    host, port = (
        (own_host(), 0) if listen is None else parse_address("listen", listen, listens=True)
    )
    if advertise:
        reached = parse_address("advertise", advertise)
    else:
        reached = (own_host() if is_wildcard(host) else host), port
    return name_of_place(host, port), "" if advertise == "" else name_of_place(*reached)


def is_wildcard(host: str) -> bool:
    """Whether a host stands for all interfaces of its machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        # Short forms of 0.0.0.0, which a socket takes too.
        return set(host) <= {"0", "."} or host == "*"
