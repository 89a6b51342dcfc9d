"""A state loaded with other settings goes by names, or one sentence says what differs."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from choice_groups import grouped
from problems import Regression, train_step
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from diloco_comm import (
    SGD,
    Adam,
    Delayed,
    DiLoCo,
    Eager,
    FromTorch,
    HeavyBall,
    Nesterov,
    ReplicaMismatch,
    Streaming,
)
from diloco_comm.rounds.load import restore_outer
from diloco_comm.rounds.part import SyncedFragment

WIDTH = 6
LOADER = "diloco_comm.rounds.load"


def attach(*, frozen: tuple[str, ...] = (), **arguments: Any) -> tuple[nn.Module, Any, DiLoCo]:
    """Four layers, a norm and a head; ``frozen`` names modules that are not trained."""
    model = Regression(WIDTH)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.02)
    settings = {"sync_every": 4, "fragments": 3, "wire": "fp32", "outer": Nesterov(0.5, 0.9)}
    return model, optimizer, DiLoCo(model, optimizer, **grouped({**settings, **arguments}))


def saved_after(num_steps: int, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train alone, and return the model's state and a copy of DiLoCo's."""
    is_flushed = arguments.pop("flush", False)
    model, optimizer, diloco = attach(**arguments)
    with diloco:
        for step in range(num_steps):
            train_step(model, optimizer, 0, step, WIDTH)
        if is_flushed:
            diloco.flush()
        saved = copy.deepcopy((model.state_dict(), diloco.state_dict()))
        diloco.flush()
    return saved


