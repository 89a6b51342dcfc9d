"""``OwnLink``: the link of this process: one port for all connections, and the keys to let in."""

from __future__ import annotations

import gc
import ipaddress
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ... import _C
from ...base import env
from ...base.checks import warn
from ...base.errors import SyncError, named
from ...base.service.addresses import Proxy, link_places, parse_address
from ...base.service.keys import AllowedWatch, LinkKeys
from ...base.service.relay import RelaySeat

_told: set[str] = set()


class OwnLink:
    """The link of this process, with all connections to its peers.

    Args:
        listen, advertise: See ``diloco_comm.Link``.
        keys: The keys of this process, and of the processes it lets in; None: no encryption.
        relay: ``tcp://host:port`` of the relay where this process waits; None without one.
        proxy: The proxy through which this process dials; None: it dials directly.

    Attributes:
        link: The link's C++ object.
        public_key: The public key as hexadecimal digits; empty without keys.

    Raises:
        RuntimeError: If this process cannot listen at ``listen``, there is no OpenSSL for the keys,
            or the relay cannot be reached.
    """

    def __init__(
        self,
        listen: str | None,
        advertise: str | None,
        keys: LinkKeys | None,
        relay: str | None = None,
        proxy: Proxy | None = None,
    ) -> None:
        places = link_places(listen, advertise, lambda: _C.own_host(env.gloo_interface()), relay)
        self._keys = keys
        self._watch: AllowedWatch | None = None
        if keys is None:
            self.link = _C.Link(*places, proxy=proxy)
            _warn_if_public(self.link.address)
            _warn_if_public(relay or "", looks_up=proxy is None)
        else:
            self.link = _C.Link(*places, keys.seed, proxy)
            self._watch = AllowedWatch(keys, self.link, "diloco_comm allowed keys")
        self.public_key = "" if keys is None else self.link.public_key.hex()
        self._seat: RelaySeat | None = None
        if relay is not None:
            try:
                self._seat = RelaySeat(relay, self.nonce, self.link.adopt, proxy)
            except BaseException:
                self.close()
                raise

    @classmethod
    def of_exchange(
        cls,
        name: str,
        listen: str | None,
        advertise: str | None,
        keys: LinkKeys | None,
        relay: str | None,
        proxy: Proxy | None,
    ) -> OwnLink:
        """Return a link for the exchange of this name; exchanges with one ``listen`` share a link.

        Raises:
            ValueError: If another exchange of this process listens at this port with other
                arguments, or has or had this name.
            RuntimeError: As the constructor.
        """
        if not listen or parse_address("listen", listen, listens=True)[1] == 0:
            return cls(listen, advertise, keys, relay, proxy)
        choices = advertise, None if keys is None else keys.seed, relay, proxy
        with _sharing:
            if listen in _shared:
                gc.collect()  # A dropped object, in a cycle with its hooks, ends its share.
            if listen not in _shared:
                _shared[listen] = _Shared(cls(listen, advertise, keys, relay, proxy), choices)
            shared = _shared[listen]
            if why := shared.refusal_of(name, choices):
                raise ValueError(f"this process listens at {listen} already: {why}")
            shared.names.add(name)
        return shared.link

    @property
    def nonce(self) -> str:
        return self.link.nonce

    @property
    def address(self) -> str:
        return self.link.address

    def counters(self) -> dict[str, int]:
        return self.link.counters()

    def life(self) -> dict[str, _C.PeerLife]:
        """Return the signs of life of the processes to which this link connects, by nonce.

        These are the peers of all groups, and the processes given to ``link.reach``. The link's own
        C++ thread keeps the signs up to date.
        """
        return {one.nonce: one for one in self.link.life()}

    def ways(self) -> dict[str, str]:
        """Return the link's address, nonce, public key and relay, for the others to connect."""
        return {
            "address": self.address,
            "link": self.nonce,
            "link key": self.public_key,
            "relay": "" if self._seat is None else self._seat.relay,
        }

    def leave(self, name: str) -> None:
        """End the exchange of this name; the last one that shares this link closes the link."""
        with _sharing:
            for listen, shared in list(_shared.items()):
                if shared.link is self:
                    shared.names.discard(name)
                    # Exchanges without a name are all "default": a second one on this link would
                    # mix its epochs with the first one's.
                    shared.spent |= {name} & {"default"}
                    if shared.names:
                        return
                    del _shared[listen]
        self.close()

    def close(self) -> None:
        """End all connections; idempotent."""
        if self._watch is not None:
            self._watch.stop()
        if self._seat is not None:
            self._seat.close()
        self.link.close()

    def check_own_number(self, replica: int) -> None:
        """Check that the own folder of keys does not bind the own key to other replica numbers.

        Raises:
            ValueError: If it does.
        """
        if self._keys is not None and self._watch is not None:
            self._watch.look()
            self._keys.check_own(replica)

    def refusal_of(
        self, replica: int, members: Sequence[int], keys: Sequence[str]
    ) -> tuple[str, list[int]]:
        """Return why this process does not let in members, in a sentence, and their numbers.

        Args:
            replica: The number of this replica.
            members: The numbers of the members.
            keys: The public key of each member, as hexadecimal digits.

        Returns:
            "" and [] if all members are let in.
        """
        if self._keys is None or self._watch is None:
            return "", []
        # Read the folder now, so that a key or a binding that was added a moment ago counts.
        allowed = {key.hex() for key in self._watch.look()}
        others = {m: key for m, key in zip(members, keys, strict=True) if m != replica}
        strange = [member for member, key in others.items() if key not in allowed]
        whys = []
        if strange:
            is_are = "key of {} is" if len(strange) == 1 else "keys of {} are"
            whys.append(
                f"the {is_are.format(named(strange))} not among the allowed keys of replica "
                f"{replica}: copy the public file NAME.key there, and run `diloco-comm keys allow "
                f"{self._keys.folder} NAME.key`"
            )
        refused = list(strange)
        for member, key in others.items():
            if member in strange:
                continue
            if why := self._keys.refusal_of(member, bytes.fromhex(key), replica):
                whys.append(why)
                refused.append(member)
        return "; ".join(whys), refused


