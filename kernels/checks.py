"""Argument checks of Triton's operators: the sentences of ``csrc/operators/checks.h``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .tiles import DTYPES

# For each wire the bits of a code, and the largest magnitude of a code (0: the wire has no scales).
ELEMENT_WIRES = {
    "fp32": (32, 0.0),
    "bf16": (16, 0.0),
    "fp16": (16, 0.0),
    "fp8_e4m3": (8, 448.0),
    "fp8_e5m2": (8, 57344.0),
    "int8": (8, 127.0),
    "int4": (4, 7.0),
    "e3m0": (4, 16.0),
}
# For each wire that has a single code per block: the elements of a block, and the bytes of its
# code.
ROTATED_WIRES = {
    "int2r": (256, 64),
    "int1r": (256, 32),
    "sub2": (1024, 64),
    "sub4": (1024, 32),
    "sub8": (1024, 16),
    "sub16": (1024, 8),
}
SPARSE_WIRES = {
    "topk32": (4096, 40),
    "topk64": (4096, 72),
    "topk128": (4096, 128),
    "topk256": (4096, 224),
}
BLOCK_WIRES = {**ROTATED_WIRES, **SPARSE_WIRES}
WIRES = (*ELEMENT_WIRES, *BLOCK_WIRES)
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024)
MAX_TERMS = 1024
MAX_ELEMENTS = 1 << 48


def _align(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


@dataclass(frozen=True)
class RunLayout:
    """The layout of runs in a payload, which ``csrc/wire/format.h`` defines."""

    wire: str
    block_size: int
    run_elements: int

    @property
    def is_rotated(self) -> bool:
        return self.wire in ROTATED_WIRES

    @property
    def has_element_codes(self) -> bool:
        """Whether each element has a code of its own; else a block has a single code."""
        return self.wire in ELEMENT_WIRES

    @property
    def code_bits(self) -> int:
        """Bits of the code of an element; 0 if elements have no codes of their own."""
        return ELEMENT_WIRES[self.wire][0] if self.has_element_codes else 0

    @property
    def qmax(self) -> float:
        return ELEMENT_WIRES[self.wire][1] if self.has_element_codes else 0.0

    @property
    def code_offset(self) -> int:
        if self.has_element_codes and not self.qmax:
            return 0
        key_bytes = 8 if self.is_rotated else 0
        return _align(key_bytes + 2 * (self.run_elements // self.block_size))

    @property
    def run_bytes(self) -> int:
        if not self.has_element_codes:
            block, num_bytes = BLOCK_WIRES[self.wire]
            return self.code_offset + _align(self.run_elements // block * num_bytes)
        return self.code_offset + _align(-(-self.run_elements * self.code_bits // 8))

    def check_range(self, begin: int, end: int, num_elements: int) -> None:
        """Raise ValueError unless [begin, end) is whole runs of a fragment."""
        if not 0 <= begin <= end <= num_elements:
            raise ValueError(
                f"[begin, end) = [{begin}, {end}) must lie in the fragment's [0, {num_elements})"
            )
        if begin % self.run_elements or (end % self.run_elements and end != num_elements):
            raise ValueError(
                f"[begin, end) = [{begin}, {end}) must be whole runs of {self.run_elements} "
                f"elements, or end at the fragment's {num_elements}"
            )

    def check_window(
        self,
        outer: Tensor,
        outer_begin: int,
        begin: int,
        end: int,
        num_elements: int,
        device: torch.device,
    ) -> None:
        """Raise unless outer holds [begin, end) of the fragment, from the run at outer_begin on."""
        check_flat("outer", outer, torch.float32, device)
        last = outer_begin + outer.numel()
        is_run = outer_begin % self.run_elements == 0
        if is_run and 0 <= outer_begin <= begin and end <= last <= num_elements:
            return
        if outer_begin == begin == 0 and end == num_elements:
            check_flat_of("outer", outer, num_elements, device)
        raise ValueError(
            f"outer of {outer.numel()} elements from outer_begin={outer_begin} must hold "
            f"[begin, end) = [{begin}, {end}) of the fragment's {num_elements} elements, from a "
            f"multiple of {self.run_elements}"
        )

    def check_payload(
        self, name: str, payload: Tensor, num_runs: int, device: torch.device
    ) -> None:
        """Raise unless the payload is flat and has complete runs, at least ``num_runs``."""
        check_flat(name, payload, torch.uint8, device)
        if payload.numel() % self.run_bytes or payload.numel() < num_runs * self.run_bytes:
            raise ValueError(
                f"{name} must hold at least {num_runs} whole runs of {self.run_bytes} bytes, got "
                f"{payload.numel()} bytes"
            )


def check_layout(wire: str, block_size: int, run_elements: int) -> RunLayout:
    """Return the layout, or raise ValueError."""
    if wire not in WIRES:
        raise ValueError(f"wire must be one of {', '.join(WIRES)}, got {wire!r}")
    if wire in BLOCK_WIRES:
        if block_size != BLOCK_WIRES[wire][0]:
            raise ValueError(
                f"wire {wire} has blocks of {BLOCK_WIRES[wire][0]}, got block_size={block_size}"
            )
    elif block_size not in BLOCK_SIZES:
        allowed = ", ".join(map(str, BLOCK_SIZES))
        raise ValueError(f"block_size must be one of {allowed}, got {block_size}")
    if run_elements <= 0 or run_elements % block_size:
        raise ValueError(
            f"run_elements must be a positive multiple of block_size {block_size}, got "
            f"{run_elements}"
        )
    if run_elements > MAX_ELEMENTS:
        raise ValueError(f"run_elements must be at most 2^48, got {run_elements}")
    return RunLayout(wire, block_size, run_elements)


def type_name(tensor: Tensor) -> str:
    """Name the dtype as torch's own errors do: Float, Half, Byte."""
    return tensor.type().split(".")[-1].removesuffix("Tensor")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ValueError unless the tensor is on the device of the call's other tensors."""
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like the others, got {tensor.device}")


