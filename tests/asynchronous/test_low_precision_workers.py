"""Parameters in bf16 and fp16 of asynchronous workers and of learners: nothing moves by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from decoupled_helpers import Setting
from peak_memory import peak_bytes
from torch import Tensor, nn

from diloco_comm import SGD, Nesterov
from diloco_comm.asynchronous.coordinator import Coordinator
from diloco_comm.asynchronous.decoupled.learner import Learner, Receipt
from diloco_comm.asynchronous.decoupled.merges import Piece
from diloco_comm.asynchronous.decoupled.syncer import Commit, Merge, QuorumRule
from diloco_comm.asynchronous.decoupled.virtual import Link
from diloco_comm.asynchronous.local import LocalModel
from diloco_comm.asynchronous.model import SharedModel
from diloco_comm.asynchronous.rules import Buffered, DelayedNesterov, Immediate, ServerRule
from diloco_comm.asynchronous.virtual import VirtualRun, VirtualWorker
from diloco_comm.ops.wire import WireFormat

SECONDS = (0.5, 0.75, 1.25)
WIRES: dict[str, tuple[str, bool]] = {
    "fp32": ("fp32", False),
    "int4": ("int4", False),
    "int4-feedback": ("int4", True),
}


class Training:
    """The steps of some models, which all end at the same time.

    Attributes:
        models: Tensors of each model, in bf16 and fp16.
        is_over: Steps change nothing any more.
    """

    def __init__(self) -> None:
        first = [torch.randn(160, generator=torch.Generator().manual_seed(i)) / 10 for i in (1, 2)]
        kinds = (torch.bfloat16, torch.float16)
        self.models = [[a.to(kind) for a, kind in zip(first, kinds, strict=True)] for _ in SECONDS]
        self.is_over = False

    def step(self, number: int) -> None:
        if not self.is_over:
            for tensor in self.models[number]:
                tensor += 4e-4 + 1e-3 * torch.randn(tensor.shape).to(tensor.dtype)

    def values(self) -> list[Tensor]:
        return [torch.cat([tensor.float() for tensor in model]) for model in self.models]


def largest_move(before: list[Tensor], after: list[Tensor]) -> float:
    pairs = zip(before, after, strict=True)
    return max((a.float() - b.float()).abs().max().item() for a, b in pairs)


RULES: dict[str, ServerRule] = {
    "delayed-nesterov": DelayedNesterov(lr=0.5, momentum=0.9, period=3),
    "buffered": Buffered(period=3, outer=Nesterov(0.7, 0.9)),
    "immediate": Immediate(outer=Nesterov(0.1, 0.9)),
}


@pytest.mark.each_value("9 combinations of rules and wires, 1 s each")
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("rule", RULES)
def test_without_gradient_a_server_moves_nothing(rule: str, wire: str) -> None:
    torch.manual_seed(0)
    training, workers = Training(), []
    for number, model in enumerate(training.models):
        held = nn.ParameterList([nn.Parameter(tensor, requires_grad=True) for tensor in model])
        name, feedback = WIRES[wire]
        local = LocalModel(
            held, [torch.optim.SGD(held.parameters(), lr=1.0)], wire=WireFormat(name),
            error_feedback=feedback, name=str(number),
        )  # fmt: skip
        step = partial(training.step, number)
        workers.append(VirtualWorker(local, step, SECONDS[number]))
    shared = SharedModel(workers[0].local.sizes, RULES[rule])
    run = VirtualRun(Coordinator(shared, sync_every=2), workers)
    found = []
    for num_updates in (90, 1000, 1300):
        with torch.no_grad():
            run.until(num_updates=num_updates)
        training.is_over = True
        found.append((training.values(), [flat.clone() for flat in shared.read_all()]))
    (first, _), (before, outer), (after, outer_after) = found
    assert largest_move(first, before) > 0
    assert largest_move(before, after) == 0
    assert largest_move(outer, outer_after) < 1e-6


RECEIPTS = {
    "overwrite": Receipt(),
    "carry": Receipt(mode="carry"),
    "blend-25": Receipt(mode="blend", alpha=0.25),
    "blend-90": Receipt(mode="blend", alpha=0.9),
}
OUTERS: dict[str, Any] = {"nesterov": Nesterov(0.7, 0.9), "sgd": SGD(1.0)}


@pytest.mark.each_value("24 combinations of receipts, wires and outer optimizers, 1 s each")
@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("receipt", RECEIPTS)
def test_without_gradient_a_syncer_moves_nothing(receipt: str, wire: str, outer: str) -> None:
    torch.manual_seed(0)
    training, (name, feedback) = Training(), WIRES[wire]
    setting = Setting(
        wire=name, error_feedback=feedback, receipt=RECEIPTS[receipt], outer=OUTERS[outer],
        rule=QuorumRule(quorum=2, delay=1), sync_every=2,
    )  # fmt: skip
    steps = [partial(training.step, number) for number in range(len(SECONDS))]
    run = setting.run(
        [[model] for model in training.models], steps, seconds=SECONDS, link=Link(latency_s=0.3)
    )
    found = []
    for seconds in (60.0, 460.0, 560.0):
        run.until(seconds=seconds)
        training.is_over = True
        (shared,) = run.syncer.fragments
        found.append((training.values(), shared.copy_values(), len(run.commits)))
    (first, _, _), (before, outer_before, commits), (after, outer_after, more) = found
    assert largest_move(first, before) > 0 and more > commits + 30
    assert largest_move(before, after) == 0
    assert largest_move(outer_before, outer_after) < 1e-6


def test_a_learner_that_carries_progress_has_two_fp32_copies() -> None:
    tensors, size = [torch.ones(1 << 14).bfloat16() for _ in range(8)], 1 << 17
    pieces, wire = [Piece(tuple(range(8)), size, "mean")], WireFormat("fp32")
    learner = Learner("0", [tensors], [pieces], wire=wire, receipt=Receipt(mode="carry"))
    learner.stepped(tokens=1)
    tensors[0] += 0.5
    commit = Commit(0, 1, {}, [torch.full((size,), 2.0)], Merge(0, (), ()), [])
    # One tensor more in bf16 is small beside the whole piece.
    assert peak_bytes(lambda: learner.receive(commit)) < 2.3 * 4 * size
    assert [tensor.unique().item() for tensor in tensors] == [2.5] + [2.0] * 7
