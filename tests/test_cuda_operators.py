"""CUDA's operators: the reference's bytes, emulated on the CPU and, where there is one, on a GPU.

The bodies are those of test_ops_*.py. What the emulation cannot show is listed in docs/gpu.md.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import test_async_operator as arrivals
import test_ops_bounds as bounds
import test_ops_encode as encoding
import test_ops_errors as errors
import test_ops_outer_step as stepping
import test_ops_reduce as reducing
import torch
from codec_cases import (
    KINDS,
    SIZES,
    Fragment,
    assert_same,
    clone,
    fill,
    flat,
    fragment,
    tensors_like,
    values,
)
from emulated import needs_library, operator, route

from diloco_comm import ops, reference
from diloco_comm.wire import BLOCK_SIZES, WIRES, Layout, WireFormat

HAS_CUDA_KERNELS = torch.cuda.is_available() and "cuda" in ops.available_impls("cuda")
EMULATED = pytest.param("emulated", marks=needs_library, id="emulated")
ON_A_GPU = [pytest.param("cuda@cuda", marks=pytest.mark.gpu, id="cuda")]
IMPLS = [EMULATED, *(ON_A_GPU if HAS_CUDA_KERNELS else [])]
every_impl = pytest.mark.parametrize("impl", IMPLS)
every_wire = pytest.mark.parametrize("wire", WIRES)
every_optimizer = pytest.mark.parametrize("optimizer", stepping.OPTIMIZERS)
rounding = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])

SMALL_SIZES = list(zip(SIZES[:-1], BLOCK_SIZES, strict=True))
MANY = 400  # tensors, more than a kernel's parameters hold


@pytest.fixture(autouse=True, scope="module")
def _emulation() -> Iterator[None]:
    yield from route(ops)


@every_impl
@every_wire
@rounding
def test_encode_sizes_and_blocks(impl: str, wire: str, stochastic: bool) -> None:
    for num_elements, block_size in SMALL_SIZES:
        for num_runs in (1, 3):
            form = WireFormat(wire, block_size)
            case = fragment(num_elements, form, "good", block_size, num_runs=num_runs)
            encoding.check(case, impl, stochastic=stochastic, rng_key=-12345)


@every_impl
@every_wire
@pytest.mark.parametrize("kind", KINDS)
@rounding
def test_encode_kinds_of_values(impl: str, wire: str, kind: str, stochastic: bool) -> None:
    """Every block size, with error feedback in fp32 and bf16."""
    for seed, block_size in enumerate(BLOCK_SIZES):
        with_outer = seed % 3 > 0
        case = fragment(
            2100 + seed, WireFormat(wire, block_size), kind, seed, with_outer=with_outer
        )
        residual = values(2100 + seed, "normal", seed + 50)
        options = {"stochastic": stochastic, "rng_key": seed << 60}
        encoding.check(
            case, impl, residual=residual.to((torch.float32, torch.bfloat16)[seed % 2]), **options
        )


@every_impl
@pytest.mark.parametrize(("wire", "stochastic"), [("int8", False), ("int4", True), ("fp16", True)])
def test_encode_many_tiles(impl: str, wire: str, stochastic: bool) -> None:
    case = fragment(SIZES[-1], WireFormat(wire), "good", 1, num_runs=2)
    encoding.check(case, impl, stochastic=stochastic, rng_key=7)


@every_impl
@every_wire
def test_any_fragment(impl: str, wire: str) -> None:
    encoding.test_any_fragment(impl, wire)


@every_impl
@every_wire
def test_encode_in_ranges_and_in_place(impl: str, wire: str) -> None:
    encoding.test_ranges_add_up_to_the_whole(impl, wire, True)
    encoding.test_residual_may_be_updated_in_place(impl, wire)


@every_impl
@every_wire
def test_bad_elements(impl: str, wire: str) -> None:
    encoding.test_bad_elements_are_counted_and_sent_as_zeros(impl, wire)
    if wire in ("fp16", "bf16", "fp32"):
        encoding.test_fp16_overflow_is_a_bad_element(impl, wire, int(wire == "fp16"))


@pytest.mark.parametrize("impl", [EMULATED])
@every_wire
def test_flush_to_zero_changes_nothing(impl: str, wire: str) -> None:
    encoding.test_flush_to_zero_changes_nothing(impl, wire, True)


@every_impl
@every_wire
def test_any_run_is_reduced_and_decoded(impl: str, wire: str) -> None:
    reducing.test_any_run(impl, wire)
    reducing.test_decode_any_payload(impl, wire)


@every_impl
@every_wire
def test_reduce_of_many_ranks(impl: str, wire: str) -> None:
    """The weights of 40 ranks do not fit into a kernel's parameters."""
    form = WireFormat(wire, 128)
    for num_ranks in (3, 40):
        weights = reference.normalised([1.0 + rank for rank in range(num_ranks)])
        received = reducing.received_runs(num_ranks, 1100, form, "good", num_ranks)
        reducing.check_reduce(received, weights, 1100, form, impl)