class LinkShare:
    """One exchange's right to use a link, which several may share.

    It ends by ``end``, or when nobody refers to this object any more.

    Args:
        link: The link.
        name: The name of the exchange, see ``OwnLink.leave``.
    """

    def __init__(self, link: OwnLink, name: str) -> None:
        self.link = link
        self._leave = weakref.finalize(self, link.leave, name)
        self._leave.atexit = False

    def end(self) -> None:
        """Give up the use of the link; idempotent."""
        self._leave()


@dataclass
class _Shared:
    """A link that exchanges of this process share.

    Attributes:
        link: The link.
        choices: All arguments of the link but ``listen``.
        names: The names of the exchanges that use the link.
        spent: Former names that no exchange may take again on this link.
    """

    link: OwnLink
    choices: tuple[Any, ...]
    names: set[str] = field(default_factory=set)
    spent: set[str] = field(default_factory=set)

    def refusal_of(self, name: str, choices: tuple[Any, ...]) -> str:
        """Return why an exchange cannot share this link, in a sentence; empty if it can."""
        words = ("advertise", "keys", "relay", "proxy")
        for word, new, old in zip(words, choices, self.choices, strict=True):
            if new != old:
                got = "others" if word == "keys" else f"{new!r} beside {old!r}"
                return f"objects that share one listen= need the same {word}= of Link, got {got}"
        if name not in self.names | self.spent:
            return ""
        taken = ", ".join(map(repr, sorted(self.names | self.spent)))
        return f"objects that share one listen= need a name= each, got {name!r} beside {taken}"


# The links of this process at ports that the program has chosen, by ``listen``.
_shared: dict[str, _Shared] = {}
# Reentrant: garbage collection under this lock may end the shares of dropped exchanges.
_sharing = threading.RLock()
os.register_at_fork(after_in_child=_shared.clear)


def _warn_if_public(address: str, *, looks_up: bool = True) -> None:
    """Warn once that a link without keys has a public address, where strangers may connect or read.

    Args:
        address: ``host:port``, or "" for none.
        looks_up: Whether this process may look names up. Else a name counts as public.
    """
    if not address or address in _told:
        return
    if not _is_public(parse_address("address", address)[0], looks_up):
        return
    _told.add(address)
    warn(
        f"everything that replicas send to {address} travels unencrypted, and whoever reaches that "
        "port can take part: give Link(keys=...), made by `diloco-comm keys make`, or join the "
        "networks by a VPN"
    )


def _is_public(host: str, looks_up: bool) -> bool:
    """Whether a host is neither this one nor in a private network."""
    flags = 0 if looks_up else socket.AI_NUMERICHOST
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, flags=flags)}
    except OSError:
        return not looks_up
    numbers = [ipaddress.ip_address(str(number).partition("%")[0]) for number in found]
    return any(not (number.is_loopback or number.is_private) for number in numbers)


@dataclass(frozen=True)
class Dial:
    """How this process reaches the members of an epoch over its link.

    Attributes:
        own: The link of this process.
        token: The name of the epoch's groups on the link, equal on all members.
        members: The numbers of the replicas, in rank order.
        ways: ``OwnLink.ways`` of each member, in rank order.
    """

    own: OwnLink
    token: str
    members: Sequence[int]
    ways: Sequence[Mapping[str, Any]]

    def groups(
        self,
        rank: int,
        lanes: int,
        timeout: float,
        name: str,
        is_void: Callable[[], bool] | None = None,
    ) -> list[_C.LinkGroup]:
        """Connect groups over the link; connections of an older epoch stay open.

        Args:
            rank: Rank of this replica.
            lanes: Data connections to each peer in each direction.
            timeout: Most seconds to connect.
            name: How the error names the groups.
            is_void: Called again and again; connecting ends if it returns True.

        Raises:
            SyncError: If a peer did not connect in time, or is not let in.
        """
        started = time.monotonic()
        names = ("link", "address", "link key", "relay")
        peers = [tuple(way[name] for name in names) for way in self.ways]
        cause: Exception | None = None
        keys = [way["link key"] for way in self.ways]
        replica = self.members[rank]
        why, refused = self.own.refusal_of(replica, self.members, keys)
        if not why:
            try:
                return self.own.link.groups(self.token, rank, peers, lanes, timeout, is_void)
            except (RuntimeError, ValueError) as error:
                why, cause = with_replicas(str(error), self.members), error
        raise SyncError(
            f"{name} could not be connected: {why}",
            stage="connect",
            seconds=time.monotonic() - started,
            cuts=[(replica, member) for member in refused],
        ) from cause


def with_replicas(why: str, members: Sequence[int]) -> str:
    """Return a link's error message, which names ranks, with replica numbers instead."""
    return re.sub(r"\brank (\d+)", lambda rank: f"replica {members[int(rank[1])]}", why)