def check_flat(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless the tensor is one-dimensional, contiguous and of the dtype."""
    check_device(name, tensor, device)
    if tensor.dtype != dtype:
        wanted = type_name(torch.empty(0, dtype=dtype))
        raise TypeError(f"{name} must be {wanted}, got {type_name(tensor)}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be one-dimensional and contiguous, got shape {list(tensor.shape)} "
            f"strides {list(tensor.stride())}"
        )


def check_flat_of(
    name: str,
    tensor: Tensor,
    num_elements: int,
    device: torch.device,
    whole: str = "the fragment",
) -> None:
    """Raise unless the tensor is flat fp32 with ``num_elements``; the error names ``whole``."""
    check_flat(name, tensor, torch.float32, device)
    if tensor.numel() != num_elements:
        raise ValueError(
            f"{name} must have {num_elements} elements like {whole}, got {tensor.numel()}"
        )


def check_fragment(name: str, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Raise unless the tensors are dense, of a known dtype and on the device."""
    for tensor in tensors:
        check_device(name, tensor, device)
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, got {type_name(tensor)}")
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            raise ValueError(
                f"{name} must fill their memory without gaps, got shape {list(tensor.shape)} with "
                f"strides {list(tensor.stride())}"
            )


def check_digest(tensor: Tensor, sums: Tensor, first_word: int) -> None:
    """Raise unless the tensor is dense and there are two int64 for its sums."""
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        raise ValueError(
            f"tensor must fill its memory without gaps, got shape {list(tensor.shape)} with "
            f"strides {list(tensor.stride())}"
        )
    check_flat("sums", sums, torch.int64, tensor.device)
    if sums.numel() != 2:
        raise ValueError(f"sums must have two elements, got {sums.numel()}")
    if first_word < 0:
        raise ValueError(f"first_word must not be negative, got {first_word}")


def check_count(name: str, count: Tensor | None, device: torch.device) -> None:
    """Raise unless ``count`` is None or a flat int64 tensor with one element."""
    if count is None:
        return
    check_flat(name, count, torch.int64, device)
    if count.numel() != 1:
        raise ValueError(f"{name} must have one element, got {count.numel()}")


def check_residuals(
    residual: Tensor | None, new_residual: Tensor | None, num_elements: int, device: torch.device
) -> None:
    """Raise unless the residuals that are not None are flat, of one dtype and the right size."""
    for tensor in (residual, new_residual):
        if tensor is None:
            continue
        check_device("residual", tensor, device)
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"residual must be float32 or bfloat16, got {type_name(tensor)}")
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != num_elements:
            raise ValueError(
                f"residual must be one-dimensional and contiguous with {num_elements} elements, "
                f"got shape {list(tensor.shape)}"
            )
    if residual is not None and new_residual is not None and residual.dtype != new_residual.dtype:
        raise TypeError(
            "residual and new_residual must have one dtype, got "
            f"{type_name(residual)} and {type_name(new_residual)}"
        )


def check_terms(
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    layout: RunLayout,
    end: int,
    device: torch.device,
) -> None:
    """Raise unless there is one coefficient for each payload, and each holds the runs up to end."""
    if not 1 <= len(payloads) <= MAX_TERMS:
        raise ValueError(f"payloads must hold 1 to {MAX_TERMS} tensors, got {len(payloads)}")
    if len(payloads) != len(coefficients):
        raise ValueError(
            "payloads and coefficients must be equally many, got "
            f"{len(payloads)} and {len(coefficients)}"
        )
    for payload in payloads:
        layout.check_payload("payloads", payload, -(-end // layout.run_elements), device)
