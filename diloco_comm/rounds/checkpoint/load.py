"""Take in a saved state: check all of it first, then write; ``save`` shows its layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..agreement import history
from ..synced import SyncedFragment, SyncedPart
from . import flights as saved_flights
from .flights import Saved
from .save import VERSION, Scope, chain_key, set_numbers


def restore(
    parts: Sequence[SyncedPart], state: Mapping[str, Any], scope: Scope, *, strict: bool
) -> Callable[[], int]:
    """Check a saved state.

    Returns:
        A function that copies it in, in place, and returns its inner step. Nothing may be in
        flight then.

    Raises:
        ValueError: If it does not fit this model, schedule, overlap or replica; nothing is changed.
        TypeError: If it is no mapping.
    """
    _check_layout(state, scope.layout)
    own = state.get(f"replica_{scope.replica}")
    home = _home(state, own, scope, strict)
    writes: list[Callable[[], None]] = []
    for part in parts:
        numbers = _need(home, "parts", str(part.index))
        for name in ("round", "last_sent"):
            _need(numbers, name)
        writes.append(_bind(set_numbers, part, numbers))
        if isinstance(part, SyncedFragment):
            writes += _plan_tensors(part, home, numbers)
            writes += _plan_residuals(part, own, scope, strict)
        writes += _plan_flights(part, home, numbers, own, state, scope, strict)
        saved = _saved_history(numbers, scope)
        writes.append(partial(history.begin, part, is_shared=scope.is_shared, saved=saved))
    inner_step = int(_need(state, "inner_step"))

    def write() -> int:
        for one in writes:
            one()
        return inner_step

    return write


def restore_outer(
    parts: Sequence[SyncedFragment], state: Mapping[str, Any], layout: int
) -> Callable[[], None]:
    """Check the outer parameters, buffers and numbers of fragments in a saved state.

    Returns:
        A function that copies them in, in place. Histories, residuals and rounds under way are left
        as they are.

    Raises:
        ValueError: If the state does not fit this model, or the state is not the same on all
            replicas; nothing is changed.
        TypeError: If it is no mapping.
    """
    _check_layout(state, layout)
    writes: list[Callable[[], None]] = []
    for part in parts:
        numbers = _need(state, "parts", str(part.index))
        for name in ("round", "last_sent"):
            _need(numbers, name)
        writes.append(_bind(set_numbers, part, numbers))
        writes += _plan_tensors(part, state, numbers)

    def write() -> None:
        for one in writes:
            one()

    return write


def _check_layout(state: Any, layout: int) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"the saved state must be a dictionary, got {type(state).__name__}")
    if state.get("version") != VERSION:
        raise ValueError(f"saved state has version {state.get('version')}, {VERSION} expected")
    if state.get("layout") != layout:
        raise ValueError(
            "the saved state is of another layout: names, shapes, dtypes, fragments, sync_every, "
            "offsets, align_tensors, the groups of wire and, with align_tensors, the wires' block "
            "sizes must be those of the save"
        )


def _saved_history(numbers: Mapping[str, Any], scope: Scope) -> int:
    """Return the history that the state was saved with; 0 where none is kept."""
    return int(json.loads(numbers.get(scope.flights, "{}")).get("history", 0))


def _bind(function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: function(*arguments)


def _need(mapping: Any, *path: str) -> Any:
    """Look up a path of keys.

    Raises:
        ValueError: If the state has no such entry.
    """
    for depth, key in enumerate(path):
        if not isinstance(mapping, Mapping) or key not in mapping:
            raise ValueError(f"the saved state lacks {'/'.join(path[: depth + 1])}")
        mapping = mapping[key]
    return mapping


def _home(
    state: Mapping[str, Any], own: Mapping[str, Any] | None, scope: Scope, strict: bool
) -> Mapping[str, Any]:
    """Find what is the same on all replicas, or this replica's version of it."""
    if state.get("parts"):
        return state
    if own is not None and own.get("parts"):
        return own
    others = sorted(
        (int(key.removeprefix("replica_")), value)
        for key, value in state.items()
        if key.startswith("replica_") and isinstance(value, Mapping) and value.get("parts")
    )
    if others and not strict:
        return others[0][1]
    raise ValueError(
        f"the saved state has no part of replica {scope.replica}, and its outer parameters differ "
        "between replicas: save on every replica; strict=False takes those of the lowest one"
    )


def _plan_tensors(
    part: SyncedFragment, home: Mapping[str, Any], numbers: Mapping[str, Any]
) -> list[Callable[[], None]]:
    fragment = part.fragment
    saved_outer = _need(home, "outer")
    fragment.check(saved_outer)
    buffers = _need(home, "buffers")
    part.state.check(set(buffers))
    for saved in buffers.values():
        fragment.check(saved)
    extra = dict(_need(numbers, "extra")) if "extra" in numbers else {}

    def load_buffers() -> None:
        flats = {}
        for name, saved in buffers.items():
            # The one element that stands for an empty shard is in no saved tensor.
            flats[name] = torch.zeros_like(part.outer)
            fragment.load(flats[name], saved)
        part.state.load(flats, extra)

    return [_bind(fragment.load, part.outer, saved_outer), load_buffers]


