"""A learner: encodes its progress when it is called, and takes commits without ever waiting.

All methods are called between two inner steps, so the parameters change nowhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from ... import ops
from ...ops.wire import STAGE_ENCODE, WireFormat, rng_key
from ..local import WorkerPiece
from .merges import Piece, flatten
from .syncer import Commit, Report


@dataclass
class Ledger:
    """Counts of one unit, inner steps or tokens; learned is always the sum of the four others.

    Attributes:
        learned: All progress since the learner was made.
        applied: Merged into the shared model.
        under_way: In a report that no commit has answered.
        kept: In the parameters, and in no report.
        lost: Overwritten by a commit, or gone with a failure of the learner.
    """

    learned: int = 0
    applied: int = 0
    under_way: int = 0
    kept: int = 0
    lost: int = 0

    def learn(self, count: int) -> None:
        """Note new progress."""
        self.learned += count
        self.kept += count

    def send(self) -> None:
        """Note that a report holds what is kept."""
        self.under_way, self.kept = self.under_way + self.kept, 0

    def apply(self) -> None:
        """Note that the report was merged."""
        self.applied, self.under_way = self.applied + self.under_way, 0

    def give_back(self) -> None:
        """Note that the report was not merged: the parameters still hold its progress."""
        self.kept, self.under_way = self.kept + self.under_way, 0

    def lose(self) -> None:
        """Note that what is kept is overwritten."""
        self.lost, self.kept = self.lost + self.kept, 0


RECEIPTS = ("overwrite", "carry", "blend")


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a learner does with its own progress when a commit arrives.

    * ``overwrite``: the parameters become the shared ones. Progress that is in no merged report is
      lost.
    * ``carry``: the progress since the merged report, or since the last commit where the own report
      was not merged, is added to the shared parameters.
    * ``blend``: alpha * local + (1 - alpha) * shared, as in Streaming DiLoCo.

    Args:
        mode: One of ``RECEIPTS``.
        alpha: Weight of the local parameters, in [0, 1], for ``blend`` alone.
    """

    mode: str = "overwrite"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if self.mode not in RECEIPTS:
            raise ValueError(f"receipt must be one of {', '.join(RECEIPTS)}, got {self.mode!r}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must lie in [0, 1], got {self.alpha!r}")


@dataclass
class LearnerFragment:
    """One fragment of a learner.

    Attributes:
        version: The version from which the progress is measured.
        seq: Reports made so far; the last one has this number.
        is_under_way: A report is made, and no commit has answered yet.
        is_called: The syncer waits for a report, and none was made yet.
    """

    pieces: list[WorkerPiece]
    version: int = 0
    seq: int = 0
    is_under_way: bool = False
    is_called: bool = False
    steps: Ledger = field(default_factory=Ledger)
    tokens: Ledger = field(default_factory=Ledger)

    @property
    def is_busy(self) -> bool:
        """A report is under way, or called for while there is progress to report."""
        return self.is_under_way or (self.is_called and self.steps.kept > 0)

    @property
    def ledgers(self) -> tuple[Ledger, Ledger]:
        return self.steps, self.tokens


