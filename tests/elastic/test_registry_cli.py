"""``diloco-comm registry`` and ``diloco-comm members`` as a user calls them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cli_helpers import check_arguments, check_documented, check_misuse, help_examples, run_cli
from commands import CLI, serving_command
from registries import make_registry_keys, serving

from diloco_comm.elastic.registry import Registry, connect
from diloco_comm.group.beats import EVICT, TRAINING, Beat, Way, eviction_of, name_of
from diloco_comm.group.records import Attempt, Key, Record
from diloco_comm.group.state import Place
from diloco_comm_tools.registry.members import Silence

KEYS = tuple(Key(i, bytes([0xA0 + i]) * 16) for i in range(3))
NEWCOMER = Key(3, b"n" * 16)
VIEW = Record(
    7, b"p" * 16, b"t" * 16, b"f" * 16, Attempt(KEYS[0].nonce, 1), KEYS[:2], inner_step=400,
    left_out=(2,),
)  # fmt: skip


def beat_of(i: int, counter: int = 1, stage: str = "ready", entered: int = 0) -> Beat:
    ways = [Way(KEYS[i].nonce.hex(), f"10.0.0.{i}:{5 + w}", "", "").to_text() for w in range(2)]
    place = Place(KEYS[i], b"s" * 16, entered=entered, inner_step=409, cut=(KEYS[1].nonce,))
    return Beat(place, counter, stage, "evaluation" if entered else "", tuple(ways))


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving() as server:
        found = connect(server.address, run="r", timeout_s=20)
        found.address = server.address  # type: ignore[attr-defined]
        yield found
        found.close()


def members(registry: Registry, *arguments: object) -> tuple[object, ...]:
    return ("members", "--registry", registry.address, "--run", "r", "--timeout", 20, *arguments)  # type: ignore[attr-defined]


def test_a_registry_is_hosted_ended_and_found_again(tmp_path: Path) -> None:
    keys = make_registry_keys(tmp_path / "keys", "w1")
    command = [*CLI, "registry", "--listen", "127.0.0.1:0", "--journal", tmp_path / "j", "--json"]
    command += ["--keys", keys / "server.key_secret"]
    with serving_command(command, stderr=subprocess.PIPE) as (server, line):
        address = json.loads(line)["address"]
        check_documented(json.loads(line), "how-to/registry.md")
        one = connect(address, run="r", timeout_s=20, key=keys / "w1.key_secret")
        assert one.swap(b"", b"x")
        port = address.rpartition(":")[2]
        taken = run_cli("registry", "--listen", f"127.0.0.1:{port}")
        assert taken.status == 1 and f": cannot listen on 127.0.0.1:{port}: Addr" in taken.err
        taken = run_cli("registry", "--listen", "127.0.0.1:0", "--journal", tmp_path / "j")
        assert taken.status == 1 and "belongs to another server, process" in taken.err
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert "closed by SIGTERM" in server.stderr.read()
    journal = tmp_path / "j" / "journal"
    journal.write_bytes(b"?" + journal.read_bytes()[1:])
    ended = run_cli("registry", "--listen", "127.0.0.1:0", "--journal", tmp_path / "j")
    assert ended.status == 1
    assert re.fullmatch(f"diloco-comm: {journal} is damaged at byte 0.*\n", ended.err)


def test_a_damaged_journal_is_cut_off_by_hand(tmp_path: Path) -> None:
    folder, journal = tmp_path / "j", tmp_path / "j" / "journal"
    check_misuse(run_cli("registry", "--truncate"), "--truncate needs --journal")
    check_misuse(run_cli("registry", "--truncate", "--journal", folder), "the folder of a journal")
    assert not folder.exists()
    with serving(journal=folder) as server:
        registry = connect(server.address, run="r", timeout_s=20)
        for old, new in ((b"", b"1"), (b"1", b"2"), (b"2", b"3")):
            assert registry.swap(old, new)
    data = journal.read_bytes()
    place = data.index(b"r2")
    journal.write_bytes(damaged := data[:place] + b"?" + data[place + 1 :])
    refused = run_cli("registry", "--listen", "127.0.0.1:0", "--journal", folder)
    assert refused.status == 1 and "with 1 whole records behind the damage" in refused.err
    command = re.search("`diloco-comm (registry .* --truncate)`", refused.err)
    assert command is not None and journal.read_bytes() == damaged
    done = run_cli(*command[1].split())
    assert (done.status, done.err) == (0, "")
    assert re.fullmatch(f"{journal} is cut off at byte .* are kept in {journal}.cut-.*\n", done.out)
    again = run_cli(*command[1].split())
    assert (again.status, again.out) == (0, f"{journal} is not damaged: nothing was cut off\n")
    with serving(journal=folder) as server:
        assert connect(server.address, run="r").read() == b"1"
    journal.rename(tmp_path / "elsewhere")
    journal.symlink_to(tmp_path / "elsewhere")
    ended = run_cli("registry", "--listen", "127.0.0.1:0", "--journal", folder)
    sentence = "it is a symbolic link, which is not followed: put a regular file there, or none"
    assert ended.status == 1 and f"diloco-comm: {journal}: {sentence}\n" == ended.err


def test_misuse_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    for arguments, sentence in (
        (
            ("registry", "--listen", "0.0.0.0:29400"),
            "can be reached from other machines: give --keys",
        ),
        (("registry", "--listen", "0.0.0.0:29400"), "made by `diloco-comm keys make`"),
        (("registry", "--drop-after", "0"), ": --drop-after must be 1 to 2592000 seconds, got 0.0"),
        (("registry", "--keys", tmp_path), "holds no file NAME.key_secret"),
        (("registry", "--listen", "here"), "--listen must be host:port"),
        (("registry", "keygen"), "keygen"),
        (
            ("members", "--registry", "here", "--run", "r"),
            "--registry must be tcp://host:port",
        ),
        (
            ("members", "--registry", "tcp://127.0.0.1:1", "--run", "a b"),
            "--run must have 1 to 100",
        ),
        (("members", "--registry", "tcp://192.0.2.1:1", "--run", "r"), "give --key"),
        (
            ("members", "--registry", "tcp://127.0.0.1:1", "--run", "r", "--watch", "--json"),
            "--watch, --json and --evict exclude each other",
        ),
    ):
        check_misuse(run_cli(*arguments), sentence)


def test_members_shows_words_of_others_as_they_are(registry: Registry) -> None:
    way = Way("ab" * 16, "[fd00::1]:29700", "", "").to_text()
    beat = replace(beat_of(0), phase="[/] [red]\x1b[31m\ud800", ways=(way,))
    registry.beat(name_of(KEYS[0]), beat.to_bytes())
    # This name is of another process, and the next one has no name that fits.
    registry.beat(name_of(KEYS[1]), beat_of(2).to_bytes())
    registry.beat("anybody", beat_of(1).to_bytes())
    shown = run_cli(*members(registry))
    assert shown.status == 0, shown
    assert r"ready ([/] [red]\x1b[31m\ud800)" in shown.out and "[fd00::1]:29700" in shown.out
    assert "a1a1" not in shown.out and "a2a2" not in shown.out
    found = json.loads(run_cli(*members(registry, "--json")).out)
    assert [one["id"] for one in found["processes"]] == [0]


def test_members_lists_no_dead_process_as_unreachable(registry: Registry) -> None:
    assert registry.swap(b"", VIEW.to_bytes())
    place = replace(beat_of(0).place, cut=tuple([key.nonce for key in (*KEYS, NEWCOMER)]))
    registry.beat(name_of(KEYS[0]), replace(beat_of(0), place=place).to_bytes())
    registry.beat(name_of(KEYS[2]), beat_of(2, entered=6).to_bytes())
    newcomer = Beat(Place(NEWCOMER, b"s" * 16), 1)
    registry.beat(name_of(NEWCOMER), newcomer.to_bytes())
    found = json.loads(run_cli(*members(registry, "--json")).out)
    expected = [key.nonce.hex() for key in (*KEYS[:2], NEWCOMER)]
    assert found["processes"][0]["unreachable"] == expected


def test_members_are_shown(registry: Registry) -> None:
    empty = run_cli(*members(registry))
    assert empty.status == 0 and "no view has been formed yet" in empty.out
    assert json.loads(run_cli(*members(registry, "--json")).out)["view"] is None
    assert registry.swap(b"", VIEW.to_bytes())
    registry.beat(name_of(KEYS[2]), beat_of(2).to_bytes())
    registry.beat(name_of(KEYS[0]), beat_of(0, 5, TRAINING, 7).to_bytes())
    registry.beat("garbage", b"\xff{")
    shown = run_cli(*members(registry))
    headline = "view 7, inner step 400, replicas [2] left"
    assert headline in " ".join(shown.out.split())
    rows = [line for line in shown.out.splitlines() if re.search("a[012]a[012]", line)]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert [" ".join(cell.split()) for row in cells for cell in row[:5]] == [
        "0", "a0a0a0a0", "yes", "training (evaluation)", "7",
        "2", "a2a2a2a2", "no", "ready", "",
        "1", "a1a1a1a1", "yes", "no beat", "",
    ]  # fmt: skip
    found = json.loads(run_cli(*members(registry, "--json")).out)
    assert found["registry_id"] == registry.registry_id and found["is_durable"] is False
    assert found["view"] == {
        "number": 7,
        "inner_step": 400,
        "cause": "replicas [2] left",
        "joined": [],
        "left": [2],
        "evicted": [],
        "is_finished": False,
        "members": [{"id": key.number, "nonce": key.nonce.hex()} for key in KEYS[:2]],
    }
    processes = found["processes"]
    assert [(row["id"], row["is_member"]) for row in processes] == [(0, True), (2, False)]
    assert processes[0] == {
        "id": 0,
        "nonce": "a0" * 16,
        "address": "10.0.0.0:5",
        "workers": 2,
        "is_member": True,
        "stage": "training",
        "view": 7,
        "inner_step": 409,
        "phase": "evaluation",
        "is_leaving": False,
        "unreachable": ["a1" * 16],
        "counter": 5,
    }
    for keys in (found, found["view"], found["view"]["members"][0], processes[0]):
        check_documented(keys, "how-to/registry.md")


def test_a_member_is_evicted_by_a_beat(registry: Registry) -> None:
    none = run_cli(*members(registry, "--evict", 1))
    assert none.status == 1 and "run 'r' has no members: no view has been formed yet" in none.err
    assert registry.swap(b"", VIEW.to_bytes())
    registry.beat(name_of(KEYS[1]), beat_of(1, 5, TRAINING, 7).to_bytes())
    done = run_cli(*members(registry, "--evict", 1))
    assert (done.status, done.out) == (0, "replica 1 leaves at the next boundary of view 7\n")
    assert registry.beat("", b"")[eviction_of(KEYS[1])] == EVICT
    assert registry.read() == VIEW.to_bytes()
    assert "to leave: 1" in " ".join(run_cli(*members(registry)).out.split())
    found = json.loads(run_cli(*members(registry, "--json")).out)
    assert found["view"]["evicted"] == [1] and found["processes"][0]["is_leaving"]
    missing = run_cli(*members(registry, "--evict", 5))
    assert missing.status == 1 and "view 7 of run 'r' has the members [0, 1], and no 5" in (
        missing.err
    )
    # The next process of the replica has another name, and is not asked to leave.
    again = replace(VIEW, members=(KEYS[0], Key(1, b"n" * 16)))
    assert registry.swap(VIEW.to_bytes(), again.to_bytes())
    assert json.loads(run_cli(*members(registry, "--json")).out)["view"]["evicted"] == []


def test_a_record_of_another_program_is_a_sentence(registry: Registry) -> None:
    assert registry.swap(b"", b'{"version": 3}')
    ended = run_cli(*members(registry))
    assert (ended.status, ended.out) == (1, "")
    assert "the table holds no record of a group" in ended.err


def test_a_registry_that_is_not_there_is_a_sentence() -> None:
    arguments = ("--registry", "tcp://127.0.0.1:1", "--run", "r", "--timeout", "0.2")
    ended = run_cli("members", *arguments)
    assert (ended.status, ended.out) == (1, "")
    assert "Connection refused" in ended.err
    assert ended.err.count("\n") == 1


def test_silence_is_counted_by_the_own_clock() -> None:
    silence = Silence()

    def beats(*counters: int) -> list[Beat]:
        return [beat_of(i, counter) for i, counter in enumerate(counters)]

    one, two, _ = KEYS
    assert silence.after(beats(1), 100.0) == {one: 0.0}
    assert silence.after(beats(1, 9), 103.0) == {one: 3.0, two: 0.0}
    assert silence.after(beats(2, 9), 105.0) == {one: 0.0, two: 2.0}


@pytest.mark.parametrize("name", ["registry", "members", "store"])
def test_the_examples_of_the_help_are_right(name: str) -> None:
    lines = [line for lines in help_examples(name).values() for line in lines]
    assert len(lines) >= 2
    for line in lines:
        check_arguments(line.split()[1:], line)
