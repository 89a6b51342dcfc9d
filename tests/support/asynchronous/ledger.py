"""Counts what one worker has trained and what became of it, across failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diloco_comm import DiLoCo
from diloco_comm.rounds.part import RoundInFlight, SyncedPart


@dataclass
class Ledger:
    """What each fragment had to send, what it sent and what became of it, in float64."""

    diloco: DiLoCo
    learned: list[Tensor] = field(default_factory=list)
    applied: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        rounds = self.diloco._rounds
        parts = self.diloco.parts
        self.learned = [torch.zeros(part.num_elements, dtype=torch.float64) for part in parts]
        self.applied = [torch.zeros(part.num_elements, dtype=torch.float64) for part in parts]
        self.send, self.commit, self.repair = rounds.send, rounds._commit, rounds._repair
        rounds.send = self._send  # type: ignore[method-assign]
        rounds._commit = self._commit  # type: ignore[method-assign]
        rounds._repair = self._repair  # type: ignore[method-assign]

    def _send(self, part: SyncedPart, *arguments: Any) -> RoundInFlight:
        progress = part.progress().double()
        flight = self.send(part, *arguments)
        self.learned[part.index] += progress
        return flight

    def _commit(self, flight: RoundInFlight, arrival: Any) -> None:
        part = flight.part
        self.applied[part.index] += part.decode(flight.own, flight.layout, "").double()
        self.commit(flight, arrival)

    def _repair(
        self, part: SyncedPart, repair: Any, flight: RoundInFlight, inner_step: int
    ) -> None:
        self.learned[part.index] += part.progress().double()
        self.applied[part.index] += part.decode(flight.own, flight.layout, "").double()
        self.repair(part, repair, flight, inner_step)

    def error(self) -> float:
        """Largest of learned - (applied + in flight + owed), over the largest learned."""
        worst = 0.0
        for part, learned, applied in zip(
            self.diloco.parts, self.learned, self.applied, strict=True
        ):
            known = applied.clone()
            for flight in part.in_flight:
                known += part.decode(flight.own, flight.layout, "").double()
            if part.buffers.residuals.added is not None:
                known += part.buffers.residuals.added.double()
            worst = max(worst, ((learned - known).abs().max() / learned.abs().max()).item())
        return worst
