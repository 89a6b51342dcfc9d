"""What a caller does wrong is one clear sentence, and leaves everything as it was."""

from __future__ import annotations

import copy
import json
import math
import socket
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from problems import Regression, attach, train_step
from torch import nn

from diloco_comm import (
    CO2,
    DiLoCo,
    Eager,
    Link,
    Nesterov,
    StorePeers,
    Streaming,
)
from diloco_comm.ops.wire import WireFormat

# -------------------------------------------------------------------- the caller's own mistakes


class Wrapper(torch.optim.Optimizer):
    """A wrapper as accelerate has: an Optimizer whose __init__ never ran."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()


class Unhookable:
    """Has no hooks and nothing inside."""


def test_wrapped_optimizers_are_found() -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with DiLoCo(model, Wrapper(Wrapper(optimizer)), sync_every=1) as diloco:
        train_step(model, optimizer, 0, 0)
        assert diloco.inner_step == 1


class Imitation:
    """A wrapper as Fabric has: an Optimizer by its class, whose attributes are the inner one's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Imitation", (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(self) -> None:
        self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


@pytest.mark.parametrize("wrap", [lambda one: one, Wrapper])
def test_steps_of_an_imitated_optimizer_count(wrap: Callable[[Any], Any]) -> None:
    model = Regression()
    optimizer: Any = Imitation(torch.optim.SGD(model.parameters(), lr=0.01))
    with DiLoCo(model, wrap(optimizer), sync_every=1) as diloco:
        for step in range(2):
            train_step(model, optimizer, 0, step)
        assert diloco.inner_step == 2


