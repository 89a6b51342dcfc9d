"""A store of torch as the table of a group, and as a board for the names at which replicas wait.

A store's ``compare_set`` returns the value that the key has afterwards. But if the key is absent
and a value was expected, a ``TCPStore`` creates nothing and returns the expected value. So a record
is stored behind a random nonce: the swap has succeeded only if the writer's own nonce comes back.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ... import _C
from ...base.errors import ReplicaMismatch
from ...base.store_host import place_of_store
from ...group.beats import name_of
from ...group.records import Record
from ...group.table import Look, TableAway

T = TypeVar("T")
_NONCE_BYTES = 16
# The table keeps the names of at most so many processes that beat.
_MOST_NAMES = 1024
# Parts of a key that torch adds for the default group, or this package: no part of a run's name.
_OF_GROUPS = re.compile(r"\bdefault_pg/0//|\bdiloco[_-]comm/(named/|[0-9a-f]{32}/)?")
_LONGEST_RUN = 100
# A process that has not beaten for so many seconds is removed from the list of names. If it lives,
# it adds its name again.
FORGET_S = 600.0
# Seconds from the removal of a name to the deletion of its beat, which others may be reading.
DELETE_S = 60.0


class StoreTable:
    """The table of a group on a store of torch; see ``group.table.Table``.

    Only a thread of the driver calls the methods, so a store that hangs holds up no other thread.
    The table opens a second connection to the store, as the program may block the first one by
    waiting for a key.

    Args:
        store: The replicas' store, with a prefix of the exchanges' name.
        run: The name under which a store of ``diloco-comm`` keeps posts, with the program's
            prefixes before it; "" posts nothing.
    """

    def __init__(self, store: dist.Store, run: str = "") -> None:
        self._store, self._is_own = store, False
        self._run, self._posts_as = run, ""
        self._id = b""
        # The error that ended the use of the store. A broken connection never connects again, and
        # torch would log each further call.
        self._loss: TableAway | None = None
        # The last beat of each process, and when this beat was read first.
        self._read: dict[str, tuple[bytes, float]] = {}
        # The time at which each name was removed from the list.
        self._dropped: dict[str, float] = {}

    @property
    def id(self) -> bytes:
        return self._id

    def _check(self, old: bytes, new: bytes) -> None:
        """Raise ValueError for records that are too long for this table; overridden."""

    def swap(self, old: bytes, new: bytes) -> bool:
        self._check(old, new)
        return self._ask(lambda store: _replace(store, "record", old, new))

    def look(self, name: str, text: bytes) -> Look:
        def ask(store: dist.Store) -> Look:
            beats = self._beat(store, name, text)
            record = _get(store, "record")[_NONCE_BYTES:]
            if name:
                self._forget(store, record)
            return Look(record, beats, {})

        return self._ask(ask)

    def post(self, name: str, text: bytes) -> None:
        """Leave a text with the store, if ``diloco-comm`` hosts it; see ``Table.post``."""
        store, _ = place_of_store(self._store)
        if self._run and self._loss is None and isinstance(store, _C.StoreClient | _C.StoreHost):
            with contextlib.suppress(RuntimeError, ValueError):
                self._posts_as = self._posts_as or self._name_of_run(store, name)
                store.post(self._posts_as, name, text)

    def _name_of_run(self, store: dist.Store, name: str) -> str:
        """Return the run's name with the program's prefixes, so that runs on one store differ.

        Torch does not tell the prefixes; the keys of the store show them.
        """
        words, end = [self._run], f"/beat/{name}"
        if isinstance(getattr(self._store, "underlying_store", None), dist.PrefixStore):
            # Some versions of torch list no keys.
            for key in getattr(store, "list_keys", list)():
                if key.endswith(end):
                    prefix = key.removesuffix(end).removesuffix(self._run)
                    words = [*filter(None, _OF_GROUPS.sub("/", prefix).split("/")), self._run]
        letters = [one if one.isprintable() and one not in " /" else "-" for one in "-".join(words)]
        return "".join(letters)[-_LONGEST_RUN:]

    def close(self) -> None:
        """End the own connection; the store itself is the program's."""
        self._loss = TableAway("the table was closed")
        if self._is_own:
            del self._store

    def _beat(self, store: dist.Store, name: str, text: bytes) -> dict[str, bytes]:
        if name:
            store.set(f"beat/{name}", text)  # type: ignore[arg-type]
        names = _names(store)
        while name and name not in names:
            _replace_names(store, names, [*names, name][-_MOST_NAMES:])
            names = _names(store)
        texts = store.multi_get([f"beat/{one}" for one in names]) if names else []
        beats = dict(zip(names, texts, strict=True))
        now, before = time.monotonic(), self._read
        self._read = {
            one: before[one] if before.get(one, (b"", 0.0))[0] == text else (text, now)
            for one, text in beats.items()
        }
        # A process that has added its name again was not removed.
        self._dropped |= dict.fromkeys(before, now)
        self._dropped = {one: at for one, at in self._dropped.items() if one not in beats}
        return {one: text for one, text in beats.items() if text}

    def _is_old(self, name: str) -> bool:
        """Whether the beat of this name has not changed for ``FORGET_S``."""
        read = self._read.get(name)
        return read is not None and time.monotonic() - read[1] > FORGET_S

    def _forget(self, store: dist.Store, record: bytes) -> None:
        """Remove the names of processes that beat no more; delete their beats after a while."""
        if old := set(filter(self._is_old, self._read)):
            # Members are kept, as they may train on without reaching the store.
            old -= {name_of(key) for key in Record.from_bytes(record).members} if record else set()
            if old:
                _replace_names(store, list(self._read), [o for o in self._read if o not in old])
        now = time.monotonic()
        for one in [one for one, at in self._dropped.items() if now - at > DELETE_S]:
            del self._dropped[one]
            # Another process may have deleted this beat, or the store cannot delete keys.
            with contextlib.suppress(RuntimeError):
                store.delete_key(f"beat/{one}")

    def _ask(self, call: Callable[[dist.Store], T]) -> T:
        if self._loss is not None:
            raise self._loss
        try:
            if not self._is_own:
                self._store, self._is_own = another_connection(self._store), True
            if not self._id:
                # The id is on the store: if the store is cleared, the table gets a new id.
                self._id = bytes.fromhex(decide_once(self._store, "id", secrets.token_hex(16)))
            return call(self._store)
        except RuntimeError as error:
            # The errors of torch's stores are RuntimeErrors.
            away = TableAway(str(error).split("\n")[0])
            away.is_lost = isinstance(error, dist.DistNetworkError)
            self._loss = away if away.is_lost else None
            raise away from None


