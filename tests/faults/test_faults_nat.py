"""Replicas behind routers that translate addresses and let nobody in; all packets are recorded."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cut_links
import pytest
import torch
from exchange_helpers import folder_of, make_folders
from fault_replicas import make_model, make_optimizer, take_inner_step
from frozen_file import collect, differences, in_rotation, run_death
from frozen_table import POLICIES, WIRES, Setting
from registries import make_registry_keys
from workers import Pool
from zygote import Job, Zygote

from diloco_comm import DiLoCo, Elastic, Link, StorePeers, SyncError, connect_store
from diloco_comm.elastic.events import Happening, JoinProgress, ViewChanged

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
]
H = 4
# The newcomer has the number of the replica that was killed.
DEAD, NEWCOMER = 2, 3
SUSPECT_AFTER_S = 4.0
TIMES: dict[str, Any] = {"timeout": 60.0, "suspect_after": SUSPECT_AFTER_S}

SERVER = """
import sys
import cut_links
cut_links.enter(sys.argv[1])
sys.argv = ["diloco-comm", *sys.argv[2:]]
from diloco_comm_tools.cli import main
main()
"""
RECORDER = """
import socket
import struct
import sys
import cut_links
cut_links.enter(sys.argv[1])
all_frames = socket.ntohs(3)  # ETH_P_ALL
with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, all_frames) as tap:
    tap.setsockopt(socket.SOL_SOCKET, 33, 1 << 28)  # SO_RCVBUFFORCE
    tap.bind(("hub", 3))
    print("records", flush=True)
    with open(sys.argv[2], "wb", buffering=0) as file:
        while True:
            packet = tap.recv(1 << 17)
            file.write(struct.pack("<I", len(packet)) + packet)
