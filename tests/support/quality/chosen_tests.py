"""Run the tests that a file names, in the order of the file.

    python tests/support/quality/chosen_tests.py tests.txt -x  # other words are pytest's options

A name is a node id, a file or a folder. A name that no test has is left out, so that a list from
an earlier run can be used.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


class Chosen:
    """The plugin that keeps the named tests and puts them into order."""

    def __init__(self, names: list[str]) -> None:
        self.places = {name: place for place, name in reversed(list(enumerate(names)))}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        places = {item: self._place(item.nodeid) for item in items}
        others = [item for item, place in places.items() if place is None]
        config.hook.pytest_deselected(items=others)
        chosen = [item for item, place in places.items() if place is not None]
        items[:] = sorted(chosen, key=lambda item: (places[item], item.nodeid))

    def _place(self, test: str) -> int | None:
        file = Path(test.partition("::")[0])
        for name in (test, str(file), *map(str, file.parents)):
            if name in self.places:
                return self.places[name]
        return None


def main(file: str, *options: str) -> int:
    names = Path(file).read_text().splitlines()
    paths = dict.fromkeys(name.partition("::")[0] for name in names)
    there = [path for path in paths if Path(path).exists()]
    if not there:
        return pytest.ExitCode.NO_TESTS_COLLECTED
    return pytest.main([*there, *options], plugins=[Chosen(names)])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