def another_connection(store: dist.Store) -> dist.Store:
    """Return a second connection to a store, if it can be cloned; else the same store.

    A blocking call over one connection does not hold up the other.
    """
    _, place = place_of_store(store)
    clone = getattr(store, "clone", None)
    return store if place is None or clone is None else clone()


def decide_once(store: dist.Store, key: str, value: str) -> str:
    """Set a key if it is absent; return its value, which is then the same for all processes.

    With a store that lacks ``compare_set``, two processes that decide at once may differ.
    """
    return _swapped(store, key, b"", value.encode()).decode()


def read_known(store: dist.Store, keys: list[str], known: set[str]) -> dict[str, bytes]:
    """Return the values of those keys that exist, by key.

    Args:
        store: The store.
        keys: Any keys.
        known: Keys known to exist, which nobody deletes; keys that are found are added.
    """
    # get() of a key that does not exist would wait for it.
    known.update(key for key in keys if key not in known and store.check([key]))
    there = [key for key in keys if key in known]
    return dict(zip(there, store.multi_get(there), strict=True)) if there else {}


def _get(store: dist.Store, key: str) -> bytes:
    return bytes(store.get(key)) if store.check([key]) else b""


def _names(store: dist.Store) -> list[str]:
    names: list[str] = json.loads(_get(store, "names")[_NONCE_BYTES:] or b"[]")
    return names


def _replace_names(store: dist.Store, old: list[str], new: list[str]) -> None:
    """Replace the list of names, unless another process has changed it meanwhile."""
    before = json.dumps(old).encode() if old else b""
    _replace(store, "names", before, json.dumps(new).encode())


def _replace(store: dist.Store, key: str, old: bytes, new: bytes) -> bool:
    """Replace the value of a key, which is stored behind a nonce; return whether it was ``old``.

    Args:
        old: The expected value, b"" for none.
    """
    stored = _get(store, key)
    if stored[_NONCE_BYTES:] != old:
        return False
    fresh = secrets.token_bytes(_NONCE_BYTES) + new
    return _swapped(store, key, stored, fresh) == fresh


def _swapped(store: dist.Store, key: str, old: bytes, new: bytes) -> bytes:
    """Set a key to ``new`` if it holds ``old`` (for b"": is absent); return its value then."""
    try:
        # Stores take bytes, but their stubs say text.
        return bytes(store.compare_set(key, old, new))  # type: ignore[arg-type]
    except RuntimeError as error:
        # A store written in Python has no compare_set; an assertion of torch says so.
        if "ot implemented" not in str(error):
            raise
    held = _get(store, key)
    if held == old:
        store.set(key, new)  # type: ignore[arg-type]
        held = new
    return held


