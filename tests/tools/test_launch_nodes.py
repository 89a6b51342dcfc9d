"""Launchers of the nodes of one replica, in this process: real stores, short waits, no workers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from diloco_comm.base.store_host import open_store
from diloco_comm.elastic import exits
from diloco_comm_tools.common.workers import free_port
from diloco_comm_tools.launch import nodes as launch_nodes
from diloco_comm_tools.launch.nodes import Nodes


class Short:
    """Launchers whose waits are short, with the signals that each has got."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.signals: dict[Nodes, list[str]] = {}

    def launcher(self, node: int, **settings: object) -> Nodes:
        signals: list[str] = []
        nodes = Nodes(node, 2, self.endpoint, {"--run": "r"} | settings, signals)
        self.signals[nodes] = signals
        return nodes

    def started(self) -> tuple[Nodes, Nodes]:
        """Return the launchers of two nodes whose workers run."""
        pair = self.launcher(0), self.launcher(1)
        assert begin(*pair) == [None, None]
        return pair


def begin(*launchers: Nodes) -> list[int | None]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(Nodes.begin, launchers))


def end(launcher: Nodes) -> int | None:
    status = launcher.begin()
    launcher.close(1 if status is None else status)
    return status


@contextmanager
def looking(*launchers: Nodes) -> Iterator[None]:
    """Let launchers look at the store meanwhile, as they do while their workers run."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.02):
            for one in launchers:
                one.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Short:
    for name, seconds in {"BEAT": 0.02, "LOOK": 0.02, "TWICE": 0.2, "FAREWELL": 0.2}.items():
        monkeypatch.setattr(launch_nodes, f"_{name}_S", seconds)
    set_limits(monkeypatch, 20.0, 20.0)
    return Short(f"127.0.0.1:{free_port()}")


def set_limits(monkeypatch: pytest.MonkeyPatch, patience_s: float, limit_s: float) -> None:
    monkeypatch.setenv("DILOCO_COMM_SUSPECT_AFTER_S", str(patience_s))
    monkeypatch.setenv("DILOCO_COMM_TIMEOUT_S", str(limit_s))


def test_refused_launchers_do_not_stay_in_the_record(short: Short) -> None:
    pair = short.started()
    with looking(*pair):
        assert end(short.launcher(1)) == exits.MISFIT
        time.sleep(0.3)
    assert pair[1]._decision.refused == {}


def test_a_launcher_with_other_settings_leaves_a_running_replica_alone(
    short: Short, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = short.started()
    with looking(*pair):
        stray = short.launcher(7, **{"--run": "other"})
        assert stray.begin() == exits.MISFIT
        # The replica starts again while the stray launcher still beats.
        for one in pair:
            one.note_end([1], 1.0)
    assert "--run is r on node 0 and other on node 7: all nodes" in capsys.readouterr().err
    assert begin(*pair) == [None, None]


def test_a_store_without_a_beat_of_node_0_is_silence(
    short: Short, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_limits(monkeypatch, 20.0, 0.5)
    host, _, port = short.endpoint.partition(":")
    store = open_store(host, int(port))
    assert short.launcher(1).begin() == exits.UNAVAILABLE
    store.store.close()
    said = capsys.readouterr().err
    assert f"waited 0.5 s for the launcher of node 0 at {short.endpoint}: only a store is" in said


@pytest.mark.nightly("3 s each; they differ in who got the signal", but=["1"])
@pytest.mark.parametrize("asked", [0, 1])
def test_workers_end_where_node_0_is_silent(
    short: Short, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: int
) -> None:
    """The store of node 0 answers on."""
    set_limits(monkeypatch, 2.0, 20.0)
    pair = short.started()
    short.signals[pair[asked]].append("SIGTERM")
    with looking(*pair):
        time.sleep(0.2)
    other = pair[1]
    assert not other.must_stop
    while not other.must_stop:
        other.look()
    other.note_end([-15], 1.0)
    assert other.begin() == 1
    assert ": this node ends without the launcher of node 0 at" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [0, 1])
def test_a_second_signal_is_obeyed_on_all_nodes(short: Short, asked: int) -> None:
    pair = short.started()
    short.signals[pair[asked]] += ["SIGTERM", "SIGINT"]
    with looking(*pair):
        while not (pair[0].ends_now and pair[1].ends_now):
            time.sleep(0.01)
    assert pair[1].must_stop
    # Node 0 waits for nobody any more.
    ends = pair[0].ends()
    assert ends is not None and ends[0] == [-9, -9]
    pair[1].note_end([-9], 1.0)
    with ThreadPoolExecutor() as pool:
        status = pool.submit(end, pair[1])
        pair[0].close(1)
        assert status.result() == 1


def test_a_second_signal_ends_the_wait_for_a_silent_launcher(short: Short) -> None:
    pair = short.started()
    short.signals[pair[0]] += ["SIGTERM", "SIGTERM"]
    began = time.monotonic()
    pair[0].look()
    assert pair[0].ends() is not None
    pair[0].close(1)
    assert time.monotonic() - began < 10.0


def test_workers_that_have_ended_count_where_their_launcher_has_gone(short: Short) -> None:
    pair = short.started()
    with looking(*pair):
        pair[1].note_end([], 1.0)
    pair[0].look()
    pair[1].close(0)
    time.sleep(0.1)
    pair[0].note_end([], 1.0)
    assert pair[0].ends() == ([], float("inf"))


def test_a_signal_for_node_0_before_the_start_ends_all(
    short: Short, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = short.launcher(0), short.launcher(1)
    short.signals[first].append("SIGTERM")
    with ThreadPoolExecutor() as pool:
        status = pool.submit(end, other)
        with looking(first):
            while len(first._beats) < 2:
                time.sleep(0.01)
        assert first.begin() == exits.LEFT
        first.close(exits.LEFT)
        assert status.result() == exits.LEFT
    said = capsys.readouterr().err
    assert said.count("SIGTERM: the replica ends before its workers have started") == 2


def test_why_a_replica_has_ended_is_said_on_all_nodes(
    short: Short, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = short.started()
    for one in pair:
        one.note_end([1], 1.0)
    with ThreadPoolExecutor() as pool:
        status = pool.submit(end, pair[1])
        pair[0].close(pair[0].give_up(75, "no more restarts"))
        assert status.result() == 75
    assert capsys.readouterr().err.count("no more restarts") == 2


def test_a_decision_that_the_store_does_not_take_is_said(
    short: Short, capsys: pytest.CaptureFixture[str]
) -> None:
    first = short.launcher(0)
    first.give_up(1, "x" * 70000)
    first.look()
    said = capsys.readouterr().err
    assert "node 0 cannot tell the other launchers what it has decided: " in said


def test_the_workers_store_listens_at_the_endpoint_alone(short: Short) -> None:
    first, _ = short.started()
    port = int(first.variables["MASTER_PORT"])
    socket.create_connection(("127.0.0.1", port), 5.0).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5.0)


def test_the_store_keeps_beats_for_as_long_as_a_node_may_be_silent(
    short: Short, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped_after_s = []

    def serve_store(*arguments: object, drop_after_s: float) -> None:
        dropped_after_s.append(drop_after_s)

    monkeypatch.setattr(launch_nodes, "serve_store", serve_store)
    set_limits(monkeypatch, 1200.0, 20.0)
    short.launcher(0)
    assert dropped_after_s == [2400.0]
