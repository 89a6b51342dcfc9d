"""CUDA's kernels of the sparse wires: each way to find the kept elements, and sums of many terms.

On the CPU they are emulated (emulated.py), the warps of a block in turns forwards and backwards.
Where there is a GPU they run there. They are compared with the plain C++ of the CPU.
"""

from __future__ import annotations

import device_ops as ops
import pytest
import test_ops_reduce as reducing
import torch
from codec_cases import DTYPES, EMULATED, ON_A_GPU, assert_same, clone, fill, tensors_like, values
from torch import Tensor

from diloco_comm.ops.wire import SPARSE_WIRES, Layout, WireFormat

BLOCK = 4096
every_impl = pytest.mark.parametrize("impl", [EMULATED, *ON_A_GPU])
every_wire = pytest.mark.parametrize("wire", SPARSE_WIRES)


def form_of(layout: Layout) -> tuple[int, str, int]:
    return layout.run_elements, layout.wire.name, BLOCK


def encoded(impl: str, x: Tensor, wire: str, **options) -> tuple[Tensor, Tensor, Tensor]:
    """Return the payload, what was not sent, and the number of bad elements."""
    layout = Layout.plan(x.numel(), 1, 1, WireFormat(wire))
    payload = torch.full((layout.payload_bytes,), 0xA5, dtype=torch.uint8)
    rest, count = torch.full_like(x, 7.0), torch.zeros(1, dtype=torch.int64)
    options = {"residual": torch.zeros_like(x), **options}
    ops.encode(
        None, [x], payload, 0, x.numel(), *form_of(layout), new_residual=rest, nonfinite=count,
        impl=impl, **options,
    )  # fmt: skip
    return payload, rest, count


def check(impl: str, x: Tensor, wire: str, said: str) -> None:
    mine, truth = (encoded(name, x, wire) for name in (impl, "scalar"))
    for name, a, b in zip(("payload", "rest", "count"), mine, truth, strict=True):
        assert_same(a, b, f"{name} of {said}")


def signs(count: int, seed: int) -> Tensor:
    return torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1


