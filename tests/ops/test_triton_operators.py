"""Triton's operators but encode: the reference's bytes, in the interpreter or on a GPU.

The bodies are those of test_ops_*.py. The interpreter takes milliseconds for each tile, so the
cases are fewer, and chosen: every wire, every block size, every kind of value, every dtype.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import test_async_operator as arrivals
import test_ops_errors as errors
import test_ops_examples as examples
import test_ops_outer_step as stepping
import test_ops_reduce as reducing
import torch
from codec_cases import (
    SIZES,
    assert_same,
    clone,
    fill,
    low_precision,
    tensors_like,
    values,
)
from test_ops_bounds import test_misaligned_tensors_between_guards as check_guards
from triton_cases import IS_COMPILED, every_impl, interpreted, no_overflow_warning

from diloco_comm import ops
from diloco_comm.ops import reference
from diloco_comm.ops.wire import BLOCK_SIZES, ELEMENT_WIRES, Layout, WireFormat

pytest.importorskip("triton", reason="needs Triton")

every_wire = pytest.mark.parametrize("wire", ELEMENT_WIRES)
every_optimizer = pytest.mark.parametrize("optimizer", stepping.OPTIMIZERS)

pytestmark = no_overflow_warning

LARGEST_SIZE = SIZES[-1]


@pytest.mark.each_value("24 combinations in the interpreter")
@every_impl
@every_wire
@pytest.mark.parametrize("num_ranks", [1, 3, 9])
def test_reduce(impl: str, wire: str, num_ranks: int) -> None:
    """Nine terms come from a table on the device, fewer are arguments."""
    form = WireFormat(wire, BLOCK_SIZES[num_ranks % 6])
    weights = reference.normalised([1.0 + rank for rank in range(num_ranks)])
    for count in (7, 257, 2500):
        received = reducing.received_runs(num_ranks, count, form, "good", num_ranks)
        options = {"stochastic": num_ranks == 3, "rng_key": -5, "index_begin": 1024 << 40}
        residual = values(count, "normal", 3)
        reducing.check_reduce(received, weights, count, form, impl, residual=residual, **options)
    reducing.check_reduce(received, weights, count, form, impl)


@pytest.mark.nightly("6 s each in the interpreter; the first tier has grids without a bound")
@every_impl
@pytest.mark.parametrize("max_blocks", [1, 2, 3, 1000])
def test_a_bounded_grid(impl: str, max_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that take several tiles each, of reduce and of digest; 1000 bound nothing."""
    from diloco_comm.kernels import launch as launches
    from diloco_comm.kernels import operators

    grids = []

    def launch(name: str, kernel: Any, num_programs: int, *args: Any, **meta: Any) -> None:
        grids.append(num_programs)
        launches.launch(name, kernel, num_programs, *args, **meta)

    monkeypatch.setattr(operators, "launch", launch)
    count = 4 * launches.PROGRAMS["reduce"][0] + 301
    for wire, num_ranks in (("int8", 3), ("int4", 9), ("fp8_e4m3", 2), ("fp16", 2)):
        form = WireFormat(wire, 64)
        received = reducing.received_runs(num_ranks, count, form, "bad", 5)
        weights = [1.0 / num_ranks] * num_ranks
        options = {"stochastic": wire == "int8", "rng_key": -5, "index_begin": 1024 << 40}
        options |= {"residual": values(count, "bad", 6), "max_blocks": max_blocks}
        reducing.check_reduce(received, weights, count, form, impl, **options)
    rng = torch.Generator().manual_seed(1)
    num_bytes = 4 * 8 * launches.PROGRAMS["digest"][0] + 13
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=rng)
    for shift in (0, 4, 1):
        given, expected = torch.tensor([[3, -7], [3, -7]])
        reducing.ops.digest(data[shift:], given, 5, impl=impl, max_blocks=max_blocks)
        reference.digest(data[shift:], expected, 5)
        assert_same(given, expected, f"{impl} from byte {shift}")
    assert grids == [min(5, max_blocks)] * 7


@pytest.mark.nightly(
    "up to 3 s each in the interpreter; they differ in the wire", but=["int4-triton", "bf16-triton"]
)
@every_impl
@every_wire
def test_reduce_and_decode_any_bytes(impl: str, wire: str) -> None:
    form, count = WireFormat(wire, 64), 3001
    layout = Layout.plan(count, 2, 1, form)
    rng = torch.Generator().manual_seed(1)
    run_bytes = form.run_bytes(3008)
    received = torch.randint(0, 256, (3 * run_bytes,), dtype=torch.uint8, generator=rng)
    reducing.check_reduce(received, [0.5, 0.25, 0.25], count, form, impl)
    args = (0, count, layout.run_elements, wire, 64)
    for num_terms in (1, 2, 10):
        shape = (num_terms, layout.payload_bytes)
        payloads = list(torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng))
        coefficients = [0.5 - i / 8 for i in range(num_terms)]
        outs = tensors_like(count, num_terms)
        expected = clone(outs)
        reference.decode(payloads, coefficients, expected, *args)
        reducing.ops.decode(payloads, coefficients, outs, *args, impl=impl)
        for out, true_out in zip(outs, expected, strict=True):
            assert_same(out, true_out, f"{impl} decoded {tuple(out.shape)} {out.dtype}")


