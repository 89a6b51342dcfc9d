"""The registry on a real etcd: crashes, lost data, leases that end, several members, TLS."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from registries import EtcdHost, need_etcd

from diloco_comm.elastic.registry import RegistryMismatch, RegistryUnavailable, connect
from diloco_comm.elastic.registry.etcd import EtcdRegistry


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdHost]:
    need_etcd()
    host = EtcdHost(tmp_path)
    yield host
    host.kill()


def revoke(registry: EtcdRegistry, member: str) -> None:
    """End a member's lease, as etcd does when the member has not renewed it in time."""
    lease, _ = registry._leases[member]
    registry._gateway.post("/v3/lease/revoke", {"ID": lease}, time.monotonic() + 20)


def test_etcd_keeps_records_over_sigkill_and_drops_beats_of_the_gone(etcd: EtcdHost) -> None:
    registry = EtcdRegistry(etcd.address, "r", 20.0)
    assert registry.swap(b"", b"x") and registry.beat("0", b"b") == {"0": b"b"}
    etcd.kill()
    with pytest.raises(RegistryUnavailable, match=r"etcd://127.* has not answered: .*refused"):
        registry.read()
    etcd.start()
    assert registry.read() == b"x" and registry.swap(b"x", b"y")
    other = EtcdRegistry(etcd.address, "r", 20.0)
    assert other.beat("1", b"c") == {"0": b"b", "1": b"c"}
    revoke(registry, "0")
    assert other.beat("", b"") == {"1": b"c"}
    # A member that was only slow takes another lease, whether or not its lease was to be renewed.
    assert registry.beat("0", b"d") == {"0": b"d", "1": b"c"}
    revoke(registry, "0")
    registry._leases["0"] = (registry._leases["0"][0], 0.0)
    assert registry.beat("0", b"e") == {"0": b"e", "1": b"c"}
    lease = registry._leases["0"][0]
    registry._leases["0"] = (lease, 0.0)
    assert registry.beat("0", b"f")["0"] == b"f" and registry._leases["0"][0] == lease
    # An etcd that has lost its data is another registry.
    everything = {"key": "AA==", "range_end": "AA=="}
    registry._gateway.post("/v3/kv/deleterange", everything, time.monotonic() + 20)
    with pytest.raises(RegistryMismatch, match="is empty, and the run 'r' belongs to the registry"):
        registry.swap(b"", b"second line")
    assert connect(etcd.address, run="r").read() == b""


def test_the_next_member_is_asked_when_one_is_down_or_hangs(etcd: EtcdHost) -> None:
    living = etcd.address.removeprefix("etcd://")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = f"127.0.0.1:{silent.getsockname()[1]}"
        registry = connect(f"etcd://127.0.0.1:1,{living}", run="r", timeout_s=20)
        assert registry.swap(b"", b"x") and registry.read() == b"x"
        registry = connect(f"etcd://{hanging},{living}", run="r", timeout_s=1)
        assert registry.read() == b"x"
        # A swap is never sent twice.
        registry = EtcdRegistry(f"etcd://{hanging},{living}", "r", 1.0, "", True, "ab" * 16)
        with pytest.raises(RegistryUnavailable, match="has not answered: timed out"):
            registry.swap(b"x", b"y")


def test_tls(tmp_path: Path) -> None:
    need_etcd()
    host = EtcdHost(tmp_path, is_encrypted=True)
    try:
        registry = connect(host.address, run="r", timeout_s=20, key=host.key)
        assert registry.swap(b"", b"x") and registry.read() == b"x"
        with pytest.raises(RegistryUnavailable, match="certificate verify failed"):
            connect(host.address, run="r", timeout_s=20).read()
        # etcd asks for no certificate, and takes the one of the client.
        assert host.key is not None
        made, secret = tmp_path / "data" / "fixtures" / "client", host.key / "client-key.pem"
        shutil.copy(made / "cert.pem", host.key / "client.pem")
        shutil.copy(made / "key.pem", secret)
        secret.chmod(0o600)
        assert connect(host.address, run="r", timeout_s=20, key=host.key).read() == b"x"
        secret.chmod(0o644)
        with pytest.raises(ValueError) as caught:
            connect(host.address, run="r", timeout_s=20, key=host.key)
        assert str(caught.value).startswith(
            f"others than the owner may use {secret}, which has mode"
        )
    finally:
        host.kill()
