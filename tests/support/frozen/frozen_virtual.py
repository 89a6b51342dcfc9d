"""Asynchronous and decoupled training on their virtual clocks, one run a row, in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from decoupled_helpers import Setting
from frozen_runs import Bits, Layers, hexadecimal, ramp, short_digest
from frozen_table import DTYPES
from torch import nn

from diloco_comm import Nesterov
from diloco_comm.asynchronous.coordinator import Coordinator
from diloco_comm.asynchronous.decoupled.learner import Receipt
from diloco_comm.asynchronous.decoupled.syncer import QuorumRule
from diloco_comm.asynchronous.decoupled.virtual import Link
from diloco_comm.asynchronous.local import LocalModel
from diloco_comm.asynchronous.model import SharedModel
from diloco_comm.asynchronous.rules import Buffered, DelayedNesterov, Immediate, ServerRule
from diloco_comm.asynchronous.virtual import VirtualRun, VirtualWorker
from diloco_comm.ops.wire import WireFormat

SECONDS = (0.5, 0.75, 1.25)
FP32 = (torch.float32,)
NESTEROV = Nesterov(0.5, 0.75)
FEEDBACK = {"error_feedback": True}
RANDOM = {"rounding": "stochastic", "seed": 5}

# Rule of the server, wire, options of the coordinator, options of the workers.
Asynchronous = tuple[ServerRule, str, dict[str, Any], dict[str, Any]]
DELAYED = DelayedNesterov(lr=0.5, momentum=0.75, period=3)
ASYNCHRONOUS: dict[str, Asynchronous] = {
    "delayed-nesterov fp32": (DELAYED, "fp32", {}, {}),
    "delayed-nesterov int8 dylu": (DELAYED, "int8", {"dylu": True}, {}),
    "delayed-nesterov int4 dylu grace": (DELAYED, "int4", {"dylu": True, "grace": 0.5}, FEEDBACK),
    "delayed-nesterov e3m0 random": (DELAYED, "e3m0", {}, RANDOM),
    "delayed-nesterov int2r": (DELAYED, "int2r", {}, FEEDBACK),
    "delayed-nesterov sub8 dylu": (DELAYED, "sub8", {"dylu": True}, {"seed": 5}),
    "delayed-nesterov topk64 grace": (DELAYED, "topk64", {"grace": 1.0}, FEEDBACK),
    "delayed-nesterov active int8": (
        DelayedNesterov(lr=0.5, momentum=0.75, period=3, activation=0.25), "int8", {}, {},
    ),
    "buffered int4": (Buffered(period=2, outer=NESTEROV), "int4", {}, FEEDBACK),
    "immediate discounted int8": (Immediate(outer=NESTEROV, discount=0.5), "int8", {}, {}),
    "immediate compensated fp32": (Immediate(outer=NESTEROV, compensation=0.5), "fp32", {}, {}),
    "immediate stale int8": (Immediate(outer=NESTEROV, max_staleness=1), "int8", {}, {}),
}  # fmt: skip

CARRY, BLEND = Receipt(mode="carry"), Receipt(mode="blend", alpha=0.25)
SLOW = Link(latency_s=0.375, bytes_per_s=2.0**17)
DECOUPLED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mean fp32": ({}, {}),
    "mean int8 slow": ({"wire": "int8"}, {"link": SLOW}),
    "mean int4 carry": ({"wire": "int4", "receipt": CARRY, **FEEDBACK}, {"link": SLOW}),
    "mean e3m0 blend": ({"wire": "e3m0", "receipt": BLEND}, {}),
    "mean int2r carry": ({"wire": "int2r", "receipt": CARRY, **FEEDBACK}, {}),
    "mean sub8": ({"wire": "sub8"}, {"link": SLOW}),
    "mean topk64 carry": ({"wire": "topk64", "receipt": CARRY, **FEEDBACK}, {}),
    "rda fp32": ({"merge": "rda"}, {}),
    "rda int8 carry": ({"merge": "rda", "wire": "int8", "receipt": CARRY}, {"link": SLOW}),
    "rda int4 outage": (
        {"merge": "rda", "wire": "int4", **FEEDBACK},
        {"outages": {1: [(3.0, 6.0)]}, "detection_s": 1.0},
    ),
    "mean int8 outage": ({"wire": "int8", "receipt": CARRY}, {"outages": {2: [(2.5, 7.0)]}}),
    "mean fp32 nesterov": ({"outer": NESTEROV}, {"link": SLOW}),
}
# Trainings that run once more with parameters in bf16 or fp16.
LOW_ASYNCHRONOUS = {
    "delayed-nesterov fp32": ("bf16", "fp16"),
    "delayed-nesterov int4 dylu grace": ("mixed",),
    "immediate discounted int8": ("bf16",),
}
LOW_DECOUPLED = {
    "mean fp32": ("bf16",),
    "mean fp32 nesterov": ("fp16",),
    "mean int4 carry": ("bf16", "fp16"),
    "mean e3m0 blend": ("mixed",),
    "rda int8 carry": ("bf16",),
}


@contextmanager
def implementation(impl: str) -> Iterator[None]:
    """Choose the implementation of operators that are called without one."""
    before = os.environ.get("DILOCO_COMM_IMPL")
    os.environ["DILOCO_COMM_IMPL"] = impl
    try:
        yield
    finally:
        del os.environ["DILOCO_COMM_IMPL"]
        if before is not None:
            os.environ["DILOCO_COMM_IMPL"] = before


def make_step(model: nn.Module, number: int) -> Callable[[], None]:
    """Return an inner step: exact, and a function of how many steps were taken."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 16)
    steps = iter(range(1_000_000))

    def step() -> None:
        now = next(steps)
        for index, param in enumerate(model.parameters()):
            param.grad = ramp(param.shape, now + 5 * index, 7 + 4 * number).to(param)
        optimizer.step()

    return step


