"""Several DiLoCo objects of one layout over the same peers: names tell them apart."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco_comm import Blocking, Delayed, DiLoCo, Elastic, Link, StorePeers, Streaming
from diloco_comm_tools.common.workers import free_port

NUM_STEPS = 8


class Critic:
    """A layer that the first replica has made as others have; nothing moves it at a rate of 0."""

    def __init__(self, kind: str, **arguments: Any) -> None:
        torch.manual_seed(ord(kind))
        self.layer = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.0)
        self.start = self.layer.weight.detach().clone()
        choices = {"sync_every": 2, "wire": "fp32", "link": Link(timeout=60.0), **arguments}
        self.diloco = DiLoCo(self.layer, self.optimizer, **choices)

    def step(self) -> None:
        self.layer(torch.ones(1, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def moved(self) -> Tensor:
        return (self.layer.weight - self.start).abs().max()


def train(critics: dict[str, Critic]) -> list[bool]:
    """Train the critics in turns; return whether each has met its own peer."""
    for _ in range(NUM_STEPS):
        for kind in sorted(critics):
            critics[kind].step()
    for kind in sorted(critics):
        critics[kind].diloco.flush()
        critics[kind].diloco.close()
    return [bool(critics[kind].moved() < 1e-6) for kind in sorted(critics)]


# ------------------------------------------------------------------------------- without a name


def without_names(rank: int, world: int, overlap: Any) -> tuple[float, str]:
    """Make two objects in turns."""
    critics = {kind: Critic(kind, overlap=overlap) for kind in ("ab", "ba")[rank]}
    began = time.monotonic()
    with pytest.raises(RuntimeError) as info:
        train(critics)
    for kind in critics:
        critics[kind].diloco.close()
    return time.monotonic() - began, str(info.value)


@pytest.mark.parametrize("overlap", [Blocking(), Delayed(1), Streaming(1)], ids=repr)
def test_twins_without_a_name_are_refused_on_all_replicas(overlap: Any, workers) -> None:
    for seconds, sentence in workers(2).run(without_names, overlap):
        assert "two DiLoCo objects of one layout" in sentence and "name=" in sentence
        assert seconds < 20


def of_one_name(rank: int, world: int, port: int) -> str:
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    peers = StorePeers(store, rank, of=world, name="critic")
    critic = Critic("a", peers=peers)
    with pytest.raises(RuntimeError) as info:
        Critic("b", peers=peers)
    dist.barrier()
    critic.diloco.close()
    return str(info.value)


def test_twins_of_one_name_are_refused_at_a_store(workers) -> None:
    for sentence in workers(2).run(of_one_name, free_port()):
        assert "is already taken by this process" in sentence
        assert "or give the second one another name" in sentence


def one_after_the_other(rank: int, world: int, way: str) -> list[bool]:
    """Make several objects that are never in use at one time; nobody closes the first ones."""
    kept, results = [], []
    for kind in "abc":
        critic = Critic(kind)
        if way != "unused":
            results += train({kind: critic}) if way == "closed" else [critic.step() is None]
        if way == "kept":
            kept.append(critic)
    if way == "unused":
        results = [critic.step() is None]
    critic.diloco.close()
    for each in kept:
        each.diloco.close()
    return results


@pytest.mark.parametrize("way", ["closed", "dropped", "kept", "unused"])
def test_objects_that_follow_each_other_need_no_name(way: str, workers) -> None:
    for results in workers(2).run(one_after_the_other, way):
        assert results and all(results)


# ---------------------------------------------------------------------------------- with names


def with_names(rank: int, world: int, place: str, port: int) -> list[bool]:
    """Make each object on a thread of its own, in another order on the other replica."""
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)

    def make(kind: str) -> Critic:
        peers = StorePeers(store, rank, of=world) if place == "store" else None
        return Critic(kind, overlap=Delayed(1), name=f"critic {kind}", peers=peers)

    makings = {}
    with ThreadPoolExecutor(2) as threads:
        for kind in ("ab", "ba")[rank]:
            makings[kind] = threads.submit(make, kind)
            time.sleep(0.5)
    # A thread has raised its error for nobody: `result` raises the error again.
    met = train({kind: making.result() for kind, making in makings.items()})
    dist.barrier()
    return met


@pytest.mark.parametrize("place", ["group", "store"])
def test_names_meet_in_any_order(place: str, workers) -> None:
    assert workers(2).run(with_names, place, free_port()) == [[True, True]] * 2


def crossed(rank: int, world: int, names: list[str]) -> str:
    with pytest.raises(RuntimeError) as info:
        Critic("a", name=names[rank])
    return str(info.value)


@pytest.mark.parametrize("names", [["a", "b"], ["default", "b"]], ids=lambda names: names[0])
def test_names_that_wait_for_each_other_are_an_error_on_all_replicas(
    names: list[str], fresh_workers
) -> None:
    """The time-out of these exchanges is a minute, which no replica waits.

    A broadcast that only one replica began stays in the process group, which is then of no use.
    """
    began = time.monotonic()
    for sentence in fresh_workers(2).run(crossed, names):
        assert "each waits for the other" in sentence
        assert all(repr(name) in sentence for name in names)
    assert time.monotonic() - began < 45


def two_runs(rank: int, world: int, port: int) -> list[bool]:
    """Replica 0 of run a and replica 1 of run b come first, and wait for replicas of their runs."""
    kind, replica, is_late = "abab"[rank], (0, 1, 1, 0)[rank], rank > 1
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if is_late:
        store.wait(["a has waited", "b has waited"])
    else:
        # The others of both runs wait by then.
        threading.Timer(3.0, lambda: store.set(f"{kind} has waited", "")).start()
    critic = Critic(kind, peers=StorePeers(store, replica, of=2, name=f"run {kind}"))
    met = train({kind: critic})
    dist.barrier()
    return met


def test_two_runs_on_one_store_do_not_wait_for_each_other(workers) -> None:
    assert workers(4).run(two_runs, free_port()) == [[True]] * 4


def on_one_port(rank: int, world: int, port: int) -> tuple[list[bool], list[bool], int, list[str]]:
    link = Link("tcp", listen=f"127.0.0.1:{port + rank}", timeout=60.0)
    critics = {kind: Critic(kind, name=f"critic {kind}", link=link) for kind in "ab"}
    addresses = {critic.diloco.exchange.address for critic in critics.values()}
    refused = []
    for name, other in (("critic a", link), ("critic c", replace(link, advertise="localhost:1"))):
        with pytest.raises(ValueError) as info:
            Critic("c", name=name, link=other)
        refused.append(str(info.value))
    # The link outlives the first of its exchanges, and the name may be taken again.
    first = train({"a": critics["a"]})
    critics["a"] = Critic("a", name="critic a", link=link)
    return first, train(critics), len(addresses), refused


def test_objects_with_one_listen_share_a_link(workers) -> None:
    for first, both, num_addresses, refused in workers(2).run(on_one_port, free_port()):
        assert (first, both, num_addresses) == ([True], [True, True], 1)
        assert all("listens at 127.0.0.1:" in sentence for sentence in refused)
        assert "a name= each, got 'critic a' beside 'critic a', 'critic b'" in refused[0]
        assert "the same advertise= of Link, got 'localhost:1' beside None" in refused[1]


def test_a_dropped_object_gives_its_listen_free() -> None:
    """The dropped object gives its name free too, and the next one may choose other options."""
    listen = f"127.0.0.1:{free_port()}"
    for advertise in (None, None, "localhost:1"):
        link = Link("tcp", listen=listen, advertise=advertise)
        Critic("a", peers="alone", link=link).step()


def test_a_name_is_for_fixed_groups() -> None:
    with pytest.raises(ValueError, match=r"leave out name, and give Elastic a run= of its own"):
        Critic("a", name="a", peers=Elastic("tcp://127.0.0.1:1"))
    with pytest.raises(TypeError, match="given name twice"):
        Critic("a", name="a", peers=StorePeers(dist.HashStore(), 0, of=1, name="b"))


# ------------------------------------------------------------------------- the end of a program

_PROGRAM = """
import atexit, os, sys
import torch
import torch.distributed as dist
from diloco_comm import DiLoCo

rank, port, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
diloco = DiLoCo(layer, optimizer, sync_every=4, wire="fp32")
for _ in range(8 if way == "shared" else 6):
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
if way == "saved":
    diloco.state_dict()
if way == "child":
    child = os.fork()
    if not child:
        # The end of an interpreter, without the threads of gloo, which a fork leaves behind.
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    diloco.flush()
if way == "error":
    raise KeyError(way)
"""


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(
    ("way", "is_told"),
    [("", True), ("shared", False), ("saved", False), ("child", False), ("error", False)],
)
def test_the_end_of_a_program_tells_of_unshared_steps(way: str, is_told: bool, tmp_path) -> None:
    program = tmp_path / "ends.py"
    program.write_text(textwrap.dedent(_PROGRAM))
    command, port = [sys.executable, str(program)], str(free_port())
    replicas = [
        subprocess.Popen([*command, str(rank), port, way], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank, replica in enumerate(replicas):
        told = replica.communicate(timeout=90)[1]
        lost = f"what replica {rank} learned since its last exchange is lost, up to inner step 6"
        assert (lost in told, "flush()" in told) == (is_told, is_told), told
        assert replica.returncode == (way == "error")
