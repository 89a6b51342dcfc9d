"""The names at which replicas of one process group wait for each other."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from ...base.errors import ReplicaMismatch
from .store_table import read_known

# Looks, about a second each, in which another replica must have renewed its name.
_RISES = 3
_PERIOD_S = 1.0


class Names:
    """The names that replicas wait at, each on its main thread, which can wait at one name only.

    Two replicas that wait for each other at two names would wait in vain. A replica writes its name
    once a second while it waits, so that the others know that it still does.

    Args:
        store: Has the names of all exchanges of one process group, where a rank is one process.
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
            ReplicaMismatch: On all replicas that wait for each other at several names.
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
        for _ in range(_RISES):  # The others see this replica here for as long.
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
