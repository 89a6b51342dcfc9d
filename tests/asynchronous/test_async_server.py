"""Server and workers over sockets: applied updates, versions and lengths of rounds."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from async_helpers import (
    Flat,
    attach,
    serving,
    status,
    wait_until,
)
from problems import Regression, equal, parameters_of, train_step
from test_async_rules import EXAMPLE, EXAMPLE_RULES, STREAM
from torch import nn

from diloco_comm import Link, Wire
from diloco_comm.asynchronous import server as service
from diloco_comm.asynchronous.link import ServerRefused
from diloco_comm.asynchronous.rules import DelayedNesterov
from diloco_comm.asynchronous.worker import AsyncDiLoCo
from diloco_comm.base.service.sockets import send_to_peer


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
            model,
            optimizer,
            server=address,
            wire=Wire(wire, error_feedback=feedback),
            link=Link(timeout=60.0),
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
            AsyncDiLoCo(model, optimizer, server=server.address, link=Link(timeout=20.0))
    with serving(parameters=[start[:-1], start[-1:]]) as server:
        worker = AsyncDiLoCo(
            model, optimizer, server=server.address, link=Link(timeout=20.0), wire="fp32",
            attach=False, fragments=["a", "b"],
        )  # fmt: skip
        assert torch.equal(model.values(), start)
        g = torch.randn(size, generator=torch.Generator().manual_seed(1))
        model.descend(g)
        moved = model.values()
        worker.step()
        torch.testing.assert_close(model.values(), moved, rtol=0, atol=1e-6)
        worker.close()


@pytest.mark.parametrize("fetch", ["parameters", "updates"])
def test_no_message_for_a_worker_with_many_small_fragments_is_refused(
    fetch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters to start from, two updates, and downloads, each of 300 fragments."""
    refused: list[zmq.Again] = []

    def send(*arguments: Any, **options: Any) -> None:
        try:
            send_to_peer(*arguments, **options)
        except zmq.Again as error:
            refused.append(error)
            raise

    monkeypatch.setattr(service, "send_to_peer", send)
    model = nn.ParameterList(nn.Parameter(torch.ones(3 + i % 5)) for i in range(300))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with serving() as server:
        worker = AsyncDiLoCo(
            model, optimizer, server=server.address, link=Link(timeout=60.0), wire="fp32",
            attach=False, fragments=300, fetch=fetch,
        )  # fmt: skip
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        for _ in range(2):
            optimizer.step()
            worker.step()
        worker.close()
        server.stop()
        assert len(server.parameters()) == 300 and torch.cat(server.parameters()).eq(0).all()
    assert not refused


def test_a_grace_period_makes_workers_start_together() -> None:
    with serving(grace=30.0) as server:
        (one, a), (two, b) = attach(server.address, "a"), attach(server.address, "b")
        one.descend(torch.ones(7))
        thread = threading.Thread(target=a.step)
        thread.start()
        wait_until(lambda: status(server)["updates"] == 1)
        two.descend(torch.ones(7))
        # No other worker trains, so the window closes long before its 30 seconds.
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


def test_parameters_that_move_to_another_storage_get_their_values_back() -> None:
    with serving() as server:
        model, worker = attach(server.address, "a")
        model.descend(torch.ones(7))
        before = model.values().clone()
        with worker.outer_parameters():
            model.a.data = model.a.data.clone()
        assert torch.equal(model.values(), before)
        worker.close()


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
                model,
                optimizer,
                server=server.address,
                name="a",
                attach=is_hooked,
                link=Link(timeout=20.0),
            )
            for step in range(10):
                train_step(model, optimizer, 0, step)
                if not is_hooked:
                    worker.step()
            worker.close()
            train_step(model, optimizer, 0, 11)
            return parameters_of(model)

    assert equal(run(True), run(False))


class GroupsAlone:
    """Has parameters, and no step that could be hooked."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(params)}]


def test_without_a_hook_an_optimizer_needs_nothing_but_its_parameters() -> None:
    with serving() as server:
        model = Flat()
        optimizer = GroupsAlone(model.parameters())
        with AsyncDiLoCo(model, optimizer, server=server.address, attach=False) as worker:
            worker.step()
            assert worker.seq == 1
        with pytest.raises(TypeError, match=r"cannot hook the step of a GroupsAlone"):
            AsyncDiLoCo(model, optimizer, server=server.address)
