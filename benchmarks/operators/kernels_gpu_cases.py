"""What ``kernels_gpu.py`` times: operators on the buffers of one fragment, and plain twins."""

from __future__ import annotations

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
NUM_TENSORS = 300
LAYOUTS = ("one", "mixed", "odd")


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


class Data:
    """The buffers of one fragment: about fourteen times ``size_bytes`` in all."""

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
        formats = [
            *(WireFormat(wire, BLOCK) for wire in ELEMENT_WIRES),
            *(WireFormat(wire) for wire in WIRES if wire not in ELEMENT_WIRES),
        ]
        self.layouts = {form.name: Layout.plan(n, NUM_RUNS, 1, form) for form in formats}
        self.payloads = {wire: self.payload(wire) for wire in WIRES}
        self.scratch = torch.empty_like(self.payloads["fp32"])
        for wire, payload in self.payloads.items():
            args = (None, [self.rest.copy_(self.params - self.outer)], payload)
            ops.encode(*args, 0, n, *self.form(wire))
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.norms = torch.zeros(2, dtype=torch.float64, device=device)
        self.sums = torch.zeros(2, dtype=torch.int64, device=device)

    def payload(self, wire: str) -> Tensor:
        size = self.layouts[wire].payload_bytes
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def form(self, wire: str) -> tuple[int, str, int]:
        layout = self.layouts[wire]
        return layout.run_elements, wire, layout.wire.block_size

    def code_bytes(self, wire: str) -> float:
        """Return the bytes of an element in a payload."""
        return self.layouts[wire].wire.bits_per_element / 8

    def tensors(self, layout: str) -> list[Tensor]:
        """Return the parameters as a fragment's tensors."""
        if layout == "odd":
            return self.odd_params
        return list(self.params.split(split(self.num_elements, layout)))


@dataclass(frozen=True)
class Case:
    """One operator on one layout; ``run(impl)`` calls it, ``result`` is what it writes."""

    operator: str
    wire: str
    layout: str
    run: Callable[[str], None]
    traffic_bytes: float  # for each element
    result: Tensor
    plain: str = ""  # the plain PyTorch twin
    is_pure: bool = True  # writes the same each time it is called


def encode_case(data: Data, wire: str, layout: str, kind: str = "", **options: Any) -> Case:
    params, n = data.tensors(layout), data.num_elements
    target = data.scratch[: data.layouts[wire].payload_bytes]
    args = (data.outer, params, target, 0, n, *data.form(wire))
    traffic = 8 + data.code_bytes(wire)
    twin = ""
    if kind == "+feedback":
        options |= {"residual": data.residual, "new_residual": data.rest}
        traffic += 8
    elif not kind and layout == "one" and wire == "int8":
        twin = "encode"

    def run(impl: str) -> None:
        ops.encode(*args, nonfinite=data.count, impl=impl, **options)

    return Case(f"encode{kind}", wire, layout, run, traffic, target, twin)


def step_case(data: Data, wire: str, layout: str, num_terms: int = 1) -> Case:
    payloads, coefficients = [data.payloads[wire]] * num_terms, [1.0, 0.25, -0.25][:num_terms]
    args = (payloads, coefficients, 0, data.num_elements, *data.form(wire))
    params = data.tensors(layout)

    def run(impl: str) -> None:
        ops.outer_step(
            data.outer, data.momentum, params, *args, "nesterov", 1e-6, mu=0.9, impl=impl
        )

    traffic = 20 + num_terms * data.code_bytes(wire)
    name = "outer_step" if num_terms == 1 else f"outer_step {num_terms} terms"
    twin = "outer_step" if (wire, layout, num_terms) == ("int8", "one", 1) else ""
    return Case(name, wire, layout, run, traffic, data.outer, twin, is_pure=False)


