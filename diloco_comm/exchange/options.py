"""The options of an exchange, checked."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch

from ..base import env
from ..base.checks import timeout_seconds


@dataclass(frozen=True)
class Options:
    """What an ``Exchange`` is made with; times are in seconds."""

    lanes: int
    window: int
    chunk_bytes: int | None
    num_under_way: int
    device: torch.device
    impl: str
    joins: bool
    collectives: str
    timeout: float
    join_timeout: float
    suspect_after: float
    report_patience: float

    @classmethod
    def checked(
        cls,
        *,
        lanes: int,
        window: int,
        chunk_bytes: int | None,
        num_under_way: int,
        device: torch.device | str,
        impl: str,
        joins: bool,
        collectives: str,
        timeout: timedelta | float,
        join_timeout: timedelta | float | None,
        suspect_after: timedelta | float | None,
        report_patience: float | None,
    ) -> Options:
        """Check the options; the environment has the values of options that are None.

        Raises:
            ValueError: If an option is out of range.
        """
        timeout_s = timeout_seconds(timeout)
        for what, value in (("lanes", lanes), ("window", window), ("chunk_bytes", chunk_bytes)):
            if value is not None and value < 1:
                raise ValueError(f"{what} must be at least 1, got {value}")
        patience = env.report_s() if report_patience is None else report_patience
        if not patience > 0:
            raise ValueError(f"report_patience must be positive, got {patience}")
        join_s = env.join_timeout_s() if join_timeout is None else join_timeout
        suspect_s = env.suspect_after_s() if suspect_after is None else suspect_after
        options = cls(
            lanes=lanes,
            window=window,
            chunk_bytes=chunk_bytes,
            num_under_way=num_under_way,
            device=torch.device(device),
            impl=impl,
            joins=joins,
            collectives=collectives,
            timeout=timeout_s,
            join_timeout=timeout_seconds(join_s, "join_timeout"),
            suspect_after=timeout_seconds(suspect_s, "suspect_after"),
            report_patience=patience,
        )
        options._check_collectives()
        return options

    def _check_collectives(self) -> None:
        if self.collectives not in ("gloo", "nccl"):
            raise ValueError(f"collectives must be gloo or nccl, got {self.collectives!r}")
        if self.collectives == "nccl" and self.device.type == "cpu":
            raise ValueError("collectives nccl need parameters on a GPU, these are in CPU memory")
        if self.collectives == "nccl" and self.lanes > 1:
            raise ValueError(
                f"lanes are connections of gloo: with nccl leave them at 1, got {self.lanes}"
            )
