"""The operators: load the C++ extension, choose an implementation, and call it.

Each operator has the name and the arguments, in the same order, of its schema in
``torch.ops.diloco_comm.*`` (``csrc/operators/schemas.h``); the numeric definition is
``docs/developers/wire-formats.md``. A *fragment* is a list of tensors whose N elements are counted
through, one tensor after the other; ``begin`` and ``end`` are such counts. All operators work in
place on buffers of the caller and allocate nothing.

A name given as ``impl`` comes first, then the environment's (``DILOCO_COMM_IMPL``), then the
default: ``DEFAULT_ON_CUDA`` for CUDA tensors, and on the CPU the fastest that the extension finds
the processor able to run. A name that cannot run is an error: nothing is ever replaced in silence.
Torch's own dispatcher finds the registered kernel of a device.

The body of an operator names the tensors whose device chooses the implementation (``_run``).
``locals()`` there are the arguments by name.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base import env, extension
from .implementations import (
    CPU_ONLY,
    IMPLEMENTATIONS,
    available_impls,
    register_triton,
    resolve_impl,
)

__all__ = [
    "IMPLEMENTATIONS",
    "available_impls",
    "decode",
    "digest",
    "encode",
    "finish_digest",
    "gram",
    "merge",
    "norms",
    "outer_step",
    "outer_step_adam",
    "outer_step_delayed",
    "reduce",
    "resolve_impl",
]

extension.load()
register_triton()

from .. import _C  # noqa: E402


def _run(operator: str, like: Sequence[Tensor], arguments: dict[str, Any]) -> None:
    """Run one operator in the implementation for the device of the first tensor of ``like``.

    Autograd is off: the operators write parameters in place.

    Args:
        like: Tensors of the call; with none, the device is the CPU.
        arguments: All arguments of the schema by name, in its order; ``impl`` is the last.

    Raises:
        ValueError, TypeError: As ``resolve_impl``, and what the operator raises.
    """
    *values, impl = arguments.values()
    device, index = (like[0].device.type, like[0].device.index) if like else ("cpu", None)
    function, names, lists = _chosen(operator, impl, device, index, os.environ.get(env.IMPL, ""))
    for position in lists:
        values[position] = list(values[position])
    with torch.no_grad():
        function(*values, *names)


@functools.cache
def _chosen(
    operator: str, impl: str, device: str, index: int | None, environment: str
) -> tuple[Callable[..., None], tuple[str, ...], tuple[int, ...]]:
    """Choose the implementation of an operator; the answer is cached for the same arguments.

    Args:
        environment: The value of ``DILOCO_COMM_IMPL``. ``resolve_impl`` reads it itself: as an
            argument it is part of the cache's key.

    Returns:
        The function, the name that it takes as its last argument, if any, and the positions of
        arguments that torch takes as lists alone, where callers may have any sequence.

    Raises:
        ValueError, TypeError: As ``resolve_impl``.
    """
    if operator in CPU_ONLY and (device != "cpu" or impl == "triton"):
        given = f"impl={impl!r}" if device == "cpu" else f"a tensor on {device}"
        raise ValueError(f"{operator} runs on CPU tensors alone, without Triton; got {given}")
    # Triton is not refused here for CPU tensors: its kernels take them if they are interpreted.
    if impl != "triton" or device != "cpu":
        impl = resolve_impl(impl, device, operator, index)
    schema = getattr(torch.ops.diloco_comm, operator).default._schema
    kinds = [argument.type for argument in schema.arguments]
    lists = tuple(i for i, kind in enumerate(kinds) if isinstance(kind, torch.ListType))
    if impl == "reference":
        reference = importlib.import_module("diloco_comm.ops.reference")
        return getattr(reference, operator), (), lists
    library = torch.ops.diloco_comm_triton if impl == "triton" else torch.ops.diloco_comm
    return getattr(library, operator), (impl,), lists


def encode(
    outer: Tensor | None,
    params: Sequence[Tensor],
    payload: Tensor,
    begin: int,
    end: int,
    run_elements: int,
    wire: str,
    block_size: int,
    *,
    stochastic: bool = False,
    rng_key: int = 0,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
    nonfinite: Tensor | None = None,
    outer_begin: int = 0,
    max_blocks: int = 0,
    impl: str = "",
) -> None:
    """Encode elements [begin, end) of c(outer) - params + residual into the fragment's payload.

    c(x) is x rounded to the dtype of the element's parameter, to nearest.

    Args:
        outer: 1-D fp32 [N], or None to encode the parameters themselves. Or a window, 1-D fp32
            [W]: elements [outer_begin, outer_begin + W) of the fragment, with [begin, end) inside.
        params: The fragment's tensors where they lie: fp32, bf16 or fp16, any shape, dense.
        payload: 1-D uint8, whole runs of the wire's ``run_bytes(run_elements)``. Only the runs of
            [begin, end) are written, and no padding.
        begin, end: Multiples of ``run_elements``; ``end`` may be N.
        run_elements: Elements of a run, a multiple of ``block_size``.
        wire, block_size: As in ``wire.WireFormat``.
        stochastic: Round stochastically, with Philox keyed by ``rng_key``, instead of to nearest.
        residual, new_residual: 1-D fp32 or bf16 [N]: the values that are added, and where the
            encoding's errors are written. They may be the same tensor.
        nonfinite: int64 [1]; the number of bad elements is added.
        outer_begin: Where in the fragment a window begins, a multiple of ``run_elements``.
        max_blocks: Most thread blocks of the kernel's grid on a GPU, so that kernels on other
            streams have room; 0: as many as there is work for. The results do not depend on it.
            Among Triton's operators ``reduce`` and ``digest`` alone keep the bound, and
            implementations on the CPU have no grid.
        impl: Implementation, or "" for the default.

    Raises:
        ValueError, TypeError: If sizes, dtypes or names do not fit.
    """
    _run("encode", [payload], locals())


def reduce(
    received: Tensor,
    result: Tensor,
    weights: Sequence[float],
    num_elements: int,
    run_elements: int,
    wire: str,
    block_size: int,
    *,
    stochastic: bool = False,
    rng_key: int = 0,
    index_begin: int = 0,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
    nonfinite: Tensor | None = None,
    max_blocks: int = 0,
    impl: str = "",
) -> None:
    """Decode one run of each rank, sum them by weight in rank order, encode the sum once.

    Args:
        received: 1-D uint8, one run for each weight, in rank order.
        result: 1-D uint8, at least one run; the first is written.
        weights: Factors of the runs, normalised to a sum of 1.
        num_elements: Elements in the run, at most ``run_elements``.
        index_begin: Index in the fragment of the run's first element (for stochastic rounding).
        residual, new_residual: 1-D fp32 or bf16 [num_elements], as in ``encode``.

    The other arguments and the errors are those of ``encode``.
    """
    _run("reduce", [result], locals())


def outer_step(
    outer: Tensor,
    momentum: Tensor | None,
    params: Sequence[Tensor],
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    begin: int,
    end: int,
    run_elements: int,
    wire: str,
    block_size: int,
    optimizer: str,
    lr: float,
    *,
    mu: float = 0.0,
    alpha: float = 0.0,
    clip: float = float("inf"),
    verdict: Tensor | None = None,
    outer_begin: int = 0,
    impl: str = "",
) -> None:
    """Step the outer optimizer on g = sum_i c_i * decode(payload_i), then merge into the params.

    Args:
        outer, momentum: 1-D fp32 [N], updated in place; "sgd" needs no momentum. Or windows of one
            size from ``outer_begin`` on, as in ``encode``.
        params: The fragment's tensors, set as by ``merge``.
        payloads, coefficients: The terms of g: whole payloads of the fragment, and factors.
        optimizer: "sgd", "heavy_ball" or "nesterov".
        clip: Bound on the magnitude of the momentum's elements.
        verdict: int64 [1]; nothing is done when it is not zero.

    The other arguments and the errors are those of ``encode``.
    """
    _run("outer_step", [outer], locals())


def outer_step_adam(
    outer: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    params: Sequence[Tensor],
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    begin: int,
    end: int,
    run_elements: int,
    wire: str,
    block_size: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    *,
    alpha: float = 0.0,
    verdict: Tensor | None = None,
    outer_begin: int = 0,
    impl: str = "",
) -> None:
    """Step Adam as the outer optimizer; ``step`` counts from 1. Else as ``outer_step``."""
    _run("outer_step_adam", [outer], locals())


def outer_step_delayed(
    outer: Tensor,
    momentum: Tensor | None,
    pending: Tensor | None,
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    begin: int,
    end: int,
    run_elements: int,
    wire: str,
    block_size: int,
    lr: float,
    *,
    mu: float = 0.0,
    direct: float = 1.0,
    ahead: float = 0.0,
    behind: float = 0.0,
    first: bool = False,
    last: bool = False,
    verdict: Tensor | None = None,
    outer_begin: int = 0,
    impl: str = "",
) -> None:
    """Collect the gradients of a period in ``pending``; the last one takes the outer step.

    Let g be the gradient of this call, sum_i c_i * decode(payload_i), and d = pending + g, or g if
    the call is the period's ``first``. A call that is not the ``last`` sets pending = d and nothing
    else. The last one leaves pending alone, makes momentum m' = mu*m + d of its old value m, and
    takes outer -= lr*(direct*d + ahead*m' + behind*m). Parameters are not written.

    Args:
        outer, momentum: 1-D fp32 [N]; without a momentum the terms of ``ahead`` and ``behind``
            are left out. Or windows of one size from ``outer_begin`` on, as in ``encode``; ``end``
            may be where they end.
        pending: As ``outer``; may be None when every call is first and last.
        first, last: Whether this call is the first, and the last, of its period.

    The other arguments and the errors are those of ``outer_step``.
    """
    _run("outer_step_delayed", [outer], locals())


def decode(
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    outs: Sequence[Tensor],
    begin: int,
    end: int,
    run_elements: int,
    wire: str,
    block_size: int,
    *,
    max_blocks: int = 0,
    impl: str = "",
) -> None:
    """Set elements [begin, end) of ``outs`` to sum_i c_i * decode(payload_i).

    Args:
        outs: The tensors (fp32, bf16 or fp16, any shape, dense) that make up the fragment.

    The other arguments and the errors are those of ``outer_step``.
    """
    _run("decode", payloads or outs, locals())


def merge(outer: Tensor, params: Sequence[Tensor], alpha: float = 0.0, *, impl: str = "") -> None:
    """Set params to alpha * params + (1 - alpha) * outer (1-D fp32 [N]), in the params' dtypes.

    The sum is rounded toward c(outer), which is outer rounded to nearest: a parameter that equals
    c(outer) stays there.
    """
    _run("merge", [outer], locals())


def norms(outer: Tensor | None, params: Sequence[Tensor], out: Tensor, *, impl: str = "") -> None:
    """Write to ``out`` (fp64 [2]) the squared norm of c(outer) - params, and count bad elements.

    Without ``outer`` the norm is that of the params. Bad elements (NaN, Inf, above 2^126) are
    counted and left out of the norm. The order of summation is fixed, whatever the threads.
    """
    _run("norms", [out], locals())


def gram(
    payloads: Sequence[Tensor],
    out: Tensor,
    begin: int,
    end: int,
    num_elements: int,
    run_elements: int,
    wire: str,
    block_size: int,
    first_row: int = 0,
    *,
    impl: str = "",
) -> None:
    """Write to ``out`` (fp64 [M * M]) the dot products of the payloads' elements [begin, end).

    Element i * M + j is the sum of decode(payload_i) * decode(payload_j): the Gram matrix, row by
    row. Products of fp32 values are exact in fp64. The order of summation is fixed, whatever the
    threads: blocks are summed by themselves and added one after the other, in tiles of 65536
    elements that are counted from ``begin``.

    Args:
        payloads: 1 to 64 whole payloads of the fragment, on the CPU.
        num_elements: Elements of the fragment (N).
        first_row: Only the products of payloads ``first_row`` and later, with all others, are
            written; the rest of ``out`` stays.

    The other arguments and the errors are those of ``encode``. A tensor that is not on the CPU
    raises ValueError.
    """
    _run("gram", [out, *payloads], locals())


def digest(
    tensor: Tensor, sums: Tensor, first_word: int = 0, *, max_blocks: int = 0, impl: str = ""
) -> None:
    """Add the two sums of a tensor's digest to ``sums``; ``finish_digest`` makes 64 bits of them.

    They are sums mod 2^64 over the 64-bit words of its bytes, in memory order: the same on every
    device and in every implementation, and parts may be added in any order.

    Args:
        tensor: Dense, of any dtype and shape.
        sums: int64 [2] on the tensor's device: the sum of products and the sum of words.
        first_word: Index of the tensor's first word, for one part of a longer whole. Each part but
            the last is a multiple of 8 bytes long.
        max_blocks: As in ``encode``.

    Raises:
        ValueError, TypeError: As ``encode``.
    """
    _run("digest", [tensor], locals())


def finish_digest(product: int, sum: int, num_bytes: int) -> int:
    """Return the digest, in [0, 2^64), of ``num_bytes`` bytes whose ``digest`` gave these sums.

    Args:
        product, sum: The two sums mod 2^64, so that int64 values serve as they are.
        num_bytes: How many bytes were added in all.
    """
    return _C.finish_digest(product, sum, num_bytes)
