"""outer_step, outer_step_adam, merge and norms: the reference's bits, and torch.optim's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import device_ops as ops
import pytest
import torch
from codec_cases import (
    CPU_IMPLS,
    DTYPES,
    HOST_IMPLS,
    IMPLS,
    LOW_PRECISION,
    SIZES,
    as_written,
    assert_same,
    block_sizes,
    clone,
    dtype_names,
    fill,
    flat,
    kinds,
    low_precision,
    seeds,
    sizes,
    tensors_like,
    values,
)
from hypothesis import given
from hypothesis import strategies as st
from test_ops_reduce import whole_payload
from torch import Tensor

from diloco_comm.ops import reference
from diloco_comm.ops.wire import ELEMENT_WIRES, Layout, WireFormat

every_impl = pytest.mark.parametrize("impl", IMPLS)
every_wire = pytest.mark.parametrize("wire", ELEMENT_WIRES)
every_low_precision = pytest.mark.parametrize("dtypes", LOW_PRECISION, ids=dtype_names)
OPTIMIZERS = ["sgd", "heavy_ball", "nesterov", "adam"]
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


class State:
    """Outer parameters, optimizer state and the fragment's tensors, before or after a step."""

    def __init__(self, num_elements: int, optimizer: str, seed: int, dtypes: tuple = ()) -> None:
        self.outer = values(num_elements, "good", seed)
        self.momentum = values(num_elements, "good", seed + 1)
        self.second = values(num_elements, "normal", seed + 2).square()
        self.params = tensors_like(num_elements, seed)
        fill(self.params, values(num_elements, "normal", seed + 3))
        if dtypes:
            self.outer, self.params = low_precision(num_elements, dtypes, "good", seed)
        self.optimizer = optimizer

    def step(self, impl: str, payloads: list, coefficients: list, span: tuple, **options) -> None:
        """Apply one step with the given implementation."""
        args = (payloads, coefficients, *span)
        if self.optimizer == "adam":
            ops.outer_step_adam(
                self.outer, self.momentum, self.second, self.params, *args, impl=impl, **options
            )
        else:
            momentum = None if self.optimizer == "sgd" else self.momentum
            ops.outer_step(
                self.outer, momentum, self.params, *args, self.optimizer, impl=impl, **options
            )

    def assert_same(self, other: State, what: str) -> None:
        """Compare all tensors bit for bit."""
        assert_same(self.outer, other.outer, f"{what} outer")
        assert_same(self.momentum, other.momentum, f"{what} momentum")
        assert_same(self.second, other.second, f"{what} second moment")
        for param, true_param in zip(self.params, other.params, strict=True):
            assert_same(param, true_param, f"{what} {tuple(param.shape)} {param.dtype}")


def default_options(optimizer: str) -> dict:
    if optimizer == "adam":
        return {"lr": 0.3, "beta1": 0.9, "beta2": 0.95, "eps": 0.1, "step": 3}
    return {"lr": 0.7} if optimizer == "sgd" else {"lr": 0.7, "mu": 0.9}


def compare(
    layout: Layout, optimizer: str, impl: str, seed: int, num_terms: int, **options
) -> None:
    """Take one step with the implementation and with the reference, and compare everything."""
    form = layout.wire
    payloads = [whole_payload(layout, "normal", seed + i) for i in range(num_terms)]
    coefficients = [1.0, 0.25, -0.125, 0.3][:num_terms]
    begin, end = options.pop("span", (0, layout.num_elements))
    dtypes = options.pop("dtypes", ())
    span = (begin, end, layout.run_elements, form.name, form.block_size)
    both = []
    for name in (impl, "reference"):
        state = State(layout.num_elements, optimizer, seed, dtypes)
        state.step(name, payloads, coefficients, span, **default_options(optimizer), **options)
        both.append(state)
    both[0].assert_same(both[1], impl)


