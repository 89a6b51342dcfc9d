"""Loads a saved state: checks all of it first, then writes. ``state_dict`` shows its layout.

The run that loads may have other fragments than the run that saved: tensors are found by the names
of parameters. Each fragment takes its numbers from the saved fragments that had its parameters. If
these are at different rounds, the fragment goes on from the highest number of rounds and of outer
steps, and from the lowest inner step up to which everything was sent. A parameter that the saved
run did not exchange begins without momentum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.checks import first_of, logger_of, warn
from ..base.memory import memory_order
from ..replica import sharding
from . import history
from .part import SyncedFragment, SyncedPart, mixed
from .state_dict import Run, Saved, Scope, chain_key, read_run, set_numbers, unpack

logger = logger_of(__name__)
_ADVICE = (
    "call flush() on all replicas before the save, or load the state with the arguments of the "
    "save, call flush(), and save again"
)


class Restore:
    """A saved state that was checked against the present run; ``write`` loads it.

    Args:
        parts: All parts of the present run.
        state: The saved state.
        scope: The present replica and group, with its ``run``.
        model: All parameters of the model by name, frozen ones too.
        strict: See ``DiLoCo.load_state_dict``.

    Attributes:
        inner_step: The inner step of the state.

    Raises:
        ValueError: If the state does not fit the model, the outer optimizer, the overlap or the
            replica, or has rounds under way that cannot follow a change.
        TypeError: If the state is no mapping.
    """

    def __init__(
        self,
        parts: Sequence[SyncedPart],
        state: Mapping[str, Any],
        scope: Scope,
        model: Mapping[str, Tensor],
        *,
        strict: bool,
    ) -> None:
        assert scope.run is not None
        self._parts, self._scope, self._strict = parts, scope, strict
        self._saved, self._model = read_run(state), model
        self._match = Match(self._saved, scope.run)
        self._own: Mapping[str, Any] | None = state.get(f"replica_{scope.replica}")
        self._home = _home(state, self._own, scope, strict)
        self._kept: set[tuple[str, str]] = set()
        outer = _need(self._home, "outer")
        exchanged = {name: param for part in self._fragments() for name, param in _named(part)}
        refuse_what_cannot_follow(self._saved, scope.run, outer, exchanged, model)
        self._numbers = {index: self._saved_numbers(index) for index in self._match.saved_parts}
        if not self._match.is_same:
            self._refuse_under_way()
        self.inner_step, self._overlap = int(_need(state, "inner_step")), _need(state, "overlap")
        self._writes: list[Callable[[], None]] = []
        for part in parts:
            self._plan(part)

    def write(self) -> None:
        """Copy the state into the parts' tensors. No round may be in flight."""
        for one in self._writes:
            one()
        self._report()

    @property
    def has_new(self) -> bool:
        """Whether parameters are exchanged that the saved run did not exchange."""
        return bool(self._match.new)

    def read_new(self) -> None:
        """Set outer parameters that the state lacks to the model's present values."""
        new = set(self._match.new)
        for part in self._fragments():
            offset = 0
            for name, piece in part.fragment.pieces():
                if name in new:
                    part.outer[offset : offset + piece.numel()].copy_(memory_order(piece))
                offset += piece.numel()
            if new.intersection(part.fragment.names):
                self._begin_history(part)

    # ------------------------------------------------------------------------------- numbers

    def _fragments(self) -> Iterator[SyncedFragment]:
        return (part for part in self._parts if isinstance(part, SyncedFragment))

    def _saved_numbers(self, index: int) -> Mapping[str, Any]:
        parts = _need(self._home, "parts")
        if not self._match.is_same and str(index) not in parts:
            raise ValueError(
                f"the saved state lacks parts/{index}, and was saved with other arguments than "
                "here, whose entries alone torch.distributed.checkpoint reads: convert the "
                "checkpoint by torch.distributed.checkpoint.format_utils.dcp_to_torch_save first"
            )
        return _numbers_at(self._home, index, index < len(self._saved.fragments))

    def _refuse_under_way(self) -> None:
        """Raise if a state that was saved with other parts has rounds under way, or debts."""
        busy = {
            index
            for index, numbers in self._numbers.items()
            for name, text in numbers.items()
            if name.startswith("flights") and json.loads(text)["rounds"]
        }
        for key, text in ((self._own or {}).get("own") or {}).items():
            mine = json.loads(text)
            if mine["owes"] or mine["is_ahead"] or mine["corrections"]:
                busy.add(int(key.partition("@")[0]))
        if busy:
            assert self._scope.run is not None
            changes = differences(self._saved, self._scope.run)
            raise ValueError(
                f"the saved state has rounds of fragment {min(busy)} under way, which cannot "
                f"follow a change: {'; '.join(changes)}; {_ADVICE}"
            )

    def _plan(self, part: SyncedPart) -> None:
        numbers = self._match.numbers(part, self._numbers)
        self._writes.append(partial(set_numbers, part, numbers))
        if isinstance(part, SyncedFragment):
            self._writes += _plan_tensors(part, self._home, numbers, self._match.new)
            self._writes += self._plan_residuals(part)
        self._writes += self._plan_flights(part, numbers)
        self._writes.append(partial(self._begin_history, part))

    def _begin_history(self, part: SyncedPart) -> None:
        sources = [self._numbers[index] for index in self._match.sources(part)]
        saved = [_saved_history(numbers, self._scope) for numbers in sources]
        past = saved[0] if len(saved) == 1 else mixed(*saved) if any(saved) else 0
        history.begin(part, is_shared=self._scope.is_shared, saved=past)

    # ---------------------------------------------------------------------------- residuals

    def _plan_residuals(self, part: SyncedFragment) -> list[Callable[[], None]]:
        buffers = part.buffers
        if buffers is None or buffers.residual is None:
            return []
        whole = self._find_whole(part, "residual")
        runs = self._find_runs(part, "reduce_residual")
        is_explained = self._lacks_whole(part) if whole is None else self._lacks_runs(part)
        if (whole is None or runs is None) and not is_explained:
            if self._strict:
                raise ValueError(
                    "the saved state holds no error-feedback residuals that fit replica "
                    f"{self._scope.replica} in a group of this size: it was saved without error "
                    "feedback or by another replica: give each replica the file that it saved "
                    "itself; strict=False starts them at zero"
                )
            whole, runs = None, None
        # A state may lack ``residual_before``. Then a round under way that is lost after the load
        # leaves its rounding error in the residual.
        old_whole = whole and (self._find_whole(part, "residual_before") or whole)
        old_runs = runs and (self._find_runs(part, "reduce_residual_before") or runs)
        if whole is not None:
            keys = part.fragment.own_views(buffers.residual)
            self._kept |= {("residual", key) for key in keys}
        if runs is not None:
            place = self._match.place(part)
            self._kept |= {("reduce_residual", self._run_key(place, k)) for k in range(len(runs))}

        def load() -> None:
            # Look the tensors up only now: they may be swapped between the check and the load.
            residuals = buffers.residuals
            for values, saved in ((residuals.value, whole), (residuals.before(), old_whole)):
                if values is not None:
                    _load_own(part, values, saved)
            _load_runs(residuals.reductions(), runs)
            _load_runs(residuals.reductions_before(), old_runs)

        return [load]

    def _find_whole(self, part: SyncedFragment, name: str) -> Mapping[str, Any] | None:
        """Return the checked saved residual of this part's encoding; None if there is none."""
        saved = None if self._own is None else self._own.get(name)
        if not saved or not part.fragment.has_own(saved):
            return None
        if part.fragment.placement and self._match.place(part) != part.index:
            return None  # A worker's range of elements has no names.
        new = {name: param for name, param in _named(part) if name in self._match.new}
        whole = {**saved, **_zeros(new)}
        part.fragment.check_own(whole)
        return whole

    def _find_runs(self, part: SyncedFragment, name: str) -> list[Tensor] | None:
        """Return saved residuals of each chain of reductions; None if they do not fit."""
        assert part.buffers is not None
        saved, place = {} if self._own is None else self._own.get(name, {}), self._match.place(part)
        runs = []
        for chain, mine in enumerate(part.buffers.residuals.reductions()):
            run = None if place is None else saved.get(self._run_key(place, chain))
            if run is None or run.shape != mine.shape or self._is_other_group():
                return None
            runs.append(run)
        return runs

    def _run_key(self, index: int | None, chain: int) -> str:
        return chain_key(self._scope.key_of(index), chain)

    def _is_other_group(self) -> bool:
        return self._saved.members != self._scope.members

    def _lacks_whole(self, part: SyncedFragment) -> bool:
        """Whether there is a good reason why the state has no residual of this part's encoding."""
        saved = self._saved
        is_newcomer = self._scope.replica not in saved.members
        is_cut_anew = bool(part.fragment.placement) and self._match.place(part) != part.index
        is_new = self._match.new and not set(part.fragment.names) - set(self._match.new)
        return not saved.error_feedback or is_newcomer or is_cut_anew or bool(is_new)

    def _lacks_runs(self, part: SyncedFragment) -> bool:
        """Whether there is a good reason why the state has no residuals of this part's reductions.

        These belong to elements at fixed places, and not to parameters by name.
        """
        place = self._match.place(part)
        if place is None or self._is_other_group():
            return True
        return self._saved.fragments[place].wire != (part.wire.name, part.wire.block_size)

    # ------------------------------------------------------------------------------- flights

    def _plan_flights(
        self, part: SyncedPart, numbers: Mapping[str, Any]
    ) -> list[Callable[[], None]]:
        scope, own, home = self._scope, self._own, self._home
        if not self._match.is_same:
            return self._plan_owed_anew(part)
        key = scope.key(part)
        shared = numbers.get(scope.flights)
        _refuse_other_shards(numbers, scope)
        text = None if own is None else own.get("own", {}).get(key)
        mine = None if text is None else json.loads(text)
        is_busy = shared is not None and bool(json.loads(shared)["rounds"])
        is_busy = is_busy or (mine is not None and (mine["owes"] or mine["is_ahead"]))
        if not is_busy or part.buffers is None:
            # Only values owed to the next encoding are left, which another policy cannot add.
            return self._plan_owed(part, mine) if self._overlap == scope.kind else []
        if self._overlap != scope.kind:
            raise ValueError(
                f"the saved state has rounds under way with overlap {self._overlap}, this one is "
                f"{scope.kind}: {_ADVICE}"
            )
        if scope.overlap.rounds and mine is None and self._strict:
            raise ValueError(
                f"the saved state holds no own payloads of replica {scope.replica} for the rounds "
                "under way: it was saved by other replicas; strict=False goes on without"
            )
        if mine is not None and own is not None:
            mine |= {"payloads": own.get("payloads", {}).get(key, {})}
            mine |= {"corrected": own.get("corrected", {}).get(key, {})}
        saved = unpack(
            part,
            shared if shared is not None else _NO_FLIGHTS,
            home.get("flights", {}).get(key, {}),
            mine,
            replica=scope.replica,
            must_fit=not scope.overlap.is_shared,
        )
        return [partial(_install, part, saved, mine), *self._plan_owed(part, mine)]

    def _plan_owed(
        self, part: SyncedPart, mine: Mapping[str, Any] | None
    ) -> list[Callable[[], None]]:
        if self._own is None or mine is None or not mine["has_owed"]:
            return []
        assert isinstance(part, SyncedFragment)
        return self._owe(part, self._own.get("owed", {}))

    def _plan_owed_anew(self, part: SyncedPart) -> list[Callable[[], None]]:
        """Plan to load, by name, the values of lost rounds that the next encoding adds."""
        owed = (self._own or {}).get("owed") or {}
        is_there = isinstance(part, SyncedFragment) and part.fragment.has_own(owed)
        if not is_there or not self._scope.overlap.rounds or part.buffers is None:
            return []
        assert isinstance(part, SyncedFragment)
        if part.fragment.placement and self._match.place(part) != part.index:
            return []
        lacking = {name: param for name, param in _named(part) if name not in owed}
        return self._owe(part, {**owed, **_zeros({} if part.fragment.placement else lacking)})

    def _owe(self, part: SyncedFragment, owed: Mapping[str, Any]) -> list[Callable[[], None]]:
        assert part.buffers is not None
        values = torch.empty(part.num_elements, dtype=torch.float32, device=part.device)
        part.fragment.check_own(owed)
        part.fragment.load_own(values, owed)
        self._kept |= {("owed", key) for key in part.fragment.own_views(values)}
        return [partial(_owe, part, values)]

    # ------------------------------------------------------------------------- what is told

    def _report(self) -> None:
        """Log the differences between both runs, and how much of the state was not loaded."""
        assert self._scope.run is not None
        match, told = self._match, differences(self._saved, self._scope.run)
        told += other_differences(self._saved, self._scope.run)
        was, now = self._overlap, self._scope.kind
        if was != now:
            told.append(f"overlap: {was['name']} in the state, {now['name']} here")
        if match.new:
            told.append(f"{first_of(match.new)} begin without momentum")
        if told:
            logger.info("the saved state follows a change: %s", "; ".join(told))
        self._report_dropped()
        if match.ended:
            self._warn_of_ended()

    def _report_dropped(self) -> None:
        own = self._own or {}
        left = [
            sharding.local(tensor)
            for kind in ("residual", "reduce_residual", "owed")
            for key, tensor in (own.get(kind) or {}).items()
            if (kind, key) not in self._kept
        ]
        norm = math.hypot(*(float(torch.linalg.vector_norm(one.float())) for one in left))
        if norm:
            logger.warning(
                "replica %d drops what its encodings had left for later exchanges: L2 norm %.4g "
                "over %d elements; it follows with error_feedback=True, the same parameters and, "
                "for the part of the reductions, the same fragments, wire and replicas",
                self._scope.replica,
                norm,
                sum(one.numel() for one in left),
            )

    def _warn_of_ended(self) -> None:
        """Warn if parameters that are exchanged no more differ from their saved outer values."""
        outer, away = _need(self._home, "outer"), []
        for name in self._match.ended:
            if name in outer and not sharding.misfit(outer[name], self._model[name]):
                mine = sharding.local(self._model[name])
                shared = sharding.part_of(outer[name], self._model[name]).to(mine)
                if not torch.equal(mine, shared):
                    away.append(name)
        if away:
            warn(
                f"{first_of(away)} are exchanged no more, and their values in this model are not "
                "the shared ones of the saved state, so that replicas may keep different values: "
                "call flush() on all replicas before such a save",
                RuntimeWarning,
            )


