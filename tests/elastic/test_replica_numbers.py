"""The number of a replica: which one a process takes, and the folder that keeps the number."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_comm.elastic.driver import NumberChoice, lowest_free
from diloco_comm.elastic.state_folder import StateFolder
from diloco_comm.group.beats import GONE, READY, TRAINING, Beat
from diloco_comm.group.records import NO_HASH, NO_RECORD, Attempt, Key, Record
from diloco_comm.group.state import Place


def key(number: int, process: int) -> Key:
    return Key(number, bytes([process]) * 16)


def beat(one: Key, stage: str = READY, counter: int = 1) -> Beat:
    return Beat(Place(one, bytes(16)), counter, stage)


def record(*members: Key) -> Record:
    return Record(1, NO_HASH, bytes(16), NO_HASH, Attempt(bytes(16), 1), members)


OWN = key(0, 5)


@pytest.mark.parametrize(
    ("members", "others", "number"),
    [
        # Nobody has the number, or this process has it.
        ([], [], None),
        ([key(1, 1)], [beat(key(1, 1), TRAINING)], None),
        ([OWN, key(1, 1)], [beat(key(0, 1))], None),
        # A member has the number, also without a beat, or another process that takes part.
        ([key(0, 1), key(1, 2)], [], 2),
        ([], [beat(key(0, 9), TRAINING)], 1),
        ([key(2, 2)], [beat(key(0, 9), TRAINING), beat(key(1, 3))], 3),
        # The newcomer with the lower nonce keeps the number.
        ([], [beat(key(0, 9))], None),
        ([], [beat(key(0, 1))], 1),
    ],
)
def test_a_number_that_is_taken_gives_way_to_the_lowest_free_one(
    members: list[Key], others: list[Beat], number: int | None
) -> None:
    present = record(*members) if members else None
    assert NumberChoice(None).instead_of(OWN, [beat(OWN), *others], present) == number


def test_the_number_of_the_process_before_is_free_unless_that_process_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = key(0, 1)
    choice, present = NumberChoice(before), record(before, key(1, 2))
    last = beat(before, TRAINING, 7)
    for _ in range(2):
        assert choice.instead_of(OWN, [last], present) is None
    assert choice.instead_of(OWN, [replace(last, stage=GONE, counter=8)], present) is None
    assert choice.instead_of(OWN, [last], present) is None and not caplog.text
    # A second beat: the folder is a copy, and the number belongs to the other process.
    assert choice.instead_of(OWN, [replace(last, counter=8)], present) == 2
    assert "replica 0 still runs elsewhere" in caplog.text


def test_the_lowest_free_number() -> None:
    assert [lowest_free(set(taken)) for taken in ((), (0,), (1, 2), (0, 1, 3))] == [0, 1, 0, 2]


def test_a_state_folder_keeps_the_last_process(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    assert folder.last_process("r") is None and folder.owner() is None
    assert (folder.registry_id, folder.last_view) == ("", NO_RECORD)
    folder.remember("r", key(3, 0xAB), registry_id="cd" * 16, view=7)
    assert json.loads(folder.file.read_text()) == {
        "run": "r",
        "replica": 3,
        "nonce": "ab" * 16,
        "has_left": False,
        "registry": "cd" * 16,
        "view": 7,
    }
    again = StateFolder(folder.path)
    assert again.last_process("r") == key(3, 0xAB) and again.owner() == "r"
    assert (again.registry_id, again.last_view) == ("cd" * 16, 7)
    with pytest.raises(ValueError, match="belongs to a replica of run 'r', and this replica is of"):
        again.last_process("other")
    again.note_leaving()
    assert folder.has_left
    folder.ask_to_leave()
    assert again.is_asked_to_leave
    again.prepare()
    assert not (folder.has_left or folder.is_asked_to_leave)
    folder.note_end()
    assert (again.registry_id, again.last_view) == ("", NO_RECORD)
    assert again.last_process("r") == key(3, 0xAB)


SOUND = {"run": "r", "replica": 3, "nonce": "ab" * 16, "registry": "", "view": -1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 9999,
        "[]",
        json.dumps({**SOUND, "nonce": "nonce"}),
        json.dumps({**SOUND, "nonce": 3}),
        json.dumps({**SOUND, "replica": -1}),
        json.dumps({**SOUND, "replica": True}),
        json.dumps({**SOUND, "view": "7"}),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    folder = StateFolder(tmp_path)
    folder.file.write_text(json.dumps(SOUND))
    assert folder.last_process("r") == key(3, 0xAB) and folder.last_view == NO_RECORD
    folder.file.write_text(text)
    with pytest.raises(ValueError, match=r"replica.json is damaged, or of a version before 0.2"):
        folder.last_process("r")
