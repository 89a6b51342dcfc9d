"""When a result is applied, and from which payloads: the policy behind ``overlap=``.

A policy answers three questions about one exchange: how many inner steps after its send it is
applied, what share of the local value survives the merge, and which payloads with which
coefficients make the outer gradient. It holds no state of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .exchange import Outcome


class Overlap(ABC):
    """Base of the policies; plain values that all replicas must share."""

    @abstractmethod
    def delay(self, sync_every: int) -> int:
        """Return the inner steps between the send of a fragment and the apply of its result."""

    @property
    def alpha(self) -> float:
        """Weight of the local value in the merge: alpha*local + (1-alpha)*outer."""
        return 0.0

    def terms(self, outcome: Outcome) -> list[tuple[Tensor, float]]:
        """Return the payloads and coefficients whose sum is the outer gradient."""
        return outcome.terms

    def config(self) -> dict[str, Any]:
        """Return class and arguments as JSON types."""
        return {"name": type(self).__name__, **self.__dict__}


@dataclass(frozen=True)
class Blocking(Overlap):
    """Wait for every exchange in the step that sends it (DiLoCo, arXiv 2311.08105, Alg. 1)."""

    def delay(self, sync_every: int) -> int:
        return 0


OVERLAPS: dict[str, type[Overlap]] = {"Blocking": Blocking}


def make_overlap(overlap: Overlap | str | dict[str, Any] | None) -> Overlap:
    """Turn the argument ``overlap`` into a policy; None is ``Blocking()``.

    Raises:
        ValueError: If it names no policy of this package.
        TypeError: If it is no policy at all.
    """
    if overlap is None:
        return Blocking()
    if isinstance(overlap, Overlap):
        return overlap
    if isinstance(overlap, dict):
        arguments = dict(overlap)
        return _policy(arguments.pop("name", None))(**arguments)
    if isinstance(overlap, str):
        return _policy(overlap)()
    raise TypeError(
        f"unknown overlap {overlap!r}: it must be one of {', '.join(OVERLAPS)}, e.g. Blocking()"
    )


def _policy(name: Any) -> type[Overlap]:
    for known, policy in OVERLAPS.items():
        if isinstance(name, str) and name.lower() == known.lower():
            return policy
    raise ValueError(f"unknown overlap {name!r}: it must be one of {', '.join(OVERLAPS)}")
