"""The core with one mistake each, and models that lack what safety rests on."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from diloco_comm.elastic.core import following, forgetting, proposals
from termination_mutants import with_change


@dataclass(frozen=True)
class Mutant:
    """A mistake in one function of the core.

    Attributes:
        old, new: Text of the module, which occurs once, and what it becomes.
        model: Name of the model in which it is found.
        breaks: The invariants that may be broken first.
    """

    module: ModuleType
    function: str
    old: str
    new: str
    model: str
    breaks: tuple[str, ...]

    def changed(self) -> Any:
        return with_change(self.module, self.old, self.new)[self.function]


MUTANTS = {
    "enter-without-open": Mutant(
        following,
        "_follow_in_attempt",
        "        if is_formed and view.phase == OPEN:",
        "        if is_formed:",
        "two-break",
        ("I3",),
    ),
    "found-on-suspicion": Mutant(
        proposals,
        "_missing_state",
        "    members = [id for id, _ in view.last_open[1]]\n",
        '    return ""\n    members = [id for id, _ in view.last_open[1]]\n',
        "found-alone",
        ("I1", "I3", "I4", "I5"),
    ),
    "no-majority": Mutant(
        proposals,
        "_continue",
        "not settings.is_durable and not is_majority",
        "False and not is_majority",
        "two-forgetful-and-late",
        ("I1", "I3", "I4"),
    ),
    "doubts-are-forgotten": Mutant(
        forgetting,
        "_unknown",
        "    unknown = []\n",
        "    return []\n    unknown = []\n",
        "two-forgetful-three-views",
        ("I1", "I2", "I3", "I4"),
    ),
    "who-is-left-out-stays": Mutant(
        following,
        "_follow_in_view",
        "    if view.phase == OPEN and not view.is_member(*state.key):\n",
        "    if False:\n",
        "two-suspect-each-other",
        ("L1",),
    ),
    "failed-attempts-are-not-renewed": Mutant(
        proposals,
        "_has_failed",
        "    for key in view.keys:\n",
        "    for key in ():\n",
        "two-fail",
        ("L1",),
    ),
    "a-member-that-missed-the-opening-is-lost": Mutant(
        following,
        "_follow_in_view",
        "    elif view.phase == OPEN and view.number > state.epoch:\n",
        "    elif False:\n",
        "two-fail",
        ("L1",),
    ),
}
