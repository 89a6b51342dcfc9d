"""Options that a wire does not go together with, and why."""

from __future__ import annotations

from .wire import WireFormat


def check_options(
    wire: WireFormat, *, rounding: str = "nearest", error_feedback: bool = False
) -> None:
    """Check how values are rounded, and whether rounding errors are kept.

    Raises:
        ValueError: For stochastic rounding on a rotated wire, and for error feedback on one with
            less than two bits.
    """
    if not wire.is_rotated:
        return
    if rounding != "nearest":
        raise ValueError(
            f"rounding={rounding!r} does not go with wire {wire.name!r}, whose random signs make "
            "its errors random already: leave rounding='nearest'"
        )
    if error_feedback and wire.name != "int2r":
        raise ValueError(
            f"error_feedback=True does not go with wire {wire.name!r}: elements above its one "
            "level would pile up in the residual, and training gets worse by it; leave it out (the "
            "errors are unbiased and independent from round to round), or take wire 'int2r' or "
            "'int4'"
        )
