"""Which processes live, as the lighthouse of torchft sees it: 0.2.0 or the nightly 2026.10.26.

The lighthouse only gives a sign (``detecting``). Who trains with whom is decided in the registry:
a lighthouse that starts again counts its quorums from the beginning, and knows no chain.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

_PERIOD_S = 0.5
# A lighthouse that was away answers no quorum that was asked for before; asking again is cheap.
# And a thread that waits for an answer when the process ends would abort the process.
_ANSWER_S, _END_S = 2.0, 3.0


class LighthouseDetector:
    """Ask a lighthouse of torchft which replicas live: the argument ``detector=`` of ``Elastic``.

    Each replica sends the lighthouse a heartbeat twice a second and asks for one quorum after the
    other. A replica that was in a quorum and is not in the newest one has ended. So a host that has
    lost its power is found out after the ``heartbeat_timeout_ms`` of the lighthouse, 5 seconds by
    default, also where ``suspect_after`` is longer. All replicas of a run must have this detector,
    and no other job may use the same lighthouse. Without an answer of the lighthouse there is no
    sign, and ``suspect_after`` counts.

    Args:
        address: ``http://host:port`` of ``torchft_lighthouse``.

    Raises:
        ModuleNotFoundError: If torchft is not installed.
    """

    def __init__(self, address: str) -> None:
        try:
            coordination = import_module("torchft.coordination")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"LighthouseDetector needs torchft, and {error.name} is not installed: "
                "pip install torchft-nightly"
            ) from error
        self.address, self._client_of = address, coordination.LighthouseClient
        self._name = ""
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._seen: frozenset[str] = frozenset()
        self._gone: frozenset[str] = frozenset()

    def begin(self, nonce: str) -> None:
        """Say to the lighthouse, from now on, that the process of this name lives.

        Raises:
            RuntimeError: If this detector has begun before.
        """
        if self._name:
            raise RuntimeError("this LighthouseDetector belongs to another DiLoCo: make a new one")
        self._name = nonce
        # A quorum waits for the slowest replica, and this one must not seem dead meanwhile.
        for ask, name in ((self._beat, "beats"), (self._ask_for_quorum, "quorums")):
            words = f"diloco_comm {name}"
            thread = threading.Thread(target=self._repeat, args=(ask,), daemon=True, name=words)
            thread.start()
            self._threads.append(thread)

    def look(self, silent: Mapping[str, str]) -> tuple[str, ...]:
        """Return which of these processes the newest quorum has lost."""
        return tuple(self._gone & silent.keys())

    def close(self) -> None:
        """Send no more heartbeats, and wait 3 seconds at most for the last answers; idempotent."""
        self._stop.set()
        until = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _repeat(self, ask: Any) -> None:
        client = None
        while not self._stop.is_set():
            try:
                if client is None:
                    client = self._client_of(self.address, timedelta(seconds=_ANSWER_S))
                if self._stop.is_set():
                    return
                ask(client)
            except Exception:
                client = None
                if ask == self._beat:
                    # The lighthouse is away: its silence is no sign.
                    self._gone = frozenset()
            self._stop.wait(_PERIOD_S)

    def _beat(self, client: Any) -> None:
        client.heartbeat(self._name, timedelta(seconds=_ANSWER_S))

    def _ask_for_quorum(self, client: Any) -> None:
        quorum = client.quorum(self._name, timedelta(seconds=_ANSWER_S), "", "", 0, 1, False)
        present = frozenset(one.replica_id for one in quorum.participants)
        self._seen |= present
        self._gone = self._seen - present
