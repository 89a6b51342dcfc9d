"""Time every operator by implementation and wire format with pytest-benchmark.

    make bench
    pytest benchmarks/operators/ops_bench.py --benchmark-only -k "outer_step and int8"

Fragments of 8 MiB of fp32 on one thread: more than the second-level cache, and quick.
``benchmarks/operators/roofline.py`` compares with memory and with plain PyTorch at full size.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diloco_comm import ops
from diloco_comm.ops.wire import ELEMENT_WIRES, Layout, WireFormat

NUM_ELEMENTS = 1 << 21
NUM_RUNS = 4
IMPLS = [impl for impl in ops.available_impls() if impl != "reference"]
BENCH = {"rounds": 9, "warmup_rounds": 2, "iterations": 1}

every_impl = pytest.mark.parametrize("impl", IMPLS)
every_wire = pytest.mark.parametrize("wire", ELEMENT_WIRES)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    names = ("outer", "params", "momentum", "residual", "second")
    state = {name: torch.randn(NUM_ELEMENTS, generator=rng) for name in names}
    state["second"].abs_()
    return state


def fragment(wire: str) -> tuple[Layout, tuple[int, str, int], Tensor]:
    layout = Layout.plan(NUM_ELEMENTS, NUM_RUNS, 1, WireFormat(wire))
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    return layout, (layout.run_elements, wire, layout.wire.block_size), payload


def run(benchmark, function: Callable[[], None], bytes_per_element: float) -> None:
    """Time a function and note how many bytes an element it must move."""
    benchmark.extra_info["bytes_per_element"] = bytes_per_element
    benchmark.extra_info["num_elements"] = NUM_ELEMENTS
    benchmark.pedantic(function, **BENCH)


@every_impl
@every_wire
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.benchmark(group="encode")
def test_encode(benchmark, state, impl: str, wire: str, rounding: str) -> None:
    layout, form, payload = fragment(wire)
    args = (state["outer"], [state["params"]], payload, 0, NUM_ELEMENTS, *form)
    options = {"stochastic": rounding == "stochastic", "impl": impl}
    run(benchmark, lambda: ops.encode(*args, **options), 8 + layout.wire.bits_per_element / 8)


@every_impl
@every_wire
@pytest.mark.benchmark(group="encode with error feedback")
def test_encode_feedback(benchmark, state, impl: str, wire: str) -> None:
    layout, form, payload = fragment(wire)
    args = (state["outer"], [state["params"]], payload, 0, NUM_ELEMENTS, *form)
    new = torch.empty(NUM_ELEMENTS)
    options = {"residual": state["residual"], "new_residual": new, "impl": impl}
    run(benchmark, lambda: ops.encode(*args, **options), 16 + layout.wire.bits_per_element / 8)


@every_impl
@every_wire
@pytest.mark.benchmark(group="decode")
def test_decode(benchmark, state, impl: str, wire: str) -> None:
    layout, form, payload = fragment(wire)
    ops.encode(None, [state["params"]], payload, 0, NUM_ELEMENTS, *form)
    args = ([payload], [1.0], [torch.empty(NUM_ELEMENTS)], 0, NUM_ELEMENTS, *form)
    run(benchmark, lambda: ops.decode(*args, impl=impl), 4 + layout.wire.bits_per_element / 8)


@every_impl
@every_wire
@pytest.mark.benchmark(group="reduce of 4")
def test_reduce(benchmark, state, impl: str, wire: str) -> None:
    layout, form, payload = fragment(wire)
    ops.encode(None, [state["params"]], payload, 0, NUM_ELEMENTS, *form)
    result = torch.zeros(layout.run_bytes, dtype=torch.uint8)
    args = (payload, result, [1 / NUM_RUNS] * NUM_RUNS, layout.run_elements, *form)
    moved = layout.wire.bits_per_element / 8 * (1 + 1 / NUM_RUNS)
    run(benchmark, lambda: ops.reduce(*args, impl=impl), moved)


@every_impl
@every_wire
@pytest.mark.parametrize("optimizer", ["sgd", "heavy_ball", "nesterov", "adam"])
@pytest.mark.benchmark(group="outer_step")
def test_outer_step(benchmark, state, impl: str, wire: str, optimizer: str) -> None:
    layout, form, payload = fragment(wire)
    local = {name: tensor.clone() for name, tensor in state.items()}
    ops.encode(None, [state["residual"]], payload, 0, NUM_ELEMENTS, *form)
    args = ([local["params"]], [payload], [1.0], 0, NUM_ELEMENTS, *form)
    wire_bytes = layout.wire.bits_per_element / 8

    def adam() -> None:
        ops.outer_step_adam(
            local["outer"], local["momentum"], local["second"], *args,
            lr=0.3, beta1=0.9, beta2=0.95, eps=0.1, step=3, impl=impl,
        )  # fmt: skip

    def other() -> None:
        momentum = None if optimizer == "sgd" else local["momentum"]
        ops.outer_step(local["outer"], momentum, *args, optimizer, lr=0.7, mu=0.9, impl=impl)

    moved = {"sgd": 12, "heavy_ball": 20, "nesterov": 20, "adam": 28}[optimizer]
    run(benchmark, adam if optimizer == "adam" else other, moved + wire_bytes)


@every_impl
@pytest.mark.benchmark(group="merge and norms")
def test_merge(benchmark, state, impl: str) -> None:
    params = [torch.zeros(NUM_ELEMENTS)]
    run(benchmark, lambda: ops.merge(state["outer"], params, impl=impl), 8)


@every_impl
@pytest.mark.benchmark(group="merge and norms")
def test_norms(benchmark, state, impl: str) -> None:
    out = torch.zeros(2, dtype=torch.float64)
    run(benchmark, lambda: ops.norms(state["outer"], [state["params"]], out, impl=impl), 8)


@every_impl
@pytest.mark.benchmark(group="digest")
def test_digest(benchmark, state, impl: str) -> None:
    sums = torch.zeros(2, dtype=torch.int64)
    run(benchmark, lambda: ops.digest(state["outer"], sums, impl=impl), 4)
