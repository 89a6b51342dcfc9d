"""A syncer's files: a snapshot, and a journal that is the tape of the merges since the snapshot.

``replay`` repeats the merges of a run from its tape.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from ...base.checks import logger_of
from ...methods.outer import OuterOptimizer, make_outer
from ...ops.digests import chained, each_digest
from ...ops.wire import Layout
from ..keeper import Keeper
from ..messages import MAX_NUMBER
from ..payloads import PayloadFile
from ..snapshots import newest_journal, read_journal, read_snapshot, restoring
from .merges import MERGES, normalised, report_weight
from .model import Published, ServedModel
from .settings import DecoupledSettings
from .syncer import MAX_REPORTS, Commit, Merge, Report

logger = logger_of(__name__)

# The format of snapshot and tape. Raise the number when a record has other fields, or when a merge
# or a digest gives other bits for the same reports.
FORMAT = 3

_CHANGED = "the record of {} was changed, or does not follow the record before"
_SAID = {
    "weights": "the weights of {} do not follow from the tokens and steps of its reports",
    "factors": "{} gives other bits than the merge on the tape",
    "values": "{} gives other bits than the merge on the tape",
}


def restore(
    keeper: Keeper,
    settings: DecoupledSettings,
    outer: OuterOptimizer,
    impl: str,
    *,
    drops_tape: bool,
) -> tuple[ServedModel, dict[str, Any]]:
    """Return the model in a syncer's folder, and the header of its snapshot.

    Args:
        drops_tape: Allow the next snapshot to remove a tape that an earlier syncer has kept.

    Raises:
        ValueError: If the folder's model has other settings, the folder has a tape that is neither
            kept nor dropped, or a file holds what no syncer writes.
    """
    if keeper.storage.has_first and not keeper.keeps_journals and not drops_tape:
        raise ValueError(
            f"{keeper.folder} has a tape of the run, and the next snapshot would remove the "
            "tape: give keep_tape to go on with the tape, or drop_tape to remove the tape"
        )
    models: list[ServedModel] = []

    def make(header: dict[str, Any]) -> dict[str, Tensor]:
        check_header(header, settings, outer)
        models.append(ServedModel.from_header(header, settings, outer, impl))
        return models[0].tensors()

    header, _ = keeper.storage.load(make)
    model = models[0]
    model.loaded(header)
    _begin_tape(keeper, model.num_commits, drops_tape=drops_tape)
    for record, body in keeper.replay(model.num_commits):
        repeat(model, record, body)
    return model, header


def _begin_tape(keeper: Keeper, version: int, *, drops_tape: bool) -> None:
    """Begin a tape if there is none; log that it lacks earlier merges, or will be removed."""
    if keeper.storage.has_first and drops_tape:
        logger.warning("the next snapshot removes the tape in %s (drop_tape)", keeper.folder)
    elif keeper.keeps_journals and not keeper.storage.has_first:
        logger.warning(
            "%s has no tape of the merges before the snapshot, since the server ran without "
            "--keep-tape: the tape begins after merge %d",
            keeper.folder,
            version,
        )
        keeper.storage.begin_tape()


def write(
    keeper: Keeper, commit: Commit, payloads: Sequence[Sequence[Tensor]], model: ServedModel
) -> bool:
    """Write a merge to the disk (fsync); False if the disk takes it only later.

    A merge that is on the disk already, and not published, is not written again.
    """
    if keeper.kept_version > sum(each.version for each in model.published):
        return True
    if keeper.saved_version < 0 or not keeper.may_write:
        return False
    record = record_of(commit, payloads, model)
    flat = [payload for each in payloads for payload in each]
    is_written = keeper.record(record, flat, keeper.kept_version + 1)
    if is_written:
        model.chain = record["chain"]
    return is_written


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
    if not _is_consistent(header, settings):
        raise ValueError(
            "the snapshot does not go together: its pieces, tensors, versions and counts belong to "
            "different models, or are no numbers"
        )


def _is_consistent(header: dict[str, Any], settings: DecoupledSettings) -> bool:
    """Whether a snapshot's header could be the header of any model."""
    pieces, versions, merged = header["pieces"], header["versions"], header["merged"]
    (index, count), total = settings.place, header["total"]
    sizes = [size for each in pieces for size, merge in each if merge in MERGES]
    numbers = [total, header["run"], *versions, *(n for each in merged for n in each.values())]
    numbers += [n for n in (header["layout"], *(header["unexchanged"] or ())) if n is not None]
    return (
        all(type(n) is int and 0 <= n < MAX_NUMBER for n in numbers)
        and len(versions) == len(merged) == len(pieces) == len(range(index, total, count))
        and [header["tensors"].get(f"{i}/values") for i in range(sum(map(len, pieces)))] == sizes
        and all(map(len, pieces))
        and type(header["chain"]) is str
    )


def check_format(header: dict[str, Any]) -> None:
    """Raise ValueError if the merges after a snapshot would not give the same bits here."""
    found = header.get("format", 1)
    if found != FORMAT:
        reader = "0.2 reads format 2, too" if found == 2 else "use the version that wrote them"
        raise ValueError(
            f"the snapshot and the tape have format {found}, and this version of diloco_comm reads "
            f"format {FORMAT}: {reader}"
        )


