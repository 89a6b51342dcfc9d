"""Inputs for the operator tests: fragments of odd tensors, and values that are hard to encode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import device_ops
import emulated
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from diloco_comm import ops
from diloco_comm.ops.wire import BLOCK_SIZES, ELEMENT_WIRES, Layout, WireFormat

# Every implementation by name: one that this processor cannot run is skipped in sight.
CPU_IMPLS = [
    pytest.param(
        impl,
        marks=pytest.mark.skipif(
            impl not in ops.available_impls(), reason=f"this processor has no {impl}"
        ),
        id=impl,
    )
    for impl in ops.IMPLEMENTATIONS["cpu"]
    if impl != "reference"
]
# CUDA's, emulated; and those of device_ops.py, "name@device".
EMULATED = pytest.param("emulated", marks=emulated.needs_library, id="emulated")
HAS_CUDA_KERNELS = torch.cuda.is_available() and "cuda" in ops.available_impls("cuda")
ON_A_GPU = [pytest.param("cuda@cuda", marks=pytest.mark.gpu, id="cuda")] if HAS_CUDA_KERNELS else []
HOST_IMPLS = [*CPU_IMPLS, EMULATED]  # those that read and write the host's memory
IMPLS = [*HOST_IMPLS, *ON_A_GPU]
RUNNING_IMPLS = [impl for impl in ops.available_impls() if impl != "reference"]
SIZES = [1, 7, 255, 256, 257, 4096, 100_003]
SCALED = [name for name in ELEMENT_WIRES if WireFormat(name).has_scales]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

settings.register_profile("operators", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("operators")

# Tensors here are small: threads would only wait for one another. Tests of threads set more.
torch.set_num_threads(1)

# Zeros, sub-normals, the smallest scale, ties, fp16's and our own limits of magnitude.
GOOD = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-127, 2.0**-126, 1.0, -0.5, 1.5, 2.5, 6e4, 2.0**100]
EDGE = [2.0**126, -(2.0**126), 65519.0, 65520.0, -65536.0, 7e4]
BAD = [1.01 * 2.0**126, -3e38, float("inf"), -float("inf"), float("nan")]


def values(num_elements: int, kind: str, seed: int) -> Tensor:
    """Return fp32 values of one kind, the same for the same seed."""
    rng = torch.Generator().manual_seed(seed)
    normal = torch.randn(num_elements, generator=rng)
    if kind == "normal":
        return normal * 1e-3
    if kind == "wide":
        exponent = torch.randint(-140, 120, (num_elements,), generator=rng)
        return torch.ldexp(normal.double(), exponent).float()
    if kind == "subnormal":
        return (normal.double() * 2.0**-135).float()
    if kind == "ties":
        # Multiples of a quarter up to a block maximum that makes many scales a power of two.
        quarters = torch.randint(-508, 509, (num_elements,), generator=rng).float() / 4
        shift = torch.randint(0, 7, (num_elements,), generator=rng)
        return torch.where(
            torch.arange(num_elements) % 32 == 0, 127.0, torch.ldexp(quarters, -shift)
        )
    if kind == "zeros":
        return torch.where(normal > 0, 0.0, -0.0)
    pool = {"good": GOOD, "edge": GOOD + EDGE, "bad": GOOD + EDGE + BAD}[kind]
    rare = torch.rand(num_elements, generator=rng) < 0.02
    pick = torch.tensor(pool)[torch.randint(0, len(pool), (num_elements,), generator=rng)]
    return torch.where(rare, pick, normal)


KINDS = ["normal", "wide", "subnormal", "ties", "zeros", "good", "edge", "bad"]


def tensors_like(total: int, seed: int, dtypes: Sequence[torch.dtype] = DTYPES) -> list[Tensor]:
    """Return dense tensors with ``total`` elements in all: mixed types, 0-d, empty, transposed."""
    rng = torch.Generator().manual_seed(seed)
    tensors: list[Tensor] = []
    left = total
    while left:
        dtype = dtypes[int(torch.randint(0, len(dtypes), (), generator=rng))]
        size = min(left, int(torch.randint(1, max(2, total // 2), (), generator=rng)))
        shape = int(torch.randint(0, 5, (), generator=rng))
        if shape == 0:
            tensors.append(torch.zeros(3, 0, dtype=dtype))
        if shape == 1 and size >= 6:
            size -= size % 6
            tensors.append(torch.zeros(size // 3, 3, dtype=dtype).t())
        elif shape == 2 and size >= 8:
            size -= size % 8
            tensors.append(torch.zeros(size // 8, 4, 2, dtype=dtype).permute(2, 0, 1))
        elif shape == 3:
            size = 1
            tensors.append(torch.zeros((), dtype=dtype))
        else:
            tensors.append(torch.zeros(size, dtype=dtype))
        left -= size
    return tensors


def memory_view(tensor: Tensor) -> Tensor:
    """View a dense tensor as one dimension in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def fill(tensors: Sequence[Tensor], source: Tensor) -> None:
    """Write a flat tensor into the fragment's tensors, in memory order."""
    offset = 0
    for tensor in tensors:
        memory_view(tensor).copy_(source[offset : offset + tensor.numel()])
        offset += tensor.numel()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the fragment's values as fp32, in memory order."""
    return torch.cat([memory_view(tensor).float() for tensor in tensors])