def restore_outer(
    parts: Sequence[SyncedFragment], state: Mapping[str, Any], layout: int
) -> Callable[[], None]:
    """Check the outer parameters, buffers and numbers of fragments in a saved state.

    Args:
        parts: The fragments of the present run.
        state: The saved state.
        layout: See ``Plan.saved_layout``; the state must have the same layout.

    Returns:
        A function that copies these into the fragments. It does not change histories, residuals and
        rounds under way.

    Raises:
        ValueError: If the state does not fit this model, or the state is not the same on all
            replicas; nothing is changed.
        TypeError: If it is no mapping.
    """
    run = read_run(state)
    if layout != run.layout:
        num_parameters = sum(len(part.fragment.names) for part in parts)
        raise ValueError(
            "a replica that joins takes a checkpoint of the group's own arguments alone, and this "
            "one has other names, shapes, dtypes, fragments, sync_every or offsets: sync_every "
            f"{run.sync_every}, offsets {run.offsets}, {len(run.fragments)} fragments of "
            f"{len(run.names)} parameters in the state, {len(parts)} fragments of "
            f"{num_parameters} parameters here; join without a checkpoint"
        )
    writes: list[Callable[[], None]] = []
    for part in parts:
        numbers = _numbers_at(state, part.index, is_fragment=True)
        writes.append(partial(set_numbers, part, numbers))
        writes += _plan_tensors(part, state, numbers)

    def write() -> None:
        for one in writes:
            one()

    return write


