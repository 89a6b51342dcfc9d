"""``diloco-comm doctor --links``: who reaches whom, and how fast, by the doctors of all replicas.

The doctors meet at the store of the run. Every doctor goes through the same list of pairs, one pair
after the other. The two doctors of a pair connect as the link would, measure, and put what they saw
into the store, where all doctors read it. At the end each pair connects once by the link itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ... import _C
from ...base import env
from ...base.errors import SyncError, named
from ...base.service.addresses import Proxy, link_places
from ...base.service.keys import LinkKeys
from ...exchange.membership.own_link import Dial, OwnLink
from . import sockets

PREFIX = "diloco_comm doctor links"
# A doctor that has not written for GONE_S has ended; each doctor writes once in BEAT_S.
GONE_S, BEAT_S = 15.0, 1.0
_POLL_S = 0.05
# Time in which a pair connects by the link; the pair has connected plainly before.
LINK_S = 10.0
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


class Ended(RuntimeError):
    """A doctor is missing, or has ended before all pairs were measured."""


@dataclass(frozen=True)
class Request:
    """The options of the command; ``store`` is connected."""

    store: dist.Store
    replica: int
    of: int
    listen: str | None
    advertise: str | None
    keys: LinkKeys | None
    relay: str | None
    proxy: Proxy | None
    lanes: int
    timeout_s: float


class Meeting:
    """The doctors of all replicas at the store. A context manager: at its end this doctor is gone.

    Attributes:
        ways: The record that each replica has written about itself, by number.
    """

    def __init__(self, request: Request, own: Mapping[str, Any]) -> None:
        self._store = dist.PrefixStore(PREFIX, request.store)
        self._request, self._own = request, dict(own)
        self._ended = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self.ways: dict[int, dict[str, Any]] = {}
        self._session = ""

    def __enter__(self) -> Meeting:
        self._beat(0)
        threading.Thread(target=self._beats, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with contextlib.suppress(RuntimeError):
            # A deleted key could vanish between another doctor's check and that doctor's get.
            self._store.set(self._present(self._request.replica), "")

    def gather(self, say: Callable[[str], None]) -> None:
        """Wait for all doctors.

        Raises:
            Ended: If a doctor has not come in time, or two have one number.
        """
        end = time.monotonic() + self._request.timeout_s
        say_at = time.monotonic() + 3 * BEAT_S
        while missing := [n for n in range(self._request.of) if not self._is_here(n)]:
            now = time.monotonic()
            if now > end:
                raise Ended(
                    f"{named(missing)} did not come to the store within "
                    f"{self._request.timeout_s:g} s (--timeout): start `diloco-comm doctor "
                    "--links` there too, with the same --store and --of"
                )
            if now > say_at:
                say_at = end + 1
                say(f"waiting for {named(missing)}")
            time.sleep(_POLL_S)
        nonces = [self.ways[n]["nonce"] for n in range(self._request.of)]
        self._session = hashlib.sha256(" ".join(nonces).encode()).hexdigest()

    def token(self, *names: object) -> bytes:
        """Return a token that the doctors of this meeting alone know."""
        return hashlib.sha256(" ".join(map(str, (self._session, *names))).encode()).digest()

    def post(self, key: str, value: Any) -> None:
        """Tell the others something, once."""
        self._store.set(f"{self._session}/{key}/{self._request.replica}", json.dumps(value))

    def wait(self, key: str, replica: int, unless: str = "") -> Any:
        """Return what another doctor has told.

        Raises:
            Ended: If that doctor is gone.
            ConnectionError: If the doctor has told ``unless`` in its place.
        """
        name = f"{self._session}/{key}/{replica}"
        while not self._store.check([name]):
            has_told = unless and self._store.check([f"{self._session}/{unless}/{replica}"])
            is_gone = not has_told and not self._is_alive(replica)
            # The awaited word may have come meanwhile, before the other word or the end.
            if (has_told or is_gone) and self._store.check([name]):
                break
            if has_told:
                raise ConnectionError(f"the doctor of replica {replica} gave up")
            if is_gone:
                raise Ended(f"the doctor of replica {replica} has ended before all was measured")
            time.sleep(_POLL_S)
        return json.loads(self._store.get(name))

    def _present(self, replica: int) -> str:
        return f"present/{replica}"

    def _beats(self) -> None:
        for number in itertools.count(1):
            if self._ended.wait(BEAT_S):
                return
            try:
                self._beat(number)
            except RuntimeError:
                return  # The store is lost, which the main thread says.

    def _beat(self, number: int) -> None:
        record = {**self._own, "beat": number}
        self._store.set(self._present(self._request.replica), json.dumps(record))

    def _look(self, replica: int) -> dict[str, Any] | None:
        """Return the record of a replica, and note since when it is as it is."""
        if not self._store.check([self._present(replica)]):
            return None
        text = self._store.get(self._present(replica)).decode()
        if not text:
            return None  # That doctor has ended.
        if self._seen.get(replica, ("", 0.0))[0] != text:
            self._seen[replica] = (text, time.monotonic())
        record: dict[str, Any] = json.loads(text)
        return record

    def _is_here(self, replica: int) -> bool:
        """Whether a doctor has written since the first look: an older run may leave a record."""
        before = self._seen.get(replica)
        record = self._look(replica)
        if replica == self._request.replica:
            if record is not None and record["nonce"] != self._own["nonce"]:
                raise Ended(f"there are two doctors with --replica {replica}: each has its own")
            self.ways[replica] = self._own
            return True
        if record is None or before is None or before == self._seen[replica]:
            return replica in self.ways
        if record["of"] != self._request.of:
            raise Ended(
                f"--of is {self._request.of} here and {record['of']} at replica {replica}: give "
                "the same number everywhere"
            )
        self.ways[replica] = record
        return True

    def _is_alive(self, replica: int) -> bool:
        record = self._look(replica)
        if record is None or record["nonce"] != self.ways[replica]["nonce"]:
            return False
        return time.monotonic() - self._seen[replica][1] < GONE_S


def examine_links(request: Request, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all pairs; the doctors of all replicas return the same.

    Args:
        say: Prints a sentence while others are waited for.

    Raises:
        Ended: If another doctor does not come, or ends.
        OSError, RuntimeError: If this process cannot listen, or the relay or store is lost.
    """
    places = link_places(
        request.listen,
        request.advertise,
        lambda: _C.own_host(env.gloo_interface()),
        request.relay,
    )
    nonce = secrets.token_hex(16)
    door = sockets.Door(places[0], request.relay, nonce, request.proxy)
    with contextlib.closing(door):
        address = sockets.place_behind(*places, door.port)
        own = {
            "nonce": nonce,
            "of": request.of,
            "address": address,
            "relay": request.relay or "",
            "keys": request.keys is not None,
            "available": _AVAILABLE.read_text().split() if _AVAILABLE.exists() else [],
        }
        with Meeting(request, own) as meeting:
            meeting.gather(say)
            numbers = range(request.of)
            door.tokens = frozenset(
                meeting.token(*pair) for pair in itertools.permutations(numbers, 2)
            )
            pairs = [
                _measured(meeting, door, request, low, high)
                for low, high in itertools.combinations(numbers, 2)
            ]
            door.close()
            _connect_links(meeting, request, places, pairs)
            replicas = [
                {
                    "replica": n,
                    **{key: way[key] for key in ("address", "relay", "keys", "available")},
                }
                for n, way in sorted(meeting.ways.items())
            ]
    return {"schema": 1, "replicas": replicas, "pairs": pairs}