def as_written(source: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return c(source): a flat fp32 tensor as the fragment's tensors would hold its values."""
    held = clone(tensors)
    fill(held, source)
    return flat(held)


def clone(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors and keep their strides."""
    return [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]


LOW_PRECISION = [(torch.bfloat16,), (torch.float16,), DTYPES]


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    """Return the name of a set of dtypes in the names of tests."""
    return "+".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def low_precision(
    num_elements: int, dtypes: Sequence[torch.dtype], kind: str, seed: int
) -> tuple[Tensor, list[Tensor]]:
    """Return outer values, and parameters that are at most three units of bf16 away from them.

    With one dtype the parameters are one tensor, and with several they are many odd tensors.
    """
    rng = torch.Generator().manual_seed(seed)
    outer = values(num_elements, kind, seed)
    params = [torch.zeros(num_elements, dtype=dtypes[0])]
    if len(dtypes) > 1:
        params = tensors_like(num_elements, seed, dtypes)
    factor = 1 + (torch.rand(num_elements, generator=rng).double() - 0.5) / 21
    fill(params, (outer * factor).float())
    return outer, params


@dataclass
class Fragment:
    """A fragment to encode: x = outer - params holds the wanted values where outer is given."""

    outer: Tensor | None
    params: list[Tensor]
    layout: Layout

    @property
    def form(self) -> tuple[int, str, int]:
        """The run_elements, wire and block_size arguments of an operator."""
        layout = self.layout
        return layout.run_elements, layout.wire.name, layout.wire.block_size

    def payload(self) -> Tensor:
        """Return a buffer full of a pattern, so that a byte written by mistake is seen."""
        return torch.full((self.layout.payload_bytes,), 0xA5, dtype=torch.uint8)


def fragment(
    num_elements: int,
    wire: WireFormat,
    kind: str = "normal",
    seed: int = 0,
    *,
    num_runs: int = 1,
    with_outer: bool = True,
) -> Fragment:
    """Make a fragment whose pseudo-gradient has values of one kind."""
    layout = Layout.plan(num_elements, num_runs, 1, wire)
    x = values(num_elements, kind, seed)
    if not with_outer:
        params = tensors_like(num_elements, seed, (torch.float32,))
        fill(params, x)
        return Fragment(None, params, layout)
    params = tensors_like(num_elements, seed)
    if kind == "normal":
        fill(params, values(num_elements, "normal", seed + 1))
        return Fragment(flat(params) + x, params, layout)
    return Fragment(x, params, layout)


def same(a: Tensor, b: Tensor) -> bool:
    """Compare bit for bit; any NaN equals any NaN."""
    if a.dtype == torch.uint8 or not a.is_floating_point():
        return torch.equal(a, b)
    bits = {4: torch.int32, 2: torch.int16, 8: torch.int64}[a.element_size()]
    both_nan = a.isnan() & b.isnan()
    return bool((both_nan | (a.view(bits) == b.view(bits))).all())


_remembered: dict[Any, Any] = {}


def remembered(call: Callable[[], Any], *arguments: Any) -> Any:
    """Return what ``call`` returned for equal arguments before, or else call.

    The reference takes longest of all implementations, and each is compared with it.
    """
    key = call.__module__, call.__qualname__, _key_of(arguments)
    if key not in _remembered:
        if len(_remembered) > 1000:
            _remembered.clear()
        _remembered[key] = call()
    return _remembered[key]


def _key_of(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        content = memory_view(argument).view(torch.uint8).numpy().tobytes()
        return argument.dtype, argument.shape, argument.stride(), content
    if isinstance(argument, dict):
        argument = sorted(argument.items())
    if isinstance(argument, (list, tuple)):
        return tuple(map(_key_of, argument))
    return argument


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Fail with the first place where two tensors differ."""
    if same(actual, expected):
        return
    a, b = memory_view(actual), memory_view(expected)
    differs = (a != b) if a.dtype == torch.uint8 else ~((a == b) | (a.isnan() & b.isnan()))
    if not differs.any():
        raise AssertionError(f"{what}: zeros of different sign")
    idx = int(differs.nonzero()[0])
    raise AssertionError(
        f"{what}: {int(differs.sum())} of {a.numel()} differ, first at {idx}: "
        f"{a[idx].item()} instead of {b[idx].item()}"
    )


sizes = st.one_of(st.sampled_from(SIZES[:-1]), st.integers(1, 3000))
block_sizes = st.sampled_from(BLOCK_SIZES)
seeds = st.integers(0, 2**31)
kinds = st.sampled_from(KINDS)


def encode(case: Fragment, impl: str, **options) -> tuple[Tensor, int]:
    """Encode the whole fragment into a fresh payload; return it and the count of bad elements."""
    payload, nonfinite = case.payload(), torch.tensor([5])
    device_ops.encode(
        case.outer,
        case.params,
        payload,
        0,
        case.layout.num_elements,
        *case.form,
        nonfinite=nonfinite,
        impl=impl,
        **options,
    )
    return payload, int(nonfinite) - 5
