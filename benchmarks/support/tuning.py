"""Learning rates that are bracketed: the best one tried has a worse one on either side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A search ends between two of these rates; the paper searched 0.03, 0.1, 0.3 and 0.7.
LADDER = (
    0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.7, 1.0, 1.4, 2.0, 3.0,
)  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """A learning rate.

    Attributes:
        lr: The best of those tried.
        is_bracketed: A smaller and a larger one were tried, and were worse.
    """

    lr: float
    is_bracketed: bool


def choose(losses: Mapping[float, float]) -> Choice:
    """Return the learning rate of the lowest loss; a loss that is no number is the worst."""
    ordered = sorted(losses)
    worth = {lr: loss if math.isfinite(loss) else math.inf for lr, loss in losses.items()}
    best = min(ordered, key=lambda lr: worth[lr])
    return Choice(best, ordered[0] < best < ordered[-1])


def next_rate(
    losses: Mapping[float, float], start: float, ladder: Sequence[float] = LADDER
) -> float | None:
    """Return the learning rate to try next; None when the best is bracketed, or at the end.

    The first three are ``start`` and its neighbours in the ladder.
    """
    place = ladder.index(start)
    for lr in (start, *ladder[max(0, place - 1) : place], *ladder[place + 1 : place + 2]):
        if lr not in losses:
            return lr
    best = choose(losses)
    if best.is_bracketed:
        return None
    place = ladder.index(best.lr)
    neighbour = place - 1 if best.lr == min(losses) else place + 1
    return ladder[neighbour] if 0 <= neighbour < len(ladder) else None


Tried = dict[tuple[Any, ...], dict[float, float]]


def tried_rates(rows: Iterable[Mapping[str, Any]], keys: Sequence[str], seed: int) -> Tried:
    """Return the losses of the searches, which have a seed of their own, by rate."""
    tried: Tried = {}
    for row in rows:
        if row["seed"] == seed:
            tried.setdefault(tuple(row[key] for key in keys), {})[row["lr"]] = row["loss"]
    return tried


def search_lines(tried: Tried) -> Iterator[str]:
    """Yield a line for each search of a learning rate: what was tried, and the best."""
    yield ""
    yield "# outer learning rates that were tried, with another seed: loss"
    for (*cell, name), losses in tried.items():
        choice = choose(losses)
        shown = ", ".join(f"{lr:g}: {losses[lr]:.4f}" for lr in sorted(losses))
        words = "" if choice.is_bracketed else "  ERROR: the best one is at the edge"
        place = "".join(f"{value!s:>9}" for value in cell)
        yield f"  {place} {name:26} {shown} -> {choice.lr:g}{words}"