# --------------------------------------------------------------------------------- one pair


def _measured(
    meeting: Meeting, door: sockets.Door, request: Request, low: int, high: int
) -> dict[str, Any]:
    """Return what both doctors of a pair have seen; they measure meanwhile."""
    key = f"{low}-{high}"
    if request.replica in (low, high):
        meeting.post(f"{key}/result", _Pair(meeting, door, request, low, high).run())
    seen = {n: meeting.wait(f"{key}/result", n) for n in (low, high)}
    first, second = seen[low], seen[high]
    rates = [
        {
            "lanes": there["lanes"],
            # To the higher replica, and to the lower one.
            "gbps": [there["gbps"], back["gbps"]],
            "retransmitted": [back["retransmitted"], there["retransmitted"]],
        }
        for back, there in zip(first["rates"], second["rates"], strict=False)
    ]
    return {
        "replicas": [low, high],
        "way": first["way"],
        "dialled_by": first["dialled_by"],
        "refused": first["refused"],
        "round_trip_ms": first["round_trip_ms"],
        "rates": rates,
        "congestion": [first["congestion"], second["congestion"]],
        "error": first["error"] or second["error"],
        "link": None,
    }


class _Pair:
    """One side of a pair."""

    def __init__(
        self, meeting: Meeting, door: sockets.Door, request: Request, low: int, high: int
    ) -> None:
        self._meeting, self._door, self._request = meeting, door, request
        self._ends = (low, high)
        self._key = f"{low}-{high}"
        self._peer = high if request.replica == low else low
        self._seen: dict[str, Any] = {
            "way": None,
            "dialled_by": None,
            "refused": [],
            "round_trip_ms": None,
            "rates": [],
            "congestion": None,
            "error": None,
        }

    def run(self) -> dict[str, Any]:
        self._meeting.post(f"{self._key}/ready", True)
        self._meeting.wait(f"{self._key}/ready", self._peer)
        control = None
        try:
            control = self._reach()
            if control is not None:
                self._measure(control)
        except OSError as error:
            self._seen["error"] = sockets.reason_of(error)
        finally:
            if control is not None:
                sockets.drop(control)
        return self._seen

    def _reach(self) -> socket.socket | None:
        """Dial in both directions, and return the first connection there is."""
        ways = self._meeting.ways
        chosen = None
        low, high = self._ends
        for dialler, target in ((low, high), (high, low)):
            found = self._connect(dialler, 0, "address") if ways[target]["address"] else None
            if chosen is None and found is not None:
                chosen = found
                self._seen["way"], self._seen["dialled_by"] = "direct", dialler
            elif found is not None:
                sockets.drop(found)
        if all(ways[n]["relay"] and not ways[n]["address"] for n in self._ends):
            chosen = self._connect(low, 0, "relay")
            if chosen is not None:
                self._seen["way"], self._seen["dialled_by"] = "relay", low
        return chosen

    def _connect(self, dialler: int, number: int, way: str) -> socket.socket | None:
        """Make a connection; a failure is noted on both sides."""
        low, high = self._ends
        target = high if dialler == low else low
        place = self._meeting.ways[target][way]
        key, token = f"{self._key}/{dialler}/{number}", self._meeting.token(dialler, target)
        connection, why = None, ""
        if dialler == self._request.replica:
            seat = self._meeting.ways[target]["nonce"] if way == "relay" else ""
            try:
                connection = sockets.dial(place, token, number, seat, self._request.proxy)
            except OSError as error:
                why = sockets.reason_of(error)
            self._meeting.post(key, why)
        elif not (why := self._meeting.wait(key, dialler, f"{self._key}/result")):
            connection = self._door.take(token, number)
        if why:
            refusal = {"from": dialler, "to": target, "place": place, "way": way, "reason": why}
            self._seen["refused"].append(refusal)
        return connection

    def _measure(self, control: socket.socket) -> None:
        dialler, way = self._seen["dialled_by"], self._seen["way"]
        trip_s = sockets.round_trip(control, asks=self._request.replica == self._ends[0])
        self._seen["round_trip_ms"] = trip_s * 1e3
        self._seen["congestion"] = sockets.congestion_of(control)
        number = itertools.count(1)
        for num_lanes in dict.fromkeys((1, self._request.lanes)):
            with contextlib.ExitStack() as stack:
                lanes = []
                for _ in range(num_lanes):
                    lane = self._connect(
                        dialler, next(number), "relay" if way == "relay" else "address"
                    )
                    if lane is None:
                        raise ConnectionError("a further connection was refused")
                    stack.callback(sockets.drop, lane)
                    lanes.append(lane)
                rate = asdict(sockets.measure_rate(control, lanes, trip_s))
            # Through a relay these are the segments between this process and the relay.
            self._seen["rates"].append(rate)


