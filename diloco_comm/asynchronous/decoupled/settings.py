"""The settings that all learners of a run share; a learner asks the syncer for them, then joins."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatch
from typing import Any

from ...base.checks import MOST_INT32, choice, flag, integer
from ...ops.wire import WireFormat, parse
from ...ops.wire_options import check_training
from ...replica.fragments import FragmentSpec, fragment_spec
from .learner import Receipt
from .merges import MERGES, Piece, pieces_of
from .syncer import QuorumRule

FP32 = WireFormat("fp32")
# Messages number fragments and pieces in two bytes, and JOIN lists them all in 64 KiB of JSON.
MAX_FRAGMENTS = 1024
# Bytes of the settings as JSON; every message has room for them.
MAX_SETTINGS = 1 << 15
# Settings that may change when a syncer is started again with its snapshot folder.
MAY_CHANGE = ("sync_every", "quorum", "gamma", "delay", "receipt", "alpha", "error_feedback")

# Settings on which the syncer alone acts.
_OF_THE_SYNCER = ("sync_every", "quorum", "gamma", "delay")


@dataclass(frozen=True, kw_only=True)
class DecoupledSettings:
    """The settings of a run of decoupled training.

    Args:
        fragments: As in ``DiLoCo``.
        sync_every: Inner steps between two calls of a fragment (H).
        quorum, gamma, delay: K, the share of the slack that the grace window takes, and tau, the
            inner steps that a learner can take before a merge comes late; see ``QuorumRule``.
        merge: "rda" or "mean"; see ``pieces_of``.
        by_mean: Patterns (``fnmatch``) of parameters that always merge by the mean.
        wire, block_size: Format of the reports.
        wire_down: Format of the commits. "fp32" sends the shared parameters. Any other wire sends
            the coded difference between the shared parameters and what the learners have; the rest
            stays at the syncer and is part of the next difference.
        receipt, alpha: What a learner does with a commit, see ``Receipt``.
        error_feedback: Learners add the rounding errors of a merged report to the next one.
        shard: "i/S": the syncer has the fragments i, i + S, i + 2S, ... and S - 1 other syncers
            have the rest.

    Raises:
        ValueError, TypeError: If a value is out of its range.
    """

    fragments: FragmentSpec = 1
    sync_every: int = 50
    quorum: int = 1
    gamma: float = 0.5
    delay: int = 0
    merge: str = "rda"
    by_mean: tuple[str, ...] = ()
    wire: str = "int8"
    block_size: int | None = None
    wire_down: str = "fp32"
    receipt: str = "overwrite"
    alpha: float = 0.5
    error_feedback: bool = False
    shard: str = "0/1"

    def __post_init__(self) -> None:
        fragment_spec(self.fragments)
        integer("sync_every", self.sync_every, 1, most=MOST_INT32)
        choice("merge", self.merge, MERGES)
        object.__setattr__(self, "by_mean", tuple(self.by_mean))
        flag("error_feedback", self.error_feedback)
        size = len(json.dumps(self.to_json()))
        if size > MAX_SETTINGS:
            raise ValueError(
                f"the settings take {size} bytes of JSON, at most {MAX_SETTINGS} are allowed: give "
                "fewer or shorter names in by_mean and fragments"
            )
        _ = self.rule, self.how_received, self.place
        check_training(self.up, rounding="nearest", error_feedback=self.error_feedback)
        try:
            # What a difference lacks is part of the next one: error feedback.
            check_training(self.down, rounding="nearest", error_feedback=True)
        except ValueError:
            raise ValueError(
                f"wire_down must be a wire that keeps its rounding errors, got {self.wire_down!r}: "
                "the differences of rotated wires below 2 bits would pile up; take 'int2r' or more"
            ) from None

    @property
    def place(self) -> tuple[int, int]:
        """Number of this syncer, and number of all syncers."""
        found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", str(self.shard))
        if found is None or not int(found[1]) < int(found[2]):
            raise ValueError(f"shard must be i/S with 0 <= i < S, got {self.shard!r}")
        return int(found[1]), int(found[2])

    @property
    def up(self) -> WireFormat:
        """The format of the reports."""
        return parse(self.wire, self.block_size)

    @property
    def down(self) -> WireFormat:
        """The format of the commits."""
        return parse(self.wire_down)

    @property
    def rule(self) -> QuorumRule:
        """Quorum and grace window."""
        return QuorumRule(quorum=self.quorum, gamma=self.gamma, delay=self.delay)

    @property
    def how_received(self) -> Receipt:
        """What a learner does with a commit."""
        return Receipt(mode=self.receipt, alpha=self.alpha)

    def pieces(
        self, names: Sequence[Sequence[str]], shapes: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[Piece]]:
        """Divide each fragment into pieces.

        Args:
            names, shapes: Of the tensors of each fragment.
        """
        return [
            pieces_of(
                of_shapes,
                self.merge,
                by_mean=[i for i, name in enumerate(of_names) if self._is_by_mean(name)],
            )
            for of_names, of_shapes in zip(names, shapes, strict=True)
        ]

    def _is_by_mean(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.by_mean)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON types."""
        return {**asdict(self), "by_mean": list(self.by_mean)}

    @property
    def of_learners(self) -> int:
        """Hash of the settings on which learners act."""
        values = {k: v for k, v in self.to_json().items() if k not in _OF_THE_SYNCER}
        text = json.dumps(values, sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DecoupledSettings:
        """Return what ``to_json`` was made of.

        Raises:
            ValueError, TypeError: If the values are not settings of this version.
        """
        known = {field.name for field in fields(cls)}
        if values.keys() != known:
            other = sorted(values.keys() ^ known)
            raise ValueError(f"the settings are of another version: {', '.join(other)}")
        return cls(**values)

    def difference(self, other: DecoupledSettings) -> str:
        """Return how the ``other`` settings differ where no change is allowed, in words; or ""."""
        aligned = replace(other, **{name: getattr(self, name) for name in MAY_CHANGE})
        mine, theirs = self.to_json(), aligned.to_json()
        names = [name for name in mine if mine[name] != theirs[name]]
        return ", ".join(f"{name} {theirs[name]!r} and not {mine[name]!r}" for name in names)
