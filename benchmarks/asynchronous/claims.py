"""Claims of papers, judged by the runs of ``convergence.py`` and ``decoupled.py``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Row = dict[str, Any]

# Losses that differ by less are alike, in nats per byte.
ALIKE = 0.01
WORSE, BETTER, SAME, NO_WORSE = "worse", "better", "alike", "no worse"


@dataclass(frozen=True)
class Claim:
    """``one`` is worse than, better than, like, or no worse than ``other``."""

    text: str
    one: str
    kind: str
    other: str


# arXiv 2401.09135.
ASYNCHRONOUS = (
    Claim("async Nesterov is worse than DiLoCo", "async Nesterov", WORSE, "DiLoCo"),
    Claim("async SGD is better than DiLoCo with SGD", "async SGD", BETTER, "DiLoCo, outer SGD"),
    Claim("async Nesterov is better than async SGD", "async Nesterov", BETTER, "async SGD"),
    Claim("... and than async SGD with momentum", "async Nesterov", BETTER, "async SGD momentum"),
    Claim("async Adam is worse than async Nesterov", "async Adam", WORSE, "async Nesterov"),
    Claim("a polynomial discount barely helps", "polynomial", SAME, "async Nesterov"),
    Claim("... nor does a threshold", "polynomial, threshold", SAME, "async Nesterov"),
    Claim("... nor delay compensation", "compensation", SAME, "async Nesterov"),
    Claim("DN + DyLU is better than async Nesterov", "DN + DyLU", BETTER, "async Nesterov"),
    Claim("DN needs DyLU", "DN + DyLU", BETTER, "DN"),
    Claim("DN + DyLU closes the gap to DiLoCo", "DN + DyLU", NO_WORSE, "DiLoCo"),
    Claim("c = 0.1/N is like c = 0", "DN + DyLU, c = 0.1/N", SAME, "DN + DyLU"),
    Claim("(ours) with a grace period it closes", "DN + DyLU, grace", NO_WORSE, "DiLoCo"),
)
# arXiv 2604.21428.
DECOUPLED = (
    Claim("K=1 without grace is worse than with grace", "K=1", WORSE, "K=1, grace"),
    Claim("K=1 with grace is no worse than K=M", "K=1, grace", NO_WORSE, "K=M"),
    Claim("RDA is better than the mean, K=1 with grace", "K=1, grace, RDA", BETTER, "K=1, grace"),
    Claim("RDA is better than the mean, K=M", "K=M, RDA", BETTER, "K=M"),
    Claim("int4 both ways costs nothing", "K=1, grace, int4", NO_WORSE, "K=1, grace"),
    Claim("int4 with feedback costs nothing", "K=1, grace, int4 feedback", NO_WORSE, "K=1, grace"),
    Claim("decoupled is no worse than Streaming", "K=1, grace", NO_WORSE, "Streaming"),
    Claim("(ours) carry is better, K=1 without grace", "K=1, carry", BETTER, "K=1"),
    Claim("(ours) carry is better, with grace", "K=1, grace, carry", BETTER, "K=1, grace"),
    Claim("(ours) decoupled is better than DN + DyLU", "K=1, grace", BETTER, "DN + DyLU"),
)


def differences(rows: Iterable[Row], one: str, other: str) -> list[float]:
    """Return the losses of one method minus those of another, seed by seed."""
    by_method: dict[str, dict[int, float]] = {one: {}, other: {}}
    for row in rows:
        if row["method"] in by_method:
            by_method[row["method"]][row["seed"]] = row["loss"]
    shared = sorted(by_method[one].keys() & by_method[other].keys())
    return [by_method[one][seed] - by_method[other][seed] for seed in shared]


def verdict(kind: str, found: Sequence[float]) -> str:
    """Tell whether a claim holds: on every seed for worse and better, in the mean for the rest."""
    mean = fmean(found)
    if kind == SAME:
        return "holds" if abs(mean) < ALIKE else "does not hold"
    if kind == NO_WORSE:
        return "holds" if mean < ALIKE else "does not hold"
    signed = found if kind == WORSE else [-value for value in found]
    if min(signed) > 0:
        return "holds"
    return "does not hold" if max(signed) < 0 else "undecided"


def closed(rows: Sequence[Row], name: str) -> float | None:
    """Return how much of async Nesterov's gap to DiLoCo a method closes; None without a gap."""
    gap = differences(rows, "async Nesterov", "DiLoCo")
    left = differences(rows, name, "DiLoCo")
    if not gap or not left or fmean(gap) <= 0:
        return None
    return 1 - fmean(left) / fmean(gap)


def judge(rows: Sequence[Row], claims: Iterable[Claim], title: str) -> Iterator[str]:
    """Yield a line for each claim that runs of one kind (model, workers, speeds, steps) can test.

    Args:
        rows: Those runs; the synchronous ones may be of any speeds.
        title: A line before the verdicts.
    """
    for claim in claims:
        found = differences(rows, claim.one, claim.other)
        if not found:
            continue
        share = closed(rows, claim.one) if claim.kind == NO_WORSE else None
        more = "" if share is None else f", {share:.0%} of the gap of async Nesterov"
        if title:
            yield title
            title = ""
        yield (
            f"   {claim.text:46} {verdict(claim.kind, found):14} {fmean(found):+.4f}"
            f" ({min(found):+.4f} to {max(found):+.4f}, {len(found)} seeds){more}"
        )
