"""An exchange on streams as its caller holds it."""

from __future__ import annotations

import torch

from ..buffers import ExchangeBuffers
from ..headers import from_native
from ..round import Round
from ..work import ExchangeWork, Mean
from .jobs import StreamJob
from .sending import Sending


class StreamWork(ExchangeWork):
    """An exchange on streams: held at first, or enqueued.

    Attributes:
        sending: What is encoded; its weights follow when the exchange is sent.
    """

    def __init__(
        self, buffers: ExchangeBuffers, round: Round, encoded: torch.Event, sending: Sending
    ) -> None:
        super().__init__(buffers, round)
        self.sending, self._encoded = sending, encoded

    def _num_bad_encoded(self) -> int | None:
        ballot = self.round.own.ballot
        assert ballot is not None
        return int(ballot.host_bad) if self._encoded.query() else None

    def offer(self) -> Mean:
        round = self.round
        if round.state != "started":
            return self.wait()
        job = round.job
        assert isinstance(job, StreamJob) and round.own.ballot is not None
        job.wait_for_headers()
        if job.is_done:
            return self.wait()
        job.block_caller()
        return Mean(
            terms=round.combine(job.weights),
            layout=round.mean_layout,
            headers=[from_native(header) for header in job.headers],
            weights=list(job.weights),
            seconds={},
            sent_bytes=0,
            received_bytes=0,
            verdict=round.own.ballot.verdict,
        )
