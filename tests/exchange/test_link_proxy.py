"""Processes whose connections go out through a proxy: real links, stores, relays and replicas."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_helpers import N, connect_replica, folder_of, gives_reference_bytes, make_folders
from fault_replicas import make_model, make_optimizer, take_inner_step
from proxies import Proxy
from test_link_keys import free_ports
from test_relay import carry, meet, started
from workers import Pool

from diloco_comm import _C, DiLoCo, Elastic, Link, StorePeers, SyncError, connect_store
from diloco_comm.base.service.addresses import proxy_of
from diloco_comm.base.service.keys import LinkKeys
from diloco_comm.base.service.relay import RelaySeat
from diloco_comm.base.store_host import HostedStore, dial_store, open_store
from diloco_comm.exchange.membership.own_link import OwnLink
from diloco_comm.ops.wire import WireFormat

Fresh = Callable[..., Pool]
Address = tuple[str, int]
KINDS = ["http", "socks5"]
PASSWORD = "open:sesame/%@"
# Nobody but the proxies knows these hosts; the second one is an address for documentation.
NAME, NUMBER = "replica.invalid", "203.0.113.7"
HOSTS = {NAME: "127.0.0.1", NUMBER: "127.0.0.1"}
SOON_S = 20.0


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


# ------------------------------------------------------------------------------------- replicas


def _meet(rank: int, world: int, address: Address, options: list[dict[str, Any]]) -> Any:
    everybody = list(range(world))
    with closing(
        connect_replica(address, rank, everybody, collectives="tcp", lanes=2, **options[rank])
    ) as ex:
        buffers = ex.buffers(N, WireFormat("int8"))
        return [gives_reference_bytes(ex, buffers, round, everybody) for round in range(3)]


@pytest.mark.parametrize(
    ("kind", "user", "host", "keyed"),
    [("http", None, NUMBER, False), ("socks5", "alice", NAME, True), ("http", "alice", NAME, True)],
)
def test_a_replica_exchanges_through_a_proxy(
    fresh_workers: Fresh, tmp_path: Path, kind: str, user: str | None, host: str, keyed: bool
) -> None:
    """The proxy alone finds replica 0, and nobody can dial replica 1."""
    (port,) = free_ports(1)
    options: list[dict[str, Any]] = [
        {"listen": f"127.0.0.1:{port}", "advertise": f"{host}:{port}"},
        {"advertise": ""},
    ]
    if keyed:
        make_folders(tmp_path, 2)
        for replica, each in enumerate(options):
            each["link_keys"] = folder_of(tmp_path, replica)
    with Proxy(kind, user, PASSWORD, hosts=HOSTS) as proxy:
        options[1]["proxy"] = proxy.url
        pool = fresh_workers(2, init_group=False)
        assert pool.run(_meet, pool.store, options) == [[True] * 3] * 2
        assert set(proxy.asked) == {f"{host}:{port}"}
        # One half of the values of three rounds, each way.
        assert proxy.num_passed > 3 * N


def test_the_relay_is_dialled_through_the_proxy() -> None:
    """Both links wait at the relay, and one of them finds the relay by the proxy alone."""
    with ExitStack() as stack:
        relay = started(stack)
        port = relay.address.rpartition(":")[2]
        proxy = stack.enter_context(Proxy("socks5", hosts={"relay.invalid": "127.0.0.1"}))
        with pytest.warns(UserWarning, match="travels unencrypted"):
            behind = OwnLink(None, None, None, f"relay.invalid:{port}", proxy_of(proxy.url))
        links = [behind, OwnLink(None, None, None, relay.address)]
        for one in links:
            stack.enter_context(closing(one))
        # The other link does not know the name of the first one's relay, so that the first one
        # dials: where the other one waits.
        carry(meet(links, "by the relay"))
        assert set(proxy.asked) == {f"relay.invalid:{port}", f"127.0.0.1:{port}"}


def _train(
    rank: int, world: int, store: str, root: str, options: list[dict[str, Any]], last: int
) -> Any:
    """Replica 1 is killed in the middle, and process 2 takes its place."""
    number = min(rank, 1)
    link = Link("tcp", keys=folder_of(root, rank), suspect_after=4.0, **options[number])
    mark = connect_store(store, keys=folder_of(root, rank), proxy=link.proxy)
    if rank == 2:
        mark.wait(["again"])
    model = make_model()
    optimizer = make_optimizer(model)
    with DiLoCo(
        model,
        optimizer,
        sync_every=2,
        peers=StorePeers(store, replica=number, members=[0, 1]),
        link=link,
        init="join" if rank == 2 else "broadcast",
    ) as diloco:
        while diloco.inner_step < last:
            if rank == 1 and diloco.inner_step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                take_inner_step(model, optimizer, number, diloco.inner_step + 1)
            except SyncError as error:
                assert rank == 0 and error.missing == (1,), error
                diloco.change_group("survivors")
                mark.set("again", "")
                diloco.change_group([0, 1])
        diloco.flush(final=True)
        assert PASSWORD not in repr(diloco.config()) + repr(link)
        return diloco.outer_hash(), diloco.inner_step


def test_a_training_through_a_proxy_survives_a_death(fresh_workers: Fresh, tmp_path: Path) -> None:
    """The proxy alone knows the store and the other replica."""
    make_folders(tmp_path, 4)
    keys = LinkKeys.read(folder_of(tmp_path, 3))
    hosted = open_store("127.0.0.1", 0, keys)
    (port,) = free_ports(1)
    with Proxy("http", "alice", PASSWORD, hosts=HOSTS) as proxy:
        options = [
            {"listen": f"127.0.0.1:{port}", "advertise": f"{NAME}:{port}"},
            {"advertise": "", "proxy": proxy.url},
        ]
        pool = fresh_workers(3, init_group=False)
        pool.submit(_train, f"tcp://127.0.0.1:{hosted.port}", str(tmp_path), options, 12)
        first, _, second = pool.collect(expect_exit={1})
        assert first == second
        assert set(proxy.asked) == {f"{NAME}:{port}", f"127.0.0.1:{hosted.port}"}
    hosted.store.close()


# ------------------------------------------------------------------------------------ the store


@pytest.fixture
def keys(tmp_path: Path) -> list[LinkKeys]:
    make_folders(tmp_path, 2)
    return [LinkKeys.read(folder_of(tmp_path, number)) for number in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_with_keys_through_a_proxy(hosted: HostedStore, tmp_path: Path, kind: str) -> None:
    with Proxy(kind, "alice", PASSWORD, hosts=HOSTS) as proxy:
        store = connect_store(
            f"tcp://{NAME}:{hosted.port}",
            keys=folder_of(tmp_path, 1),
            timeout=SOON_S,
            proxy=proxy.url,
        )
        store.set("a", "1")
        assert hosted.store.get("a") == b"1" and store.clone().get("a") == b"1"
        assert proxy.asked == [f"{NAME}:{hosted.port}"] * 2


def test_a_proxy_that_refuses_ends_the_dial_of_a_store(keys: list[LinkKeys]) -> None:
    """The sentence comes at once: the limit of the dial is long."""
    with Proxy("socks5", "alice", PASSWORD) as proxy:
        known = proxy_of(f"socks5://bob:{'x' * 9}@{proxy.place}")
        with pytest.raises(torch.distributed.DistStoreError) as caught:
            dial_store(NAME, 29400, 1000.0, keys[1], known)
    assert str(caught.value) == (
        f"the store at tcp://{NAME}:29400 cannot be reached: the proxy at {proxy.place} does not "
        "accept this user and password"
    )


def test_a_store_that_is_not_there_yet_is_waited_for(keys: list[LinkKeys]) -> None:
    (port,) = free_ports(1)
    with Proxy("http") as proxy:
        late: list[Any] = []

        def start() -> None:
            while not proxy.asked:
                time.sleep(0.01)
            late.append(open_store("127.0.0.1", port, keys[0]))

        starting = threading.Thread(target=start)
        starting.start()
        dial_store("127.0.0.1", port, SOON_S, keys[1], proxy_of(proxy.url)).set("a", "1")
        starting.join()
        late[0].store.close()


def test_a_store_without_keys_is_reached_through_a_proxy() -> None:
    hosted = open_store("127.0.0.1", 0)
    with Proxy("http") as proxy:
        store = connect_store(hosted.address, proxy=proxy.url, timeout=SOON_S)
        store.set("a", "1")
        assert hosted.store.get("a") == b"1" and proxy.asked
    hosted.store.close()


# ----------------------------------------------------------------------------------- bad answers


def attach(peers: Any, link: Link) -> DiLoCo:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return DiLoCo(model, optimizer, sync_every=2, peers=peers, link=link)


ANSWERS = [
    ("http", b"HTTP/1.1 403 Forbidden\r\n\r\n", "{} refused: HTTP/1.1 403 Forbidden"),
    ("http", b"HTTP/1.1 407 Who are you\r\n\r\n", "{} asks for a password"),
    ("http", b"SSH-2.0-OpenSSH_9.2\r\n", "another program than a proxy answers at "),
    ("http", b"HTTP/1.1 200 OK\r\n", "{} has closed the connection before its answer was complete"),
    ("http", b"HTTP/1.1 200 OK\r\n\r\nhello", "{} sends bytes after its answer, before "),
    ("http", b"HTTP/1.1 200 OK\r\nA: " + bytes(5000), "{} has more than 4096 bytes"),
    ("http", b"", "{} has closed the connection before its answer was complete"),
    ("http", None, "{} gives no answer"),
    ("socks5", b"\5\xff", "{} asks for a password"),
    ("socks5", b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program than a proxy answers at "),
    ("socks5", b"\5", "{} has closed the connection before its answer was complete"),
    ("socks5", None, "{} gives no answer"),
]


@pytest.mark.parametrize(("kind", "answer", "sentence"), ANSWERS)
def test_a_bad_answer_is_one_sentence(kind: str, answer: bytes | None, sentence: str) -> None:
    """A dial that waits and a dial of a link both say the sentence."""
    limit_s = 0.3 if answer is None else SOON_S
    with Proxy(kind, answer=answer, stalls=answer is None) as proxy:
        wanted = sentence.format(f"the proxy at {proxy.place}")
        with pytest.raises(ConnectionError) as caught:
            _C.dial_through(proxy_of(proxy.url), NAME, 29700, limit_s)  # type: ignore[arg-type]
        assert wanted in str(caught.value) and "\n" not in str(caught.value)
        assert wanted in failed_dial(proxy.url, wanted)


def failed_dial(proxy: str, wanted: str = "") -> str:
    """Return why a link finds nobody at an address, after more time if ``wanted`` is not said."""
    # A link tries again until its time is over; on a slow machine the answer may come later.
    for seconds in (0.4, 5.0):
        with closing(OwnLink(None, "", None, None, proxy_of(proxy))) as own:
            peers = [(own.nonce, ""), ("0" * 32, f"{NAME}:29700")]
            with pytest.raises(RuntimeError) as caught:
                own.link.groups("token", 0, peers, 1, seconds)
        text = str(caught.value)
        assert text.startswith(f"rank 1 at {NAME}:29700 cannot be reached: ") and "\n" not in text
        if wanted in text:
            break
    return text


def test_a_target_that_is_not_there_is_named_by_the_proxy() -> None:
    for kind, words in (
        ("http", "HTTP/1.1 502 Bad Gateway"),
        ("socks5", "the target host refused"),
    ):
        (port,) = free_ports(1)
        with Proxy(kind, hosts=HOSTS) as proxy:
            known = proxy_of(proxy.url)
            with pytest.raises(
                ConnectionError, match=f"the proxy at {proxy.place} refused: {words}"
            ):
                _C.dial_through(known, NUMBER, port, SOON_S)  # type: ignore[arg-type]


def test_a_proxy_that_is_not_there_is_one_sentence() -> None:
    (port,) = free_ports(1)
    wanted = f"the proxy at 127.0.0.1:{port} cannot be reached: Connection refused"
    assert wanted in failed_dial(f"http://127.0.0.1:{port}", wanted)
    with pytest.raises(RuntimeError) as caught:
        attach("alone", Link("tcp", relay="10.0.0.1:29800", proxy=f"socks5://127.0.0.1:{port}"))
    text = str(caught.value)
    assert (
        f"cannot wait at the relay at tcp://10.0.0.1:29800: the proxy at 127.0.0.1:{port}" in text
    )


def test_a_proxy_that_closes_a_connection_later_is_dialled_again() -> None:
    """The lane is dialled again, as without a proxy."""
    with Proxy("http", hosts=HOSTS) as proxy, ExitStack() as stack:
        links = [
            stack.enter_context(closing(OwnLink("127.0.0.1:0", None, None))),
            stack.enter_context(closing(OwnLink(None, "", None, None, proxy_of(proxy.url)))),
        ]
        carry(meet(links, "first"))
        proxy.cut()
        carry(meet(links, "second"))
        assert len(proxy.asked) == 2


# ---------------------------------------------------------------------------------- the password


def test_a_password_is_told_to_nobody(
    hosted: HostedStore, keys: list[LinkKeys], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    with Proxy("http", "alice", PASSWORD) as proxy:
        link = Link("tcp", proxy=proxy.url, keys=keys[1].folder, advertise="")
        said += [repr(link), repr(proxy_of(proxy.url)), f"{proxy_of(proxy.url)}"]
        peers = StorePeers(f"tcp://127.0.0.1:{hosted.port}", replica=0, of=1)
        with attach(peers, link) as diloco:
            said += [json.dumps(diloco.config()), repr(vars(diloco.exchange))]
        said += [repr(hosted.store.get(key)) for key in hosted.store.list_keys()]
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong: list[dict[str, Any]] = [{"link": Link("gloo", proxy=proxy.url)}, {"proxy": proxy.url}]
    for given, kind in zip(wrong, (ValueError, TypeError), strict=True):
        with pytest.raises(kind) as caught:
            DiLoCo(model, optimizer, sync_every=2, **given)
        said.append(str(caught.value))
    said += [failed_dial(proxy.url.replace("alice", "bob", 1)), caplog.text]
    quoted = proxy.url.partition("alice:")[2].partition("@")[0]
    for text in said:
        assert PASSWORD not in text and quoted not in text and "sesame" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_password_is_tried_once(kind: str) -> None:
    """A user is not locked out because each lane to each peer dials."""
    with Proxy(kind, "alice", PASSWORD) as proxy:
        url = proxy.url.replace("alice", "bob", 1)
        with closing(OwnLink(None, "", None, None, proxy_of(url))) as own:
            others = [(f"{rank:032x}", f"{NAME}:{29700 + rank}") for rank in (1, 2, 3)]
            with pytest.raises(RuntimeError, match="does not accept this user and password"):
                own.link.groups("token", 0, [(own.nonce, ""), *others], 4, 1.5)
        assert proxy.num_refused == 1


def test_a_target_that_the_proxy_forbids_does_not_end_the_dials_to_others() -> None:
    forbidden, (port,) = f"{NAME}:29700", free_ports(1)
    with Proxy("http", hosts=HOSTS, forbids=[forbidden]) as proxy:
        with closing(OwnLink(None, "", None, None, proxy_of(proxy.url))) as own:
            others = [("1" * 32, forbidden), ("2" * 32, f"{NAME}:{port}")]
            with pytest.raises(RuntimeError) as caught:
                own.link.groups("token", 0, [(own.nonce, ""), *others], 1, 1.5)
        assert proxy.asked.count(forbidden) == 1 and proxy.asked.count(others[1][1]) > 1
    text = str(caught.value)
    assert f"rank 1 at {forbidden} cannot be reached: the proxy at {proxy.place} refused: " in text
    assert "HTTP/1.1 502 Bad Gateway" in text


def test_dials_that_fail_hold_no_other_dial_back() -> None:
    """The targets are not there, and the proxy says so again and again."""
    ports = free_ports(3)
    with Proxy("http", hosts=HOSTS, delay_s=0.05) as proxy:
        with closing(OwnLink(None, "", None, None, proxy_of(proxy.url))) as own:
            others = [(f"{rank:032x}", f"{NAME}:{port}") for rank, port in enumerate(ports, 1)]
            with pytest.raises(RuntimeError):
                own.link.groups("token", 0, [(own.nonce, ""), *others], 4, 2.0)
        assert set(proxy.asked) == {place for _, place in others}


def test_elastic_replicas_have_no_proxy() -> None:
    with pytest.raises(ValueError, match="no proxy carries the connections of Elastic"):
        attach(
            Elastic("tcp://127.0.0.1:1", run="r", total_steps=1), Link("tcp", proxy="http://h:1")
        )


def test_a_seat_at_a_relay_names_the_proxy() -> None:
    with Proxy("http", answer=b"HTTP/1.1 403 No\r\n\r\n") as proxy:
        with pytest.raises(RuntimeError) as caught:
            RelaySeat("relay.invalid:1", "0" * 32, lambda fd: None, proxy_of(proxy.url))
        why = f"the proxy at {proxy.place} refused: HTTP/1.1 403 No: start the relay"
        assert why in str(caught.value) and "also at the proxy" in str(caught.value)
