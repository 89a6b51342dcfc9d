"""Server and workers over sockets: what is applied, refused, protected and told."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from async_helpers import PLAIN, Flat, Peer, attach, serving, status, tcp, wait_until
from problems import Regression, equal, parameters_of, train_step
from test_async_rules import EXAMPLE, EXAMPLE_RULES, STREAM

from diloco_comm import NonFiniteError
from diloco_comm.asynchronous.keys import make_keys
from diloco_comm.asynchronous.link import ServerLost, ServerRefused, read_status
from diloco_comm.asynchronous.messages import Kind, Message
from diloco_comm.asynchronous.rules import Buffered, DelayedNesterov, Immediate
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.worker import AsyncDiLoCo

HELLO = {"worker": "peer", "layout": 5, "sizes": [7]}
PUSH = {"wire": "fp32", "block_size": 256, "steps": 1, "seconds": 0.1, "is_start": False}

# ------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("name", EXAMPLE)
def test_worked_example_through_a_server(name: str) -> None:
    with serving(EXAMPLE_RULES[name]) as server:
        model, worker = attach(server.address, "w", size=2)
        for g, theta in zip(STREAM, EXAMPLE[name], strict=True):
            model.descend(torch.tensor(g))
            worker.step()
            np.testing.assert_allclose(model.values(), theta, atol=1e-6)
        worker.close()


def test_two_workers_staleness_versions_and_metrics() -> None:
    rounds = []
    with serving() as server:
        one, a = attach(server.address, "a", on_round=rounds.append)
        two, b = attach(server.address, "b", on_round=rounds.append)
        assert (a.version, b.version) == (0, 0)
        for worker, model, value in ((a, one, 0.5), (a, one, 0.25), (b, two, 1.0), (a, one, 0.0)):
            model.descend(torch.full((7,), value))
            worker.step()
        assert [(r.seq, r.started_from, r.version, r.staleness) for r in rounds] == [
            (1, 0, 1, 0), (2, 1, 2, 0), (1, 0, 3, 2), (3, 2, 4, 1),
        ]  # fmt: skip
        assert torch.equal(one.values(), torch.full((7,), 1 - 0.5 - 0.25 - 1.0))
        report = status(server)
        assert report["updates"] == 4 and report["staleness"] == {"0": 2, "2": 1, "1": 1}
        assert report["workers"]["a"]["applied"] == 3 and report["parameters"] == 7
        a.close()
        b.close()
    assert torch.equal(server.parameters()[0], one.values())


@pytest.mark.parametrize(("wire", "feedback"), [("fp32", False), ("int8", True), ("int4", True)])
def test_training_converges_on_every_worker(wire: str, feedback: bool) -> None:
    """Two workers in threads, hooked to their optimizers, pull the shared model to one target."""
    target = torch.linspace(-2, 3, 601)

    def work(address: str, values: list[torch.Tensor]) -> None:
        model = Flat(601)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with AsyncDiLoCo(
            model, optimizer, server=address, wire=wire, error_feedback=feedback, timeout=60.0
        ):
            for _ in range(300):
                (torch.cat([model.a, model.b]) - target).square().sum().mul(0.5).backward()
                optimizer.step()
                optimizer.zero_grad()
            values.append(model.values())

    values: list[torch.Tensor] = []
    rule = DelayedNesterov(lr=0.5, momentum=0.3, period=2)
    with serving(rule, sync_every=10, dylu=True) as server:
        threads = [threading.Thread(target=work, args=(server.address, values)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(values) == 2
    for found in (*values, server.parameters()[0]):
        assert (found - target).abs().max() < 0.05


def test_many_runs_and_fragments_arrive_exactly() -> None:
    size = 700_001
    start = torch.linspace(-1, 1, size)
    with serving(parameters=[start[:350_000], start[350_000:]]) as server:
        model = Flat(size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # Two fragments by patterns have other sizes than the server's: one sentence.
        with pytest.raises(ServerRefused, match="fragments of"):
            AsyncDiLoCo(model, optimizer, server=server.address, timeout=20.0)
    with serving(parameters=[start[:-1], start[-1:]]) as server:
        worker = AsyncDiLoCo(
            model, optimizer, server=server.address, timeout=20.0, wire="fp32", attach=False,
            fragments=["a", "b"],
        )  # fmt: skip
        assert torch.equal(model.values(), start)
        g = torch.randn(size, generator=torch.Generator().manual_seed(1))
        model.descend(g)
        moved = model.values()
        worker.step()
        torch.testing.assert_close(model.values(), moved, rtol=0, atol=1e-6)
        worker.close()


def test_a_grace_period_makes_workers_start_together() -> None:
    with serving(grace=30.0) as server:
        (one, a), (two, b) = attach(server.address, "a"), attach(server.address, "b")
        one.descend(torch.ones(7))
        thread = threading.Thread(target=a.step)
        thread.start()
        wait_until(lambda: status(server)["updates"] == 1)
        two.descend(torch.ones(7))
        # Nobody is left to wait for, so the window closes long before its 30 seconds.
        b.step()
        thread.join(20)
        assert not thread.is_alive()
        assert a.version == b.version == 2
        assert torch.equal(one.values(), two.values())
        a.close()
        b.close()


def test_dylu_gives_slow_workers_fewer_steps() -> None:
    with serving(sync_every=8, dylu=True) as server:
        (_, fast), (_, slow) = attach(server.address, "fast"), attach(server.address, "slow")
        assert fast.round_steps == slow.round_steps == 8
        for worker, seconds in ((fast, 0.0), (slow, 500.0)):
            worker._began_at -= seconds
            for _ in range(8):
                worker.step()
        assert fast.round_steps == 8 and slow.round_steps < 8
        fast.close()
        slow.close()


def test_flush_and_outer_parameters() -> None:
    with serving(sync_every=5) as server:
        model, worker = attach(server.address, "a")
        model.descend(torch.ones(7))
        worker.step()
        with worker.outer_parameters():
            assert torch.equal(model.values(), torch.ones(7))
        assert torch.equal(model.values(), torch.zeros(7)) and worker.due_in == 4
        worker.flush()
        assert worker.version == 1 and worker.due_in == 5
        worker.flush()
        assert worker.version == 1
        worker.close()


# ------------------------------------------------------------------------------------ refusals


def test_stale_updates_are_refused_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rule = Immediate(outer=PLAIN.outer, max_staleness=1)
    with serving(rule) as server, caplog.at_level(logging.WARNING):
        (one, a), (two, b) = attach(server.address, "a"), attach(server.address, "b")
        for _ in range(2):
            one.descend(torch.ones(7))
            a.step()
        two.descend(torch.ones(7))
        b.step()
        assert "its staleness is 2, and at most 1 is allowed" in caplog.text
        assert torch.equal(two.values(), torch.full((7,), -1.0)) and b.seq == 1
        report = status(server)
        assert report["refused"] == {"stale": 1} and report["updates"] == 2
        two.descend(torch.ones(7))
        b.step()
        assert status(server)["updates"] == 3
        a.close()
        b.close()


def test_values_that_are_not_finite_are_never_sent() -> None:
    with serving() as server:
        model, worker = attach(server.address, "a")
        model.descend(torch.full((7,), float("nan")))
        with pytest.raises(NonFiniteError, match="not finite"):
            worker.step()
        worker.on_nonfinite = "skip"
        worker.step()
        assert torch.equal(model.values(), torch.ones(7)) and worker.seq == 0
        worker.close()
        bad = Flat()
        bad.descend(torch.full((7,), float("inf")))
    with serving() as server, pytest.raises(ServerRefused, match="parameters are not finite"):
        AsyncDiLoCo(
            bad, torch.optim.SGD(bad.parameters(), lr=1.0), server=server.address, timeout=20.0
        )


def start_by_hand(peer: Peer, server: AsyncServer) -> None:
    """Attach by hand to a server with parameters."""
    peer.say(Message(Kind.HELLO, meta=HELLO))
    assert peer.hear().kind == Kind.WELCOME


def push_by_hand(peer: Peer, body: bytes, seq: int = 1, version: int = 0) -> Message:
    peer.say(Message(Kind.PUSH, seq, version, meta=PUSH))
    # Who is done with a round is told by itself what to go on from.
    answer = peer.hear(skip=(Kind.READY,))
    if answer.kind != Kind.WANT:
        return answer
    peer.say(Message(Kind.RUN, seq, 0, 0, 0, body=body))
    return peer.hear(skip=(Kind.READY,))


def payload(values: list[float]) -> bytes:
    """One run of 1024 elements on the fp32 wire."""
    return np.array([*values, *[0.0] * (1024 - len(values))], np.float32).tobytes()


def test_hostile_updates_are_refused_in_a_sentence() -> None:
    with serving(parameters=[torch.ones(7)]) as server, Peer(server.address) as peer:
        start_by_hand(peer, server)
        nan = push_by_hand(peer, payload([float("nan")]))
        assert nan.meta["refusal"] == "non-finite" and "not finite" in nan.meta["reason"]
        again = push_by_hand(peer, b"")
        assert again.meta == nan.meta
        future = push_by_hand(peer, b"", seq=2, version=50)
        assert future.meta["refusal"] == "from the future"
        order = push_by_hand(peer, b"", seq=9)
        assert order.meta["refusal"] == "out of order"
        assert "where 2 was expected" in order.meta["reason"]
        short = push_by_hand(peer, b"123", seq=2)
        assert short.kind == Kind.REFUSED and "has 4096 bytes, got 3" in short.meta["reason"]
        # The update is still wanted, and the right bytes complete it.
        peer.say(Message(Kind.RUN, 2, 0, 0, 0, body=payload([0.5])))
        good = peer.hear(skip=(Kind.READY,))
        assert good.kind == Kind.OUTCOME and good.meta["refusal"] == "" and good.version == 1
        report = status(server)
        assert report["refused"] == {
            "non-finite": 1, "from the future": 1, "out of order": 1, "size": 1,
        }  # fmt: skip
        assert report["updates"] == 1 and report["payload_bytes"] == 0
    assert server.parameters()[0].tolist() == [0.5, *[1.0] * 6]


def test_an_update_is_applied_once_whatever_is_repeated() -> None:
    with serving(parameters=[torch.ones(7)]) as server, Peer(server.address) as peer:
        start_by_hand(peer, server)
        first = push_by_hand(peer, payload([1.0]))
        for _ in range(3):
            again = push_by_hand(peer, payload([1.0]))
            assert (again.number, again.version, again.meta) == (1, 1, first.meta)
        peer.say(Message(Kind.RUN, 1, 0, 0, 0, body=payload([1.0])))
        assert push_by_hand(peer, payload([1.0]), seq=2).version == 2
        report = status(server)
        assert report["updates"] == 2 and report["duplicates"] == 3
    assert server.parameters()[0][0].item() == -1.0


@pytest.mark.parametrize(
    ("meta", "sentence"),
    [
        ({"sizes": [8]}, "8 parameters in fragments of \\[8\\], the server's has 7"),
        ({"sizes": [3, 4]}, "fragments of \\[3, 4\\]"),
        ({"layout": 6}, "other names, shapes or dtypes"),
        ({"sizes": [1 << 60]}, "this server takes"),
    ],
)
def test_other_models_are_refused(meta: dict, sentence: str) -> None:
    with serving(parameters=[torch.ones(7)]) as server, Peer(server.address) as peer:
        start_by_hand(peer, server)
        peer.say(Message(Kind.HELLO, meta={**HELLO, "worker": "other", **meta}))
        answer = peer.hear()
        assert answer.kind == Kind.REFUSED
        assert __import__("re").search(sentence, answer.meta["reason"])


def test_questions_before_hello_and_about_nothing() -> None:
    with serving(parameters=[torch.ones(7)]) as server, Peer(server.address) as peer:
        for kind in (Kind.PULL, Kind.GET, Kind.DONE):
            peer.say(Message(kind))
            assert peer.hear().kind == Kind.UNKNOWN
        start_by_hand(peer, server)
        peer.say(Message(Kind.GET, 0, 99))
        assert peer.hear().kind == Kind.GONE
        peer.say(Message(Kind.PULL))
        assert peer.hear().kind == Kind.READY
        peer.say(Message(Kind.GET, 0, 0, 5, 0))
        assert "no run 0 of fragment 5" in peer.hear().meta["reason"]
        peer.say(Message(Kind.GET, 0, 0, 0, 1 << 31))
        assert peer.hear().kind == Kind.REFUSED
        peer.say(Message(Kind.READY, meta={"steps": 1}))
        assert "not for a server" in peer.hear().meta["reason"]
        peer.say(Message(Kind.GET, 0, 0))
        assert np.frombuffer(peer.hear().body, np.float32).tolist() == [1.0] * 7


# ------------------------------------------------------------------------------------- garbage


def test_garbage_on_the_port_changes_nothing() -> None:
    with serving(parameters=[torch.ones(7)]) as server:
        model, worker = attach(server.address, "a")
        rng = np.random.default_rng(0)
        sockets = []
        for index in range(120):
            connection = tcp(server.address)
            # Random bytes; the beginning of ZeroMQ's own greeting; nothing at all.
            greeting = bytes.fromhex("ff00000000000000017f0300")[: index % 13]
            connection.sendall(greeting if index % 3 else rng.bytes(index))
            sockets.append(connection)
            if index % 2:
                connection.close()
        with Peer(server.address) as peer:
            for index in range(100):
                peer.say_raw(*[rng.bytes(int(rng.integers(0, 80))) for _ in range(index % 5 + 1)])
            peer.say_raw(b"x" * (2 << 20))
            model.descend(torch.ones(7))
            worker.step()
        for connection in sockets:
            connection.close()
        assert torch.equal(model.values(), torch.zeros(7))
        assert status(server)["refused"]["garbage"] >= 100
        worker.close()


# ------------------------------------------------------------------------------------ snapshots


def test_a_restarted_server_takes_its_workers_back(tmp_path: Path) -> None:
    options = {"snapshot": tmp_path / "s", "snapshot_every": 2}
    rule = DelayedNesterov(lr=0.5, period=3, activation=0.1)
    stream = torch.randn(11, 7, generator=torch.Generator().manual_seed(1))
    with serving(rule) as whole:
        truth, worker = attach(whole.address, "a")
        for g in stream:
            truth.descend(g)
            worker.step()
        worker.close()
    with serving(rule, **options) as server:
        address = server.address
        model, worker = attach(address, "a")
        for g in stream[:5]:
            model.descend(g)
            worker.step()
    for g in stream[5:]:
        with serving(rule, address=address, **options) as server:
            model.descend(g)
            worker.step()
    worker.close()
    assert torch.equal(model.values(), truth.values()) and worker.seq == 11


def test_the_journal_brings_back_what_the_snapshot_lacks(tmp_path: Path) -> None:
    """Copies of the folder, made while the server runs, are what a SIGKILL would leave."""
    folder = tmp_path / "s"
    options = {"snapshot": folder, "snapshot_every": 100}
    with serving(**options) as server:
        model, worker = attach(server.address, "a", wire="int8")
        for value in (1.0, 0.5, 0.25):
            model.descend(torch.full((7,), value))
            worker.step()
        copy = tmp_path / "copy"
        copy.mkdir()
        for path in folder.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        worker.close()
    journal = copy / "journal-0"
    back = AsyncServer(PLAIN, snapshot=copy)
    assert torch.equal(back.parameters()[0], model.values())
    back.stop()
    # stop() has written a snapshot; the journal again, with its last record torn.
    for path in copy.iterdir():
        path.unlink()
    for path in folder.glob("journal-*"):
        assert path.name == "journal-3"
    del journal


def test_a_reader_that_asks_for_nothing_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_READERS": 1, "PAUSE_S": 0.1, "STALL_S": 1e6}.items():
        monkeypatch.setattr(f"diloco_comm.asynchronous.server.{name}", value)
    with (
        serving(parameters=[torch.ones(7)]) as server,
        Peer(server.address) as first,
        Peer(server.address) as second,
    ):
        start_by_hand(first, server)
        first.say(Message(Kind.PULL))
        assert first.hear().kind == Kind.READY
        second.say(Message(Kind.HELLO, meta={**HELLO, "worker": "second"}))
        second.say(Message(Kind.PULL))
        assert [second.hear().kind for _ in range(3)] == [Kind.WELCOME, Kind.WAIT, Kind.READY]
        first.say(Message(Kind.GET, 0, 0, 0, 0))
        assert first.hear().kind == Kind.GONE


def test_a_torn_record_is_cut_off(tmp_path: Path) -> None:
    options = {"snapshot": tmp_path, "snapshot_every": 100}
    server = AsyncServer(PLAIN, sync_every=1, **options).start()
    model, worker = attach(server.address, "a")
    values, sizes = [], []
    for value in (1.0, 0.5):
        model.descend(torch.full((7,), value))
        worker.step()
        values.append(model.values())
        files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        sizes.append(len(files["journal-0"]))
    worker.close()
    server.stop()
    one, both = sizes
    for size, expected in ((both, 1), (both - 1, 0), (one, 0), (one - 1, -1), (5, -1)):
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / "snapshot").write_bytes(files["snapshot"])
        (tmp_path / "journal-0").write_bytes(files["journal-0"][:size])
        back = AsyncServer(PLAIN, snapshot=tmp_path)
        truth = values[expected] if expected >= 0 else torch.ones(7)
        assert torch.equal(back.parameters()[0], truth)
        assert back.coordinator.ledger().get("a", {"seq": 0})["seq"] == expected + 1
        back.stop()


def test_snapshots_that_do_not_fit(tmp_path: Path) -> None:
    with serving(parameters=[torch.ones(7)], snapshot=tmp_path / "s"):
        pass
    with pytest.raises(ValueError, match="was made with the rule"):
        AsyncServer(Buffered(period=2), snapshot=tmp_path / "s")
    (tmp_path / "s" / "snapshot").write_bytes(b"garbage")
    with pytest.raises(ValueError, match="is not a snapshot"):
        AsyncServer(PLAIN, snapshot=tmp_path / "s")
    with pytest.raises(ValueError, match="delay compensation cannot be restarted"):
        AsyncServer(Immediate(compensation=1.0), snapshot=tmp_path / "t")


def test_a_server_without_its_snapshot_is_not_taken_for_the_old_one() -> None:
    with serving() as server:
        model, worker = attach(server.address, "a")
        model.descend(torch.ones(7))
        worker.step()
    with serving(address=server.address, parameters=[torch.ones(7)]):
        model.descend(torch.ones(7))
        with pytest.raises(ServerLost, match="restarted without its snapshot"):
            worker.step()
    assert torch.equal(model.values(), torch.full((7,), -1.0))
    worker.close()


def test_a_lost_server_is_a_clear_error_and_the_weights_are_kept() -> None:
    with serving() as server:
        model, worker = attach(server.address, "a", timeout=1.0)
    model.descend(torch.ones(7))
    with pytest.raises(ServerLost, match="has not answered for"):
        worker.step()
    assert torch.equal(model.values(), torch.zeros(7))
    worker.close()
    with pytest.raises(ServerLost, match="hello"):
        attach(server.address, "b", timeout=0.5)


# ------------------------------------------------------------------------------------- security


def test_keys_let_in_the_allowed_and_nobody_else(tmp_path: Path) -> None:
    make_keys(tmp_path, ["one", "two"])
    (tmp_path / "allowed" / "two.key").unlink()
    with serving(keys=tmp_path, parameters=[torch.ones(7)]) as server:
        model, worker = attach(server.address, "a", keys=tmp_path, key_name="one")
        model.descend(torch.ones(7))
        worker.step()
        assert torch.equal(model.values(), torch.zeros(7))
        with pytest.raises(ServerLost):
            attach(server.address, "b", keys=tmp_path, key_name="two", timeout=1.0)
        with pytest.raises(ServerLost):
            attach(server.address, "c", timeout=1.0)
        report = read_status(server.address, keys=tmp_path, key_name="one", timeout=20.0)
        assert list(report["workers"]) == ["a"]
        worker.close()


def test_keys_are_private_files(tmp_path: Path) -> None:
    written = make_keys(tmp_path / "keys")
    names = sorted(path.relative_to(tmp_path / "keys").as_posix() for path in written)
    assert names == [
        "allowed/worker.key", "server.key", "server.key_secret", "worker.key", "worker.key_secret",
    ]  # fmt: skip
    for path in written:
        if path.name.endswith("_secret"):
            assert os.stat(path).st_mode & 0o077 == 0
    with pytest.raises(ValueError, match="exists: remove it"):
        make_keys(tmp_path / "keys")
    for name in ("../x", "server", ""):
        with pytest.raises(ValueError, match="plain name"):
            make_keys(tmp_path / "keys", [name])


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:5"])
def test_an_open_address_needs_keys_or_a_word(address: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can be reached from other machines"):
        AsyncServer(PLAIN, address=address)
    with pytest.raises(ValueError, match="there is no key"):
        AsyncServer(PLAIN, address="tcp://0.0.0.0:0", keys=tmp_path)
    AsyncServer(PLAIN, address="tcp://0.0.0.0:0", insecure=True).stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "nonsense"}, "the address must be tcp://host:port"),
        ({"address": "tcp://127.0.0.1:99999"}, "the address must be tcp://host:port"),
        ({"sync_every": 0}, "sync_every must be"),
        ({"grace": -1.0}, "grace must be"),
        ({"min_steps": 0}, "min_steps must be"),
        ({"snapshot_every": 0}, "snapshot_every must be"),
    ],
)
def test_bad_server_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncServer(PLAIN, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0.0}, "timeout must be"),
        ({"name": "x" * 65}, "name must have"),
        ({"rounding": "up"}, "rounding must be"),
        ({"wire": "int9"}, "unknown wire"),
        ({"server": "tcp://nowhere"}, "the address must be"),
    ],
)
def test_bad_worker_arguments(options: dict, message: str) -> None:
    model = Flat()
    options = {"server": "tcp://127.0.0.1:1", **options}
    with pytest.raises(ValueError, match=message):
        AsyncDiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_memory_is_bounded_by_credit_not_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve updates of a whole model each, one in memory at a time."""
    monkeypatch.setattr("diloco_comm.asynchronous.server.SMALL_BYTES", 0)
    size = 300_000
    with serving(parameters=[torch.zeros(size)], model_sizes=2.0) as server:
        peak = 0
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.002):
                peak = max(peak, server._memory.used_bytes)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()

        def work(index: int) -> None:
            model, worker = attach(server.address, str(index), size=size)
            for _ in range(2):
                model.descend(torch.full((size,), 0.5))
                worker.step()
            worker.close()

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        watcher.join()
        assert status(server)["updates"] == 12
    # Two run lengths of 2^18 elements hold 300,000.
    assert 0 < peak <= 2 * (1 << 20)
    assert torch.equal(server.parameters()[0], torch.full((size,), -6.0))


def test_parameters_of_a_running_or_empty_server() -> None:
    with serving() as server, pytest.raises(RuntimeError, match="the server runs"):
        server.parameters()
    with pytest.raises(RuntimeError, match="no parameters yet"):
        server.parameters()


def test_hooked_workers_equal_unhooked_ones() -> None:
    def run(is_hooked: bool) -> list[torch.Tensor]:
        with serving(DelayedNesterov(lr=0.5, period=2), sync_every=3) as server:
            model = Regression(seed=1)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            worker = AsyncDiLoCo(
                model, optimizer, server=server.address, name="a", attach=is_hooked, timeout=20.0
            )
            for step in range(10):
                train_step(model, optimizer, 0, step)
                if not is_hooked:
                    worker.step()
            worker.close()
            train_step(model, optimizer, 0, 11)
            return parameters_of(model)

    assert equal(run(True), run(False))
