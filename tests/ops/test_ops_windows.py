"""Windows of outer state: chunks with buffers of their own give the bytes of one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import device_ops as ops
import pytest
import torch
import triton_cases
from codec_cases import HOST_IMPLS, IMPLS, assert_same, clone, fragment, values
from test_async_operator import MODES
from test_ops_outer_step import OPTIMIZERS, State, default_options
from test_ops_reduce import whole_payload
from torch import Tensor

from diloco_comm.ops.implementations import has_triton
from diloco_comm.ops.wire import Layout, WireFormat

TRITON = triton_cases.IMPLS if has_triton() else []
INTERPRETED = [] if triton_cases.IS_COMPILED else TRITON
pytestmark = triton_cases.no_overflow_warning

# Elements, runs, wire, block size: the last run is cut short, and most chunks end inside a tensor.
FORMS = [
    (3001, 5, "int8", 64),
    (2900, 3, "int4", 1024),
    (257, 2, "fp16", 32),
    (1500, 3, "int2r", 256),
    (9000, 3, "topk64", 4096),
]
every_form = pytest.mark.parametrize("form", FORMS, ids=[form[2] for form in FORMS])
every_impl = pytest.mark.parametrize("impl", ["reference", *IMPLS, *TRITON])


def planned(form: tuple[int, int, str, int]) -> Layout:
    num_elements, num_runs, wire, block_size = form
    return Layout.plan(num_elements, num_runs, 1, WireFormat(wire, block_size))


class Window:
    """Tensors of elements [begin, end) alone, with other values before and behind in memory."""

    def __init__(self, wholes: dict[str, Tensor], begin: int, end: int) -> None:
        self.wholes, self.begin, self.end = wholes, begin, end
        self.around = {
            name: torch.cat([torch.full((64,), -7e8), whole[begin:end], torch.full((64,), 9e8)])
            for name, whole in wholes.items()
        }
        self.tensors = {name: padded[64:-64] for name, padded in self.around.items()}

    def put_back(self) -> None:
        """Write what the window holds into the whole tensors; nothing around it has changed."""
        for name, padded in self.around.items():
            assert (padded[:64] == -7e8).all() and (padded[-64:] == 9e8).all(), name
            self.wholes[name][self.begin : self.end] = self.tensors[name]


def windows(layout: Layout, wholes: dict[str, Tensor]) -> Iterator[tuple[Window, int, int]]:
    """Cut a fragment into chunks of a run or two; each second window holds a run more than used."""
    filled = -(-layout.num_elements // layout.run_elements)
    run = 0
    while run < filled:
        last = min(run + 1 + run % 2, filled)
        begin, end = layout.run_range(run)[0], layout.run_range(last - 1)[1]
        first = layout.run_range(max(run - run // 2 % 2, 0))[0]
        window = Window(wholes, first, end)
        yield window, begin, end
        window.put_back()
        run = last


def span_of(layout: Layout) -> tuple[int, str, int]:
    return layout.run_elements, layout.wire.name, layout.wire.block_size


@every_impl
@every_form
def test_encode(impl: str, form: tuple[int, int, str, int]) -> None:
    layout = planned(form)
    case = fragment(form[0], layout.wire, seed=form[0], num_runs=form[1])
    assert case.outer is not None and case.layout == layout
    residual = values(form[0], "normal", 5)
    results = []
    for name in (impl, "reference"):
        payload, bad, new = case.payload(), torch.zeros(1, dtype=torch.int64), residual.clone()
        options: dict[str, Any] = {"new_residual": new, "nonfinite": bad, "impl": name}
        options |= {"residual": new, "rng_key": -3, "stochastic": layout.wire.has_scales}
        if results:
            args = (0, form[0], *case.form)
            ops.encode(case.outer, case.params, payload, *args, **options)
        else:
            for window, begin, end in windows(layout, {"outer": case.outer}):
                where = {"outer_begin": window.begin, **options}
                args = (begin, end, *case.form)
                ops.encode(window.tensors["outer"], case.params, payload, *args, **where)
        results.append((payload, new, bad))
    for given, expected in zip(*results, strict=True):
        assert_same(given, expected, f"{impl} by windows")


@pytest.mark.each_pair("120 combinations")
@every_impl
@every_form
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_outer_step(impl: str, optimizer: str, form: tuple[int, int, str, int]) -> None:
    layout, seed = planned(form), form[0]
    payloads = [whole_payload(layout, "normal", seed + i) for i in range(2)]
    options = {"alpha": 0.25, "verdict": torch.tensor([0]), **default_options(optimizer)}
    parts, whole = (State(form[0], optimizer, seed) for _ in range(2))
    wholes = {name: getattr(parts, name) for name in ("outer", "momentum", "second")}
    for window, begin, end in windows(layout, wholes):
        here = State(0, optimizer, 0)
        vars(here).update(window.tensors, params=parts.params)
        span = (begin, end, *span_of(layout))
        here.step(impl, payloads, [1.0, -0.25], span, outer_begin=window.begin, **options)
    span = (0, form[0], *span_of(layout))
    whole.step("reference", payloads, [1.0, -0.25], span, **options)
    parts.assert_same(whole, f"{impl} by windows")


@pytest.mark.each_pair("120 combinations")
@every_impl
@every_form
@pytest.mark.parametrize(("first", "last"), MODES)
def test_arrivals(impl: str, first: bool, last: bool, form: tuple[int, int, str, int]) -> None:
    layout, seed = planned(form), form[0]
    payload = whole_payload(layout, "normal", seed)
    options = {"mu": 0.9, "ahead": 0.63, "behind": 0.27, "first": first, "last": last}
    names = ("outer", "momentum", "pending")
    parts = {name: values(form[0], "normal", seed + i) for i, name in enumerate(names)}
    whole = dict(zip(names, clone(list(parts.values())), strict=True))

    def arrive(state: dict[str, Tensor], begin: int, end: int, **where: Any) -> None:
        args = ([payload], [0.5], begin, end, *span_of(layout), 0.7)
        ops.outer_step_delayed(*(state[name] for name in names), *args, **options, **where)

    for window, begin, end in windows(layout, parts):
        arrive(window.tensors, begin, end, outer_begin=window.begin, impl=impl)
    arrive(whole, 0, form[0], impl="reference")
    for name in names:
        assert_same(parts[name], whole[name], f"{impl} {name} by windows")


N, RUN = 1000, 512
WRONG = [
    # The elements of outer, outer_begin, begin and end.
    pytest.param(488, 512, 0, N, id="it begins behind the range"),
    pytest.param(400, 512, 512, N, id="it ends inside the range"),
    pytest.param(600, 512, 512, N, id="it ends behind the fragment"),
    pytest.param(900, 100, 512, N, id="it begins inside a run"),
    pytest.param(N, -512, 0, N, id="it begins before the fragment"),
]


@pytest.mark.parametrize("impl", [*HOST_IMPLS, *INTERPRETED])
@pytest.mark.parametrize(("size", "outer_begin", "begin", "end"), WRONG)
def test_a_wrong_window(impl: str, size: int, outer_begin: int, begin: int, end: int) -> None:
    payload = torch.full((2 * WireFormat("int8", 256).run_bytes(RUN),), 7, dtype=torch.uint8)
    outer, params, span = torch.zeros(size), [torch.zeros(N)], (begin, end, RUN, "int8", 256)
    where: dict[str, Any] = {"outer_begin": outer_begin, "impl": impl}
    terms = ([payload], [1.0], *span)
    said = (
        rf"outer of {size} elements from outer_begin={outer_begin} must hold \[begin, end\) = "
        rf"\[{begin}, {end}\) of the fragment's {N} elements, from a multiple of 512"
    )
    for call in (
        lambda: ops.encode(outer, params, payload, *span, **where),
        lambda: ops.outer_step(outer, None, params, *terms, "sgd", 0.7, **where),
        lambda: ops.outer_step_adam(
            outer, outer, outer, params, *terms, lr=0.3, beta1=0.9, beta2=0.95, eps=0.1, step=1,
            **where,
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said) as raised:
            call()
        assert "\n" not in str(raised.value).split("\nException raised from")[0]
    assert (payload == 7).all() and not any(param.any() for param in params)


@pytest.mark.parametrize("impl", [*HOST_IMPLS, *INTERPRETED])
def test_state_that_is_no_window_of_outer(impl: str) -> None:
    layout = Layout.plan(N, 2, 1, WireFormat("int8", 256))
    terms = ([whole_payload(layout, "normal", 1)], [1.0], RUN, N, *span_of(layout))
    outer, whole, params = torch.zeros(N - RUN), torch.zeros(N), [torch.zeros(N)]
    where: dict[str, Any] = {"outer_begin": RUN, "impl": impl}
    with pytest.raises(ValueError, match="momentum must have 488 elements like outer, got 1000"):
        ops.outer_step(outer, whole, params, *terms, "nesterov", 0.7, mu=0.9, **where)
    with pytest.raises(ValueError, match="pending must have 488 elements like outer, got 1000"):
        ops.outer_step_delayed(outer, None, whole, *terms, 0.7, last=True, **where)
    # The fragment of an arrival ends where outer ends.
    with pytest.raises(ValueError, match=r"\[512, 1000\) must lie in the fragment's \[0, 912\)"):
        ops.outer_step_delayed(outer[:400], None, outer[:400], *terms, 0.7, last=True, **where)
    with pytest.raises(ValueError, match="outer_begin=-512 must hold"):
        where["outer_begin"] = -RUN
        ops.outer_step_delayed(whole, None, whole, *terms, 0.7, last=True, **where)
