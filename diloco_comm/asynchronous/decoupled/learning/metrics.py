"""The figures of a learner of decoupled training."""

from __future__ import annotations

from dataclasses import dataclass

from ..ledger import Ledger


@dataclass(frozen=True)
class DecoupledMetrics:
    """The figures of a learner so far.

    Attributes:
        steps: Inner steps taken.
        versions: Version of each fragment in the model.
        reports, merged, refused: Reports made, merged, and refused by the server.
        commits: Versions that were written into the model.
        step_ledgers, token_ledgers: What became of the inner steps and tokens, by fragment.
        hook_s: Seconds that the hook took of the training thread, in all.
        sent_bytes, received_bytes: Bytes of messages.
    """

    steps: int
    versions: tuple[int, ...]
    reports: int
    merged: int
    refused: int
    commits: int
    step_ledgers: tuple[Ledger, ...]
    token_ledgers: tuple[Ledger, ...]
    hook_s: float
    sent_bytes: int
    received_bytes: int