class Learner:
    """The fragments of a learner.

    Args:
        name: Another name for each learner.
        fragments: The tensors of each fragment, with the shared model's first values.
        pieces: The pieces of each fragment, as the syncer has them.
        wire: Format of the payloads.
        receipt: What happens to the own progress when a commit arrives.
        error_feedback: Add the rounding errors of a merged report to the next one.
        is_stochastic, seed: Stochastic rounding, and its seed.
        impl: Force an implementation of the operators.

    Attributes:
        num_steps: Inner steps taken.
    """

    def __init__(
        self,
        name: str,
        fragments: Sequence[Sequence[Tensor]],
        pieces: Sequence[Sequence[Piece]],
        *,
        wire: WireFormat,
        receipt: Receipt,
        error_feedback: bool = False,
        is_stochastic: bool = False,
        seed: int = 0,
        impl: str = "",
    ) -> None:
        self.receipt, self.impl = receipt, ops.resolve_impl(impl)
        self.fragments = [
            LearnerFragment(
                [
                    WorkerPiece(
                        [tensors[i] for i in p.indices], flatten(tensors, p), wire, error_feedback
                    )
                    for p in each
                ]
            )
            for tensors, each in zip(fragments, pieces, strict=True)
        ]
        # Every piece draws its own random numbers: pieces count through all fragments.
        self._first = list(accumulate(map(len, pieces), initial=0))
        self.num_steps = 0
        self._is_stochastic, self._seed = is_stochastic, seed
        self.rename(name)

    def rename(self, name: str) -> None:
        """Set the name, from which the random numbers of rounding are made."""
        self.name = name
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        self._number = int.from_bytes(digest, "little")

    def stepped(self, tokens: int) -> None:
        """Note an inner step on ``tokens`` tokens."""
        self.num_steps += 1
        for part in self.fragments:
            part.steps.learn(1)
            part.tokens.learn(tokens)

    def call(self, index: int, version: int) -> None:
        """Note that the syncer wants a report; ``reports`` makes it."""
        part = self.fragments[index]
        part.is_called = version == part.version and not part.is_under_way

    def progress(self) -> list[int]:
        """Return for each fragment the version from which progress is not merged; -1 for none."""
        return [
            part.version if part.steps.kept or part.steps.under_way else -1
            for part in self.fragments
        ]

    def reports(self) -> list[tuple[int, Report, list[Tensor]]]:
        """Make the reports that are called for, if there is progress to report.

        Returns:
            The fragment, the report, and copies of the payloads of its pieces.

        Raises:
            ValueError: If the progress is not finite. Then there is no report, and all calls stay.
        """
        made: list[tuple[int, Report, list[Tensor]]] = []
        for index, part in enumerate(self.fragments):
            if not part.is_called or not part.steps.kept:
                continue
            try:
                report = self._report(index, part)
            except ValueError:
                for other, _, _ in made:
                    self.withdraw(other)
                    self.fragments[other].is_called = True
                raise
            made.append((index, report, [p.payload.clone() for p in part.pieces]))
        return made

    def _report(self, index: int, part: LearnerFragment) -> Report:
        part.seq += 1
        for offset, piece in enumerate(part.pieces):
            key = rng_key(
                self._seed, self._number, STAGE_ENCODE, part.seq, self._first[index] + offset
            )
            if not piece.encode(key, self._is_stochastic, self.impl):
                raise ValueError(
                    f"learner {self.name!r} cannot report on fragment {index}: a value is not "
                    "finite, or larger than the wire takes"
                )
        report = Report(self.name, part.seq, part.version, part.steps.kept, part.tokens.kept)
        part.is_called, part.is_under_way = False, True
        for ledger in part.ledgers:
            ledger.send()
        return report

    def withdraw(self, index: int) -> None:
        """Note that the report under way on a fragment will not be merged: it was refused or lost.

        The progress stays in the parameters, and the next report holds it.
        """
        part = self.fragments[index]
        if part.is_under_way:
            part.is_under_way = False
            for ledger in part.ledgers:
                ledger.give_back()

    def receive(self, commit: Commit, *, may_skip: bool = False) -> None:
        """Take a commit: the parameters change as the receipt says.

        Args:
            may_skip: The commit may be later than the next one. ``merged`` names the report under
                way if any of the commits merged it.

        Raises:
            ValueError: If the commit does not follow the learner's version.
        """
        part = self.fragments[commit.fragment]
        is_next = commit.version == part.version + 1
        if not is_next and not (may_skip and commit.version > part.version):
            raise ValueError(
                f"learner {self.name!r} has version {part.version} of fragment {commit.fragment} "
                f"and got version {commit.version}, not the next one"
            )
        is_merged = part.is_under_way and commit.merged.get(self.name) == part.seq
        for ledger in part.ledgers:
            ledger.apply() if is_merged else ledger.give_back()
        for piece, values in zip(part.pieces, commit.values, strict=True):
            self._write(piece, values, is_merged, part.steps.kept > 0)
            piece.base.copy_(values)
            if is_merged:
                piece.residuals.turn(0)
        part.version, part.is_under_way, part.is_called = commit.version, False, False
        if self.receipt.mode == "overwrite":
            for ledger in part.ledgers:
                ledger.lose()

    def _write(self, piece: WorkerPiece, values: Tensor, is_merged: bool, has_more: bool) -> None:
        """Set the parameters of a piece; ``has_more``: there is progress beside the merged one."""
        alpha = self.receipt.alpha if self.receipt.mode == "blend" else 0.0
        if self.receipt.mode == "carry" and has_more:
            carried = piece.values()
            carried -= piece.snapshot(self.impl) if is_merged else piece.held(piece.base)
            values = carried.add_(piece.held(values))
        ops.merge(values, piece.tensors, alpha, impl=self.impl)

    def restart(self, versions: Sequence[int], values: Sequence[Sequence[Tensor]]) -> None:
        """Take the whole shared model after a failure; what was not applied is lost.

        Args:
            versions: The version of each fragment.
            values: fp32 values of each fragment's pieces.
        """
        for index, (version, each) in enumerate(zip(versions, values, strict=True)):
            self.reset(index, version, each)

    def reset(self, index: int, version: int, values: Sequence[Tensor]) -> None:
        """Take the shared values of one fragment; what was not applied is lost.

        Args:
            values: fp32 [num_elements] of each piece.
        """
        part = self.fragments[index]
        for ledger in part.ledgers:
            ledger.give_back()
            ledger.lose()
        for piece, flat in zip(part.pieces, values, strict=True):
            piece.base.copy_(flat)
            ops.merge(flat, piece.tensors, impl=self.impl)
            for residual in (piece.residuals.value, piece.residuals.new):
                if residual is not None:
                    residual.zero_()
        part.version, part.is_under_way, part.is_called = version, False, False