def _numbers_at(home: Mapping[str, Any], index: int, is_fragment: bool) -> Mapping[str, Any]:
    """Return the numbers of a saved part, checked.

    ``extra`` may be missing, as ``dcp_to_torch_save`` leaves out an empty one.
    """
    numbers: Mapping[str, Any] = _need(home, "parts", str(index))
    for name in ("round", "last_sent", "weight_sum"):
        _need(numbers, name)
    for name in ("num_steps", "step_norm", "largest_norm") if is_fragment else ():
        _need(numbers, name)
    return numbers


def _saved_history(numbers: Mapping[str, Any], scope: Scope) -> int:
    """Return the history in the saved numbers of a part; 0 if they have none."""
    text = numbers.get(scope.flights)
    return 0 if text is None else int(json.loads(text)["history"])


def _need(mapping: Any, *path: str) -> Any:
    """Return the entry of a saved state at a path of keys.

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
    """Return the mapping with the outer state: the state itself, or this replica's entry in it."""
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


def _named(part: SyncedFragment) -> list[tuple[str, Tensor]]:
    return list(zip(part.fragment.names, part.fragment.params, strict=True))


def _zeros(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return fp32 zeros in the shapes of these parameters, by name."""
    return {
        name: torch.zeros_like(param.detach(), dtype=torch.float32)
        for name, param in params.items()
    }


def _plan_tensors(
    part: SyncedFragment,
    home: Mapping[str, Any],
    numbers: Mapping[str, Any],
    new: Collection[str] = (),
) -> list[Callable[[], None]]:
    """Check a fragment's saved outer parameters and buffers; return functions that load them.

    Args:
        home: The mapping with the outer state, see ``_home``.
        numbers: The numbers with which the fragment goes on.
        new: Names of parameters that the state lacks: their outer values become the model's, and
            their buffers zero.
    """
    fragment = part.fragment
    current = {name: param.detach() for name, param in _named(part) if name in new}
    saved_outer = {**_need(home, "outer"), **current}
    fragment.check(saved_outer)
    old, buffers = set(fragment.names).difference(new), _need(home, "buffers")
    # An optimizer may keep other buffers for the parameters of other fragments.
    buffers = {name: saved for name, saved in buffers.items() if not old.isdisjoint(saved)}
    if not old:
        buffers = {name: {} for name in part.state.tensors()}
    extra = dict(numbers.get("extra", {}))
    part.state.check(set(buffers), extra if numbers["num_steps"] else None)
    empty = {}
    for name, saved in buffers.items():
        absent = {*new, *part.state.without(name)}
        empty[name] = {name: param.detach() for name, param in _named(part) if name in absent}
        fragment.check({**saved, **empty[name]})

    def load_buffers() -> None:
        flats = {}
        for name, saved in buffers.items():
            # Zeros first: the one element that stands for an empty shard is in no saved tensor.
            flats[name] = torch.zeros_like(part.outer)
            fragment.load(flats[name], {**saved, **_zeros(empty[name])})
        part.state.load(flats, extra)

    return [partial(fragment.load, part.outer, saved_outer), load_buffers]


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


_NO_FLIGHTS = json.dumps({"members": [], "wire": "fp32", "block_size": 256, "rounds": []})


def _install(part: SyncedPart, saved: Saved, mine: Mapping[str, Any] | None) -> None:
    saved.install(part)
    part.owed.is_lost = bool(mine and mine["owes"])
    part.owed.is_ahead = bool(mine and mine["is_ahead"])


def _owe(part: SyncedPart, values: Tensor) -> None:
    # Look the tensor up only now: residuals may be swapped between the check and the load.
    assert part.buffers is not None
    part.buffers.residuals.owe(values)


def _refuse_other_shards(numbers: Mapping[str, Any], scope: Scope) -> None:
    """Raise if rounds are under way in the state of replicas with another number of shards."""
    if scope.flights in numbers:
        return
    for name, text in numbers.items():
        if name.startswith("flights") and json.loads(text)["rounds"]:
            raise ValueError(
                "the saved state has rounds under way between replicas of another number of "
                "shards: flush() before the save to change it"
            )


def differences(saved: Run, here: Run) -> list[str]:
    """Return one clause for each difference in model, fragments and schedule, with both values."""
    pairs: list[tuple[str, Any, Any]] = [
        ("sync_every", saved.sync_every, here.sync_every),
        ("the number of fragments", len(saved.fragments), len(here.fragments)),
    ]
    if len(saved.fragments) == len(here.fragments):
        pairs.append(("offsets", saved.offsets, here.offsets))
    pairs.append(("average_buffers", saved.has_buffers, here.has_buffers))
    found = [f"{what} is {was} in the state, {now} here" for what, was, now in pairs if was != now]
    was, now = _places(saved), _places(here)
    changed = [n for n in dict.fromkeys([*was, *now]) if was.get(n) != now.get(n)]
    # Name first a parameter that only one run exchanges: it may be why its neighbours have moved.
    changed.sort(key=lambda name: name in was and name in now)
    if changed:
        first = changed[0]
        more = f", and so on for {len(changed) - 1} more" if changed[1:] else ""
        not_there = "not exchanged"
        found.append(
            f"parameter {first!r} is {was.get(first, not_there)} in the state, "
            f"{now.get(first, not_there)} here{more}"
        )
    return found


def other_differences(saved: Run, here: Run) -> list[str]:
    """Return one clause for each other difference; a state can be loaded in spite of these."""
    pairs: list[tuple[str, Any, Any]] = [("wires", _wires(saved), _wires(here))]
    for name in ("error_feedback", "members"):
        pairs.append((name, getattr(saved, name), getattr(here, name)))
    # Convert to JSON and back, as the saved one was: tuples become lists.
    outer = json.loads(json.dumps(here.outer))
    for name in sorted({*saved.outer, *outer}):
        pairs.append((f"{name} of outer", saved.outer.get(name), outer.get(name)))
    return [f"{what}: {was} in the state, {now} here" for what, was, now in pairs if was != now]


def _wires(run: Run) -> list[str]:
    """Return the names and block sizes of a run's wires, each once."""
    return sorted({f"{name} of blocks of {size}" for name, size in (f.wire for f in run.fragments)})


def _places(run: Run) -> dict[str, str]:
    """Return for each parameter its fragment and form in memory, in words."""
    return {
        name: f"{form} in fragment {index}"
        + (f", aligned to {one.alignment}" if one.alignment > 1 else "")
        for index, one in enumerate(run.fragments)
        for name, form in zip(one.names, one.forms, strict=True)
    }


def refuse_what_cannot_follow(
    saved: Run,
    here: Run,
    outer: Mapping[str, Tensor],
    exchanged: Mapping[str, Tensor],
    model: Collection[str],
) -> None:
    """Raise one ValueError with all reasons why a state cannot be loaded into this run, if any.

    Args:
        outer: Saved outer parameters.
        exchanged: The parameters that are exchanged here.
        model: Names of all parameters of the model, frozen ones too.
    """
    found = []
    if saved.outer_name != here.outer_name:
        found.append(
            f"the outer optimizer is {saved.outer_name} in the state, {here.outer_name} here"
        )
    shapes = {
        name: (list(outer[name].shape), list(param.shape))
        for name, param in exchanged.items()
        if name in outer
    }
    wrong = [name for name, (was, now) in shapes.items() if was != now]
    if wrong:
        was, now = shapes[wrong[0]]
        more = f", and {len(wrong) - 1} more differ" if wrong[1:] else ""
        found.append(f"parameter {wrong[0]!r} has shape {was} in the state, {now} here{more}")
    lacking = [name for name in saved.names if name not in model]
    if lacking:
        more = f", nor {len(lacking) - 1} more" if lacking[1:] else ""
        found.append(f"the model here has no parameter {lacking[0]!r} of the state{more}")
    if found:
        raise ValueError(
            f"the saved state does not fit: {'; '.join(found)}: load it into the model and with "
            "the outer optimizer of the save, on all replicas"
        )


class Match:
    """Finds, for each part of the present run, the saved parts with its parameters.

    Attributes:
        is_same: Both runs have the same parts, tensors and schedule.
        new: Names of parameters that the saved run did not exchange.
        ended: Names of parameters that the saved run exchanged, and the present one does not.
    """

    def __init__(self, saved: Run, here: Run) -> None:
        self.saved, self.here = saved, here
        self.is_same = (saved.layout, saved.has_buffers) == (here.layout, here.has_buffers)
        self._owners = {n: index for index, one in enumerate(saved.fragments) for n in one.names}
        present = set(here.names)
        self.new = [name for name in here.names if name not in self._owners]
        self.ended = [name for name in self._owners if name not in present]

    @property
    def saved_parts(self) -> list[int]:
        return list(range(len(self.saved.fragments) + self.saved.has_buffers))

    def twin(self, part: SyncedPart) -> int | None:
        """Return the index of the saved part with exactly the same tensors, in order; or None."""
        if not isinstance(part, SyncedFragment):
            return len(self.saved.fragments) if self.saved.has_buffers else None
        own = self.here.fragments[part.index]
        for index, one in enumerate(self.saved.fragments):
            if (one.names, one.alignment) == (own.names, own.alignment):
                return index
        return None

    def place(self, part: SyncedPart) -> int | None:
        """Return the index of the twin if its elements are also at the same places, or None."""
        twin = self.twin(part)
        if twin is None or not isinstance(part, SyncedFragment):
            return twin
        is_alike = self.saved.fragments[twin].forms == self.here.fragments[part.index].forms
        return twin if is_alike else None

    def sources(self, part: SyncedPart) -> list[int]:
        """Return the indices of the saved parts that had any of this part's parameters."""
        twin = self.twin(part)
        if twin is not None or not isinstance(part, SyncedFragment):
            return [] if twin is None else [twin]
        names = part.fragment.names
        return sorted({self._owners[name] for name in names if name in self._owners})

    def numbers(self, part: SyncedPart, saved: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the numbers with which a part goes on; see ``numbers_of``.

        Args:
            saved: Numbers of all saved parts.
        """
        twin = self.twin(part)
        if twin is not None:
            return dict(saved[twin])
        sources = [saved[index] for index in self.sources(part)]
        merged = _merged(sources or list(saved.values()))
        if not sources:
            # All parameters are new: no outer step was taken, but the learning rate's schedule goes
            # on from the other parts' round.
            merged |= {"num_steps": 0, "extra": {}, "last_lr": None, "ended_at": -1}
            merged |= {"last_momentum": None, "is_mean": False}
        return merged


def _merged(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers of a part whose parameters come from several saved parts.

    The norms of outer steps are left out, as they belong to whole parts.
    """
    steps = [int(one.get("num_steps", one["round"])) for one in sources]
    furthest = sources[steps.index(max(steps))]
    has_ended = all(one.get("ended_at", -1) == num for one, num in zip(sources, steps, strict=True))
    return {
        "round": max(int(one["round"]) for one in sources),
        "last_sent": min(int(one["last_sent"]) for one in sources),
        "weight_sum": furthest["weight_sum"],
        "num_steps": max(steps),
        "extra": _merged_extra([*sources, furthest]),
        "last_lr": furthest.get("last_lr"),
        "last_momentum": furthest.get("last_momentum"),
        "ended_at": max(steps) if has_ended else -1,
        "is_mean": has_ended and all(one.get("is_mean", False) for one in sources),
    }


def _merged_extra(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the merged ``extra``: values by parameter are joined, other values the last ones."""
    merged: dict[str, Any] = {}
    for one in sources:
        for key, value in one.get("extra", {}).items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = {**merged[key], **value} if both else value
    return merged
