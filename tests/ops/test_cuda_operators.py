"""What CUDA's operators have of their own: lists of tensors and terms, alignment, dispatch, graphs.

On the CPU they are emulated (emulated.py); where there is a GPU they run there. That their bytes
are those of the reference is shown by test_ops_*.py, as for every other implementation. What the
emulation cannot show is listed in docs/how-to/gpu.md.
"""

from __future__ import annotations

import device_ops
import pytest
import test_ops_encode as encoding
import test_ops_reduce as reducing
import torch
from codec_cases import (
    EMULATED,
    HAS_CUDA_KERNELS,
    ON_A_GPU,
    Fragment,
    assert_same,
    clone,
    fill,
    flat,
    fragment,
    tensors_like,
    values,
)
from emulated import needs_library, operator

from diloco_comm import ops
from diloco_comm.ops import reference
from diloco_comm.ops.wire import ELEMENT_WIRES, Layout, WireFormat

every_impl = pytest.mark.parametrize("impl", [EMULATED, *ON_A_GPU])
MANY = 400  # tensors, more than a kernel's parameters hold


@every_impl
@pytest.mark.parametrize("wire", ELEMENT_WIRES)
def test_reduce_of_many_ranks(impl: str, wire: str) -> None:
    """The weights of 40 ranks do not fit into a kernel's parameters."""
    form = WireFormat(wire, 128)
    for num_ranks in (3, 40):
        weights = reference.normalised([1.0 + rank for rank in range(num_ranks)])
        received = reducing.received_runs(num_ranks, 1100, form, "good", num_ranks)
        reducing.check_reduce(received, weights, 1100, form, impl)


@every_impl
@pytest.mark.parametrize("wire", ELEMENT_WIRES)
@pytest.mark.parametrize("max_blocks", [1, 2, 3, 1000])
def test_a_bounded_grid_of_reduce(impl: str, wire: str, max_blocks: int) -> None:
    """Each warp, four a block, takes several tiles; the last tile is cut short."""
    form, count = WireFormat(wire, 256), 40 * 1024 + 301
    received = reducing.received_runs(3, count, form, "bad", 5)
    options = {
        "stochastic": max_blocks == 2,
        "rng_key": -5,
        "residual": values(count, "bad", 6),
        "max_blocks": max_blocks,
    }
    reducing.check_reduce(received, [0.5, 0.25, 0.25], count, form, impl, **options)


@every_impl
@pytest.mark.parametrize("wire", [*ELEMENT_WIRES, "int1r", "sub2", "topk64"])
@pytest.mark.parametrize("max_blocks", [1, 3, 1000])
def test_a_bounded_grid_of_encode_and_decode(impl: str, wire: str, max_blocks: int) -> None:
    """As owners of a mean on two wires use them: one run, fp32 values."""
    form = WireFormat(wire)
    layout = Layout.plan(40 * 1024 + 301, 1, 1, form)
    count, where = layout.num_elements, (layout.run_elements, wire, form.block_size)
    x, both = values(count, "bad", 6), []
    for name, bound in ((impl, max_blocks), ("reference", 0)):
        payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
        bad, out = torch.zeros(1, dtype=torch.int64), torch.zeros(count)
        options = {"max_blocks": bound, "impl": name}
        device_ops.encode(None, [x], payload, 0, count, *where, nonfinite=bad, **options)
        device_ops.decode([payload] * 3, [0.5, 0.25, 2.0], [out], 0, count, *where, **options)
        both.append((payload, bad, out))
    for given, expected in zip(*both, strict=True):
        assert_same(given, expected, f"{impl} of {layout}")


@every_impl
@pytest.mark.parametrize("max_blocks", [1, 2, 3, 1000])
def test_a_bounded_grid_of_digest(impl: str, max_blocks: int) -> None:
    """A warp takes 256 words at a time; 0, the default, is no bound."""
    rng = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (40 * 2048 + 13,), dtype=torch.uint8, generator=rng)
    for shift in (0, 4, 1):
        given, expected = torch.tensor([[3, -7], [3, -7]])
        device_ops.digest(data[shift:], given, 5, impl=impl, max_blocks=max_blocks)
        reference.digest(data[shift:], expected, 5)
        assert_same(given, expected, f"{impl} from byte {shift}")


@every_impl
def test_a_bound_below_zero_is_refused(impl: str) -> None:
    run = torch.zeros(WireFormat("int8", 256).run_bytes(1024), dtype=torch.uint8)
    said = r"max_blocks must not be negative, got -1"
    with pytest.raises(ValueError, match=said):
        device_ops.reduce(
            run, run.clone(), [1.0], 1024, 1024, "int8", 256, max_blocks=-1, impl=impl
        )
    form = (1024, "int8", 256)
    with pytest.raises(ValueError, match=said):
        device_ops.encode(None, [torch.zeros(9)], run, 0, 9, *form, max_blocks=-1, impl=impl)
    with pytest.raises(ValueError, match=said):
        device_ops.decode([run], [1.0], [torch.zeros(9)], 0, 9, *form, max_blocks=-1, impl=impl)
    with pytest.raises(ValueError, match=said):
        device_ops.digest(run, torch.zeros(2, dtype=torch.int64), max_blocks=-1, impl=impl)


