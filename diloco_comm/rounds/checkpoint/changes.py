"""The description of a run in its saved states, and how the run that loads may differ from it.

A state goes by the names of parameters. Each fragment of the present run takes its numbers from the
saved fragments that had its parameters. Where these are at different rounds, the fragment goes on
from the highest number of rounds and of outer steps, and from the lowest inner step up to which
everything was sent. A parameter that the saved run did not exchange begins without momentum.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ...methods.settings import Settings
from ...replica.fragments import Schedule, describe
from ..synced import SyncedFragment, SyncedPart


@dataclass(frozen=True)
class SavedFragment:
    """One fragment of the run that saved a state.

    Attributes:
        names: The parameters, in order.
        forms: Shape, strides and dtype of each of them, in words.
        wire: Name of the wire, and elements of a block.
        offset: Inner step of the first send.
        alignment: See ``Fragment``.
    """

    names: tuple[str, ...]
    forms: tuple[str, ...]
    wire: tuple[str, int]
    offset: int
    alignment: int


@dataclass(frozen=True)
class Run:
    """The description of a run that a saved state holds.

    Attributes:
        layout: Hash of names, shapes, fragments and schedule; see ``Plan.saved_layout``.
        outer: Class and arguments of the outer optimizer, without its learning rate.
        has_buffers: Buffers are averaged, as the last part.
        error_feedback, members: None in the state of a version that did not save them.
    """

    layout: int
    sync_every: int
    fragments: tuple[SavedFragment, ...]
    outer: dict[str, Any]
    has_buffers: bool
    error_feedback: bool | None
    members: tuple[int, ...] | None

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Run:
        values = json.loads(text)
        fragments = tuple(
            SavedFragment(
                tuple(one["names"]),
                tuple(one["forms"]),
                (one["wire"][0], one["wire"][1]),
                one["offset"],
                one["alignment"],
            )
            for one in values.pop("fragments")
        )
        return cls(**{**values, "fragments": fragments, "members": tuple(values["members"])})

    @property
    def names(self) -> list[str]:
        """The parameters of all fragments."""
        return [name for fragment in self.fragments for name in fragment.names]

    @property
    def offsets(self) -> list[int]:
        return [fragment.offset for fragment in self.fragments]

    @property
    def outer_name(self) -> str:
        """Class of the outer optimizer, also of one of torch; "" if the state does not say it."""
        return str(self.outer.get("optimizer", self.outer.get("name", "")))


def run_of(
    parts: Sequence[SyncedPart],
    schedule: Schedule,
    settings: Settings,
    *,
    layout: int,
    members: Sequence[int],
) -> Run:
    """Describe the present run, alike on all replicas and on all workers of a replica."""
    fragments = [part for part in parts if isinstance(part, SyncedFragment)]
    outer = {k: v for k, v in settings.outer.shared_config().items() if k != "lr"}
    return Run(
        layout,
        schedule.sync_every,
        tuple(_described(part, schedule.offsets[part.index]) for part in fragments),
        outer,
        len(parts) > len(fragments),
        settings.error_feedback,
        tuple(members),
    )


def _described(part: SyncedFragment, offset: int) -> SavedFragment:
    fragment = part.fragment
    forms = tuple(describe("", param, whole=True).strip() for param in fragment.params)
    wire = part.wire.name, part.wire.block_size
    return SavedFragment(fragment.names, forms, wire, offset, fragment.alignment)


def saved_run(state: Mapping[str, Any], here: Run) -> Run:
    """Return the run that saved a state.

    Raises:
        ValueError: If a version has saved it that did not describe the run, unless the layouts are
            equal.
    """
    saved = state.get("layout")
    if isinstance(saved, str):
        return Run.from_text(saved)
    if saved != here.layout:
        raise ValueError(
            "an older version has saved this state, with other names, shapes, dtypes, fragments, "
            f"sync_every, offsets or align_tensors than here (layout {saved} in the state, "
            f"{here.layout} here), and such a state does not follow changes: load it with the "
            "arguments of the save, and save it again"
        )
    has_buffers = str(len(here.fragments)) in (state.get("parts") or {})
    return Run(here.layout, here.sync_every, here.fragments, {}, has_buffers, None, None)


def differences(saved: Run, here: Run) -> list[str]:
    """List what differs in model, fragments and schedule, each with both values."""
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
    # A parameter that one of the two does not exchange says more than its neighbours' new places.
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
    """List what differs beside model, fragments and schedule: all of this follows.

    An older version has saved a state that says nothing of the outer optimizer or the group.
    """
    pairs: list[tuple[str, Any, Any]] = [("wires", _wires(saved), _wires(here))]
    for name in ("error_feedback", "members"):
        if getattr(saved, name) is not None:
            pairs.append((name, getattr(saved, name), getattr(here, name)))
    if saved.outer:
        # Through JSON, as the saved one: a tuple has become a list.
        now = json.loads(json.dumps(here.outer))
        names = sorted({*saved.outer, *now})
        pairs += [(f"{name} of outer", saved.outer.get(name), now.get(name)) for name in names]
    return [f"{what}: {was} in the state, {now} here" for what, was, now in pairs if was != now]


def _wires(run: Run) -> list[str]:
    """Return the names and block sizes of a run's wires, each once."""
    return sorted({f"{name} of blocks of {size}" for name, size in (f.wire for f in run.fragments)})