@pytest.mark.each_pair("112 combinations")
@every_impl
@every_optimizer
@pytest.mark.parametrize("num_elements", SIZES)
def test_sizes(impl: str, optimizer: str, num_elements: int) -> None:
    layout = Layout.plan(num_elements, 2, 1, WireFormat("int8"))
    compare(layout, optimizer, impl, num_elements, 1)
    compare(layout, optimizer, impl, num_elements, 3, alpha=0.5)


@pytest.mark.each_pair("128 combinations")
@every_impl
@every_wire
@every_optimizer
def test_wires_and_terms(impl: str, wire: str, optimizer: str) -> None:
    for seed, block_size in enumerate((32, 64, 128, 256, 512, 1024)):
        layout = Layout.plan(3001, 1, 1, WireFormat(wire, block_size))
        compare(layout, optimizer, impl, seed, 1 + seed % 4, alpha=(0.0, 0.3)[seed % 2])


@pytest.mark.each_pair("144 combinations")
@every_impl
@every_optimizer
@every_low_precision
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.9])
def test_low_precision(impl: str, optimizer: str, dtypes: tuple, alpha: float) -> None:
    """Steps of few units; the merge rounds toward the new outer value."""
    for wire in ("int8", "topk64"):
        layout = Layout.plan(9001, 1, 1, WireFormat(wire))
        compare(layout, optimizer, impl, 7, 2, alpha=alpha, dtypes=dtypes)


@pytest.mark.each_value("16 combinations of many steps")
@every_impl
@every_optimizer
@given(data=st.data())
def test_any_step(impl: str, optimizer: str, data: st.DataObject) -> None:
    wire = WireFormat(data.draw(st.sampled_from(ELEMENT_WIRES)), data.draw(block_sizes))
    layout = Layout.plan(data.draw(sizes), data.draw(st.integers(1, 4)), 1, wire)
    options = {"alpha": data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))}
    if optimizer in ("heavy_ball", "nesterov"):
        options["clip"] = data.draw(st.sampled_from([math.inf, 1.0, 1e-4]))
    filled = -(-layout.num_elements // layout.run_elements)
    first = data.draw(st.integers(0, filled - 1))
    last = data.draw(st.integers(first, filled - 1))
    options["span"] = (layout.run_range(first)[0], layout.run_range(last)[1])
    options["verdict"] = data.draw(st.sampled_from([None, torch.tensor([0]), torch.tensor([1])]))
    compare(layout, optimizer, impl, data.draw(seeds), data.draw(st.integers(1, 4)), **options)


@every_impl
@every_optimizer
def test_a_set_verdict_means_no_step(impl: str, optimizer: str) -> None:
    layout = Layout.plan(1000, 1, 1, WireFormat("int8"))
    payload = whole_payload(layout, "normal", 1)
    span = (0, 1000, layout.run_elements, "int8", 256)
    state, before = State(1000, optimizer, 5), State(1000, optimizer, 5)
    for verdict in (1, -1, 1 << 40):
        options = {"verdict": torch.tensor([verdict]), **default_options(optimizer)}
        state.step(impl, [payload], [1.0], span, **options)
        state.assert_same(before, "after a refused step")
    state.step(
        impl, [payload], [1.0], span, verdict=torch.tensor([0]), **default_options(optimizer)
    )
    assert not torch.equal(state.outer, before.outer)


@pytest.mark.parametrize("impl", HOST_IMPLS)
def test_flush_to_zero_changes_nothing(impl: str) -> None:
    layout = Layout.plan(1000, 1, 1, WireFormat("fp32"))
    payload = whole_payload(layout, "subnormal", 1)
    span = (0, 1000, layout.run_elements, "fp32", 256)
    for optimizer in OPTIMIZERS:
        state, expected = State(1000, optimizer, 5), State(1000, optimizer, 5)
        for each in (state, expected):
            each.outer = values(1000, "subnormal", 2)
        expected.step("reference", [payload], [0.5], span, alpha=0.5, **default_options(optimizer))
        torch.set_flush_denormal(True)
        try:
            state.step(impl, [payload], [0.5], span, alpha=0.5, **default_options(optimizer))
        finally:
            torch.set_flush_denormal(False)
        state.assert_same(expected, optimizer)


@pytest.mark.parametrize("impl", CPU_IMPLS)
@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_threads_change_nothing(impl: str, optimizer: str) -> None:
    layout = Layout.plan(400_003, 2, 1, WireFormat("int4", 32))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            compare(layout, optimizer, impl, 3, 2, alpha=0.5)
    finally:
        torch.set_num_threads(before)


def gradients(num_steps: int, num_elements: int) -> list[Tensor]:
    return [values(num_elements, "normal", 70 + i) * 1000 for i in range(num_steps)]


def apply_exactly(impl: str, g: Tensor, step: Callable) -> None:
    """Call ``step(payloads, coefficients, begin, end, run_elements, wire, block_size)`` with g."""
    layout = Layout.plan(g.numel(), 1, 1, WireFormat("fp32"))
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    args = (layout.run_elements, "fp32", 256)
    ops.encode(None, [g], payload, 0, g.numel(), *args, impl=impl)
    step([payload], [1.0], 0, g.numel(), *args)


def ulps(a: Tensor, b: Tensor, scale: Tensor) -> float:
    """Return the largest difference in units of the last place of ``scale``."""
    spacing = torch.nextafter(scale.abs(), torch.tensor(torch.inf)) - scale.abs()
    return ((a.double() - b.double()).abs() / spacing.double()).max().item()


@every_impl
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("lr", "mu"), [(0.5, 0.5), (0.25, 0.75), (1.0, 0.0)])
def test_momentum_equals_torch_sgd_bit_for_bit(
    impl: str, nesterov: bool, lr: float, mu: float
) -> None:
    """Products with few bits are exact, so torch's fused multiply-adds round as ours do."""
    n = 1001
    start = torch.randint(-4096, 4096, (n,)).float() / 64
    ours, momentum, params = start.clone(), torch.zeros(n), [torch.zeros(n)]
    theirs = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([theirs], lr=lr, momentum=mu, nesterov=nesterov and mu > 0)
    name = "nesterov" if nesterov and mu > 0 else "heavy_ball"
    for i in range(4):
        g = torch.randint(-256, 256, (n,), generator=torch.Generator().manual_seed(i)).float() / 16
        apply_exactly(
            impl,
            g,
            lambda *args: ops.outer_step(
                ours, momentum, params, *args, name, lr=lr, mu=mu, impl=impl
            ),
        )
        theirs.grad = g
        sgd.step()
    assert torch.equal(ours, theirs.detach())
    assert torch.equal(params[0], ours)