def _plan_residuals(
    part: SyncedFragment, own: Mapping[str, Any] | None, scope: Scope, strict: bool
) -> list[Callable[[], None]]:
    buffers = part.buffers
    if buffers is None or buffers.residual is None:
        return []
    whole = _find_whole(part, own, "residual")
    runs = _find_runs(part, own, scope, "reduce_residual")
    if whole is None or runs is None:
        if strict:
            raise ValueError(
                "the saved state holds no error-feedback residuals that fit replica "
                f"{scope.replica} in a group of this size: it was saved without error feedback "
                "or by other replicas; strict=False starts them at zero"
            )
        whole, runs = None, None
    # Without the older residuals, a round that is lost later leaves its rounding error.
    old_whole = whole and (_find_whole(part, own, "residual_before") or whole)
    old_runs = runs and (_find_runs(part, own, scope, "reduce_residual_before") or runs)

    def load() -> None:
        # Looked up now: the buffers may have been swapped since the check.
        residuals = buffers.residuals
        for values, saved in ((residuals.value, whole), (residuals.before(), old_whole)):
            if values is not None:
                _load_own(part, values, saved)
        _load_runs(residuals.reductions(), runs)
        _load_runs(residuals.reductions_before(), old_runs)

    return [load]


def _find_whole(
    part: SyncedFragment, own: Mapping[str, Any] | None, name: str
) -> Mapping[str, Any] | None:
    """Return a saved residual of the encoding, checked; None if there is none for this part."""
    saved = None if own is None else own.get(name)
    if not saved or not part.fragment.has_own(saved):
        return None
    part.fragment.check_own(saved)
    return saved


def _find_runs(
    part: SyncedFragment, own: Mapping[str, Any] | None, scope: Scope, name: str
) -> list[Tensor] | None:
    """Return saved residuals of each chain of reductions; None if they do not fit."""
    assert part.buffers is not None
    saved = {} if own is None else own.get(name, {})
    runs = []
    for chain, mine in enumerate(part.buffers.residuals.reductions()):
        run = saved.get(chain_key(scope.key(part), chain))
        if run is None or run.shape != mine.shape:
            return None
        runs.append(run)
    return runs


def _load_own(part: SyncedFragment, values: Tensor, saved: Mapping[str, Any] | None) -> None:
    if saved is None:
        values.zero_()
    else:
        part.fragment.load_own(values, saved)


def _load_runs(targets: Sequence[Tensor], runs: Sequence[Tensor] | None) -> None:
    for k, target in enumerate(targets):
        if runs:
            target.copy_(runs[k])
        else:
            target.zero_()


def _plan_flights(
    part: SyncedPart,
    home: Mapping[str, Any],
    numbers: Mapping[str, Any],
    own: Mapping[str, Any] | None,
    state: Mapping[str, Any],
    scope: Scope,
    strict: bool,
) -> list[Callable[[], None]]:
    key = scope.key(part)
    shared = numbers.get(scope.flights)
    _refuse_other_shards(numbers, scope)
    text = None if own is None else own.get("own", {}).get(key)
    mine = None if text is None else json.loads(text)
    is_busy = shared is not None and bool(json.loads(shared)["rounds"])
    is_busy = is_busy or (mine is not None and (mine["owes"] or mine["is_ahead"]))
    if not is_busy or part.buffers is None:
        # Rounding errors of rounds that were applied long ago; another policy has no use for them.
        return _plan_owed(part, own, mine) if state.get("overlap") == scope.kind else []
    if state.get("overlap") != scope.kind:
        raise ValueError(
            f"the saved state has rounds under way with overlap {state.get('overlap')}, this one "
            f"is {scope.kind}: flush() before the save to change it"
        )
    if scope.overlap.rounds and mine is None and strict:
        raise ValueError(
            f"the saved state holds no own payloads of replica {scope.replica} for the rounds "
            "under way: it was saved by other replicas; strict=False goes on without"
        )
    if mine is not None and own is not None:
        mine |= {"payloads": own.get("payloads", {}).get(key, {})}
        mine |= {"corrected": own.get("corrected", {}).get(key, {})}
    saved = saved_flights.unpack(
        part,
        shared if shared is not None else _NO_FLIGHTS,
        home.get("flights", {}).get(key, {}),
        mine,
        replica=scope.replica,
        must_fit=not scope.overlap.is_shared,
    )
    owed = _plan_owed(part, own, mine)
    return [_bind(_install, part, saved, mine), *owed]


_NO_FLIGHTS = json.dumps({"members": [], "wire": "fp32", "block_size": 256, "rounds": []})


def _install(part: SyncedPart, saved: Saved, mine: Mapping[str, Any] | None) -> None:
    saved.install(part)
    part.owes = bool(mine and mine["owes"])
    part.is_ahead = bool(mine and mine["is_ahead"])


def _plan_owed(
    part: SyncedPart, own: Mapping[str, Any] | None, mine: Mapping[str, Any] | None
) -> list[Callable[[], None]]:
    if own is None or mine is None or not mine["has_owed"]:
        return []
    assert isinstance(part, SyncedFragment) and part.buffers is not None
    values = torch.empty(part.num_elements, device=part.device)
    part.fragment.check_own(own.get("owed", {}))
    part.fragment.load_own(values, own["owed"])
    return [_bind(part.buffers.residuals.owe, values)]


def _refuse_other_shards(numbers: Mapping[str, Any], scope: Scope) -> None:
    """Raise if rounds were under way in payloads that are cut in another way."""
    if scope.flights in numbers:
        return
    for name, text in numbers.items():
        if name.startswith("flights") and json.loads(text)["rounds"]:
            raise ValueError(
                "the saved state has rounds under way between replicas of another number of "
                "shards: flush() before the save to change it"
            )