@every_impl
@pytest.mark.parametrize("wire", [name for name in ELEMENT_WIRES if name != "fp32"])
def test_every_code(impl: str, wire: str) -> None:
    reducing.test_every_code_decodes_to_what_its_bits_say(impl, wire)


@every_impl
def test_decode_leaves_the_rest(impl: str) -> None:
    reducing.test_decode_into_a_half_of_the_fragment_leaves_the_rest(impl)


@pytest.mark.each_value("32 combinations in the interpreter")
@every_impl
@every_wire
@every_optimizer
def test_steps_of_every_wire(impl: str, wire: str, optimizer: str) -> None:
    place = ELEMENT_WIRES.index(wire) + stepping.OPTIMIZERS.index(optimizer)
    layout = Layout.plan(2001, 1 + place % 2, 1, WireFormat(wire, BLOCK_SIZES[place % 6]))
    alpha = (0.0, 0.3)[place % 2]
    stepping.compare(layout, optimizer, impl, place, 1 + place % 4, alpha=alpha)


@every_impl
@every_optimizer
def test_steps_of_every_size(impl: str, optimizer: str) -> None:
    for num_elements in SIZES[:-1]:
        layout = Layout.plan(num_elements, 2, 1, WireFormat("int8", 32))
        stepping.compare(layout, optimizer, impl, num_elements, 1)


@every_impl
def test_a_step_of_many_tiles(impl: str) -> None:
    layout = Layout.plan(LARGEST_SIZE, 2, 1, WireFormat("int4"))
    span = (layout.run_elements, LARGEST_SIZE)
    stepping.compare(layout, "nesterov", impl, 1, 2, alpha=0.5, clip=1.0, span=span)


@every_impl
@every_optimizer
def test_verdict_and_clip(impl: str, optimizer: str) -> None:
    stepping.test_a_set_verdict_means_no_step(impl, optimizer)
    if optimizer in ("heavy_ball", "nesterov"):
        layout = Layout.plan(600, 1, 1, WireFormat("int8", 64))
        for clip in (math.inf, 1.0, 1e-4):
            stepping.compare(layout, optimizer, impl, 3, 2, clip=clip, verdict=torch.tensor([0]))


@every_impl
@pytest.mark.parametrize(("first", "last"), arrivals.MODES)
def test_arrivals(impl: str, first: bool, last: bool) -> None:
    for seed, (size, wire) in enumerate([(7, "fp16"), (257, "int8"), (3001, "int4")]):
        layout = Layout.plan(size, 2, 1, WireFormat(wire, BLOCK_SIZES[seed]))
        numbers = {"behind": (0.27, 0.0)[seed % 2], "has_momentum": seed != 2}
        arrivals.compare(layout, seed, impl, first=first, last=last, num_terms=1 + seed, **numbers)


@every_impl
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
def test_merge(impl: str, alpha: float) -> None:
    for num_elements in (1, 257, 4096):
        outer = values(num_elements, "bad", num_elements)
        params = tensors_like(num_elements, num_elements)
        fill(params, values(num_elements, "normal", 1))
        expected = clone(params)
        reference.merge(outer, expected, alpha)
        reducing.ops.merge(outer, params, alpha, impl=impl)
        for param, true_param in zip(params, expected, strict=True):
            assert_same(param, true_param, f"merged {tuple(param.shape)} {param.dtype}")


@every_impl
@stepping.every_low_precision
@pytest.mark.parametrize("kind", ["normal", "subnormal", "edge", "bad"])
def test_low_precision(impl: str, dtypes: tuple, kind: str) -> None:
    """Merges, steps and norms of values that are few units from the outer values."""
    for alpha in (0.25, 0.9):
        stepping.check_low_precision_merge(impl, dtypes, alpha, kind, 1500)
    layout = Layout.plan(700, 1, 1, WireFormat("int8", 64))
    stepping.compare(layout, "nesterov", impl, 7, 1, alpha=0.9, dtypes=dtypes)
    outer, params = low_precision(40, dtypes, kind, 3)
    stepping.check_norms(outer, params, impl)