def run_asynchronous(name: str, dtypes: Sequence[torch.dtype] = FP32) -> Bits:
    rule, wire, options, sending = ASYNCHRONOUS[name]
    models = [Layers(dtypes) for _ in SECONDS]
    workers = []
    for number, model in enumerate(models):
        local = LocalModel(
            model, [torch.optim.SGD(model.parameters(), lr=1 / 16)], fragments=2,
            wire=WireFormat(wire), name=str(number), **sending,
        )  # fmt: skip
        workers.append(VirtualWorker(local, make_step(model, number), SECONDS[number]))
    shared = SharedModel(workers[0].local.sizes, rule)
    run = VirtualRun(Coordinator(shared, sync_every=4, **options), workers)
    arrivals: list[str] = []
    payloads: list[str] = []

    def note(now: float, index: int, outcome: Any) -> None:
        staleness = outcome.refusal or outcome.staleness
        arrivals.append(f"{index}@{now:g}:{outcome.version} {staleness}")
        payloads.append(f"{index}:{short_digest(workers[index].local.payloads)}")

    run.until(num_updates=14, on_update=note)
    return {
        "outer": [hexadecimal(shared.read_all())],
        "local": [hexadecimal(model.parameters()) for model in models],
        "rounds": [arrivals],
        "payloads": [payloads],
        "steps": [{"versions": shared.version, "inner": run.num_steps}],
    }


def run_decoupled(name: str, dtypes: Sequence[torch.dtype] = FP32) -> Bits:
    options, running = DECOUPLED[name]
    models = [Layers(dtypes) for _ in SECONDS]
    parts = [
        [[p.detach() for p in model.layers[:3].parameters()],
         [p.detach() for p in model.layers[3:].parameters()]]
        for model in models
    ]  # fmt: skip
    setting = Setting(rule=QuorumRule(quorum=2, delay=2), **options)
    steps = [make_step(model, number) for number, model in enumerate(models)]
    run = setting.run(parts, steps, seconds=SECONDS, tokens=[1, 2, 3], **running)
    run.until(seconds=12.0)
    return {
        "outer": [
            hexadecimal(flat for each in run.syncer.fragments for flat in each.copy_values())
        ],
        "local": [hexadecimal(model.parameters()) for model in models],
        "rounds": [[f"{c.fragment}.{c.version}: {sorted(c.merged.items())}" for c in run.commits]],
        "payloads": [[f"{c.fragment}.{c.version}:{short_digest(c.values)}" for c in run.commits]],
        "steps": [{"bytes_up": run.bytes_up, "refusals": len(run.refusals)}],
    }


VIRTUAL: dict[str, Callable[[], Bits]] = {
    **{f"async {name}": partial(run_asynchronous, name) for name in ASYNCHRONOUS},
    **{f"decoupled {name}": partial(run_decoupled, name) for name in DECOUPLED},
    **{
        f"async {name} {dtype}": partial(run_asynchronous, name, DTYPES[dtype])
        for name, dtypes in LOW_ASYNCHRONOUS.items() for dtype in dtypes
    },
    **{
        f"decoupled {name} {dtype}": partial(run_decoupled, name, DTYPES[dtype])
        for name, dtypes in LOW_DECOUPLED.items() for dtype in dtypes
    },
}  # fmt: skip


def run_virtual(name: str, impl: str) -> Bits:
    with implementation(impl):
        return VIRTUAL[name]()
