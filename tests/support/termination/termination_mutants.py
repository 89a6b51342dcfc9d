"""The package's code of the termination rule with one mistake each, for the exploration to find."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from termination_model import Model
from termination_record import Code

from diloco_comm.exchange import buffers as buffers
from diloco_comm.exchange.membership import sealing, termination


@dataclass(frozen=True)
class Mutant:
    """A mistake, and where it does harm.

    Attributes:
        old, new: Text of the module, which occurs once, and what it becomes.
        model: Where it is found.
        breaks: The invariant.
    """

    module: ModuleType
    old: str
    new: str
    model: Model
    breaks: str

    @property
    def code(self) -> Code:
        changed = with_change(self.module, self.old, self.new)
        if self.module is termination:
            return Code(decide=changed["decide"])
        return (
            Code(ack_of=changed["ack_of"])
            if self.module is sealing
            else Code(buffers=changed["ExchangeBuffers"])
        )


def with_change(module: ModuleType, old: str, new: str) -> dict[str, Any]:
    """Return what a module would hold if its text were another."""
    text = inspect.getsource(module)
    assert text.count(old) == 1, f"{module.__name__} has {text.count(old)} times: {old}"
    names: dict[str, Any] = {"__name__": module.__name__, "__package__": module.__package__}
    exec(compile(text.replace(old, new), f"{module.__name__} with a mistake", "exec"), names)
    return names


_TWO = Model(2, num_deaths=1)
_BAD_VOTES = Model(2, num_rounds=3, num_deaths=0, num_attempts=1, votes_bad=True)
_APART = Model(2, num_rounds=1, num_deaths=0, num_attempts=3, has_one_line=False, may_refuse=True)
_LEFT_OUT = Model(3, num_rounds=1, num_deaths=1)
_NEWCOMER = Model(3, num_rounds=1, num_deaths=0, num_newcomers=1)

MUTANTS = {
    # ------------------------------------------------------------------- what an ack tells
    # A change has failed after one member has entered; who was left out comes back.
    "the-epoch-that-was-entered-is-told": Mutant(
        sealing,
        "epoch, members = member.newest_group",
        "epoch, members = member.epoch, member.members",
        _LEFT_OUT,
        "I1",
    ),
    "rounds-applied-since-the-change-are-untold": Mutant(
        sealing,
        "        applied_epoch = max(applied_epoch, buffers.applied_epoch)\n",
        "",
        _TWO,
        "I4",
    ),
    "a-newcomer-says-that-it-has-nothing": Mutant(
        sealing, "applied_epoch = member.lineage", "applied_epoch = 0", _NEWCOMER, "I4"
    ),
    "one-round-less-is-kept": Mutant(
        buffers, "> self.num_under_way + 1:", "> self.num_under_way:", _TWO, "I4"
    ),
    "rounds-applied-in-a-change-are-not-kept": Mutant(
        buffers,
        '            if round in applied:\n                self._end(round, "applied")\n',
        "",
        _TWO,
        "I4",
    ),
    "rounds-voted-for-are-untold": Mutant(
        buffers,
        'if round.state != "started" and round.header',
        'if round.state == "agreed" and round.header',
        _TWO,
        "I4",
    ),
    # ------------------------------------------------------------------- who decides, and who may
    "all-decide": Mutant(
        termination,
        "electors = sorted(acks.keys() & set(newest.members))",
        "electors = sorted(acks)",
        _LEFT_OUT,
        "I1",
    ),
    "other-lines-are-let-in": Mutant(
        termination, "        _refuse_other_lines(epochs, lineage)\n", "", _APART, "I2"
    ),
    "newer-lines-are-let-in": Mutant(
        termination, "if epoch != lineage)", "if epoch < lineage)", _APART, "I2"
    ),
    "agreed-rounds-of-another-line-are-let-in": Mutant(
        termination,
        "            applied[replica] = max([applied[replica], *agreed])\n",
        "            pass\n",
        _APART,
        "I2",
    ),
    "lineage-is-not-raised-by-commits": Mutant(
        termination,
        "            self.epochs.update({r: max(self.epochs[r], epoch) for r in lacking})\n",
        "",
        _TWO,
        "I4",
    ),
    "who-ends-behind-is-let-in": Mutant(
        termination,
        "        self._refuse_unequal()\n",
        "",
        Model(2, num_deaths=0, votes_bad=True),
        "I1",
    ),
    # ------------------------------------------------------------------- what becomes of a round
    "the-oldest-epoch-is-meant": Mutant(
        termination,
        "epoch = max([one.epoch for one in known",
        "epoch = min([one.epoch for one in known",
        _BAD_VOTES,
        "I4",
    ),
    "rounds-of-all-epochs-are-one": Mutant(
        termination,
        "one.state in _HELD and one.epoch in (epoch, -1)",
        "one.state in _HELD",
        _TWO,
        "I1",
    ),
    "rounds-of-unknown-epochs-are-not-held": Mutant(
        termination, "one.epoch in (epoch, -1)", "one.epoch == epoch", _BAD_VOTES, "I4"
    ),
    "who-lacks-a-round-is-let-in": Mutant(
        termination,
        "        self._refuse_lacking(number, "
        "[r for r, is_held in holds.items() if not is_held])\n",
        "",
        _TWO,
        "I1",
    ),
    "one-vote-is-enough": Mutant(
        termination,
        "not all(holds[r] for r in self.electors)",
        "not any(holds[r] for r in self.electors)",
        _TWO,
        "I4",
    ),
    "a-vote-does-not-count": Mutant(
        termination,
        '_HELD = ("voted", "agreed", "applied")',
        '_HELD = ("agreed", "applied")',
        _TWO,
        "I4",
    ),
    "a-bad-vote-counts": Mutant(
        termination,
        '_HELD = ("voted", "agreed", "applied")',
        '_HELD = ("voted", "agreed", "applied", "rejected")',
        _BAD_VOTES,
        "I2",
    ),
}
