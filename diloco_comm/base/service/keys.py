"""A folder of keys, the same for registry, store, servers and links: own pairs, and who comes in.

A folder of keys looks like this. A file that ends in ``.key_secret`` stays on its machine:

    keys/paris.key  keys/paris.key_secret    a pair
    keys/allowed/tokyo.key                   the public keys that are let in
    keys/readers/lima.key                    the public keys that may look at a registry or a store

A pair is of ed25519 keys, with which links, stores and registries protect their connections. A pair
that was made for a server of asynchronous training has CURVE keys of ZeroMQ, too. ZeroMQ skips the
lines of links.
A line ``replicas = "1, 3"`` of an allowed file binds the key of the link to these replicas. A
running process reads ``allowed`` again each second: a key that is added or removed counts then.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..background import batch_threads
from ..checks import MOST_INT32, integer, logger_of
from ..errors import named

if TYPE_CHECKING:
    import zmq

logger = logger_of(__name__)

SERVER, WORKER, ALLOWED, READERS = "server", "worker", "allowed", "readers"
# Answer to a client whose key was removed.
REVOKED = "the key of this client is not among the server's allowed keys any more"
PUBLIC, SECRET = ".key", ".key_secret"
# Seconds between two looks at the folder of allowed keys.
LOOK_S = 1.0
# Error numbers of a process, or a host, that has no descriptor left.
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
# Seconds without an error of reading the folder or a file of keys, after which the log says that
# the folder or file can be read again. Strangers' connections can use up the descriptors, so the
# error comes and goes.
_QUIET_S = 10.0
# The mode of a Secret that Kubernetes mounts with ``defaultMode: 0440`` for a pod with fsGroup:
# root owns the file, and the pod's group may read the file.
_OF_A_SECRET = 0o440
# Z85: the 40 characters in which ZeroMQ writes a key of 32 bytes.
_Z85 = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_HEX = re.compile("[0-9a-f]{64}")
# The line that binds a key to replicas.
_REPLICAS = re.compile(r'replicas = "([0-9]{1,10}(?:, [0-9]{1,10})*)"')
_PUBLIC_HEAD = "#   Public keys of {name}: let others have this file.\n\nmetadata\n"
_SECRET_HEAD = (
    "#   SECRET keys of {name}: this file stays on its machine, readable by its owner only.\n\n"
    "metadata\n"
)


@dataclass(frozen=True)
class Keys:
    """The keys in one file, as they are written there; a secret key is None if it is not there.

    Attributes:
        curve, curve_secret: Z85, 40 characters; ``curve`` is "" in a pair that is not for servers.
        link, link_secret: 64 hexadecimal digits: the public key, and its seed.
        replicas: The numbers of the replicas to which the key of the link is bound: () where the
            line of these numbers is damaged, None for a key that is not bound.
    """

    curve: str
    link: str
    curve_secret: str | None = None
    link_secret: str | None = None
    replicas: tuple[int, ...] | None = None

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read a file of keys.

        Raises:
            ValueError: If the file holds no public key, or a key that is none.
            OSError: If the file cannot be read.
        """
        found: dict[str, str] = {}
        text = path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            name, is_key, value = line.strip().partition("=")
            if is_key and not name.startswith("#"):
                found.setdefault(name.strip(), value.strip(" \t'\""))
        for name, form in _FORMS.items():
            if name in found and not form.fullmatch(found[name]):
                raise ValueError(f"{path} is no file of keys: {name} is not a key")
        if "link-key" not in found and "public-key" not in found:
            raise ValueError(f"{path} is no file of keys: it holds no link-key")
        if "link-key" not in found:
            raise ValueError(
                f"{path} holds no link-key: it is damaged, or of a version before 0.2, and this "
                "version reads pairs of 0.2: `diloco-comm keys make` of 0.2 adds that key to both "
                "files"
            )
        return cls(
            found.get("public-key", ""),
            found["link-key"],
            found.get("secret-key"),
            found.get("link-secret"),
            _bound_replicas(text),
        )

    def text(self, name: str, *, is_secret: bool) -> str:
        text = (_SECRET_HEAD if is_secret else _PUBLIC_HEAD).format(name=name)
        if self.curve:
            text += f'curve\n    public-key = "{self.curve}"\n'
            text += f'    secret-key = "{self.curve_secret}"\n' if is_secret else ""
        text += f'link\n    link-key = "{self.link}"\n'
        return text + (f'    link-secret = "{self.link_secret}"\n' if is_secret else "")


