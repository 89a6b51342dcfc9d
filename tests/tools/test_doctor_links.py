"""``diloco-comm doctor --links``: real processes on loopback, a relay, keys, and shaped links."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import cut_links
import pytest
import torch.distributed as dist
from cli_helpers import (
    Ended,
    check_arguments,
    check_documented,
    check_misuse,
    check_schema,
    run_cli,
)
from commands import CLI, serving_command
from proxies import Proxy
from workers import Pool
from zygote import Job, Zygote

from benchmarks.support.namespaces import NETWORK, address, call, missing_tools
from diloco_comm import _C
from diloco_comm.base.service.keys import LinkKeys, allow, make_pairs
from diloco_comm.base.store_host import HostedStore, open_store
from diloco_comm_tools.common import workers
from diloco_comm_tools.doctor import links
from diloco_comm_tools.doctor import report as links_report

pytestmark = pytest.mark.usefixtures("forked_programs")

Fresh = Callable[..., Pool]
Address = tuple[str, int]
RATE = {"lanes": int, "gbps": [float], "retransmitted": [(float, None)]}
PAIR: dict[str, Any] = {
    "replicas": [int],
    "way": (str, None),
    "dialled_by": (int, None),
    "refused": [{"from": int, "to": int, "place": str, "way": str, "reason": str}],
    "round_trip_ms": (float, None),
    "rates": [RATE],
    "congestion": [(str, None)],
    "error": (str, None),
    "link": (str, None),
}
REPLICA = {"replica": int, "address": str, "relay": str, "keys": bool, "available": [str]}
FINDING = {"level": str, "what": str, "remedy": str}
SCHEMA = {"schema": int, "replicas": [REPLICA], "pairs": [PAIR], "findings": [FINDING]}
PLAN = ["--params", "1B", "--layers", "24", "--step-time", "0.5"]


def start(rank: int, world: int, store: Address, options: Sequence[str], seconds: float) -> Ended:
    """Run a doctor that measures each rate for ``seconds`` only."""
    arguments = ["--store", "tcp://{}:{}".format(*store), "--replica", rank, "--of", world]
    with (
        mock.patch.object(links, "RATE_S", seconds),
        mock.patch.object(links, "LEAST_START_S", seconds),
        mock.patch.object(links, "LINK_S", 3.0),
        # A busy machine drops packets on loopback, too.
        mock.patch.object(links_report, "LOSS", 1.0),
        mock.patch.object(links_report, "LANES_GAIN", 100.0),
        mock.patch.object(links_report, "SLOW_GBPS", 0.0),
        mock.patch.object(links_report, "LONG_TRIP_MS", 1e4),
        mock.patch.dict(os.environ, {"DILOCO_COMM_PROXY_PASSWORD": "sesame"}),
    ):
        return run_cli("doctor", "--links", "--json", *arguments, *shlex.split(options[rank]))


def prepare(rank: int, world: int) -> None:
    """Import and build all that a doctor needs: those that start together then come together."""
    run_cli("doctor", "--help")


def reports(
    pool: Pool, *options: str, status: int = 0, store: HostedStore | None = None
) -> dict[str, Any]:
    """Run doctors, and return the report on which all agree; default: at a store without keys."""
    store = store or open_store("127.0.0.1", 0)
    pool.run(prepare)
    all_ended = pool.run(start, ("127.0.0.1", store.port), options, 0.2)
    assert [(ended.status, ended.err) for ended in all_ended] == [(status, "")] * len(options)
    found = [json.loads(ended.out) for ended in all_ended]
    assert all(report == found[0] for report in found)
    check_schema(found[0], SCHEMA)
    report: dict[str, Any] = found[0]
    return report


def sentences(report: dict[str, Any]) -> list[str]:
    return [f"{one['level']}: {one['what']}; {one['remedy']}" for one in report["findings"]]


def make_keys(folder: Path, world: int, allowed: Callable[[int, int], bool]) -> list[str]:
    for replica in range(world):
        make_pairs(folder / str(replica), [f"r{replica}"])
    for replica in range(world):
        others = [r for r in range(world) if allowed(replica, r)]
        allow(folder / str(replica), [folder / str(r) / f"r{r}.key" for r in others])
    return [f"--keys {folder / str(replica)}" for replica in range(world)]


@pytest.fixture
def plain_store() -> Iterator[Address]:
    hosted = open_store("127.0.0.1", 0)
    yield "127.0.0.1", hosted.port
    hosted.store.close()


@pytest.fixture
def keyed_store(tmp_path: Path) -> Callable[[int], HostedStore]:
    """Hosts a store that the replicas of make_keys() know, and that knows them."""

    def host(world: int) -> HostedStore:
        place = tmp_path / "store"
        make_pairs(place, ["store"])
        allow(place, [tmp_path / str(r) / f"r{r}.key" for r in range(world)])
        for replica in range(world):
            allow(tmp_path / str(replica), [place / "store.key"])
        return open_store("127.0.0.1", 0, LinkKeys.read(place))

    return host


# ------------------------------------------------------------------------------- who reaches whom


def test_two_replicas_reach_each_other_with_keys(
    fresh_workers: Fresh, tmp_path: Path, keyed_store: Callable[[int], HostedStore]
) -> None:
    keys = make_keys(tmp_path, 2, lambda own, other: own != other)
    options = [f"--listen 127.0.0.1:0 --lanes 2 {one}" for one in keys]
    report = reports(fresh_workers(2, init_group=False), *options, store=keyed_store(2))
    (pair,) = report["pairs"]
    assert (pair["way"], pair["dialled_by"], pair["refused"]) == ("direct", 0, [])
    assert (pair["link"], pair["error"], report["findings"]) == ("", None, [])
    assert [rate["lanes"] for rate in pair["rates"]] == [1, 2]
    assert all(gbps > 0 for rate in pair["rates"] for gbps in rate["gbps"])
    assert all(None not in rate["retransmitted"] for rate in pair["rates"])
    assert pair["round_trip_ms"] > 0 and None not in pair["congestion"]
    assert [one["keys"] for one in report["replicas"]] == [True, True]


def test_those_without_an_address_meet_at_the_relay(fresh_workers: Fresh) -> None:
    with serving_command([*CLI, "relay", "--listen", "127.0.0.1:0"]) as (_, place):
        hidden = f'--advertise "" --relay {place} --lanes 1'
        report = reports(
            fresh_workers(3, init_group=False), hidden, hidden, "--listen 127.0.0.1:0 --lanes 1"
        )
    ways = [(pair["replicas"], pair["way"], pair["dialled_by"]) for pair in report["pairs"]]
    assert ways == [([0, 1], "relay", 0), ([0, 2], "direct", 0), ([1, 2], "direct", 1)]
    assert [pair["link"] for pair in report["pairs"]] == ["", "", ""]
    assert report["findings"] == []


@pytest.fixture
def closed() -> Iterator[int]:
    """A port that is taken, so that no program can listen there."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def test_a_wrong_port_and_no_relay_are_named(fresh_workers: Fresh, closed: int) -> None:
    report = reports(
        fresh_workers(3, init_group=False),
        '--advertise "" --lanes 1',
        f"--listen 127.0.0.1:{workers.free_port()} --advertise 127.0.0.1:{closed} --lanes 1",
        '--advertise "" --lanes 1',
        status=1,
    )
    start = "replica 1 cannot be dialled from replica {} at tcp://127.0.0.1:{} (connection refused)"
    remedy = f"open TCP port {closed} of replica 1, or give both relay= and no address"
    assert sentences(report) == [
        f"error: replicas 0 and 1 do not reach each other: {start.format(0, closed)}; {remedy}",
        "error: replicas 0 and 2 do not reach each other: neither has an address, and there is no "
        "relay= on replica 0, 2; let one of them listen at an open port, or give both "
        'relay="tcp://host:port"',
        f"error: replicas 1 and 2 do not reach each other: {start.format(2, closed)}; {remedy}",
    ]


