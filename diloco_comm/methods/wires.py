"""Which wire each parameter has: one for all, or one for each group of names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ops.wire import ELEMENT_WIRES, WireFormat, parse
from ..ops.wire_options import check_training

REST = "rest"


@dataclass(frozen=True)
class Wires:
    """The wires of groups of parameters, in the order in which their patterns are tried.

    Attributes:
        groups: Pattern and wire of each group. A pattern is a regular expression that is searched
            in a parameter's name; ``"rest"`` takes the names that no other pattern has matched.
    """

    groups: tuple[tuple[str, WireFormat], ...]

    @classmethod
    def parse(cls, wire: Any, block_size: int | None = None) -> Wires:
        """Read one wire for all parameters, or a mapping of patterns to names of wires.

        Args:
            wire: A name, a ``WireFormat``, or a mapping whose last key may be ``"rest"``.
            block_size: Elements that share a scale, in the wires that leave the choice; None is
                each wire's own size.

        Raises:
            ValueError: If a name, a pattern or the block size cannot be, or ``"rest"`` is not last.
            TypeError: If ``wire`` is none of these.
        """
        if isinstance(wire, Wires):
            return wire
        if wire == "auto":
            raise ValueError(
                "wire='auto' is no wire: a DiLoCo does not know the link. Let `diloco-comm plan "
                "--wire auto --gbps ... --write FILE` choose one, and give config=FILE"
            )
        if not isinstance(wire, str | WireFormat | Mapping):
            raise TypeError(
                "wire must be a name, a WireFormat, or a mapping of patterns to names, got "
                f"{type(wire).__name__}"
            )
        if not isinstance(wire, Mapping):
            return cls(((REST, parse(wire, block_size)),))
        if not wire:
            raise ValueError("wire={} names no wire: give a pattern and a wire, or a wire alone")
        for pattern, name in wire.items():
            _check_group(pattern, name)
        if REST in list(wire)[:-1]:
            raise ValueError(
                f"'rest' must be the last key of wire, got {list(wire)}: it takes the names that "
                "no key before it has matched"
            )
        groups = tuple((p, _wire_of(p, name, block_size)) for p, name in wire.items())
        if block_size is not None and block_size not in {form.block_size for _, form in groups}:
            raise ValueError(
                f"block_size={block_size!r} goes with none of the wires {list(wire.values())}, "
                "whose blocks have one size: leave it out"
            )
        return cls(groups)

    @property
    def single(self) -> WireFormat | None:
        """The wire of all parameters; None where groups have wires of their own."""
        return self.groups[0][1] if [pattern for pattern, _ in self.groups] == [REST] else None

    def config(self) -> str | dict[str, str]:
        """Return the names in the form that ``parse`` takes."""
        single = self.single
        return single.name if single else {pattern: wire.name for pattern, wire in self.groups}

    def check(self, *, rounding: str, error_feedback: bool) -> None:
        """Raise ValueError if an option does not go together with one of the wires."""
        for pattern, wire in self.groups:
            try:
                check_training(wire, rounding=rounding, error_feedback=error_feedback)
            except ValueError as error:
                if self.single:
                    raise
                raise ValueError(f"wire of {pattern!r}: {error}") from None

    def group_of(self, name: str) -> int:
        """Return the index of a parameter's group: that of the first pattern that matches.

        Raises:
            ValueError: If no pattern matches.
        """
        for index, (pattern, _) in enumerate(self.groups):
            if pattern == REST or re.search(pattern, name):
                return index
        raise ValueError(
            f"parameter {name!r} is matched by no key of wire, which are "
            f"{[pattern for pattern, _ in self.groups]}: add 'rest' as the last one"
        )

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError if a pattern takes none of the names, or a name has no pattern."""
        taken = {self.group_of(name) for name in names}
        for index, (pattern, _) in enumerate(self.groups):
            if index not in taken and pattern != REST:
                raise ValueError(
                    f"{pattern!r} in wire matches no parameter that an earlier key has not taken; "
                    f"the first parameter is {names[0]!r}"
                )


def _wire_of(pattern: str, name: str, block_size: int | None) -> WireFormat:
    try:
        return parse(name, block_size if name in ELEMENT_WIRES else None)
    except ValueError as error:
        raise ValueError(f"wire of {pattern!r}: {error}") from None


def _check_group(pattern: Any, name: Any) -> None:
    if not isinstance(pattern, str) or not isinstance(name, str):
        raise TypeError(
            f"wire must map patterns to names of wires, both strings, got {pattern!r}: {name!r}"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} in wire is no regular expression: {error}") from None
