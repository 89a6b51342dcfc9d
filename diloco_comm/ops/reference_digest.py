"""The digest of bytes in plain PyTorch and plain integers.

The definition is in docs/developers/wire-formats.md. Imports torch, nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 0x9E3779B97F4A7C15
FACTOR = 0xBF58476D1CE4E5B9
SHIFT = 29
MASK64 = (1 << 64) - 1


def _signed(number: int) -> int:
    """Return the int64 that has the bits of a number mod 2^64."""
    number &= MASK64
    return number - (1 << 64) if number >> 63 else number


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift int64 words to the right and fill up with zeros."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor as int64 words, the last filled up with zero bytes."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.uint8, device=tensor.device)
    padded[: flat.numel()] = flat
    return padded.view(torch.int64)


def products(words: Tensor, first_word: int = 0) -> Tensor:
    """Return the terms of consecutive int64 words [..., n] in the sum of products."""
    index = torch.arange(words.shape[-1], dtype=torch.int64, device=words.device)
    u = words ^ ((index + (first_word + 1)) * _signed(STEP))
    v = (u ^ _shifted(u, SHIFT)) * _signed(FACTOR)
    high = _shifted(v, 32)
    return ((v ^ high) & 0xFFFFFFFF) * high


def digest(tensor: Tensor, sums: Tensor, first_word: int = 0, max_blocks: int = 0) -> None:
    """Add the sum of products and the sum of words of a tensor's bytes to ``sums``."""
    words = _words(tensor)
    sums += torch.stack([products(words, first_word).sum(), words.sum()])


def mix(z: int) -> int:
    """Scramble a 64-bit number: the finaliser of splitmix64."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def finish_digest(product: int, sum: int, num_bytes: int) -> int:
    """Return the digest of ``num_bytes`` bytes from their two sums mod 2^64."""
    return mix((product & MASK64) ^ mix((sum & MASK64) ^ mix(num_bytes)))
