"""digest and finish_digest: the definition's sums in every implementation, whatever the order."""

from __future__ import annotations

import importlib.util
import random
from itertools import pairwise

import device_ops
import devices
import pytest
import torch
from codec_cases import IMPLS, RUNNING_IMPLS, SIZES
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco_comm import _C, ops
from diloco_comm.ops import reference as reference_digest
from diloco_comm.ops.digests import chained, digest_of, each_digest

MASK = (1 << 64) - 1
HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON = pytest.param(
    "triton@cuda" if torch.cuda.is_available() else "triton",
    marks=[
        pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
        *([pytest.mark.gpu] if torch.cuda.is_available() else []),
    ],
    id="triton",
)
every_impl = pytest.mark.parametrize("impl", ["reference", *IMPLS, TRITON])
every_host_impl = pytest.mark.parametrize("impl", [*IMPLS, TRITON])

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def plain_sums(data: bytes, first_word: int = 0) -> tuple[int, int]:
    """The definition of docs/developers/wire-formats.md in plain integers."""
    product = total = 0
    for i in range(-(-len(data) // 8)):
        word = int.from_bytes(data[8 * i : 8 * i + 8], "little")
        u = word ^ ((first_word + i + 1) * 0x9E3779B97F4A7C15 & MASK)
        v = (u ^ u >> 29) * 0xBF58476D1CE4E5B9 & MASK
        low, high = v & 0xFFFFFFFF, v >> 32
        product += (low ^ high) * high
        total += word
    return product & MASK, total & MASK


def plain_mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def plain_digest(data: bytes) -> int:
    product, total = plain_sums(data)
    return plain_mix(product ^ plain_mix(total ^ plain_mix(len(data))))


def random_bytes(count: int, seed: int = 1) -> Tensor:
    return torch.tensor(list(random.Random(seed).randbytes(count)), dtype=torch.uint8)


def sums_of(tensor: Tensor, impl: str, first_word: int = 0) -> tuple[int, int]:
    """Both sums, added to numbers that are there before and are taken away again."""
    before = torch.tensor([-5, 2**63 - 1])
    sums = before.clone()
    device_ops.digest(tensor, sums, first_word, impl=impl)
    product, total = (sums - before).tolist()
    return product & MASK, total & MASK


def digest(tensor: Tensor) -> int:
    return each_digest([tensor])[0]


def memory_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).contiguous()
    return bytes(flat.view(torch.uint8).tolist())


# ----------------------------------------------------------------------------- the definition

GOLDEN = {
    b"": 0,
    b"\x00": 0x9DC2E56395041183,
    b"\x01": 0x3306A4BC8612214D,
    b"12345678": 0xCD6E16AD9854BEAB,
    bytes(range(20)): 0x85392BBCA358BD83,
}


def test_golden_values() -> None:
    for data, expected in GOLDEN.items():
        assert plain_digest(data) == expected
        assert digest(torch.tensor(list(data), dtype=torch.uint8)) == expected


def test_the_worked_example() -> None:
    """The numbers of docs/developers/wire-formats.md."""
    tensor = torch.tensor([1.0, -2.0, 0.5])
    assert plain_sums(memory_bytes(tensor)) == (0xEACD318A94B8B1BD, 0xC00000007E800000)
    assert digest(tensor) == 0x9BF70A1A5441188B
    assert digest_of([tensor, tensor]) == 0xAFEC1981513584F5


@pytest.mark.each_value("72 combinations")
@every_impl
@pytest.mark.parametrize("count", [0, 8, 9, *SIZES, 32768, 32771])
def test_bytes_of_every_size(impl: str, count: int) -> None:
    data = random_bytes(count)
    for first_word in (0, 1, (1 << 40) + 3):
        assert sums_of(data, impl, first_word) == plain_sums(memory_bytes(data), first_word)


@pytest.mark.each_value("48 combinations")
@every_impl
@pytest.mark.parametrize("shift", range(1, 9))
def test_any_address(impl: str, shift: int) -> None:
    """The word in front and the word behind are not the tensor's."""
    for count in (1, 8, 255, 4999, 40_003):
        sea = random_bytes(count + 24, shift)
        view = sea[shift : shift + count]
        assert sums_of(view, impl) == plain_sums(memory_bytes(view))


DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.each_value("60 combinations")
@every_impl
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(impl: str, dtype: torch.dtype) -> None:
    source = torch.arange(720) % 2 if dtype == torch.bool else torch.arange(720) % 100
    for shape in ((720,), (5, 144), (2, 3, 10, 12), (3, 5, 48)):
        tensor = source.to(dtype).view(shape)
        dense = [tensor, tensor.transpose(0, -1)]
        if len(shape) == 4:
            dense.append(tensor.contiguous(memory_format=torch.channels_last))
        for each in dense:
            assert sums_of(each, impl) == plain_sums(memory_bytes(each))
    assert sums_of(torch.zeros((), dtype=dtype), impl)[1] == 0
    assert sums_of(torch.zeros(0, 3, dtype=dtype), impl) == (0, 0)


def test_memory_order_is_what_counts() -> None:
    tensor = torch.arange(24.0).view(2, 3, 2, 2)
    moved = tensor.contiguous(memory_format=torch.channels_last)
    assert torch.equal(tensor, moved) and digest(tensor) != digest(moved)
    assert digest(tensor) == digest(tensor.flatten()) == digest(tensor.permute(3, 1, 0, 2))


@every_impl
def test_a_parameter_is_accepted(impl: str) -> None:
    parameter = torch.nn.Parameter(torch.arange(5.0))
    assert sums_of(parameter, impl) == plain_sums(memory_bytes(parameter))
    with torch.inference_mode():
        assert sums_of(torch.arange(5.0), impl) == sums_of(parameter.detach(), impl)


@pytest.mark.nightly(
    "6 s in the interpreter; the others do not differ",
    but=["emulated", "scalar", "reference", "avx2", "avx512"],
)
@every_impl
@given(data=st.data())
def test_parts_in_any_order_are_the_whole(impl: str, data: st.DataObject) -> None:
    whole = random_bytes(data.draw(st.integers(0, 3000)), data.draw(st.integers(0, 9)))
    num_words = -(-whole.numel() // 8)
    cuts = data.draw(st.lists(st.integers(0, num_words), max_size=5))
    ends = [0, *sorted(cuts), num_words]
    parts = list(pairwise(ends))
    sums, first = torch.zeros(2, dtype=torch.int64), data.draw(st.integers(0, 1 << 40))
    for begin, end in data.draw(st.permutations(parts)):
        device_ops.digest(whole[8 * begin : 8 * end], sums, first + begin, impl=impl)
    assert tuple(number & MASK for number in sums.tolist()) == sums_of(whole, impl, first)


@pytest.mark.parametrize("impl", RUNNING_IMPLS)
def test_any_number_of_threads(impl: str) -> None:
    """More than one thread's share, and an end that no thread's share begins at."""
    tensor = torch.arange((5 << 20) + 3).to(torch.uint8)
    expected = torch.zeros(2, dtype=torch.int64)
    ops.digest(tensor, expected, 7, impl="reference")
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            sums = torch.zeros(2, dtype=torch.int64)
            ops.digest(tensor, sums, 7, impl=impl)
            assert torch.equal(sums, expected), f"{count} threads"
    finally:
        torch.set_num_threads(threads)


@given(st.integers(0, MASK), st.integers(0, MASK), st.integers(0, MASK))
def test_finishing(product: int, total: int, num_bytes: int) -> None:
    expected = plain_mix(product ^ plain_mix(total ^ plain_mix(num_bytes)))
    for p, t in ((product, total), (product - (1 << 64), total - (1 << 64))):
        assert ops.finish_digest(p, t, num_bytes) == expected
        assert reference_digest.finish_digest(p, t, num_bytes) == expected
    assert _C.mix64(product) == _C.mix64(product - (1 << 64)) == plain_mix(product)


# ------------------------------------------------------------------------------------- several


def test_the_digest_of_several_tensors() -> None:
    tensors = [torch.arange(5.0), torch.zeros(0), torch.arange(3).bfloat16()]
    h = 3
    for tensor in tensors:
        h = plain_mix(h ^ plain_digest(memory_bytes(tensor)))
    assert digest_of(tensors) == h == chained(each_digest(tensors), 3)
    assert digest_of([]) == 0
    others = [tensors[::-1], tensors[:2], [torch.cat([t.float() for t in tensors])], [], tensors]
    assert len({digest_of(each) for each in others}) == len(others)


def test_equal_bytes_have_equal_digests_whatever_the_implementation() -> None:
    tensors = [torch.randn(1000), torch.randn(7, 3).t()]
    assert len({digest_of(tensors, impl=impl) for impl in ops.available_impls()}) == 1


def on_device(rank: int, world: int, device: str, library: str) -> tuple[bool, list[str] | None]:
    """Whether host and device agree, and what of the device the host waited for."""
    here = devices.use(device, library)
    tensors = [torch.randn(100_003), torch.randn(70, 30).t().bfloat16(), torch.zeros(0)]
    copies = [tensor.to(here) for tensor in tensors]
    expected = digest_of(tensors)
    if device == "lagging":
        torch.ops.lagging.host_waits()
    given = digest_of(copies)
    # A GPU tells of no waits.
    waits = torch.ops.lagging.host_waits() if device == "lagging" else None
    return given == expected == digest_of([copies[0], *tensors[1:]]), waits


@pytest.mark.parametrize("device", devices.DEVICES)
def test_device_and_host_have_equal_digests(device: str, replicas, stand_in: str) -> None:
    """The host waits once, for the sums of all tensors."""
    ((is_equal, waits),) = replicas(1).run(on_device, device, stand_in)
    assert is_equal
    assert waits is None or (len(waits) == 1 and waits[0].startswith("synchronizeEvent"))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ops.available_impls("cuda"))
def test_a_capture(impl: str) -> None:
    data, sums = torch.randn(100_003, device="cuda"), torch.zeros(2, dtype=torch.int64).cuda()
    ops.digest(data, sums, impl=impl)
    once = sums.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.digest(data, sums, impl=impl)
    for times in (2, 3):
        graph.replay()
        assert torch.equal(sums, times * once)
