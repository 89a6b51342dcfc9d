"""Layout arithmetic, names and keys: no tensor is touched here."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_cases import CPU_IMPLS
from samples import BYTES, FORMS, encoded

from diloco_comm.ops.wire import (
    BLOCK_SIZES,
    ELEMENT_WIRES,
    ROTATED_WIRES,
    SPARSE_WIRES,
    WIRES,
    Layout,
    WireFormat,
    _splitmix64,
    encoding_keys,
    parse,
    rng_key,
)

SIZES = [1, 2, 7, 31, 32, 33, 255, 256, 257, 1023, 1025, 4096, 100_003, (1 << 20) + 1]


FORMATS = [WireFormat(name, size) for name in ELEMENT_WIRES for size in BLOCK_SIZES]
FORMATS += [WireFormat(name) for name in (*ROTATED_WIRES, *SPARSE_WIRES)]


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: f"{wire.name}-{wire.block_size}")
def test_run_holds_scales_and_codes_without_overlap(wire: WireFormat) -> None:
    for num_blocks in (1, 2, 3, 7, 8, 9, 100):
        run_elements = num_blocks * wire.block_size
        offset, size = wire.code_offset(run_elements), wire.run_bytes(run_elements)
        scale_bytes = 2 * num_blocks if wire.has_scales else 0
        scale_bytes += 8 if wire.is_rotated else 0
        code_bytes = wire.code_bytes(run_elements)
        assert offset % 16 == 0 and size % 16 == 0
        assert scale_bytes <= offset < scale_bytes + 16
        assert offset + code_bytes <= size < offset + code_bytes + 16


@pytest.mark.parametrize("num_elements", SIZES)
def test_runs_cover_every_element_once(num_elements: int) -> None:
    for world_size, num_chunks in itertools.product(range(1, 9), (1, 2, 3, 16)):
        check_runs(num_elements, world_size, num_chunks)


def check_runs(num_elements: int, world_size: int, num_chunks: int) -> None:
    for block_size in (32, 256):
        layout = Layout.plan(num_elements, world_size, num_chunks, WireFormat("int4", block_size))
        assert layout.num_runs == world_size * num_chunks
        assert layout.run_elements % block_size == 0
        # No smaller multiple of the block size would do.
        assert (layout.run_elements - block_size) * layout.num_runs < num_elements
        ranges = [layout.run_range(i) for i in range(layout.num_runs)]
        assert ranges[0][0] == 0 and ranges[-1][1] == num_elements
        assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
        for i, (begin, end) in enumerate(ranges):
            assert 0 <= end - begin <= layout.run_elements
            assert begin == end or begin == i * layout.run_elements
        assert layout.payload_bytes == layout.num_runs * layout.run_bytes


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("world_size", range(1, 9))
def test_bits_an_element(name: str, world_size: int) -> None:
    wire = WireFormat(name)
    bits = 8 * wire.code_bytes(wire.block_size) / wire.block_size
    must = {8: 8.13, 4: 4.13}.get(bits, bits * 1.01)
    if not wire.has_element_codes:
        must = wire.bits_per_element * (1.08 if wire.is_sparse else 1.04)
    for num_elements in (1 << 20, (1 << 20) + 1, 1_500_007, 25_000_001, 1 << 28):
        wire_bytes = wire.code_bytes(num_elements)
        for num_chunks in {1, max(1, wire_bytes // (1 << 20))}:  # chunks of 1 MiB and more
            layout = Layout.plan(num_elements, world_size, num_chunks, wire)
            bits = 8 * layout.payload_bytes / num_elements
            assert wire.bits_per_element <= bits + 1e-9 and bits <= must


def test_known_layout() -> None:
    layout = Layout.plan(1000, 2, 1, WireFormat("int8", 256))
    assert (layout.run_elements, layout.run_bytes, layout.payload_bytes) == (512, 528, 1056)
    assert [layout.run_range(i) for i in range(2)] == [(0, 512), (512, 1000)]
    layout = Layout.plan(33, 2, 2, WireFormat("int4", 32))
    assert (layout.run_elements, layout.run_bytes) == (32, 32)
    assert [layout.run_range(i) for i in range(4)] == [(0, 32), (32, 33), (33, 33), (33, 33)]
    assert WireFormat("bf16").run_bytes(256) == 512
    assert WireFormat("int8").bits_per_element == 8.0625
    assert WireFormat("e3m0", 32).bits_per_element == 4.5
    assert WireFormat("fp32").bits_per_element == 32
    assert WireFormat("int2r").bits_per_element == 2.0625
    assert WireFormat("int1r").bits_per_element == 1.0625
    subs = [WireFormat(f"sub{f}").bits_per_element for f in (2, 4, 8, 16)]
    assert subs == [0.515625, 0.265625, 0.140625, 0.078125]
    tops = [WireFormat(f"topk{k}").bits_per_element for k in (32, 64, 128, 256)]
    assert tops == [0.08203125, 0.14453125, 0.25390625, 0.44140625]
    # The key and two scales, rounded up to 16 bytes, and two codes of 64 bytes.
    assert WireFormat("int2r").run_bytes(512) == 16 + 128
    assert WireFormat("sub16").run_bytes(5 * 1024) == 32 + 48


def test_empty_fragment_has_empty_runs() -> None:
    layout = Layout.plan(0, 3, 2, WireFormat())
    assert all(layout.run_range(i) == (0, 0) for i in range(6))


def test_parse() -> None:
    assert parse("fp8_e4m3", 64) == WireFormat("fp8_e4m3", 64)
    wire = WireFormat("int4", 32)
    assert parse(wire) is wire and parse(wire, 32) is wire
    assert type(parse("int8", np.int64(64)).block_size) is int
    with pytest.raises(ValueError, match="block_size=256 is not that of wire=WireFormat"):
        parse(wire, 256)


def test_errors_name_the_value_and_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"unknown wire 'int2': it must be one of fp32, .*, e3m0"):
        parse("int2")
    with pytest.raises(ValueError, match=r"block_size must be one of 32, .*, 1024, got 100"):
        WireFormat("int8", 100)
    for none in (0, False):
        with pytest.raises(ValueError, match=f"block_size must be one of 32, .*, got {none}"):
            parse("int8", none)
    with pytest.raises(ValueError, match="wire sub8 has blocks of 1024, got block_size=256"):
        parse("sub8", 256)
    with pytest.raises(ValueError, match="wire int2r has a code for a block"):
        _ = WireFormat("int2r").code_bits
    with pytest.raises(ValueError, match="wire int2r has no code for one element"):
        _ = WireFormat("int2r").qmax
    with pytest.raises(TypeError, match=r"wire must be a name or a WireFormat, got int"):
        parse(8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wire fp32 has no scales"):
        _ = WireFormat("fp32").qmax
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        Layout.plan(10, 0, 1, WireFormat())
    with pytest.raises(ValueError, match="num_chunks must be at least 1, got 0"):
        Layout.plan(10, 1, 0, WireFormat())
    with pytest.raises(ValueError, match="multiple of the block size 256, got 100"):
        Layout(10, 1, 100, WireFormat())
    with pytest.raises(ValueError, match="2 runs of 256 elements cannot hold 513 elements"):
        Layout(513, 2, 256, WireFormat())
    with pytest.raises(ValueError, match="num_elements must not be negative, got -1"):
        Layout.plan(-1, 1, 1, WireFormat())
    with pytest.raises(IndexError, match="run 2 of a layout with 2 runs"):
        Layout.plan(10, 2, 1, WireFormat()).run_range(2)


def test_rng_keys_differ_and_are_signed_64_bit() -> None:
    parts = (0, 1, -1, 2, 1 << 40), range(8), (0, 1), range(20), range(5)
    keys = {rng_key(*part) for part in itertools.product(*parts)}
    assert len(keys) == 5 * 8 * 2 * 20 * 5
    assert all(-(1 << 63) <= key < 1 << 63 for key in keys)
    # Half of the keys have any given bit set, within five standard deviations.
    for bit in (0, 31, 63):
        ones = sum(key >> bit & 1 for key in keys)
        assert abs(ones - len(keys) / 2) < 5 * (len(keys) / 4) ** 0.5


def test_owners_of_rotated_runs_share_a_key() -> None:
    arguments = (7, 3, 5, 1)  # seed, replica, round, fragment
    for name in ROTATED_WIRES:
        sender, owner = encoding_keys(WireFormat(name), False, *arguments)
        assert sender == rng_key(7, 3, 0, 5, 1) and owner == rng_key(7, 0, 1, 5, 1)
    assert encoding_keys(WireFormat("int8"), False, *arguments) == (0, 0)
    stochastic = encoding_keys(WireFormat("int8"), True, *arguments)
    assert stochastic == (rng_key(7, 3, 0, 5, 1), rng_key(7, 3, 1, 5, 1))


def test_splitmix64_is_the_published_one() -> None:
    assert _splitmix64(0) == 0xE220A8397B1DCDAF
    assert _splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


# --------------------- Every implementation encodes the bytes that an older version put on the wire


SAMPLE = torch.load(Path(__file__).parents[1] / "data" / BYTES, weights_only=True)


@pytest.mark.parametrize("impl", [*CPU_IMPLS, "reference"])
@pytest.mark.parametrize(("wire", "rounding"), FORMS)
def test_bytes_of_an_older_version(wire: str, rounding: str, impl: str) -> None:
    payload = encoded(SAMPLE["values"], wire, rounding, impl)
    expected = SAMPLE["payloads"][f"{wire} {rounding}"]
    assert payload.shape == expected.shape
    assert (payload != expected).nonzero().flatten().tolist() == [], "places of other bytes"


def test_the_sample_has_every_wire() -> None:
    assert "a4c5881" in SAMPLE["made_with"]
    assert sorted(SAMPLE["payloads"]) == sorted(" ".join(form) for form in FORMS)
    assert len(FORMS) == len(WIRES) + len(ELEMENT_WIRES)
    coded = [wire for wire in ELEMENT_WIRES if wire != "fp32"]
    for wire in coded:
        both = [SAMPLE["payloads"][f"{wire} {rounding}"] for rounding in ("nearest", "stochastic")]
        assert not torch.equal(*both), wire