def by_name(diloco: DiLoCo) -> dict[str, dict[str, Tensor]]:
    state = diloco.state_dict()
    return copy.deepcopy({"outer": state["outer"], **state["buffers"]})


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sync_every": ({}, {"sync_every": 3}),
    "fragments": ({}, {"fragments": 2}),
    "patterns": ({}, {"fragments": ["*weight", "rest"]}),
    "offsets": ({}, {"offsets": [1, 2, 3]}),
    "wire": ({}, {"wire": "int4", "error_feedback": True}),
    "wires": ({"wire": "int8"}, {"wire": {"bias": "fp32", "rest": "int1r"}}),
    "alignment": ({}, {"align_tensors": True}),
    "overlap": ({}, {"overlap": Streaming(1, 0.5)}),
    "shared": ({"overlap": Delayed(), "flush": True}, {"overlap": Eager(), "sync_every": 2}),
    "momentum": ({}, {"outer": Nesterov(0.2, 0.5), "fragments": 1}),
    "adam": ({"outer": Adam(0.1)}, {"outer": Adam(0.2), "fragments": 2}),
    "torch": (
        {"outer": FromTorch(lambda p: torch.optim.Adam(p, lr=0.05))},
        {"outer": FromTorch(lambda p: torch.optim.Adam(p, lr=0.1)), "fragments": 4},
    ),
    "buffers": ({}, {"average_buffers": True, "fragments": 2}),
    "no_buffers": ({"average_buffers": True}, {}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_follows_a_change_by_name(name: str) -> None:
    before, after = CHANGES[name]
    # Six steps with a round every four: the fragments are at different rounds.
    weights, state = saved_after(6, **before)
    model, optimizer, diloco = attach(**after)
    with diloco:
        model.load_state_dict(weights)
        diloco.load_state_dict(state)
        assert diloco.inner_step == 6
        home = state if "outer" in state else state["replica_0"]
        expected = {"outer": home["outer"], **home["buffers"]}
        now = diloco.state_dict()
        now = now if "outer" in now else now["replica_0"]
        for kind, tensors in {"outer": now["outer"], **now["buffers"]}.items():
            assert_equal(tensors, expected[kind])
        rounds = [numbers["round"] for numbers in home["parts"].values()]
        assert {part.round for part in diloco.parts} <= set(rounds)
        for step in range(6, 15):
            train_step(model, optimizer, 0, step, WIDTH)
        diloco.flush()
        assert all(torch.isfinite(param).all() for param in model.parameters())


def test_the_same_settings_and_another_object_go_on_bit_by_bit() -> None:
    """Two changes that undo each other leave what an unchanged run has."""
    weights, state = saved_after(4)
    hashes = []
    for there_and_back in (False, True):
        if there_and_back:
            _, _, other = attach(fragments=5, sync_every=7)
            with other:
                other.load_state_dict(state)
                state = copy.deepcopy(other.state_dict())
        model, optimizer, diloco = attach()
        with diloco:
            model.load_state_dict(weights)
            diloco.load_state_dict(state)
            for step in range(4, 12):
                train_step(model, optimizer, 0, step, WIDTH)
            hashes.append(diloco.outer_hash())
    assert hashes[0] == hashes[1]


# ------------------------------------------------------------------- frozen, and no more frozen


@pytest.mark.parametrize("outer", ["nesterov", "torch"])
def test_an_unfrozen_parameter_begins_without_momentum_from_the_models_weights(outer: str) -> None:
    lr, momentum = 0.5, 0.9
    make = {
        "nesterov": lambda: Nesterov(lr, momentum),
        "torch": lambda: FromTorch(
            lambda p: torch.optim.SGD(p, lr=lr, momentum=momentum, nesterov=True)
        ),
    }[outer]
    key = {"nesterov": "momentum", "torch": "momentum_buffer"}[outer]
    frozen = ("layers.0", "layers.1")
    weights, state = saved_after(4, frozen=frozen, outer=make(), fragments=1)
    # The program may load the model after this object, with weights unlike those at construction.
    weights["layers.0.weight"] += 1.0
    model, optimizer, diloco = attach(outer=make(), fragments=["layers*", "rest"], offsets=[4, 4])
    with diloco:
        diloco.load_state_dict(state)
        model.load_state_dict(weights)
        for step in range(4, 8):
            train_step(model, optimizer, 0, step, WIDTH)
            if step == 6:
                local = {name: param.detach().clone() for name, param in model.named_parameters()}
        assert local is not None
        found = by_name(diloco)
    # The same round by hand: the last inner step, then the outer step on the fp32 gradient.
    again, inner, alone = attach(outer=make(), fragments=1)
    alone.close()
    again.load_state_dict(local)
    train_step(again, inner, 0, 7, WIDTH)
    for name, param in again.named_parameters():
        is_new = name.startswith(frozen)
        start = weights[name] if is_new else state["outer"][name]
        gradient = start - param.detach()
        moved = gradient if is_new else momentum * state["buffers"][key][name] + gradient
        step_taken = lr * (gradient + momentum * moved)
        assert torch.allclose(found["outer"][name], start - step_taken, atol=1e-6), name
        assert torch.allclose(found[key][name], moved, atol=1e-6), name


def test_the_weights_count_that_the_model_has_before_a_flush_too() -> None:
    weights, state = saved_after(6, frozen=("layers.0",))
    weights["layers.0.weight"] += 1.0
    model, _, diloco = attach()
    with diloco:
        diloco.load_state_dict(state)
        diloco.state_dict()
        model.load_state_dict(weights)
        diloco.flush()
        assert torch.equal(by_name(diloco)["outer"]["layers.0.weight"], weights["layers.0.weight"])


@pytest.mark.parametrize("num_steps", [4, 6])
def test_a_parameter_that_is_frozen_now_is_left_to_the_model(
    num_steps: int, recwarn: pytest.WarningsRecorder
) -> None:
    weights, state = saved_after(num_steps, fragments=1)
    model, optimizer, diloco = attach(frozen=("layers.0",), fragments=2)
    with diloco:
        model.load_state_dict(weights)
        diloco.load_state_dict(state)
        found = by_name(diloco)
        assert "layers.0.weight" not in found["outer"]
        assert_equal(found["momentum"], state["buffers"]["momentum"])
        for step in range(num_steps, 8):
            train_step(model, optimizer, 0, step, WIDTH)
    said = [str(one.message) for one in recwarn if "exchanged no more" in str(one.message)]
    # After a round the local values are the shared ones; in the middle of one they are not.
    assert len(said) == (0 if num_steps == 4 else 1)
    assert all("'layers.0.weight'" in one and "call flush()" in one for one in said)


# ------------------------------------------------------------------------------ what cannot follow


def test_what_cannot_follow_is_named_with_both_values() -> None:
    _, state = saved_after(4)
    _, _, other = attach(outer=Adam())
    with other, pytest.raises(ValueError, match="outer optimizer is Nesterov in the state, Adam"):
        other.load_state_dict(state)
    _, _, other = attach(outer=HeavyBall())
    with other, pytest.raises(ValueError, match="Nesterov in the state, HeavyBall here"):
        other.load_state_dict(state)

    model = nn.Sequential(nn.Linear(3, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner, sync_every=4, outer=SGD()) as other:
        with pytest.raises(ValueError) as caught:
            other.load_state_dict(state)
        assert "the outer optimizer is Nesterov in the state, SGD here; the model here has no " in (
            said := str(caught.value)
        )
        assert "no parameter 'layers.0.weight' of the state, nor 11 more" in said
        before = copy.deepcopy(other.state_dict())
    wide = Regression(WIDTH + 2)
    inner = torch.optim.SGD(wide.parameters(), lr=0.1)
    with DiLoCo(wide, inner, sync_every=4) as other:
        with pytest.raises(ValueError) as caught:
            other.load_state_dict(state)
        assert "parameter 'layers.0.weight' has shape [6, 6] in the state, [8, 8] here" in str(
            caught.value
        )
        assert other.inner_step == 0
    assert before["inner_step"] == 0


def test_a_state_from_before_0_2_is_named() -> None:
    _, state = saved_after(4)
    _, _, diloco = attach()
    with diloco:
        old = {**state, "layout": diloco._plan.saved_layout}
        for load in (
            diloco.load_state_dict,
            lambda state: restore_outer(diloco._plan.parameter_parts(), state, state["layout"]),
        ):
            with pytest.raises(ValueError, match="has the format of a version before") as caught:
                load(old)
            assert "this version reads the format of 0.2: load the state with 0.2" in str(
                caught.value
            )


def test_a_round_that_began_before_0_2_is_named() -> None:
    """As 0.2 passed on a round of an older state that was under way."""
    _, state = saved_after(5, overlap=Delayed())
    state = copy.deepcopy(state)
    for numbers in state["parts"].values():
        shared = json.loads(numbers["flights"])
        for flight in shared["rounds"]:
            flight["digest"] = None
        numbers["flights"] = json.dumps(shared)
    _, _, diloco = attach(overlap=Delayed())
    with diloco, pytest.raises(ValueError, match="under way that began before"):
        diloco.load_state_dict(state)


BUSY: dict[str, dict[str, Any]] = {
    "streaming": {"overlap": Streaming(2, 0.5)},
    "delayed": {"overlap": Delayed()},
    "eager": {"overlap": Eager()},
}


@pytest.mark.parametrize("name", BUSY)
def test_rounds_under_way_are_ended_before_a_change(name: str) -> None:
    _, state = saved_after(5, **BUSY[name])
    for change, said in (
        ({"sync_every": 5}, "sync_every is 4 in the state, 5 here"),
        ({"fragments": 2}, "the number of fragments is 3 in the state, 2 here"),
        ({"offsets": [1, 2, 3]}, r"offsets is \[1, 2, 4\] in the state, \[1, 2, 3\] here"),
        (
            {"frozen": ("head",)},
            "parameter 'head.weight' is .* in fragment 2 in the state, not exchanged here",
        ),
    ):
        _, _, other = attach(**BUSY[name], **change)
        with other:
            with pytest.raises(ValueError, match=f"rounds of fragment . under way.*{said}") as it:
                other.load_state_dict(state)
            assert "call flush() on all replicas before the save, or load" in str(it.value)
    _, flushed = saved_after(5, **BUSY[name], flush=True)
    _, _, other = attach(fragments=2)
    with other:
        other.load_state_dict(flushed)


# ---------------------------------------------------------------------------------------- residuals


def residuals_of(diloco: DiLoCo) -> dict[str, Tensor]:
    return copy.deepcopy(diloco.state_dict()["replica_0"]["residual"])


@pytest.mark.parametrize("wire", ["int4", "int8", "topk32"])
def test_residuals_follow_by_name_into_other_fragments_and_wires(wire: str) -> None:
    """A residual is in the units of the parameters, whatever wire has left it."""
    arguments = {"wire": "int4", "error_feedback": True}
    weights, state = saved_after(6, **arguments, frozen=("head",))
    model, optimizer, diloco = attach(wire=wire, error_feedback=True, fragments=2)
    with diloco:
        model.load_state_dict(weights)
        diloco.load_state_dict(state)
        found, saved = residuals_of(diloco), state["replica_0"]["residual"]
        assert any(tensor.any() for tensor in saved.values())
        for name, tensor in found.items():
            assert torch.equal(tensor, saved.get(name, torch.zeros_like(tensor))), name
        for step in range(6, 12):
            train_step(model, optimizer, 0, step, WIDTH)


def test_residuals_that_cannot_follow_are_said_with_their_norm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, state = saved_after(6, wire="int4", error_feedback=True)
    norm = torch.cat([t.flatten() for t in state["replica_0"]["residual"].values()]).norm()
    _, _, diloco = attach(wire="int8")
    with diloco, caplog.at_level(logging.INFO, LOADER):
        diloco.load_state_dict(state)
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert (
        f"replica 0 drops what its encodings had left for later exchanges: L2 norm {norm:.4g}"
        in (said)
    )


def test_error_feedback_may_begin_with_a_resume(caplog: pytest.LogCaptureFixture) -> None:
    _, state = saved_after(6, wire="int8")
    _, _, diloco = attach(wire="int4", error_feedback=True, sync_every=2)
    with diloco, caplog.at_level(logging.INFO, LOADER):
        diloco.load_state_dict(state)
        assert not any(tensor.any() for tensor in residuals_of(diloco).values())
    (said,) = [one.getMessage() for one in caplog.records]
    assert said == (
        "the saved state follows a change: sync_every is 4 in the state, 2 here; "
        "offsets is [1, 2, 4] in the state, [1, 1, 2] here; wires: ['int8 of blocks of 256'] in "
        "the state, ['int4 of blocks of 256'] here; error_feedback: False in the state, True here"
    )


def test_what_follows_without_other_fragments_is_logged_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, state = saved_after(8, outer=Nesterov(0.5, 0.9), flush=True)
    _, _, diloco = attach(outer=Nesterov(0.2, 0.6), overlap=Streaming(1, 0.5))
    with diloco, caplog.at_level(logging.INFO, LOADER):
        diloco.load_state_dict(state)
        diloco.load_state_dict(copy.deepcopy(diloco.state_dict()))
    (said,) = [one.getMessage() for one in caplog.records]
    assert said == (
        "the saved state follows a change: momentum of outer: 0.9 in the state, 0.6 here; "
        "overlap: Blocking in the state, Streaming here"
    )


# --------------------------------------------------------------------------------- another group


def train_group(
    rank: int, world: int, states: list[Any] | None, replicas: tuple[int, ...], change: Any
) -> tuple[Any, str, dict[str, Tensor]]:
    """Go on from the states of an earlier group, if there are any, in a group of some replicas."""
    model, optimizer, diloco = attach(error_feedback=True, wire="int4", **change)
    with diloco:
        loaded: dict[str, Tensor] = {}
        first = 0
        if states is not None:
            weights, state = states[replicas[rank]] if replicas[rank] >= 0 else states[0]
            model.load_state_dict(weights)
            diloco.load_state_dict(state)
            loaded, first = residuals_of_all(diloco), diloco.inner_step
        for step in range(first, first + 5):
            train_step(model, optimizer, rank, step, WIDTH)
        saved = copy.deepcopy((model.state_dict(), diloco.state_dict()))
        diloco.flush()
        return saved, diloco.outer_hash(), loaded


def residuals_of_all(diloco: DiLoCo) -> dict[str, Tensor]:
    views: dict[str, Tensor] = {}
    for part in diloco.parts:
        assert isinstance(part, SyncedFragment) and part.buffers is not None
        assert part.buffers.residual is not None
        views |= copy.deepcopy(part.fragment.views(part.buffers.residual))
        assert not any(run.any() for run in part.buffers.residuals.reductions())
    return views


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2)])
def test_another_number_of_replicas(old: int, new: int, workers) -> None:
    change = {"fragments": 2, "sync_every": 3}
    first = workers(old).run(train_group, None, (), {})
    states = [saved for saved, _, _ in first]
    # Replica 2 of three comes new, and has the file of another replica.
    replicas = (0, 1, -1) if new == 3 else (0, 1)
    second = workers(new).run(train_group, states, replicas, change)
    assert len({digest for _, digest, _ in second}) == 1
    for rank, (_, _, loaded) in enumerate(second):
        saved = states[rank][1][f"replica_{rank}"]["residual"] if rank < old else {}
        assert any(tensor.any() for tensor in saved.values()) == (rank < old)
        for name, tensor in loaded.items():
            assert torch.equal(tensor, saved.get(name, torch.zeros_like(tensor))), name