@pytest.mark.nightly(
    "up to 12 s each in the interpreter; they differ in the number of elements",
    but=["1-triton", "255-triton"],
)
@every_impl
@pytest.mark.parametrize("num_elements", [1, 255, 700, 1500])
def test_norms(impl: str, num_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128 elements: the definition's 65536 take the interpreter long.

    A tile has several batches of rows, and there are several batches of tiles.
    """
    from diloco_comm.kernels import launch as launches
    from diloco_comm.kernels import norms

    monkeypatch.setattr(reference, "NORM_TILE", 128)
    monkeypatch.setitem(launches.PROGRAMS, "norms", (128, 1))
    monkeypatch.setattr(norms, "ROWS", 4)
    monkeypatch.setattr(norms, "BATCH", 4)
    params = tensors_like(num_elements, num_elements)
    fill(params, values(num_elements, "normal", 1))
    stepping.check_norms(values(num_elements, "bad", 2), params, impl)
    stepping.check_norms(None, params, impl)
    for seed in range(5):
        # Of such different sizes that another order of the sum mostly rounds to another number.
        generator = torch.Generator().manual_seed(seed)
        uneven = torch.randn(num_elements, generator=generator).mul_(2).exp_()
        stepping.check_norms(None, [uneven], impl)


def test_the_tile_of_norms_is_the_reference_s() -> None:
    from diloco_comm.kernels import launch as launches
    from diloco_comm.kernels.norms import LANES, ROWS

    tile = reference.NORM_TILE
    assert (launches.PROGRAMS["norms"][0], LANES) == (tile, reference.NORM_LANES)
    assert tile % (ROWS * LANES) == 0


# More elements than 32 bits can count where there is a GPU to hold them.
@pytest.mark.nightly("6 s in the interpreter; the first tier has small fragments")
@pytest.mark.parametrize(
    ("device", "num_elements", "impl"),
    [
        pytest.param("cuda", (1 << 31) + 70_003, impl, marks=pytest.mark.gpu)
        for impl in ops.available_impls("cuda")
    ]
    if IS_COMPILED
    else [("cpu", 70_003, "triton")],
)
def test_the_last_run_of_a_large_fragment(device: str, num_elements: int, impl: str) -> None:
    """What is encoded and applied far behind the beginning is what would be at the beginning."""
    wire, run = WireFormat("int4", 64), 1 << 16
    begin = num_elements // run * run
    count = num_elements - begin
    form = (run, wire.name, wire.block_size)
    expected = torch.zeros(wire.run_bytes(run), dtype=torch.uint8)
    x, local = values(count, "normal", 1), values(count, "normal", 2).bfloat16()
    reference.encode(x, [local], expected, 0, count, *form)
    outer = torch.zeros(num_elements, device=device)
    params = torch.zeros(num_elements, dtype=torch.bfloat16, device=device)
    outer[begin:], params[begin:] = x.to(device), local.to(device)
    payload = torch.zeros((begin // run + 1) * wire.run_bytes(run), dtype=torch.uint8)
    payload = payload.to(device)
    parts = list(params.split(num_elements // 2 + 1))
    ops.encode(outer, parts, payload, begin, num_elements, *form, impl=impl)
    assert_same(payload[-wire.run_bytes(run) :].cpu(), expected, "the last run")
    assert not payload[: -wire.run_bytes(run)].any()
    span = ([1.0], begin, num_elements, *form, "sgd", 0.5)
    ops.outer_step(outer, None, parts, [payload], *span, impl=impl)
    new, new_local = x.clone(), [local.clone()]
    reference.outer_step(new, None, new_local, [expected], [1.0], 0, count, *form, "sgd", 0.5)
    assert_same(outer[begin:].cpu(), new, "outer")
    assert_same(params[begin:].cpu(), new_local[0], "params")
    assert not outer[:begin].any()


@every_impl
def test_worked_examples(impl: str) -> None:
    for name in examples.DILOCO:
        examples.test_diloco(impl, name)
    examples.test_eager(impl)
    examples.test_co2(impl)
    examples.test_e3m0_block(impl)
    examples.test_e3m0_ties(impl)


@pytest.mark.nightly("20 s in the interpreter; test_ops_bounds has the other implementations")
@interpreted
@pytest.mark.parametrize("wire", ["int8", "int4", "fp16"])
def test_misaligned_tensors_between_guards(wire: str) -> None:
    check_guards("triton", wire, 3)


@interpreted
@pytest.mark.parametrize(
    ("function", "changes", "error", "match"),
    [case for case in errors.CASES if "impl" not in case[1]],
)
def test_one_sentence_for_a_wrong_argument(function, changes, error, match) -> None:
    with pytest.raises(error, match=match) as raised:
        function(**{"impl": "triton", **changes})
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 250


@interpreted
def test_wrong_arguments_of_merge_and_norms() -> None:
    errors.test_merge_and_norms("triton")
    errors.test_nothing_is_written_when_an_argument_is_wrong("triton")
    for function in (errors.encode, errors.reduce, errors.outer_step, errors.decode):
        function(impl="triton")