def test_who_can_dial_one_way_only_is_warned(fresh_workers: Fresh, closed: int) -> None:
    report = reports(
        fresh_workers(2, init_group=False),
        "--listen 127.0.0.1:0 --lanes 1",
        f"--listen 127.0.0.1:{workers.free_port()} --advertise 127.0.0.1:{closed} --lanes 1",
    )
    (pair,) = report["pairs"]
    assert (pair["way"], pair["dialled_by"], pair["link"]) == ("direct", 1, "")
    assert sentences(report) == [
        f"warning: replica 1 cannot be dialled from replica 0 at tcp://127.0.0.1:{closed} ("
        f"connection refused), so replica 1 dials; open TCP port {closed} of replica 1, or give "
        'its link advertise=""'
    ]


def test_a_doctor_without_keys_is_told_that_the_store_has_keys(
    fresh_workers: Fresh, tmp_path: Path, keyed_store: Callable[[int], HostedStore]
) -> None:
    keys = make_keys(tmp_path, 2, lambda own, other: own != other)
    store = keyed_store(2)
    options = [f"--listen 127.0.0.1:0 --timeout 8 {keys[0]}", "--listen 127.0.0.1:0 --timeout 8"]
    pool = fresh_workers(2, init_group=False)
    with_keys, without = pool.run(start, ("127.0.0.1", store.port), options, 0.2)
    assert (with_keys.status, without.status) == (1, 1)
    assert "replica 1 did not come to the store within 8 s" in with_keys.err
    assert without.err.endswith("has keys: give Link(keys=...), or --keys\n")


