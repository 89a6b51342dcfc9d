"""The operators as citizens of torch: schemas, fake tensors, torch.compile, autograd, memory."""

from __future__ import annotations

import inspect
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from codec_cases import CPU_IMPLS, ELEMENT_WIRES, Fragment, fill, fragment, values
from test_ops_reduce import whole_payload
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from diloco_comm import ops
from diloco_comm.ops import reference
from diloco_comm.ops.wire import Layout, WireFormat

OPS = torch.ops.diloco_comm


def counted(n: int = 1) -> Tensor:
    return torch.zeros(n, dtype=torch.int64)


def calls(n: int = 600) -> dict[str, tuple[tuple, dict]]:
    """One valid call of every operator."""
    layout = Layout.plan(n, 2, 1, WireFormat("int8", 32))
    payload = whole_payload(layout, "normal", 1)
    case = Fragment(values(n, "normal", 2), [torch.zeros(n - 20), torch.zeros(4, 5)], layout)
    fill(case.params, values(n, "normal", 3))
    form = case.form
    run_bytes, run = layout.run_bytes, layout.run_elements
    adam = {"lr": 0.3, "beta1": 0.9, "beta2": 0.95, "eps": 0.1, "step": 1}
    residuals = {"residual": torch.zeros(n), "new_residual": torch.zeros(n)}
    return {
        "encode": (
            (case.outer, case.params, torch.zeros_like(payload), 0, n, *form),
            {"stochastic": True, "nonfinite": counted(), "max_blocks": 3, **residuals},
        ),
        "reduce": (
            (payload, torch.zeros(run_bytes, dtype=torch.uint8), [0.5, 0.5], run, *form),
            {"nonfinite": counted(), "residual": torch.zeros(run), "max_blocks": 3},
        ),
        "outer_step": (
            (case.outer, torch.zeros(n), case.params, [payload] * 2, [1.0, 0.5], 0, n, *form,
             "nesterov", 0.7),
            {"mu": 0.9, "alpha": 0.5, "verdict": counted()},
        ),
        "outer_step_adam": (
            (case.outer, *torch.zeros(2, n), case.params, [payload], [1.0], 0, n, *form),
            adam,
        ),
        "decode": (([payload], [1.0], case.params, 0, n, *form), {"max_blocks": 3}),
        "merge": ((case.outer, case.params), {"alpha": 0.25}),
        "norms": ((case.outer, case.params, torch.zeros(2, dtype=torch.float64)), {}),
        "gram": (
            ([payload] * 2, torch.zeros(4, dtype=torch.float64), 0, n, n, *form),
            {},
        ),
        "digest": ((payload, counted(2)), {"first_word": 5, "max_blocks": 3}),
    }  # fmt: skip


