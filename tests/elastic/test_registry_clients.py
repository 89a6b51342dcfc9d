"""Clients of a registry: answers that are late, keys, addresses, and how they end."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from async_helpers import wait_until
from descriptors import silent_strangers
from fault_replicas import make_model, make_optimizer
from registries import make_registry_keys, serving
from torch.distributed import HashStore

from diloco_comm import DiLoCo, Elastic, Link, ReplicaMismatch, SyncError, connect_store
from diloco_comm.base.service.keys import allow, make_pairs, remove
from diloco_comm.elastic import options
from diloco_comm.elastic.registry import Registry, RegistryUnavailable, connect
from diloco_comm.elastic.registry.protocol import KeyRefused
from diloco_comm.elastic.registry.server import RegistryServer
from diloco_comm.exchange import waits
from diloco_comm.group import driver

pytestmark = pytest.mark.usefixtures("forked_programs")


def test_keys_let_in_the_allowed_and_nobody_else(tmp_path: Path) -> None:
    keys = make_registry_keys(tmp_path / "keys", "one", "two")
    (keys / "allowed" / "two.key").unlink()
    with serving(keys=keys / "server.key_secret") as server, serving() as plain:

        def refusal(key: Path | None, address: str = server.address) -> RegistryUnavailable | None:
            with closing(connect(address, run="r", timeout_s=20, key=key)) as registry:
                try:
                    registry.read()
                except RegistryUnavailable as error:
                    return error
            return None

        one, two = keys / "one.key_secret", keys / "two.key_secret"
        assert connect(server.address, run="r", timeout_s=20, key=one).swap(b"", b"x")
        assert refusal(one) is None
        assert isinstance(error := refusal(two), KeyRefused), error
        assert "does not let in the key of this process" in str(error)
        assert str(refusal(None)).endswith(" has keys: give key=, or --key")
        assert "does not speak TLS as a store with keys does" in str(refusal(one, plain.address))
        # A client talks to a server whose key it knows, and to no other.
        (keys / "allowed" / "server.key").unlink()
        assert isinstance(error := refusal(one), KeyRefused), error
        assert "is not among the allowed keys of this process" in str(error)
    with pytest.raises(ValueError, match="there is no "):
        connect(server.address, run="r", key=keys / "three.key_secret")


def test_a_key_counts_from_and_until_a_second_after_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose key was removed is refused on the connection that it has, too."""
    make_registry_keys(tmp_path, "paris", "tokyo")
    file, kept = tmp_path / "allowed" / "tokyo.key", tmp_path / "tokyo.key"
    key = tmp_path / "tokyo.key_secret"
    with serving(keys=tmp_path / "server.key_secret") as server:
        tokyo = connect(server.address, run="r", timeout_s=20, key=key)
        paris = connect(server.address, run="r", timeout_s=20, key=tmp_path / "paris.key_secret")
        assert tokyo.swap(b"", b"x")
        file.unlink()
        time.sleep(2.0)
        for call in (lambda: tokyo.swap(b"x", b"y"), lambda: tokyo.beat("0.a", b"b"), tokyo.read):
            with pytest.raises(KeyRefused, match="does not let in the key of this process"):
                call()
        monkeypatch.setattr(options, "KEY_WAIT_S", 0.0)
        with pytest.raises(ReplicaMismatch, match="does not let in the key of this process"):
            Elastic(server.address, key=key).connect()
        assert paris.read() == b"x" and paris.beat("1.b", b"b") == {"1.b": b"b"}
        shutil.copy(kept, file)
        time.sleep(2.0)
        assert tokyo.read() == b"x"
        assert connect(server.address, run="r", timeout_s=20, key=key).read() == b"x"
        # A file that is no key lets nobody in, and locks nobody out.
        (tmp_path / "allowed" / "broken.key").write_text("no key")
        time.sleep(2.0)
        assert paris.swap(b"x", b"y")


def test_a_client_heeds_its_own_folder_after_a_refusal(tmp_path: Path) -> None:
    """The server has come back with another pair, which is let in while the client runs."""
    keys = make_registry_keys(tmp_path / "keys", "paris")
    member = tmp_path / "member"
    make_pairs(member, ["other"])
    allow(member, [keys / "paris.key"])
    allow(keys, [member / "other.key"])
    with serving(keys=keys / "server.key_secret") as server:
        registry = connect(server.address, run="r", timeout_s=20, key=member)
        with pytest.raises(KeyRefused, match="is not among the allowed keys of this process"):
            registry.read()
        allow(member, [keys / "server.key"])
        assert registry.read() == b""


