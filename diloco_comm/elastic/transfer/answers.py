"""What donors say of themselves, checked: any JSON is allowed as input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...ops.wire import WireFormat
from ...rounds.round_log import LoggedRound, Standing


@dataclass(frozen=True)
class Status:
    """Where a donor is.

    Attributes:
        standings: Of each fragment.
        log: Logged rounds by fragment and number.
        num_newcomers: That copy from this donor now.
    """

    standings: tuple[Standing, ...]
    log: Mapping[tuple[int, int], LoggedRound]
    num_newcomers: int

    @classmethod
    def read(cls, numbers: Mapping[str, Any], num_fragments: int) -> Status:
        """Return the status that a donor has sent.

        Raises:
            ValueError: If it is none.
        """
        try:
            standings = tuple([_standing(*one) for one in numbers["fragments"]])
            entries = [_logged(*one) for one in numbers["log"]]
            num_newcomers = int(numbers["num_newcomers"])
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"a donor's status cannot be read: {error}") from None
        if len(standings) != num_fragments:
            raise ValueError(f"a donor has {len(standings)} fragments, expected {num_fragments}")
        log = {(entry.fragment, entry.number): entry for entry in entries}
        return cls(standings, log, num_newcomers)


def _standing(round: Any, history: Any, num_steps: Any) -> Standing:
    return Standing(_count(round), _count(history), _count(num_steps))


def _logged(
    fragment: Any,
    number: Any,
    before: Any,
    after: Any,
    num_steps: Any,
    outer_lr: Any,
    coefficients: Any,
    num_runs: Any,
    run_elements: Any,
    wire: Any,
    block_size: Any,
    num_bytes: Any,
) -> LoggedRound:
    form = WireFormat(wire, _count(block_size))
    return LoggedRound(
        _count(fragment),
        _count(number),
        _count(before),
        _count(after),
        _count(num_steps),
        float(outer_lr),
        tuple([float(one) for one in coefficients]),
        _count(num_runs),
        _count(run_elements),
        form.name,
        form.block_size,
        _count(num_bytes),
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"a whole number is expected, got {value!r}")
    return value
