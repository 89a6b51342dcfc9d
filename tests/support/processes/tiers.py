"""Two tiers of tests: the first holds every promise once, the nightly one everything at full depth.

A test is nightly by a mark whose reason says what the first tier has instead. ``but`` names the
sets of arguments, by their ids, that stay in the first tier:

    @pytest.mark.nightly("40 s each; the others differ in their policy alone", but=["eager"])

A test with many combinations of cheap arguments needs no names: of those marked

    @pytest.mark.each_value("64 combinations of sizes and wires")

the first tier takes, in the order of the file, combinations until each value of each argument has
been there; the others are nightly.

``make test`` runs ``-m "not nightly"``; ``pytest`` alone and ``make nightly`` run both tiers.
"""

from __future__ import annotations

import pytest

Values = frozenset[tuple[str, str]]


@pytest.hookimpl(tryfirst=True)  # Before -m reads the marks.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Settle of each test whether it has the mark ``nightly``; check that marks say why."""
    functions: dict[tuple[object, str], list[pytest.Function]] = {}
    for item in items:
        check_reasons(item)
        if isinstance(item, pytest.Function):
            keep_first(item)
            if item.get_closest_marker("each_value") and not item.get_closest_marker("nightly"):
                functions.setdefault((item.parent, item.originalname), []).append(item)
    for combinations in functions.values():
        chosen = cover([values_of(item) for item in combinations])
        for index, item in enumerate(combinations):
            if index not in chosen:
                item.add_marker(pytest.mark.nightly("each value of its arguments is in another"))


def check_reasons(item: pytest.Item) -> None:
    for name in ("nightly", "each_value"):
        for mark in item.iter_markers(name):
            if not (len(mark.args) == 1 and isinstance(mark.args[0], str) and mark.args[0]):
                raise pytest.UsageError(
                    f"{item.nodeid}: the mark {name} needs its reason as its only argument, "
                    f"got {mark.args}"
                )


def keep_first(item: pytest.Function) -> None:
    """Take the mark ``nightly`` from a test that its ``but`` names."""
    ids = {item.callspec.id} if hasattr(item, "callspec") else set()
    item.own_markers[:] = [
        mark
        for mark in item.own_markers
        if mark.name != "nightly" or ids.isdisjoint(mark.kwargs.get("but", ()))
    ]


def values_of(item: pytest.Function) -> Values:
    """Return the arguments of a parametrized test with their values, which need not be hashable."""
    return frozenset((name, repr(value)) for name, value in item.callspec.params.items())


def cover(combinations: list[Values]) -> set[int]:
    """Choose few combinations that together have every value; the first of equally good ones."""
    missing = set().union(*combinations)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(combinations)), key=lambda i: (len(combinations[i] & missing), -i))
        chosen.add(best)
        missing -= combinations[best]
    return chosen