@every_impl
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_equals_torch_sgd_within_an_ulp(impl: str, nesterov: bool) -> None:
    """One step from equal state differs by the roundings that torch's fused operations skip."""
    n, lr, mu = 10_001, 0.7, 0.9
    outer, momentum, params = values(n, "normal", 1) * 1000, torch.zeros(n), torch.zeros(n)
    for g in gradients(5, n):
        theirs = torch.nn.Parameter(outer.clone())
        sgd = torch.optim.SGD([theirs], lr=lr, momentum=mu, nesterov=nesterov)
        sgd.state[theirs]["momentum_buffer"] = momentum.clone()
        theirs.grad = g.clone()
        sgd.step()
        name = "nesterov" if nesterov else "heavy_ball"
        old, old_momentum = outer.clone(), momentum.clone()
        apply_exactly(
            impl,
            g,
            lambda *args, name=name: ops.outer_step(
                outer, momentum, [params], *args, name, lr=lr, mu=mu, impl=impl
            ),
        )
        # Cancellation aside: an ulp of the largest number that entered the sum.
        assert (
            ulps(momentum, sgd.state[theirs]["momentum_buffer"], old_momentum.abs() + g.abs()) <= 1
        )
        largest = old.abs() + 3 * (g.abs() + old_momentum.abs())
        assert ulps(outer, theirs.detach(), largest) <= 1