NAMES = list(calls())


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    args, kwargs = calls()[name]
    torch.library.opcheck(getattr(OPS, name).default, args, kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_schema_is_the_reference_s(name: str) -> None:
    """The same arguments in the same order, so that one call serves both."""
    schema = [argument.name for argument in getattr(OPS, name).default._schema.arguments]
    function = list(inspect.signature(getattr(reference, name)).parameters)
    wrapper = list(inspect.signature(getattr(ops, name)).parameters)
    assert schema == [*function, "impl"] == wrapper


@pytest.mark.nightly("4 s; they differ in the backend", but=["aot_eager"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_a_whole_outer_step(backend: str) -> None:
    """Operators in one graph change the tensors as they do without compile."""

    def sync(outer: Tensor, momentum: Tensor, param: Tensor, payload: Tensor) -> None:
        n, form = outer.numel(), (1024, "int8", 256)
        OPS.encode(outer, [param], payload, 0, n, *form)
        OPS.outer_step(
            outer, momentum, [param], [payload], [1.0], 0, n, *form, "nesterov", 0.5, mu=0.5
        )
        OPS.merge(momentum, [param], 0.5)

    results = []
    for function in (sync, torch.compile(sync, backend=backend, fullgraph=True)):
        state = [
            values(1000, "normal", 1),
            torch.zeros(1000),
            values(1000, "normal", 2).view(10, 100),
        ]
        payload = torch.zeros(WireFormat().run_bytes(1024), dtype=torch.uint8)
        function(*state, payload)
        results.append([*state, payload])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_compile_a_function_that_calls_the_wrappers() -> None:
    def encode(x: Tensor, payload: Tensor) -> Tensor:
        ops.encode(None, [x + 1.0], payload, 0, x.numel(), 1024, "int4", 64)
        return x + 2.0

    x, layout = values(1000, "normal", 4), WireFormat("int4", 64)
    payloads = [torch.zeros(layout.run_bytes(1024), dtype=torch.uint8) for _ in range(2)]
    encode(x, payloads[0])
    torch.compile(encode, backend="aot_eager")(x, payloads[1])
    assert torch.equal(*payloads)


@pytest.mark.parametrize("impl", ["reference", *CPU_IMPLS])
def test_parameters_that_require_grad_are_written_in_place(impl: str) -> None:
    param = torch.nn.Parameter(torch.ones(4, 5))
    before = param.data_ptr()
    ops.merge(torch.arange(20.0), [param], impl=impl)
    assert param.data_ptr() == before and param.requires_grad and param.grad_fn is None
    assert torch.equal(param.detach().flatten(), torch.arange(20.0))


@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_autograd_notices_that_a_saved_tensor_was_written(impl: str) -> None:
    param = torch.nn.Parameter(torch.ones(20))
    loss = (param * param).sum()
    ops.merge(torch.arange(20.0), [param], impl=impl)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_inference_tensors_are_accepted(impl: str) -> None:
    with torch.inference_mode():
        params = [torch.ones(20)]
        ops.merge(torch.arange(20.0), params, impl=impl)
    assert torch.equal(params[0], torch.arange(20.0))


@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_two_threads_at_once(impl: str) -> None:
    """The training loop and the engine's thread use the operators at the same time."""
    cases = [fragment(60_003, WireFormat("int8", 32), "normal", seed) for seed in range(4)]
    expected = []
    for case in cases:
        expected.append(case.payload())
        args = (case.outer, case.params, expected[-1], 0, 60_003, *case.form)
        reference.encode(*args)

    def work(idx: int) -> bool:
        case, payload = cases[idx], cases[idx].payload()
        for _ in range(5):
            payload.fill_(0xA5)
            ops.encode(case.outer, case.params, payload, 0, 60_003, *case.form, impl=impl)
            if not torch.equal(payload, expected[idx]):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize("impl", CPU_IMPLS)
@pytest.mark.parametrize("wire", ELEMENT_WIRES)
def test_steady_state_allocates_nothing(impl: str, wire: str) -> None:
    """No tensor is made, and no fresh memory is touched, however large the fragment."""
    n = 1 << 20
    case = fragment(n, WireFormat(wire), "normal", 1, num_runs=4)
    payload, momentum = torch.zeros(case.layout.payload_bytes, dtype=torch.uint8), torch.zeros(n)
    run_bytes = case.layout.run_bytes
    result, residual = torch.zeros(run_bytes, dtype=torch.uint8), torch.zeros(n)
    out, sums = torch.zeros(2, dtype=torch.float64), counted(2)
    run = case.layout.run_elements

    def sync() -> None:
        ops.encode(
            case.outer, case.params, payload, 0, n, *case.form,
            residual=residual, new_residual=residual, impl=impl,
        )  # fmt: skip
        ops.reduce(payload, result, [0.25] * 4, run, *case.form, impl=impl)
        ops.outer_step(
            case.outer, momentum, case.params, [payload], [1.0], 0, n, *case.form,
            "nesterov", lr=0.7, mu=0.9, impl=impl,
        )  # fmt: skip
        ops.decode([payload], [1.0], case.params, 0, n, *case.form, impl=impl)
        ops.merge(case.outer, case.params, impl=impl)
        ops.norms(case.outer, case.params, out, impl=impl)
        ops.digest(case.outer, sums, impl=impl)

    for _ in range(3):
        sync()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        sync()
    allocated = [
        event.cpu_memory_usage for event in recorded.events() if event.cpu_memory_usage > 0
    ]
    assert allocated == []
    best = 1 << 30
    for _ in range(3):
        before = minor_faults()
        sync()
        best = min(best, minor_faults() - before)
    assert best <= 2
