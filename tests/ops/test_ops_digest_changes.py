"""Changes that happen between replicas give another digest, however small they are."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import pytest
import torch
from test_ops_digest import random_bytes
from torch import Tensor

from diloco_comm.ops import reference as reference_digest
from diloco_comm.ops.digests import each_digest

# --------------------------------------------------------------------- changes that must be seen


def check_all_different(tensors: Iterable[Tensor]) -> None:
    digests = each_digest(list(tensors))
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("count", [1, 8, 61, 200])
def test_each_bit_counts(count: int) -> None:
    data = random_bytes(count)
    flipped = data.repeat(8 * count, 1)
    for bit in range(8 * count):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    check_all_different([data, *flipped])


def test_each_two_bits_count() -> None:
    for data in (torch.zeros(16, dtype=torch.uint8), random_bytes(16)):
        flipped = [data]
        for bits in combinations(range(128), 2):
            flipped.append(data.clone())
            for bit in bits:
                flipped[-1][bit // 8] ^= 1 << bit % 8
        check_all_different(flipped)


def test_swapped_words_and_blocks() -> None:
    for width in (1, 2, 16, 512):
        rows = torch.randn(12, 2 * width, generator=torch.Generator().manual_seed(width))
        swapped = [rows]
        for i, j in combinations(range(12), 2):
            swapped.append(rows.clone())
            swapped[-1][[i, j]] = rows[[j, i]]
        check_all_different(swapped)


def test_zeros_constants_and_lengths() -> None:
    constants = (0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, float("inf"), float("nan"))
    sized = [torch.full((n,), x) for x in constants for n in range(1, 130)]
    check_all_different([torch.zeros(0), *sized])
    check_all_different([torch.zeros(n, dtype=torch.uint8) for n in range(300)])
    check_all_different([torch.full((n,), 255, dtype=torch.uint8) for n in range(300)])


def test_signs() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    pairs = torch.stack([x, -x], 1)
    both = torch.cat([x, -x])
    halves = torch.cat([x[:2048], -x[2048:]])
    check_all_different([x, -x, x.abs(), -x.abs(), x.flip(0), -x.flip(0), halves, -halves])
    check_all_different([pairs, -pairs, both, -both, pairs.abs(), both.abs(), -pairs.abs()])
    check_all_different([each.bfloat16() for each in (pairs, -pairs, both, -both)])
    check_all_different([each.double() for each in (pairs, -pairs, both, -both)])


FLIPS = {
    "sign of the second float": 1 << 63,
    "sign of the first float": 1 << 31,
    "signs of both floats": 1 << 63 | 1 << 31,
    "signs of four halves": 0x8000_8000_8000_8000,
    "last bit": 1,
    "last bit of the second float": 1 << 32,
    "an exponent": 1 << 55,
}


def changes(words: Tensor, flip: int) -> Tensor:
    """By how much a flip in each of consecutive words changes the sum of products."""
    signed = flip - (1 << 64) if flip >> 63 else flip
    return reference_digest.products(words ^ signed) - reference_digest.products(words)


@pytest.mark.parametrize("flip", FLIPS.values(), ids=FLIPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flips_in_two_words_never_cancel(dtype: torch.dtype, flip: int) -> None:
    """In tensors of zeros, of ones and of weights.

    With a plain product of the halves a flip of an upper bit would change it by a multiple of
    2^31: among this many words of weights some changes would be equal or opposite.
    """
    n = (1 << 21) // dtype.itemsize
    weights = torch.randn(n, generator=torch.Generator().manual_seed(1))
    for tensor in (torch.zeros(n), torch.ones(n), weights):
        change = changes(tensor.to(dtype).view(torch.int64), flip)
        both = torch.cat([change, -change]).unique()
        assert both.numel() == 2 * change.numel()


@pytest.mark.parametrize("flip", FLIPS.values(), ids=FLIPS)
def test_flips_in_four_words_never_cancel(flip: int) -> None:
    """Words i, i + a, i + b and i + a + b of a tensor of zeros.

    With keys in arithmetic progression and a plain product one such set in nine cancelled.
    """
    change = changes(torch.zeros(1 << 15, dtype=torch.int64), flip)
    rng = torch.Generator().manual_seed(1)
    i, a, b = torch.randint(1, 10_000, (3, 200_000), generator=rng)
    total = change[i] + change[i + a] + change[i + b] + change[i + a + b]
    assert total.count_nonzero() == total.numel()


def families(rows: int, num_words: int) -> dict[str, Tensor]:
    """Random tensors, one a row, that differ by one kind of change each."""
    rng = torch.Generator().manual_seed(1)

    def chosen(share: float) -> Tensor:
        return torch.rand(rows, 2 * num_words, generator=rng) < share

    few = torch.tensor([1.0, -1.0, 0.0, 2.0])[torch.randint(0, 4, (2 * num_words,), generator=rng)]
    blocks = torch.randn(8, 2 * num_words // 8, generator=rng)
    blocks[:, ::2] = 0.0
    orders = torch.rand(rows, 8, generator=rng).argsort()
    spread = torch.rand(rows, 2 * num_words, generator=rng).argsort()
    return {
        "signs of zeros": torch.where(chosen(0.02), -0.0, 0.0),
        "signs of ones": torch.where(chosen(0.5), -1.0, 1.0),
        "zeros and ones": chosen(0.01).float(),
        "last bits of ones": torch.where(chosen(0.5), 1.0 + 2**-23, 1.0),
        "few values in any order": few[spread],
        "blocks in any order": blocks[orders].flatten(1),
    }


@pytest.mark.parametrize("name", families(1, 8))
def test_each_half_of_the_sum_of_products_tells_tensors_apart(name: str) -> None:
    """By chance less than one pair in 6000 tensors has equal halves; a plain product has many."""
    words = families(6000, 128)[name].view(torch.int64).unique(dim=0)
    total = reference_digest.products(words).sum(-1)
    for half in (total & 0xFFFFFFFF, total >> 32):
        assert half.unique().numel() >= len(words) - 1
