"""What goes wrong is one clear sentence, on every replica, and leaves everything as it was."""

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
from problems import Regression, attach, batch, equal, everything, train_step
from torch import nn

from diloco_comm import (
    CO2,
    SGD,
    DiLoCo,
    Eager,
    Nesterov,
    NonFiniteError,
    ReplicaMismatch,
    Streaming,
)
from diloco_comm.ops.wire import WireFormat
from diloco_comm.replica.hooks import SkippedSteps

# ------------------------------------------------------------------- replicas that do not agree


def attach_differently(rank: int, world: int, choices: list[dict[str, Any]]) -> str:
    try:
        attach(**choices[rank])[2].close()
    except ReplicaMismatch as error:
        return str(error)
    return "attached"


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        (
            [{}, {"width": 12}],
            "the model differs between replicas: [0 layers.0.weight [24, 24] [24, 1] float32] on "
            "replica 0, [0 layers.0.weight [12, 12] [12, 1] float32] on replica 1",
        ),
        (
            [{"fragments": 2}, {"fragments": 3}],
            "number of fragments differs between replicas: 2 on replica 0, 3 on replica 1",
        ),
        (
            [{}, {"init": "check"}],
            "init differs between replicas: 'broadcast' on replica 0, 'check' on replica 1",
        ),
        (
            [{"wire": "int8"}, {"wire": "int4"}],
            "wire differs between replicas: 'int8' on replica 0, 'int4' on replica 1",
        ),
        (
            [{"sync_every": 10}, {"sync_every": 20}],
            "sync_every differs between replicas: 10 on replica 0, 20 on replica 1",
        ),
        (
            [{"block_size": 64}, {"block_size": 256}],
            "block_size differs between replicas: 64 on replica 0, 256 on replica 1",
        ),
        (
            [{"offsets": [1]}, {"offsets": [2]}],
            "offsets differs between replicas: [1] on replica 0, [2] on replica 1",
        ),
        (
            [{"outer": SGD(1.0)}, {"outer": Nesterov(0.7)}],
            "outer differs between replicas: {'name': 'SGD', 'lr': 1.0} on replica 0, "
            "{'name': 'Nesterov', 'lr': 0.7, 'momentum': 0.9} on replica 1",
        ),
        (
            [{"error_feedback": True}, {}],
            "error_feedback differs between replicas: True on replica 0, False on replica 1",
        ),
        (
            [{"init": "check"}, {"init": "check", "model_seed": 1}],
            "initial weights differ: parameter 'layers.0.weight' on replica 1 is not that of "
            'replica 0; load the same weights or use init="broadcast"',
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(sorted(value[0] | value[1])),
)
def test_replicas_that_differ_are_told_how(choices: Any, sentence: str, workers) -> None:
    assert workers(2).run(attach_differently, choices) == [sentence, sentence]


def test_the_odd_one_of_three_is_named(workers) -> None:
    choices = [{}, {}, {"sync_every": 3}]
    messages = workers(3).run(attach_differently, choices)
    assert messages == ["sync_every differs between replicas: 2 on replica 0, 3 on replica 2"] * 3


def attach_equal_weights(rank: int, world: int) -> bool:
    diloco = attach(init="check")[2]
    with diloco:
        return bool(diloco.outer_hash())


def test_check_accepts_equal_weights(workers) -> None:
    assert workers(2).run(attach_equal_weights) == [True, True]


def broadcast_start(rank: int, world: int) -> tuple[bool, str]:
    own = Regression(seed=rank)
    first = Regression(seed=0)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
    with DiLoCo(own, optimizer, sync_every=2) as diloco:
        pairs = zip(own.parameters(), first.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs), diloco.outer_hash()


def test_broadcast_gives_the_weights_of_replica_0(workers) -> None:
    (is_equal_0, hash_0), (is_equal_1, hash_1) = workers(2).run(broadcast_start)
    assert is_equal_0 and is_equal_1 and hash_0 == hash_1


