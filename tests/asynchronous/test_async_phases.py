"""SIGKILL of a worker, and of the server, in each phase of a round; nothing is lost or doubled.

A process forks. The child kills itself at a stage. Then the parent, which shares only the name and
the log with the child, takes the child's place.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from async_helpers import attach, wait_until
from async_processes import check_ledger, server_main, worker_main
from workers import Pool

from diloco_comm.asynchronous import snapshots
from diloco_comm.asynchronous.link import Link
from diloco_comm.asynchronous.messages import Message
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.worker import AsyncDiLoCo
from diloco_comm.base.log import Log
from diloco_comm_tools.common.workers import free_port

# Two runs of the first fragment, one of the second.
SIZE = 300_001
UPDATES = 4


class Death:
    """Dies when something has happened as often as a stage says: "send RUN 5"."""

    def __init__(self, stage: str) -> None:
        self.when, self.what, number = stage.split()
        self.left = int(number)

    def meet(self, when: str, what: str) -> None:
        if (when, what) == (self.when, self.what):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def before(self, owner: Any, name: str, when: str, what: Callable[..., str]) -> None:
        """Meet the stage before each call of ``owner.name``."""
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.meet(when, what(*arguments))
            return function(*arguments, **options)

        setattr(owner, name, call)

    def after(self, owner: Any, name: str, when: str, what: Callable[..., str]) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self.meet(when, what(*arguments, result))
            return result

        setattr(owner, name, call)


def arm_worker(stage: str, name: str = "") -> None:
    """Let this process die at a stage of the worker of this name, or of any."""
    death = Death(stage)

    def kind(link: Link, message: Message | None) -> str:
        return message.kind.name if message and name in ("", link.worker) else ""

    death.before(Link, "send", "send", kind)
    death.after(Link, "send", "sent", lambda link, message, sent: kind(link, message))
    death.after(Link, "next_message", "hear", lambda link, seconds, heard: kind(link, heard))


def arm_server(stage: str) -> None:
    death = Death(stage)
    death.before(AsyncServer, "_send", "send", lambda server, peer, message: message.kind.name)
    death.before(AsyncServer, "_serve", "hear", lambda server, session, message: message.kind.name)
    death.before(snapshots.Storage, "append", "begin", lambda *_: "journal")
    death.after(snapshots.Storage, "append", "end", lambda *_: "journal")
    death.before(snapshots.Storage, "save", "begin", lambda *_: "snapshot")
    death.before(os, "replace", "rename", lambda source, target: Path(target).name)
    death.after(os, "replace", "renamed", lambda source, target, result: Path(target).name)
    append = Log.append

    def append_half(log: Log, *arguments: Any, **options: Any) -> None:
        begin = log.end
        append(log, *arguments, **options)
        if log.path.name.startswith("journal"):
            if death.left == 1:
                os.ftruncate(log.fileno(), (begin + log.end) // 2)
            death.meet("tear", "journal")

    if death.when == "tear":
        Log.append = append_half  # type: ignore[method-assign]


def run_and_die(main: Callable[[], None]) -> None:
    """Run ``main`` in a child that is to kill itself."""
    pid = os.fork()
    if pid == 0:
        try:
            main()
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status


class Server:
    """A server in a child process."""

    def __init__(self, folder: Path, address: str, size: int = SIZE) -> None:
        self.options = argparse.Namespace(
            folder=folder / "state", address=address, size=size, snapshot_every=3,
            server={"sync_every": 1}, user=None,
        )  # fmt: skip

    def run(self, stage: str = "") -> None:
        if stage:
            arm_server(stage)
        server_main(self.options)

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Serve without a fault, and end with SIGTERM."""
        pid = os.fork()
        if pid == 0:
            self.run()
            os._exit(0)
        wait_until(is_over, 60)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def worker_options(
    folder: Path, address: str, index: int, fetch: str = "parameters"
) -> argparse.Namespace:
    return argparse.Namespace(
        address=address, index=index, size=SIZE, pause=0.0, updates=UPDATES,
        log=log(folder, index), fetch=fetch, busy_at=-1, name="",
    )  # fmt: skip


def log(folder: Path, index: int) -> Path:
    return folder / f"worker-{index}.log"


def logs(folder: Path, world: int) -> dict[int, Path]:
    return {index: log(folder, index) for index in range(world - 1)}


# Runs 4 to 6 belong to the second update, runs from 7 on to the third version.
WORKER_STAGES = [
    "sent HELLO 1", "hear DATA 2", "send PUSH 2", "send RUN 5", "sent RUN 6", "hear OUTCOME 2",
    "hear READY 3", "hear DATA 8", "sent DONE 3",
]  # fmt: skip


def workers_die(rank: int, world: int, folder: Path, address: str) -> None:
    """Rank 0 is the server; every other rank dies at its stage, and its successor goes on."""
    if rank == 0:
        ended = [folder / f"ended-{index}" for index in range(world - 1)]
        Server(folder, address).run_until(lambda: all(path.exists() for path in ended))
        return
    options = worker_options(folder, address, rank - 1)

    def die() -> None:
        arm_worker(WORKER_STAGES[rank - 1])
        worker_main(options)

    run_and_die(die)
    worker_main(options)
    (folder / f"ended-{rank - 1}").touch()


def test_a_worker_may_die_in_any_phase(fresh_workers: Callable[..., Pool], tmp_path: Path) -> None:
    pool = fresh_workers(len(WORKER_STAGES) + 1, init_group=False)
    pool.run(workers_die, tmp_path, f"tcp://127.0.0.1:{free_port()}", timeout=90)
    header = check_ledger(tmp_path / "state", logs(tmp_path, pool.world), SIZE)
    assert header["model"]["version"] == UPDATES * len(WORKER_STAGES)


