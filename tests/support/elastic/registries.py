"""Registries in processes of their own, for tests that kill and stop them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from zygote import wait_until_stopped

from diloco_comm.base.service.keys import allow, make_pairs
from diloco_comm.elastic.registry import Registry, RegistryUnavailable, connect
from diloco_comm.elastic.registry.server import RegistryServer
from diloco_comm_tools.common.workers import free_port

# The project's own server, without keys and with keys; a TCPStore of the program's own; etcd.
KINDS = ("tcp", "keyed", "store", "etcd")

# Before the port of a host that is a TCPStore.
STORE = "a TCPStore at port "

# Children are forked from a process that has imported torch, which takes seconds.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "diloco_comm.elastic.registry.server",
        "diloco_comm.training.presets",
        "pytest",
    ]
)


def serve_main(out: Connection, address: str, options: dict[str, Any]) -> None:
    server = RegistryServer(address, **options)
    out.send(server.address)
    server.serve()


def store_main(out: Connection, address: str, options: dict[str, Any]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    out.send(f"{STORE}{store.port}")
    signal.pause()


class Host:
    """A process that hosts a registry at an address.

    Args:
        main: ``serve_main`` or ``store_main``.
        address: Where to listen, by default at a port that stays free while no process listens.
        options: Arguments of the server.

    Attributes:
        key: The key of a client; None where the server has no keys.
    """

    key: Path | None = None

    def __init__(
        self,
        main: Callable[[Connection, str, dict[str, Any]], None] = serve_main,
        address: str = "",
        **options: Any,
    ) -> None:
        self._main, self._options = main, options
        self.address = address or f"tcp://127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        ours, theirs = _forks.Pipe(duplex=False)
        self._process = _forks.Process(
            target=self._main, args=(theirs, self.address, self._options)
        )
        self._process.start()
        theirs.close()
        self.address = ours.recv()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process with SIGKILL, also if it is stopped."""
        self._process.kill()
        self._process.join()


class EtcdHost:
    """A real etcd of one member.

    Args:
        is_encrypted: Speak TLS with a certificate that etcd makes; its folder is ``key``.
    """

    def __init__(self, folder: Path, *, is_encrypted: bool = False) -> None:
        client, peer = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        scheme = "https" if is_encrypted else "http"
        self.address = f"{'etcds' if is_encrypted else 'etcd'}://{client}"
        self.key = folder / "key" if is_encrypted else None
        self._folder = folder
        self._command = [
            "etcd", "--data-dir", str(folder / "data"), "--log-level", "error",
            "--listen-client-urls", f"{scheme}://{client}",
            "--advertise-client-urls", f"{scheme}://{client}",
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"default={peer}", *(["--auto-tls"] if is_encrypted else []),
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        # Some packages of etcd warn about a flag that they set themselves.
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(600):
            assert self._process.poll() is None, "etcd has ended"
            if self._is_ready():
                return
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        made = self._folder / "data" / "fixtures" / "client" / "cert.pem"
        if self.key is not None:
            if not made.exists():
                return False
            self.key.mkdir(exist_ok=True)
            shutil.copy(made, self.key / "ca.pem")
        registry = connect(self.address, run="start", timeout_s=1.0, key=self.key)
        try:
            registry.read()
            return True
        except RegistryUnavailable:
            return False
        finally:
            registry.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def need_etcd() -> None:
    """Skip the test if there is no etcd."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not on the PATH (Debian: apt-get install etcd-server)")


@contextmanager
def hosting(kind: str) -> Iterator[Host | EtcdHost]:
    """Host a registry of one kind; skip the test if its program is missing."""
    if kind == "etcd":
        need_etcd()
    with tempfile.TemporaryDirectory() as folder:
        host: Host | EtcdHost
        if kind == "etcd":
            host = EtcdHost(Path(folder))
        elif kind == "store":
            host = Host(store_main)
        elif kind == "keyed":
            keys = make_registry_keys(Path(folder, "keys"), "member")
            host = Host(journal=Path(folder, "journal"), keys=keys / "server.key_secret")
            host.key = keys / "member.key_secret"
        else:
            host = Host(journal=Path(folder))
        try:
            yield host
        finally:
            host.kill()


def make_registry_keys(folder: Path, *names: str) -> Path:
    """Make the pairs of a server and its clients in one folder, where each lets the others in."""
    make_pairs(folder, ["server", *names])
    allow(folder, [folder / f"{name}.key" for name in ("server", *names)])
    return folder


def place_of(host: Host | EtcdHost) -> Any:
    """Return what a client is given: the address, or an own connection to a TCPStore."""
    if not host.address.startswith(STORE):
        return host.address
    port = int(host.address.removeprefix(STORE))
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def open_registry(
    host: Host | EtcdHost, run: str, timeout_s: float = 20.0, **options: Any
) -> Registry:
    return connect(place_of(host), run=run, timeout_s=timeout_s, key=host.key, **options)


@contextmanager
def serving(**options: Any) -> Iterator[RegistryServer]:
    """Serve in a thread of this process."""
    server = RegistryServer(**options)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop_soon()
        thread.join()


@contextmanager
def stopped(host: Host | EtcdHost) -> Iterator[None]:
    """Stop the process of a registry, and let it go on."""
    host.send_signal(signal.SIGSTOP)
    try:
        wait_until_stopped(host.pid)
        yield
    finally:
        host.send_signal(signal.SIGCONT)


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """Return the results of ``work(0)``, ``work(1)``, ...; each runs in a thread."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def increment(registry: Registry, name: str) -> tuple[bytes, bytes]:
    """Raise the counter in the record by one, and return the record before and after."""
    while True:
        old = registry.read()
        new = b"%d %s" % (int(old.split()[0]) + 1 if old else 1, name.encode())
        if registry.swap(old, new):
            return old, new
