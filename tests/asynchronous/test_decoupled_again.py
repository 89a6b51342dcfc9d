"""What comes twice or is left behind: names, starts, numbers of reports, snapshots, tapes."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from async_helpers import Flat, Peer, Relay, wait_until
from cli_helpers import check_misuse, run_cli
from decoupled_processes import SIZE, attach, make_server

from diloco_comm import SGD
from diloco_comm.asynchronous import DecoupledDiLoCo, DecoupledServer
from diloco_comm.asynchronous.decoupled import state as syncer_state
from diloco_comm.asynchronous.decoupled.merges import Piece
from diloco_comm.asynchronous.decoupled.model import ServedModel
from diloco_comm.asynchronous.decoupled.settings import DecoupledSettings
from diloco_comm.asynchronous.decoupled.syncer import Report
from diloco_comm.asynchronous.decoupled.tape import replay
from diloco_comm.asynchronous.link import ServerLost
from diloco_comm.asynchronous.messages import MAX_JSON, Kind, Message, pack, parse
from diloco_comm.asynchronous.snapshots import Storage

CARRY = {"receipt": "carry"}


def train(model: Flat, learner: DecoupledDiLoCo, steps: int) -> None:
    for _ in range(steps):
        model.descend(torch.ones(SIZE))
        learner.step()


# ----------------------------------------------------------------------------------------- names


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a learner that was given none."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    yield f"{socket.gethostname().split('.')[0]}-rank3"


@pytest.mark.nightly("6 s; the first tier has learners that come again under their own name")
def test_a_renamed_learner_takes_the_shared_model_and_nothing_counts_twice(nameless: str) -> None:
    """Its report was merged under the former name while it was away, and nobody told it so."""
    with make_server({"fragments": 1, "quorum": 2, **CARRY}, lost_after=1.0) as server:
        with Relay(server.address) as relay:
            model, learner = attach(relay.address, None, timeout=9.0)  # type: ignore[arg-type]
            other, steady = attach(server.address, "c")
            assert learner.name == nameless
            train(model, learner, 4)
            wait_until(lambda: server.report()["learners"][nameless]["steps"] == 4)
            train(other, steady, 4)
            # The fragment is called; this learner reports, and the other one not yet.
            wait_until(lambda: learner._shards[0].carrier.calls() != [])
            learner.poll()
            wait_until(lambda: server.report()["fragments"][0]["reported"] == [nameless])
            relay.cut(shut=True)
            wait_until(lambda: nameless not in server.report()["learners"])
            assert steady.flush(20.0) and steady.metrics.versions == (1,)
            _, successor = attach(server.address, None)  # type: ignore[arg-type]
            assert successor.name == nameless
            relay.open()
            wait_until(lambda: learner.name == f"{nameless}-2", 30)

            def is_there() -> bool:
                with suppress(ServerLost):
                    learner.poll()
                return learner.metrics.versions == (1,)

            wait_until(is_there)
            # Both reports of four steps weigh a half: the shared model has moved by four.
            assert torch.equal(model.values(), torch.full((SIZE,), -4.0))
            (book,) = learner.metrics.step_ledgers
            assert (book.applied, book.lost, book.under_way, book.kept) == (0, 4, 0, 0)
            successor.close()
            for _ in range(4):
                for each in ((model, learner), (other, steady)):
                    train(*each, 1)
            wait_until(lambda: all([x.flush(0.01, remainder=False) for x in (learner, steady)]))
            assert learner.metrics.step_ledgers[0].applied == 4
            assert torch.equal(other.values(), torch.full((SIZE,), -8.0))
            learner.close()
            steady.close()


# ---------------------------------------------------------------------------------------- starts


def hear(peer: Peer, kind: Kind) -> Message:
    while (message := peer.hear(10.0)) is not None and message.kind != kind:
        pass
    assert message is not None, f"no {kind.name} came"
    return message


def test_a_start_that_is_said_again_makes_one_model() -> None:
    with make_server() as server, Peer(server.address) as one, Peer(server.address) as other:
        meta = {
            "layout": 5, "total": 2, "sizes": [SIZE - 1, 1], "pieces": [1, 1], "alone": [0, 0],
            "settings": server.state.settings.of_learners,
        }  # fmt: skip
        for peer, name in ((one, "one"), (other, "other")):
            peer.say(Message(Kind.JOIN, 7, meta={**meta, "worker": name}))
            assert hear(peer, Kind.ADMITTED).meta["needs_start"]
        for _ in range(3):
            one.say(Message(Kind.START))
        wants = [hear(one, Kind.WANT) for _ in range(6)]
        # A repetition asks for the same runs: one of each fragment.
        assert wants[:2] == wants[2:4] == wants[4:]
        other.say(Message(Kind.START))
        hear(other, Kind.WAIT)
        for want in wants:
            body = torch.full(((2048, 1024)[want.fragment],), 3.0 + want.fragment)
            place = (0, 0, want.fragment, want.run)
            one.say(Message(Kind.RUN, *place, body=body.numpy().tobytes()))
        hear(one, Kind.UNKNOWN)
        run = server.state.run
        for peer in (one, other):
            peer.say(Message(Kind.START))
            hear(peer, Kind.UNKNOWN)
    assert server.state.run == run and server.state.model is not None
    assert server.state.model.num_commits == 0
    a, b = (values for (values,) in server.parameters())
    assert torch.equal(a, torch.full((SIZE - 1,), 3.0)) and torch.equal(b, torch.tensor([4.0]))


# --------------------------------------------------------------------------------------- reports


def test_a_successor_does_not_use_the_number_of_a_refused_report() -> None:
    """Else the verdict on the refused report would be taken for one on the new report."""
    with make_server({"fragments": 1, **CARRY}) as server:
        model, learner = attach(server.address, "a")
        encode = learner._learner.reports

        def spoiled() -> list:
            made = encode()
            for _, _, payloads in made:
                payloads[0][:4] = torch.tensor([0, 0, 192, 127], dtype=torch.uint8)
            return made

        learner._learner.reports = spoiled  # type: ignore[method-assign]
        train(model, learner, 4)
        wait_until(lambda: server.report()["learners"]["a"]["steps"] == 4)
        assert learner.flush(20.0, remainder=False) and learner.metrics.refused == 1
        seq = learner._learner.fragments[0].seq
        learner.close()
        wait_until(lambda: not server.report()["learners"])
        model, successor = attach(server.address, "a")
        assert successor._learner.fragments[0].seq == seq == 1
        train(model, successor, 4)
        assert successor.flush(20.0)
        assert successor.metrics.merged >= 1 and successor.metrics.refused == 0
        successor.close()


def test_a_report_in_runs_of_another_size_is_refused_and_the_learner_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with make_server({"fragments": 1, **CARRY}) as server:
        model, learner = attach(server.address, "a")
        link = learner._shards[0].link
        send_runs = link.send_runs

        def send_less(want: Message, *rest: object) -> None:
            link.send(Message(Kind.RUN, want.number, 0, want.fragment, want.run, body=bytes(8)))

        link.send_runs = send_less  # type: ignore[method-assign]
        train(model, learner, 4)
        assert learner.flush(20.0, remainder=False)
        assert (learner.metrics.refused, learner.metrics.merged) == (1, 0)
        assert server.report()["refused"] == {"size": 1}
        assert "what learner a sends is refused: a run of this" in caplog.text
        link.send_runs = send_runs  # type: ignore[method-assign]
        train(model, learner, 4)
        assert learner.flush(20.0)
        assert (learner.metrics.refused, learner.metrics.merged) == (1, 1)
        assert learner.metrics.step_ledgers[0].applied == 8
        learner.close()


# --------------------------------------------------------------------------------------- folders


def run_once(folder: Path, steps: int, **options: bool) -> None:
    with make_server(CARRY, snapshot=folder, snapshot_every=2, **options) as server:
        model, learner = attach(server.address, "a")
        for _ in range(steps):
            train(model, learner, 1)
            assert learner.flush(20.0)
        learner.close()


def test_a_first_snapshot_of_a_process_that_was_killed_is_replaced(tmp_path: Path) -> None:
    """It was killed between linking ``first`` and renaming the snapshot: nobody has a model."""
    (tmp_path / "first").write_bytes(b"of another run")
    run_once(tmp_path, 6, keep_tape=True)
    done = replay(tmp_path)
    assert done.first == 0 and done.last >= 2 and done.is_compared


def test_a_tape_that_is_not_kept_any_more_ends_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_once(tmp_path, 6, keep_tape=True)
    kept = replay(tmp_path).last
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "lock"}
    words = "has a tape of the run.*: give keep_tape to go on with the tape, or drop_tape to remove"
    with pytest.raises(ValueError, match=words):
        make_server(CARRY, snapshot=tmp_path)
    ended = run_cli("serve", "decoupled", "--listen", "127.0.0.1:0", "--snapshot", tmp_path)
    check_misuse(ended, "give --keep-tape to go on with the tape, or --drop-tape to remove the")
    with pytest.raises(ValueError, match="keep_tape and drop_tape exclude each other"):
        make_server(CARRY, snapshot=tmp_path, keep_tape=True, drop_tape=True)
    assert all((tmp_path / name).read_bytes() == data for name, data in files.items())
    with caplog.at_level(logging.WARNING):
        run_once(tmp_path, 6, drop_tape=True)
    assert "the next snapshot removes the tape in" in caplog.text
    assert not (tmp_path / "first").exists()
    begin = replay(tmp_path).last
    assert begin > kept
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run_once(tmp_path, 6, keep_tape=True)
    assert f"the tape begins after merge {begin}" in caplog.text
    done = replay(tmp_path)
    assert done.first == begin < done.last and done.is_compared
    shown = run_cli("replay", tmp_path)
    assert shown.status == 0 and f"merges 1 to {begin} are not on the tape" in shown.out


def test_old_journals_go_once_the_new_snapshot_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power could take the journal and leave the old snapshot."""
    events: list[tuple[str, str]] = []
    replace, sync, unlink = os.replace, os.fsync, Path.unlink

    def replacing(source: Path, target: Path) -> None:
        events.append(("replace", Path(target).name))
        replace(source, target)

    def syncing(number: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{number}")))
        sync(number)

    def unlinking(path: Path, missing_ok: bool = False) -> None:
        events.append(("unlink", path.name))
        unlink(path, missing_ok=missing_ok)

    storage = Storage(tmp_path)
    storage.save({}, {"x": torch.zeros(4)})
    storage.begin_journal(0)
    monkeypatch.setattr(os, "replace", replacing)
    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(Path, "unlink", unlinking)
    storage.save({}, {"x": torch.ones(4)})
    storage.begin_journal(1)
    storage.release()
    fsync_folder = ("fsync", str(tmp_path))
    written = [("fsync", str(tmp_path / "snapshot.new")), ("replace", "snapshot"), fsync_folder]
    begun = [("replace", "journal-1"), fsync_folder, ("unlink", "journal-0")]
    wanted = [*written, *begun]
    assert [event for event in events if event in wanted] == wanted


# ---------------------------------------------------------------------------------------- status


@pytest.mark.nightly("2 s each; they differ in the bytes of a name", but=["a"])
@pytest.mark.parametrize("letter", ["a", "\N{GRINNING FACE}"])
def test_the_status_of_many_learners_and_fragments_fits_into_a_message(letter: str) -> None:
    """64 learners with the longest names have all reported on 64 fragments."""
    server = DecoupledServer(DecoupledSettings(quorum=64, merge="mean"), outer=SGD(1.0))
    pieces = [[Piece((), 4, "mean")] for _ in range(64)]
    flats = [[torch.zeros(4)] for _ in pieces]
    state = server.state
    state.model = ServedModel(pieces, flats, state.settings, SGD(1.0), 64)
    names = [f"{i:02d}" + 62 * letter for i in range(64)]
    syncer = state.model.syncer
    for name in names:
        syncer.join(name)
    for each in syncer.rounds:
        each.call(0.0)
        for name in names[:63]:
            assert each.report(Report(name, 1, 0, 1, 1), 0.0, 1.0, 0.0) == ""
    report = server.report()
    message = pack(Message(Kind.REPORT, meta={"status": report}))
    assert len(message[1]) <= MAX_JSON and parse(message).meta["status"] == report
    assert report["num_learners"] == 64 and report["num_fragments"] == len(report["fragments"])
    assert all(row["num_reported"] == 63 for row in report["fragments"])
    shown = [row["reported"] for row in report["fragments"]]
    assert shown[0] == sorted(names[:63])[: len(shown[0])] and len(shown[0]) < 63
    assert len(report["learners"]) >= 32

    class Leaving(Counter):
        def __getitem__(self, name: str) -> int:
            """All leave while another thread asks for the status."""
            for each in names:
                syncer.leave(each, 0.0)
            return super().__getitem__(name)

    state.merged = Leaving()
    again = server.report()
    assert again["learners"].keys() == report["learners"].keys() and again["num_learners"] == 64
    assert server.report()["num_learners"] == 0
    server.stop()


def test_peers_get_a_status_again_that_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """For twenty times as long as its making took, at most a second."""
    now, took = 100.0, 0.01

    def make() -> dict:
        nonlocal now
        now += took
        return {"made_at": now}

    monkeypatch.setattr(syncer_state, "time", SimpleNamespace(monotonic=lambda: now))
    kept = syncer_state.KeptStatus(make)
    first = kept.get()
    now += 0.19
    assert kept.get() == first
    now += 0.02
    assert kept.get() != first
    now, took = 200.0, 3.0
    first = kept.get()
    now += 0.9
    assert kept.get() == first
    now += 0.2
    assert kept.get() != first
