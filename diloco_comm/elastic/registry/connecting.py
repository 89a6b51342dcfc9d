"""Find the implementation of a registry for an address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.checks import timeout_seconds
from ...base.service.addresses import is_loopback, parse_address, with_scheme
from .protocol import Registry, check_run

if TYPE_CHECKING:
    import torch.distributed as dist

_FORMS = (
    'tcp://host:port, such as "tcp://192.0.2.1:29400", or etcd://host:port, etcds://host:port or '
    "store://host:port"
)


def connect(
    address: str | dist.Store,
    *,
    run: str,
    timeout_s: float = 5.0,
    key: str | Path | None = None,
    insecure: bool = False,
    registry_id: str = "",
) -> Registry:
    """Return the registry of one run; the first call of a method connects.

    Args:
        address: ``tcp://host:port`` for the server of ``diloco-comm registry``;
            ``etcd://host:port`` for etcd, or ``etcds://host:port`` for etcd with TLS (several
            members: ``etcd://host:port,host:port``); ``store://host:port`` for a ``TCPStore``; or
            a ``torch.distributed.Store``.
        run: Name of the run: 1 to 100 printable characters, no space and no slash.
        timeout_s: Seconds after which a call without an answer raises ``RegistryUnavailable``.
        key: For ``tcp``: folder of CURVE keys (the pair ``worker``), or a file
            ``NAME.key_secret`` in it. For ``etcds``: folder with ``ca.pem``, and ``client.pem``
            with ``client-key.pem`` if etcd asks for a certificate; without ``key`` the system's
            certificates count.
        insecure: Use an address that other machines reach without keys.
        registry_id: The ``registry_id`` that must answer; "" for the one that answers first.

    Raises:
        ValueError: If an argument is not of its form, or the address needs keys.
        ModuleNotFoundError: If the address is ``tcp`` and pyzmq (the extra ``[async]``) is missing.
    """
    timeout, run = timeout_seconds(timeout_s, "timeout_s"), check_run(run)
    if registry_id and not re.fullmatch("[0-9a-f]{32}", registry_id):
        raise ValueError(f"registry_id must be 32 hexadecimal digits, got {registry_id!r}")
    if not isinstance(address, str):
        return _from_store(address, run, timeout, registry_id)
    scheme = with_scheme(address).partition("://")[0]
    if scheme == "tcp":
        return _from_server(address, run, timeout, key, insecure, registry_id)
    if scheme in ("etcd", "etcds"):
        from .etcd import EtcdRegistry

        return EtcdRegistry(address, run, timeout, key, insecure, registry_id)
    if scheme == "store":
        from .store import StoreRegistry

        return StoreRegistry(address, run, timeout, insecure, registry_id)
    raise ValueError(f"registry must be {_FORMS}, got {address!r}")


def _from_server(
    address: str, run: str, timeout: float, key: Any, insecure: bool, registry_id: str
) -> Registry:
    from .client import RegistryClient

    host, _ = parse_address("registry", address)
    if key is None and not insecure and not is_loopback(host):
        raise ValueError(
            f"{address} is another machine: give key= (made by `diloco-comm registry keygen`), or "
            "insecure=True to trust the network"
        )
    return RegistryClient(address, run, timeout, key, registry_id)


def _from_store(address: Any, run: str, timeout: float, registry_id: str) -> Registry:
    import torch.distributed as dist

    from .store import StoreRegistry

    if not isinstance(address, dist.Store):
        raise ValueError(
            f"registry must be {_FORMS}, or a torch.distributed.Store, got {address!r}"
        )
    return StoreRegistry(address, run, timeout, True, registry_id)
