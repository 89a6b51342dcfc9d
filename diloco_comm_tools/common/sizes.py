"""Sizes in bytes and counts, as they are written on a command line."""

from __future__ import annotations

import math

_BYTES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
# B for billions, as in names of models; G is the suffix of sizes in bytes.
_EXPONENTS = {"k": 3, "m": 6, "b": 9, "t": 12}


def parse_size(text: str) -> int:
    """Read a size in bytes with an optional suffix K, M or G (powers of 1024), as nccl-tests."""
    written = text.strip().lower().removesuffix("ib").removesuffix("b")
    scale = _BYTES.get(written[-1:], 1)
    try:
        return int(float(written.rstrip("kmg")) * scale)
    except (ValueError, OverflowError):
        raise ValueError(f"a size is a number like 4096, 64K, 1M or 1G, got {text!r}") from None


def format_size(size_bytes: int) -> str:
    """Write a size in bytes the way `parse_size` reads it."""
    for suffix, scale in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size_bytes >= scale and size_bytes % scale == 0:
            return f"{size_bytes // scale}{suffix}"
    return str(size_bytes)


def at_least(least: int, **options: float) -> None:
    """Check options, named as arguments are.

    Raises:
        ValueError: If one is less.
    """
    for name, value in options.items():
        if value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def positive(**options: float | None) -> None:
    """Check options, named as arguments are; None is a number that was not given.

    Raises:
        ValueError: If one is not finite and above 0.
    """
    for name, value in options.items():
        if value is not None and not 0 < value < math.inf:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} must be a positive number, got {value:g}")


def not_negative(**options: float) -> None:
    """Check options, named as arguments are.

    Raises:
        ValueError: If one is not finite or below 0.
    """
    for name, value in options.items():
        if not 0 <= value < math.inf:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} must be a number of at least 0, got {value:g}")


def parse_count(option: str, text: str) -> float:
    """Read a count such as 7e9, 350M, 7B or 1.5T; the suffixes K, M, B, T are powers of 1000.

    Args:
        option: The option that has this value, for the error.

    Raises:
        ValueError: If the text is no such count, or the count is not positive.
    """
    written = text.strip().lower()
    exponent = _EXPONENTS.get(written[-1:])
    try:
        # Parsed with its exponent, because a product is rounded: 1.001 * 1000 < 1001 in fp64.
        found = float(written if exponent is None else f"{written[:-1]}e{exponent}")
    except ValueError:
        expected = "a number such as 25e6, 350M, 7B or 1.5T"
        raise ValueError(f"{option} must be {expected}, got {text!r}") from None
    positive(**{option[2:]: found})
    return found