def test_a_key_that_is_not_let_in_is_named(
    fresh_workers: Fresh, tmp_path: Path, keyed_store: Callable[[int], HostedStore]
) -> None:
    # Replica 0 lets in itself alone.
    keys = make_keys(tmp_path, 2, lambda own, other: other == 0)
    options = [f"--listen 127.0.0.1:0 --lanes 1 {one}" for one in keys]
    pool = fresh_workers(2, init_group=False)
    (said,) = sentences(reports(pool, *options, status=1, store=keyed_store(2)))
    assert "the key of replica 1 is not among the allowed keys of replica 0: copy the" in said


@pytest.mark.nightly("5 s; the first tier has a key that is not let in")
def test_a_key_that_is_bound_to_another_number_is_named(
    fresh_workers: Fresh, tmp_path: Path, keyed_store: Callable[[int], HostedStore]
) -> None:
    keys = make_keys(tmp_path, 2, lambda own, other: own != other)
    allow(tmp_path / "1", [tmp_path / "0" / "r0.key"], [5])
    options = [f"--listen 127.0.0.1:0 --lanes 1 {one}" for one in keys]
    pool = fresh_workers(2, init_group=False)
    (said,) = sentences(reports(pool, *options, status=1, store=keyed_store(2)))
    assert "the allowed keys of replica 1 bind the key r0.key (" in said
    assert "to replica 5, and the owner of that key takes part as replica 0: " in said


# ------------------------------------------------------------------------------- ends in time


def test_a_replica_that_does_not_come_is_named(fresh_workers: Fresh, plain_store: Address) -> None:
    pool = fresh_workers(3, init_group=False)
    options = ["--listen 127.0.0.1:0 --timeout 3"] * 3
    pool.run(prepare)
    pool.submit(start, plain_store, options, 0.2, ranks=[0, 2])
    for ended in [one for one in pool.collect() if one is not None]:
        assert (ended.status, ended.out) == (1, "")
        assert ended.err.endswith(
            "diloco-comm: replica 1 did not come to the store within 3 s (--timeout): start "
            "`diloco-comm doctor --links` there too, with the same --store and --of\n"
        )


