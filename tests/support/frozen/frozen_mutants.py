"""Small changes of the library; the frozen bits must show each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from frozen_table import Setting

from diloco_comm.exchange.buffers import ExchangeBuffers
from diloco_comm.exchange.round import Round
from diloco_comm.rounds.part import SyncedFragment
from diloco_comm.training.plan import Plan

LOST_STEP, CHANGED_ROUND = 12, 2


@contextmanager
def changed(name: str) -> Iterator[None]:
    """Change the library as the mutant of this name says; "" for no change."""
    if not name:
        yield
        return
    owner, method, change, _ = MUTANTS[name]
    original = getattr(owner, method)

    def replaced(*args: Any, **named: Any) -> Any:
        return change(original, *args, **named)

    with patch.object(owner, method, replaced):
        yield


def lose_a_round(sent_at: Callable[..., Any], plan: Plan, step: int) -> Any:
    return [] if step == LOST_STEP else sent_at(plan, step)


def step_twice(apply: Callable[..., None], part: Any, update: Any, **named: Any) -> None:
    apply(part, update, **named)
    if part.state.num_steps == CHANGED_ROUND:
        part.state.step(update)


def drop_a_residual(open_round: Callable[..., Round], buffers: Any, header: Any) -> Round:
    if header.round == CHANGED_ROUND and buffers.residual is not None:
        buffers.residual.zero_()
    return open_round(buffers, header)


def add_in_reverse(combine: Callable[..., Any], round: Round, weights: Any) -> Any:
    return combine(round, weights)[::-1]


# Class and method that are changed, the change, and which rows must show it.
Mutant = tuple[type, str, Callable[..., Any], Callable[[Setting], bool]]
MUTANTS: dict[str, Mutant] = {
    "lost round": (Plan, "sent_at", lose_a_round, lambda row: True),
    "one step too many": (SyncedFragment, "apply", step_twice, lambda row: True),
    "dropped residual": (
        ExchangeBuffers, "open_round", drop_a_residual, lambda row: row.wire in ("int4", "topk64"),
    ),
    # Two terms have the same sum in either order, and on topk64 three seldom meet at an element.
    "order of a sum": (
        Round, "combine", add_in_reverse, lambda row: row.world == 3 and row.wire == "sub8",
    ),
}  # fmt: skip