def average_a_mask(rank: int, world: int) -> str:
    """The buffer is left out on replica 1 alone."""
    model = Regression()
    model.register_buffer("mean", torch.full((3,), math.nan if rank else 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(ReplicaMismatch) as info:
        DiLoCo(model, optimizer, sync_every=2, average_buffers=True)
    return str(info.value)


def test_buffers_that_are_averaged_are_counted(workers) -> None:
    count = len(list(Regression().parameters()))
    sentence = (
        f"the model differs between replicas: {count + 1} parameters and averaged buffers on "
        f"replica 0, {count} on replica 1"
    )
    assert workers(2).run(average_a_mask) == [sentence] * 2


def one_calls(rank: int, world: int, call: str) -> str:
    """Replica 1 calls something else while replica 0 takes the step that sends."""
    with attach(attach=False, timeout=30.0)[2] as diloco:
        diloco.step()
        with pytest.raises(ReplicaMismatch) as info:
            getattr(diloco, call if rank else "step")()
        return str(info.value)


def test_calls_that_differ_go_by_the_names_of_the_user(workers) -> None:
    sentence = "kind differs between replicas: sync on replica 0; consensus on replica 1"
    subjects = ["sync of fragment 0, round 0", "consensus"]
    found = workers(2).run(one_calls, "consensus")
    assert found == [f"{subject}: {sentence}" for subject in subjects]


def test_a_replica_that_has_fewer_steps_is_named(workers) -> None:
    sentence = (
        "replica 1 has ended at inner step 1 (flush, or another call for all replicas), while "
        "replica 0 still trains, at inner step 2: give all replicas the same number of steps, see "
        "DiLoCo.agree_on_steps; one that a GradScaler skips counts if the optimizer is fused, or "
        "with attach=False and diloco.step() after each batch"
    )
    subjects = ["sync of fragment 0, round 0", "start of flush"]
    found = workers(2).run(one_calls, "flush")
    assert found == [f"{subject}: {sentence}" for subject in subjects]


def learning_rates_differ(rank: int, world: int) -> tuple[str, bool]:
    model, optimizer, diloco = attach()
    with diloco:
        diloco.outer.lr = 0.1 * (1 + rank)
        train_step(model, optimizer, rank, 0)
        before = diloco.outer_hash()
        with pytest.raises(ReplicaMismatch) as info:
            train_step(model, optimizer, rank, 1)
        return str(info.value), diloco.outer_hash() == before


def test_outer_learning_rates_that_differ_are_refused(workers) -> None:
    for message, is_unchanged in workers(2).run(learning_rates_differ):
        assert "lr" in message and "0.1" in message and "0.2" in message and is_unchanged


def out_of_step(rank: int, world: int) -> str:
    """Replica 1 has resumed from a round that replica 0 has not done."""
    model, optimizer, diloco = attach()
    with diloco:
        if rank == 1:
            diloco.parts[0].round = 3
        train_step(model, optimizer, rank, 0)
        with pytest.raises(ReplicaMismatch) as info:
            train_step(model, optimizer, rank, 1)
        return str(info.value)


def test_replicas_out_of_step(workers) -> None:
    first, second = workers(2).run(out_of_step)
    for message in (first, second):
        assert "round differs between replicas: 0 on replica 0; 3 on replica 1: load" in message


# --------------------------------------------------------------------------- values not finite


def poison(rank: int, world: int, value: float, wire: str, on_nonfinite: str) -> list[Any]:
    """Replica 1 has one bad value at the second of four rounds."""
    model, optimizer, diloco = attach(wire=wire, on_nonfinite=on_nonfinite)
    with diloco:
        for step in range(3):
            train_step(model, optimizer, rank, step)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        if rank == 1:
            model.head.bias.data.fill_(value)
        before = everything(model, diloco)
        event: Any = "went on"
        try:
            optimizer.step()
        except NonFiniteError as error:
            event = (str(error), error.replicas, error.fragment, error.round)
        is_unchanged = equal(before, everything(model, diloco))
        model.head.bias.data.zero_()
        optimizer.zero_grad()
        for step in range(4, 8):
            train_step(model, optimizer, rank, step)
        applied = [m.is_applied for m in diloco.metrics()]
        return [event, is_unchanged, applied, diloco.totals().num_skipped, diloco.outer_hash()]


@pytest.mark.parametrize("wire", ["fp32", "int8", "fp16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_nonfinite_values_raise_on_every_replica(value: float, wire: str, workers) -> None:
    first, second = workers(2).run(poison, value, wire, "raise")
    message, *where = first[0]
    assert where == [(1,), 0, 1] and "1 on replica 1" in message
    assert first == second == [first[0], True, [True] * 3, 0, first[-1]]


def test_nonfinite_rounds_can_be_skipped(workers) -> None:
    first, second = workers(2).run(poison, float("nan"), "int8", "skip")
    assert first == second == ["went on", True, [True, False, True, True], 1, first[-1]]


# ------------------------------------------------------------------------------ skipped steps


def overflow(rank: int, world: int, fused: bool) -> tuple[list[str], int, str]:
    """A GradScaler skips a step of replica 1 alone."""
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with (
        warnings.catch_warnings(record=True) as caught,
        DiLoCo(model, optimizer, sync_every=3) as diloco,
    ):
        warnings.simplefilter("always")
        for step in range(20):
            if diloco.inner_step == 9:
                break
            x, y = batch(rank, step)
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            if rank == 1 and step == 1:
                model.head.weight.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        sentences = [str(w.message) for w in caught if "inner steps" in str(w.message)]
        return sentences, step, diloco.outer_hash()


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_fewer_is_no_mismatch_but_is_seen(fused: bool, workers) -> None:
    first, second = workers(2).run(overflow, fused)
    assert first[2] == second[2]
    if fused:
        # The hook ran on the overflow, too: the applied steps differ.
        assert (first[1], second[1]) == (9, 9)
        assert first[0] == second[0] and len(first[0]) == 1
        assert "({0: 3, 1: 2} by replica)" in first[0][0]
    else:
        # The hook did not run, and the replica took one more batch.
        assert (first[1], second[1]) == (9, 10) and first[0] == second[0] == []


def test_a_parameter_without_a_gradient_is_no_skipped_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    skipped = SkippedSteps([optimizer])
    for part in (model, model[1], model, model[1], model[1]):
        optimizer.zero_grad()
        for param in part.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        skipped.observe()
    assert skipped.count == 0
    skipped.observe()
    assert skipped.count == 1


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


@pytest.mark.parametrize("optimizer", [Unhookable(), Wrapper(Unhookable()), object()])
def test_an_optimizer_that_cannot_be_hooked(optimizer: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot hook the step of a .*attach=False"):
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
            "on_nonfinite must be one of raise, skip, reset, got 'x'",
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
        ({"replica": 0}, ValueError, "replica, num_replicas and members need store="),
        ({"store": dist.HashStore()}, ValueError, "store needs replica, and one of num_replicas"),
        (
            {"store": dist.HashStore(), "replica": 4, "num_replicas": 2},
            ValueError,
            r"replica must be one of the members \[0, 1\], got 4",
        ),
        (
            {"store": "host:1", "replica": 0, "num_replicas": 1},
            ValueError,
            "store must be a Store or 'tcp://host:port', got 'host:1'",
        ),
        ({"store": 5}, TypeError, r"store must be a Store or 'tcp://host:port', got 5"),
        (
            {"store": dist.HashStore(), "replica": "0", "num_replicas": 1},
            ValueError,
            "replica must be an integer of at least 0, got '0'",
        ),
        (
            {"store": dist.HashStore(), "replica": 0, "num_replicas": 1.5},
            ValueError,
            r"num_replicas must be an integer of at least 1, got 1\.5",
        ),
        ({"group": "x"}, TypeError, "group must be a process group of torch.distributed, got 'x'"),
        ({"mesh": "x"}, TypeError, "mesh must be a DeviceMesh, got 'x'"),
        ({"config": {"lr": 1}}, ValueError, r"config has unknown arguments \['lr'\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be(arguments: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        attach(**arguments)


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
    with diloco, pytest.raises(ValueError, match="weight must be finite and not negative"):
        train_step(model, optimizer, 0, 0)


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
