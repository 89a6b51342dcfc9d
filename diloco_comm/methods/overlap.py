"""When a result is applied, and from which payloads: the policies behind ``overlap=``.

A policy says how long a round may travel, which payloads with which coefficients make the outer
gradient, what happens at a send without a result, and what share of the local value survives. A
policy holds no state of a run: the state is in ``rounds.part.RoundInFlight`` and
``rounds.part.SyncedPart``::

    Blocking    waits for every round in the step that sends it
    Streaming   applies a round ``delay`` inner steps after its send
    Delayed     applies a round when its fragment is sent again, ``rounds`` sends later
    Eager       as Delayed, but applies this replica's own share of a round at its send
    CO2         as Delayed, with a staleness penalty and a clipped momentum
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..base.checks import integer, number
from ..ops.wire import Layout
from .outer import HeavyBall, Nesterov, OuterOptimizer, name_of

Terms = list[tuple[Tensor, float]]
Gap = float | str | Callable[[float, float], float]


@dataclass(frozen=True)
class Own:
    """This replica's payload of a round, and its coefficient in this replica's outer gradient."""

    payload: Tensor
    coefficient: float
    layout: Layout


class Overlap:
    """Base of the policies, which hold plain values only.

    Attributes:
        rounds: A result is due ``rounds`` sends of its fragment after its own send; with 0 the
            result is due ``delay`` inner steps after its send.
        alpha: Weight of the local value in the merge: alpha*local + (1-alpha)*outer.
        first: The rule for a send at which no result can be due yet; see ``Eager``.
        clip: Bound on the elements of the outer momentum, or None.
        inner_lr: A function that returns the present inner learning rate, or None; see ``CO2``.
        is_shared: Whether outer parameters and momentum are the same on all replicas that have
            applied the same rounds.
    """

    rounds: int = 0
    alpha: float = 0.0
    first: str = "zero"
    clip: float | None = None
    inner_lr: Callable[[], float] | None = None
    is_shared: ClassVar[bool] = True
    # Arguments that may differ between replicas.
    private: ClassVar[tuple[str, ...]] = ()

    def steps(self) -> int:
        """Return the inner steps between the send of a fragment and the apply of its result."""
        return 0

    def check(self, sync_every: int, outer: OuterOptimizer) -> None:
        """Raise ValueError if the policy does not go with the schedule or the outer optimizer."""

    def own_coefficient(self, weight: float, weight_sum: float) -> float:
        """Return the coefficient of this replica's own payload in the step that sends it.

        Args:
            weight_sum: Sum of all replicas' weights in the last round that was applied.
        """
        return 0.0

    def gradient(self, mean: Terms, fresh: Own | None, stale: Sequence[Own]) -> Terms:
        """Return the payloads and coefficients whose sum is the outer gradient.

        Args:
            mean: Payloads and coefficients of the round that is due; empty when there is none.
            fresh: The own payload that is sent in this step, or None.
            stale: Own payloads that an earlier step applied as ``fresh``, and that this step takes
                back: of the round that is due, whose mean includes it, and of lost rounds.
        """
        return mean

    @property
    def measures_steps(self) -> bool:
        """Whether ``gap_for`` needs the norms of the outer steps."""
        return False

    def gap_for(self, step_norm: float, largest_norm: float) -> float:
        """Return the staleness gap of a round that is sent now; see ``CO2``."""
        return 1.0

    def current_inner_lr(self) -> float:
        """Return the inner learning rate by which ``CO2`` scales the momentum; 1 without one."""
        return 1.0

    def config(self) -> dict[str, Any]:
        """Return class and arguments as JSON types; a function is shown by its name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        shown = {k: name_of(v) if callable(v) else v for k, v in values.items()}
        return {"name": type(self).__name__, **shown}

    def shared_config(self) -> dict[str, Any]:
        """Return the arguments that all replicas must have in common."""
        return {k: v for k, v in self.config().items() if k not in self.private}

    def private_config(self) -> dict[str, Any]:
        """Return the arguments that may differ between replicas."""
        return {k: v for k, v in self.config().items() if k in self.private}


@dataclass(frozen=True)
class Blocking(Overlap):
    """Wait for every exchange in the step that sends it (DiLoCo, arXiv 2311.08105, Alg. 1)."""


