"""On a device every bit of the frozen table is what the CPU gives."""

from __future__ import annotations

import pytest
from devices import DEVICES
from frozen_file import differences, is_death, is_virtual, load, run_rows
from frozen_table import EVENTS, Setting
from workers import Crew

EXPECTED = load()
NAMES = [name for name in EXPECTED if not is_virtual(name) and not is_death(name)]
ROWS = {
    "all": NAMES,
    "one of each event": [
        next(name for name in NAMES if Setting.parse(name)[2:] == (3, event)) for event in EVENTS
    ],
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.nightly("all rows once more", but=["gloo-lagging-one of each event"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("link", ["gloo", "tcp"])
def test_rows(link: str, device: str, rows: str, crew: Crew, stand_in: str) -> None:
    # The stand-in has no collectives for the workers of one replica.
    names = [n for n in ROWS[rows] if device != "lagging" or not n.endswith(" workers")]
    found = run_rows(
        crew.pool, dict.fromkeys(names, ""), backend=link, device=device, library=stand_in
    )
    texts = {name: differences(found[name], EXPECTED[name]) for name in names}
    assert {name: text for name, text in texts.items() if text} == {}
