"""Falsified tapes: every field of a record, every kind of byte, and files that are missing.

Each falsified file has right checksums and a right chain of digests: it is written by the log.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import run_cli
from log_files import Row, at, leaves, others, put, read_rows, write_rows

from diloco_comm import Nesterov
from diloco_comm.asynchronous.decoupled.learner import Learner, Receipt
from diloco_comm.asynchronous.decoupled.merges import pieces_of
from diloco_comm.asynchronous.decoupled.model import ServedModel
from diloco_comm.asynchronous.decoupled.settings import MAY_CHANGE, DecoupledSettings
from diloco_comm.asynchronous.decoupled.state import SyncerState
from diloco_comm.asynchronous.decoupled.syncer import Commit
from diloco_comm.asynchronous.decoupled.tape import replay
from diloco_comm.asynchronous.keeper import Keeper
from diloco_comm.base.log import DamagedLog

SHAPES = [[(32, 33), (5,)], [(33, 32)]]
# The learners that report, merge by merge; the last merges come after the newest snapshot.
REPORTERS = ["ab", "c", "abc", "a", "bc", "ac", "b", "ab", "c", "ca"]


def play(folder: Path, merge: str) -> None:
    """Merge the reports of real learners, with a snapshot every four merges, and be killed."""
    torch.manual_seed(5)
    settings = DecoupledSettings(
        fragments=2, sync_every=1, merge=merge, wire="int4", wire_down="int4", receipt="carry"
    )
    state = SyncerState(
        settings, Nesterov(0.6, 0.85),
        open_files=partial(Keeper, folder, 4, waits=True, keeps_journals=True),
        model_sizes=6.0, impl="",
    )  # fmt: skip
    state.begin()
    pieces = [pieces_of(shapes, merge) for shapes in SHAPES]
    starts = [[torch.randn(shape) for shape in shapes] for shapes in SHAPES]
    flats = [
        [torch.cat([tensors[i].flatten() for i in piece.indices]) for piece in each]
        for tensors, each in zip(starts, pieces, strict=True)
    ]
    state.layout, state.run = 7, 8
    state._take_model(ServedModel(pieces, flats, settings, state.outer, 2))
    state.save()
    assert state.model is not None
    learners = {
        name: Learner(
            name, [[x.clone() for x in each] for each in starts], pieces,
            wire=settings.up, receipt=Receipt(mode="carry"),
        )
        for name in "abc"
    }  # fmt: skip
    for name in learners:
        state.model.syncer.join(name)
    for number, reporters in enumerate(REPORTERS):
        exchange(state, learners, number % 2, reporters)
        state.save_if_due()
    assert state.keeper is not None
    state.keeper.release()


def exchange(
    state: SyncerState, learners: dict[str, Learner], fragment: int, reporters: str
) -> None:
    """Let learners take some steps, and merge the reports of some of them."""
    assert state.model is not None
    syncer = state.model.syncer
    for place, (name, learner) in enumerate(learners.items()):
        for _ in range(1 + place):
            for part in learner.fragments:
                for tensor in (t for piece in part.pieces for t in piece.tensors):
                    tensor -= 0.1 * torch.randn(tensor.shape)
            learner.stepped(10 + 7 * place)
        syncer.stepped(name, learner.num_steps, 1.0)
    before = syncer.rounds[fragment].version
    if not syncer.rounds[fragment].is_open:
        state.advance(0.0)
    for name in reporters:
        learner = learners[name]
        learner.call(fragment, before)
        for p, report, payloads in learner.reports():
            assert state.take_report(p, report, payloads, 0.0) == ""
    state.advance(1.0)
    published = state.model.published[fragment]
    assert published.version == before + 1
    for learner in learners.values():
        learner.receive(
            Commit(fragment, published.version, published.merged, published.values, None, [])  # type: ignore[arg-type]
        )


@pytest.fixture(scope="module", params=["rda", "mean"])
def tape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tape") / request.param
    play(folder, request.param)
    done = replay(folder)
    assert (done.first, done.last, done.is_compared) == (0, len(REPORTERS), True)
    return folder


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)


def copied(tape: Path, folder: Path) -> Path:
    shutil.copytree(tape, folder, copy_function=os.link)
    return folder


def refusal(folder: Path) -> str:
    """Return the sentence with which a replay refuses a tape."""
    with pytest.raises((ValueError, DamagedLog)) as caught:
        replay(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(tape: Path, place: Path, change: Callable[[Path], None]) -> str:
    """Return the sentence with which a replay refuses a changed copy of the tape."""
    folder = copied(tape, place / "changed")
    change(folder)
    return refusal(folder)


def with_record(journal: str, number: int, make: Callable[[Row], Row]) -> Callable[[Path], None]:
    """Return a change of one record of a journal, whose checksums and digests are made anew."""

    def change(folder: Path) -> None:
        rows = read_rows(folder / journal)
        rows[number] = make(rows[number])
        write_rows(folder / journal, rows)

    return change


# A record in the middle of the run, and the last one, which no snapshot has counted.
PLACES = [("journal-0", 2), ("journal-8", 1)]


@pytest.mark.parametrize(("journal", "number"), PLACES)
def test_every_falsified_field_is_found(
    tape: Path, tmp_path: Path, journal: str, number: int
) -> None:
    folder = copied(tape, tmp_path / "s")
    if journal == PLACES[1][0]:
        # The newest snapshot begins the tape, and no later one counts what is in the journal.
        (folder / "first").unlink()
    rows = read_rows(tape / journal)
    head, body = rows[number]
    heads = [put(head, path, x) for path in leaves(head) for x in others(at(head, path))]
    heads += [{k: v for k, v in head.items() if k != name} for name in head]
    heads += [put(head, (name,), value) for name in head for value in (None, [], {}, 1e999)]
    heads += [{**head, "more": 1}]
    heads += [[], 3, b"{", b"[" * 100_000]
    assert len(heads) > 90
    for each in heads:
        if each != head:
            write_rows(folder / journal, [*rows[:number], (each, body), *rows[number + 1 :]])
            refusal(folder)


def doubled_tokens(head: dict[str, Any], body: bytes) -> Row:
    rows = [[*row[:4], 2 * row[4]] for row in head["reports"]]
    return {**head, "reports": rows}, body


def swapped_learners(head: dict[str, Any], body: bytes) -> Row:
    names = [row[0] for row in head["reports"]][::-1]
    rows = [[n, *row[1:]] for n, row in zip(names, head["reports"], strict=True)]
    return {**head, "reports": rows}, body


def reversed_reports(head: dict[str, Any], body: bytes) -> Row:
    size = len(body) // len(head["reports"])
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    turned = {name: head[name][::-1] for name in ("reports", "weights", "payloads")}
    return {**head, **turned, "factors": [x[::-1] for x in head["factors"]]}, b"".join(parts[::-1])


def one_report_less(head: dict[str, Any], body: bytes) -> Row:
    size = len(body) // len(head["reports"])
    left = {name: head[name][1:] for name in ("reports", "payloads")}
    return {**head, **left, "weights": [1.0], "factors": [[1.0] for _ in head["factors"]]}, body[
        size:
    ]


FALSIFIED: dict[str, tuple[Callable[[dict[str, Any], bytes], Row], str]] = {
    "doubled tokens": (doubled_tokens, "was changed, or does not follow"),
    "swapped learners": (swapped_learners, "in the order of their names"),
    "reversed reports": (reversed_reports, "in the order of their names"),
    "a report less": (one_report_less, ""),
    "tokens": (
        lambda h, b: (put(h, ("reports", 0, 4), 999), b),
        "the weights of merge .* do not follow from the tokens and steps",
    ),
    "base": (
        lambda h, b: (put(h, ("reports", 0, 2), 99), b),
        "the report of learner 'a' starts from version 99, not from",
    ),
    "merged twice": (
        lambda h, b: (put(h, ("reports", 0, 1), 1), b),
        "the report of learner 'a' has the number 1, and . is merged already",
    ),
    "a payload": (lambda h, b: (h, b[:9] + bytes([b[9] ^ 1]) + b[10:]), "are not those that"),
    "a byte less": (lambda h, b: (h, b[:-1]), "bytes of payloads on the tape, "),
    "bytes more": (lambda h, b: (h, b + b"0"), "bytes of payloads on the tape, "),
}


@pytest.mark.parametrize("name", FALSIFIED)
@pytest.mark.parametrize(("journal", "number"), PLACES)
def test_a_falsified_record_is_named(
    tape: Path, tmp_path: Path, journal: str, number: int, name: str
) -> None:
    make, words = FALSIFIED[name]
    said = changed(tape, tmp_path, with_record(journal, number, lambda row: make(*row)))
    assert_said(words, said)


def assert_said(words: str, said: str) -> None:
    assert re.search(words, said), said


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def swapped(one: str, two: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / one).rename(folder / "kept")
        (folder / two).rename(folder / one)
        (folder / "kept").rename(folder / two)

    return change


def shortened(journal: str, drop: slice) -> Callable[[Path], None]:
    """Return a change that leaves out records, or repeats or moves them."""

    def change(folder: Path) -> None:
        write_rows(folder / journal, read_rows(folder / journal)[drop])

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("journal-0"), "a journal is missing"),
        (without("journal-4"), "a journal is missing"),
        (without("snapshot"), "has no snapshot"),
        (swapped("journal-0", "journal-4"), "does not follow merge"),
        (swapped("first", "snapshot"), "is missing|does not follow"),
        (shortened("journal-0", slice(0, 3)), "a journal is missing"),
        (shortened("journal-4", slice(1, None)), "does not follow"),
        (shortened("journal-0", slice(None, None, -1)), "does not follow"),
    ],
)
def test_a_missing_or_moved_file_is_found(
    tape: Path, tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    assert_said(words, changed(tape, tmp_path, change))


def test_a_cut_file_is_found(tape: Path, tmp_path: Path) -> None:
    """Cuts of a journal that a later one follows, and of the record of a snapshot."""
    folder = copied(tape, tmp_path / "s")
    for name in ("journal-0", "journal-4", "first", "snapshot"):
        data = (tape / name).read_bytes()
        last = [len(data) - 5] * name.startswith("journal")
        for size in [0, 30, *range(99, len(data) - 60, len(data) // 7), *last]:
            (folder / name).unlink()
            (folder / name).write_bytes(data[:size])
            refusal(folder)
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("name", ["first", "snapshot"])
def test_a_falsified_snapshot_is_found(tape: Path, tmp_path: Path, name: str) -> None:
    """Its bytes and its fields, but those that another start of the syncer may change."""
    head, body = read_rows(tape / name)[0]
    heads = [
        put(head, path, other)
        for path in leaves(head)
        for other in others(at(head, path))[:2]
        if path[:1] != ("settings",) or path[1] not in MAY_CHANGE
    ]
    bodies = [body[:i] + bytes([body[i] ^ 0x40]) + body[i + 1 :] for i in (3, len(body) - 1)]
    rows = [(each, body) for each in heads] + [(head, each) for each in bodies]
    folder = copied(tape, tmp_path / "s")
    for row in rows:
        write_rows(folder / name, [row])
        refusal(folder)


def test_the_command_says_it_in_one_sentence(tape: Path, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(tape, folder)
    with_record("journal-4", 1, lambda row: doubled_tokens(*row))(folder)
    ended = run_cli("replay", folder)
    assert ended.status == 1 and ended.out == ""
    assert ended.err.splitlines()[-1] == (
        "diloco-comm: the record of merge 3 of fragment 1 was changed, or does not follow the "
        "record before"
    )