def test_a_key_that_reads_only_changes_nothing(tmp_path: Path) -> None:
    keys = make_registry_keys(tmp_path, "paris", "monitor")
    remove(keys, "monitor")
    with serving(keys=keys / "server.key_secret") as server:
        paris = connect(server.address, run="r", timeout_s=20, key=keys / "paris.key_secret")
        assert paris.swap(b"", b"x") and paris.beat("0", b"alive") == {"0": b"alive"}
        data = connect_store(server.address, keys=keys / "paris.key_secret", timeout=20.0)
        data.set("word", "seven")
        looking = connect(server.address, run="r", timeout_s=20, key=keys / "monitor.key_secret")
        with pytest.raises(KeyRefused):
            looking.read()
        # The folder of readers counts as soon as the folder of allowed keys does.
        assert allow(keys, [keys / "monitor.key"], reads_only=True)
        wait_until(lambda: is_answered(looking), 60)
        assert looking.read() == b"x" and looking.beat("", b"") == {"0": b"alive"}
        for change in (
            lambda: looking.swap(b"x", b"y"),
            lambda: looking.beat("0", b"dead"),
            lambda: looking.beat("0", b""),
            lambda: looking.beat("1", b"here"),
        ):
            with pytest.raises(RegistryUnavailable, match="may only read"):
                change()
        store = connect_store(server.address, keys=keys / "monitor.key_secret", timeout=20.0)
        assert store.get("word") == b"seven" and store.check(["word"])
        store.wait(["word"])
        for attempt in (
            lambda: store.set("word", "eight"),
            lambda: store.compare_set("word", "seven", "eight"),
            lambda: store.add("number", 1),
            lambda: store.append("word", "!"),
            lambda: store.multi_set(["word"], ["eight"]),
            lambda: store.delete_key("word"),
        ):
            with pytest.raises(dist.DistStoreError, match="may only read"):
                attempt()
        assert data.get("word") == b"seven" and not data.check(["number"])
        assert paris.read() == b"x" and paris.beat("", b"") == {"0": b"alive"}
        remove(keys, "monitor")
        wait_until(lambda: not is_answered(looking), 60)


def test_a_connection_of_the_program_leads_to_the_same_registry(tmp_path: Path) -> None:
    keys = make_registry_keys(tmp_path, "paris")
    with serving(keys=keys / "server.key_secret") as server:
        own = connect_store(server.address, keys=keys / "paris.key_secret", timeout=20.0)
        over_store = connect(own, run="r", timeout_s=20)
        by_address = connect(server.address, run="r", timeout_s=20, key=keys / "paris.key_secret")
        assert over_store.swap(b"", b"x") and by_address.read() == b"x"
        assert by_address.beat("0", b"b") == {"0": b"b"} == over_store.beat("", b"")
        assert over_store.registry_id == server.registry_id and not over_store.is_durable
        over_store.close()
        # The program's own data lie beside the records, under any name.
        own.set("diloco-comm/r/record", "y")
        assert by_address.read() == b"x"


def is_answered(registry: Registry) -> bool:
    try:
        registry.read()
    except KeyRefused:
        return False
    return True


def test_strangers_that_use_up_the_descriptors_end_no_registry(tmp_path: Path) -> None:
    """Members go on, and a key that is removed meanwhile counts."""
    keys = make_registry_keys(tmp_path / "keys", "paris", "tokyo")
    own, journal = keys / "server.key_secret", tmp_path / "journal"
    with serving(keys=own, journal=journal) as server, ExitStack() as stack:
        paris, tokyo = (
            connect(server.address, run="r", timeout_s=20, key=keys / f"{name}.key_secret")
            for name in ("paris", "tokyo")
        )
        for client in (paris, tokyo):
            stack.callback(client.close)
        assert tokyo.read() == b""
        with silent_strangers(server.address):
            time.sleep(1.5)
            assert paris.swap(b"", b"x")
            (keys / "allowed" / "tokyo.key").unlink()
            end = time.monotonic() + 4.0
            while time.monotonic() < end:
                assert paris.read() == b"x"
            with pytest.raises(KeyRefused, match="does not let in the key of this process"):
                while time.monotonic() < end + 60.0:
                    tokyo.read()
        assert paris.swap(b"x", b"y")


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5", "tcp://192.0.2.1:5", "tcp://a.example:5"])
def test_an_open_address_needs_keys_or_a_word(address: str) -> None:
    with pytest.raises(ValueError, match="reached from other machines: give keys="):
        RegistryServer(address)
    with pytest.raises(ValueError, match="is another machine: give key="):
        connect(address, run="r")
    connect(address, run="r", insecure=True).close()
    with pytest.raises(ValueError, match="messages are not encrypted: use etcds"):
        connect(address.replace("tcp", "etcd"), run="r")


