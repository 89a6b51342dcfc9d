"""The registry on etcd 3.4 or later, over its HTTP gateway (``/v3/kv``, ``/v3/lease``).

The keys are ``diloco-comm/registry-id``, ``diloco-comm/RUN/record`` and
``diloco-comm/RUN/beats/MEMBER``. Every call is a transaction that compares the id first. Each
member's beat has a lease of etcd, so etcd drops the beat of a member that has been gone for long.
"""

from __future__ import annotations

import base64
import http.client
import json
import secrets
import select
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...base.service.addresses import is_loopback, parse_address
from ...base.service.keys import check_secret
from .protocol import (
    DROP_AFTER_S,
    PlainLook,
    RegistryMismatch,
    RegistryUnavailable,
    check_beat,
    check_run,
    check_swap,
)

Json = dict[str, Any]

# The longest answer that is read: the longest beats of 1024 members, in base64.
_MAX_ANSWER_BYTES = 1 << 25


class GatewayError(Exception):
    """etcd gave no answer, or an error; the text continues the sentence "the registry ..."."""


class Refused(GatewayError):
    """etcd answered with an error."""


class Gateway:
    """Sends requests to one etcd cluster; used by one thread at a time.

    Args:
        hosts: Host and port of each member of the cluster that may be asked.
        tls: The context for HTTPS; None for HTTP.
    """

    def __init__(self, hosts: list[tuple[str, int]], tls: ssl.SSLContext | None) -> None:
        self._hosts, self._tls = hosts, tls
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: Json, deadline: float, *, may_repeat: bool = True) -> Json:
        """Send a request, and return the answer's JSON.

        Args:
            path: Path of the URL.
            body: JSON of the request.
            deadline: Time of ``time.monotonic`` after which the request fails.
            may_repeat: The request may be sent again to another member, if one does not answer.

        Raises:
            Refused: If etcd answers with an error.
            GatewayError: If no member answers in time.
        """
        problem = GatewayError("has not answered in time")
        for num_left in range(len(self._hosts), 0, -1):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            is_sent = False
            try:
                connection = self._connect(left_s / num_left)
                is_sent = True
                return _exchange(connection, path, body)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                self._hosts.append(self._hosts.pop(0))
                problem = GatewayError(f"has not answered: {error or type(error).__name__}")
                if is_sent and not may_repeat:
                    break
        raise problem

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        """Return the open connection, or a new one to the first member in the list."""
        connection = self._connection
        if connection is not None and _is_idle(connection):
            connection.sock.settimeout(seconds)
            return connection
        self.close()
        host, port = self._hosts[0]
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=seconds)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)
        self._connection = connection
        connection.connect()
        return connection

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_idle(connection: http.client.HTTPConnection) -> bool:
    """Whether a connection can take a request: it is open, and the peer has not closed it."""
    if connection.sock is None:
        return False
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)


def _exchange(connection: http.client.HTTPConnection, path: str, body: Json) -> Json:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    with connection.getresponse() as response:
        text = response.read(_MAX_ANSWER_BYTES)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if response.status != 200 or not isinstance(answer, dict):
            reason = answer.get("error") if isinstance(answer, dict) else response.reason
            raise Refused(f"refuses {path}: status {response.status}, {reason}")
        return answer


# --------------------------------------------------------------------------------------------- etcd


_ROOT = "diloco-comm/"
_LEASE_S = int(DROP_AFTER_S)
# Seconds after which a lease is renewed.
_RENEW_S = _LEASE_S / 4


