"""Repeat the merges of a run from its tape: the journals in a syncer's snapshot folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...methods.outer import SGD, HeavyBall, Nesterov, OuterOptimizer
from ..server.storage.snapshots import newest_journal, read_journal, read_snapshot, restoring
from .serving.model import ServedModel
from .serving.storage import check_format, check_header, repeat
from .settings import DecoupledSettings

_OUTERS: dict[str, Callable[..., OuterOptimizer]] = {
    "SGD": SGD,
    "HeavyBall": HeavyBall,
    "Nesterov": Nesterov,
}


@dataclass(frozen=True)
class Replayed:
    """What a replay has repeated.

    Attributes:
        first, last: Merges in the snapshot that the replay began with, and after the replay.
        reports: Reports that were merged again.
        learners: Names of the learners of these reports, in order.
        versions: Version of each fragment after the replay.
        is_compared: The result equals the folder's newest snapshot to the bit; None if the tape
            does not begin before the newest snapshot.
    """

    first: int
    last: int
    reports: int
    learners: tuple[str, ...]
    versions: tuple[int, ...]
    is_compared: bool | None


OnMerge = Callable[[dict[str, Any], ServedModel], None]


def replay(folder: Path, on_merge: OnMerge = lambda record, model: None) -> Replayed:
    """Repeat the merges on a tape, and compare each with the tape to the bit.

    The tape begins with the folder's first snapshot if the syncer kept it (``keep_tape``), else
    with the newest one. The folder is not changed; no syncer may be running in it.

    Args:
        folder: The syncer's snapshot folder.
        on_merge: Called after each merge with the tape's record and the model.

    Raises:
        ValueError: If there is no tape, the tape has another format, or a merge gives other bits.
        DamagedLog: If a file is damaged.
        OSError: If the folder cannot be read.
    """
    newest, first = folder / "snapshot", folder / "first"
    if not os.path.lexists(newest):
        raise ValueError(f"{folder} has no snapshot of a syncer")
    begin = first if os.path.lexists(first) else newest
    model, run = _load(begin)
    number = began = model.num_commits
    reports, is_same = 0, None
    learners: set[str] = set()
    wanted: ServedModel | None = None
    if begin == first:
        wanted, its_run = _load(newest)
        if run != its_run or model.settings.difference(wanted.settings):
            raise ValueError(f"{first} and {newest} are of two runs: put back the files of one run")
    while True:
        if wanted is not None and number == wanted.num_commits:
            is_same = _is_equal(model, wanted)
        path, before = folder / f"journal-{number}", number
        is_last = number >= newest_journal(folder)
        for record, body in read_journal(path, may_be_torn=is_last):
            with restoring(path):
                repeat(model, record, body)
            on_merge(record, model)
            reports += len(record["reports"])
            learners |= {row[0] for row in record["reports"]}
            number += 1
        if number == before:
            break
    if wanted is not None and is_same is None:
        raise ValueError(
            f"the journals in {folder} end with merge {number}, before the newest snapshot, which "
            f"has {wanted.num_commits}: a journal is missing"
        )
    if is_same is False:
        raise ValueError(f"the merges on the tape give other bits than {newest}")
    versions = tuple(each.version for each in model.published)
    return Replayed(began, number, reports, tuple(sorted(learners)), versions, is_same)


def _load(path: Path) -> tuple[ServedModel, list[Any]]:
    """Return the model of a snapshot, and what all snapshots of its run have in common."""
    models: list[ServedModel] = []

    def make(header: dict[str, Any]) -> dict[str, Tensor]:
        if "settings" not in header:
            raise ValueError(f"{path} is a snapshot of asynchronous training: it has no tape")
        check_format(header)
        settings = DecoupledSettings.from_json(header["settings"])
        numbers = dict(header["outer"])
        outer = _OUTERS[numbers.pop("name")](**numbers)
        check_header(header, settings, outer)
        models.append(ServedModel.from_header(header, settings, outer))
        return models[0].tensors()

    with restoring(path):
        header, _ = read_snapshot(path, make)
        models[0].loaded(header)
        return models[0], [header["run"], header["layout"], header["outer"]]


def _is_equal(a: ServedModel, b: ServedModel) -> bool:
    pairs = zip(a.tensors().values(), b.tensors().values(), strict=True)
    return a.header() == b.header() and all(bool((x == y).all()) for x, y in pairs)