def adam_case(data: Data, wire: str, layout: str) -> Case:
    args = ([data.payloads[wire]], [1.0], 0, data.num_elements, *data.form(wire))
    options = {"lr": 1e-9, "beta1": 0.9, "beta2": 0.95, "eps": 0.1, "step": 3}
    params = data.tensors(layout)

    def run(impl: str) -> None:
        state = (data.outer, data.momentum, data.second)
        ops.outer_step_adam(*state, params, *args, impl=impl, **options)

    traffic = 28 + data.code_bytes(wire)
    return Case("outer_step adam", wire, layout, run, traffic, data.outer, is_pure=False)


def arrival_case(data: Data, wire: str) -> Case:
    args = ([data.payloads[wire]], [1.0], 0, data.num_elements, *data.form(wire))
    options: dict[str, Any] = {"lr": 1e-6, "mu": 0.9, "ahead": 0.9, "last": True}

    def run(impl: str) -> None:
        state = (data.outer, data.momentum, data.second)
        ops.outer_step_delayed(*state, *args, impl=impl, **options)

    traffic = 20 + data.code_bytes(wire)
    return Case("outer_step delayed", wire, "one", run, traffic, data.outer, is_pure=False)


def decode_case(data: Data, wire: str, layout: str) -> Case:
    result, outs = data.odd_rest, data.odd_outs
    if layout != "odd":
        result = data.rest
        outs = list(result.split(split(data.num_elements, layout)))
    args = ([data.payloads[wire]], [1.0], outs, 0, data.num_elements, *data.form(wire))
    traffic = 4 + data.code_bytes(wire)
    twin = "decode" if (wire, layout) == ("int8", "one") else ""
    return Case(
        "decode", wire, layout, lambda impl: ops.decode(*args, impl=impl), traffic, result, twin
    )


def reduce_case(data: Data, wire: str) -> Case:
    """Average the payload's four runs as if they were four ranks' shards of one run."""
    layout = data.layouts[wire]
    result = data.scratch[: layout.run_bytes]
    weights = [1 / NUM_RUNS] * NUM_RUNS
    args = (data.payloads[wire], result, weights, layout.run_elements, *data.form(wire))
    traffic = data.code_bytes(wire) * (1 + 1 / NUM_RUNS)
    twin = "reduce" if wire == "int8" else ""

    def run(impl: str) -> None:
        ops.reduce(*args, nonfinite=data.count, impl=impl)

    return Case(f"reduce of {NUM_RUNS}", wire, "one", run, traffic, result, twin)


def plain_case(data: Data, name: str, layout: str) -> Case:
    """merge or norms, which know no wire."""
    outer, params = data.outer, data.tensors(layout)
    if name == "norms":

        def norms(impl: str) -> None:
            ops.norms(outer, params, data.norms, impl=impl)

        return Case(name, "", layout, norms, 8, data.norms)

    def merge(impl: str) -> None:
        ops.merge(outer, params, impl=impl)

    return Case(name, "", layout, merge, 8, data.odd_storage if layout == "odd" else data.params)


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
    for wire in wires[:1]:
        found.append(encode_case(data, wire, "one", " stochastic", stochastic=True, rng_key=7))
        found.append(encode_case(data, wire, "one", "+feedback"))
        found.append(step_case(data, wire, "one", 3))
        found.append(adam_case(data, wire, "one"))
        found.append(arrival_case(data, wire))
    found += [plain_case(data, name, layout) for name in ("norms", "merge") for layout in LAYOUTS]

    def digest(impl: str) -> None:
        ops.digest(data.outer, data.sums, impl=impl)

    found.append(Case("digest", "", "one", digest, 4, data.sums))
    return found


def plain_twins(data: Data, compiled: bool) -> dict[str, Callable[[], object]]:
    """Closures over the same buffers, by the operator's name."""

    def wrap(function: Callable) -> Callable:
        return torch.compile(function, dynamic=False) if compiled else function

    encode, decode = wrap(plain.encode), wrap(plain.decode)
    reduce, step = wrap(plain.reduce), wrap(plain.outer_step)
    return {
        "encode": lambda: encode(data.outer, data.params),
        "decode": lambda: decode(data.codes, data.scale),
        "reduce": lambda: reduce(data.codes, data.scale),
        "outer_step": lambda: step(data.outer, data.momentum, data.params, data.codes, data.scale),
    }
