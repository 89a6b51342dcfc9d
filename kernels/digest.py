"""digest for Triton: two sums over the 64-bit words of a tensor (``csrc/wire/digest.h``)."""

from __future__ import annotations

import triton
import triton.language as tl

STEP: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
FACTOR: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
TILE = 4096  # words that one program adds at a time


def batch_words(unit: int) -> int:
    """Return how many words a program loads at once, if the address is a multiple of ``unit``."""
    return 1024 if unit == 8 else 256


@triton.jit
def _product(word, key):
    """For each word with its key, the number that is added to the sum of products."""
    u = word ^ key
    v = (u ^ (u >> 29)) * FACTOR
    high = (v >> 32).to(tl.uint32)
    low = v.to(tl.uint32) ^ high
    return low.to(tl.uint64) * high.to(tl.uint64)


@triton.jit
def _load_words(data_ptr, index, mask, UNIT: tl.constexpr, FULL: tl.constexpr):
    """Load words as uint64 from an address that is a multiple of UNIT bytes."""
    if UNIT == 8:
        pointer = data_ptr.to(tl.pointer_type(tl.uint64)) + index
        word = tl.load(pointer) if FULL else tl.load(pointer, mask=mask, other=0)
    else:
        unit_type: tl.constexpr = tl.uint32 if UNIT == 4 else (tl.uint16 if UNIT == 2 else tl.uint8)
        place = tl.arange(0, 8 // UNIT)[None, :]
        offsets = index[:, None] * (8 // UNIT) + place
        pointer = data_ptr.to(tl.pointer_type(unit_type)) + offsets
        unit = tl.load(pointer, mask=mask[:, None], other=0).to(tl.uint64)
        word = tl.sum(unit << (place * (8 * UNIT)).to(tl.uint64), axis=1)
    return word


@triton.jit
def _sum_tile(
    data_ptr,
    first,
    first_word,
    num_whole,
    TILE: tl.constexpr,
    BATCH: tl.constexpr,
    UNIT: tl.constexpr,
    FULL: tl.constexpr,
):
    """The two sums over TILE words from ``first`` on; unless FULL, words below ``num_whole``."""
    products = tl.zeros([BATCH], tl.uint64)
    words = tl.zeros([BATCH], tl.uint64)
    index = first + tl.arange(0, BATCH)
    key = (index + first_word + 1).to(tl.uint64) * STEP
    for _ in range(TILE // BATCH):
        mask = index < num_whole
        word = _load_words(data_ptr, index, mask, UNIT, FULL)
        product = _product(word, key)
        products += product if FULL else tl.where(mask, product, 0)
        words += word
        index += BATCH
        key += (BATCH * STEP) & 0xFFFFFFFFFFFFFFFF
    return tl.sum(products, axis=0), tl.sum(words, axis=0)


@triton.jit
def _sum_at(
    data_ptr,
    first,
    first_word,
    num_bytes,
    TILE: tl.constexpr,
    BATCH: tl.constexpr,
    UNIT: tl.constexpr,
):
    """The two sums over the tile that begins with word ``first``; it may be the last tile."""
    num_whole = num_bytes // 8
    if first + TILE <= num_whole:
        product, total = _sum_tile(data_ptr, first, first_word, num_whole, TILE, BATCH, UNIT, True)
    else:
        product, total = _sum_tile(data_ptr, first, first_word, num_whole, TILE, BATCH, UNIT, False)
        byte = tl.arange(0, 8)
        num_left = num_bytes - num_whole * 8
        if num_left > 0:
            value = tl.load(data_ptr + num_whole * 8 + byte, mask=byte < num_left, other=0)
            last_word = tl.sum(value.to(tl.uint64) << (byte * 8).to(tl.uint64), axis=0)
            last_key = (num_whole.to(tl.int64) + first_word + 1).to(tl.uint64) * STEP
            product += _product(last_word, last_key)
            total += last_word
    return product, total


# Adds the sum of products to sums[0] and the sum of words to sums[1]. Reads each byte once. A
# program takes one tile, or with IS_BOUNDED every n-th tile of n programs, and adds to `sums` once.
@triton.jit(do_not_specialize=["num_bytes", "first_word"])
def _digest_kernel(
    data_ptr,
    sums_ptr,
    num_bytes,
    first_word,
    TILE: tl.constexpr,
    BATCH: tl.constexpr,
    UNIT: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TILE
    product, total = _sum_at(data_ptr, first, first_word, num_bytes, TILE, BATCH, UNIT)
    if IS_BOUNDED:
        first += tl.num_programs(0).to(tl.int64) * TILE
        while first * 8 < num_bytes:
            more = _sum_at(data_ptr, first, first_word, num_bytes, TILE, BATCH, UNIT)
            product += more[0]
            total += more[1]
            first += tl.num_programs(0).to(tl.int64) * TILE
    tl.atomic_add(sums_ptr, product.to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums_ptr + 1, total.to(tl.int64, bitcast=True), sem="relaxed")