class _EndsInBetween(dist.Store):
    """A store in which another doctor ends between this doctor's check and its get."""

    def __init__(self, held: dist.Store, end: Callable[[], None]) -> None:
        super().__init__()
        self._held, self._end, self.has_ended = held, end, False

    def check(self, keys: list[str]) -> bool:
        is_there = self._held.check(keys)
        if keys == [f"{links.PREFIX}/present/1"] and is_there:
            self._end()
            self.has_ended = True
        return is_there

    def get(self, key: str) -> bytes:
        return bytes(self._held.get(key))

    def set(self, key: str, value: str | bytes) -> None:
        self._held.set(key, value)


def test_a_doctor_that_ends_while_it_is_looked_at_is_absent() -> None:
    held = dist.HashStore()
    held.set_timeout(timedelta(seconds=2))

    def request(replica: int, store: dist.Store) -> links.Request:
        return links.Request(store, replica, 2, None, None, None, None, None, 1, 0.5)

    with ExitStack() as other:
        own = {"link": "1", "of": 2}
        other.enter_context(links.Meeting(request(1, held), own))
        store = _EndsInBetween(held, other.close)
        with (
            links.Meeting(request(0, store), {"link": "0", "of": 2}) as meeting,
            pytest.raises(links.Ended, match=r"replica 1 did not come to the store"),
        ):
            meeting.gather(lambda _: None)
        assert store.has_ended


def _interrupted(rank: int, world: int, store: Address) -> Ended:
    """Replica 1 is interrupted while the rate is measured."""
    if rank == 0:
        return start(rank, world, store, ["--listen 127.0.0.1:0"] * 2, 5.0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    measured = links.round_trip

    def then_interrupt(group: _C.LinkGroup, peer: int, *, asks: bool) -> float:
        seconds = measured(group, peer, asks=asks)
        signal.raise_signal(signal.SIGINT)
        return seconds

    with mock.patch.object(links, "round_trip", then_interrupt):
        return start(rank, world, store, ["--listen 127.0.0.1:0"] * 2, 5.0)


def test_ctrl_c_ends_all_with_a_sentence(fresh_workers: Fresh, plain_store: Address) -> None:
    pool = fresh_workers(2, init_group=False)
    pool.run(prepare)
    begin = time.monotonic()
    other, interrupted = pool.run(_interrupted, plain_store)
    assert time.monotonic() - begin < 30
    said = "diloco-comm: ended by SIGINT\n"
    assert (interrupted.status, interrupted.out, interrupted.err) == (130, "", said)
    said = "diloco-comm: the doctor of replica 1 has ended before all was measured\n"
    assert (other.status, other.out, other.err) == (1, "", said)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--store", "tcp://127.0.0.1:1"], "--store is for --links"),
        (["--links"], "--links needs --store, as the training has the value"),
        (["--links", "--no-self-test"], "--self-test does not go with --links"),
        (
            ["--links", "--store", "tcp://127.0.0.1:1", "--replica", 2, "--of", 2],
            "--replica must be from 0 to 1, got 2",
        ),
        (
            [
                *("--links", "--store", "tcp://127.0.0.1:1", "--replica", 0, "--of", 2),
                *("--advertise", "192.0.2.1:29700"),
            ],
            "needs --listen with the port to which that address leads",
        ),
        (
            [
                *("--links", "--store", "tcp://127.0.0.1:1", "--replica", 0, "--of", 2),
                *("--proxy", "http://alice:sesame@192.0.2.1:3128"),
            ],
            "--proxy must have no password on the command line, which other users of this machine "
            "can read: give user@host:port, and the password in DILOCO_COMM_PROXY_PASSWORD",
        ),
    ],
)
def test_impossible_requests_are_one_sentence(arguments: list[object], named: str) -> None:
    ended = run_cli("doctor", *arguments)
    check_misuse(ended, named)
    assert "sesame" not in ended.err


def test_a_port_that_is_taken_is_one_sentence(fresh_workers: Fresh, plain_store: Address) -> None:
    pool = fresh_workers(2, init_group=False)
    with ExitStack() as stack:
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        pool.submit(start, plain_store, [f"--listen {place}"] * 2, 0.2, ranks=[0])
        ended = next(one for one in pool.collect() if one is not None)
    assert (ended.status, ended.out) == (1, "")
    said = f"diloco-comm: this process cannot listen at {place}: Address already in use\n"
    assert ended.err == said