"""


@dataclass
class Site:
    """Where the replicas are, and the servers that they reach.

    Attributes:
        homes: Namespaces of the replicas.
        keys: The folder with a folder of keys for each replica; None without keys.
        recording: File of the packets that the bridge has received and sent.
        store, registry, relay: Addresses on the bridge.
    """

    homes: list[str]
    keys: Path | None
    recording: Path
    store: str = ""
    registry: str = ""
    relay: str = ""

    def folder(self, replica: int) -> Path | None:
        return None if self.keys is None else folder_of(self.keys, replica)

    def flows(self) -> list[bytes]:
        """The bytes of each direction of each TCP connection that began or ended at the bridge."""
        data, at = self.recording.read_bytes(), 0
        found: dict[bytes, dict[int, bytes]] = defaultdict(dict)
        while at + 4 <= len(data):
            (size,) = struct.unpack_from("<I", data, at)
            packet, at = data[at + 4 : at + 4 + size], at + 4 + size
            if packet[0] >> 4 != 4 or packet[9] != 6:  # IPv4, TCP
                continue
            segment = packet[4 * (packet[0] & 15) : struct.unpack_from("!H", packet, 2)[0] or size]
            (number,) = struct.unpack_from("!I", segment, 4)
            if payload := segment[4 * (segment[12] >> 4) :]:
                found[packet[12:20] + segment[:4]][number] = payload
        return [b"".join(payloads.values()) for payloads in found.values()]


@contextmanager
def opened(
    zygote: Zygote, reason: str, root: Path, keyed: bool = False, num_homes: int = 4
) -> Iterator[Site]:
    """Make homes; run a recorder, a store, a registry and a relay on their bridge."""
    if reason:
        pytest.skip(reason)
    with cut_links.Homes(num_homes) as made, ExitStack() as jobs:

        def start(script: str, begin: str, *words: Any) -> str:
            job = Job(zygote, script, made.hub, *words)
            jobs.callback(job.finish)
            jobs.callback(job.send_signal, signal.SIGKILL)
            lines = iter(job.output.readline, "")
            return next(line.strip() for line in lines if line.startswith(begin))

        site = Site(made.names, root if keyed else None, root / "packets")
        if keyed:
            make_folders(root, len(made.names) + 1)
            names = [f"r{rank}" for rank in range(len(made.names))]
            make_registry_keys(root / "registry", *names)
        start(RECORDER, "records", site.recording)
        place = ["--listen", f"{cut_links.HUB}:0"]
        of_store = ["--keys", site.folder(len(made.names))] if keyed else []
        of_registry = (
            ["--keys", root / "registry" / "server.key_secret"] if keyed else ["--insecure"]
        )
        site.store = start(SERVER, "tcp://", "store", *place, *of_store)
        site.registry = start(SERVER, "tcp://", "registry", *place, *of_registry)
        site.relay = start(SERVER, "tcp://", "relay", *place)
        yield site


@pytest.fixture(scope="module")
def reason() -> str:
    return cut_links.missing_for_homes()


def train(diloco: DiLoCo, model: Any, optimizer: Any, rank: int, until: int) -> None:
    while diloco.inner_step < until:
        take_inner_step(model, optimizer, rank, diloco.inner_step + 1)


def outer_bytes(diloco: DiLoCo, model: Any) -> bytes:
    with diloco.outer_parameters():
        outer = torch.cat([value.detach().flatten() for value in model.parameters()])
    return outer.numpy().tobytes()


def check(site: Site, ends: list[Any], members: tuple[int, ...], copied: bytes) -> None:
    """The replicas are one, and with keys no packet shows what they train."""
    living = [end for rank, end in enumerate(ends) if rank != DEAD]
    assert [end[:2] for end in living] == [(members, living[0][1])] * 3
    flows = site.flows()
    assert sum(map(len, flows)) > 50_000
    words = [b"the-run", b"replica", b"sync_every", b'"ways": ["', copied]
    seen = {word for word in words if any(word in flow for flow in flows)}
    assert seen == (set(words) if site.keys is None else set()), seen


# ---------------------------------------------------------------------------------- a fixed group


def in_fixed_group(rank: int, world: int, site: Site) -> Any:
    cut_links.enter(site.homes[rank])
    is_new, number = rank == NEWCOMER, DEAD if rank == NEWCOMER else rank
    meeting = connect_store(site.store, keys=site.folder(rank), timeout=60.0)
    if is_new:
        meeting.wait(["alone"])
    model = make_model()
    optimizer = make_optimizer(model)
    diloco = DiLoCo(
        model,
        optimizer,
        peers=StorePeers(meeting, replica=number, members=[0, 1, 2], name="the-run"),
        link=Link("tcp", relay=site.relay, keys=site.folder(rank), **TIMES),
        init="join" if is_new else "broadcast",
        sync_every=H,
    )
    with closing(diloco):
        first = outer_bytes(diloco, model)
        if not is_new:
            train(diloco, model, optimizer, rank, 2 * H)
            if rank == DEAD:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(SyncError) as caught:
                train(diloco, model, optimizer, rank, 3 * H)
            assert caught.value.missing == (DEAD,)
            diloco.change_group("survivors")
            train(diloco, model, optimizer, rank, 4 * H)
            meeting.set("alone", "")
            diloco.change_group([0, 1, 2])
        train(diloco, model, optimizer, rank, 6 * H)
        return tuple(diloco.members), diloco.outer_hash(), first


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
@pytest.mark.nightly("8 s of processes; test_relay has plain and keyed", but=["keyed"])
def test_a_fixed_group_of_homes(
    fresh_workers: Callable[..., Pool], zygote: Zygote, reason: str, tmp_path: Path, keyed: bool
) -> None:
    with opened(zygote, reason, tmp_path, keyed) as site:
        pool = fresh_workers(4, init_group=False)
        ends = pool.run(in_fixed_group, site, expect_exit={DEAD}, timeout=120)
        # The newcomer has copied the outer parameters.
        check(site, ends, (0, 1, 2), ends[NEWCOMER][2][64:80])


# ------------------------------------------------------------------------------ an elastic group


def listening() -> list[str]:
    """Return the sockets that listen in the namespace of this replica, which nobody can dial."""
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").open()]
    return [line for line in lines if line.split()[3] == "0A"]


def in_elastic_group(rank: int, world: int, site: Site) -> Any:
    cut_links.enter(site.homes[rank])
    model = make_model()
    optimizer = make_optimizer(model)
    meeting = connect_store(site.store, keys=site.folder(rank), timeout=60.0)
    if rank == NEWCOMER:
        meeting.wait(["alone"])
    happenings: list[Happening] = []
    peers = Elastic(
        site.registry,
        run="the-run",
        replica=DEAD if rank == NEWCOMER else rank,
        min_replicas=2,
        suspect_after=SUSPECT_AFTER_S,
        store=site.store,
        # No round of this run is too old for the newcomer's copy.
        round_log_bytes=1 << 24,
        key=None if site.keys is None else site.keys / "registry" / f"r{rank}.key_secret",
        insecure=site.keys is None,
        on_event=happenings.append,
    )
    link = Link("tcp", relay=site.relay, keys=site.folder(rank), **TIMES)
    with closing(DiLoCo(model, optimizer, peers=peers, link=link, sync_every=H)) as diloco:
        first = outer_bytes(diloco, model)
        last, num_whole, until = None, 0, time.monotonic() + 90.0
        while last is None or diloco.inner_step < last:
            assert time.monotonic() < until
            train(diloco, model, optimizer, rank, diloco.inner_step + H)
            num_whole += diloco.members == (0, 1, 2)
            if diloco.members == (0, 1):
                # A round takes the newcomer a trip through the relay.
                time.sleep(0.05)
            if rank == DEAD and num_whole == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0 and num_whole and diloco.members == (0, 1):
                meeting.set("alone", "")
            elif rank == 0 and last is None and meeting.check(["alone"]):
                meeting.set("last", str(diloco.inner_step + 20 * H))
            if meeting.check(["last"]):
                last = int(meeting.get("last"))
        assert listening() == []
        if rank == NEWCOMER:
            # The whole state came through the relay, while the others trained.
            (copied,) = [one for one in happenings if isinstance(one, JoinProgress)][-1:]
            assert copied.is_ready and copied.received_bytes >= copied.total_bytes > 0
            first_view = next(one for one in happenings if isinstance(one, ViewChanged))
            assert first_view.copied_bytes == 0, happenings
        return tuple(diloco.members), diloco.outer_hash(), first


@pytest.mark.nightly(
    "12 s of processes; test_meeting_stores has the stores, the fixed group the routers"
)
@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
def test_an_elastic_group_of_homes(
    fresh_workers: Callable[..., Pool], zygote: Zygote, reason: str, tmp_path: Path, keyed: bool
) -> None:
    with opened(zygote, reason, tmp_path, keyed) as site:
        pool = fresh_workers(4, init_group=False)
        ends = pool.run(in_elastic_group, site, expect_exit={DEAD}, timeout=150)
        # The newcomer has heard how far its donors are.
        check(site, ends, (0, 1, 2), b'"num_newcomers":')


# ------------------------------------------------------------------------- every policy and size

SIZES = range(2, 9)


def size_of(row: int) -> int:
    """Return the replicas of a row: seven sizes in turns, which shift against seven wires."""
    return SIZES[(row + row // len(SIZES)) % len(SIZES)]


def rows() -> list[Setting]:
    """Each policy at two sizes; replicas fail, join, are reset and save, but no process dies."""
    wires, events = list(WIRES), ["kill", "join", "reset", "resume", "plain"]
    made = [
        Setting(policy, wires[i % len(wires)], size_of(i), events[i % len(events)])
        for i, policy in enumerate([*POLICIES, *POLICIES])
    ]
    # Replicas wait at the store for their first row.
    return sorted(made, key=lambda row: -row.world)


def rows_of_deaths() -> list[Setting]:
    """Each policy once, and each size; the last replica's process is killed.

    The process dies where all survivors of a group of that size notice the death at the same step.
    """
    wires, places = list(WIRES), ["header", "told", "vote"]
    return [
        Setting(
            policy,
            wires[i % len(wires)],
            size_of(i),
            f"death-{'after' if size_of(i) == 2 else places[i % len(places)]}",
        )
        for i, policy in enumerate(POLICIES)
    ]


def through_the_relay(site: Site) -> dict[str, Any]:
    """The options of a run whose replicas are at the homes of a site."""
    link = Link("tcp", relay=site.relay, suspect_after=SUSPECT_AFTER_S)
    return {"link": link, "homes": site.homes, "address": site.store}


@pytest.mark.nightly("24 rows of up to eight processes, twice; the fixed group has one policy")
@pytest.mark.timeout(300)
def test_every_policy_behind_routers_gives_the_bits_of_gloo(
    fresh_workers: Callable[..., Pool], zygote: Zygote, reason: str, tmp_path: Path
) -> None:
    """The rounds, the outer steps and all that the replicas hold are as on one machine."""
    pairs = [*in_rotation(row.name for row in rows()).items()]
    half = len(pairs) // 2
    found, expected = {}, {}
    with opened(zygote, reason, tmp_path, num_homes=max(SIZES)) as site:
        near, far = (fresh_workers(max(SIZES), init_group=False) for _ in range(2))
        for part in (pairs[:half], pairs[half:]):
            expected |= collect(near, part)
            found |= collect(far, part, **through_the_relay(site))
        assert sum(map(len, site.flows())) > 100_000
    assert {name: bits for name, bits in expected.items() if isinstance(bits, str)} == {}
    texts = {name: differences(found[name], expected[name]) for name, _ in pairs}
    assert {name: text for name, text in texts.items() if text} == {}


@pytest.mark.nightly("up to eight processes; the fixed group has a death")
@pytest.mark.parametrize("row", rows_of_deaths(), ids=lambda row: row.name)
def test_a_death_behind_routers_gives_the_bits_of_gloo(
    fresh_workers: Callable[..., Pool], zygote: Zygote, reason: str, tmp_path: Path, row: Setting
) -> None:
    impl = in_rotation([row.name])[row.name]
    expected = run_death(fresh_workers, row.name, impl)
    assert not isinstance(expected, str), expected
    with opened(zygote, reason, tmp_path, num_homes=row.world) as site:
        found = run_death(fresh_workers, row.name, impl, **through_the_relay(site))
    assert differences(found, expected) == []
