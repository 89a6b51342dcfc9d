"""outer_step_delayed: the reference's bits in every implementation, and a plain step's."""

from __future__ import annotations

import device_ops as ops
import pytest
import torch
from codec_cases import HOST_IMPLS, IMPLS, SIZES, assert_same, values
from test_ops_reduce import whole_payload
from torch import Tensor

from diloco_comm.ops.wire import BLOCK_SIZES, ELEMENT_WIRES, Layout, WireFormat

MODES = [(True, True), (False, True), (True, False), (False, False)]


def arrive(
    layout: Layout,
    seed: int,
    impl: str,
    *,
    num_terms: int = 1,
    has_momentum: bool = True,
    **options,
) -> dict[str, Tensor]:
    form, n = layout.wire, layout.num_elements
    kept = {name: values(n, "good", seed + i) for i, name in enumerate(("outer", "momentum"))}
    kept["pending"] = values(n, "normal", seed + 2)
    payloads = [whole_payload(layout, "normal", seed + 3 + i) for i in range(num_terms)]
    begin, end = options.pop("span", (0, n))
    numbers = {"mu": 0.9, "direct": 1.0, "ahead": 0.63, "behind": 0.27, **options}
    ops.outer_step_delayed(
        kept["outer"],
        kept["momentum"] if has_momentum else None,
        kept["pending"],
        payloads,
        [0.25, -1.0, 0.3][:num_terms],
        begin,
        end,
        layout.run_elements,
        form.name,
        form.block_size,
        0.7,
        impl=impl,
        **numbers,
    )
    return kept


def compare(layout: Layout, seed: int, impl: str, **options) -> None:
    got, truth = (arrive(layout, seed, name, **options) for name in (impl, "reference"))
    for name in truth:
        assert_same(got[name], truth[name], f"{impl} {name}")


@pytest.mark.each_pair("112 combinations")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("first", "last"), MODES)
@pytest.mark.parametrize("size", SIZES)
def test_sizes(impl: str, first: bool, last: bool, size: int) -> None:
    layout = Layout.plan(size, 2, 1, WireFormat("int8"))
    compare(layout, size, impl, first=first, last=last)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("wire", ELEMENT_WIRES)
def test_wires_blocks_terms_and_numbers(impl: str, wire: str) -> None:
    for seed, block_size in enumerate(BLOCK_SIZES):
        layout = Layout.plan(3001, 2, 1, WireFormat(wire, block_size))
        first, last = MODES[seed % 4]
        compare(layout, seed, impl, first=first, last=last, num_terms=1 + seed % 3)
        compare(layout, seed, impl, last=True, behind=0.0, has_momentum=seed % 2 == 0)
        compare(layout, seed, impl, last=True, direct=0.0, ahead=1.0, span=layout.run_range(0))


def test_touches_only_what_it_should() -> None:
    layout = Layout.plan(1000, 1, 1, WireFormat("int8"))
    before = {"outer": values(1000, "good", 5), "momentum": values(1000, "good", 6)}
    held = arrive(layout, 5, "", first=True, last=False)
    assert all(torch.equal(held[name], before[name]) for name in before)
    assert not torch.equal(held["pending"], values(1000, "normal", 7))
    stepped = arrive(layout, 5, "", first=False, last=True)
    assert torch.equal(stepped["pending"], values(1000, "normal", 7))
    assert not torch.equal(stepped["outer"], before["outer"])


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_a_set_verdict_means_no_step(impl: str) -> None:
    layout = Layout.plan(300, 1, 1, WireFormat("int8"))
    kept = arrive(layout, 5, impl, last=True, verdict=torch.tensor([1]))
    assert torch.equal(kept["outer"], values(300, "good", 5))
    assert torch.equal(kept["momentum"], values(300, "good", 6))


def test_one_arrival_is_a_nesterov_step_bit_for_bit() -> None:
    layout = Layout.plan(5000, 1, 1, WireFormat("int8"))
    payload = whole_payload(layout, "normal", 1)
    span = (0, 5000, layout.run_elements, "int8", 256)
    outer, momentum = values(5000, "normal", 2), values(5000, "normal", 3)
    theirs, their_momentum, params = outer.clone(), momentum.clone(), [torch.empty(5000)]
    ops.outer_step(theirs, their_momentum, params, [payload], [1.0], *span, "nesterov", 0.7, mu=0.9)
    ops.outer_step_delayed(
        outer, momentum, None, [payload], [1.0], *span, 0.7, mu=0.9, ahead=0.9, first=True,
        last=True,
    )  # fmt: skip
    assert_same(outer, theirs, "outer")
    assert_same(momentum, their_momentum, "momentum")


@pytest.mark.parametrize("impl", HOST_IMPLS)
def test_errors(impl: str) -> None:
    layout = Layout.plan(300, 1, 1, WireFormat("int8"))
    payload = whole_payload(layout, "normal", 1)
    span = (0, 300, layout.run_elements, "int8", 256)
    with pytest.raises(ValueError, match="needs a pending tensor"):
        ops.outer_step_delayed(
            torch.zeros(300), None, None, [payload], [1.0], *span, 0.7, impl=impl
        )
    with pytest.raises(ValueError, match="pending"):
        ops.outer_step_delayed(
            torch.zeros(300), None, torch.zeros(299), [payload], [1.0], *span, 0.7, impl=impl
        )


def test_opcheck() -> None:
    layout = Layout.plan(300, 1, 1, WireFormat("int8"))
    payload = whole_payload(layout, "normal", 1)
    arguments = (
        torch.zeros(300), torch.zeros(300), torch.zeros(300), [payload], [1.0], 0, 300,
        layout.run_elements, "int8", 256, 0.7,
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.diloco_comm.outer_step_delayed.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )
