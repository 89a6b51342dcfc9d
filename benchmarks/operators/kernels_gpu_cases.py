"""The calls that ``kernels_gpu.py`` and ``roofline.py`` time, on the buffers of one fragment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.operators import plain_operators as plain
from diloco_comm import ops
from diloco_comm.ops.wire import ELEMENT_WIRES, WIRES, Layout, WireFormat

BLOCK = 256
NUM_RUNS = 4  # the shards that `reduce` sums
TOKEN_WEIGHTS = (0.31, 0.27, 0.23, 0.19)  # of replicas that saw different numbers of tokens
NUM_TENSORS = 300
LAYOUTS = ("one", "mixed", "odd")
# The wires of the bars first; one rotated wire of each block size.
DEFAULT_WIRES = ("int8", "int4", *(w for w in ELEMENT_WIRES if "int" not in w), "int2r", "sub8")


def split(num_elements: int, layout: str) -> list[int]:
    """Return the sizes of a fragment's tensors.

    ``one`` tensor; ``mixed``: matrices and vectors as in a model, multiples of 8; ``odd``: about
    the same, of odd sizes, so that a tensor and its part of a flat array differ in alignment.
    """
    if layout == "one":
        return [num_elements]
    weights = [(1, 4, 4, 16, 1, 11, 2, 64, 1, 27)[i % 10] for i in range(NUM_TENSORS)]
    unit = num_elements / sum(weights)
    if layout == "mixed":
        sizes = [max(int(weight * unit) // 8 * 8, 8) for weight in weights]
    else:
        sizes = [max(int(weight * unit) // 2 * 2 - 1, 1) for weight in weights]
    sizes[-1] += num_elements - sum(sizes)
    assert sizes[-1] > 0, "the fragment is too small for so many tensors"
    return sizes


def misaligned(sizes: Sequence[int], device: str) -> tuple[Tensor, list[Tensor]]:
    """Allocate fp32 tensors that each begin 4 bytes behind a multiple of 16; one storage has all.

    A model's tensors are allocated one by one and aligned; these are what is left where they are
    views, as after FSDP's or a flat optimizer's cutting.
    """
    places, end = [], 0
    for size in sizes:
        places.append((end + 3) // 4 * 4 + 1)
        end = places[-1] + size
    storage = torch.zeros(end, device=device)
    assert storage.data_ptr() % 16 == 0
    return storage, [storage[at : at + size] for at, size in zip(places, sizes, strict=True)]


def form_of(layout: Layout) -> tuple[int, str, int]:
    return layout.run_elements, layout.wire.name, layout.wire.block_size


class Buffers:
    """The buffers of one fragment, as the calls take them; a subclass allocates all of them."""

    def form(self, wire: str) -> tuple[int, str, int]:
        return form_of(self.layouts[wire])

    def code_bytes(self, wire: str) -> float:
        """Return the bytes of an element in a payload."""
        return self.layouts[wire].wire.bits_per_element / 8

    def tensors(self, layout: str) -> list[Tensor]:
        """Return the parameters as a fragment's tensors."""
        return list(self.params.split(split(self.num_elements, layout)))

    def outs(self, layout: str) -> tuple[Tensor, list[Tensor]]:
        """Return what ``decode`` writes as one tensor, and as a fragment's tensors."""
        return self.rest, list(self.rest.split(split(self.num_elements, layout)))


def formats() -> list[WireFormat]:
    """List all wires, with ``BLOCK`` where the size of a block can be chosen."""
    return [WireFormat(wire, BLOCK if wire in ELEMENT_WIRES else None) for wire in WIRES]


class Data(Buffers):
    """The buffers on a device: about nineteen times ``size_bytes`` in all."""

    def __init__(self, size_bytes: int, device: str) -> None:
        n = size_bytes // 4 // (NUM_RUNS * 4096) * NUM_RUNS * 4096
        self.num_elements, self.device = n, device
        rng = torch.Generator(device).manual_seed(1)

        def normal(scale: float) -> Tensor:
            return torch.randn(n, generator=rng, device=device).mul_(scale)

        self.outer, self.momentum = normal(1.0), normal(1e-3)
        self.params = self.outer + normal(1e-3)
        self.residual, self.second = normal(1e-5), normal(1e-3).square_()
        self.rest = torch.empty_like(self.outer)
        # What the layout "odd" reads and writes instead of ``params`` and ``rest``.
        sizes = split(n, "odd")
        self.odd_storage, self.odd_params = misaligned(sizes, device)
        self.odd_rest, self.odd_outs = misaligned(sizes, device)
        torch._foreach_copy_(self.odd_params, list(self.params.split(sizes)))
        self.codes = torch.randint(-127, 128, (n,), dtype=torch.int8, generator=rng, device=device)
        self.scale = torch.full((n // BLOCK, 1), 1e-5, device=device)
        self.layouts = {form.name: Layout.plan(n, NUM_RUNS, 1, form) for form in formats()}
        self.rest.copy_(self.params).sub_(self.outer)
        self.payloads = {wire: self.encoded(layout) for wire, layout in self.layouts.items()}
        self.scratch = torch.empty_like(self.payloads["fp32"])
        # All arrays of any operator, for a kernel with the same traffic.
        self.pool = torch.zeros(5 * n, dtype=torch.int32, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.norms = torch.zeros(2, dtype=torch.float64, device=device)
        self.sums = torch.zeros(2, dtype=torch.int64, device=device)

    def encoded(self, layout: Layout) -> Tensor:
        """Encode the first differences of the parameters, as many as a layout has."""
        payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8, device=self.device)
        count = layout.num_elements
        ops.encode(None, [self.rest[:count]], payload, 0, count, *form_of(layout))
        return payload

    def tensors(self, layout: str) -> list[Tensor]:
        return self.odd_params if layout == "odd" else super().tensors(layout)

    def outs(self, layout: str) -> tuple[Tensor, list[Tensor]]:
        return (self.odd_rest, self.odd_outs) if layout == "odd" else super().outs(layout)


@dataclass(frozen=True)
class Case:
    """One operator on one layout; ``run(impl)`` calls it, ``result`` is what it writes.

    Attributes:
        reads: Bytes for each element of the arrays that the operator reads; ``writes``: of those
            that the operator writes; ``updates``: of those that it reads and writes in place.
        is_pure: Whether the operator writes the same each time it is called.
    """

    operator: str
    wire: str
    layout: str
    run: Callable[[str], None]
    result: Tensor
    reads: tuple[float, ...]
    writes: tuple[float, ...] = ()
    updates: tuple[float, ...] = ()
    is_pure: bool = True

    @property
    def key(self) -> tuple[str, str, str]:
        return self.operator, self.wire, self.layout

    @property
    def traffic_bytes(self) -> float:
        return sum(self.reads) + sum(self.writes) + 2 * sum(self.updates)


def encode_case(
    data: Buffers,
    wire: str,
    layout: str,
    kind: str = "",
    params: Tensor | None = None,
    residuals: Sequence[Tensor] = (),
    **options: Any,
) -> Case:
    """Encode outer - params; ``params`` and ``residuals`` replace the fp32 ones."""
    tensors, n = data.tensors(layout) if params is None else [params], data.num_elements
    target = data.scratch[: data.layouts[wire].payload_bytes]
    args = (data.outer, tensors, target, 0, n, *data.form(wire))
    reads, writes = (4.0, float(tensors[0].itemsize)), (data.code_bytes(wire),)
    if kind.endswith("feedback"):
        old, new = residuals or (data.residual, data.rest)
        options |= {"residual": old, "new_residual": new}
        reads, writes = (*reads, old.itemsize), (*writes, new.itemsize)

    def run(impl: str) -> None:
        ops.encode(*args, nonfinite=data.count, impl=impl, **options)

    return Case(f"encode{kind}", wire, layout, run, target, reads, writes)


def step_case(
    data: Buffers,
    wire: str,
    layout: str,
    num_terms: int = 1,
    params: Tensor | None = None,
    alpha: float = 0.0,
) -> Case:
    """Take a Nesterov step and write the parameters; ``params`` replaces the fp32 ones."""
    payloads, coefficients = [data.payloads[wire]] * num_terms, [1.0, 0.25, -0.25][:num_terms]
    args = (payloads, coefficients, 0, data.num_elements, *data.form(wire))
    tensors = data.tensors(layout) if params is None else [params]
    options: dict[str, Any] = {"mu": 0.9, "alpha": alpha}

    def run(impl: str) -> None:
        ops.outer_step(
            data.outer, data.momentum, tensors, *args, "nesterov", 1e-6, impl=impl, **options
        )

    name = "outer_step" if num_terms == 1 else f"outer_step {num_terms} terms"
    name += f" alpha={alpha:g}" if alpha else ""
    size = float(tensors[0].itemsize)
    reads = (data.code_bytes(wire),) * num_terms + ((size,) if alpha else ())
    return Case(name, wire, layout, run, data.outer, reads, (size,), (4, 4), is_pure=False)


def adam_case(data: Buffers, wire: str, layout: str) -> Case:
    args = ([data.payloads[wire]], [1.0], 0, data.num_elements, *data.form(wire))
    options = {"lr": 1e-9, "beta1": 0.9, "beta2": 0.95, "eps": 0.1, "step": 3}
    params = data.tensors(layout)

    def run(impl: str) -> None:
        state = (data.outer, data.momentum, data.second)
        ops.outer_step_adam(*state, params, *args, impl=impl, **options)

    arrays = ((data.code_bytes(wire),), (4,), (4, 4, 4))
    return Case("outer_step adam", wire, layout, run, data.outer, *arrays, is_pure=False)


def arrival_case(data: Data, wire: str) -> Case:
    args = ([data.payloads[wire]], [1.0], 0, data.num_elements, *data.form(wire))
    options: dict[str, Any] = {"lr": 1e-6, "mu": 0.9, "ahead": 0.9, "last": True}

    def run(impl: str) -> None:
        state = (data.outer, data.momentum, data.second)
        ops.outer_step_delayed(*state, *args, impl=impl, **options)

    arrays = ((data.code_bytes(wire), 4), (), (4, 4))
    return Case("outer_step delayed", wire, "one", run, data.outer, *arrays, is_pure=False)


def decode_case(data: Buffers, wire: str, layout: str) -> Case:
    result, outs = data.outs(layout)
    args = ([data.payloads[wire]], [1.0], outs, 0, data.num_elements, *data.form(wire))
    arrays = ((data.code_bytes(wire),), (4,))
    return Case("decode", wire, layout, lambda impl: ops.decode(*args, impl=impl), result, *arrays)


def reduce_case(
    data: Buffers, wire: str, num_runs: int = NUM_RUNS, weights: Sequence[float] = ()
) -> Case:
    """Average the payload's runs as if they were ranks' shards of one run."""
    layout, payload = data.layouts[wire], data.payloads[wire]
    if num_runs != NUM_RUNS:
        run_elements = layout.run_elements // 2
        layout = Layout.plan(num_runs * run_elements, num_runs, 1, layout.wire)
        assert isinstance(data, Data)
        payload = data.encoded(layout)
    result = data.scratch[: layout.run_bytes]
    name = f"reduce of {num_runs}" + (" weighted" if weights else "")
    args = (payload, result, list(weights) or [1 / num_runs] * num_runs, layout.run_elements)
    run_bytes = data.code_bytes(wire) * layout.run_elements / data.num_elements

    def run(impl: str) -> None:
        ops.reduce(*args, *form_of(layout), nonfinite=data.count, impl=impl)

    return Case(name, wire, "one", run, result, (run_bytes,) * num_runs, (run_bytes,))


def plain_case(data: Buffers, name: str, layout: str) -> Case:
    """merge, norms or digest, which know no wire."""
    outer, params = data.outer, data.tensors(layout)
    if name == "norms":
        run = functools.partial(ops.norms, outer, params, data.norms)
        return Case(name, "", layout, lambda impl: run(impl=impl), data.norms, (4, 4))
    if name == "digest":
        digest = functools.partial(ops.digest, outer, data.sums)
        return Case(name, "", layout, lambda impl: digest(impl=impl), data.sums, (4,))
    result = data.odd_storage if isinstance(data, Data) and layout == "odd" else data.params
    merge = functools.partial(ops.merge, outer, params)
    return Case(name, "", layout, lambda impl: merge(impl=impl), result, (4,), (4,))


def cases(data: Data, wires: Sequence[str]) -> list[Case]:
    """List everything that is timed: all wires on one tensor, two of them on many."""
    found = []
    # First those that the bars are about: what a time limit cuts off is the end.
    forms = [(layout, wire) for layout in LAYOUTS for wire in wires[:2]]
    for layout, wire in forms + [("one", wire) for wire in wires[2:]]:
        found.append(encode_case(data, wire, layout))
        found.append(step_case(data, wire, layout))
        found.append(decode_case(data, wire, layout))
    found += [reduce_case(data, wire) for wire in wires]
    for wire in wires[:2]:
        found += [reduce_case(data, wire, 3), reduce_case(data, wire, 8)]
        found.append(reduce_case(data, wire, weights=TOKEN_WEIGHTS))
    for wire in wires[:1]:
        found.append(encode_case(data, wire, "one", " stochastic", stochastic=True, rng_key=7))
        found.append(encode_case(data, wire, "one", "+feedback"))
        found.append(step_case(data, wire, "one", 3))
        found.append(adam_case(data, wire, "one"))
        found.append(arrival_case(data, wire))
    found += [plain_case(data, name, layout) for name in ("norms", "merge") for layout in LAYOUTS]
    return [*found, plain_case(data, "digest", "one")]


# Bytes for each element that ``torch.compile`` moves where its code needs more than one pass: int4
# is packed after the scales are known; 300 tensors are joined or filled by a copy; a rotation is a
# product of matrices; a sparse block is sorted, which takes more passes than are counted here.
MORE_PASSES = {
    ("encode", "int4", "one"): 16.5,
    ("reduce of 4", "int4", "one"): 1.125,
    ("encode", "int8", "mixed"): 17.0,
    ("outer_step", "int8", "mixed"): 25.0,
    ("decode", "int8", "mixed"): 13.0,
    ("encode", "int2r", "one"): 28.25,
    ("decode", "int2r", "one"): 20.25,
    ("encode", "topk64", "one"): 20.0,
}


def plain_twins(data: Data, compiled: bool) -> dict[tuple[str, str, str], Callable[[], object]]:
    """Return closures over the same buffers, by operator, wire and layout."""

    def wrap(function: Callable) -> Callable:
        return torch.compile(function, dynamic=False) if compiled else function

    encode, decode = wrap(plain.encode), wrap(plain.decode)
    reduce, step = wrap(plain.reduce), wrap(plain.outer_step)
    encode_rotated, decode_rotated = wrap(plain.encode_rotated), wrap(plain.decode_rotated)
    encode_sparse = wrap(plain.encode_sparse)
    outer, momentum, params = data.outer, data.momentum, data.params
    codes, scale = data.codes, data.scale
    nibbles = codes[: data.num_elements // 2].view(torch.uint8)
    rotation = torch.ones(1, 1, device=data.device)
    while len(rotation) < BLOCK:
        rotation = torch.cat(
            [torch.cat([rotation, rotation], 1), torch.cat([rotation, -rotation], 1)]
        )
    rotation *= data.momentum[:BLOCK, None].sign() / BLOCK**0.5
    rotated = plain.encode_rotated(outer, params, rotation)
    sizes, many = split(data.num_elements, "mixed"), data.tensors("mixed")
    outs = data.rest.split(sizes)

    def step_many() -> None:
        step(outer, momentum, None, codes, scale)
        torch._foreach_copy_(many, outer.split(sizes))

    # Compiled code for 300 tensors is 300 kernels, so they are joined and filled outside.
    def decode_many() -> None:
        torch._foreach_copy_(outs, decode(codes, scale).view(-1).split(sizes))

    return {
        ("encode", "int8", "one"): lambda: encode(outer, params),
        ("encode", "int4", "one"): lambda: encode(outer, params, None, 4),
        ("encode", "int8", "mixed"): lambda: encode(outer, torch.cat(many)),
        ("encode+feedback", "int8", "one"): lambda: encode(outer, params, data.residual),
        ("encode", "int2r", "one"): lambda: encode_rotated(outer, params, rotation),
        ("encode", "topk64", "one"): lambda: encode_sparse(outer, params),
        ("decode", "int8", "one"): lambda: decode(codes, scale),
        ("decode", "int8", "mixed"): decode_many,
        ("decode", "int2r", "one"): lambda: decode_rotated(*rotated, rotation),
        ("reduce of 4", "int8", "one"): lambda: reduce(codes, scale),
        ("reduce of 4", "int4", "one"): lambda: reduce(nibbles, scale, 4),
        ("outer_step", "int8", "one"): lambda: step(outer, momentum, params, codes, scale),
        ("outer_step", "int8", "mixed"): step_many,
    }
