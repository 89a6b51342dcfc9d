"""What became of a learner's progress: the books of one fragment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ledger:
    """Counts of one unit, inner steps or tokens; always learned = the sum of the others.

    Attributes:
        learned: All progress since the learner was made.
        applied: Merged into the shared model.
        under_way: In a report that no commit has answered.
        kept: In the parameters, and in no report.
        lost: Overwritten by a commit, or gone with a failure of the learner.
    """

    learned: int = 0
    applied: int = 0
    under_way: int = 0
    kept: int = 0
    lost: int = 0

    def learn(self, count: int) -> None:
        """Note new progress."""
        self.learned += count
        self.kept += count

    def send(self) -> None:
        """Note that a report holds what is kept."""
        self.under_way, self.kept = self.under_way + self.kept, 0

    def apply(self) -> None:
        """Note that the report was merged."""
        self.applied, self.under_way = self.applied + self.under_way, 0

    def give_back(self) -> None:
        """Note that the report was not merged: the parameters still hold its progress."""
        self.kept, self.under_way = self.kept + self.under_way, 0

    def lose(self) -> None:
        """Note that what is kept is overwritten."""
        self.lost, self.kept = self.lost + self.kept, 0