@pytest.mark.parametrize("optimizer", [Unhookable(), Wrapper(Unhookable()), object()])
def test_an_optimizer_that_cannot_be_hooked(optimizer: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot hook the step of an? .*attach=False"):
        DiLoCo(Regression(), optimizer, sync_every=1)


class GroupsAlone(Unhookable):
    """Has parameters, and no step that could be hooked."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(params)}]


def test_without_a_hook_an_optimizer_needs_nothing_but_its_parameters() -> None:
    model = Regression()
    for optimizer in (GroupsAlone(model.parameters()), Wrapper(GroupsAlone(model.parameters()))):
        with DiLoCo(model, optimizer, sync_every=1, attach=False) as diloco:
            diloco.step()
            assert diloco.totals().num_syncs == 1
    with pytest.raises(TypeError, match="optimizer must have param_groups, got a Unhookable"):
        DiLoCo(model, Unhookable(), sync_every=1, attach=False)


@pytest.mark.parametrize("is_attached", [True, False])
def test_an_optimizer_is_attached_once(is_attached: bool) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with DiLoCo(model, Wrapper(optimizer), sync_every=1) as first:
        with pytest.raises(RuntimeError, match=r"this SGD is attached to a DiLoCo .* close\(\)"):
            DiLoCo(model, optimizer, sync_every=1, attach=is_attached)
        train_step(model, optimizer, 0, 0)
        assert first.totals().num_syncs == 1
        twin = copy.deepcopy((model, optimizer))
        with DiLoCo(*twin, sync_every=1) as other:
            train_step(*twin, 0, 0)
            assert other.inner_step == 1 == first.inner_step
    with pytest.raises(ValueError, match="impl"):
        DiLoCo(model, optimizer, sync_every=1, impl="mmx")
    with DiLoCo(model, optimizer, sync_every=1) as second:
        train_step(model, optimizer, 0, 1)
        assert second.inner_step == 1


def test_a_step_is_not_counted_by_hand_too() -> None:
    model, optimizer, diloco = attach(sync_every=1)
    with diloco:
        train_step(model, optimizer, 0, 0)
        with pytest.raises(RuntimeError, match=r"counted already: .*attach=False"):
            diloco.step()
        assert diloco.inner_step == 1


CLOSED: dict[str, Callable[[DiLoCo], Any]] = {
    "with": lambda diloco: diloco.__enter__(),
    "step": lambda diloco: diloco.step(),
    "flush": lambda diloco: diloco.flush(),
    "consensus": lambda diloco: diloco.consensus(),
    "change_group": lambda diloco: diloco.change_group([0]),
    "load": lambda diloco: diloco.load_state_dict(diloco.state_dict()),
}


@pytest.mark.parametrize("call", CLOSED)
@pytest.mark.parametrize("is_attached", [True, False])
def test_what_is_closed_cannot_be_used(call: str, is_attached: bool) -> None:
    diloco = attach(attach=is_attached)[2]
    diloco.close()
    with pytest.raises(RuntimeError, match=r"^this DiLoCo is closed$") as info:
        CLOSED[call](diloco)
    assert type(info.value) is RuntimeError


def test_what_is_closed_can_be_looked_at() -> None:
    model, optimizer, diloco = attach(sync_every=1)
    train_step(model, optimizer, 0, 0)
    diloco.close()
    diloco.close()
    with diloco.outer_parameters():
        assert diloco.outer_hash() and diloco.config() and diloco.state_dict()["inner_step"] == 1
    assert len(diloco.metrics()) == diloco.totals().num_syncs == 1


def test_no_state_is_loaded_while_the_model_holds_the_outer_parameters() -> None:
    model, optimizer, diloco = attach(sync_every=2)
    with diloco:
        train_step(model, optimizer, 0, 0)
        state = copy.deepcopy(diloco.state_dict())
        with diloco.outer_parameters(), pytest.raises(RuntimeError, match="leave outer_parameters"):
            diloco.load_state_dict(state)
        diloco.load_state_dict(state)


def test_what_cannot_be_called_is_no_callback() -> None:
    with attach()[2] as diloco, pytest.raises(TypeError, match=r"on_sync takes .* got 3"):
        diloco.on_sync(3)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"sync_every": 0}, ValueError, "sync_every must be an integer of at least 1, got 0"),
        (
            {"sync_every": 2**31},
            ValueError,
            "sync_every must be at most 2147483647, which a header",
        ),
        ({"lanes": 2**31}, ValueError, "lanes must be at most 2147483647, which a header holds"),
        ({"sync_every": None}, ValueError, "sync_every is missing"),
        ({"wire": "int3"}, ValueError, "unknown wire 'int3': it must be one of fp32, bf16"),
        ({"block_size": 100}, ValueError, "block_size must be one of 32, 64"),
        ({"overlap": "late"}, ValueError, "unknown overlap 'late': it must be one of Blocking"),
        ({"overlap": 3}, TypeError, "unknown overlap 3: it must be one of Blocking"),
        ({"rounding": "up"}, ValueError, "rounding must be one of nearest, stochastic, got 'up'"),
        ({"init": "zero"}, ValueError, "init must be one of broadcast, check, join, got 'zero'"),
        (
            {"on_nonfinite": "x"},
            ValueError,
            "nonfinite must be one of raise, skip, reset, got 'x'",
        ),
        ({"impl": "mmx"}, ValueError, "impl must be one of"),
        ({"timeout": 0}, ValueError, "timeout must be positive, got 0"),
        ({"lanes": 0}, ValueError, "lanes must be an integer of at least 1, got 0"),
        ({"lanes": 1.5}, ValueError, "lanes must be an integer of at least 1, got 1.5"),
        ({"chunk_bytes": "1"}, ValueError, "chunk_bytes must be an integer of at least 1, got '1'"),
        ({"seed": "x"}, ValueError, "seed must be an integer, got 'x'"),
        ({"offsets": [1.5]}, ValueError, "each of offsets must be an integer, got 1.5"),
        ({"fragments": [1]}, TypeError, "fragments must be a number, a string or patterns, got"),
        ({"impl": None}, TypeError, "impl must be a name, or .* got None"),
        ({"timeout": "abc"}, TypeError, "timeout must be a number, got 'abc'"),
        ({"weight": "x"}, TypeError, "weight must be a number or a function, got 'x'"),
        ({"weight": -1}, ValueError, "weight must be finite and not negative, got -1.0"),
        ({"weight": math.nan}, ValueError, "weight must be finite and not negative, got nan"),
        ({"weight": 0}, ValueError, r"the weights of all replicas are zero: \[0.0\]"),
        ({"config": 3}, TypeError, "config must be a dictionary or a JSON file, got 3"),
        ({"error_feedback": "no"}, TypeError, "error_feedback must be True or False, got 'no'"),
        ({"average_buffers": 0}, TypeError, "average_buffers must be True or False, got 0"),
        ({"norms": "no"}, TypeError, "norms must be True or False, got 'no'"),
        (
            {"wire": WireFormat("int8", 64), "block_size": 256},
            ValueError,
            r"block_size=256 is not that of wire=WireFormat\(.*\): give one",
        ),
        ({"replica": 0}, ValueError, "StorePeers needs store=, a Store or 'tcp://host:port'"),
        ({"store": dist.HashStore()}, ValueError, "StorePeers needs replica=, and one of of="),
        (
            {"store": dist.HashStore(), "replica": 4, "num_replicas": 2},
            ValueError,
            r"replica must be one of the members \[0, 1\], got 4",
        ),
        (
            {"store": "host", "replica": 0, "num_replicas": 1},
            ValueError,
            "store must be tcp://host:port with a port from 1 to 65535, .*, got 'host'",
        ),
        ({"store": 5}, TypeError, r"store must be tcp://host:port .*, got 5"),
        (
            {"store": dist.HashStore(), "replica": "0", "num_replicas": 1},
            ValueError,
            "replica must be an integer of at least 0, got '0'",
        ),
        (
            {"store": dist.HashStore(), "replica": 2**31, "members": [0, 2**31]},
            ValueError,
            "replica must be at most 2147483647, which a header holds, got 2147483648",
        ),
        (
            {"store": dist.HashStore(), "replica": 0, "num_replicas": 1.5},
            ValueError,
            r"of must be an integer of at least 1, got 1\.5",
        ),
        ({"store": dist.HashStore(), "replica": 0, "members": 2}, TypeError, "members must be"),
        ({"store": dist.HashStore(), "replica": 0, "num_replicas": 9**9}, ValueError, "at most"),
        (
            {"store": dist.HashStore(), "replica": 0, "num_replicas": 1, "name": ""},
            TypeError,
            "name must be a text that is not empty, got ''",
        ),
        ({"peers": "x"}, TypeError, "peers must be a ProcessGroup, a DeviceMesh, StorePeers"),
        ({"config": {"lr": 1}}, ValueError, r"config has unknown arguments \['lr'\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be(arguments: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        attach(**arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"peers": {"replica": 2, "of": 2}}, r"replica must be one of the members \[0, 1\], got 2"),
        ({"peers": {"replica": -1, "of": 2}}, "replica must be an integer of at least 0, got -1"),
        ({"peers": {"replica": True, "of": 2}}, "replica must be an integer .*, got True"),
        ({"peers": {"replica": 0, "of": 0}}, "of must be an integer of at least 1, got 0"),
        ({"peers": {"replica": 0, "members": [0, 1.5]}}, "each of members must be .*, got 1.5"),
        ({"link": {"join_timeout": 0}}, "join_timeout must be positive, got 0"),
        ({"link": {"suspect_after": math.inf}}, "suspect_after must be finite, got inf"),
    ],
)
def test_numbers_are_checked_before_a_store_is_dialled(
    arguments: dict[str, dict[str, Any]], sentence: str
) -> None:
    """Nothing listens at this store, and the attempt to connect would take 20 seconds."""
    numbers = arguments.get("peers", {"replica": 0, "of": 2})
    link = Link("tcp", timeout=20.0, **arguments.get("link", {}))
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peers, began = StorePeers("tcp://127.0.0.1:1", **numbers), time.monotonic()
    with pytest.raises(ValueError, match=sentence):
        DiLoCo(model, optimizer, sync_every=1, peers=peers, link=link)
    assert time.monotonic() - began < 10


def test_numbers_of_numpy_are_as_good_as_those_of_python() -> None:
    one, two = np.int64(1), np.int64(2)
    numbers: dict[str, Any] = {"sync_every": two, "fragments": one, "offsets": np.array([2])}
    numbers |= {"seed": one, "lanes": one, "chunk_bytes": np.int64(64), "block_size": np.int64(64)}
    numbers |= {"outer": Nesterov(np.float32(0.5), np.float32(0.5)), "weight": np.float32(2)}
    for overlap in (Eager(one), Streaming(one, np.float32(0.5)), CO2(clip=np.float32(1))):
        model, optimizer, diloco = attach(overlap=overlap, **numbers)
        with diloco:
            for step in range(5):
                train_step(model, optimizer, 0, step)
            assert diloco.totals().num_syncs >= 1
            assert json.loads(json.dumps(diloco.config())) == diloco.config()


def test_what_is_no_model_or_no_state_is_refused() -> None:
    model, _, diloco = attach()
    with diloco, pytest.raises(TypeError, match="the saved state must be a dictionary, got NoneTy"):
        diloco.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got NoneType"):
        DiLoCo(None, torch.optim.SGD(model.parameters()), sync_every=1)  # type: ignore[arg-type]


def test_a_buffer_on_another_device_is_refused() -> None:
    model = nn.BatchNorm1d(3)
    model.running_mean = torch.zeros(3, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"^buffer 'running_mean' is on meta: only .* CPU memory"):
        DiLoCo(model, optimizer, sync_every=1, average_buffers=True)


def test_a_buffer_with_gaps_is_refused_and_a_mask_left_out() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("mask", torch.full((3,), -torch.inf))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=1, average_buffers=True) as diloco:
        assert set(diloco.parts[-1].named()) == {"running_mean", "running_var"}
    model.register_buffer("stretched", torch.zeros(1).expand(3))
    with pytest.raises(ValueError, match=r"^buffer 'stretched' of shape \[3\] and strides \[0\]"):
        DiLoCo(model, optimizer, sync_every=1, average_buffers=True)


def test_a_store_that_nobody_serves_is_given_up_after_the_timeout() -> None:
    """torch alone would try for five minutes."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound, but nobody listens
        address = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(dist.DistError):
            attach(store=address, replica=0, num_replicas=2, timeout=1.0)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_cannot_be(weight: float) -> None:
    model, optimizer, diloco = attach(sync_every=1, weight=lambda: weight)
    with pytest.raises(ValueError, match="weight must be finite and not negative"):
        train_step(model, optimizer, 0, 0)
    diloco.close()


def not_in_group(rank: int, world: int) -> str:
    group = dist.new_group([0, 1])
    if rank < 2:
        attach(group=group)[2].close()
        return ""
    with pytest.raises(ValueError) as info:
        attach(group=group)
    return str(info.value)


def test_a_group_without_this_rank(workers) -> None:
    results = workers(3).run(not_in_group)
    assert results[:2] == ["", ""] and results[2].startswith("group does not contain this rank")


def ddp_over_replicas(rank: int, world: int) -> list[str]:
    sentences = []
    both, *alone = [dist.new_group(ranks) for ranks in ([0, 1], [0], [1])]
    for group in (both, alone[rank]):
        model = nn.parallel.DistributedDataParallel(Regression(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with DiLoCo(model, optimizer, sync_every=1) as diloco:
                assert diloco.parts[0].fragment.names[0] == "layers.0.weight"
        messages = [str(warning.message) for warning in caught]
        sentences.append(" ".join(text for text in messages if "averages gradients" in text))
    return sentences


def test_ddp_over_the_replicas_draws_a_warning(workers) -> None:
    for spans, own in workers(2).run(ddp_over_replicas):
        assert "averages gradients over ranks [0, 1] at every step" in spans and own == ""


def batch_norms_over_replicas(rank: int, world: int) -> list[str]:
    sentences = []
    alone = [dist.new_group([each]) for each in range(world)]
    for group in (None, alone[rank]):
        layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = nn.SyncBatchNorm.convert_sync_batchnorm(layers, group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            DiLoCo(model, optimizer, sync_every=1).close()
        sentences.append(" ".join(str(warning.message) for warning in caught))
    return sentences


def test_batch_norms_over_the_replicas_draw_a_warning(workers) -> None:
    """The default group of the layers is the group of the replicas."""
    sentence = "SyncBatchNorm averages the statistics of each batch over ranks [0, 1] at every step"
    for spans, own in workers(2).run(batch_norms_over_replicas):
        assert spans.startswith(sentence) and "process_group of this replica's own" in spans
        assert own == ""
