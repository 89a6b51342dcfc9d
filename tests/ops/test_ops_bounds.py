"""No operator touches a byte outside its tensors, wherever they begin."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import device_ops as ops
import emulated
import pytest
import torch
from codec_cases import HOST_IMPLS, IMPLS, RUNNING_IMPLS, assert_same, values
from commands import run_python
from torch import Tensor

from diloco_comm.ops.wire import (
    ELEMENT_WIRES,
    ROTATED_WIRES,
    SPARSE_WIRES,
    WIRES,
    Layout,
    WireFormat,
)

every_impl = pytest.mark.parametrize("impl", IMPLS)
every_wire = pytest.mark.parametrize("wire", ELEMENT_WIRES)
Place = Callable[[Tensor], Tensor]


def sync(place: Place, wire: str, n: int, block_size: int, impl: str) -> list[Tensor]:
    """Run every operator on tensors put somewhere by ``place``; return what was written."""
    layout = Layout.plan(n, 3, 1, WireFormat(wire, block_size))
    form = (layout.run_elements, wire, block_size)
    outer, momentum = place(values(n, "normal", 1)), place(values(n, "normal", 2))
    second = place(values(n, "normal", 3).square())
    left = n // 3
    params = [
        place(values(left, "normal", 4).bfloat16()),
        place(values(n - left - n // 4, "normal", 5)),
        place(values(n // 4, "normal", 6).half()),
    ]
    outs = [place(torch.zeros(left)), place(torch.zeros(n - left, dtype=torch.bfloat16))]
    payload = place(torch.zeros(layout.payload_bytes, dtype=torch.uint8))
    result = place(torch.zeros(layout.run_bytes, dtype=torch.uint8))
    residual, new_residual = place(values(n, "normal", 7)), place(torch.zeros(n))
    options = {"stochastic": n % 2 == 0, "rng_key": 3, "impl": impl}
    ops.encode(
        outer, params, payload, 0, n, *form, residual=residual, new_residual=new_residual, **options
    )
    count = layout.run_range(0)[1]
    ops.reduce(payload, result, [0.5, 0.25, 0.25], count, *form, **options)
    terms = ([payload, payload], [1.0, -0.25], 0, n, *form)
    ops.outer_step(
        outer, momentum, params, *terms, "nesterov", lr=0.7, mu=0.9, alpha=0.25, impl=impl
    )
    ops.outer_step_adam(
        outer, momentum, second, params, *terms,
        lr=0.3, beta1=0.9, beta2=0.95, eps=0.1, step=1, impl=impl,
    )  # fmt: skip
    pending = place(values(n, "normal", 8))
    for last in (False, True):
        ops.outer_step_delayed(
            outer, momentum, pending, *terms, lr=0.7, mu=0.9, ahead=0.63, behind=0.27, last=last,
            impl=impl,
        )  # fmt: skip
    ops.decode(*terms[:2], outs, *terms[2:], impl=impl)
    ops.merge(outer, params, 0.5, impl=impl)
    norms = place(torch.zeros(2, dtype=torch.float64))
    ops.norms(outer, params, norms, impl=impl)
    sums = place(torch.zeros(2, dtype=torch.int64))
    for data in (payload, result[1:], outer, *params, *outs):
        ops.digest(data, sums, impl=impl)
    return [
        payload, result, new_residual, outer, momentum, second, pending, *params, *outs,
        norms, sums,
    ]  # fmt: skip


def sizes_of(wire: str, *sizes: tuple[int, int]) -> list[tuple[int, int]]:
    """Return pairs of element count and block size: ``sizes``, where the wire leaves a choice."""
    if wire in ELEMENT_WIRES:
        return list(sizes)
    return [(n, WireFormat(wire).block_size) for n in (1, 257, 1025, 4097)]


@pytest.mark.each_value("216 combinations")
@pytest.mark.parametrize("impl", HOST_IMPLS)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("shift", [1, 3, 8])
def test_misaligned_tensors_between_guards(impl: str, wire: str, shift: int) -> None:
    """Tensors that begin at odd places, with a pattern before and behind that must survive."""
    islands: list[tuple[Tensor, int]] = []

    def place(tensor: Tensor) -> Tensor:
        item = tensor.element_size()
        shift_bytes = shift if item == 1 else shift * item
        sea = torch.full((tensor.numel() * item + 256,), 0xA5, dtype=torch.uint8)
        begin = -sea.data_ptr() % 64 + shift_bytes
        bytes_ = sea[begin : begin + tensor.numel() * item]
        view = (
            torch.frombuffer(sea.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            if tensor.numel()
            else tensor
        )
        view.copy_(tensor)
        islands.append((sea, begin))
        islands.append((sea, begin + bytes_.numel()))
        return view

    for n, block_size in sizes_of(wire, (1, 32), (257, 32), (1000, 256), (3001, 64)):
        islands.clear()
        actual = sync(place, wire, n, block_size, impl)
        for (sea, begin), (_, end) in zip(islands[::2], islands[1::2], strict=True):
            assert (sea[:begin] == 0xA5).all() and (sea[end:] == 0xA5).all()
        for tensor, truth in zip(
            actual, sync(torch.clone, wire, n, block_size, "reference"), strict=True
        ):
            assert_same(tensor, truth, f"{impl} {wire} with {n} elements")


@every_impl
@every_wire
def test_padding_is_never_written(impl: str, wire: str) -> None:
    form, n = WireFormat(wire, 32), 75
    layout = Layout.plan(n, 1, 1, form)
    for name in (impl, "reference"):
        payload = torch.full((layout.payload_bytes,), 0xA5, dtype=torch.uint8)
        ops.encode(None, [torch.zeros(n)], payload, 0, n, layout.run_elements, wire, 32, impl=name)
        offset = form.code_offset(layout.run_elements)
        scale_bytes = 2 * math.ceil(n / 32) if form.has_scales else 0
        code_bytes = math.ceil(n * form.code_bits / 8)
        written = torch.zeros(layout.payload_bytes, dtype=torch.bool)
        written[:scale_bytes] = True
        written[offset : offset + code_bytes] = True
        assert (payload[~written] == 0xA5).all() and (payload[written] != 0xA5).all()


@pytest.mark.parametrize("impl", HOST_IMPLS)
@pytest.mark.parametrize("wire", [*ROTATED_WIRES, *SPARSE_WIRES])
def test_padding_of_a_wire_with_codes_for_blocks_is_never_written(impl: str, wire: str) -> None:
    form = WireFormat(wire)
    n = 2 * form.block_size + 1
    layout = Layout.plan(n, 1, 1, form)
    arguments = (0, n, layout.run_elements, wire, form.block_size)
    for name in (impl, "reference"):
        payload = torch.full((layout.payload_bytes,), 0xA5, dtype=torch.uint8)
        ops.encode(None, [torch.zeros(n)], payload, *arguments, rng_key=3, impl=name)
        written = torch.zeros(layout.payload_bytes, dtype=torch.bool)
        written[: form.scale_offset + 2 * 3] = True
        offset = form.code_offset(layout.run_elements)
        written[offset : offset + form.code_bytes(n)] = True
        assert (payload[~written] == 0xA5).all() and (payload[written] != 0xA5).all()


def at_the_end_of_memory(tensor: Tensor) -> Tensor:
    """Copy a tensor so that the byte behind it may not even be read."""
    page = mmap.PAGESIZE
    num_bytes = tensor.numel() * tensor.element_size()
    size = -(-max(num_bytes, 1) // page) * page
    memory = mmap.mmap(-1, size + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    no_access = libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(page), 0)
    assert no_access == 0, os.strerror(ctypes.get_errno())
    if num_bytes == 0:
        return tensor.clone()
    count, offset = tensor.numel(), size - num_bytes
    view = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset)
    return view.copy_(tensor)


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_nothing_is_read_behind_the_end() -> None:
    """In a process of its own: a read too far ends it with SIGSEGV."""
    done = run_python(
        __file__,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert done.returncode != -signal.SIGSEGV, f"read behind the end: {done.stdout}"
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    for each_impl in [*RUNNING_IMPLS, *(["emulated"] if emulated.LIBRARY.exists() else [])]:
        for each_wire in WIRES:
            for size, block in sizes_of(each_wire, (1, 32), (257, 32), (1000, 256), (4097, 1024)):
                print(each_impl, each_wire, size, block, flush=True)
                sync(at_the_end_of_memory, each_wire, size, block, each_impl)
