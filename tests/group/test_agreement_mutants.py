"""Mistakes in the core of the agreement: each breaks an invariant that the histories check."""

from __future__ import annotations

from typing import Any

import pytest
from agreement_mutants import FAULTS, FIXED, MUTANTS
from agreement_walks import Walk, first_group, settle
from agreement_world import Broken, World, settings_of

from diloco_comm.group import agreement

SEEDS = range(60)


def broken_in(kind: str, seed: int, step: Any, size: int = 3, **promises: bool) -> str:
    """Return the invariant that a history breaks first; "" for none.

    Args:
        promises: Drivers and training threads keep them, see ``World``.
    """
    world = World(settings_of(is_fixed=kind in FIXED, founding_wait=8), step=step)
    vars(world).update(promises)
    try:
        first_group(world, size)
        walk = Walk(world, seed, FAULTS[kind])
        for number in range(1, 1501):
            walk.step()
            if number % 500 == 0 and settle(world) < 0:
                break
    except Broken as broken:
        return broken.invariant
    return ""


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_mistake_breaks_an_invariant(name: str) -> None:
    mutant = MUTANTS[name]
    with mutant.step() as step:
        all_found = (
            broken_in(mutant.kind, seed, step, mutant.size) for seed in (mutant.seed, *SEEDS)
        )
        found = next(filter(None, all_found), "")
    assert found in mutant.breaks


def test_a_training_thread_that_breaks_its_promise_breaks_an_invariant() -> None:
    found = (broken_in("durable", seed, agreement.step, keeps_promise=False) for seed in SEEDS)
    assert next(filter(None, found), "") in ("I1", "I2", "I3")


@pytest.mark.parametrize("kind", ["durable", "callers"])
def test_a_driver_that_gives_no_order_again_lets_its_process_stop_for_ever(kind: str) -> None:
    found = (broken_in(kind, seed, agreement.step, orders_again=False) for seed in SEEDS)
    assert next(filter(None, found), "") == "L"


@pytest.mark.nightly("the walks have other seeds", but=[f"{kind}-0" for kind in FAULTS])
@pytest.mark.parametrize("first", [0, 10, 20, 30])
@pytest.mark.parametrize("kind", list(FAULTS))
def test_without_a_mistake_the_same_histories_break_nothing(kind: str, first: int) -> None:
    for seed in range(first, first + 10):
        assert broken_in(kind, seed, agreement.step) == ""
