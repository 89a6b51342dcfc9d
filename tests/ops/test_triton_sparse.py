"""Triton's operators on the sparse wires: the reference's bytes, interpreted or on a GPU.

The bodies are those of test_rotated.py and test_sparse.py. The interpreter takes tens of
milliseconds for each block, so the cases are fewer, and chosen.
"""

from __future__ import annotations

import device_ops as ops
import pytest
import test_ops_bounds as bounds
import test_rotated as blocks
import test_sparse as sparse
import test_sparse_examples as examples
import torch
from codec_cases import KINDS, Fragment, assert_same, encode, fragment, values
from torch import Tensor
from triton_cases import every_impl, interpreted, no_overflow_warning, wraps

from diloco_comm.kernels.checks import BLOCK_WIRES, RunLayout
from diloco_comm.ops.wire import ROTATED_WIRES, SPARSE_WIRES, Layout, WireFormat

pytest.importorskip("triton", reason="needs Triton")

every_wire = pytest.mark.parametrize("wire", SPARSE_WIRES)

pytestmark = no_overflow_warning


@pytest.mark.nightly(
    "20 s each in the interpreter; the wires differ in one number", but=["topk64-triton"]
)
@pytest.mark.skipif(not wraps, reason="this interpreter adds int32 without wrapping")
@every_impl
@every_wire
def test_kinds_of_values(impl: str, wire: str) -> None:
    """With and without feedback, several runs, blocks that are cut short, and whole ones."""
    for seed, kind in enumerate(KINDS):
        num_elements = (1, 63, 4095, 4096, 4097, 4200)[(seed + SPARSE_WIRES.index(wire)) % 6]
        case = fragment(
            num_elements, WireFormat(wire), kind, seed, num_runs=1 + seed % 2, with_outer=seed != 3
        )
        options = {}
        if seed % 2:
            dtype = (torch.float32, torch.bfloat16)[seed // 2 % 2]
            options["residual"] = values(num_elements, "normal", seed + 50).to(dtype)
        blocks.check(case, impl, **options)


def ranked(wire: str) -> list[Tensor]:
    """Blocks that try the choice: one magnitude, few elements, ties at the border, the largest."""
    kept = WireFormat(wire).num_kept
    alternating = torch.where(torch.arange(4096) % 2 == 0, 1.0, -1.0)
    few = torch.zeros(4096)
    few[4095 - kept // 2 :] = -0.25
    some = torch.full((4096,), 0.5)
    some[5 : 5 + kept // 2] = 3.0
    some[4000] = -0.75
    tiny = torch.full((4096,), 2.0**-149)
    tiny[9] = -(2.0**-120)
    huge = torch.linspace(-(2.0**126), 2.0**126, 4096)
    return [
        alternating * 2.0**126, alternating * 2.0**-140, few, some, tiny, huge, few * 0.0,
    ]  # fmt: skip


@pytest.mark.nightly("3 s in the interpreter; they differ in the wire", but=["topk256-triton"])
@every_impl
@pytest.mark.parametrize("wire", ["topk64", "topk256"])
def test_choices(impl: str, wire: str) -> None:
    x = torch.cat(ranked(wire))
    blocks.check(Fragment(None, [x], Layout.plan(x.numel(), 1, 1, WireFormat(wire))), impl)


@every_impl
@pytest.mark.parametrize("wire", ["topk64"])
def test_bad_elements_of_some_blocks(impl: str, wire: str) -> None:
    x = values(3 * 4096, "normal", 1)
    x[5], x[7], x[4000] = torch.nan, -torch.inf, 1.01 * 2.0**126
    x[9000] = 2.0**126
    case = Fragment(None, [x], Layout.plan(x.numel(), 1, 1, WireFormat(wire)))
    _, count = encode(case, impl)
    assert count == 3
    blocks.check(case, impl, residual=torch.zeros_like(x))


@every_impl
@every_wire
def test_rounds_with_feedback(impl: str, wire: str) -> None:
    """The residual, updated where it is and multiplied by the decay between the rounds."""
    form = WireFormat(wire)
    residuals = [torch.zeros(4096) for _ in range(2)]
    for seed in range(3):
        case = fragment(4096, form, "normal", seed)
        results = []
        for name, residual in zip((impl, "reference"), residuals, strict=True):
            results.append(encode(case, name, residual=residual, new_residual=residual)[0])
            residual.mul_(form.feedback_decay)
        assert_same(*results, f"payload of round {seed}")
        assert_same(*residuals, f"residual of round {seed}")


@pytest.mark.nightly(
    "up to 4 s each in the interpreter; they differ in wire and number of terms",
    but=["topk32-2-triton"],
)
@every_impl
@pytest.mark.parametrize(
    ("wire", "num_payloads"), [*((wire, 2) for wire in SPARSE_WIRES), ("topk64", 9)]
)
def test_reduce(impl: str, wire: str, num_payloads: int) -> None:
    """Nine terms come from a table on the device, fewer are arguments."""
    blocks.test_reduce(impl, wire, num_payloads)


@pytest.mark.each_value("20 combinations in the interpreter")
@every_impl
@every_wire
@pytest.mark.parametrize("optimizer", blocks.OPTIMIZERS)
def test_outer_steps(impl: str, wire: str, optimizer: str) -> None:
    blocks.test_outer_steps(impl, wire, optimizer)


@pytest.mark.nightly(
    "6 s in the interpreter; test_sparse has the limits of the other implementations"
)
@every_impl
def test_limits(impl: str) -> None:
    """Of magnitudes, and of the indices that a decoder takes."""
    sparse.test_limits_of_magnitude(impl, "topk32")
    sparse.test_a_code_that_no_encoder_makes_decodes_to_nan(impl, "topk32")
    sparse.test_a_code_that_no_encoder_makes_decodes_to_nan(impl, "topk256")


def broken_blocks(wire: str) -> tuple[Layout, Tensor]:
    """A payload of 12 blocks: one whole, others with flipped bits, random bytes or wrong scales."""
    form = WireFormat(wire)
    kept, code_bytes = form.num_kept, form.code_unit[1]
    layout = Layout.plan(12 * 4096, 1, 1, form)
    rng = torch.Generator().manual_seed(kept)
    x = torch.randn(layout.num_elements, generator=rng)
    x[: 2 * 4096] *= torch.arange(2 * 4096) % 4096 < 1.1 * kept  # buckets are full
    payload, _ = encode(Fragment(None, [x], layout), "reference")
    scales = payload[: 2 * 12].view(12, 2)
    begin = form.code_offset(layout.run_elements)
    codes = payload[begin : begin + 12 * code_bytes].view(12, code_bytes)
    upper = code_bytes - 3 * kept // 8
    for row in range(1, 7):
        # Two bits of the upper part, or one of a plane: some codes are those of other indices.
        first, count = (8 * upper, 2 * kept) if row < 5 else (0, 8 * upper)
        for bit in torch.randint(first, first + count, (2 if row < 5 else 1,), generator=rng):
            codes[row, int(bit) // 8] ^= 1 << int(bit) % 8
    codes[7:9] = torch.randint(0, 256, (2, code_bytes), generator=rng, dtype=torch.uint8)
    codes[8, upper : upper + kept // 4] = 0x55
    for row, bits in ((9, 0x8000), (10, 0x7E81), (11, 0x0040)):
        scales[row] = torch.tensor([bits & 0xFF, bits >> 8])
    return layout, payload


@pytest.mark.nightly("8 s in the interpreter; they differ in the wire", but=["topk32-triton"])
@every_impl
@every_wire
def test_any_code(impl: str, wire: str) -> None:
    layout, payload = broken_blocks(wire)
    num_elements = layout.num_elements
    form = (layout.run_elements, wire, 4096)
    outs, counts = [torch.zeros(num_elements) for _ in range(2)], torch.zeros(2, 1).long()
    results = torch.zeros(2, layout.payload_bytes, dtype=torch.uint8)
    for name, out, count, result in zip((impl, "reference"), outs, counts, results, strict=True):
        ops.decode([payload], [1.0], [out], 0, num_elements, *form, impl=name)
        if wire == "topk64":
            ops.reduce(payload, result, [0.5], num_elements, *form, nonfinite=count, impl=name)
    assert_same(*outs, f"{impl} decoded {wire}")
    is_bad = outs[0].view(-1, 4096).isnan().all(1)
    assert is_bad[9:].all() and is_bad[1:9].any() and not is_bad[0]
    assert_same(*results, f"{impl} reduced {wire}")
    assert torch.equal(counts[0], counts[1])


@every_impl
def test_a_worked_example(impl: str) -> None:
    layout = Layout.plan(4096, 1, 1, WireFormat("topk64"))
    payload, _ = encode(Fragment(None, [examples.block()], layout), impl)
    assert payload[:2].numpy().tobytes().hex() == "463f"
    assert payload[16:88].numpy().tobytes().hex() == examples.TOPK64


@interpreted
def test_misaligned_tensors_between_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "sizes_of", lambda *_: [(257, 4096)])
    bounds.test_misaligned_tensors_between_guards("triton", "topk64", 3)


def test_sizes_are_those_of_the_wires() -> None:
    wires = [WireFormat(name) for name in ROTATED_WIRES + SPARSE_WIRES]
    assert {wire.name: wire.code_unit for wire in wires} == BLOCK_WIRES
    for wire in wires:
        layout = RunLayout(wire.name, wire.block_size, 3 * wire.block_size)
        assert layout.code_offset == wire.code_offset(layout.run_elements)
        assert layout.run_bytes == wire.run_bytes(layout.run_elements)