def _binds(line: str) -> bool:
    """Whether a line of a file of keys binds the key to replicas, be the line damaged or not."""
    name = line.partition("=")[0].strip().lower()
    return "replica" in name and not name.startswith("#")


def _bound_replicas(text: str) -> tuple[int, ...] | None:
    """Return the numbers in the line ``replicas`` of a file of keys; see ``Keys.replicas``."""
    lines = [line for line in text.splitlines() if _binds(line)]
    if not lines:
        return None
    found = _REPLICAS.fullmatch(lines[0].strip())
    if found is None or len(lines) > 1:
        return ()
    return tuple(map(int, found[1].split(", ")))


_FORMS = {"public-key": _Z85, "secret-key": _Z85, "link-key": _HEX, "link-secret": _HEX}


def make_keys(folder: Path, workers: list[str] | None = None) -> list[Path]:
    """Make a pair of keys for each worker and allow these workers; make the server's if missing.

    Args:
        workers: Names of the workers' files; a single "worker" by default.

    Returns:
        The files written.

    Raises:
        ValueError: If a worker already has keys, or a name is not a plain file name.
        OSError: If a file cannot be written.
    """
    names = [WORKER] if workers is None else workers
    for name in names:
        if name == SERVER:
            raise ValueError(f"a worker's keys need a plain name, got {name!r}")
        _check_name(name)
        _check_new(folder, name)
    missing = [] if (folder / f"{SERVER}{SECRET}").exists() else [SERVER]
    written = []
    for name in dict.fromkeys([*missing, *names]):
        written += make_pairs(folder, [name], serves=True)
        if name != SERVER:
            # An older pair of that name may have been removed, except for its copy in ``allowed``.
            (folder / ALLOWED / f"{name}{PUBLIC}").unlink(missing_ok=True)
            written += allow(folder, [folder / f"{name}{PUBLIC}"])
    return written


