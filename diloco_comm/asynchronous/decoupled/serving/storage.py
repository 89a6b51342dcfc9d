"""A syncer's files: a snapshot, and a journal that is the tape of the merges since the snapshot."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ....methods.outer import OuterOptimizer
from ....ops.digests import digest_of
from ...server.storage.keeper import Keeper
from ..fragment_round import Merge, Report
from ..settings import DecoupledSettings
from ..syncer import Commit
from .model import ServedModel

logger = logging.getLogger(__name__)

# The format of snapshot and tape. Raise the number when a record has other fields, or when a merge
# or a digest gives other bits for the same reports.
FORMAT = 2


@dataclass
class Found:
    """A model from the disk, with the hash of the learners' model and the number of the run.

    Attributes:
        unexchanged: See ``Host``; None in snapshots of versions that did not keep them.
    """

    model: ServedModel
    layout: int
    run: int
    unexchanged: list[int] | None


class CommitStorage:
    """Write merges to the disk before learners get them, and restore them.

    Args:
        folder: Folder of the snapshot and the journal.
        every: Merges between two snapshots.
        keeps_tape: Keep the journals from before the newest snapshot, and the first snapshot.
        drops_tape: Allow the next snapshot to remove a tape that an earlier syncer has kept.
    """

    def __init__(
        self, folder: Path, every: int, *, keeps_tape: bool = False, drops_tape: bool = False
    ) -> None:
        self.folder, self.every = folder, every
        self.keeps_tape, self.drops_tape = keeps_tape, drops_tape
        self._keeper: Keeper | None = None

    @property
    def keeper(self) -> Keeper:
        assert self._keeper is not None
        return self._keeper

    def open(self, settings: DecoupledSettings, outer: OuterOptimizer, impl: str) -> Found | None:
        """Lock the folder, and return the model that the folder holds, or None for none.

        Raises:
            OSError: If another server has the folder, or the folder cannot be written.
            ValueError: If the folder's model has other settings, or the folder has a tape that is
                neither kept nor dropped.
        """
        self._keeper = Keeper(self.folder, self.every, waits=True, keeps_journals=self.keeps_tape)
        if not self.keeper.exists:
            return None
        try:
            return self._restore(settings, outer, impl)
        except BaseException:
            self.keeper.release()
            raise

    def _restore(self, settings: DecoupledSettings, outer: OuterOptimizer, impl: str) -> Found:
        if self.keeper.has_first and not self.keeps_tape and not self.drops_tape:
            raise ValueError(
                f"{self.folder} has a tape of the run, and the next snapshot would remove the "
                "tape: give keep_tape to go on with the tape, or drop_tape to remove the tape"
            )
        models: list[ServedModel] = []

        def make(header: dict[str, Any]) -> dict[str, Tensor]:
            check_header(header, settings, outer)
            models.append(ServedModel.from_header(header, settings, outer, impl))
            return models[0].tensors()

        header, _ = self.keeper.load(make)
        model = models[0]
        model.loaded(header)
        self._begin_tape(model.num_commits)
        for record, body in self.keeper.replay(model.num_commits):
            repeat(model, record, body)
        return Found(model, header["layout"], header["run"], header.get("unexchanged"))

    def _begin_tape(self, version: int) -> None:
        """Log where a tape ends, or begins later than the run."""
        if self.keeper.has_first and self.drops_tape:
            logger.warning("the next snapshot removes the tape in %s (drop_tape)", self.folder)
        elif self.keeps_tape and not self.keeper.has_first:
            logger.warning(
                "%s has no tape of the merges before the snapshot, since the server ran without "
                "--keep-tape: the tape begins after merge %d",
                self.folder,
                version,
            )
            self.keeper.begin_tape()

    @property
    def may_begin(self) -> bool:
        """There is a snapshot, without which a journal is of no use."""
        return self.keeper.saved_version >= 0

    def write(
        self, commit: Commit, payloads: Sequence[Sequence[Tensor]], model: ServedModel
    ) -> bool:
        """Write a merge to the disk (fsync); False if the disk takes it only later.

        A merge that is on the disk already, and not published, is not written again.
        """
        if self.keeper.kept_version > sum(each.version for each in model.published):
            return True
        if not self.may_begin or not self.keeper.may_write:
            return False
        record = record_of(commit, payloads, model)
        flat = [payload for each in payloads for payload in each]
        return self.keeper.record(record, flat, self.keeper.kept_version + 1)

    def is_due(self, version: int) -> bool:
        """Whether a snapshot, or another attempt at one, is due."""
        return self.keeper.is_due(version)

    def save(
        self, model: ServedModel, layout: int, run: int, unexchanged: list[int] | None = None
    ) -> None:
        """Write a snapshot and begin a new journal, if the disk takes both."""
        header = {
            "format": FORMAT,
            "settings": model.settings.to_json(),
            "outer": model.syncer.fragments[0].outer.config(),
            "layout": layout,
            "run": run,
            "unexchanged": unexchanged,
            **model.header(),
        }
        self.keeper.save(model.num_commits, header, model.tensors())

    def close(self, version: int) -> None:
        """Unlock the folder.

        Raises:
            OSError: If merges are not on the disk.
        """
        self.keeper.close(version)


def check_header(
    header: dict[str, Any], settings: DecoupledSettings, outer: OuterOptimizer
) -> None:
    """Raise ValueError unless a snapshot goes together with the settings."""
    if "settings" not in header:
        raise ValueError("the snapshot is one of asynchronous training, not of decoupled training")
    check_format(header)
    difference = settings.difference(DecoupledSettings.from_json(header["settings"]))
    if difference:
        raise ValueError(f"the snapshot was made with {difference}")
    if header["outer"] != outer.config():
        raise ValueError(
            f"the snapshot was made with the outer optimizer {header['outer']}, this one is "
            f"{outer.config()}"
        )


def check_format(header: dict[str, Any]) -> None:
    """Raise ValueError if the merges after a snapshot would not give the same bits here."""
    found = header.get("format", 1)
    if found != FORMAT:
        raise ValueError(
            f"the snapshot and the tape have format {found}, and this version of diloco_comm reads "
            f"format {FORMAT}: use the version that wrote them"
        )


def digest(tensors: Sequence[Tensor]) -> str:
    """Return the digest of the bytes of tensors, in hexadecimal digits; at the speed of memory."""
    return f"{digest_of(tensors):016x}"


def record_of(
    commit: Commit, payloads: Sequence[Sequence[Tensor]], model: ServedModel
) -> dict[str, Any]:
    """Return what the journal says of a merge beside the payloads, as JSON types."""
    return {
        "fragment": commit.fragment,
        "version": commit.version,
        "reports": [[r.learner, r.seq, r.base, r.steps, r.tokens] for r in commit.merge.reports],
        "weights": list(commit.merge.weights),
        "factors": commit.factors,
        "payloads": [digest(each) for each in payloads],
        "values": digest(commit.values),
        "outcome": {"refusal": ""},
    }


def repeat(model: ServedModel, record: dict[str, Any], body: Any) -> None:
    """Take the merge of a record once more, and publish it.

    Raises:
        ValueError: If the merge or its payloads differ from the record's.
    """
    p, version = record["fragment"], record["version"]
    fragment, where = model.syncer.fragments[p], f"merge {version} of fragment {p}"
    reports = tuple(Report(*row) for row in record["reports"])
    sizes = [layout.payload_bytes for layout in model.reports(p)]
    parts = body.split([size for _ in reports for size in sizes])
    payloads = [
        [part[: part.nbytes] for part in parts[i * len(sizes) : (i + 1) * len(sizes)]]
        for i in range(len(reports))
    ]
    if [digest(each) for each in payloads] != record["payloads"]:
        raise ValueError(f"the payloads of {where} are not those that were merged")
    if fragment.num_merges + 1 != version:
        raise ValueError(f"{where} does not follow merge {fragment.num_merges}")
    factors = fragment.merge(payloads, record["weights"])
    values = fragment.copy_values()
    if factors != record["factors"] or digest(values) != record["values"]:
        raise ValueError(f"{where} gives other bits than the merge on the tape")
    model.syncer.rounds[p].version = version
    merged = {report.learner: report.seq for report in reports}
    merge = Merge(version - 1, reports, tuple(record["weights"]))
    model.publish(Commit(p, version, merged, values, merge, factors))