# Every run of the two buffers comes by itself, both runs of an update's first fragment in one
# message: messages of the second round are the 3rd and 4th with bytes, of data the 6th and 7th.
FOLLOWER_STAGES = [
    "send FOLLOW 1", "hear STATE 1", "hear DATA 2", "sent DONE 1", "hear KEPT 1", "send PUSH 2",
    "sent RUN 3", "send RUN 4", "hear OUTCOME 2", "send FOLLOW 3", "hear UPDATES 2",
    "send GET_UPDATE 3", "hear DATA 6", "hear DATA 7", "sent DONE 3",
]  # fmt: skip


def with_company(folder: Path, address: str, index: int) -> Callable[[AsyncDiLoCo], bool]:
    """Return a turn of another worker, after which a follower has an update to fetch."""
    options = {"size": SIZE, "fragments": ["a", "b"]}
    rows = log(folder, index).open("a", buffering=1)
    model, other = attach(
        address, f"w{index}", **options,
        on_round=lambda m: rows.write(json.dumps([m.seq, m.version, m.refusal]) + "\n"),
    )  # fmt: skip
    g = torch.zeros(SIZE)
    g[index] = 1.0

    def turn(follower: AsyncDiLoCo) -> bool:
        assert follower._follower.version == follower.version
        if follower.seq < UPDATES:
            model.descend(g)
            other.step()
            return False
        other.close()
        exact, reader = attach(address, "reader", **options)
        reader.close()
        assert torch.equal(torch.cat(follower._local.outer), exact.values())
        return True

    return turn


def followers_die(rank: int, world: int, folder: Path, address: str) -> None:
    """Rank 1 runs a series of followers; each dies at its stage, and the next takes its place."""
    if rank == 0:
        Server(folder, address).run_until((folder / "over").exists)
        return
    for number, stage in enumerate(FOLLOWER_STAGES):
        index = 2 * number

        def go_on(index: int = index) -> None:
            turn = with_company(folder, address, index + 1)
            worker_main(worker_options(folder, address, index, "updates"), turn)

        def die(index: int = index, stage: str = stage) -> None:
            arm_worker(stage, f"w{index}")
            go_on(index)

        run_and_die(die)
        go_on()
    (folder / "over").touch()


@pytest.mark.nightly("6 s; test_async_following has a follower whose server dies")
def test_a_follower_may_die_in_any_phase(
    fresh_workers: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = fresh_workers(2, init_group=False)
    pool.run(followers_die, tmp_path, f"tcp://127.0.0.1:{free_port()}", timeout=90)
    own = range(0, 2 * len(FOLLOWER_STAGES), 2)
    every = {index: log(tmp_path, index) for index in range(2 * len(FOLLOWER_STAGES))}
    header = check_ledger(tmp_path / "state", every, SIZE)
    assert all(header["ledger"][f"w{index}"]["num_applied"] == UPDATES for index in own)


SERVER_STAGES = [
    "hear PUSH 2", "hear RUN 5", "begin journal 2", "tear journal 2", "end journal 2",
    "send READY 2", "send DATA 5", "rename snapshot 1", "renamed snapshot 1",
]  # fmt: skip


def the_server_dies(rank: int, world: int, folder: Path, address: str) -> None:
    """Rank 0 runs a series of servers; the workers train until the last server is there."""
    over = folder / "over"
    if rank == 0:
        server = Server(folder, address)
        for stage in SERVER_STAGES:
            run_and_die(lambda stage=stage: server.run(stage))
        over.touch()
        ended = [folder / f"ended-{index}" for index in range(world - 1)]
        server.run_until(lambda: all(path.exists() for path in ended))
        return
    worker_main(worker_options(folder, address, rank - 1), lambda worker: over.exists())
    (folder / f"ended-{rank - 1}").touch()


@pytest.mark.nightly("9 s; test_async_snapshots has a server that is started again")
def test_the_server_may_die_in_any_phase(
    fresh_workers: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = fresh_workers(3, init_group=False)
    pool.run(the_server_dies, tmp_path, f"tcp://127.0.0.1:{free_port()}", timeout=110)
    header = check_ledger(tmp_path / "state", logs(tmp_path, pool.world), SIZE)
    # Each restart went on: some stages are reached only after updates that were applied.
    assert header["model"]["version"] > len(SERVER_STAGES) // 2


def first_worker_dies(rank: int, world: int, folder: Path, address: str, stage: str) -> None:
    ended = folder / "ended"
    if rank == 0:
        Server(folder, address, size=0).run_until(ended.exists)
        return
    options = worker_options(folder, address, 0)

    def die() -> None:
        arm_worker(stage)
        worker_main(options)

    run_and_die(die)
    worker_main(options)
    ended.touch()


@pytest.mark.parametrize("stage", ["send RUN 2", "sent RUN 3", "hear OUTCOME 1"])
def test_a_worker_may_die_while_it_gives_the_first_parameters(
    stage: str, fresh_workers: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = fresh_workers(2, init_group=False)
    address = f"tcp://127.0.0.1:{free_port()}"
    pool.run(first_worker_dies, tmp_path, address, stage, timeout=60)
    header = check_ledger(tmp_path / "state", logs(tmp_path, pool.world), SIZE)
    assert header["model"]["version"] == UPDATES
