"""CURVE keys: which clients may talk to a server; all messages are encrypted.

A folder of keys looks like this. A file that ends in ``.key_secret`` stays on its machine:

    keys/server.key  keys/server.key_secret  keys/worker.key  keys/worker.key_secret
    keys/allowed/worker.key        the clients that the server lets in

A running server reads ``allowed`` again: a key that is added or removed counts a second later.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

logger = logging.getLogger(__name__)

SERVER, WORKER, ALLOWED = "server", "worker", "allowed"
# Seconds between two looks at the folder of allowed keys.
_LOOK_S = 1.0
# Answer to a client whose key was removed.
REVOKED = "the key of this client is not among the server's allowed keys any more"


def make_keys(folder: Path, workers: list[str] | None = None) -> list[Path]:
    """Make a pair of keys for each worker and allow these workers; make the server's if missing.

    Args:
        workers: Names of the workers' files; a single "worker" by default.

    Returns:
        The files written.

    Raises:
        ValueError: If a worker already has keys, or a name is not a plain file name.
    """
    _need_curve()
    names = [WORKER] if workers is None else workers
    for name in names:
        if not name or Path(name).name != name or name == SERVER or name.startswith("."):
            raise ValueError(f"a worker's keys need a plain name, got {name!r}")
        if (folder / f"{name}.key_secret").exists():
            raise ValueError(f"{folder / name}.key_secret exists: remove it to make a new one")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    allowed = folder / ALLOWED
    allowed.mkdir(exist_ok=True)
    missing = [] if (folder / f"{SERVER}.key_secret").exists() else [SERVER]
    written = []
    for name in [*missing, *names]:
        public, secret = (Path(path) for path in zmq.auth.create_certificates(folder, name))
        secret.chmod(0o600)
        written += [public, secret]
        if name != SERVER:
            written.append(Path(shutil.copy(public, allowed / public.name)))
    return written


class Guard:
    """Lets in the clients whose public key is in a folder now, while they connect and afterwards.

    Args:
        folder: With a file ``NAME.key`` for each client.
    """

    def __init__(self, context: zmq.Context, folder: Path) -> None:
        self._folder = folder
        self._keys: frozenset[bytes] = frozenset()
        self._seen: Sequence[tuple[object, ...]] = ()
        self._look_at = 0.0
        self._is_missing = False
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        # New connections are checked on that thread.
        self._thread.configure_curve_callback(domain="*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client that connects may come in; the interface is pyzmq's."""
        return key in self._present()

    def admits(self, frame: zmq.Frame) -> bool:
        """Return whether the client that has sent a frame is still allowed."""
        return str(frame.get("User-Id")).encode() in self._present()

    def stop(self) -> None:
        """End the thread; idempotent."""
        self._thread.stop()

    def _present(self) -> frozenset[bytes]:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            if not self._folder.is_dir():
                # The file is about to be replaced, such as by a copy of another host's.
                self._note_missing()
                return self._keys
            self._is_missing = False
            paths = sorted(self._folder.glob("*.key"))
            seen = [_stamp(path) for path in paths]
            if seen != self._seen:
                self._keys, self._seen = frozenset(filter(None, map(_public_key, paths))), seen
        return self._keys

    def _note_missing(self) -> None:
        if not self._is_missing:
            self._is_missing = True
            logger.warning(
                "the folder %s is gone: the clients that it named before stay allowed; make the "
                "folder again, without the keys that are to be refused",
                self._folder,
            )


def _stamp(path: Path) -> tuple[object, ...]:
    try:
        found = path.stat()
    except OSError:
        return path, None
    return path, found.st_ino, found.st_size, found.st_mtime_ns


def _public_key(path: Path) -> bytes | None:
    """Return the key in a file; None, with a word in the log, for a file that cannot be read."""
    try:
        return zmq.auth.load_certificate(path)[0]
    except (OSError, ValueError) as error:
        logger.warning("%s lets nobody in: %s", path, error)
        return None


def protect_server(context: zmq.Context, socket: zmq.Socket, folder: Path) -> Guard:
    """Accept only workers with one of the allowed keys.

    Returns:
        The guard of the socket; the caller ends it with ``stop``.
    """
    public, secret = _load(folder / f"{SERVER}.key_secret")
    if secret is None:
        raise ValueError(f"{folder / SERVER}.key_secret holds no secret key")
    if not any((folder / ALLOWED).glob("*.key")):
        raise ValueError(f"{folder / ALLOWED} holds no *.key: no worker could get in")
    guard = Guard(context, folder / ALLOWED)
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.curve_server = True
    return guard


def protect_worker(socket: zmq.Socket, folder: Path, name: str = WORKER) -> None:
    """Use a worker's keys, and accept only the server whose public key is in ``server.key``."""
    public, secret = _load(folder / f"{name}.key_secret")
    if secret is None:
        raise ValueError(f"{folder / name}.key_secret holds no secret key")
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.curve_serverkey = _load(folder / f"{SERVER}.key")[0]


def _load(path: Path) -> tuple[bytes, bytes | None]:
    _need_curve()
    if not path.is_file():
        raise ValueError(
            f"there is no key {path}: `diloco-comm serve keygen` or `diloco-comm registry keygen` "
            "makes one"
        )
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no key: {error}") from None


def _need_curve() -> None:
    if not zmq.has("curve"):
        raise ValueError("this ZeroMQ was built without CURVE: install pyzmq's own wheel")