def _places(run: Run) -> dict[str, str]:
    """Say by name in which fragment a parameter is, and how it lies in memory."""
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
    """Raise one ValueError that names all that keeps a state from being loaded into this run.

    Args:
        outer: Saved outer parameters.
        exchanged: The parameters that are exchanged here.
        model: Names of all parameters of the model, frozen ones too.
    """
    found = []
    if saved.outer_name and saved.outer_name != here.outer_name:
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
    """Where the parts of the present run find their numbers in a saved state.

    Attributes:
        is_same: The save had the same parts, tensors and schedule.
        new: Parameters that the saved run did not exchange.
        ended: Parameters that the saved run exchanged, and the present one does not.
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
        """Return the saved part with just these tensors, in this order; None without one."""
        if not isinstance(part, SyncedFragment):
            return len(self.saved.fragments) if self.saved.has_buffers else None
        own = self.here.fragments[part.index]
        for index, one in enumerate(self.saved.fragments):
            if (one.names, one.alignment) == (own.names, own.alignment):
                return index
        return None

    def place(self, part: SyncedPart) -> int | None:
        """Return the twin, if its elements lie at the same places too; None without one."""
        twin = self.twin(part)
        if twin is None or not isinstance(part, SyncedFragment):
            return twin
        is_alike = self.saved.fragments[twin].forms == self.here.fragments[part.index].forms
        return twin if is_alike else None

    def sources(self, part: SyncedPart) -> list[int]:
        """Return the saved parts that had a part's parameters."""
        twin = self.twin(part)
        if twin is not None or not isinstance(part, SyncedFragment):
            return [] if twin is None else [twin]
        names = part.fragment.names
        return sorted({self._owners[name] for name in names if name in self._owners})

    def numbers(self, part: SyncedPart, saved: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the numbers with which a part goes on; see ``save.numbers_of``.

        Args:
            saved: Numbers of all saved parts.
        """
        twin = self.twin(part)
        if twin is not None:
            return dict(saved[twin])
        sources = [saved[index] for index in self.sources(part)]
        merged = _merged(sources or list(saved.values()))
        if not sources:
            # The schedule of the learning rate goes on, and no outer step was taken.
            merged |= {"num_steps": 0, "extra": {}, "last_lr": None, "ended_at": -1}
        return merged


def _merged(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return numbers for parameters that come from several parts.

    The norms of outer steps belong to whole parts, and begin anew.
    """
    steps = [int(one.get("num_steps", one["round"])) for one in sources]
    furthest = sources[steps.index(max(steps))]
    has_ended = all(one.get("ended_at", -1) == num for one, num in zip(sources, steps, strict=True))
    return {
        "round": max(int(one["round"]) for one in sources),
        "last_sent": min(int(one["last_sent"]) for one in sources),
        "weight_sum": furthest.get("weight_sum", 0.0),
        "num_steps": max(steps),
        "extra": furthest.get("extra", {}),
        "last_lr": furthest.get("last_lr"),
        "ended_at": max(steps) if has_ended else -1,
    }
