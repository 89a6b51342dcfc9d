"""The end of a ``with`` block on a server: the rest is shared, but for an error, and all is closed.

``AsyncDiLoCo`` and ``DecoupledDiLoCo`` promise the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from async_helpers import Flat, serving, wait_until
from async_helpers import attach as attach_worker
from decoupled_processes import SIZE, make_server
from decoupled_processes import attach as attach_learner

from diloco_comm.asynchronous import AsyncDiLoCo, AsyncServer, DecoupledDiLoCo, DecoupledServer
from diloco_comm.asynchronous.link import read_status

Server = AsyncServer | DecoupledServer
Worker = AsyncDiLoCo | DecoupledDiLoCo
DOORS = pytest.mark.parametrize("door", ["async", "decoupled"])
# A send comes after as many steps, which no test takes.
EVERY = 50


@contextmanager
def attached(door: str) -> Iterator[tuple[Server, Flat, Worker]]:
    """Give a server and its one worker, which begins with ones (async) or zeros."""
    if door == "async":
        with serving(sync_every=EVERY) as server:
            yield server, *attach_worker(server.address, "a", SIZE)
    else:
        with make_server({"receipt": "carry", "sync_every": EVERY}) as server:
            yield server, *attach_learner(server.address, "a")


def descend(model: Flat, worker: Worker, steps: int) -> None:
    """Subtract 1 from every element in each step."""
    for _ in range(steps):
        model.descend(torch.ones(SIZE))
        worker.step()


def shared_by(server: Any) -> set[float]:
    """Return the values that the elements of a stopped server's shared model have."""
    parameters = torch.utils._pytree.tree_leaves(server.parameters())
    return {value for tensor in parameters for value in tensor.flatten().tolist()}


def check_left(server: Server) -> None:
    wait_until(lambda: read_status(server.address, timeout=20.0)["connections"] == 0)


@DOORS
def test_a_block_shares_the_steps_since_the_last_send(door: str) -> None:
    with attached(door) as (server, model, worker):
        start = model.values()[0].item()
        with warnings.catch_warnings():
            # No step is lost, so no warning says so.
            warnings.simplefilter("error")
            with worker:
                descend(model, worker, 7)
        check_left(server)
    assert shared_by(server) == {start - 7.0}


@DOORS
def test_a_block_that_ends_by_an_error_shares_nothing(door: str) -> None:
    with attached(door) as (server, model, worker):
        start = model.values()[0].item()
        with pytest.raises(KeyError, match="of the user"), worker:
            descend(model, worker, 7)
            raise KeyError("of the user")
        check_left(server)
    assert shared_by(server) == {start}


@DOORS
def test_a_block_may_be_closed_within(door: str) -> None:
    with attached(door) as (server, model, worker):
        start = model.values()[0].item()
        with worker:
            descend(model, worker, 7)
            with pytest.warns(RuntimeWarning, match="is lost, up to inner step 7"):
                worker.close()
        check_left(server)
    assert shared_by(server) == {start}