@every_impl
@pytest.mark.parametrize("num_tensors", [300, MANY, 3000])
def test_any_number_of_tensors(impl: str, num_tensors: int) -> None:
    """As many as the parameters of a kernel hold, more, and more than elements in a tile."""
    rng = torch.Generator().manual_seed(num_tensors)
    sizes = torch.randint(0, 12, (num_tensors,), generator=rng).tolist()
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    params = [torch.zeros(size, dtype=kinds[i % 3]) for i, size in enumerate(sizes)]
    num_elements = sum(sizes)
    fill(params, values(num_elements, "normal", 1))
    layout = Layout.plan(num_elements, 3, 1, WireFormat("int4", 64))
    case = Fragment(flat(params) + values(num_elements, "normal", 2), params, layout)
    encoding.check(case, impl)
    payload = reducing.whole_payload(layout, "normal", 3)
    args = ([payload], [1.0], 0, num_elements, *case.form, "nesterov", 0.7)
    both = []
    for name in (impl, "reference"):
        outer, momentum, written = case.outer.clone(), torch.zeros(num_elements), clone(params)
        encoding.ops.outer_step(outer, momentum, written, *args, mu=0.9, alpha=0.25, impl=name)
        norms = torch.zeros(2, dtype=torch.float64)
        encoding.ops.norms(outer, written, norms, impl=name)
        both.append([outer, momentum, *written, norms])
    for tensor, truth in zip(*both, strict=True):
        assert_same(tensor, truth, f"{impl} with {num_tensors} tensors")


@every_impl
@pytest.mark.parametrize("wire", ["int8", "int4", "fp8_e4m3", "bf16", "fp32"])
def test_aligned_and_misaligned_tensors(impl: str, wire: str) -> None:
    """Whole tiles of tensors that begin at each place modulo four, in every dtype."""
    for lead in range(1, 5):
        sizes = [lead, 4100, 8, 5000]
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float32)
        params = [torch.zeros(n, dtype=t) for n, t in zip(sizes, dtypes, strict=True)]
        num_elements = sum(sizes)
        fill(params, values(num_elements, "normal", lead))
        layout = Layout.plan(num_elements, 1, 1, WireFormat(wire, 256))
        x = flat(params) + values(num_elements, "good", lead + 9)
        encoding.check(Fragment(x, params, layout), impl)
        outs = tensors_like(num_elements, lead)
        payload = reducing.whole_payload(layout, "normal", lead)
        args = ([payload], [0.5], 0, num_elements, layout.run_elements, wire, 256)
        encoding.ops.decode(*args[:2], outs, *args[2:], impl=impl)
        expected = clone(outs)
        reference.decode(*args[:2], expected, *args[2:])
        for out, truth in zip(outs, expected, strict=True):
            assert_same(out, truth, f"{impl} decoded {tuple(out.shape)} {out.dtype}")


@needs_library
def test_an_implementation_of_another_device_is_refused() -> None:
    outs = [torch.zeros(4)]
    with pytest.raises(ValueError, match=r"impl 'avx2' does not run on tensors of cpu"):
        operator("merge")(torch.zeros(4), outs, 0.0, impl="avx2")


@needs_library
def test_no_name_is_the_implementation_that_the_dispatcher_finds() -> None:
    """As for a call of ``torch.ops`` itself; "cuda" is named "emulated" here."""
    outer, written = values(300, "normal", 1), [torch.zeros(300) for _ in range(2)]
    for impl, out in zip(("", "emulated"), written, strict=True):
        operator("merge")(outer, [out], 0.0, impl=impl)
        assert_same(out, outer, f"merged by {impl!r}")
    with pytest.raises(ValueError, match=r"impl 'cuda' does not run on tensors of cpu"):
        operator("merge")(outer, written, 0.0, impl="cuda")


@needs_library
def test_triton_can_be_asked_for() -> None:
    """The engine calls by dispatch alone: where CUDA's operators are, they pass the call on."""
    pytest.importorskip("triton", reason="needs Triton")
    outer, params = values(300, "normal", 1), [values(300, "normal", 2).bfloat16()]
    expected = clone(params)
    reference.merge(outer, expected, 0.25)
    operator("merge")(outer, params, 0.25, impl="triton")
    assert_same(params[0], expected[0], "merged by Triton")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA_KERNELS, reason="needs a GPU and a build with CUDA")
def test_operators_can_be_captured() -> None:
    """One encode and one step in a CUDA graph, replayed on other values."""
    case = fragment(100_003, WireFormat("int8"), "normal", 1)
    device = {"outer": case.outer.cuda(), "params": [param.cuda() for param in case.params]}
    payload, momentum = case.payload().cuda(), torch.zeros(100_003, device="cuda")

    def sync() -> None:
        ops.encode(*device.values(), payload, 0, 100_003, *case.form, impl="cuda")
        args = ([payload], [1.0], 0, 100_003, *case.form, "nesterov", 0.7)
        ops.outer_step(device["outer"], momentum, device["params"], *args, mu=0.9, impl="cuda")

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        sync()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sync()
    device["outer"].copy_(case.outer)
    momentum.zero_()
    for tensor, source in zip(device["params"], case.params, strict=True):
        tensor.copy_(source)
    graph.replay()
    outer, params, expected = case.outer.clone(), clone(case.params), case.payload()
    reference.encode(outer, params, expected, 0, 100_003, *case.form)
    args = ([expected], [1.0], 0, 100_003, *case.form, "nesterov", 0.7)
    reference.outer_step(outer, torch.zeros(100_003), params, *args, mu=0.9)
    assert_same(payload.cpu(), expected, "payload of the replay")
    assert_same(device["outer"].cpu(), outer, "outer parameters of the replay")