def blocks_of(kept: int) -> dict[str, Tensor]:
    """Blocks of which each is chosen another way."""
    rng = torch.Generator().manual_seed(kept)
    normal = torch.randn(BLOCK, generator=rng)
    places = torch.randperm(BLOCK, generator=rng)
    rank = torch.arange(BLOCK)
    # Distinct values within a sixteenth of an octave: one bin holds all of them.
    close = 1.0 + places.float() * 2.0**-17
    # As many as are kept stand out, so that the list has no others.
    apart = torch.where(places < kept, 8.0 + places / BLOCK, normal.abs().clamp(max=1.0))
    alone = normal.clone()
    alone[1234] = 2.0**40
    # The last kept ones are equal, and more of them than places are left.
    equal = torch.where(places < kept // 2, 3.0, torch.where(places < 2 * kept, 2.0, 0.01))
    few = torch.zeros(BLOCK)
    few[places[: kept - 3]] = normal[: kept - 3]
    bad = normal.clone()
    bad[[0, 511, 512, 4095]] = torch.tensor([torch.nan, torch.inf, -3e38, 1.01 * 2.0**126])
    return {
        "normal": normal, "close": close, "apart": apart, "alone": alone, "equal": equal,
        "few": few, "bad": bad, "all the same": torch.ones(BLOCK), "zeros": -torch.zeros(BLOCK),
        "uniform": torch.rand(BLOCK, generator=rng), "ascending": rank / BLOCK,
        "powers": torch.ldexp(torch.ones(BLOCK), rank // 17 - 120),
        "sub-normal": normal * 2.0**-135, "near the smallest scale": normal * 2.0**-127,
        "largest": torch.full((BLOCK,), 2.0**126), "one": (rank == 4095).float(),
    }  # fmt: skip


@every_impl
@every_wire
def test_each_way_to_choose(impl: str, wire: str) -> None:
    for name, block in blocks_of(WireFormat(wire).num_kept).items():
        check(impl, block * signs(BLOCK, 5), wire, name)
        check(impl, block.flip(0) * signs(BLOCK, 6), wire, f"{name}, backwards")


@every_impl
@pytest.mark.parametrize("wire", ["topk32", "topk256"])
def test_one_value_at_two_magnitudes(impl: str, wire: str) -> None:
    """Fewer large elements than are kept, as many, more, and more than are listed."""
    kept = WireFormat(wire).num_kept
    for count in (1, kept - 1, kept, kept + 1, 511, 512, 513, BLOCK - 1):
        for large in (1.0 + 2.0**-23, 1.03, 5.0):
            x = torch.ones(BLOCK)
            x[torch.randperm(BLOCK, generator=torch.Generator().manual_seed(count))[:count]] = large
            check(impl, x * signs(BLOCK, count), wire, f"{count} of {large}")


@every_impl
@every_wire
@pytest.mark.parametrize("size", [1, 63, 4095, 4096, 4097, 20_481])
def test_sizes_and_runs(impl: str, wire: str, size: int) -> None:
    """Encode, decode and a step of mixed tensors in several runs, with a residual that decays."""
    layout = Layout.plan(size, 2 if size < 9000 else 3, 1, WireFormat(wire))
    form, results = form_of(layout), []
    params = tensors_like(size, size, DTYPES)
    fill(params, values(size, "normal", 1))
    for name in (impl, "scalar"):
        own, outer = clone(params), values(size, "normal", 2)
        residual = values(size, "normal", 3).bfloat16() if size % 2 else values(size, "wide", 3)
        sent, written = [], []
        for _ in range(2):
            payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
            residual.mul_(0.95)
            ops.encode(
                outer, own, payload, 0, size, *form, residual=residual, new_residual=residual,
                impl=name,
            )  # fmt: skip
            sent.append(payload)
            written += [payload, residual.clone()]
        terms = (sent, [0.25, 0.75], 0, size, *form)
        momentum, outs = values(size, "normal", 4), clone(params)
        ops.decode(*terms[:2], outs, *terms[2:], impl=name)
        ops.outer_step(
            outer, momentum, own, *terms, "heavy_ball", 0.7, mu=0.9, alpha=0.5, impl=name
        )
        results.append([*written, *outs, outer, momentum, *own])
    for a, b in zip(*results, strict=True):
        assert_same(a, b, f"{wire} of {size} elements")


def garbled(payload: Tensor, layout: Layout, block: int, seed: int) -> Tensor:
    """Change bits of one block's code and scale."""
    form = layout.wire
    begin = form.code_offset(layout.run_elements) + block * form.code_unit[1]
    rng = torch.Generator().manual_seed(seed)
    broken = payload.clone()
    for _ in range(1 + seed % 3):
        at = begin + int(torch.randint(0, form.code_unit[1], (), generator=rng))
        broken[at] ^= 1 << int(torch.randint(0, 8, (), generator=rng))
    if seed % 5 == 0:
        scale = torch.randint(0, 1 << 16, (), generator=rng)
        broken[2 * block], broken[2 * block + 1] = scale % 256, scale // 256
    return broken


@every_impl
@every_wire
@pytest.mark.parametrize("num_terms", [1, 3, 4, 5, 9, 40])
def test_sums_of_terms(impl: str, wire: str, num_terms: int) -> None:
    """Any weights, broken codes, and more terms than fit into a kernel's parameters."""
    size = 2 * BLOCK + 5
    layout = Layout.plan(size, 1, 1, WireFormat(wire))
    payloads = [encoded("scalar", values(size, "good", t), wire)[0] for t in range(num_terms)]
    weights = [0.3, -0.5, 0.0, 1.0, -0.0, 2.0**-140, 1e-3][:num_terms] * 6
    broken = [
        garbled(payload, layout, t % 3, t) if t % 4 == 2 else payload
        for t, payload in enumerate(payloads)
    ]
    for sent in (payloads, broken):
        outs: list[list[Tensor]] = []
        for name in (impl, "scalar"):
            outs.append([torch.zeros(5000), torch.zeros(size - 5000, dtype=torch.bfloat16)])
            ops.decode(sent, weights[:num_terms], outs[-1], 0, size, *form_of(layout), impl=name)
        for a, b in zip(*outs, strict=True):
            assert_same(a, b, f"{wire}, {num_terms} terms")


@every_impl
@every_wire
def test_codes_that_no_encoder_makes(impl: str, wire: str) -> None:
    """Single bits of a code are turned, and codes are random bits."""
    form = WireFormat(wire)
    layout = Layout.plan(BLOCK, 1, 1, form)
    payload = encoded("scalar", values(BLOCK, "normal", 1), wire)[0]
    begin, num_bytes = form.code_offset(BLOCK), form.code_unit[1]
    rng = torch.Generator().manual_seed(1)
    cases = [payload.clone() for _ in range(60)]
    for n, case in enumerate(cases):
        if n < 40:
            case[begin + (n * 7919) % num_bytes] ^= 1 << n % 8
        elif n < 50:
            case[begin : begin + num_bytes] = torch.randint(0, 256, (num_bytes,), generator=rng)
        else:
            case[begin : begin + num_bytes] = (0, 255)[n % 2]
            case[:2] = 0 if n > 55 else case[:2]
    num_nan = 0
    for case in cases:
        outs, counts = [], []
        for name in (impl, "scalar"):
            out, bad = torch.zeros(BLOCK), torch.zeros(1, dtype=torch.int64)
            ops.decode([case], [0.5], [out], 0, BLOCK, *form_of(layout), impl=name)
            result = torch.zeros_like(case)
            ops.reduce(case, result, [1.0], BLOCK, *form_of(layout), nonfinite=bad, impl=name)
            outs += [out, result]
            counts.append(int(bad))
        assert_same(outs[0], outs[2], f"decoded {wire}")
        assert_same(outs[1], outs[3], f"reduced {wire}")
        assert counts[0] == counts[1] == int(outs[0].isnan().sum())
        num_nan += counts[0] > 0
    assert 20 < num_nan < 60


@every_impl
def test_a_residual_over_rounds(impl: str) -> None:
    """Error feedback with decay: what is sent and what stays are the same in every round."""
    states = []
    for name in (impl, "scalar"):
        residual, sent = torch.zeros(9000), []
        for turn in range(8):
            x = values(9000, "normal", turn)
            payload, residual, _ = encoded(name, x, "topk64", residual=residual.mul(0.95))
            sent += [payload, residual]
        states.append(sent)
    for a, b in zip(*states, strict=True):
        assert_same(a, b, "a round")


@every_impl
@pytest.mark.parametrize("max_blocks", [1, 3, 1000])
def test_a_bounded_grid_of_reduce(impl: str, max_blocks: int) -> None:
    """A block of threads takes several of the seven blocks; the last block is cut short."""
    form, count = WireFormat("topk64"), 6 * BLOCK + 77
    received = reducing.received_runs(3, count, form, "bad", 5)
    options = {"residual": values(count, "bad", 6), "max_blocks": max_blocks}
    reducing.check_reduce(received, [0.5, 0.25, 0.25], count, form, impl, **options)


@every_impl
@pytest.mark.parametrize("verdict", [0, 1])
def test_a_set_verdict_means_no_step(impl: str, verdict: int) -> None:
    n = BLOCK + 5
    layout = Layout.plan(n, 1, 1, WireFormat("topk128"))
    payload, _, _ = encoded("scalar", values(2 * BLOCK, "normal", 3)[:n].clone(), "topk128")
    said = torch.tensor([verdict])
    results = []
    for name in (impl, "scalar"):
        states = [values(n, "normal", seed) for seed in (4, 5, 6)]
        states[2] = states[2].abs()
        before = [state.clone() for state in states]
        terms = ([payload], [1.0], 0, n, *form_of(layout))
        outer, first, second = states
        ops.outer_step(
            outer,
            first,
            [torch.zeros(n)],
            *terms,
            "nesterov",
            lr=0.7,
            mu=0.9,
            verdict=said,
            impl=name,
        )
        ops.outer_step_adam(
            outer, first, second, [torch.zeros(n)], *terms,
            lr=0.3, beta1=0.9, beta2=0.95, eps=0.1, step=1, verdict=said, impl=name,
        )  # fmt: skip
        ops.outer_step_delayed(
            outer, first, second, *terms, lr=0.7, mu=0.9, verdict=said, impl=name
        )
        assert all(map(torch.equal, states, before)) == bool(verdict)
        results += states
    for mine, truth in zip(results[:3], results[3:], strict=True):
        assert_same(mine, truth, "a state")