# ------------------------------------------------------------------------------- a shaped link

MBITS = 20
HOST = """
import sys
import cut_links
cut_links.enter(sys.argv[1])
from diloco_comm.base.store_host import open_store
hosted = open_store(cut_links.HUB, 0)
print(hosted.port, flush=True)
sys.stdin.read()
"""
DROPS = (
    "table ip lossy { chain input { type filter hook input priority 0; "
    "ip saddr 192.0.2.1 ip length > 500 numgen random mod 100 < 4 drop; }; }"
)


@pytest.fixture
def site() -> Iterator[cut_links.Site]:
    """Two namespaces; 20 Mbit/s each way, and 4 % of the packets from the first one are lost."""
    if (reason := cut_links.missing()) or (reason := missing_tools("tc", "nft")):
        pytest.skip(reason)
    with cut_links.Site(2) as made:
        shaper = ["tbf", "rate", f"{MBITS}mbit", "burst", "16384", "latency", "200ms"]
        for name in made.names:
            # The route chooses what the machine's sysctl would, which a container may not change.
            route = [f"{NETWORK}.0/24", "dev", cut_links.INTERFACE, "congctl", "cubic"]
            call("ip", "-n", name, "route", "replace", *route)
            call("tc", "-n", name, "qdisc", "add", "dev", cut_links.INTERFACE, "root", *shaper)
        call("ip", "netns", "exec", made.names[1], "nft", DROPS)
        yield made


@pytest.fixture
def host(zygote: Zygote, site: cut_links.Site) -> Iterator[Address]:
    """The address of a store on the bridge."""
    job = Job(zygote, HOST, site.hub)
    lines = iter(job.output.readline, "")
    yield cut_links.HUB, int(next(line for line in lines if line.strip().isdigit()))
    job.send_signal(9)
    job.finish()


def _in_namespace(rank: int, world: int, store: Address, names: Sequence[str]) -> Ended:
    cut_links.enter(names[rank])
    place = f"{address(rank)}:29700"
    arguments = ["--store", "tcp://{}:{}".format(*store), "--replica", rank, "--of", world]
    return run_cli("doctor", "--links", "--json", *arguments, "--listen", place)


@pytest.mark.nightly("15 s; the first tier judges given figures")
def test_a_slow_link_with_loss_is_measured(
    fresh_workers: Fresh, site: cut_links.Site, host: Address
) -> None:
    all_ended = fresh_workers(2, init_group=False).run(_in_namespace, host, site.names)
    assert [(ended.status, ended.err) for ended in all_ended] == [(0, "")] * 2
    report = json.loads(all_ended[0].out)
    (pair,) = report["pairs"]
    one, several = pair["rates"]
    assert pair["congestion"] == ["cubic", "cubic"]
    # Loss holds up the way there, and nothing the way back.
    assert 1e3 * one["gbps"][0] < 0.5 * MBITS
    assert all(0.6 * MBITS < 1e3 * rate["gbps"][1] < 1.1 * MBITS for rate in (one, several))
    shares = zip(one["retransmitted"], several["retransmitted"], strict=True)
    lost, lost_back = (sum(both) / 2 for both in shares)
    assert lost_back < links_report.LOSS < lost < 0.2
    assert (
        f"warning: {100 * lost:.1f} % of the packets from replica 0 to replica 1 are sent again, "
        "and cubic slows down at each loss; run `sysctl net.ipv4.tcp_congestion_control=bbr` on "
        "replica 0"
    ) in sentences(report)
    assert report["findings"][-1]["level"] == "advice"
    assert f"--gbps {min(several['gbps']):.3g} --choose" in report["findings"][-1]["remedy"]


# ------------------------------------------------------------------------------- judgements


