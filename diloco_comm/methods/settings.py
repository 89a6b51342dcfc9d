"""The arguments of ``DiLoCo`` that its configuration has: checked once, and as JSON types."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..base import env
from ..base.checks import MOST_INT32, UNSET, choice, class_of, flag, integer, not_negative
from ..ops.wire import ELEMENT_WIRES, WireFormat, parse
from ..ops.wire_options import check_training
from ..replica.fragments import FragmentSpec, fragment_spec, inner_steps
from .outer import make_outer
from .overlap import make_overlap

REST = "rest"


@dataclass(frozen=True)
class Wires:
    """The wires of groups of parameters, in the order in which their patterns are tried.

    Attributes:
        groups: Pattern and wire of each group. A pattern is a regular expression that is searched
            in a parameter's name; ``"rest"`` takes the names that no other pattern has matched.
    """

    groups: tuple[tuple[str, WireFormat], ...]

    @classmethod
    def parse(cls, wire: Any, block_size: int | None = None) -> Wires:
        """Read one wire for all parameters, or a mapping of patterns to names of wires.

        Args:
            wire: A name, a ``WireFormat``, or a mapping whose last key may be ``"rest"``.
            block_size: Elements that share a scale, for the wires with more than one possible size;
                None is each wire's own size.

        Raises:
            ValueError: If a name, pattern or block size is invalid, or ``"rest"`` is not last.
            TypeError: If ``wire`` is none of these.
        """
        if isinstance(wire, Wires):
            return wire
        if wire == "auto":
            raise ValueError(
                "wire='auto' is no wire: a DiLoCo does not know the link. Let `diloco-comm plan "
                "--wire auto --gbps ... --write FILE` choose one, and give config=FILE"
            )
        if not isinstance(wire, str | WireFormat | Mapping):
            raise TypeError(
                "wire must be a name, a WireFormat, or a mapping of patterns to names, got "
                f"{type(wire).__name__}"
            )
        if not isinstance(wire, Mapping):
            return cls(((REST, parse(wire, block_size)),))
        if not wire:
            raise ValueError("wire={} names no wire: give a pattern and a wire, or a wire alone")
        for pattern, name in wire.items():
            _check_group(pattern, name)
        if REST in list(wire)[:-1]:
            raise ValueError(
                f"'rest' must be the last key of wire, got {list(wire)}: it takes the names that "
                "no key before it has matched"
            )
        groups = tuple((p, _wire_of(p, name, block_size)) for p, name in wire.items())
        if block_size is not None and block_size not in {form.block_size for _, form in groups}:
            raise ValueError(
                f"block_size={block_size!r} goes with none of the wires {list(wire.values())}, "
                "whose blocks have one size: leave it out"
            )
        return cls(groups)

    @property
    def single(self) -> WireFormat | None:
        """The wire of all parameters; None where groups have wires of their own."""
        return self.groups[0][1] if [pattern for pattern, _ in self.groups] == [REST] else None

    def config(self) -> str | dict[str, str]:
        """Return the names in the form that ``parse`` takes."""
        single = self.single
        return single.name if single else {pattern: wire.name for pattern, wire in self.groups}

    def check(self, *, rounding: str, error_feedback: bool) -> None:
        """Raise ValueError if an option does not go together with one of the wires."""
        for pattern, wire in self.groups:
            try:
                check_training(wire, rounding=rounding, error_feedback=error_feedback)
            except ValueError as error:
                if self.single:
                    raise
                raise ValueError(f"wire of {pattern!r}: {error}") from None

    def group_of(self, name: str) -> int:
        """Return the index of a parameter's group: the first one whose pattern matches.

        Raises:
            ValueError: If no pattern matches.
        """
        for index, (pattern, _) in enumerate(self.groups):
            if pattern == REST or re.search(pattern, name):
                return index
        raise ValueError(
            f"parameter {name!r} is matched by no key of wire, which are "
            f"{[pattern for pattern, _ in self.groups]}: add 'rest' as the last one"
        )

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError if a pattern but "rest" takes no name, or a name has no pattern."""
        taken = {self.group_of(name) for name in names}
        for index, (pattern, _) in enumerate(self.groups):
            if index not in taken and pattern != REST:
                raise ValueError(
                    f"{pattern!r} in wire matches no parameter that an earlier key has not taken; "
                    f"the first parameter is {names[0]!r}"
                )


def _wire_of(pattern: str, name: str, block_size: int | None) -> WireFormat:
    try:
        return parse(name, block_size if name in ELEMENT_WIRES else None)
    except ValueError as error:
        raise ValueError(f"wire of {pattern!r}: {error}") from None


def _check_group(pattern: Any, name: Any) -> None:
    if not isinstance(pattern, str) or not isinstance(name, str):
        raise TypeError(
            f"wire must map patterns to names of wires, both strings, got {pattern!r}: {name!r}"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} in wire is no regular expression: {error}") from None