def make_pairs(folder: Path, names: Iterable[str], *, serves: bool = False) -> list[Path]:
    """Make a pair for each name.

    Args:
        serves: Make CURVE keys, too, for ``diloco-comm serve`` and its clients.

    Returns:
        The files written.

    Raises:
        ValueError: If a pair exists, or a name is not a plain file name; no file is written.
        OSError: If a file cannot be written.
    """
    names = list(dict.fromkeys(names))
    for name in names:
        _check_name(name)
        _check_new(folder, name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = []
    for name in names:
        public, secret = folder / f"{name}{PUBLIC}", folder / f"{name}{SECRET}"
        keys = _new_keys(serves)
        _write(secret, keys.text(name, is_secret=True), 0o600)
        _write(public, keys.text(name, is_secret=False), 0o644)
        written += [public, secret]
    return written


def _check_name(name: str) -> None:
    if not name or Path(name).name != name or name.startswith(".") or not name.isprintable():
        raise ValueError(f"keys need a plain name, got {name!r}")


def _check_new(folder: Path, name: str) -> None:
    secret = folder / f"{name}{SECRET}"
    if secret.exists():
        raise ValueError(f"{secret} exists: remove it to make a new one")


def _new_keys(serves: bool) -> Keys:
    from ... import _C

    seed = secrets.token_hex(32)
    link = _C.link_public_key(bytes.fromhex(seed)).hex()
    if not serves:
        return Keys("", link, None, seed)
    try:
        import zmq
    except ModuleNotFoundError:
        raise ValueError("keys of a server need pyzmq: pip install 'diloco_comm[async]'") from None
    _need_curve()
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return Keys(public, link, secret, seed)


def _write(path: Path, text: str, mode: int) -> None:
    """Write a file, whole or not at all, that never has more permissions than ``mode``."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            # The umask may have taken away some of the permissions in ``mode``.
            os.fchmod(number, mode)
            file.write(text)
            file.flush()
            os.fsync(number)
        os.replace(partial, path)
    except FileExistsError:
        raise OSError(f"{partial} is in the way: remove it") from None
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


# ------------------------------------------------------------------------------ who may come in


def allow(
    folder: Path, files: Iterable[Path], replicas: Iterable[int] = (), *, reads_only: bool = False
) -> list[Path]:
    """Let in the owners of public keys: copy the files into ``allowed``, or into ``readers``.

    Args:
        replicas: The numbers of the replicas to which the keys are bound, instead of any numbers
            before; without numbers a key may take part as any replica.
        reads_only: The owners may look at a registry or a store, and nothing else.

    Returns:
        The files written; a file of the same keys that is there already is replaced.

    Raises:
        ValueError: If a file holds no public keys, or secret ones, or keys that other names have,
            or if a key that only reads is to be a replica; no file is written.
        OSError: If a file cannot be read or written.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: `diloco-comm keys make` makes one")
    target_folder = folder / (READERS if reads_only else ALLOWED)
    present = {**readable_keys(folder / ALLOWED), **readable_keys(folder / READERS)}
    texts: dict[Path, str] = {}
    numbers = {integer("replica", number, 0, most=MOST_INT32) for number in replicas}
    if numbers and reads_only:
        raise ValueError(f"a key that only reads is no replica, got {named(sorted(numbers))}")
    binding = f'replicas = "{", ".join(map(str, sorted(numbers)))}"\n' if numbers else ""
    for file in files:
        if file.suffix != PUBLIC:
            raise ValueError(f"public keys are in a file NAME{PUBLIC}, got {file}")
        keys, target = Keys.read(file), target_folder / file.name
        if keys.curve_secret or keys.link_secret:
            raise ValueError(f"{file} holds secret keys: give the file NAME{PUBLIC} of the pair")
        _check_names(present, keys, target)
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        # The owner of this folder alone decides on the numbers. A file that is torn behind its
        # first line holds no key, so that no key loses its binding.
        rest = "".join(line for line in lines if not _binds(line))
        present[target], texts[target] = keys, binding + rest
    # The umask of some systems would let the user's group in.
    target_folder.mkdir(mode=0o755, exist_ok=True)
    for target, text in texts.items():
        _write(target, text, 0o644)
    return list(texts)


def _check_names(present: Mapping[Path, Keys], keys: Keys, target: Path) -> None:
    """Make sure that a key has one name, so that ``remove`` removes the key, and a name one key."""
    for path, there in present.items():
        if path.name == target.name and (there.curve, there.link) != (keys.curve, keys.link):
            raise ValueError(f"{path} holds other keys: remove it first, or rename the new file")
        if path != target and (
            (there.curve and there.curve == keys.curve) or there.link == keys.link
        ):
            raise ValueError(f"{path} holds the same keys as {target.name}: remove it first")


def remove(folder: Path, name: str) -> Path:
    """Let the owner of a name in no longer; return the file removed.

    Raises:
        ValueError: If the name is neither among the allowed ones nor among the readers.
        OSError: If the file cannot be removed.
    """
    folders = folder / ALLOWED, folder / READERS
    paths = {path.stem: path for one in folders for path in sorted(one.glob(f"*{PUBLIC}"))}
    if name not in paths:
        raise ValueError(f"{folders[0]} has no {name}: it names {', '.join(paths) or 'nobody'}")
    paths[name].unlink()
    return paths[name]


def readable_keys(folder: Path) -> dict[Path, Keys]:
    """Return the public keys in a folder by file; a word in the log for each unreadable file.

    Raises:
        OSError: If the folder cannot be read, or this process has no descriptor left.
    """
    found = {}
    for path in _public_files(folder) if folder.is_dir() else ():
        try:
            found[path] = Keys.read(path)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR:
                raise
            logger.warning("%s lets nobody in: %s", path, error)
    return found


def _public_files(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(os.listdir(folder)) if name.endswith(PUBLIC)]


class Allowed:
    """The keys of one kind in a folder as it is now: ``present`` looks at most once a second.

    A file that is gone loses its keys at the next look: ``stat`` needs no descriptor, so strangers
    that use up the descriptors of a server hold no removal up. A new file, or a changed one, waits
    until this process has a descriptor. A file that cannot be read keeps its last keys, and no
    other file waits for that one; a file with damaged keys loses them. If the folder itself is gone
    or unreadable, all last keys stay. A file or a folder that others may change keeps its last
    keys, too.

    Args:
        folder: With a file ``NAME.key`` for each client.
        key_of: Returns the key of a file that counts; b"" where the file has no such key.
        may_be_missing: A folder that was never there is an empty one.
    """

    def __init__(
        self, folder: Path, key_of: Callable[[Keys], bytes], *, may_be_missing: bool = False
    ) -> None:
        self._folder, self._key_of, self._may_be_missing = folder, key_of, may_be_missing
        self._keys: frozenset[bytes] = frozenset()
        # For each file its stamp, and its keys: None for a file without keys.
        self._files: dict[Path, tuple[object, Keys | None]] = {}
        self._look_at = 0.0
        # For the folder or a file that could not be read, or that others may change: the sentence
        # in the log, and the time of the last error.
        self._troubles: dict[Path, tuple[str, float]] = {}

    def present(self, *, at_once: bool = False) -> frozenset[bytes]:
        """Return the keys that are let in.

        Args:
            at_once: Look now, however short ago the last look was.
        """
        now = time.monotonic()
        if now >= self._look_at or at_once:
            self._look_at = now + LOOK_S
            self._look()
            self._end_troubles()
        return self._keys

    def _look(self) -> None:
        try:
            check_writers(self._folder)
            paths = _public_files(self._folder)
        except OpenToOthers as error:
            self._note(self._folder, f"{error}; until then the last keys stay")
            return
        except OSError as error:
            if error.errno == errno.ENOENT and self._may_be_missing and not self._files:
                return
            self._note_folder(error)
            if error.errno not in _NO_DESCRIPTOR:
                return
            paths = list(self._files)
        files = {path: found for path in paths if (found := self._read(path)) is not None}
        if self._files.keys() - files.keys() and not os.path.isdir(self._folder):
            # The folder went while its files were looked at.
            return
        keys = [keys for _, keys in files.values() if keys is not None]
        self._files, self._keys = files, frozenset(filter(None, map(self._key_of, keys)))

    def _read(self, path: Path) -> tuple[object, Keys | None] | None:
        """Return the stamp and the keys of a file; None for a file that is gone or never read."""
        known = self._files.get(path)
        try:
            stamp = _stamp(check_writers(path))
            if known is not None and known[0] == stamp:
                return known
            return stamp, Keys.read(path)
        except FileNotFoundError as error:
            if known is None:
                self._note(path, f"{path} lets nobody in: {error}")
            return None
        except OpenToOthers as error:
            effect = "its last keys stay" if known else "this file lets nobody in"
            self._note(path, f"{error}; until then {effect}")
            return known
        except ValueError as error:
            logger.warning("%s lets nobody in: %s", path, error)
            return stamp, None
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                self._note_folder(error)
            elif known is None:
                self._note(path, f"{path} lets nobody in: {error}")
            else:
                self._note(path, f"{path} cannot be read ({error.strerror}): its last keys stay")
            return known

    def bindings(self, key: bytes) -> dict[Path, tuple[int, ...]]:
        """Return the files that bind a key, each with its numbers, as of the last look."""
        return {
            path: keys.replicas
            for path, (_, keys) in self._files.items()
            if keys is not None and keys.replicas is not None and self._key_of(keys) == key
        }

    def _note_folder(self, error: OSError) -> None:
        """Log that the folder cannot be read, or is gone, as while a copy is put in its place."""
        trouble = f"cannot be read ({error.strerror})"
        effect = "the clients that it named before stay allowed; a removed key counts after that"
        if error.errno in _NO_DESCRIPTOR:
            effect = "a removed file counts at once, a new or changed file after that"
        elif isinstance(error, (FileNotFoundError, NotADirectoryError)):
            trouble = "is gone"
            effect = (
                "the clients that it named before stay allowed; make the folder again, without the "
                "keys that are to be refused"
            )
        self._note(self._folder, f"the folder {self._folder} {trouble}: {effect}")

    def _note(self, path: Path, sentence: str) -> None:
        if self._troubles.get(path, ("", 0.0))[0] != sentence:
            logger.warning("%s", sentence)
        self._troubles[path] = sentence, time.monotonic()

    def _end_troubles(self) -> None:
        """Log which folder or files can be read again: no error came for ``_QUIET_S`` seconds."""
        now = time.monotonic()
        for path, (_, seen_at) in list(self._troubles.items()):
            if now > seen_at + _QUIET_S:
                self._troubles.pop(path, None)
                if path == self._folder or path in self._files:
                    logger.warning("%s can be read again", path)


@dataclass(frozen=True)
class LinkKeys:
    """The keys with which a process protects its link, or its connection to a store.

    Attributes:
        folder: Has the pair of this process, and the folders ``allowed`` and ``readers``.
        seed: The private key.
        allowed: The public keys of those who may connect.
        readers: The public keys of those who may look at a store that this process hosts.
    """

    folder: Path
    seed: bytes
    allowed: Allowed
    readers: Allowed

    @classmethod
    def read(cls, place: str | Path) -> LinkKeys:
        """Read the keys of this process.

        Args:
            place: A folder with one file NAME.key_secret, or such a file.

        Raises:
            ValueError: If the keys are not there, not whole or not secret, or let nobody in.
        """
        path = _own_secret(Path(place))
        seed = read_secret(path).link_secret
        if seed is None:
            raise ValueError(f"{path} holds no link-secret: restore the file, or make a new pair")
        folder = path.parent
        _check_folder(folder / READERS)
        readers = Allowed(folder / READERS, _link_key, may_be_missing=True)
        return cls(folder, bytes.fromhex(seed), _allowed_in_link(folder / ALLOWED), readers)

    def refusal_of(self, member: int, key: bytes, replica: int) -> str:
        """Return why a key may not take part under a number, in a sentence; empty if the key may.

        The folder counts as of its last look.

        Args:
            member: The number under which the owner of the key takes part.
            replica: The number of this replica, which refuses.
        """
        for path, numbers in self.allowed.bindings(key).items():
            if member in numbers:
                continue
            to = (
                named(numbers)
                if numbers
                else f"no replica (the line replicas in {path} is damaged)"
            )
            return (
                f"the allowed keys of replica {replica} bind the key {path.name} ({key.hex()}) to "
                f"{to}, and the owner of that key takes part as replica {member}: start that "
                f"process under a number of its key, or run `diloco-comm keys allow {self.folder} "
                f"{path} --replica {member}` on the host of replica {replica}, with one --replica "
                "for each number of that key"
            )
        return ""

    def check_own(self, replica: int) -> None:
        """Make sure that the own key, where the folder binds that key, may be this replica.

        Raises:
            ValueError: If the own key is bound to other numbers.
        """
        from ... import _C

        if why := self.refusal_of(replica, _C.link_public_key(self.seed), replica):
            raise ValueError(why)


class OpenToOthers(ValueError):
    """Others than this user and root may change a file or a folder, or use a secret file."""


def read_secret(path: Path) -> Keys:
    """Read a file of secret keys.

    Raises:
        ValueError: If the file cannot be read or is no file of keys; see ``check_secret``.
    """
    try:
        keys = Keys.read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    check_secret(path)
    return keys


def check_secret(path: Path) -> None:
    """Make sure that nobody else may use a secret file, or change the file or its folder.

    Mode 0440 is accepted for a file of root's: for a process of root whatever the file's group,
    and for another process if the group of the file is one of the process. The other members of
    that group may read the file, too.

    Raises:
        OpenToOthers: If others may use the file, or change the file or its folder.
        ValueError: If there is no such file, or this process cannot see the file.
    """
    try:
        found = path.stat()
        mode = stat.S_IMODE(found.st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO) and not (mode == _OF_A_SECRET and _is_roots(found)):
            raise OpenToOthers(
                f"others than the owner may use {path}, which has mode {mode:03o}: run `chmod 600 "
                f"{path}`, or give the volume of a Secret in Kubernetes `defaultMode: 0440`, and "
                "the pod fsGroup"
            )
        check_writers(path)
        check_writers(path.parent)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def check_writers(path: Path) -> os.stat_result:
    """Make sure that this user and root alone may change a file or a folder.

    The mode does not count where the file system is read-only, as the volume of a Secret in
    Kubernetes is: that volume's own folder has mode 777.

    Returns:
        The result of ``stat`` for the path.

    Raises:
        OpenToOthers: If others may change the file or the folder.
        OSError: If this process cannot see the path.
    """
    found, user = path.stat(), os.geteuid()
    if found.st_uid not in (0, user):
        raise OpenToOthers(
            f"{path} belongs to user {found.st_uid}, and must belong to root or to user {user}, "
            f"whom this process runs as: run `chown {user} {path}`"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not os.statvfs(path).f_flag & os.ST_RDONLY:
        raise OpenToOthers(
            f"others than the owner may write {path}, which has mode {mode:03o}: run `chmod go-w "
            f"{path}`"
        )
    return found


def _is_roots(found: os.stat_result) -> bool:
    """Whether a file is root's, and its group is one of this process; any group for root."""
    groups = {os.getegid(), *os.getgroups()}
    return found.st_uid == 0 and (os.geteuid() == 0 or found.st_gid in groups)


def link_keys(place: str | Path | None) -> LinkKeys | None:
    """Read the keys of this process; None where ``keys=`` was not given.

    Raises:
        ValueError: See ``LinkKeys.read``.
    """
    return None if place is None else LinkKeys.read(place)


class AllowedWatch:
    """Tells a link, or the host of a store, which keys its folder lets in now, once a second.

    Args:
        keys: The keys of the link or host.
        link: Has ``allow``, which takes the public keys. Where nobody else holds the link any more,
            the watch ends.
        name: For the thread.
        of_host: A store's host also takes the keys that only read.

    Raises:
        ValueError, OSError: If the keys cannot be read.
    """

    def __init__(self, keys: LinkKeys, link: Any, name: str, *, of_host: bool = False) -> None:
        self._keys, self._link, self._of_host = keys, weakref.ref(link), of_host
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._told: tuple[list[bytes], ...] = ()
        self.look()
        with batch_threads():
            threading.Thread(target=self._watch, daemon=True, name=name).start()

    def look(self) -> frozenset[bytes]:
        """Let in the keys that are allowed now, and return these; the others' connections end."""
        with self._lock:
            present = self._keys.allowed.present(at_once=True)
            keys: tuple[list[bytes], ...] = (sorted(present),)
            if self._of_host:
                keys += (sorted(self._keys.readers.present(at_once=True) - present),)
            link = self._link()
            if keys != self._told and link is not None:
                link.allow(*keys)
                self._told = keys
            return present

    def stop(self) -> None:
        """End the watch; idempotent."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S) and self._link() is not None:
            try:
                self.look()
            except Exception as error:
                # The keys of the last look that succeeded stay allowed.
                logger.warning("the allowed keys could not be read again: %s", error)


def _own_secret(place: Path) -> Path:
    """Return the file of the secret keys that a user means."""
    made_by = "`diloco-comm keys make FOLDER NAME` makes keys"
    if place.is_dir():
        found = sorted(place.glob(f"*{SECRET}"))
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise ValueError(f"{place} holds {names}: give keys= the file of this process")
        if not found:
            raise ValueError(f"{place} holds no file NAME{SECRET}: {made_by}")
        return found[0]
    if place.suffix != SECRET:
        raise ValueError(f"keys must be a folder or a file NAME{SECRET}, got {str(place)!r}")
    if not place.exists():
        raise ValueError(f"there is no {place}: {made_by}")
    return place


def _link_key(keys: Keys) -> bytes:
    return bytes.fromhex(keys.link)


def _allowed_in_link(folder: Path) -> Allowed:
    allowed = Allowed(folder, _link_key)
    if not _check_folder(folder) or not allowed.present():
        raise ValueError(
            f"{folder} holds no key of a link, so that nobody could connect: copy the public file "
            f"NAME{PUBLIC} of each other replica, and run `diloco-comm keys allow {folder.parent} "
            f"NAME{PUBLIC}`"
        )
    return allowed


def _check_folder(folder: Path) -> bool:
    """Whether there is a folder of allowed keys.

    Raises:
        ValueError: If others may change the folder, or this process cannot read the folder.
    """
    try:
        check_writers(folder)
        os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from None
    return True


def _stamp(found: os.stat_result) -> object:
    return found.st_ino, found.st_size, found.st_mtime_ns


# --------------------------------------------------------------------- sockets of ZeroMQ (CURVE)


class Guard:
    """Lets in clients whose public key is in a folder: when they connect, and for each ``admits``.

    Args:
        folder: With a file ``NAME.key`` for each client.
    """

    def __init__(self, context: zmq.Context, folder: Path) -> None:
        from zmq.auth.thread import ThreadAuthenticator

        self.allowed = Allowed(folder, lambda keys: keys.curve.encode())
        self.allowed.present()
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        # New connections are checked on that thread.
        self._thread.configure_curve_callback(domain="*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client that connects may come in; the interface is pyzmq's."""
        return key in self.allowed.present()

    def admits(self, frame: zmq.Frame) -> bool:
        """Return whether the client that has sent a frame is still allowed."""
        return str(frame.get("User-Id")).encode() in self.allowed.present()

    def stop(self) -> None:
        """End the thread; idempotent."""
        self._thread.stop()


def protect_server(context: zmq.Context, socket: zmq.Socket, folder: Path) -> Guard:
    """Accept only workers with one of the allowed keys.

    Returns:
        The guard of the socket; the caller ends it with ``stop``.

    Raises:
        ValueError: If a key is missing or invalid.
    """
    _need_curve()
    public, secret = _curve_pair(folder, SERVER)
    if not _check_folder(folder / ALLOWED) or not _public_files(folder / ALLOWED):
        raise ValueError(f"{folder / ALLOWED} holds no *.key: no worker could get in")
    guard = Guard(context, folder / ALLOWED)
    if not guard.allowed.present():
        guard.stop()
        raise ValueError(
            f"{folder / ALLOWED} holds no key of a server's client: make the pairs with "
            "`diloco-comm keys make --serve`"
        )
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.curve_server = True
    return guard


def protect_worker(socket: zmq.Socket, folder: Path, name: str = WORKER) -> None:
    """Use a worker's keys, and accept only the server whose public key is in ``server.key``.

    Raises:
        ValueError: If a key is missing or invalid.
    """
    _need_curve()
    public, secret = _curve_pair(folder, name)
    socket.curve_publickey, socket.curve_secretkey = public, secret
    server = _load(folder / f"{SERVER}{PUBLIC}").curve
    if not server:
        raise ValueError(_no_curve(folder / f"{SERVER}{PUBLIC}"))
    socket.curve_serverkey = server.encode()


def _curve_pair(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}{SECRET}"
    _expect(path)
    keys = read_secret(path)
    if keys.curve_secret is None:
        raise ValueError(_no_curve(path))
    return keys.curve.encode(), keys.curve_secret.encode()


def _no_curve(path: Path) -> str:
    return f"{path} holds no key of a server: make the pair with `diloco-comm keys make --serve`"


def _expect(path: Path) -> None:
    if path.name == f"{SERVER}{PUBLIC}" and not path.is_file():
        raise ValueError(
            f"there is no key {path}: copy {path.name} from the server's folder of keys"
        )
    if not path.is_file():
        raise ValueError(f"there is no key {path}: `diloco-comm keys make` makes one")


def _load(path: Path) -> Keys:
    _expect(path)
    try:
        check_writers(path)
        return Keys.read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _need_curve() -> None:
    import zmq

    if not zmq.has("curve"):
        raise ValueError("this ZeroMQ was built without CURVE: install pyzmq's own wheel")