@dataclass(frozen=True)
class Streaming(Overlap):
    """Apply a result a fixed number of inner steps after its send (arXiv 2501.18512, Alg. 2).

    The pseudo-gradient is measured from the last outer value of the fragment, equal on all
    replicas. ``Streaming(0, 0)`` is ``Blocking()``.

    Args:
        delay: Inner steps from send to apply, between 0 and sync_every - 1. Replicas may have
            delays of their own: all send at the same step, each applies at its own.
        alpha: Weight of the local value in the merge; 0 takes the outer value, and so throws away
            the fragment's ``delay`` local steps; 0.5 is the plain average.
    """

    delay: int = 1
    alpha: float = 0.5
    private: ClassVar[tuple[str, ...]] = ("delay",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "delay", integer("delay", self.delay, 0))
        object.__setattr__(self, "alpha", number("alpha", self.alpha))
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be between 0 and 1, got {self.alpha}")

    def steps(self) -> int:
        return self.delay

    def check(self, sync_every: int, outer: OuterOptimizer) -> None:
        if self.delay >= sync_every:
            raise ValueError(
                f"delay must be below sync_every={sync_every}, so that a fragment arrives before "
                f"it is sent again, got {self.delay}"
            )


@dataclass(frozen=True)
class Delayed(Overlap):
    """Apply the mean of a round when its fragment is sent ``rounds`` sends later.

    The "naive delayed" rule of arXiv 2502.12996, there a baseline: theta(t) =
    OuterOpt(theta(t-H), Delta(t-H)). At the first ``rounds`` sends there is no mean: the local
    parameters return to the outer ones, and what they had learned comes with that round's mean.
    """

    rounds: int = 1

    def __post_init__(self) -> None:
        _check_rounds(self)


@dataclass(frozen=True)
class Eager(Overlap):
    """Apply this replica's own share of a round at once, the others' when it arrives.

    Arxiv 2502.12996: u_m(t) = Delta(t-H) + c (Delta_m(t) - Delta_m(t-H)), with c = 1/M for equal
    weights; in general this replica's weight over the sum of weights of the last round that was
    applied. Outer parameters and momentum differ between replicas by what is under way;
    ``DiLoCo.consensus()`` gives their mean.

    Args:
        rounds: Sends until a mean is due, 1 or 2.
        first: The rule for the first ``rounds`` sends; the paper gives no rule for them. "zero"
            takes the absent mean as zero, so the gradient is the own share alone; "skip" takes no
            outer step and leaves the local parameters alone; "sync" waits for the mean and applies
            it. Whichever it is, every pseudo-gradient counts once.
    """

    rounds: int = 1
    first: str = "zero"
    is_shared: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_rounds(self)
        if self.first not in ("zero", "skip", "sync"):
            raise ValueError(f"first must be one of zero, skip, sync, got {self.first!r}")

    def own_coefficient(self, weight: float, weight_sum: float) -> float:
        # Rounded to fp32 as the engine rounds its coefficients: in ``gradient`` the mean's and the
        # stale payload's coefficients then cancel exactly where they are equal.
        return _fp32(weight / weight_sum) if weight_sum > 0 else 0.0

    def gradient(self, mean: Terms, fresh: Own | None, stale: Sequence[Own]) -> Terms:
        added = [] if fresh is None else [(fresh.payload, fresh.coefficient)]
        ended = [(own.payload, -own.coefficient) for own in stale]
        return merge_terms([*mean, *added, *ended])