class EtcdRegistry(PlainLook):
    """The registry of one run in etcd.

    Any thread may call the methods. Calls of several threads are made one after another, and the
    time in which a call waits for others counts as its own.

    Args:
        address: ``etcd://host:port``, or ``etcds://host:port`` for TLS; members of one cluster are
            separated by commas.
        run: Name of the run.
        timeout_s: Seconds after which a call without an answer fails.
        key: Folder with ``ca.pem``, and ``client.pem`` with ``client-key.pem`` if there are any.
        insecure: Allow ``etcd://`` to another machine.
        registry_id: The id of the registry that must answer; "" accepts the first that answers.

    Attributes:
        registry_id: The registry's random id, which etcd keeps; "" before the first answer.

    Raises:
        ValueError: If the address or a name is not of its form, or a certificate is invalid.
    """

    is_durable = True

    def __init__(
        self,
        address: str,
        run: str,
        timeout_s: float,
        key: str | Path | None = None,
        insecure: bool = False,
        registry_id: str = "",
    ) -> None:
        self.address, self.run, self.timeout_s = address, check_run(run), timeout_s
        self.registry_id = registry_id
        hosts, is_encrypted = _parse(address, insecure)
        self._gateway = Gateway(hosts, _tls(key) if is_encrypted else None)
        self._lock = threading.Lock()
        # By member: the id of its lease at etcd, and when the lease is renewed next.
        self._leases: dict[str, tuple[str, float]] = {}
        self._id_key = _encoded(f"{_ROOT}registry-id")
        self._record_key = _encoded(f"{_ROOT}{run}/record")
        self._beats = f"{_ROOT}{run}/beats/"

    def read(self) -> bytes:
        """Return the record, b"" if there is none; see ``Registry.read``."""
        with self._turn() as deadline:
            done = self._transact([], [{"request_range": {"key": self._record_key}}], deadline)
        return _first_value(done)

    def swap(self, old: bytes, new: bytes) -> bool:
        """Replace the record by ``new`` if it equals ``old``; see ``Registry.swap``."""
        check_swap(old, new)
        key = self._record_key
        compare = {"key": key, "target": "VALUE", "value": _encoded(old)}
        if not old:
            compare = {"key": key, "target": "CREATE", "create_revision": "0"}
        change: Json = {"request_put": {"key": key, "value": _encoded(new)}}
        if not new:
            change = {"request_delete_range": {"key": key}}
        with self._turn() as deadline:
            done = self._transact([compare], [change], deadline, may_repeat=False)
        return bool(done.get("succeeded"))

    def beat(self, member: str, text: bytes) -> dict[str, bytes]:
        """Publish a member's beat, and return all last beats; see ``Registry.beat``."""
        check_beat(member, text)
        # All keys with the prefix: the range ends where "0", the next character, replaces the "/".
        everything = {"key": _encoded(self._beats), "range_end": _encoded(self._beats[:-1] + "0")}
        with self._turn() as deadline:
            try:
                steps = self._publish(member, text, deadline)
                done = self._transact([], [*steps, {"request_range": everything}], deadline)
            except Refused:
                if self._leases.pop(member, None) is None:
                    raise
                # The lease has expired, as while this process was suspended: get a new one.
                steps = self._publish(member, text, deadline)
                done = self._transact([], [*steps, {"request_range": everything}], deadline)
        found = done["responses"][-1]["response_range"].get("kvs", [])
        return {
            _decoded(pair["key"]).decode().removeprefix(self._beats): _decoded(pair["value"])
            for pair in found
        }

    def close(self) -> None:
        """Close the connection; idempotent. A member's last beat stays until its lease ends."""
        self._gateway.close()

    # ------------------------------------------------------------------------------- transactions

    @contextmanager
    def _turn(self) -> Iterator[float]:
        """Take the lock, and yield the deadline of the call; turn errors into registry errors."""
        deadline = time.monotonic() + self.timeout_s
        if not self._lock.acquire(timeout=self.timeout_s):
            raise RegistryUnavailable(
                f"another thread has asked the registry {self.address} for {self.timeout_s:g} s"
            )
        try:
            yield deadline
        except GatewayError as error:
            raise RegistryUnavailable(f"the registry {self.address} {error}") from None
        finally:
            self._lock.release()

    def _transact(
        self, compare: list[Json], steps: list[Json], deadline: float, *, may_repeat: bool = True
    ) -> Json:
        """Run ``steps`` in one transaction if the registry's id and ``compare`` hold; return it.

        The caller reads in the answer whether ``compare`` held.

        Raises:
            RegistryMismatch: If the id is another one.
        """
        if not self.registry_id:
            self._identify(deadline)
        own_id = {"key": self._id_key, "target": "VALUE", "value": _encoded(self.registry_id)}
        request = {
            "compare": [own_id, *compare],
            "success": steps,
            "failure": [{"request_range": {"key": self._id_key}}],
        }
        done = self._gateway.post("/v3/kv/txn", request, deadline, may_repeat=may_repeat)
        found = self.registry_id if done.get("succeeded") else _first_value(done).decode()
        if found != self.registry_id:
            raise RegistryMismatch(
                f"the registry at {self.address} is {found or 'empty'}, and the run {self.run!r} "
                f"belongs to the registry {self.registry_id}: has etcd lost its data?"
            )
        return done

    def _identify(self, deadline: float) -> None:
        """Learn the registry's id, and give it one if it has none."""
        fresh = secrets.token_hex(16)
        request = {
            "compare": [{"key": self._id_key, "target": "CREATE", "create_revision": "0"}],
            "success": [{"request_put": {"key": self._id_key, "value": _encoded(fresh)}}],
            "failure": [{"request_range": {"key": self._id_key}}],
        }
        done = self._gateway.post("/v3/kv/txn", request, deadline)
        self.registry_id = fresh if done.get("succeeded") else _first_value(done).decode()

    # -------------------------------------------------------------------------------------- beats

    def _publish(self, member: str, text: bytes, deadline: float) -> list[Json]:
        """Return the steps of a transaction that publish a member's beat, or remove it."""
        if not member:
            return []
        key = _encoded(self._beats + member)
        if not text:
            return [{"request_delete_range": {"key": key}}]
        lease = self._lease(member, deadline)
        return [{"request_put": {"key": key, "value": _encoded(text), "lease": lease}}]

    def _lease(self, member: str, deadline: float) -> str:
        """Return the id of the member's lease; first ask for one, or renew it, if it is time."""
        lease, renew_at = self._leases.get(member, ("", 0.0))
        now = time.monotonic()
        if lease and now < renew_at:
            return lease
        if lease:
            kept = self._gateway.post("/v3/lease/keepalive", {"ID": lease}, deadline)
            lease = lease if kept.get("result", {}).get("TTL") else ""
        if not lease:
            lease = self._gateway.post("/v3/lease/grant", {"TTL": _LEASE_S}, deadline)["ID"]
        self._leases[member] = (lease, now + _RENEW_S)
        return lease