# ----------------------------------------------------------------- names that replicas wait at

# An error is raised after so many looks, a second apart, that found a new beat of a replica waiting
# for this one at another name.
_RISES = 3
_PERIOD_S = 1.0


class Names:
    """Finds replicas that wait for each other at exchanges of different names: a deadlock.

    While a replica waits on its main thread, it writes the name of its exchange to a store once a
    second, so that the others know that it still waits.

    Args:
        store: The board of a process group: every rank writes its name there.
        replica: Number of this replica.
        members: Numbers of the replicas for which this one waits.
        name: The name of this replica's exchange.
    """

    def __init__(self, store: dist.Store, replica: int, members: Sequence[int], name: str) -> None:
        self._store, self._replica, self._name = store, replica, name
        self._members = list(members)
        self._keys = {_key(member): member for member in members}
        self._is_main = threading.current_thread() is threading.main_thread()
        self._next, self._beat = time.monotonic() + _PERIOD_S, 0
        self._known: set[str] = set()
        self._told: dict[str, bytes] = {}
        self._rises: Counter[str] = Counter()

    def look(self) -> None:
        """Write the own name, and read the others' names, at most once a second.

        Raises:
            ReplicaMismatch: If another replica waits for this one at another name. The other one
                raises, too.
        """
        if not self._is_main or time.monotonic() < self._next:
            return
        self._tell()
        for key, text in read_known(self._store, list(self._keys), self._known).items():
            name, members, _ = json.loads(text)
            is_other = name != self._name and self._replica in members
            if not is_other or key not in self._told:
                self._rises[key] = 0
            elif text != self._told[key]:
                self._rises[key] += 1
            self._told[key] = text
            if self._rises[key] >= _RISES:
                self._refuse(self._keys[key], name)

    def _tell(self) -> None:
        self._next, self._beat = time.monotonic() + _PERIOD_S, self._beat + 1
        text = json.dumps([self._name, self._members, self._beat])
        self._store.set(_key(self._replica), text)

    def _refuse(self, other: int, name: str) -> None:
        for _ in range(_RISES):  # The others must still see this replica wait, to raise as well.
            time.sleep(_PERIOD_S)
            self._tell()
        raise ReplicaMismatch(
            f"replica {self._replica} makes the DiLoCo named {self._name!r} while replica {other} "
            f"makes the one named {name!r}, and each waits for the other: make objects of the same "
            "names in one order on all replicas, or each object on a thread of its own",
            stage="rendezvous",
        )


def _key(member: int) -> str:
    return f"waits/{member}"


# ------------------------------------------------------------------------- stores of groups

_POLL_S = 0.001
# During the broadcast of the prefix, a rank looks at the others' names for so many seconds at most.
_NAMES_S = 60.0


def store_of_group(
    group: dist.ProcessGroup | None, name: str = "default"
) -> tuple[dist.Store, int, int]:
    """Return the store of a group with a prefix on which its ranks agree, own rank, and size.

    With the default name this is a collective call: rank 0 draws the prefix and broadcasts it
    through the group. With any other name the prefix is always the same, and ranks may call in any
    order.
    """
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("no group was given and torch.distributed is not initialised")
    if group == dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
        raise ValueError("this process is not a member of the group")
    rank, size = group.rank(), group.size()
    if name != "default":
        return board_of_group(group), rank, size
    token = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8)
    if size > 1:
        kinds = [kind.type for kind in group._device_types]
        on_device = token.to("cpu" if "cpu" in kinds else kinds[0])
        work = group.broadcast([on_device], _broadcast_options())
        names = Names(board_of_group(group), rank, range(size), name)
        # A group written in Python may never report that its work is completed: stop at ``until``.
        until = time.monotonic() + _NAMES_S
        while not work.is_completed() and time.monotonic() < until:
            names.look()
            time.sleep(_POLL_S)
        work.wait()
        token = on_device.cpu()
    prefix = f"diloco_comm/{bytes(token.tolist()).hex()}"
    return dist.PrefixStore(prefix, _group_store(group)), rank, size


def board_of_group(group: dist.ProcessGroup | None) -> dist.Store:
    """Return the group's store with the prefix of its named exchanges and of ``Names``."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    return dist.PrefixStore("diloco_comm/named", _group_store(group))


def _broadcast_options() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def _group_store(group: dist.ProcessGroup) -> dist.Store:
    known = dist.distributed_c10d._world.pg_map.get(group)
    if known is not None:
        return known[1]
    return group.get_group_store()
