"""The core of the agreement with one mistake each, and the histories that find it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

from agreement_walks import DURABLE_FAULTS, FIXED_FAULTS, FORGETTING_FAULTS, MOVING_FAULTS

from diloco_comm.group import agreement, plans, streams


def with_change(module: ModuleType, old: str, new: str) -> dict[str, Any]:
    """Return what a module would hold if its text were another."""
    text = inspect.getsource(module)
    assert text.count(old) == 1, f"{module.__name__} has {text.count(old)} times: {old}"
    names: dict[str, Any] = {"__name__": module.__name__, "__package__": module.__package__}
    exec(compile(text.replace(old, new), f"{module.__name__} with a mistake", "exec"), names)
    return names


@dataclass(frozen=True)
class Mutant:
    """A mistake in one function.

    Attributes:
        name: The function or class, where others import it; "" in the module of ``step``.
        old, new: Text of the module, which occurs once, and what it becomes.
        kind: The kind of histories that find it.
        breaks: The invariants that may be broken first.
        size: Members of the group.
        seed: A history that finds it.
    """

    module: ModuleType
    name: str
    old: str
    new: str
    kind: str
    breaks: tuple[str, ...]
    size: int = 3
    seed: int = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[Any]:
        """Return the core with this mistake."""
        changed = with_change(self.module, self.old, self.new)
        if self.module is agreement:
            yield changed["step"]
            return
        with mock.patch.object(agreement, self.name, changed[self.name]):
            yield agreement.step


# Faults that are frequent where a mistake does harm.
FAULTS = {
    "durable": DURABLE_FAULTS,
    "forgetting": FORGETTING_FAULTS,
    "forgetful": {**FORGETTING_FAULTS, "forget": 0.02, "break": 0.02, "cut": 0.005, "leave": 0.005},
    "silent": {**DURABLE_FAULTS, "mistake": 0.02, "cut": 0.01, "break": 0.01},
    "unanswered": {**DURABLE_FAULTS, "no answer": 0.1, "despair": 0.05, "break": 0.02},
    "unconnected": {**DURABLE_FAULTS, "delay": 0.05, "devices": 0.03, "break": 0.02},
    # In fixed groups.
    "callers": {
        **{**FIXED_FAULTS, "demand": 0.03, "give up": 0.02, "let in": 0.005},
        **{"delay": 0.02, "devices": 0.03, "break": 0.01},
    },
    "moving": MOVING_FAULTS,
}
FIXED = ("callers", "moving")

MUTANTS = {
    "all-rounds-count": Mutant(
        streams,
        "decide",
        "        bits &= one.bits >> first - one.first\n",
        "        bits |= one.bits >> first - one.first\n",
        "durable",
        ("I3",),
    ),
    "no-round-under-way-counts": Mutant(
        streams,
        "decide",
        "        bits &= one.bits >> first - one.first\n",
        "        bits = 0\n",
        "durable",
        ("I1",),
    ),
    "a-planned-change-needs-no-votes": Mutant(
        agreement,
        "",
        "state.stage is Stage.STOPPED and state.has_all_votes and",
        "state.stage is Stage.STOPPED and",
        "durable",
        ("I1", "I2", "I3"),
    ),
    "a-table-that-forgot-takes-some-members": Mutant(
        plans,
        "plan_of",
        "    if away and state.has_moved and",
        "    if False and",
        "forgetful",
        ("I1", "I2", "I3", "I4", "I5"),
        size=2,
        seed=20,
    ),
    "an-attempt-outlives-the-table": Mutant(
        agreement,
        "",
        "    if is_lost or draft.table != state.table or",
        "    if is_lost or",
        "forgetting",
        ("I1", "I3", "I4", "I5", "L"),
        seed=8,
    ),
    "newcomers-found-beside-a-group": Mutant(
        plans,
        "plan_of",
        "key in inside if roster.is_fresh(key) and key not in roster.base):\n",
        "key in inside if False):\n",
        "forgetting",
        ("I6",),
    ),
    "a-number-is-enough-to-be-a-member": Mutant(
        agreement,
        "",
        "        if record.is_member(state.key) and",
        "        if state.key.number in record.numbers and",
        "durable",
        ("I3", "I4", "I5", "L"),
        seed=2,
    ),
    "who-is-left-out-stays": Mutant(
        agreement,
        "",
        "        turn.change(recorded=content)\n        turn.end(st.Fence(reason))\n",
        "        turn.change(recorded=content)\n",
        "durable",
        ("L",),
        seed=8,
    ),
    "one-sealed-decides-for-all": Mutant(
        agreement,
        "",
        "decide([one.positions for one in holders.values()])",
        "decide([one.positions for one in holders.values()][:1])",
        "durable",
        ("I1", "I2", "I3"),
    ),
    "a-swap-without-an-answer-is-taken-for-done": Mutant(
        agreement,
        "",
        "event.outcome is st.Outcome.DONE\n",
        "event.outcome is not st.Outcome.REFUSED\n",
        "unanswered",
        ("I3", "I4", "I5", "L"),
        seed=4,
    ),
    "a-refused-swap-is-taken-for-done": Mutant(
        agreement,
        "",
        "event.outcome is st.Outcome.DONE\n",
        "event.outcome is not st.Outcome.UNKNOWN\n",
        "unanswered",
        ("I3", "I4", "I5", "L"),
        seed=35,
    ),
    "nobody-need-be-connected": Mutant(
        agreement,
        "",
        "    return sorted(unsealed | unready)\n",
        "    return sorted(unsealed)\n",
        "unconnected",
        ("I8",),
    ),
    "a-former-attempt-is-taken-for-connected": Mutant(
        agreement,
        "",
        "    if joint is None or joint.attempt != event.attempt:\n",
        "    if joint is None:\n",
        "unconnected",
        ("I8",),
        seed=14,
    ),
    "who-gives-up-stays-in-the-attempt": Mutant(
        agreement,
        "",
        "here=(), proposal=None, joint=None,",
        "here=(), proposal=None,",
        "callers",
        ("I9",),
        seed=7,
    ),
    "any-demand-is-answered": Mutant(
        agreement,
        "",
        "        return state.demand == numbers\n",
        "        return True\n",
        "callers",
        ("I9",),
        seed=1,
    ),
    "a-late-answer-fails-the-same-demand": Mutant(
        agreement,
        "",
        "    if state.demand in (None, tuple(demand)):\n",
        "    if state.demand is None:\n",
        "callers",
        ("I9",),
        seed=66,
    ),
    "who-is-left-out-contradicts": Mutant(
        agreement,
        "",
        "        if set(_numbers_of(state, nonce)) & set(state.demand):\n",
        "        if True:\n",
        "callers",
        ("I9",),
    ),
    "a-joiner-founds": Mutant(
        plans,
        "plan_of",
        "    if state.record is None and not (state.may_found or holders):\n",
        "    if False:\n",
        "callers",
        ("I6",),
        seed=7,
    ),
    "a-demand-outlives-its-group": Mutant(
        agreement,
        "",
        "        demand=None if state.demand in ((), record.numbers) else state.demand,\n",
        "        demand=state.demand,\n",
        "callers",
        ("L",),
    ),
    "a-newcomer-at-another-store-tells-nobody": Mutant(
        plans,
        "plan_of",
        "        leader = min(filter(roster.is_fresh, inside), default=None)\n",
        "        leader = None\n",
        "moving",
        ("L",),
    ),
}
