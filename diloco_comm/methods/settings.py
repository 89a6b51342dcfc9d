"""The arguments of ``DiLoCo`` that all replicas share, checked once and kept as JSON types."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..base import env
from ..base.checks import MOST_INT32, UNSET, choice, flag, integer, not_negative
from ..ops.wire import ELEMENT_WIRES, WireFormat
from ..replica.fragments import FragmentSpec, fragment_spec
from ..replica.schedule import inner_steps
from .outer import make_outer
from .overlap import make_overlap
from .wires import Wires


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
            # A pattern has its place: the first one that matches a name counts.
            values["wire"] = [list(pair) for pair in values["wire"].items()]
        return values


Config = Mapping[str, Any] | str | os.PathLike[str]


# Arguments of which None is a value.
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
        name: Of the configuration, for messages.

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
            f"{name} {path} must hold a JSON object of arguments, got a {type(found).__name__}"
        )
    return found