def digests(groups: Sequence[Sequence[Tensor]]) -> list[str]:
    """Return ``digest_of`` for each group of tensors, in hexadecimal digits, in one call."""
    found = iter(each_digest([tensor for group in groups for tensor in group]))
    return [f"{chained(islice(found, len(group)), len(group)):016x}" for group in groups]


def record_of(
    commit: Commit, payloads: Sequence[Sequence[Tensor]], model: ServedModel
) -> dict[str, Any]:
    """Return what the journal says of a merge beside the payloads, as JSON types.

    The field ``chain`` is a digest of all other fields, and of the chain of the merge before.
    """
    *of_payloads, of_values = digests([*payloads, commit.values])
    record = {
        "fragment": commit.fragment,
        "version": commit.version,
        "reports": [[r.learner, r.seq, r.base, r.steps, r.tokens] for r in commit.merge.reports],
        "weights": list(commit.merge.weights),
        "factors": commit.factors,
        "payloads": of_payloads,
        "values": of_values,
        "outcome": {"refusal": ""},
    }
    text = model.chain + json.dumps(record)
    return {**record, "chain": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def repeat(model: ServedModel, record: dict[str, Any], body: PayloadFile) -> None:
    """Take the merge of a record once more, and publish it.

    All fields of the record are computed anew from its reports and their payloads.

    Raises:
        ValueError: If a field has another value, or a report cannot have been merged.
    """
    p, reports = _merged(model, record)
    fragment, where = model.syncer.fragments[p], _place(record)
    payloads = _payloads(model.reports(p), len(reports), body, where)
    if digests(payloads) != record.get("payloads"):
        raise ValueError(f"the payloads of {where} are not those that were merged")
    weights = normalised([report_weight(each.tokens, each.steps) for each in reports])
    factors = fragment.merge(payloads, weights)
    values, merge = fragment.copy_values(), Merge(record["version"] - 1, reports, tuple(weights))
    merged = {report.learner: report.seq for report in reports}
    commit = Commit(p, record["version"], merged, values, merge, factors)
    _compare(model, record, record_of(commit, payloads, model), where)
    model.syncer.rounds[p].version = commit.version
    model.publish(commit)


def _place(record: dict[str, Any]) -> str:
    return f"merge {record['version']} of fragment {record['fragment']}"


def _merged(model: ServedModel, record: dict[str, Any]) -> tuple[int, tuple[Report, ...]]:
    """Return the fragment of a record and its reports, if a syncer could have merged them."""
    p, version, rows = record["fragment"], record["version"], record["reports"]
    types = [str, int, int, int, int]
    if (
        [type(p), type(version)] != [int, int]
        or not 0 <= p < len(model.pieces)
        or not all([type(each) for each in row] == types for row in rows)
    ):
        raise ValueError("a record of the tape does not say which reports it has merged")
    where, known = _place(record), model.published[p]
    if version != known.version + 1:
        raise ValueError(f"{where} does not follow merge {known.version}")
    reports = tuple(Report(*row) for row in rows)
    names = [report.learner for report in reports]
    if not names or names != sorted(set(names)) or len(names) > MAX_REPORTS:
        raise ValueError(
            f"{where} has reports of {names}: at least one is expected, at most {MAX_REPORTS}, of "
            "different learners in the order of their names"
        )
    for report in reports:
        _check_report(report, known, where)
    return p, reports


def _check_report(report: Report, known: Published, where: str) -> None:
    whose = f"{where}: the report of learner {report.learner!r}"
    if report.base != known.version:
        raise ValueError(f"{whose} starts from version {report.base}, not from {known.version}")
    last = known.merged.get(report.learner, 0)
    if report.seq <= last:
        raise ValueError(f"{whose} has the number {report.seq}, and {last} is merged already")
    if report.steps < 1 or report.tokens < 1:
        raise ValueError(f"{whose} has {report.steps} steps and {report.tokens} tokens")


def _payloads(
    layouts: Sequence[Layout], count: int, body: PayloadFile, where: str
) -> list[list[Tensor]]:
    """Return the payloads of each report."""
    sizes = [layout.payload_bytes for layout in layouts]
    if body.nbytes != count * sum(sizes):
        raise ValueError(
            f"{where} has {body.nbytes} bytes of payloads on the tape, {count} reports have "
            f"{count * sum(sizes)}"
        )
    parts = iter(body.split(count * sizes))
    return [[part[: part.nbytes] for part in islice(parts, len(sizes))] for _ in range(count)]


def _compare(
    model: ServedModel, record: dict[str, Any], wanted: dict[str, Any], where: str
) -> None:
    """Raise ValueError unless a record is the wanted one, and take over its chain."""
    if record.keys() != wanted.keys():
        raise ValueError(
            f"the record of {where} has the fields {', '.join(record)}, not {', '.join(wanted)}"
        )
    for name, value in wanted.items():
        if record[name] != value:
            raise ValueError(_SAID.get(name, _CHANGED).format(where))
    model.chain = wanted["chain"]


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
        outer = make_outer(header["outer"])
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
