"""The tape of a run: merges repeated to the bit, and changed tapes found out."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from cli_helpers import run_cli
from decoupled_processes import SIZE, attach, make_server

from diloco_comm import HeavyBall
from diloco_comm.asynchronous.decoupled.tape import replay
from diloco_comm.asynchronous.snapshots import Storage, read_snapshot

SETTINGS = {"wire": "int4", "wire_down": "int4", "merge": "rda", "receipt": "carry"}


def record(folder: Path, steps: int, *, snapshot_every: int = 4, **options: bool) -> list:
    """Train two learners in turns, and return the syncer's parameters at the end."""
    torch.manual_seed(3)
    server = make_server(
        SETTINGS,
        snapshot=folder,
        snapshot_every=snapshot_every,
        outer=HeavyBall(0.5, 0.8),
        **options,
    )
    with server:
        pairs = [attach(server.address, name) for name in "ab"]
        for _ in range(steps):
            for model, learner in pairs:
                model.descend(torch.randn(SIZE))
                learner.step()
                learner.flush(0.1, remainder=False)
        for _, learner in pairs:
            assert learner.flush(20.0)
            learner.close()
    return server.parameters()


def test_a_kept_tape_repeats_the_run_to_the_bit(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    record(folder, 8, keep_tape=True)
    # The second process goes on where the first one ended.
    shared = record(folder, 8, keep_tape=True)
    values: dict[int, list] = {}

    def note(row: dict, model) -> None:
        values[row["fragment"]] = model.syncer.fragments[row["fragment"]].copy_values()

    done = replay(folder, note)
    assert done.first == 0 and done.last >= 6 and done.is_compared and done.reports >= done.last
    assert done.learners == ("a", "b")
    assert all(torch.equal(x, y) for p in values for x, y in zip(values[p], shared[p], strict=True))
    shown = run_cli("replay", folder)
    assert shown.status == 0
    told = rf"merges 1 to {done.last} give the same bits: {done.reports} reports of 2 learners\n"
    assert re.fullmatch(told + "the newest snapshot has the same bits too\n", shown.out)
    lines = [json.loads(x) for x in run_cli("replay", folder, "--every", "--json").out.splitlines()]
    assert lines[-1]["last"] == done.last and len(lines) == 1 + done.last
    assert all(abs(sum(line["weights"]) - 1) < 1e-12 for line in lines[:-1])


def test_a_bit_that_was_flipped_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    record(folder, 8, keep_tape=True, snapshot_every=1000)
    for name, place in (("journal-0", -300), ("journal-0", 200), ("first", -100), ("snapshot", 99)):
        other = tmp_path / f"{name}{place}"
        shutil.copytree(folder, other)
        data = bytearray((other / name).read_bytes())
        data[place] ^= 1
        (other / name).write_bytes(data)
        ended = run_cli("replay", other)
        assert ended.status == 1 and re.search(
            rf"diloco-comm: {other}/{name} is damaged at byte \d+: .*; a cut there loses the last "
            r"\d+ bytes, with \d+ whole records behind the damage; restore the file from a backup",
            ended.err,
        )


def test_without_a_kept_tape_the_newest_snapshot_begins_it(tmp_path: Path) -> None:
    folder, copy = tmp_path / "s", tmp_path / "copy"
    torch.manual_seed(3)
    with make_server(SETTINGS, snapshot=folder, snapshot_every=1000) as server:
        model, learner = attach(server.address, "a")
        for _ in range(8):
            model.descend(torch.randn(SIZE))
            learner.step()
            assert learner.flush(20.0)
        # As a kill would leave the folder.
        shutil.copytree(folder, copy)
        versions = learner.metrics.versions
        learner.close()
    done = replay(copy)
    assert (done.first, done.last, done.is_compared) == (0, sum(versions), None)
    assert done.versions == versions and sum(versions) >= 3
    assert replay(folder).last == replay(folder).first == sum(versions)
    with pytest.raises(ValueError, match="has no snapshot of a syncer"):
        replay(tmp_path)


def test_a_tape_of_another_format_is_refused(tmp_path: Path) -> None:
    """A tape without a number, as before there were formats, has format 1."""
    record(tmp_path / "s", 2, keep_tape=True)
    header, tensors = read_snapshot(tmp_path / "s" / "snapshot")
    assert header.pop("format") == 3
    for number, reader in (
        (None, "use the version that wrote them"),
        (2, "0.2 reads format 2, too"),
        (4, "use the version that wrote them"),
    ):
        folder = tmp_path / f"format-{number}"
        storage = Storage(folder, keeps_journals=True)
        storage.save(header if number is None else {**header, "format": number}, tensors)
        storage.release()
        words = (
            f"have format {number or 1}, and this version of diloco_comm reads format 3: {reader}"
        )
        with pytest.raises(ValueError, match=words):
            make_server(SETTINGS, outer=HeavyBall(0.5, 0.8), snapshot=folder, keep_tape=True)
        with pytest.raises(ValueError, match=words):
            replay(folder)


def test_a_snapshot_of_other_settings_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "s", 2)
    for settings, outer, words in (
        ({**SETTINGS, "wire": "int8"}, HeavyBall(0.5, 0.8), "made with wire 'int4' and not 'int8'"),
        (SETTINGS, HeavyBall(0.4, 0.8), "made with the outer optimizer"),
    ):
        with pytest.raises(ValueError, match=words):
            make_server(settings, outer=outer, snapshot=tmp_path / "s")
    # The pace may change.
    server = make_server(
        {**SETTINGS, "quorum": 2, "sync_every": 9, "gamma": 0.1},
        outer=HeavyBall(0.5, 0.8),
        snapshot=tmp_path / "s",
    )
    server.stop()
