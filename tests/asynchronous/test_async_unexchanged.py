"""Tensors that no exchange carries, and tensors in shared memory: what servers refuse."""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from async_helpers import HELLO, PUSH, Flat, Peer, payload, serving, wait_until
from decoupled_processes import SIZE, make_server

from diloco_comm import Link
from diloco_comm.asynchronous import AsyncDiLoCo, DecoupledDiLoCo
from diloco_comm.asynchronous.link import ServerRefused
from diloco_comm.asynchronous.messages import Kind, Message

DOORS = pytest.mark.parametrize("door", ["async", "decoupled"])


def serve(door: str, **options: object) -> AbstractContextManager:
    return serving(**options) if door == "async" else make_server(**options)


class Beside(Flat):
    """A model with a frozen parameter, persistent buffers and statistics of a normalisation."""

    def __init__(self, frozen: float = 1.0, buffer: float = 2.0, other: float = 3.0) -> None:
        super().__init__(SIZE)
        self.frozen = torch.nn.Parameter(torch.full((5,), frozen), requires_grad=False)
        self.register_buffer("kept", torch.full((3,), buffer))
        self.register_buffer("passing", torch.full((3,), other), persistent=False)
        self.norm = torch.nn.BatchNorm1d(4, affine=False)
        self.norm.running_mean += other


def attach(door: str, address: str, name: str, model: torch.nn.Module, **options: object):
    make = AsyncDiLoCo if door == "async" else DecoupledDiLoCo
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    return make(
        model,
        optimizer,
        server=address,
        name=name,
        link=Link(timeout=20.0),
        attach=False,
        **options,
    )  # type: ignore[arg-type]


@DOORS
def test_other_frozen_parameters_or_buffers_get_one_sentence(door: str) -> None:
    with serve(door) as server:
        first = attach(door, server.address, "a", Beside())
        for model, what in (
            (Beside(frozen=9.0), "frozen parameters"),
            (Beside(9.0, 9.0), "frozen parameters and persistent buffers"),
            (Flat(SIZE), "frozen parameters and persistent buffers"),
        ):
            sentence = (
                f"refused worker b: the {what} of this worker differ from the first worker's, and "
                "no exchange makes them alike: load the same weights on all workers before they "
            )
            with pytest.raises(ServerRefused, match=sentence):
                attach(door, server.address, "b", model)
        wait_until(lambda: server.report()["refused"].get("unexchanged", 0) >= 3)
        # Buffers may be each worker's own.
        with pytest.warns(RuntimeWarning, match="the persistent buffers of this worker differ"):
            attach(door, server.address, "b", Beside(buffer=9.0)).close()
        # Statistics of normalisations and buffers that are not saved are each worker's own.
        attach(door, server.address, "c", Beside(other=9.0)).close()
        first.close()


@DOORS
def test_a_worker_may_take_a_difference_for_a_warning_or_say_nothing(door: str) -> None:
    with serve(door) as server:
        workers = [attach(door, server.address, "a", Beside(), checks="off")]
        # The first worker that says what it has decides.
        workers.append(attach(door, server.address, "b", Beside()))
        with pytest.warns(RuntimeWarning, match="the persistent buffers of this worker differ"):
            workers.append(attach(door, server.address, "c", Beside(buffer=9.0), checks="warn"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            workers.append(attach(door, server.address, "d", Beside(9.0), checks="off"))
            workers.append(attach(door, server.address, "e", Beside(), checks="warn"))
        assert "unexchanged" not in server.report()["refused"]
        for worker in workers:
            worker.close()


@DOORS
@pytest.mark.parametrize("compares", [True, False])
def test_the_snapshot_keeps_what_the_first_worker_has(
    door: str, compares: bool, tmp_path: Path
) -> None:
    """Nothing is kept of a first worker that compares nothing: the next worker decides."""
    with serve(door, snapshot=tmp_path) as server:
        attach(door, server.address, "a", Beside()).close()
        if not compares:
            server.state.unexchanged = None
            server.state.save()
    with serve(door, snapshot=tmp_path) as server:
        if not compares:
            attach(door, server.address, "b", Beside(frozen=9.0)).close()
            with pytest.raises(ServerRefused, match="the frozen parameters of this worker differ"):
                attach(door, server.address, "a", Beside())
        else:
            with pytest.raises(ServerRefused, match="the frozen parameters of this worker differ"):
                attach(door, server.address, "b", Beside(frozen=9.0))
            attach(door, server.address, "a", Beside()).close()


def test_of_two_first_workers_one_with_other_frozen_parameters_is_refused() -> None:
    """Both workers say HELLO before the server knows which one gives its parameters."""
    start = Message(Kind.PUSH, 1, meta={**PUSH, "is_start": True})
    with serving() as server, Peer(server.address) as one, Peer(server.address) as two:
        hellos = [
            {**HELLO, "worker": name, "unexchanged": [number, 1], "warns": False}
            for name, number in (("one", 1), ("two", 2))
        ]
        for peer, meta in zip((one, two), hellos, strict=True):
            peer.say(Message(Kind.HELLO, meta=meta))
            assert peer.hear().meta["needs_start"]
        one.say(start)
        assert one.hear().kind == Kind.WANT
        one.say(Message(Kind.RUN, 1, body=payload([1.0] * 7)))
        assert one.hear().kind == Kind.OUTCOME
        two.say(Message(Kind.PULL))
        assert two.hear().kind == Kind.UNKNOWN
        two.say(Message(Kind.HELLO, meta=hellos[1]))
        answer = two.hear()
        assert answer.kind == Kind.REFUSED and "frozen parameters of" in answer.meta["reason"]


@DOORS
def test_workers_with_the_same_tensors_in_shared_memory_are_refused(door: str) -> None:
    with serve(door) as server:
        model = Flat(SIZE).share_memory()
        first = attach(door, server.address, "a", model)
        sentence = (
            "workers a and b train the same tensors in shared memory, as torch.multiprocessing "
            "passes a model to its processes: make the model in each process, or begin there with"
        )
        with pytest.raises(ServerRefused, match=sentence):
            attach(door, server.address, "b", model)
        # A copy lies elsewhere, also in shared memory.
        attach(door, server.address, "b", copy.deepcopy(model)).close()
        attach(door, server.address, "c", copy.deepcopy(model).share_memory()).close()
        first.close()
        wait_until(lambda: not server.state.sessions.all())
        attach(door, server.address, "d", model).close()