@dataclass(frozen=True)
class CO2(Overlap):
    """One round late, with a staleness penalty and a clipped momentum (arXiv 2401.16265).

    m = clip(beta*m + Delta(t-1) / (gamma*gap)); x -= lr*gamma*m. Here x are the outer parameters, m
    is the momentum of a ``HeavyBall`` (or ``Nesterov``) with factor beta and rate lr, Delta(t-1) is
    the mean of the round before, and gamma is 1 or the inner learning rate. With the defaults this
    is ``Delayed()``.

    The sources are the authors' code and reviews that quote the paper, which was not at hand:
    docs/explanation/overlap.md says what comes from which.

    Args:
        clip: Bound on each element of the momentum, which is stored clipped; None for no bound.
        gap: A number (1.0, as in the authors' code), "gap-aware", or a function. "gap-aware" is
            1 + n/C, after Barkai et al. 2020, with n the norm of the fragment's last outer step
            when the round is sent and C the largest such norm so far; a function is called with n
            and C, both 0 before the first step. All replicas use the lowest replica's number, which
            travels with the round.
        inner_lr: A function that returns the present inner learning rate gamma, equal on all
            replicas: the momentum then has the scale of gradients, as in SlowMo (arXiv
            1910.00643), and so has the clip. None: gamma is 1, as in the authors' code.
        rounds: Sends until a mean is due, 1 or 2.
    """

    clip: float | None = None
    gap: Gap = 1.0
    inner_lr: Callable[[], float] | None = None
    rounds: int = 1

    def __post_init__(self) -> None:
        _check_rounds(self)
        if self.clip is not None:
            object.__setattr__(self, "clip", number("clip", self.clip, "a number or None"))
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive or None, got {self.clip}")
        if self.inner_lr is not None and not callable(self.inner_lr):
            raise TypeError(f"inner_lr must be a function or None, got {self.inner_lr!r}")
        if isinstance(self.gap, str):
            if self.gap != "gap-aware":
                raise ValueError(
                    f"gap must be a number, 'gap-aware' or a function, got {self.gap!r}"
                )
        elif not callable(self.gap):
            _check_gap(self.gap)

    def check(self, sync_every: int, outer: OuterOptimizer) -> None:
        if self.clip is not None and not isinstance(outer, (HeavyBall, Nesterov)):
            raise ValueError(
                f"clip bounds an outer momentum: outer must be HeavyBall or Nesterov, "
                f"got {type(outer).__name__}"
            )

    @property
    def measures_steps(self) -> bool:
        return isinstance(self.gap, str) or callable(self.gap)

    def gap_for(self, step_norm: float, largest_norm: float) -> float:
        if callable(self.gap):
            return _check_gap(self.gap(step_norm, largest_norm))
        if isinstance(self.gap, str):
            return 1.0 + step_norm / largest_norm if largest_norm > 0 else 1.0
        return float(self.gap)

    def current_inner_lr(self) -> float:
        if self.inner_lr is None:
            return 1.0
        value = float(self.inner_lr())
        if not 0 < value < math.inf:
            raise ValueError(f"inner_lr must return a positive, finite number, got {value}")
        return value


# A name of ``OVERLAPS``, in lower case too.
OverlapName = Literal[
    "Blocking", "Streaming", "Delayed", "Eager", "CO2",
    "blocking", "streaming", "delayed", "eager", "co2",
]  # fmt: skip
OVERLAPS: dict[str, type[Overlap]] = {
    policy.__name__: policy for policy in (Blocking, Streaming, Delayed, Eager, CO2)
}


def make_overlap(overlap: Overlap | str | dict[str, Any] | None) -> Overlap:
    """Turn the argument ``overlap`` into a policy; None is ``Blocking()``.

    Raises:
        ValueError: If it names no policy of this package, or a function that cannot be restored.
        TypeError: If it is no policy at all.
    """
    if overlap is None:
        return Blocking()
    if isinstance(overlap, Overlap):
        return overlap
    if isinstance(overlap, dict):
        arguments = dict(overlap)
        policy = _policy(arguments.pop("name", None))
        _refuse_function_names(arguments)
        return policy(**arguments)
    if isinstance(overlap, str):
        return _policy(overlap)()
    raise TypeError(
        f"unknown overlap {overlap!r}: it must be one of {', '.join(OVERLAPS)}, e.g. Blocking()"
    )


def merge_terms(terms: Terms) -> Terms:
    """Add up the coefficients of the same payload; payloads with coefficient 0 are left out."""
    sums: dict[int, tuple[Tensor, float]] = {}
    for payload, coefficient in terms:
        before = sums[id(payload)][1] if id(payload) in sums else 0.0
        sums[id(payload)] = (payload, before + coefficient)
    return [(payload, coefficient) for payload, coefficient in sums.values() if coefficient != 0.0]


def _policy(name: Any) -> type[Overlap]:
    for known, policy in OVERLAPS.items():
        if isinstance(name, str) and name.lower() == known.lower():
            return policy
    raise ValueError(f"unknown overlap {name!r}: it must be one of {', '.join(OVERLAPS)}")


def _refuse_function_names(arguments: dict[str, Any]) -> None:
    for key in ("gap", "inner_lr"):
        value = arguments.get(key)
        if isinstance(value, str) and value != "gap-aware":
            raise ValueError(
                f"the saved configuration names a function as {key}, {value!r}, which cannot be "
                "restored: give overlap= again"
            )


def _check_rounds(policy: Overlap) -> None:
    if isinstance(policy.rounds, bool) or policy.rounds not in (1, 2):
        raise ValueError(f"rounds must be 1 or 2, got {policy.rounds!r}")
    object.__setattr__(policy, "rounds", int(policy.rounds))


def _check_gap(gap: Any) -> float:
    if not (isinstance(gap, (int, float)) and 0 < gap < math.inf):
        raise ValueError(f"gap must be positive and finite, got {gap!r}")
    return float(gap)


def _fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