@every_impl
def test_adam_equals_torch_adam(impl: str) -> None:
    n = 10_001
    start = values(n, "normal", 1) * 1000
    outer, m, v, params = start.clone(), torch.zeros(n), torch.zeros(n), torch.zeros(n)
    theirs = torch.nn.Parameter(start.double())
    adam = torch.optim.Adam([theirs], lr=0.3, betas=(0.9, 0.95), eps=0.1)
    for i, g in enumerate(gradients(6, n)):
        apply_exactly(
            impl,
            g,
            lambda *args, i=i: ops.outer_step_adam(
                outer,
                m,
                v,
                [params],
                *args,
                lr=0.3,
                beta1=0.9,
                beta2=0.95,
                eps=0.1,
                step=i + 1,
                impl=impl,
            ),
        )
        theirs.grad = g.double()
        adam.step()
    # Each step rounds fewer than ten times, numbers no larger than |start| + 6 steps of lr.
    bound = 60 * 2.0**-24 * (start.abs().double() + 6 * 0.3 * 4)
    assert ((outer.double() - theirs.detach()).abs() <= bound).all()


@every_impl
@given(data=st.data())
def test_merge(impl: str, data: st.DataObject) -> None:
    num_elements, seed = data.draw(sizes), data.draw(seeds)
    alpha = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    outer = values(num_elements, data.draw(kinds), seed)
    params = tensors_like(num_elements, seed)
    fill(params, values(num_elements, "normal", seed + 1))
    expected, local = clone(params), flat(params).double()
    reference.merge(outer, expected, alpha)
    ops.merge(outer, params, alpha, impl=impl)
    for param, true_param in zip(params, expected, strict=True):
        assert_same(param, true_param, f"merged {tuple(param.shape)} {param.dtype}")
    exact = alpha * local + (1 - alpha) * outer.double()
    if exact.isfinite().all() and exact.abs().max() < 6e4 and exact.abs().max() > 1e-3:
        # Half a unit of bf16 to nearest, a whole one toward c(outer).
        bound = 2.0**-8 if alpha == 0 else 2.0**-7
        assert (flat(params).double() - exact).abs().max() <= bound * exact.abs().max()


@pytest.mark.each_pair("180 combinations")
@every_impl
@every_low_precision
@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["normal", "wide", "subnormal", "edge", "bad"])
def test_merges_in_low_precision(impl: str, dtypes: tuple, alpha: float, kind: str) -> None:
    """The local values are a few units from the outer values, on both sides."""
    check_low_precision_merge(impl, dtypes, alpha, kind, 4099)


def check_low_precision_merge(
    impl: str, dtypes: tuple, alpha: float, kind: str, num_elements: int
) -> None:
    """Compare with the reference, and ask for the values that lie next to the exact sum."""
    outer, params = low_precision(num_elements, dtypes, kind, 5)
    local, written = flat(params), clone(params)
    reference.merge(outer, written, alpha)
    ops.merge(outer, params, alpha, impl=impl)
    for param, true_param in zip(params, written, strict=True):
        assert_same(param, true_param, f"merged {kind} {tuple(param.shape)} {param.dtype}")
    held, result = as_written(outer, params), flat(params)
    total = torch.tensor(alpha) * local + torch.tensor(1 - alpha) * outer
    nearest, known = as_written(total, params), total.isfinite() & held.isfinite()
    low, high = torch.minimum(held, total), torch.maximum(held, total)
    assert ((low <= result) & (result <= high))[known].all()
    # The nearest value, unless that value lies on the other side of the sum.
    is_beyond = (nearest < low) | (nearest > high)
    assert ((result == nearest) == ~is_beyond)[known].all()


