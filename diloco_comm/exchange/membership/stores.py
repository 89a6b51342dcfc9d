"""Calls of the store that members of a group share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from ... import _C
from .member import Member

# A store answers in milliseconds; one whose host hangs must not hold a replica for ever.
STORE_LIMIT_S = 10.0


def decide_once(store: dist.Store, key: str, value: str) -> str:
    """Set a key that is absent; return what the key holds then, which never changes again.

    With a store that lacks ``compare_set``, two replicas that decide at the same time may differ.
    """
    return swap(store, key, "", value)


def swap(store: dist.Store, key: str, old: str, new: str) -> str:
    """Set a key that holds ``old``, or is absent where that is ""; return what it holds then."""
    try:
        return str(store.compare_set(key, old, new).decode())
    except RuntimeError as error:
        # A store written in Python lacks it, which an assertion of torch says.
        if "ot implemented" not in str(error):
            raise
    held = store.get(key).decode() if store.check([key]) else ""
    if held == old:
        store.set(key, new)
        held = new
    return str(held)


def bounded(member: Member) -> dist.Store:
    """Return the exchange's store with calls that end."""
    return bounded_by(member, member.store)


def bounded_by(member: Member, store: dist.Store) -> dist.Store:
    """Return a store with calls that end."""
    return _C.bounded_store(store, min(member.timeout, STORE_LIMIT_S))


def read_known(store: dist.Store, keys: Sequence[str], known: set[str]) -> dict[str, bytes]:
    """Return what the existing ones of the keys hold, in few calls however many keys there are.

    Args:
        known: Keys that exist and are never deleted; what is found is added.
    """
    # get() of a key that does not exist would wait for it.
    unknown = [key for key in keys if key not in known]
    if unknown:
        are_all_there = store.check(unknown)
        known.update(key for key in unknown if are_all_there or store.check([key]))
    there = [key for key in keys if key in known]
    return dict(zip(there, store.multi_get(there), strict=True)) if there else {}


def raise_to(store: dist.Store, key: str, new: str, may_follow: Callable[[str], bool]) -> str:
    """Set a key by compare-and-set, unless ``may_follow`` refuses what the key holds.

    Returns:
        What the key holds then.
    """
    held = store.get(key).decode() if store.check([key]) else ""
    while held != new and (not held or may_follow(held)):
        held = swap(store, key, held, new)
    return held