# --------------------------------------------------------------------------------- the link


def _connect_links(
    meeting: Meeting, request: Request, places: tuple[str, str], pairs: list[dict[str, Any]]
) -> None:
    """Connect each pair that has a way by the link, with its keys; note "" or why that fails."""
    with _own_link(meeting, request, places) as (own, why):
        meeting.post("link", {"ways": None if own is None else own.ways(), "why": why})
        told = {n: meeting.wait("link", n) for n in range(request.of)}
        # A group that is dropped early ends the peer's attempt.
        held: list[Any] = []
        for pair in pairs:
            if pair["way"] is not None:
                _connect_pair(meeting, request.replica, own, told, pair, held)
        # The link closes when all have connected.
        meeting.post("end", True)
        for n in range(request.of):
            meeting.wait("end", n)


@contextlib.contextmanager
def _own_link(
    meeting: Meeting, request: Request, places: tuple[str, str]
) -> Iterator[tuple[OwnLink | None, str]]:
    own, why = None, ""
    try:
        # The port of the measurement again: another one may be closed to the others.
        address = meeting.ways[request.replica]["address"]
        listen = request.listen
        if listen is None and places[0]:
            listen = address
        own = OwnLink(listen, request.advertise, request.keys, request.relay, request.proxy)
    except (RuntimeError, OSError) as error:
        why = " ".join(str(error).split())
    try:
        yield own, why
    finally:
        if own is not None:
            own.close()


def _connect_pair(
    meeting: Meeting,
    replica: int,
    own: OwnLink | None,
    told: Mapping[int, Any],
    pair: dict[str, Any],
    held: list[Any],
) -> None:
    members = pair["replicas"]
    whys = [told[n]["why"] for n in members if told[n]["why"]]
    if not whys:
        key = f"{members[0]}-{members[1]}/link"
        if replica in members:
            assert own is not None
            why, token = "", meeting.token("link", *members).hex()
            call = Dial(own, token, members, [told[n]["ways"] for n in members])
            try:
                held += call.groups(members.index(replica), 1, LINK_S, "the link")
            except SyncError as error:
                why = " ".join(str(error).split())
            meeting.post(key, why)
        whys = [why for n in members if (why := meeting.wait(key, n))]
    # The side that refuses says why; the other side has waited in vain.
    whys.sort(key=lambda why: "allowed keys" not in why)
    pair["link"] = whys[0] if whys else ""
