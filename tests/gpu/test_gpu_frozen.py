"""On a device every bit of the frozen table is what the CPU gives."""

from __future__ import annotations

import pytest
from frozen_file import differences, is_death, is_virtual, load, run_rows
from frozen_table import EVENTS, Setting

EXPECTED = load()
# Killed processes are left to the CPU. A single replica sends nothing.
NAMES = [
    name
    for name in EXPECTED
    if not is_virtual(name) and not is_death(name) and Setting.parse(name).world > 1
]
ROWS = {
    "all": NAMES,
    "one of each event": [
        next(name for name in NAMES if Setting.parse(name)[2:] == (3, event))
        for event in (*EVENTS, "bf16", "offload", "mixed-offload")
    ],
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.nightly("all rows once more", but=["gloo-lagging-one of each event"])
@pytest.mark.parametrize(
    ("device", "rows"),
    [
        ("lagging", "one of each event"),
        ("lagging", "all"),
        pytest.param("cuda", "all", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("link", ["gloo", "tcp"])
def test_rows(link: str, device: str, rows: str, replicas, stand_in: str) -> None:
    # The stand-in has no collectives for the workers of one replica.
    names = [n for n in ROWS[rows] if device != "lagging" or not n.endswith(" workers")]
    found = run_rows(replicas, dict.fromkeys(names, ""), link=link, device=device, library=stand_in)
    texts = {name: differences(found[name], EXPECTED[name]) for name in names}
    assert {name: text for name, text in texts.items() if text} == {}