def _parse(address: str, insecure: bool) -> tuple[list[tuple[str, int]], bool]:
    """Return host and port of each member, and whether TLS is wanted."""
    scheme = urlsplit(address).scheme
    members = [f"{scheme}://{part}" for part in address.partition("://")[2].split(",")]
    is_encrypted = scheme == "etcds"
    places = [parse_address("registry", member, scheme=scheme) for member in members]
    is_open = not all(is_loopback(host) for host, _ in places)
    if is_open and not is_encrypted and not insecure:
        raise ValueError(
            f"{address} is another machine, and its messages are not encrypted: use etcds://, or "
            "insecure=True to trust the network"
        )
    return places, is_encrypted


def _tls(key: str | Path | None) -> ssl.SSLContext:
    """Return the TLS context: it checks etcd's certificate, and has this client's, if any."""
    if key is None:
        return ssl.create_default_context()
    folder = Path(key)
    try:
        context = ssl.create_default_context(cafile=folder / "ca.pem")
        if (folder / "client.pem").exists():
            check_secret(folder / "client-key.pem")
            context.load_cert_chain(folder / "client.pem", folder / "client-key.pem")
    except OSError as error:  # ssl.SSLError too
        raise ValueError(
            f"key must be a folder with ca.pem, and client.pem with client-key.pem if etcd wants "
            f"a certificate; {folder} cannot be used: {error}"
        ) from None
    return context


def _encoded(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _decoded(text: str) -> bytes:
    return base64.b64decode(text)


def _first_value(done: Json) -> bytes:
    """Return the value in the first range of a transaction; b"" if the range is empty."""
    pairs = done["responses"][0]["response_range"].get("kvs", [])
    return _decoded(pairs[0]["value"]) if pairs else b""
