"""The sparse wires for Triton: the largest elements of a block (``csrc/wire/sparse.h``).

A tile is one block. Its elements are divided into *groups* of sixteen, and each group has one word:
for each element a bit that says whether it is kept, and a bit for its sign. Words are made of a
tile by a sum, and a tile of words by a gather. All other vectors are short, at most 512 entries:
one for each kept element, group or *bucket* (elements whose indices have the same high bits).
Triton can gather in shared memory, but scatter only in global memory. So nothing is scattered: the
positions of kept elements are found by search.

``blocks.py`` explains FORM and ``part``. Functions cannot return constants up to Triton 3.6, so
each function computes the number of kept elements again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import bf16_bits, bits_float, float_bits, magnitude_bits
from .rotation import received_scale

BLOCK = tl.constexpr(4096)
_GROUP = tl.constexpr(16)  # elements of a group
_GROUPS = tl.constexpr(256)
_LARGEST_GOOD = tl.constexpr(0x7E800000)


@triton.jit
def _first_above(ascending, wanted, LOG_SIZE: tl.constexpr):
    """For each wanted number, the first index at which ``ascending`` is above the number.

    ``ascending`` has 2^LOG_SIZE entries. If none is above the number, the last index.
    """
    place = wanted * 0
    for i in tl.static_range(LOG_SIZE):
        step = 1 << (LOG_SIZE - 1 - i)
        is_behind = tl.gather(ascending, place + (step - 1), 0) <= wanted
        place = tl.where(is_behind, place + step, place)
    return place


@triton.jit
def _is_negative(number):
    """1 for negative numbers, else 0, from the sign bit.

    LLVM would compile sums of comparisons to more instructions.
    """
    return (number.to(tl.uint32) >> 31).to(tl.int32)


@triton.jit
def _count(key, border):
    """The number of keys that are at least the border."""
    return -tl.sum(_is_negative(key - border), axis=None) + BLOCK


@triton.jit
def _which_kept(key, border, last):
    """1 for keys above the border, and up to index ``last`` for keys equal to it; else 0."""
    index = tl.arange(0, BLOCK)[None, :]
    return 1 - _is_negative(key - border - _is_negative(last - index))


@triton.jit
def _find_border(key, largest, KEPT: tl.constexpr):
    """Find the ``border`` and ``last`` with which ``_which_kept`` keeps the KEPT largest keys.

    Among equal keys, lower indices are kept. The search ends as soon as exactly KEPT keys reach the
    border, after about twelve counts for data without equal keys, and after at most 51.
    """
    # A key is the bits of an fp32 magnitude, so 1 << 23 is one step of the exponent, a factor of 2.
    # Fewer than KEPT keys reach ``upper``, and at least KEPT reach ``lower``. ``lower`` first goes
    # down from the largest key by factors of 2, 4, 16 and so on; then the two are bisected.
    step = 1 << 23
    upper = largest + 1
    lower = tl.maximum(largest - step, 0)
    count = _count(key, lower)
    while count < KEPT:
        upper = lower
        step = step * 2
        lower = tl.maximum(lower - step, 0)
        count = _count(key, lower)
    while (count != KEPT) & (upper - lower > 1):
        middle = lower + ((upper - lower) >> 1)
        found = _count(key, middle)
        is_reached = found >= KEPT
        lower = tl.where(is_reached, middle, lower)
        count = tl.where(is_reached, found, count)
        upper = tl.where(is_reached, upper, middle)
    # If more than KEPT keys reach ``lower``, it is the least kept key, and only some keys equal to
    # it are kept, up to an index between ``first`` and ``last``: bisect this index.
    last = lower * 0 + (BLOCK - 1)
    first = tl.where(count == KEPT, last, 0)
    while first < last:
        middle = (first + last) >> 1
        is_reached = tl.sum(_which_kept(key, lower, middle), axis=None) >= KEPT
        last = tl.where(is_reached, middle, last)
        first = tl.where(is_reached, first, middle + 1)
    return lower, last


@triton.jit
def _kept_elements(kept, sign, KEPT: tl.constexpr):
    """The indices of the kept elements, ascending, and their signs, int32 [KEPT] both."""
    lane = tl.arange(0, _GROUP)[None, :]
    kept = tl.reshape(kept, [_GROUPS, _GROUP])
    sign = tl.reshape(sign, [_GROUPS, _GROUP])
    # All these bits differ, so the sum is their union.
    words = tl.sum((kept << lane) | ((kept & sign) << (lane + 16)), axis=1)
    # Count the set bits of the words' lower halves: in pairs of bits, then in fours, then in all.
    sizes = (words & 0x5555) + ((words >> 1) & 0x5555)
    sizes = (sizes & 0x3333) + ((sizes >> 2) & 0x3333)
    sizes = (((sizes & 0x0F0F) + ((sizes >> 4) & 0x0F0F)) * 0x0101 >> 8) & 0x1F
    ends = tl.cumsum(sizes, axis=0)
    j = tl.arange(0, KEPT)
    group = _first_above(ends, j, 8)
    rank = j - tl.gather(ends - sizes, group, 0)
    word = tl.gather(words, group, 0)
    left = word & 0xFFFF
    for i in range(0, tl.max(rank, axis=0)):
        left = tl.where(i < rank, left & (left - 1), left)  # clears the lowest set bit
    # The index of the lowest set bit is the exponent of its value as a float.
    place = ((float_bits((left & -left).to(tl.float32)) >> 23) - 127).to(tl.int32)
    return group * _GROUP + place, (word >> (place + 16)) & 1


@triton.jit
def _store_code(index, sign, is_sent, code_ptr, WIRE: tl.constexpr):
    """Write the code of a block, or zeros if ``is_sent`` is false."""
    LOG_KEPT: tl.constexpr = (
        5 if WIRE == "topk32" else 6 if WIRE == "topk64" else 7 if WIRE == "topk128" else 8
    )
    KEPT: tl.constexpr = 1 << LOG_KEPT
    LOW: tl.constexpr = 12 - LOG_KEPT
    PLANE_BYTES: tl.constexpr = KEPT // 8
    # Write the low bits of the indices, a plane of KEPT bits for each of LOW bits, and the signs.
    eight = tl.arange(0, 8)
    entry = (index & ((1 << LOW) - 1)) | (sign << LOW)
    bits = tl.reshape(entry, [PLANE_BYTES, 8])[:, None, :] >> eight[None, :, None]
    planes = tl.sum((bits & 1) << eight[None, None, :], axis=2)
    region = tl.where(eight == LOW, LOW + 2, eight)
    places = region[None, :] * PLANE_BYTES + tl.arange(0, PLANE_BYTES)[:, None]
    planes = tl.where(is_sent, planes, 0).to(tl.uint8)
    tl.store(code_ptr + places, planes, mask=(eight <= LOW)[None, :])
    # Write the 2 KEPT bits for the high bits of the indices, 32 at a time. All bits of a word
    # differ, so their sum is their union.
    place = (index >> LOW) + tl.arange(0, KEPT)
    word = tl.arange(0, KEPT // 16)
    is_here = (place >> 5)[None, :] == word[:, None]
    upper = tl.sum(tl.where(is_here, (1 << (place & 31))[None, :], 0), axis=1)
    byte = tl.arange(0, 4)[None, :]
    upper = tl.where(is_sent, upper[:, None] >> (8 * byte), 0) & 0xFF
    places = LOW * PLANE_BYTES + word[:, None] * 4 + byte
    tl.store(code_ptr + places, upper.to(tl.uint8))


@triton.jit
def _places(run_ptr, part, WIRE: tl.constexpr):
    """Pointers to the scale and the code of the block."""
    LOG_KEPT: tl.constexpr = (
        5 if WIRE == "topk32" else 6 if WIRE == "topk64" else 7 if WIRE == "topk128" else 8
    )
    CODE_BYTES: tl.constexpr = (1 << LOG_KEPT) // 8 * (15 - LOG_KEPT)
    code_offset, start, _ = part
    block = start // BLOCK
    scale_ptr = run_ptr.to(tl.pointer_type(tl.uint16)) + block
    return scale_ptr, run_ptr + code_offset + block * CODE_BYTES


@triton.jit
def store_largest(x, run_ptr, part, nonfinite_ptr, FORM: tl.constexpr):
    """Encode the block x into its place in a run, and return the block as a receiver decodes it.

    A block with a bad element is sent as zeros; bad elements are counted in ``nonfinite_ptr``. x
    must be 0 for elements that do not exist. ``part`` is described in ``blocks.py``.
    """
    WIRE: tl.constexpr = FORM[2]
    LOG_KEPT: tl.constexpr = (
        5 if WIRE == "topk32" else 6 if WIRE == "topk64" else 7 if WIRE == "topk128" else 8
    )
    KEPT: tl.constexpr = 1 << LOG_KEPT
    key = magnitude_bits(x).to(tl.int32)
    largest = tl.max(key, axis=None)
    is_bad = largest > _LARGEST_GOOD
    if nonfinite_ptr is not None:
        if is_bad:
            num_bad = _count(key, _LARGEST_GOOD + 1).to(tl.int64)
            tl.atomic_add(nonfinite_ptr, num_bad, sem="relaxed")
    # A block with a bad element is sent as zeros, so for it any choice will do.
    largest = tl.minimum(largest, _LARGEST_GOOD)
    border, last = _find_border(key, largest, KEPT)
    kept = _which_kept(key, border, last)
    exponent = tl.maximum((largest >> 23) - 127, -100)
    unit = bits_float((21 + 127 - exponent) << 23)
    # Adding 1.5 * 2^23 leaves no fraction: the sum's low bits are the integer, rounded half to
    # even.
    rounded = float_bits(bits_float(key) * unit + 12582912.0).to(tl.int32) - 0x4B400000
    total = tl.sum(rounded & -kept, axis=None)
    mean = total.to(tl.float32) * (1.0 / KEPT)
    scale = bf16_bits(mean * bits_float((exponent + (127 - 21)) << 23))
    scale = tl.where(is_bad | (scale < 0x0080), 0, scale)
    sign = (float_bits(x) >> 31).to(tl.int32)
    index, signs = _kept_elements(kept, sign, KEPT)
    scale_ptr, code_ptr = _places(run_ptr, part, WIRE)
    if part[2] > 0:
        tl.store(scale_ptr, scale.to(tl.uint16))
        _store_code(index, signs, scale != 0, code_ptr, WIRE)
    # A block with scale 0 decodes to zeros.
    mask = tl.where(scale == 0, 0, -kept)
    return bits_float(((scale << 16).to(tl.int32) | (sign << 31)) & mask)


@triton.jit
def _bits_at(code_ptr, places, num_bits):
    """Load bits of a code, int32, 0 or 1; bits from ``num_bits`` on are 0 and not read."""
    byte = tl.load(code_ptr + places // 8, mask=places < num_bits, other=0).to(tl.int32)
    return (byte >> (places % 8)) & 1


@triton.jit
def _load_words(code_ptr, num_bits, WIRE: tl.constexpr):
    """The words of a block's groups, int32 [_GROUPS], and whether an encoder may write its code.

    Bit 2 i of a word says that element i is kept, and bit 2 i + 1 that it is negative.
    """
    LOG_KEPT: tl.constexpr = (
        5 if WIRE == "topk32" else 6 if WIRE == "topk64" else 7 if WIRE == "topk128" else 8
    )
    KEPT: tl.constexpr = 1 << LOG_KEPT
    LOW: tl.constexpr = 12 - LOG_KEPT
    # A bucket has the 2^LOW elements whose indices have the same high bits. In the code's 2 KEPT
    # bits, each bucket has a 1 for each of its kept elements, and then a 0.
    places = tl.arange(0, 2 * KEPT)
    zeros = tl.cumsum(1 - _bits_at(code_ptr, LOW * KEPT + places, num_bits), axis=0)
    bucket = tl.arange(0, KEPT)
    end = _first_above(zeros, bucket, LOG_KEPT + 1) - bucket
    begin = tl.where(bucket == 0, 0, tl.gather(end, tl.maximum(bucket - 1, 0), 0))
    # The code needs KEPT zeros, and KEPT ones before the last zero.
    is_made = (tl.max(zeros, axis=0) == KEPT) & (tl.max(end, axis=0) == KEPT)
    size = tl.where(is_made, end - begin, 0)
    num_steps = tl.max(size, axis=0)
    entry = _bits_at(code_ptr, (LOW + 2) * KEPT + bucket, num_bits) << 7
    for i in tl.static_range(LOW):
        entry |= _bits_at(code_ptr, i * KEPT + bucket, num_bits) << i
    # Step i handles kept element i of every bucket. Each group does it for its own bucket, and adds
    # the element to its word if the element is in the group.
    place = tl.arange(0, _GROUPS)
    group = place % (_GROUPS // KEPT)
    begin = tl.gather(begin, place // (_GROUPS // KEPT), 0)
    size = tl.gather(size, place // (_GROUPS // KEPT), 0)
    words = group * 0
    last = words - 1
    num_wrong = words
    for i in range(0, num_steps):
        is_here = i < size
        found = tl.gather(entry, tl.minimum(begin + i, KEPT - 1), 0)
        low = found & 127
        num_wrong += (is_here & (low <= last)).to(tl.int32)
        last = tl.where(is_here, low, last)
        bits = (1 | ((found >> 7) << 1)) << (2 * (low % _GROUP))
        words |= tl.where(is_here & (low // _GROUP == group), bits, 0)
    is_made = is_made & (tl.max(num_wrong, axis=0) == 0)
    return words, is_made


@triton.jit
def load_largest(run_ptr, part, FORM: tl.constexpr):
    """Decode a block of a run: zeros if it does not exist, NaN if no encoder writes such a code."""
    exists = part[2] > 0
    scale_ptr, code_ptr = _places(run_ptr, part, FORM[2])
    scale = received_scale(tl.load(scale_ptr, mask=exists, other=0).to(tl.uint32), 1)
    LOG_KEPT: tl.constexpr = (
        5 if FORM[2] == "topk32" else 6 if FORM[2] == "topk64" else 7 if FORM[2] == "topk128" else 8
    )
    BITS: tl.constexpr = (1 << LOG_KEPT) * (15 - LOG_KEPT)
    words, is_made = _load_words(code_ptr, tl.where(exists, BITS, 0), FORM[2])
    # If the scale is 0, the code does not matter.
    kept = tl.where(is_made | (scale == 0), scale, float("nan"))
    other = tl.where(kept == kept, 0.0, kept)
    offsets = tl.arange(0, BLOCK)
    bits = tl.gather(words, offsets // _GROUP, 0) >> (2 * (offsets % _GROUP))
    value = bits_float(float_bits(kept) ^ ((bits & 2) << 30).to(tl.uint32))
    value = tl.where((bits & 1) != 0, value, other)
    return tl.reshape(tl.where(scale == 0, 0.0, value), [1, BLOCK])
