"""Clients of a registry: answers that are late, keys, addresses, and how they end."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from descriptors import silent_strangers
from registries import serving
from torch.distributed import HashStore

from diloco_comm import Elastic, ReplicaMismatch
from diloco_comm.base.service.keys import Guard, make_keys
from diloco_comm.base.service.sockets import receive
from diloco_comm.elastic import options
from diloco_comm.elastic.registry import RegistryMismatch, RegistryUnavailable, connect
from diloco_comm.elastic.registry.client import RegistryClient
from diloco_comm.elastic.registry.messages import (
    Kind,
    Message,
    pack,
    parse,
)
from diloco_comm.elastic.registry.protocol import KeyRefused
from diloco_comm.elastic.registry.server import RegistryServer

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context
        context.destroy(0)


def test_a_client_drops_what_is_not_its_answer(context: zmq.Context) -> None:
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    registry = connect(f"tcp://127.0.0.1:{port}", run="r", timeout_s=20)

    def serve(_: int) -> None:
        for given in (b"first", b"second"):
            peer, header, run = server.recv_multipart()
            number = parse([header, run]).number
            late = Message(Kind.RECORD, number - 1, b"i" * 16, parts=(b"late",))
            own = Message(Kind.RECORD, number, b"i" * 16, parts=(given,))
            for frames in ([b"garbage"], pack(late), pack(own)):
                server.send_multipart([peer, *frames])
        peer, header, _ = server.recv_multipart()
        server.send_multipart([peer, header[:4] + b"\x09\0" + header[6:], b"x"])

    serving = threading.Thread(target=serve, args=(0,))
    serving.start()
    assert registry.read() == b"first" and registry.read() == b"second"
    with pytest.raises(RegistryMismatch, match="protocol version 9 was given, 1 is spoken here"):
        registry.read()
    serving.join()


def test_a_swap_is_sent_once_and_a_read_again(context: zmq.Context) -> None:
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    registry = RegistryClient(f"tcp://127.0.0.1:{port}", "r", 1.7, registry_id="ab" * 16)
    for call, least, most in (
        (lambda: registry.swap(b"", b"x"), 1, 1),
        (registry.read, 2, 9),
    ):
        with pytest.raises(RegistryUnavailable, match=r"has not answered for 1.7 s: is it running"):
            call()
        count = 0
        while receive(server) is not None:
            count += 1
        assert least <= count <= most


def test_keys_let_in_the_allowed_and_nobody_else(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, ["worker", "one", "two"])
    (keys / "allowed" / "two.key").unlink()
    make_keys(tmp_path / "other")
    os.replace(tmp_path / "other" / "server.key", keys / "wrong.key")
    with serving(keys=keys) as server:

        def allowed(key: Path | None, timeout_s: float = 0.5) -> bool:
            registry = connect(server.address, run="r", timeout_s=timeout_s, key=key)
            try:
                registry.read()
                return True
            except RegistryUnavailable as error:
                asked = "want keys" if key is None else "refuses the key|know the key"
                assert re.search(asked, str(error))
                assert isinstance(error, KeyRefused) == (key == keys / "two.key_secret")
                return False
            finally:
                registry.close()

        assert connect(server.address, run="r", timeout_s=20, key=keys).swap(b"", b"x")
        assert allowed(keys / "one.key_secret", 20.0)
        assert not allowed(None) and not allowed(keys / "two.key_secret", 3.0)
        # A client talks to the server whose key it knows, and to no other.
        os.replace(keys / "wrong.key", keys / "server.key")
        assert not allowed(keys)
    with pytest.raises(ValueError, match="there is no key"):
        connect(server.address, run="r", key=keys / "three.key_secret")


def test_a_key_counts_from_and_until_a_second_after_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose key was removed is refused on the connection that it has, too."""
    make_keys(tmp_path, ["paris", "tokyo"])
    file, kept = tmp_path / "allowed" / "tokyo.key", tmp_path / "tokyo.key"
    key = tmp_path / "tokyo.key_secret"
    with serving(keys=tmp_path) as server:
        tokyo = connect(server.address, run="r", timeout_s=20, key=key)
        paris = connect(server.address, run="r", timeout_s=20, key=tmp_path / "paris.key_secret")
        assert tokyo.swap(b"", b"x")
        file.unlink()
        time.sleep(2.0)
        for call in (lambda: tokyo.swap(b"x", b"y"), lambda: tokyo.beat("0.a", b"b"), tokyo.read):
            with pytest.raises(KeyRefused, match="refuses: the key of this client is not"):
                call()
        again = connect(server.address, run="r", timeout_s=3.0, key=key)
        with pytest.raises(
            KeyRefused, match=r"refuses the key .*tokyo.key_secret: copy its public"
        ):
            again.read()
        monkeypatch.setattr(options, "KEY_WAIT_S", 0.0)
        with pytest.raises(ReplicaMismatch, match="refuses the key"):
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


def test_strangers_that_use_up_the_descriptors_end_no_registry(tmp_path: Path) -> None:
    """Members go on, and a key that is removed meanwhile counts."""
    keys = tmp_path / "keys"
    make_keys(keys, ["paris", "tokyo"])
    with serving(keys=keys, journal=tmp_path / "journal") as server, ExitStack() as stack:
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
            with pytest.raises(KeyRefused, match="the key of this client is not"):
                while time.monotonic() < end + 60.0:
                    tokyo.read()
        assert paris.swap(b"x", b"y")


def test_a_folder_of_keys_that_is_gone_for_a_moment_locks_nobody_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(tmp_path)
    with zmq.Context() as context:
        guard = Guard(context, tmp_path / "allowed")
        try:
            (key,) = guard.allowed.present()
            (tmp_path / "allowed").rename(tmp_path / "away")
            for _ in range(2):
                guard.allowed._look_at = 0.0
                assert guard.callback("*", key)
            (line,) = [one.getMessage() for one in caplog.records]
            assert "is gone: the clients that it named before stay allowed" in line
            (tmp_path / "allowed").mkdir()
            guard.allowed._look_at = 0.0
            assert not guard.callback("*", key)
        finally:
            guard.stop()


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5", "tcp://192.0.2.1:5", "tcp://a.example:5"])
def test_an_open_address_needs_keys_or_a_word(address: str) -> None:
    with pytest.raises(ValueError, match="reached from other machines: give keys="):
        RegistryServer(address)
    with pytest.raises(ValueError, match="is another machine: give key="):
        connect(address, run="r")
    connect(address, run="r", insecure=True).close()
    store = address.replace("tcp", "store")
    with pytest.raises(ValueError, match="TCPStore has no keys: give insecure=True"):
        connect(store, run="r")
    with pytest.raises(ValueError, match="messages are not encrypted: use etcds"):
        connect(address.replace("tcp", "etcd"), run="r")
    connect(store, run="r", insecure=True).close()


def test_a_process_ends_well_whose_registry_does_not_answer() -> None:
    program = """
from diloco_comm.elastic.registry import RegistryUnavailable, connect
for address in ("tcp://127.0.0.1:1", "store://127.0.0.1:1"):
    registry = connect(address, run="r", timeout_s=0.1)
    registry.itself = registry
    try:
        registry.read()
    except RegistryUnavailable:
        print("unavailable")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, [b"unavailable"] * 2)


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
    for address in ("here", "http://a:1", "tcp://a", "etcd://a", "store://:1", 5, "tcp://a:b"):
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
