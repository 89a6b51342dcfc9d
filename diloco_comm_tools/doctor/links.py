"""``diloco-comm doctor --links``: who reaches whom, and how fast, by the doctors of all replicas.

The doctors meet at the store of the run, and each opens the link that its replica would have. Every
doctor goes through the same list of pairs, one pair after the other. The two doctors of a pair
connect by their links, send messages, and put what they saw into the store, where all doctors read
the results.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diloco_comm import _C
from diloco_comm.base.errors import named
from diloco_comm.base.service.addresses import Proxy, with_scheme
from diloco_comm.base.service.keys import LinkKeys
from diloco_comm.exchange.membership.own_link import Dial, OwnLink, with_replicas

PREFIX = "diloco_comm doctor links"
# Each doctor writes a beat into the store every BEAT_S seconds. The others take a doctor without a
# beat for GONE_S seconds for ended.
GONE_S, BEAT_S = 15.0, 1.0
_POLL_S = 0.05
# Seconds that a pair has to connect. A dropped packet is sent again after 1 s and after 3 s.
LINK_S = 10.0
PINGS, PING_S = 20, 3.0
# Bytes are counted for RATE_S seconds. Before, messages flow for ten round trips, but for at least
# LEAST_START_S and at most MOST_START_S seconds.
RATE_S, LEAST_START_S, MOST_START_S = 2.0, 0.5, 2.0
# How long a peer may take to answer a short message: several times 2 s, which a long queue may add
# in each direction.
_WORD_TIME = timedelta(seconds=20)
_WORDS, _BULK = 1, 2  # tags
# Number and size of the messages that each lane has under way in each direction, enough to fill a
# long path, which holds some megabytes; and the seconds between two looks at them.
_MESSAGES, _MESSAGE_BYTES, _LOOK_S = 32, 1024 * 1024, 0.001
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
    """The doctors of all replicas at the store; at the end of its block this doctor is gone.

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
        nonces = [self.ways[n]["link"] for n in range(self._request.of)]
        self._session = hashlib.sha256(" ".join(nonces).encode()).hexdigest()

    def token(self, *names: object) -> bytes:
        """Return a token that the doctors of this meeting alone know."""
        return hashlib.sha256(" ".join(map(str, (self._session, *names))).encode()).digest()

    def post(self, key: str, value: Any) -> None:
        """Tell the others something, once."""
        self._store.set(f"{self._session}/{key}/{self._request.replica}", json.dumps(value))

    def wait(self, key: str, replica: int) -> Any:
        """Return what another doctor has told.

        Raises:
            Ended: If that doctor is gone.
        """
        name = f"{self._session}/{key}/{replica}"
        while not self._store.check([name]):
            # The awaited word may have come meanwhile, before the end.
            if not self._is_alive(replica) and not self._store.check([name]):
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
        """Return the record of a replica, and note when it was first seen to have this text."""
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
        """Whether a doctor has written since the first look: a record may be an older run's."""
        before = self._seen.get(replica)
        record = self._look(replica)
        if replica == self._request.replica:
            if record is not None and record["link"] != self._own["link"]:
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
        if record is None or record["link"] != self.ways[replica]["link"]:
            return False
        return time.monotonic() - self._seen[replica][1] < GONE_S


