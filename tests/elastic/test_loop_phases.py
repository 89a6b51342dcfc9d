"""The table of the phases of a loop in an elastic group, and its drawing in the pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_comm.elastic.phases import TRANSITIONS, Event, Loop, Phase, Repetition, Report, drawing

PAGE = Path(__file__).parents[2] / "docs" / "developers" / "architecture.md"


# A member that was not in a flush, and that should have sent part 1.
UNSENT = (False, True, [1])


def reached_from(phase: Phase) -> set[Phase]:
    """Return the phases that a loop in this phase may still come to."""
    found, open_ends = {phase}, [phase]
    while open_ends:
        new = set(TRANSITIONS[open_ends.pop()].values()) - found
        found |= new
        open_ends += new
    return found


def test_every_phase_is_reached_and_every_event_met() -> None:
    assert set(TRANSITIONS) == set(Phase) == reached_from(Phase.JOINING)
    assert {event for ways in TRANSITIONS.values() for event in ways} == set(Event)


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
def test_a_loop_ends_only_by_leaving_or_by_sharing_all_steps(phase: Phase) -> None:
    ends = {Phase.FINISHED, Phase.LEFT}
    assert phase in ends or reached_from(phase) >= ends
    assert not TRANSITIONS[Phase.FINISHED] and not TRANSITIONS[Phase.LEFT]


def test_no_view_ends_twice_unless_the_next_has_not_begun() -> None:
    loop = Loop()
    loop.take(Event.FLUSH_BROKE_OFF)
    loop.take(Event.VIEW_ENDED)
    loop.take(Event.VIEW_ENDED)
    assert loop.phase is Phase.CHANGING and loop.before is Phase.FLUSHING_AGAIN


def test_an_event_that_cannot_be_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a loop that joins the group cannot meet: the view has"):
        Loop().take(Event.VIEW_ENDED)


@pytest.mark.parametrize(
    "reports, has_newcomers, expected",
    [
        pytest.param(
            [(False, True, [1]), (False, True, [1])], False, (False, False, [1]), id="send"
        ),
        pytest.param(
            [(False, True, [1]), (False, True, [0])], False, (False, False, ()), id="other"
        ),
        pytest.param(
            [(False, True, [1]), (False, True, [1])], True, (False, False, ()), id="joined"
        ),
        pytest.param([(True, True, []), (False, False, [])], False, (True, True, ()), id="flush"),
        pytest.param([(True, False, []), UNSENT], False, (True, True, ()), id="both"),
        pytest.param([(True, False, []), (False, False, [])], True, (True, False, ()), id="shared"),
    ],
)
def test_members_agree_on_what_broke_off(reports, has_newcomers, expected) -> None:
    found = [
        Repetition.agreed([Report(*one) for one in order], has_newcomers=has_newcomers)
        for order in (reports, reports[::-1])
    ]
    assert tuple(found[0]) == expected and found[1][:2] == found[0][:2]
    assert Repetition.of_workers([found[0]] * 2) == found[0]
    assert not Repetition.of_workers([found[0], Repetition()]).parts


def test_the_page_has_the_drawing() -> None:
    assert f"```text\n{drawing()}```\n" in PAGE.read_text(), (
        "write this into the page:\n" + drawing()
    )