@every_impl
@pytest.mark.parametrize("wire", [name for name in WIRES if name != "fp32"])
def test_every_code(impl: str, wire: str) -> None:
    reducing.test_every_code_decodes_to_what_its_bits_say(impl, wire)


@every_impl
def test_decode_leaves_the_rest(impl: str) -> None:
    reducing.test_decode_into_a_half_of_the_fragment_leaves_the_rest(impl)


@every_impl
@every_wire
@every_optimizer
def test_steps_of_every_wire(impl: str, wire: str, optimizer: str) -> None:
    stepping.test_wires_and_terms(impl, wire, optimizer)


@every_impl
@every_optimizer
def test_steps_of_every_size(impl: str, optimizer: str) -> None:
    for num_elements in SIZES[:-1]:
        stepping.test_sizes(impl, optimizer, num_elements)


@every_impl
@every_optimizer
def test_any_step(impl: str, optimizer: str) -> None:
    """Ranges, terms, alpha, clip, and a verdict that forbids the step."""
    stepping.test_any_step(impl, optimizer)


@every_impl
@pytest.mark.parametrize(("first", "last"), arrivals.MODES)
def test_arrivals_of_every_size(impl: str, first: bool, last: bool) -> None:
    for num_elements in SIZES:
        arrivals.test_sizes(impl, first, last, num_elements)


@every_impl
@every_wire
def test_arrivals_of_every_wire(impl: str, wire: str) -> None:
    arrivals.test_wires_blocks_terms_and_numbers(impl, wire)


@every_impl
def test_an_arrival_that_is_refused(impl: str) -> None:
    arrivals.test_a_set_verdict_means_no_step(impl)


@every_impl
def test_merge_and_norms(impl: str) -> None:
    stepping.test_merge(impl)
    stepping.test_norms(impl)
    stepping.test_norms_of_many_tiles_and_threads(impl)


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


@pytest.mark.parametrize("impl", [EMULATED])
@every_wire
@pytest.mark.parametrize("shift", [1, 3, 8])
def test_guards(impl: str, wire: str, shift: int) -> None:
    bounds.test_misaligned_tensors_between_guards(impl, wire, shift)


@pytest.mark.parametrize("impl", [EMULATED])
@every_wire
def test_padding_is_never_written(impl: str, wire: str) -> None:
    bounds.test_padding_is_never_written(impl, wire)


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_is_read_behind_the_end() -> None:
    """In a process of its own: a read too far ends it with SIGSEGV."""
    program = (
        "import emulated, test_ops_bounds as bounds\n"
        "routing = emulated.route(bounds.ops)\n"
        "next(routing)\n"
        "for wire in bounds.WIRES:\n"
        "    for size, block in ((1, 32), (257, 32), (1000, 256), (4097, 1024)):\n"
        "        print(wire, size, block, flush=True)\n"
        "        bounds.sync(bounds.at_the_end_of_memory, wire, size, block, 'emulated')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, f"after {done.stdout.splitlines()[-1:]}: {done.stderr}"


@needs_library
@pytest.mark.parametrize(
    ("function", "changes", "error", "match"),
    [case for case in errors.CASES if "impl" not in case[1]],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_one_sentence(
    function: Callable, changes: dict, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match) as raised:
        function(**({"impl": "emulated"} | changes))
    sentence = str(raised.value).split("\nException raised from")[0]
    assert "\n" not in sentence.strip() and len(sentence) < 250, sentence


@needs_library
def test_an_implementation_of_another_device_is_refused() -> None:
    outs = [torch.zeros(4)]
    with pytest.raises(ValueError, match=r"impl 'avx2' does not run on tensors of cpu"):
        operator("merge")(torch.zeros(4), outs, 0.0, impl="avx2")


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
