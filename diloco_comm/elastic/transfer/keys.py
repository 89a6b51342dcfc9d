"""Keys of one process, for its life: which processes may copy the outer state from each other.

Each process makes a pair of CURVE keys and publishes the public one in its beats. So the processes
that may write beats, and no others, can read the outer state: those that the registry lets in. All
that travels is encrypted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

KEY_CHARACTERS = 40


@dataclass(frozen=True)
class Place:
    """Where a process serves, and its public key, as text in a beat.

    Attributes:
        address: ``tcp://host:port``.
        key: Z85, 40 characters.
    """

    address: str
    key: str

    def to_text(self) -> str:
        return f"{self.address} {self.key}"

    @classmethod
    def from_text(cls, text: str) -> Place | None:
        """Return the place that a beat names; None if the text names none."""
        address, _, key = text.partition(" ")
        is_sound = address.startswith("tcp://") and len(key) == KEY_CHARACTERS
        return cls(address, key) if is_sound else None


class KeyPair:
    """A pair of keys that is stored nowhere.

    Raises:
        ValueError: If this ZeroMQ has no CURVE.
    """

    def __init__(self) -> None:
        if not zmq.has("curve"):
            raise ValueError("this ZeroMQ was built without CURVE: install pyzmq's own wheel")
        self.public, self._secret = zmq.curve_keypair()

    @property
    def text(self) -> str:
        return self.public.decode()

    def protect_server(
        self, context: zmq.Context, socket: zmq.Socket, allowed: Callable[[], Iterable[str]]
    ) -> ThreadAuthenticator:
        """Let in the clients whose public key is allowed at the time when they connect.

        Returns:
            The thread that checks the keys; the caller ends it with ``stop``.
        """
        guard = ThreadAuthenticator(context)
        guard.start()
        guard.configure_curve_callback(domain="*", credentials_provider=_Provider(allowed))
        self._use(socket)
        socket.curve_server = True
        return guard

    def protect_client(self, socket: zmq.Socket, server_key: str) -> None:
        """Use these keys, and accept only the server that has ``server_key``."""
        self._use(socket)
        socket.curve_serverkey = server_key.encode()

    def _use(self, socket: zmq.Socket) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.public, self._secret


class _Provider:
    def __init__(self, allowed: Callable[[], Iterable[str]]) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        return key.decode() in set(self._allowed())
