"""Options that a wire does not go together with, and why."""

from __future__ import annotations

from .wire import WireFormat


def check_options(
    wire: WireFormat, *, rounding: str = "nearest", error_feedback: bool = False
) -> None:
    """Check how values are rounded, and whether rounding errors are kept.

    Raises:
        ValueError: For stochastic rounding on a wire without a code for each element, and for error
            feedback on a rotated wire with less than two bits.
    """
    if rounding != "nearest" and not wire.has_element_codes:
        why = (
            "whose random signs make its errors random already"
            if wire.is_rotated
            else "which sends signs alone"
        )
        raise ValueError(
            f"rounding={rounding!r} does not go with wire {wire.name!r}, {why}: leave "
            "rounding='nearest'"
        )
    if error_feedback and wire.is_rotated and wire.name != "int2r":
        raise ValueError(
            f"error_feedback=True does not go with wire {wire.name!r}: elements above its one "
            "level would pile up in the residual, and training gets worse by it; leave it out (the "
            "errors are independent from round to round), or take wire 'int2r' or "
            "'int4'"
        )


def check_training(wire: WireFormat, *, rounding: str, error_feedback: bool) -> None:
    """Check the options of a training run, whose rounds follow one another.

    Raises:
        ValueError: As ``check_options``, and for a sparse wire without error feedback.
    """
    check_options(wire, rounding=rounding, error_feedback=error_feedback)
    if wire.is_sparse and not error_feedback:
        raise ValueError(
            f"wire {wire.name!r} needs error_feedback=True: elements that are not among the "
            "largest of their block would never be sent"
        )