@every_impl
@pytest.mark.parametrize("dtypes", [*LOW_PRECISION[:2], DTYPES[1:]], ids=dtype_names)
def test_what_equals_the_outer_value_stays(impl: str, dtypes: tuple) -> None:
    """A parameter that no inner step has moved: no norm, and no merge changes a bit."""
    outer, params = low_precision(4099, dtypes, "good", 3)
    fill(params, outer)
    before, norms = clone(params), torch.ones(2, dtype=torch.float64)
    for alpha in (0.0, 0.25, 0.5, 0.9):
        ops.merge(outer, params, alpha, impl=impl)
        for param, old in zip(params, before, strict=True):
            assert_same(param, old, f"{param.dtype} merged with alpha {alpha}")
    finite = flat(params).isfinite()
    ops.norms(outer, params, norms, impl=impl)
    assert norms.tolist() == [0.0, float((~finite).sum())]


# dtype, local value, outer value, alpha: what the merge writes.
MERGES = [
    (torch.bfloat16, 1.0, 1 + 2.0**-9, 0.5, 1.0),
    (torch.bfloat16, 1.0, 1 + 3 * 2.0**-9, 0.5, 1 + 2.0**-7),
    (torch.bfloat16, 1.0, 1 + 3 * 2.0**-9, 0.0, 1 + 2.0**-7),
    (torch.bfloat16, 1 + 2.0**-6, 1.0, 0.25, 1.0),
    (torch.bfloat16, 1 + 2.0**-6, 1.0, 0.5, 1 + 2.0**-7),
    (torch.bfloat16, 1 + 2.0**-6, 1.0, 0.9, 1 + 2.0**-7),
    (torch.bfloat16, -1.0, -1 - 2.0**-6, 0.9, -1 - 2.0**-7),
    (torch.bfloat16, 1.0, float("inf"), 0.5, float("inf")),
    (torch.float32, 1.0, 1 + 2.0**-9, 0.5, 1 + 2.0**-10),
    (torch.float16, 2.0**-24, 0.0, 0.9, 0.0),
    (torch.float16, 0.0, 2.0**-24, 0.9, 2.0**-24),
    (torch.float16, 0.0, -(2.0**-24), 0.9, -(2.0**-24)),
    (torch.float16, 65472.0, 65504.0, 0.9, 65504.0),
    (torch.float16, 65504.0, 65520.0, 0.5, float("inf")),
    (torch.float16, 65504.0, 65519.0, 0.5, 65504.0),
    (torch.float16, float("inf"), 65519.0, 0.5, float("inf")),
]


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
@pytest.mark.parametrize(("dtype", "local", "outer", "alpha", "expected"), MERGES)
def test_examples_of_merges(
    impl: str, dtype: torch.dtype, local: float, outer: float, alpha: float, expected: float
) -> None:
    for count in (1, 64):
        params = [torch.full((count,), local, dtype=dtype)]
        ops.merge(torch.full((count,), outer), params, alpha, impl=impl)
        assert params[0].tolist() == [expected] * count


@every_impl
@given(data=st.data())
def test_norms(impl: str, data: st.DataObject) -> None:
    num_elements, seed, kind = data.draw(sizes), data.draw(seeds), data.draw(kinds)
    params = tensors_like(num_elements, seed)
    fill(params, values(num_elements, "normal", seed))
    outer = values(num_elements, kind, seed + 1) if data.draw(st.booleans()) else None
    check_norms(outer, params, impl)


@every_impl
def test_norms_of_many_tiles_and_threads(impl: str) -> None:
    params = tensors_like(300_007, 3)
    fill(params, values(300_007, "normal", 4))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            check_norms(values(300_007, "bad", 5), params, impl)
    finally:
        torch.set_num_threads(before)


def check_norms(outer: Tensor | None, params: list[Tensor], impl: str) -> None:
    """Compare with the reference bit for bit, and with a plain fp64 sum."""
    out, expected = torch.full((2,), 9.0, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    ops.norms(outer, params, out, impl=impl)
    reference.norms(outer, params, expected)
    assert_same(out, expected, "norms")
    x = flat(params) if outer is None else as_written(outer, params) - flat(params)
    good = x.abs() <= 2.0**126
    assert out[1] == (~good).sum()
    exact = x[good].double().square().sum().item()
    assert abs(out[0].item() - exact) <= 1e-12 * exact