def examine_links(request: Request, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all pairs; the doctors of all replicas return the same.

    Args:
        say: Prints a sentence while others are waited for.

    Raises:
        Ended: If another doctor does not come, or ends.
        RuntimeError: If this process cannot listen, or the relay or store is lost.
    """
    own = OwnLink(request.listen, request.advertise, request.keys, request.relay, request.proxy)
    record = {
        **own.ways(),
        "of": request.of,
        "keys": request.keys is not None,
        "available": _AVAILABLE.read_text().split() if _AVAILABLE.exists() else [],
    }
    with contextlib.closing(own), Meeting(request, record) as meeting:
        meeting.gather(say)
        pairs = [
            _measured(meeting, own, request, pair)
            for pair in itertools.combinations(range(request.of), 2)
        ]
        replicas = [
            {
                "replica": n,
                **{key: _place(way[key]) for key in ("address", "relay")},
                **{key: way[key] for key in ("keys", "available")},
            }
            for n, way in sorted(meeting.ways.items())
        ]
    return {"schema": 1, "replicas": replicas, "pairs": pairs}


def _place(text: str) -> str:
    """Return the address of a link as addresses are printed."""
    return text and with_scheme(text)


# --------------------------------------------------------------------------------- one pair


def _measured(
    meeting: Meeting, own: OwnLink, request: Request, pair: tuple[int, int]
) -> dict[str, Any]:
    """Return what both doctors of a pair have seen; they measure meanwhile."""
    key = "{}-{}".format(*pair)
    if request.replica in pair:
        # The side keeps its groups to the end: a group that is dropped ends the peer's measurement.
        side = _Side(meeting, own, request, pair)
        meeting.post(f"{key}/result", side.run())
    first, second = (meeting.wait(f"{key}/result", n) for n in pair)
    ways = [meeting.ways[n] for n in pair]
    way = "relay" if all(one["relay"] and not one["address"] for one in ways) else "address"
    refused = [
        {
            **{"from": pair[i], "to": pair[1 - i], "place": _place(ways[1 - i][way]), "way": way},
            "reason": seen["trouble"],
        }
        for i, seen in enumerate((first, second))
        if seen["trouble"] and not seen["has_dialled"] and ways[1 - i][way]
    ]
    why, failure = (first[key] or second[key] for key in ("refusal", "failure"))
    if failure and not refused and any(one[way] for one in ways):
        why = failure
    is_connected = not (why or failure)
    rates = [
        {
            "lanes": there["lanes"],
            # The rates to the higher replica of the pair, and to the lower one.
            "gbps": [there["gbps"], back["gbps"]],
            "retransmitted": [back["retransmitted"], there["retransmitted"]],
        }
        for back, there in zip(first["rates"], second["rates"], strict=False)
    ]
    return {
        "replicas": list(pair),
        "way": ("relay" if way == "relay" else "direct") if is_connected else None,
        "dialled_by": pair[0 if first["has_dialled"] else 1] if is_connected else None,
        # A pair that meets at a relay is connected: refused dials do not matter.
        "refused": [] if is_connected and way == "relay" else refused,
        "round_trip_ms": first["round_trip_ms"],
        "rates": rates,
        "congestion": [first["congestion"], second["congestion"]],
        "error": first["error"] or second["error"],
        "link": why or ("" if is_connected else None),
    }


class _Side:
    """One side of a pair."""

    def __init__(
        self, meeting: Meeting, own: OwnLink, request: Request, pair: tuple[int, int]
    ) -> None:
        self._meeting, self._own, self._request, self._pair = meeting, own, request, pair
        self._groups: list[_C.LinkGroup] = []
        self._rank = pair.index(request.replica)
        self._peer = meeting.ways[pair[1 - self._rank]]
        # This side's result. "refusal" says why the peer's key is not let in, "failure" why the
        # pair is not connected, "trouble" why the own dial has failed, and "error" why the
        # measurement broke off.
        self._seen: dict[str, Any] = {
            **{"refusal": "", "failure": "", "trouble": "", "error": None, "has_dialled": False},
            **{"round_trip_ms": None, "rates": [], "congestion": None},
        }

    def run(self) -> dict[str, Any]:
        keys = [self._meeting.ways[n]["link key"] for n in self._pair]
        refusal, _ = self._own.refusal_of(self._request.replica, self._pair, keys)
        key = "{}-{}/ready".format(*self._pair)
        self._meeting.post(key, refusal)
        self._seen["refusal"] = refusal
        if refusal or self._meeting.wait(key, self._pair[1 - self._rank]):
            return self._seen
        stage = "failure"
        try:
            groups = self._connect(1)
            stage = "error"
            self._measure(groups)
        except RuntimeError as error:
            self._seen[stage] = with_replicas(" ".join(str(error).split()), self._pair)
        return self._seen

    def _connect(self, num_lanes: int) -> list[_C.LinkGroup]:
        token = self._meeting.token(*self._pair, num_lanes).hex()
        ways = [self._meeting.ways[n] for n in self._pair]
        dial = Dial(self._own, token, self._pair, ways)
        try:
            groups = dial.groups(self._rank, num_lanes, LINK_S, "the link")
        finally:
            for has_dialled, trouble, *_ in self._own.link.lanes(self._peer["link"]):
                # One lost packet delays one dial, and the dial of another lane works.
                self._seen["has_dialled"] |= has_dialled
                self._seen["trouble"] = trouble[:1].lower() + trouble[1:]
        self._groups += groups
        return groups

    def _measure(self, groups: list[_C.LinkGroup]) -> None:
        link, nonce, peer = self._own.link, self._peer["link"], 1 - self._rank
        trip_s = round_trip(groups[0], peer, asks=self._rank == 0)
        self._seen["round_trip_ms"] = trip_s * 1e3
        self._seen["congestion"] = link.lanes(nonce)[0][2] or None
        # For a pair at a relay, retransmissions are counted between this process and the relay.
        self._seen["rates"].append(measure_rate(link, nonce, groups, peer, trip_s))
        if self._request.lanes > 1:
            groups = self._connect(self._request.lanes)
            self._seen["rates"].append(measure_rate(link, nonce, groups, peer, trip_s))


# ------------------------------------------------------------------------------ measurements


def round_trip(group: _C.LinkGroup, peer: int, *, asks: bool) -> float:
    """Return the median of some round trips in seconds; the side that ``asks`` measures them."""
    if not asks:
        while not (seconds := _take(group, peer)):
            _give(group, peer, 0.0)
        return seconds
    taken: list[float] = []
    end = time.perf_counter() + PING_S
    while len(taken) < PINGS and (not taken or time.perf_counter() < end):
        start = time.perf_counter()
        _give(group, peer, 0.0)
        _take(group, peer)
        taken.append(time.perf_counter() - start)
    _give(group, peer, statistics.median(taken))
    return statistics.median(taken)


def _give(group: _C.LinkGroup, peer: int, value: float) -> None:
    group.send([torch.tensor([value], dtype=torch.float64)], peer, _WORDS).wait(_WORD_TIME)


def _take(group: _C.LinkGroup, peer: int) -> float:
    word = torch.empty(1, dtype=torch.float64)
    group.recv([word], peer, _WORDS).wait(_WORD_TIME)
    return float(word)


def measure_rate(
    link: _C.Link, nonce: str, groups: Sequence[_C.LinkGroup], peer: int, trip_s: float
) -> dict[str, Any]:
    """Send and receive over all lanes for some seconds, as the peer does at the same time.

    Returns:
        The number of ``lanes``; ``gbps`` received, all lanes together; and ``retransmitted``, the
        share of the segments sent that were sent again, None if none was sent.
    """
    _give(groups[0], peer, 0.0)
    _take(groups[0], peer)
    lanes = groups[::2]
    data, received = (torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8) for _ in range(2))
    posts = [(lane.send, data) for lane in lanes] + [(lane.recv, received) for lane in lanes]
    works = [deque(post([t], peer, _BULK) for _ in range(_MESSAGES)) for post, t in posts]

    def run_for(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for (post, tensor), queue in zip(posts, works, strict=True):
                while queue[0].is_completed():
                    queue.popleft().wait()
                    queue.append(post([tensor], peer, _BULK))
            time.sleep(_LOOK_S)

    def counted() -> tuple[float, int, int, int]:
        lanes = link.lanes(nonce)
        segments, again = sum(lane[3] for lane in lanes), sum(lane[4] for lane in lanes)
        return time.perf_counter(), link.counters()["received_bytes"], segments, again

    run_for(min(max(LEAST_START_S, 10 * trip_s), MOST_START_S))
    before = counted()
    run_for(RATE_S)
    seconds, num_bytes, segments, again = (
        now - then for now, then in zip(counted(), before, strict=True)
    )
    # The peer may have begun later, and still count what it receives.
    run_for(min(2 * trip_s, 1.0))
    return {
        "lanes": len(lanes),
        "gbps": num_bytes * 8 / seconds / 1e9,
        "retransmitted": again / segments if segments else None,
    }
