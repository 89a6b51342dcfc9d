"""Every bit that a training ends with is what it was when ``frozen.json`` was made.

A change of bits on purpose is written with ``frozen_file.py --write --change``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from frozen_file import (
    IMPLS,
    all_names,
    differences,
    in_rotation,
    is_death,
    is_virtual,
    load,
    run_death,
    run_rows,
)
from frozen_mutants import MUTANTS
from frozen_runs import Bits
from frozen_table import (
    EVENTS,
    NUM_SETTINGS,
    POLICIES,
    WIRES,
    WORLDS,
    Setting,
    covered,
    low_precision,
    same_as_plain,
    sensible,
)
from workers import Crew, Pool

from diloco_comm.methods.overlap import OVERLAPS

EXPECTED = load()
NAMES = [name for name in EXPECTED if not is_death(name)]
DEATHS = sorted(filter(is_death, EXPECTED), key=lambda name: Setting.parse(name).has_workers)
TABLE = [
    row
    for row in map(Setting.parse, filter(lambda n: not is_virtual(n), EXPECTED))
    if row.event in EVENTS
]
IN_ROTATION = in_rotation(EXPECTED)
# One death of each place, and two of rounds that some replicas apply before the others.
NUM_DEATHS = 6
# One death of a process, and the deaths of replicas with two workers.
ON_ONE_PORT = [DEATHS[0], *(name for name in DEATHS if Setting.parse(name).has_workers)]
nightly = pytest.mark.nightly("each death waits for the reports of the dead")
# Every second row of a policy, a wire and a dtype has each pair of two of these.
SECOND = [row.name for row in low_precision() if row.event in ("bf16", "fp16")]
SECOND = [name for index, name in enumerate(SECOND) if index % 8 in (1, 2, 4, 7)]
by_pairs = pytest.mark.nightly("policy, wire and dtype are in other rows by pairs")
# The rows that travel: all of them, and one of three replicas for each event.
TRAVELLING = [name for name in NAMES if not is_virtual(name) and Setting.parse(name).world > 1]
ONE_OF_EACH = [
    next(row.name for row in TABLE if (row.world, row.event) == (3, event)) for event in EVENTS
]

# The first test waits for the run of all entries.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, crew: Crew) -> dict[str, Bits | str]:
    """Run the entries whose tests were selected."""
    own = [
        item for item in request.session.items if getattr(item, "originalname", "") == "test_entry"
    ]
    names = [item.callspec.params["name"] for item in own]  # type: ignore[attr-defined]
    return run_rows(crew.pool, {name: IN_ROTATION[name] for name in names})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=by_pairs) if name in SECOND else name for name in NAMES]
)
def test_entry(name: str, found: dict[str, Bits | str]) -> None:
    assert differences(found[name], EXPECTED[name]) == [], f"with {IN_ROTATION[name]}"


def test_keys_and_offloading_change_no_bit() -> None:
    rows = same_as_plain()
    assert {row.event for row in rows} == {"keys", "offload"}
    for row in rows:
        assert EXPECTED[row.name] == EXPECTED[row._replace(event="plain").name]


def test_only_failed_attempts_may_be_missing() -> None:
    expected = {"payloads": [["0.0:a", "1.0:b", "0.1:c", "1.1:d", "0.1:e", "1.1:f"]]}
    early = {"payloads": [["0.0:a", "1.0:b", "0.1:c", "0.1:e", "1.1:f"]]}
    assert differences(early, expected) == []
    for wrong in (
        ["0.0:a", "1.0:b", "0.1:c", "0.1:e"],
        ["0.0:a", "1.0:b", "0.1:x", "0.1:e", "1.1:f"],
        ["0.0:a", "1.0:b", "0.1:c", "1.1:f", "0.1:e"],
        ["0.0:a", "0.1:c", "1.1:d", "0.1:e", "1.1:f"],
    ):
        assert differences({"payloads": [wrong]}, expected) != []


@pytest.mark.parametrize(
    "name",
    [*DEATHS[:NUM_DEATHS], *(pytest.param(name, marks=nightly) for name in DEATHS[NUM_DEATHS:])],
)
def test_death(name: str, fresh_workers: Callable[..., Pool]) -> None:
    found = run_death(fresh_workers, name, IN_ROTATION[name])
    assert differences(found, EXPECTED[name]) == [], f"with {IN_ROTATION[name]}"


@pytest.mark.nightly("all rows once more", but=["one of each event"])
@pytest.mark.parametrize(
    "names", [ONE_OF_EACH, TRAVELLING], ids=["one of each event", "all that travel"]
)
def test_a_single_port_gives_the_same_bits(names: list[str], crew: Crew) -> None:
    found = run_rows(crew.pool, in_rotation(names), link="tcp")
    texts = {name: differences(found[name], EXPECTED[name]) for name in names}
    assert {name: text for name, text in texts.items() if text} == {}


@pytest.mark.parametrize(
    "name",
    [name if name in ON_ONE_PORT else pytest.param(name, marks=nightly) for name in DEATHS],
)
def test_death_over_a_single_port(name: str, fresh_workers: Callable[..., Pool]) -> None:
    found = run_death(fresh_workers, name, IN_ROTATION[name], link="tcp")
    assert differences(found, EXPECTED[name]) == [], f"with {IN_ROTATION[name]}"


@pytest.mark.nightly("all entries once more")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("impl", IMPLS)
def test_every_implementation(impl: str, num_threads: int, crew: Crew) -> None:
    found = run_rows(crew.pool, dict.fromkeys(NAMES, impl), num_threads=num_threads)
    texts = {name: differences(found[name], EXPECTED[name]) for name in NAMES}
    assert {name: text for name, text in texts.items() if text} == {}


@pytest.mark.nightly("each mutant trains a third of the table")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_bits_show_a_small_change(mutant: str, crew: Crew) -> None:
    rows = TABLE[::3]
    found = run_rows(crew.pool, in_rotation(row.name for row in rows), mutant=mutant)
    red = {row for row in rows if differences(found[row.name], EXPECTED[row.name])}
    _, _, _, must_show = MUTANTS[mutant]
    assert set(filter(must_show, rows)) - red == set()
    assert red


# ------------------------------------------------------------------------------------- the table


def test_the_file_has_every_entry_once() -> None:
    assert sorted(EXPECTED) == sorted(all_names(EXPECTED))
    assert len(TABLE) == len(set(TABLE)) >= NUM_SETTINGS
    assert all(row.is_sensible for row in TABLE)


def test_the_table_has_every_policy() -> None:
    chosen = {type(policy["overlap"]) for policy in POLICIES.values() if "overlap" in policy}
    assert chosen == set(OVERLAPS.values())


def test_the_table_covers_every_sensible_pair() -> None:
    columns = list(enumerate((POLICIES, WIRES, WORLDS, EVENTS)))
    pairs = {
        ((i, a), (j, b))
        for i, some in columns for j, others in columns[i + 1 :] for a in some for b in others
    }  # fmt: skip
    senseless = {((2, 1), (3, event)) for event in ("kill", "join", "reset")}
    assert pairs - set(covered(TABLE, 2)) == senseless
    assert set(covered(sensible(), 2)) == pairs - senseless