def reductions_after_a_load(rank: int, world: int, is_moved: bool) -> tuple[bool, bool, list[str]]:
    """Whether the reductions had left something before a save, and have after the load."""
    torch.manual_seed(rank)
    model = nn.Conv2d(4, 8, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"sync_every": 2, "wire": "int4", "block_size": 32, "error_feedback": True}

    def has_left(diloco: DiLoCo) -> bool:
        parts = [part for part in diloco.parts if part.buffers is not None]
        return any(bool(run.any()) for p in parts for run in p.buffers.residuals.reductions())

    with DiLoCo(model, optimizer, **grouped(settings)) as diloco:
        for _ in range(4):
            model(torch.randn(2, 4, 5, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state, before = copy.deepcopy(diloco.state_dict()), has_left(diloco)
        diloco.flush()
    if is_moved:
        model.to(memory_format=torch.channels_last)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(LOADER).addHandler(handler)
    with DiLoCo(model, optimizer, **grouped(settings)) as diloco:
        diloco.load_state_dict(state)
        logging.getLogger(LOADER).removeHandler(handler)
        assert torch.equal(diloco.state_dict()["outer"]["weight"], state["outer"]["weight"])
        after = has_left(diloco)
        diloco.flush()
    return before, after, said


@pytest.mark.parametrize("is_moved", [False, True])
def test_what_goes_by_place_does_not_follow_into_another_order(is_moved: bool, workers) -> None:
    for before, after, said in workers(3).run(reductions_after_a_load, is_moved):
        assert before and after != is_moved
        assert any("drops what its encodings had left" in one for one in said) == is_moved


def load_one_of_two(rank: int, world: int, states: list[Any]) -> str:
    """Each state fits this run; the replicas load different ones."""
    model, optimizer, diloco = attach()
    with diloco:
        model.load_state_dict(states[rank][0])
        diloco.load_state_dict(states[rank][1])
        with pytest.raises(ReplicaMismatch) as caught:
            for step in range(4, 9):
                train_step(model, optimizer, 0, step, WIDTH)
    return str(caught.value)


def test_replicas_that_load_different_states_are_told_before_anything_is_added(workers) -> None:
    states = [saved_after(4, fragments=2), saved_after(4, fragments=1, frozen=("layers.0",))]
    for said in workers(2).run(load_one_of_two, states):
        assert "outer state differs between replicas" in said


def test_a_newcomers_checkpoint_has_the_groups_arguments() -> None:
    _, state = saved_after(4)
    _, _, diloco = attach(fragments=2)
    with diloco:
        layout = diloco._plan.saved_layout
        with pytest.raises(ValueError, match=r"3 fragments of 12 .* in the state, 2 fragments of"):
            restore_outer(diloco._plan.parameter_parts(), state, layout)
        restore_outer(diloco._plan.parameter_parts(), diloco.state_dict(), layout)()


# ----------------------------------------------------------------- several workers in a replica


def cloned(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: cloned(value) for key, value in state.items()}
    return state.clone() if isinstance(state, Tensor) else state


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def attach_worker(mesh: DeviceMesh, is_fsdp: bool, **arguments: Any) -> tuple[Any, Any, DiLoCo]:
    """One worker of the only replica; ``frozen`` freezes the head."""
    model: nn.Module = Regression(WIDTH)
    model.get_submodule("head").requires_grad_(not arguments.pop("frozen", False))
    model = fully_shard(model, mesh=mesh["shard"]) if is_fsdp else model
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.02)
    place = {} if is_fsdp else {"shard_group": mesh["shard"].get_group()}
    settings = {"sync_every": 4, "wire": "int8", "block_size": 32, "error_feedback": True}
    settings |= {"mesh": mesh["replica"], "fragments": 3, **place, **arguments}
    return model, optimizer, DiLoCo(model, optimizer, **grouped(settings))


def follow_as_workers(rank: int, world: int, is_fsdp: bool) -> list[str]:
    """Save with a frozen layer; load with it, in other fragments and at another ``sync_every``."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replica", "shard"))
    model, optimizer, diloco = attach_worker(mesh, is_fsdp, frozen=True)
    with diloco:
        for step in range(6):
            train_step(model, optimizer, 0, step, WIDTH)
        saved = cloned(diloco.state_dict())
        diloco.flush()
    logged: list[str] = []
    logging.getLogger(LOADER).addHandler(handler := logging.Handler())
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    for change in ({"sync_every": 2}, {"fragments": 2}):
        _, _, diloco = attach_worker(mesh, is_fsdp, **change)
        with diloco:
            diloco.load_state_dict(saved)
            state = cloned(diloco.state_dict())
            diloco.flush()
        for kind in ("outer", "momentum"):
            was, now = (
                whole(one["outer"] if kind == "outer" else one["buffers"][kind])
                for one in (saved, state)
            )
            assert [name for name in now if name not in was] == ["head.weight", "head.bias"]
            assert_equal(was, now)
        assert not now["head.weight"].any()
    logging.getLogger(LOADER).removeHandler(handler)
    return logged


@pytest.mark.parametrize("is_fsdp", [False, True])
def test_workers_of_a_replica_follow_too(is_fsdp: bool, workers) -> None:
    for logged in workers(2).run(follow_as_workers, is_fsdp):
        dropped = [one for one in logged if "drops what its encodings had left" in one]
        # Residuals of DTensors have names; a worker's range of a fragment's elements has none.
        assert bool(dropped) == (not is_fsdp)


# ------------------------------------------------------------------------ distributed checkpoints


def test_a_distributed_checkpoint_follows_where_it_has_the_entries(tmp_path: Path) -> None:
    folder, file = str(tmp_path / "saved"), tmp_path / "saved.pt"
    model, optimizer, diloco = attach()
    with diloco:
        for step in range(6):
            train_step(model, optimizer, 0, step, WIDTH)
        dcp.save({"diloco": diloco}, checkpoint_id=folder)
        expected = by_name(diloco)
        diloco.flush()
    _, _, other = attach(sync_every=3, frozen=("layers.0",))
    with other:
        dcp.load({"diloco": other}, checkpoint_id=folder)
        assert_equal(by_name(other)["momentum"], expected["momentum"])
    # Only the entries of the present run are read: the numbers of a third fragment are lacking.
    _, _, other = attach(fragments=2)
    with other:
        with pytest.raises(Exception, match=r"lacks parts/2.*dcp_to_torch_save"):
            dcp.load({"diloco": other}, checkpoint_id=folder)
        dcp_to_torch_save(folder, file)
        other.load_state_dict(torch.load(file, weights_only=False)["diloco"])
        assert_equal(by_name(other)["momentum"], expected["momentum"])
