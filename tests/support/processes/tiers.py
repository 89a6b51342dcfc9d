"""Two tiers of tests: the first holds every promise once, the nightly one everything at full depth.

A test is nightly by a mark whose reason says what the first tier has instead. ``but`` names the
sets of arguments, by their ids, that stay in the first tier:

    @pytest.mark.nightly("40 s each; the others differ in their policy alone", but=["eager"])

An id in ``but`` that no test of the function has is an error, unless the command line names single
tests. A test with many combinations of arguments needs no names: of those marked

    @pytest.mark.each_pair("216 combinations of shifts, wires and implementations")

the first tier takes, in the order of the file, combinations until each pair of values of two
arguments has been there; the others are nightly. ``each_value`` is the same with single values. A
combination that this machine skips does not count, and is nightly.

``make test`` runs ``-m "not nightly"``; ``pytest`` alone and ``make nightly`` run both tiers.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

Value = tuple[str, str]
# How many arguments at a time a mark is about.
STRENGTHS = {"each_value": 1, "each_pair": 2}


@pytest.hookimpl(tryfirst=True)  # Before -m reads the marks.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Settle of each test whether it has the mark ``nightly``; check that marks say why."""
    functions: dict[tuple[object, str, int], list[pytest.Function]] = {}
    for item in items:
        check_marks(item)
    if not any("::" in argument for argument in config.args):
        check_ids(items)
    for item in items:
        if isinstance(item, pytest.Function):
            keep_first(item)
            for name, strength in STRENGTHS.items():
                marks = {mark.name for mark in item.iter_markers()}
                if name not in marks or "nightly" in marks:
                    continue
                if is_skipped(item):
                    item.add_marker(pytest.mark.nightly("is skipped on this machine"))
                else:
                    key = (item.parent, item.originalname, strength)
                    functions.setdefault(key, []).append(item)
    for (*_, strength), alike in functions.items():
        chosen = cover([{*combinations(values_of(item), strength)} for item in alike])
        for index, item in enumerate(alike):
            if index not in chosen:
                item.add_marker(pytest.mark.nightly("its values are in other combinations"))


def check_marks(item: pytest.Item) -> None:
    """Refuse a mark without a reason, with words that mean nothing, or where it has no effect."""
    found = [mark for name in ("nightly", *STRENGTHS) for mark in item.iter_markers(name)]
    for mark in found:
        where = f"{item.nodeid}: the mark {mark.name}"
        if not (len(mark.args) == 1 and isinstance(mark.args[0], str) and mark.args[0].strip()):
            raise pytest.UsageError(
                f"{where} needs its reason as its only argument, got {mark.args}"
            )
        allowed = {"but"} if mark.name == "nightly" else set()
        if mark.kwargs.keys() - allowed:
            raise pytest.UsageError(f"{where} does not know {sorted(mark.kwargs.keys() - allowed)}")
        but = mark.kwargs.get("but", [])
        if not (isinstance(but, list) and all(isinstance(one, str) for one in but)):
            raise pytest.UsageError(f"{where} takes a list of ids as but, got {but!r}")
        if but and not any(mark is own for own in item.own_markers):
            raise pytest.UsageError(f"{where} has but on a class or module: mark the function")
    strengths = [mark.name for mark in found if mark.name in STRENGTHS]
    num_arguments = len(arguments_of(item))
    if len(strengths) > 1:
        raise pytest.UsageError(f"{item.nodeid}: give one of the marks {strengths}")
    if strengths and num_arguments < STRENGTHS[strengths[0]]:
        raise pytest.UsageError(
            f"{item.nodeid}: the mark {strengths[0]} needs a test with at least "
            f"{STRENGTHS[strengths[0]]} arguments, this one has {num_arguments}"
        )


def check_ids(items: list[pytest.Item]) -> None:
    """Refuse a mark ``nightly`` whose ``but`` names arguments that no test of its function has."""
    ids: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            function = item.nodeid.partition("[")[0]
            ids.setdefault(function, set()).add(id_of(item))
            for mark in item.own_markers:
                if mark.name == "nightly":
                    named.setdefault(function, set()).update(mark.kwargs.get("but", ()))
    for function, names in named.items():
        if unknown := sorted(names - ids[function]):
            raise pytest.UsageError(
                f"{function}: the mark nightly names {unknown} in but; "
                f"the tests have {sorted(ids[function])}"
            )


def id_of(item: pytest.Function) -> str:
    """Return the id of a test's arguments; "" for a test without any."""
    return item.callspec.id if hasattr(item, "callspec") else ""


def keep_first(item: pytest.Function) -> None:
    """Take the mark ``nightly`` from a test that its ``but`` names."""
    item.own_markers[:] = [
        mark
        for mark in item.own_markers
        if mark.name != "nightly" or id_of(item) not in mark.kwargs.get("but", ())
    ]


def is_skipped(item: pytest.Item) -> bool:
    """Return whether a mark skips the test on this machine."""
    if item.get_closest_marker("skip") or (
        item.get_closest_marker("gpu") and not torch.cuda.is_available()
    ):
        return True
    return any(True in mark.args[:1] for mark in item.iter_markers("skipif"))


def values_of(item: pytest.Function) -> list[Value]:
    """Return the arguments of a parametrized test with their values, which need not be hashable."""
    return sorted((name, repr(value)) for name, value in arguments_of(item).items())


def arguments_of(item: pytest.Item) -> dict[str, Any]:
    """Return the arguments of a parametrized test, or none."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def cover(sets: list[set[Any]]) -> set[int]:
    """Choose few sets that together have every member; the first of equally good ones."""
    missing = set().union(*sets)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(sets)), key=lambda i: (len(sets[i] & missing), -i))
        chosen.add(best)
        missing -= sets[best]
    return chosen