@dataclass
class Settings:
    """See ``DiLoCo`` for the meaning of each; fields hold the checked values.

    Attributes:
        wire: The ``Wires`` of all parameters.
    """

    sync_every: int
    fragments: FragmentSpec = 1
    offsets: Any = None
    overlap: Any = None
    outer: Any = None
    wire: Any = "int8"
    block_size: int | None = None
    rounding: str = "nearest"
    error_feedback: bool = False
    feedback_decay: float | None = None
    align_tensors: bool = False
    seed: int = 0
    average_buffers: bool = False
    lanes: int | None = None
    chunk_bytes: int | None = None
    on_nonfinite: str = "raise"
    max_skipped: int | None = 3

    def __post_init__(self) -> None:
        self.wire = Wires.parse(self.wire, self.block_size)
        if self.wire.single:
            self.block_size = self.wire.single.block_size
        self.sync_every = integer("sync_every", self.sync_every, 1, most=MOST_INT32)
        self.fragments = fragment_spec(self.fragments)
        self.offsets = None if self.offsets is None else inner_steps(self.offsets)
        self.outer = make_outer(self.outer)
        self.overlap = make_overlap(self.overlap)
        self.overlap.check(self.sync_every, self.outer)
        choice("rounding", self.rounding, ("nearest", "stochastic"))
        choice("nonfinite", self.on_nonfinite, ("raise", "skip", "reset"))
        if self.max_skipped is not None:
            self.max_skipped = integer("max_skipped", self.max_skipped, 1)
        self.seed = integer("seed", self.seed)
        lanes = env.lanes() if self.lanes is None else self.lanes
        self.lanes = integer("lanes", lanes, 1, most=MOST_INT32)
        chunk_bytes = env.chunk_bytes() if self.chunk_bytes is None else self.chunk_bytes
        self.chunk_bytes = None if chunk_bytes is None else integer("chunk_bytes", chunk_bytes, 1)
        for name in ("error_feedback", "average_buffers", "align_tensors"):
            flag(name, getattr(self, name))
        self.wire.check(rounding=self.rounding, error_feedback=self.error_feedback)
        self.feedback_decay = self._checked_decay()

    def _checked_decay(self) -> float | None:
        if self.feedback_decay is None:
            return None
        decay = not_negative("feedback_decay", self.feedback_decay, "a number from 0 to 1")
        if decay > 1:
            raise ValueError(f"feedback_decay must be a number from 0 to 1, got {decay!r}")
        if not self.error_feedback:
            raise ValueError(
                f"feedback_decay={decay!r} needs error_feedback=True: without it nothing that an "
                "encoding lost is kept"
            )
        sparse = [wire.name for _, wire in self.wire.groups if wire.is_sparse]
        if decay == 0 and sparse:
            raise ValueError(
                f"feedback_decay=0 keeps nothing that an encoding lost, and wire {sparse[0]!r} "
                "needs that: give a number above 0"
            )
        return decay

    def as_json(self) -> dict[str, Any]:
        """Return the settings in the form that ``DiLoCo(..., config=...)`` takes."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["wire"] = self.wire.config()
        values["outer"] = self.outer.config()
        values["overlap"] = self.overlap.config()
        return values

    def shared(self) -> dict[str, Any]:
        """Return the settings that replicas compare: all that must be equal."""
        parts = {"outer": self.outer.shared_config(), "overlap": self.overlap.shared_config()}
        values = {**self.as_json(), **parts}
        if self.error_feedback and self.feedback_decay is None and self.wire.single:
            values["feedback_decay"] = self.wire.single.feedback_decay
        if isinstance(values["wire"], dict):
            # A list, because the order counts: a parameter takes the first pattern that matches.
            values["wire"] = [list(pair) for pair in values["wire"].items()]
        return values


Config = Mapping[str, Any] | str | os.PathLike[str]


# Arguments for which None is a choice, so that ``UNSET`` says that they were not given.
_OPTIONAL = ("max_skipped",)


def read_config(config: Config | None) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a configuration for messages, and its arguments.

    Args:
        config: The arguments, or a JSON file with them; None is the file of ``DILOCO_COMM_CONFIG``.

    Raises:
        ValueError: If the file cannot be read.
        TypeError: If it is neither a mapping nor the name of a file.
    """
    name = "config"
    if config is None and env.config_path():
        name, config = "DILOCO_COMM_CONFIG", env.config_path()
    if isinstance(config, (str, os.PathLike)):
        name, config = f"{name} {os.fspath(config)}", _read(name, Path(config))
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"config must be a dictionary or a JSON file, got {config!r}")
    return name, config or {}


def merge(given: dict[str, Any], config: Mapping[str, Any], name: str = "config") -> Settings:
    """Fill arguments that were not given, and so are None or ``UNSET``, from a saved configuration.

    Args:
        config: Arguments by the names of ``Settings``.
        name: The configuration's name, for messages.

    Raises:
        ValueError: If the configuration has an unknown key, or ``sync_every`` is nowhere.
    """
    config = dict(config)
    unknown = config.keys() - {field.name for field in fields(Settings)}
    if unknown:
        raise ValueError(f"{name} has unknown arguments {sorted(unknown)}")
    wire, saved = given.get("wire"), config.get("wire", "int8")
    has_choice = wire in ELEMENT_WIRES and saved in ELEMENT_WIRES
    if isinstance(wire, WireFormat) or not (wire in (None, saved) or has_choice):
        config.pop("block_size", None)  # it belongs to the configuration's wire
    values = {**config, **{name: value for name, value in given.items() if _is_given(name, value)}}
    if values.get("sync_every") is None:
        raise ValueError("sync_every is missing: give the inner steps between two outer steps")
    return Settings(**values)


def _is_given(name: str, value: Any) -> bool:
    return value is not UNSET if name in _OPTIONAL else value is not None


def _read(name: str, path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{name} {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{name} {path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(
            f"{name} {path} must hold a JSON object of arguments, got {class_of(found)}"
        )
    return found
