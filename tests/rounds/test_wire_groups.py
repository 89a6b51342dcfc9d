"""Groups of parameters with wires of their own, tensors that start blocks, and the decay."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problems import Regression, attach, equal, everything, load_training, save_training, train_step
from torch import Tensor, nn
from workers import Pool

from diloco_comm import SGD, Blocking, Delayed, DiLoCo, Eager, Streaming, SyncError, Wire
from diloco_comm.methods.settings import Settings, Wires

MIXED = {"norm|bias": "int4", "head": "fp32", "rest": "int1r"}


def plan_of(rank: int, world: int, arguments: dict[str, Any]) -> tuple[list[Any], list[int], str]:
    _, _, diloco = attach(rank, **arguments)
    with diloco:
        parts = diloco._plan.parameter_parts()
        groups = [(part.wire.name, part.fragment.names) for part in parts]
        return groups, list(diloco.schedule.offsets), repr(diloco)


def test_the_first_pattern_in_a_name_decides(workers) -> None:
    ((groups, offsets, shown),) = workers(1).run(plan_of, {"wire": MIXED, "sync_every": 4})
    biases = [f"layers.{n}.bias" for n in range(4)]
    assert groups == [
        ("int4", (*biases, "norm.weight", "norm.bias", "head.bias")),
        ("fp32", ("head.weight",)),
        ("int1r", tuple(f"layers.{n}.weight" for n in range(4))),
    ]
    # The pieces of a fragment are sent at one time.
    assert offsets == [4, 4, 4]
    assert f"wire={MIXED}" in shown


def test_each_fragment_is_divided(workers) -> None:
    spec = {"fragments": ["layers.0.*", "rest"], "offsets": [1, 3], "sync_every": 4}
    ((groups, offsets, _),) = workers(1).run(plan_of, {"wire": MIXED, **spec})
    assert [wire for wire, _ in groups] == ["int4", "int1r", "int4", "fp32", "int1r"]
    assert offsets == [1, 1, 3, 3, 3]


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"wire": "auto"}, ValueError, "wire='auto' is no wire: .* --wire auto --gbps"),
    ({"wire": {}}, ValueError, "names no wire"),
    ({"wire": {"rest": "int4", "norm": "int8"}}, ValueError, "'rest' must be the last key"),
    ({"wire": {"(": "int4"}}, ValueError, r"'\(' in wire is no regular expression"),
    ({"wire": {"norm": 4}}, TypeError, "must map patterns to names of wires"),
    ({"wire": {"norm": "int5"}}, ValueError, "wire of 'norm': unknown wire 'int5'"),
    (
        {"wire": {"norm": "auto"}},
        ValueError,
        "'auto'.*diloco-comm plan --gbps chooses one",
    ),
    ({"wire": ["int4"]}, TypeError, "a WireFormat, or a mapping of patterns to names, got list"),
    (
        {"wire": {"norm": "sub2", "rest": "int2r"}, "block_size": 64},
        ValueError,
        "block_size=64 goes with none of the wires",
    ),
    ({"wire": {"norm": "int4"}}, ValueError, "'layers.0.weight' is matched by no key of wire"),
    ({"wire": {"nrom": "int4", "rest": "int8"}}, ValueError, "'nrom' in wire matches no parameter"),
    (
        {"wire": {"norm": "int4", "rest": "int1r"}, "error_feedback": True},
        ValueError,
        "wire of 'rest': error_feedback=True does not go with wire 'int1r'",
    ),
    ({"wire": {"norm": "int4", "rest": "topk64"}}, ValueError, "wire of 'rest': .* needs error_f"),
    ({"feedback_decay": 0.9}, ValueError, "feedback_decay=0.9 needs error_feedback=True"),
    ({"feedback_decay": 1.5, "error_feedback": True}, ValueError, "from 0 to 1, got 1.5"),
    (
        {"wire": "topk64", "feedback_decay": 0, "error_feedback": True},
        ValueError,
        "feedback_decay=0 keeps nothing .*'topk64' needs that",
    ),
    ({"align_tensors": 1}, TypeError, "align_tensors"),
    ({"impl": "reference"}, ValueError, "plain PyTorch, which .* take one of scalar"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_what_cannot_be_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attach(**arguments)


def test_settings_are_saved_and_read(tmp_path) -> None:
    given = {"sync_every": 3, "wire": MIXED, "block_size": 64, "align_tensors": True}
    saved = Settings(**given).as_json()
    again = Settings(**saved)
    assert saved["wire"] == MIXED and again.as_json() == saved
    assert [form.block_size for _, form in again.wire.groups] == [64, 64, 256]
    assert Wires.parse("int4").config() == "int4"


def test_the_default_decay_is_that_of_the_wire() -> None:
    """Whether the default of a wire was written out or not is the same to other replicas."""
    given: dict[str, Any] = {"sync_every": 3, "wire": "topk64", "error_feedback": True}
    default = Settings(**given)
    assert default.shared() == Settings(**given, feedback_decay=0.95).shared()
    assert default.shared() != Settings(**given, feedback_decay=0.9).shared()
    assert default.as_json()["feedback_decay"] is None


# -------------------------------------------------------------------------------- real replicas


def train(rank: int, world: int, arguments: dict[str, Any], num_steps: int = 9) -> list[Tensor]:
    model, optimizer, diloco = attach(rank, **{"outer": SGD(1.0), "sync_every": 3, **arguments})
    with diloco:
        for step in range(num_steps):
            train_step(model, optimizer, rank, step)
        diloco.flush()
        return everything(model, diloco)


@pytest.mark.each_value("16 combinations")
@pytest.mark.parametrize("overlap", [Blocking(), Streaming(1, 0.5), Delayed(), Eager()], ids=repr)
@pytest.mark.parametrize("is_aligned", [False, True])
def test_replicas_stay_equal(overlap: Any, is_aligned: bool, workers) -> None:
    arguments = {"wire": MIXED, "overlap": overlap, "align_tensors": is_aligned, "fragments": 2}
    results = workers(3).run(train, arguments)
    assert all(equal(result, results[0]) for result in results)


def test_a_group_is_exchanged_as_a_fragment_with_its_wire_would_be(workers) -> None:
    """The weights of the layers, which come first, have the same rounds and random signs."""
    grouped = {"wire": {"layers.*weight": "int1r", "rest": "fp32"}}
    alone = {"wire": "int1r", "fragments": ["layers.*.weight", "rest"], "offsets": [3, 3]}
    first, second = (workers(2).run(train, arguments, 3)[0] for arguments in (grouped, alone))
    num_params = len(list(Regression().parameters()))
    assert torch.equal(first[num_params], second[num_params])
    assert not torch.equal(first[num_params + 1], second[num_params + 1])


def mismatch(rank: int, world: int) -> str:
    wire = MIXED if rank else {**MIXED, "head": "int8"}
    with pytest.raises(SyncError) as caught:
        attach(rank, wire=wire)
    return str(caught.value)


def test_other_wires_on_another_replica_are_refused(workers) -> None:
    assert all("wire differs" in message for message in workers(2).run(mismatch))


def resume(rank: int, world: int, arguments: dict[str, Any]) -> list[bool]:
    files = []
    arguments = {"sync_every": 3, "outer": SGD(0.7), **arguments}
    model, optimizer, diloco = attach(rank, **arguments)
    with diloco:
        for step in range(8):
            files.append(save_training(model, optimizer, diloco))
            train_step(model, optimizer, rank, step)
        expected = everything(model, diloco)
    matches = []
    for first in (2, 4, 6):
        model, optimizer, diloco = attach(rank, **arguments)
        with diloco:
            load_training(files[first], model, optimizer, diloco)
            for step in range(first, 8):
                train_step(model, optimizer, rank, step)
            matches.append(equal(everything(model, diloco), expected))
    return matches


FEEDBACK = {"wire": {"norm|bias": "int4", "rest": "topk256"}, "error_feedback": True}


@pytest.mark.parametrize(
    "arguments",
    [
        {"wire": MIXED, "align_tensors": True},
        {"wire": MIXED, "overlap": Delayed()},
        {**FEEDBACK, "align_tensors": True, "feedback_decay": 0.9},
    ],
)
def test_a_saved_run_goes_on_to_the_bit(arguments: dict[str, Any], workers) -> None:
    assert workers(3).run(resume, arguments) == [[True] * 3] * 3


def survive(rank: int, world: int, address: tuple[str, int], wire: Any) -> list[Tensor]:
    """Replica 2 is killed in the second round; the others go on without it."""
    store = dist.TCPStore(*address, is_master=False)
    model, optimizer, diloco = attach(
        rank,
        store=store,
        replica=rank,
        num_replicas=world,
        wire=wire,
        error_feedback=wire == "topk64",
        outer=SGD(1.0),
        sync_every=2,
        timeout=60,
    )
    with diloco:
        step = 0
        while step < 8:
            if (rank, step) == (2, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                train_step(model, optimizer, rank, step)
            except SyncError:
                optimizer.zero_grad()
                diloco.change_group("survivors")
            step = diloco.inner_step
        assert diloco.members == (0, 1)
        return everything(model, diloco)


@pytest.mark.nightly(
    "4 s each; they differ in the wire",
    but=["{'norm|bias': 'int4', 'head': 'fp32', 'rest': 'int1r'}"],
)
@pytest.mark.parametrize("wire", ["int2r", "sub8", "topk64", MIXED], ids=str)
def test_survivors_go_on(wire: Any, fresh_workers: Callable[..., Pool]) -> None:
    pool = fresh_workers(3, init_group=False)
    results = pool.run(survive, pool.store, wire, expect_exit={2}, timeout=30)
    assert equal(results[0], results[1])


# ------------------------------------------------------------------------------------ alignment


class OneFrozen(nn.Module):
    """Two small tensors in one block; only the second one is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.still = nn.Parameter(torch.linspace(-1, 1, 100))
        self.moving = nn.Parameter(torch.zeros(300))
        self.last = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))


