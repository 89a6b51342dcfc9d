"""The server of ``diloco-comm registry``: a store's host that also keeps records, and the journal.

The host answers reads and beats on a thread of its own. The thread of ``serve`` writes all swaps
that have come to the journal, with one fsync, and then lets the host answer them.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...base.checks import logger_of, number
from ...base.log import DoubtfulWrite
from ...base.service.addresses import address_to_bind, name_of_place, parse_address
from ...base.service.keys import link_keys
from ...base.store_host import listen_at, serve_store
from .journal import Change, Journal
from .protocol import DROP_AFTER_S

_log = logger_of(__name__)

_POLL_S = 0.1
_MIN_DROP_S, _MAX_DROP_S = 1.0, 30 * 86400.0


class RegistryServer:
    """Serve the records and beats of many runs, and the keys of a store.

    A server keeps the records of 1,024 runs, each of at most 61,440 bytes, and the last beats of
    1,024 members a run and 16,384 in all, each of at most 16,384 bytes; as many posts, each of at
    most 2,048 bytes. A swap is answered when the journal holds the new record. If a swap cannot
    be written, for instance on a full disk, nothing changes, and the client is told why; reads and
    beats go on. If the disk fails while a swap is written, the client is told that the outcome is
    unknown.

    The key-value pairs of the store are in memory alone. Calls for records cannot change them, and
    calls for pairs cannot change records.

    Args:
        listen: ``host:port``; port 0 picks a free one, see ``address`` afterwards.
        journal: Folder of the journal; None keeps all in memory, and a restart forgets all.
        keys: Folder of keys, or a file ``NAME.key_secret`` in it (``diloco-comm keys make``).
        insecure: Listen without keys at an address that other machines can reach.
        drop_after: Seconds, as this process counts them, after which a beat or post that its member
            has not renewed is dropped.

    Attributes:
        address: The ``tcp://host:port`` at which the server listens.
        host: The C++ object that answers the clients, and keeps the last beats and posts.
        registry_id: The registry's random id in hexadecimal digits, kept in the journal.

    Raises:
        ValueError: For invalid arguments, and for an address that is open to the network without
            keys.
        DamagedLog: If the journal is damaged.
        OSError: If the socket cannot listen on the address, or the folder cannot be written or
            belongs to another server.
        RuntimeError: If there is no OpenSSL for the keys.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        journal: str | Path | None = None,
        keys: str | Path | None = None,
        insecure: bool = False,
        drop_after: float = DROP_AFTER_S,
    ) -> None:
        address = address_to_bind(listen, keys, insecure, maker="diloco-comm keys make")
        table: dict[str, Any] = {"drop_after_s": _check_drop_after(drop_after)}
        own = link_keys(keys)
        host, port = parse_address("listen", address, listens=True)
        self._stop = threading.Event()
        self._journal: Journal | None = None
        self._has_trouble = False
        # Listen first: a server whose address is taken changes nothing on the disk.
        with _listen(host, port) as listener:
            if journal is not None:
                self._journal = Journal(Path(journal))
                table["table_id"] = self._journal.registry_id.hex()
                table["records"] = self._journal.records
            try:
                hosted = serve_store(listener, host, own, **table)
            except BaseException:
                self._close_journal()
                raise
        self.address, self.host = hosted.address, hosted.store
        self.registry_id = self.host.table_id

    def serve(self) -> None:
        """Write swaps in this thread until ``stop_soon``, then close the host and the journal."""
        try:
            while not self._stop.is_set():
                if changes := self.host.take_changes(_POLL_S):
                    self._write(changes)
        finally:
            self.close()

    def stop_soon(self) -> None:
        """Make ``serve`` return; may be called from a signal handler or another thread."""
        self._stop.set()

    def close(self) -> None:
        """End all connections, and close the journal; idempotent."""
        self.host.close()
        self._close_journal()

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _write(self, changes: Sequence[Change]) -> None:
        """Write swaps, and let the host answer them.

        If the disk fails, the host refuses these swaps. Any other error ends ``serve``.
        """
        assert self._journal is not None
        try:
            self._journal.append(changes)
        except OSError as error:
            reason = f"{error.filename} cannot be written: {error.strerror or error}"
            if not self._has_trouble:
                _log.error("%s; swaps are refused until it can", reason)
            self._has_trouble = True
            self.host.settle(reason, isinstance(error, DoubtfulWrite))
            return
        if self._has_trouble:
            _log.warning("the journal can be written again")
        self._has_trouble = False
        self.host.settle()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen_at(host, port)
    except OSError as error:
        # Negative error numbers come from the resolver of host names, and are not in ``errno``.
        code = error.errno or 0
        reason = os.strerror(code) if code > 0 else error.strerror or error
        raise OSError(f"cannot listen on {name_of_place(host, port)}: {reason}") from None


def _check_drop_after(value: Any) -> float:
    seconds = number("drop_after", value)
    if not _MIN_DROP_S <= seconds <= _MAX_DROP_S:
        raise ValueError(
            f"drop_after must be {_MIN_DROP_S:.0f} to {_MAX_DROP_S:.0f} seconds, got {value!r}"
        )
    return seconds
