"""``diloco-comm keys`` as a user calls it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from cli_helpers import check_misuse, help_examples, run_cli

from diloco_comm.base.service.keys import Keys, make_pairs


def printed(*arguments: object) -> list[str]:
    ended = run_cli("keys", *arguments)
    assert (ended.status, ended.err) == (0, ""), ended
    return ended.out.splitlines()


def test_pairs_are_made_allowed_shown_and_removed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    made = [f"{keys}/paris.key", f"{keys}/paris.key_secret"]
    assert printed("make", keys, "paris", "--serve") == made
    assert printed("list", keys)[-1] == "nobody is allowed"
    make_pairs(tmp_path, ["tokyo"], serves=True)
    assert printed("allow", keys, tmp_path / "tokyo.key") == [f"{keys}/allowed/tokyo.key"]
    shown = json.loads(printed("list", keys, "--json")[0])
    paris, tokyo = Keys.read(keys / "paris.key"), Keys.read(tmp_path / "tokyo.key")
    assert shown == {
        "schema": 1,
        "own": [{"name": "paris", "curve": paris.curve, "link": paris.link, "secret": True}],
        "allowed": [{"name": "tokyo", "curve": tokyo.curve, "link": tokyo.link, "replicas": None}],
        "readers": [],
    }
    lines = printed("list", keys)
    assert lines == [
        *("paris: own pair", f"  curve {paris.curve}", f"  link  {paris.link}"),
        *("tokyo: allowed", f"  curve {tokyo.curve}", f"  link  {tokyo.link}"),
    ]
    hidden = Keys.read(keys / "paris.key_secret")
    for secret in (hidden.curve_secret, hidden.link_secret):
        assert secret and secret not in "".join(lines) and secret not in json.dumps(shown)
    assert printed("remove", keys, "tokyo") == [f"{keys}/allowed/tokyo.key"]
    assert json.loads(printed("list", keys, "--json")[0])["allowed"] == []


def test_a_file_that_is_missing_is_named_alone(tmp_path: Path) -> None:
    make_pairs(tmp_path, ["paris"])
    ended = run_cli("keys", "allow", tmp_path, tmp_path / "lima.key")
    assert ended.err == f"diloco-comm: cannot use {tmp_path}/lima.key: No such file or directory\n"


def test_keys_are_bound_to_replicas(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_pairs(keys, ["paris"])
    make_pairs(tmp_path, ["tokyo", "lima"])
    files = [tmp_path / "tokyo.key", tmp_path / "lima.key"]
    copies = [str(keys / "allowed" / file.name) for file in files]
    printed("allow", keys, files[1])
    assert printed("allow", keys, *files, "--replica", 3, "--replica", 1) == copies
    assert printed("allow", keys, files[0], "--replica", 0) == copies[:1]
    shown = json.loads(printed("list", keys, "--json")[0])
    assert {row["name"]: row["replicas"] for row in shown["allowed"]} == {
        "tokyo": [0],
        "lima": [1, 3],
    }
    lines = printed("list", keys)
    assert "lima: allowed as replicas 1, 3" in lines and "tokyo: allowed as replica 0" in lines
    Path(copies[0]).write_text("replicas\n" + files[0].read_text())
    damaged = "tokyo: allowed as no replica: the line replicas is damaged"
    assert damaged in printed("list", keys)
    # Without numbers the command takes the numbers away.
    printed("allow", keys, *files)
    assert {"tokyo: allowed", "lima: allowed"} <= set(printed("list", keys))
    for number, text in (("-1", "--replica"), ("x", "--replica"), (2**31, "at most 2147483647")):
        check_misuse(run_cli("keys", "allow", keys, files[0], "--replica", number), text)


def test_keys_that_read_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    printed("make", keys, "paris")
    make_pairs(tmp_path, ["monitor"])
    file = tmp_path / "monitor.key"
    assert printed("allow", keys, file, "--reads-only") == [f"{keys}/readers/monitor.key"]
    (row,) = json.loads(printed("list", keys, "--json")[0])["readers"]
    found = Keys.read(file)
    assert row == {"name": "monitor", "curve": "", "link": found.link}
    assert printed("list", keys)[2:] == [
        *("monitor: may only read", f"  link  {found.link}"),
        "nobody is allowed",
    ]
    both = run_cli("keys", "allow", keys, file, "--reads-only", "--replica", 1)
    check_misuse(both, "a key that only reads is no replica, got replica 1")
    assert printed("remove", keys, "monitor") == [f"{keys}/readers/monitor.key"]
    assert json.loads(printed("list", keys, "--json")[0])["readers"] == []


def test_json_of_the_files(tmp_path: Path) -> None:
    made = json.loads(printed("make", tmp_path, "paris", "tokyo", "--json")[0])
    names = ("paris.key", "paris.key_secret", "tokyo.key", "tokyo.key_secret")
    assert made == {"schema": 1, "keys": [str(tmp_path / name) for name in names]}


def test_a_wrong_word_is_one_sentence(tmp_path: Path) -> None:
    printed("make", tmp_path, "paris")
    check_misuse(run_cli("keys", "make", tmp_path, "paris"), "paris.key_secret exists: remove it")
    check_misuse(run_cli("keys", "make", tmp_path, "a/b"), "keys need a plain name, got 'a/b'")
    check_misuse(run_cli("keys", "make", tmp_path), "NAME")
    check_misuse(run_cli("keys", "remove", tmp_path, "lima"), "has no lima: it names nobody")
    secret = tmp_path / "paris.key_secret"
    check_misuse(run_cli("keys", "allow", tmp_path, secret), "public keys are in a file NAME.key")
    for command in (("list",), ("allow", tmp_path / "paris.key")):
        ended = run_cli("keys", command[0], tmp_path / "none", *command[1:])
        check_misuse(ended, f"there is no folder {tmp_path / 'none'}")
    (tmp_path / "file").touch()
    ended = run_cli("keys", "make", tmp_path / "file", "lima")
    check_misuse(ended, "cannot write FOLDER", "Not a directory")
    ended = run_cli("keys", "allow", tmp_path, tmp_path / "nobody.key")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.count("\n") == 1 and "nobody.key" in ended.err and "No such file" in ended.err


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of each command, in a folder in which what they name is there."""
    examples = help_examples("keys")
    assert {"keys make", "keys allow", "keys remove", "keys list"} <= examples.keys()
    for name, lines in examples.items():
        assert lines or name == "keys"
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        monkeypatch.chdir(folder)
        if name != "keys make":
            make_pairs(Path("keys"), ["paris"])
            os.mkdir("keys/allowed")
            make_pairs(Path(), ["tokyo", "lima", "monitor"])
        if name == "keys remove":
            shutil.copy("tokyo.key", "keys/allowed")
        for line in lines:
            if name == "keys make":
                shutil.rmtree("keys", ignore_errors=True)
            assert run_cli(*line.split()[1:]).status == 0, line