def pair_with(**values: Any) -> dict[str, Any]:
    rates = [
        {"lanes": 1, "gbps": [2.0, 2.0], "retransmitted": [0.0, 0.0]},
        {"lanes": 4, "gbps": [2.0, 2.0], "retransmitted": [0.0, 0.0]},
    ]
    pair = {
        **{"replicas": [0, 1], "way": "direct", "dialled_by": 0, "refused": [], "rates": rates},
        **{"round_trip_ms": 1.0, "congestion": ["cubic", "bbr"], "error": None, "link": ""},
    }
    return {**pair, **values}


def said_of(pair: dict[str, Any], available: Sequence[str] = ("cubic",)) -> list[str]:
    one = {"address": "", "relay": "", "keys": False, "available": list(available)}
    report = {"replicas": [{"replica": n, **one} for n in range(2)], "pairs": [pair]}
    report["findings"] = [vars(finding) for finding in links_report.judge_links(report)]
    return sentences(report)


def test_a_good_link_has_no_findings() -> None:
    assert said_of(pair_with()) == []


def test_lanes_and_the_plan_are_named() -> None:
    rates = [
        {"lanes": 1, "gbps": [0.01, 0.03], "retransmitted": [0.0, 0.0]},
        {"lanes": 4, "gbps": [0.04, 0.03], "retransmitted": [0.0, 0.0]},
    ]
    lanes, plan = said_of(pair_with(rates=rates, round_trip_ms=80.04))
    assert lanes == (
        "warning: one connection carries 10 Mbit/s from replica 0 to replica 1, 4 carry 40 Mbit/s; "
        "use Link(lanes=4) on all replicas"
    )
    assert plan == (
        "advice: the longest round trip is 80 ms, and the slowest pair has 30 Mbit/s; "
        "`diloco-comm plan --params PARAMETERS --layers LAYERS --step-time SECONDS --replicas 2 "
        "--rtt-ms 80 --gbps 0.03 --choose` chooses H, the wire and the overlap"
    )
    words = plan.split("`")[1].split()[1:]
    check_arguments([words[0], *PLAN, *words[words.index("--replicas") :]], "the advice")


@pytest.mark.parametrize("available", [("reno", "cubic", "bbr"), ("reno", "cubic")])
def test_loss_asks_for_bbr_where_it_is(available: Sequence[str]) -> None:
    # The second replica has bbr, and its losses cost nothing.
    rates = [{"lanes": 1, "gbps": [2.0, 2.0], "retransmitted": [0.02, 0.02]}]
    (said,) = said_of(pair_with(rates=rates), available)
    start = (
        "warning: 2.0 % of the packets from replica 0 to replica 1 are sent again, and cubic slows "
        "down at each loss; run "
    )
    command = "`sysctl net.ipv4.tcp_congestion_control=bbr` on replica 0"
    if "bbr" in available:
        assert said == start + command
    else:
        assert said == (
            f"{start}`modprobe tcp_bbr` and {command}; a kernel without bbr needs Link(lanes=4) or "
            "more"
        )


def test_documented_keys_are_those_of_the_json() -> None:
    check_documented({*SCHEMA, *REPLICA, *PAIR, *RATE, *PAIR["refused"][0]}, "reference/doctor.md")


def test_a_replica_behind_a_proxy_dials_through_the_proxy(
    fresh_workers: Fresh, tmp_path: Path, keyed_store: Callable[[int], HostedStore]
) -> None:
    keys = make_keys(tmp_path, 2, lambda own, other: own != other)
    with Proxy("http", "alice", "sesame") as proxy:
        options = [
            f"--listen 127.0.0.1:0 --lanes 1 {keys[0]}",
            f"--advertise '' --proxy http://alice@{proxy.place} --lanes 1 {keys[1]}",
        ]
        store = keyed_store(2)
        report = reports(fresh_workers(2, init_group=False), *options, store=store)
        (pair,) = report["pairs"]
        assert (pair["way"], pair["dialled_by"], pair["link"]) == ("direct", 1, "")
        listener = report["replicas"][0]["address"].removeprefix("tcp://")
        assert {listener, f"127.0.0.1:{store.port}"} == set(proxy.asked)
        assert "sesame" not in json.dumps(report)