def test_a_process_ends_well_whose_registry_does_not_answer() -> None:
    program = """
from diloco_comm.elastic.registry import RegistryUnavailable, connect
registry = connect("tcp://127.0.0.1:1", run="r", timeout_s=0.1)
registry.itself = registry
try:
    registry.read()
except RegistryUnavailable:
    print("unavailable")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, [b"unavailable"])


def test_what_is_dropped_without_close_leaves_no_thread() -> None:
    before = threading.active_count()
    for _ in range(3):
        registry = connect(HashStore(), run="r")
        assert registry.swap(b"", b"x")
        registry = connect("tcp://127.0.0.1:1", run="r", timeout_s=0.05)
    del registry
    for _ in range(1000):
        if threading.active_count() == before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before


def test_wrong_arguments_are_one_sentence(tmp_path: Path) -> None:
    for address in ("here", "http://a:1", "tcp://a", "etcd://a", "store://a:1", 5, "tcp://a:b"):
        with pytest.raises(ValueError, match="registry must be "):
            connect(address, run="r", insecure=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        connect("tcp://127.0.0.1:1", run="r", timeout_s=0)
    with pytest.raises(ValueError, match="registry_id must be 32 hexadecimal digits, got 'x'"):
        connect("tcp://127.0.0.1:1", run="r", registry_id="x")
    with pytest.raises(ValueError, match="drop_after must be 1 to 2592000 seconds, got 0"):
        RegistryServer(drop_after=0)
    with pytest.raises(ValueError, match=r"folder with ca\.pem"):
        connect("etcds://127.0.0.1:1", run="r", key=tmp_path)


def test_who_waits_for_a_registry_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "FIRST_S", 0.5)
    keys = make_registry_keys(tmp_path, "paris")
    with serving(keys=keys / "server.key_secret") as server:
        with pytest.raises(SyncError, match="waited 2 s for the registry"):
            Elastic(server.address, quorum_wait=2.0).connect()
        address = server.address
    why = f"waiting for the registry at {address} has keys: give key=, or --key, for "
    assert caplog.records and all(why in one.getMessage() for one in caplog.records)
    # Nobody listens there any more, as where nobody has ever listened.
    why = f"the registry at {address} does not answer, as nothing listens there: Connection refused"
    with pytest.raises(RegistryUnavailable, match=f"^{re.escape(why)}$"):
        connect(address, run="r", timeout_s=0.5).read()
    with pytest.raises(ValueError, match=r"holds .*: give key= the file of this process"):
        connect(address, run="r", key=keys)
    with pytest.raises(ValueError, match=r"^key must be a folder or a file"):
        connect(address, run="r", key=keys / "paris.key")


def test_the_key_of_a_monitor_is_none_of_a_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_KEY_WAIT_S", 1.0)
    keys = make_registry_keys(tmp_path, "monitor")
    remove(keys, "monitor")
    assert allow(keys, [keys / "monitor.key"], reads_only=True)
    with serving(keys=keys / "server.key_secret") as server:
        model = make_model()
        elastic = Elastic(server.address, key=keys / "monitor.key_secret", quorum_wait=20.0)
        with pytest.raises(ReplicaMismatch, match="the key of this client may only read here"):
            DiLoCo(model, make_optimizer(model), peers=elastic, link=Link("tcp"), sync_every=4)


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_replica_without_the_keys_of_its_group_is_told_so(
    tmp_path: Path, *, has_keys: bool
) -> None:
    keys = make_registry_keys(tmp_path, "paris")
    links = Link("tcp"), Link("tcp", keys=keys / "paris.key_secret")
    with serving() as server, ExitStack() as stack:
        members: list[DiLoCo] = []
        for link in links if has_keys else reversed(links):
            model = make_model()
            elastic = Elastic(server.address, quorum_wait=20.0)
            options: dict[str, Any] = {"peers": elastic, "link": link, "sync_every": 4}
            if not members:
                members.append(DiLoCo(model, make_optimizer(model), **options))
                stack.enter_context(closing(members[0]))
                continue
            with pytest.raises(ReplicaMismatch) as caught:
                DiLoCo(model, make_optimizer(model), **options)
        who = ("", "no ") if has_keys else ("no ", "")
        assert str(caught.value) == (
            f"the link of replica 1 has {who[0]}keys, and the link of replica 0 has {who[1]}keys: "
            "give Link(keys=...) to all replicas, or to none"
        )
