"""Events that a replica of the demo sends to the parent process while it trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The training loss of one replica after ``step`` inner steps of the current row.

    ``seconds`` counts training only, not validation.
    """

    step: int
    loss: float
    seconds: float
    weight: float = 1.0


@dataclass(frozen=True)
class Validation:
    """Loss of the shared model on this replica's ``weight`` windows of the validation text."""

    step: int
    loss: float
    seconds: float
    weight: float


@dataclass(frozen=True)
class Finished:
    """One replica has finished the row; ``outer_hash`` identifies its shared model.

    ``exposed_s`` is the part of ``seconds`` for which the training loop waited for communication.
    """

    outer_hash: str
    num_parameters: int
    sent_bytes: int
    received_bytes: int
    exposed_s: float
    seconds: float


@dataclass(frozen=True)
class Failed:
    """The replica raised; it can run no further rows."""

    traceback: str


Event = Progress | Validation | Finished | Failed