def changes(rank: int, world: int, wire: str, is_aligned: bool) -> tuple[bool, bool, list[int]]:
    model = OneFrozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.still.detach().clone()
    diloco = DiLoCo(
        model, optimizer, sync_every=1, wire=Wire(wire, align_tensors=is_aligned), outer=SGD(1.0)
    )
    with diloco:
        for step in range(3):
            model.moving.grad = torch.sin(torch.arange(300.0) + rank + step)
            model.still.grad, model.last.grad = torch.zeros(100), torch.ones_like(model.last)
            optimizer.step()
        (part,) = diloco.parts
        padding = [part.outer[begin:end] for begin, end in part.fragment.padding()]
        assert not any(bool(values.any()) for values in padding)
        names = {name: list(view.shape) for name, view in part.fragment.views(part.outer).items()}
        assert names == {"still": [100], "moving": [300], "last": [7]}
        is_moved = bool(model.moving.detach().any())
        return torch.equal(model.still, before), is_moved, [len(values) for values in padding]


@pytest.mark.parametrize(
    ("wire", "gaps"), [("int2r", [156, 212]), ("sub8", [924, 724]), ("int8", [156, 212])]
)
def test_noise_stays_in_its_tensor(wire: str, gaps: list[int], workers) -> None:
    assert workers(3).run(changes, wire, True) == [(True, True, gaps)] * 3
    # Codes for single elements have no noise where nothing was trained.
    assert workers(3).run(changes, wire, False) == [(wire == "int8", True, [])] * 3


def owed(rank: int, world: int, decay: float | None) -> Tensor:
    arguments = {"wire": "topk32", "error_feedback": True, "feedback_decay": decay}
    model, optimizer, diloco = attach(rank, sync_every=1, **arguments)
    with diloco:
        train_step(model, optimizer, rank, 0)
        (part,) = diloco.parts
        return part.buffers.residuals.value.clone()


def test_the_decay_scales_what_is_kept(workers) -> None:
    whole, half, default = (workers(2).run(owed, decay)[0] for decay in (1.0, 0.5, None))
    assert whole.count_nonzero() > 0
    assert torch.equal(half, whole * 0.5) and torch.equal(default, whole * 0.95)
