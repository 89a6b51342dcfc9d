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
        last: The number by which the donor knows the last round of the log.
        num_newcomers: That copy from this donor now.
    """

    standings: tuple[Standing, ...]
    log: Mapping[tuple[int, int], LoggedRound]
    last: int
    num_newcomers: int

    @classmethod
    def read(
        cls, numbers: Mapping[str, Any], num_fragments: int, before: Status | None = None
    ) -> Status:
        """Return the status that a donor has sent.

        Args:
            before: The donor's last status, which has the rounds that this one leaves out.

        Raises:
            ValueError: If it is none.
        """
        try:
            fragments = [tuple(map(_count, one)) for one in numbers["fragments"]]
            standings = tuple([Standing(*one) for *one, _ in fragments])
            lowest = [one[-1] for one in fragments]
            entries = [_logged(*one) for one in numbers["log"]]
            counts = _count(numbers["last"]), _count(numbers["num_newcomers"])
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"a donor's status cannot be read: {error}") from None
        if len(standings) != num_fragments:
            raise ValueError(f"a donor has {len(standings)} fragments, expected {num_fragments}")
        log = {} if before is None else dict(before.log)
        log |= {(entry.fragment, entry.number): entry for entry in entries}
        kept = {
            key: entry
            for key, entry in log.items()
            if key[0] < num_fragments and key[1] >= lowest[key[0]]
        }
        return cls(standings, kept, *counts)


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
