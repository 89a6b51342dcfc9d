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

from diloco_comm.kernels.checks import BLOCK_WIRES, RunLayout
from diloco_comm.ops.wire import ROTATED_WIRES, SPARSE_WIRES, Layout, WireFormat

pytest.importorskip("triton", reason="needs Triton")

ON_A_GPU = torch.cuda.is_available()
IMPLS = [pytest.param("triton@cuda", marks=pytest.mark.gpu)] if ON_A_GPU else ["triton"]
every_impl = pytest.mark.parametrize("impl", IMPLS)
every_wire = pytest.mark.parametrize("wire", SPARSE_WIRES)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


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


@every_impl
@every_wire
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


@every_impl
@pytest.mark.parametrize(
    ("wire", "num_payloads"), [*((wire, 2) for wire in SPARSE_WIRES), ("topk64", 9)]
)
def test_reduce(impl: str, wire: str, num_payloads: int) -> None:
    """Nine terms come from a table on the device, fewer are arguments."""
    blocks.test_reduce(impl, wire, num_payloads)


@every_impl
@every_wire
@pytest.mark.parametrize("optimizer", blocks.OPTIMIZERS)
def test_outer_steps(impl: str, wire: str, optimizer: str) -> None:
    blocks.test_outer_steps(impl, wire, optimizer)


@every_impl
@every_wire
def test_codes_that_no_encoder_makes(impl: str, wire: str) -> None:
    sparse.test_a_code_that_no_encoder_makes_decodes_to_nan(impl, wire)


@every_impl
def test_limits(impl: str) -> None:
    """Of magnitudes, and of the scales that a decoder takes; and what an empty place keeps."""
    sparse.test_limits_of_magnitude(impl, "topk32")
    blocks.test_a_scale_that_no_encoder_makes_decodes_to_nan(impl, "topk128")
    sparse.test_the_largest_are_kept_and_of_equal_ones_the_first(impl, "topk256")


def broken_codes(wire: str) -> tuple[Layout, Tensor]:
    """A payload of blocks whose codes had some bits flipped, and of blocks of random bytes."""
    form = WireFormat(wire)
    kept, code_bytes = form.num_kept, form.code_unit[1]
    layout = Layout.plan(14 * 4096, 1, 1, form)
    rng = torch.Generator().manual_seed(kept)
    x = torch.randn(layout.num_elements, generator=rng)
    x[: 2 * 4096] *= torch.arange(2 * 4096) % 4096 < 1.1 * kept  # buckets are full
    payload, _ = encode(Fragment(None, [x], layout), "reference")
    begin = form.code_offset(layout.run_elements)
    codes = payload[begin : begin + 14 * code_bytes].view(14, code_bytes)
    upper = code_bytes - 3 * kept // 8
    for row in range(1, 8):
        # Two bits of the upper part, or one of a plane: some codes are those of other indices.
        for bit in torch.randint(0, 2 * kept, (2,), generator=rng).tolist():
            codes[row, upper + bit // 8] ^= 1 << bit % 8
    for row in range(8, 12):
        bit = int(torch.randint(0, 8 * upper, (1,), generator=rng))
        codes[row, bit // 8] ^= 1 << bit % 8
    random = torch.randint(0, 256, (2, code_bytes), generator=rng, dtype=torch.uint8)
    codes[12:] = random
    codes[13, upper : upper + kept // 4] = 0xAA
    return layout, payload


@every_impl
@every_wire
def test_any_code(impl: str, wire: str) -> None:
    layout, payload = broken_codes(wire)
    form = (0, layout.num_elements, layout.run_elements, wire, 4096)
    outs = [torch.zeros(layout.num_elements) for _ in range(2)]
    for name, out in zip((impl, "reference"), outs, strict=True):
        ops.decode([payload], [1.0], [out], *form, impl=name)
    assert_same(*outs, f"{impl} decoded {wire}")
    is_bad = outs[0].view(-1, 4096).isnan().all(1)
    assert is_bad[12:].any() and not is_bad[0]


@every_impl
def test_a_worked_example(impl: str) -> None:
    layout = Layout.plan(4096, 1, 1, WireFormat("topk64"))
    payload, _ = encode(Fragment(None, [examples.block()], layout), impl)
    assert payload[:2].numpy().tobytes().hex() == "463f"
    assert payload[16:88].numpy().tobytes().hex() == examples.TOPK64


@pytest.mark.skipif(ON_A_GPU, reason="Triton is compiled here, not interpreted")
def test_misaligned_tensors_between_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "sizes_of", lambda *_: [(257, 4096)])
    bounds.check_between_guards("triton", "topk64", 3)


def test_sizes_are_those_of_the_wires() -> None:
    wires = [WireFormat(name) for name in ROTATED_WIRES + SPARSE_WIRES]
    assert {wire.name: wire.code_unit for wire in wires} == BLOCK_WIRES
    for wire in wires:
        layout = RunLayout(wire.name, wire.block_size, 3 * wire.block_size)
        assert layout.code_offset == wire.code_offset(layout.run_elements)
        assert layout.run_bytes == wire.run_bytes(layout.run_elements)
