"""How messages and ``repr`` describe a DiLoCo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..exchange.exchange import Exchange
from ..methods.settings import Settings
from ..rounds.part import SyncedPart


def describe(
    exchange: Exchange,
    settings: Settings,
    parts: Sequence[SyncedPart],
    *,
    num_fragments: int,
    inner_step: int,
    is_closed: bool,
) -> str:
    """Return one line about a DiLoCo, from what this replica knows by itself."""
    rounds = sorted({part.round for part in parts})
    words = [
        f"replica {exchange.replica} of members {list(exchange.members)}",
        f"sync_every={settings.sync_every}",
        f"overlap={_call(settings.overlap.config())}",
        f"outer={_call(settings.outer.config())}",
        f"wire={settings.wire.config()}",
        f"{num_fragments} fragment{'s'[: num_fragments > 1]}",
        f"inner step {inner_step}",
        f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}",
    ]
    words += ["closed"] * is_closed
    return f"DiLoCo({', '.join(words)})"


def _call(config: Mapping[str, Any]) -> str:
    arguments = [f"{k}={v!r}" for k, v in config.items() if k != "name" and v is not None]
    return f"{config['name']}({', '.join(arguments)})"
