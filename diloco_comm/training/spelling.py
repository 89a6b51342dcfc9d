"""How messages and ``repr`` describe a DiLoCo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attached import Attached


def describe(diloco: Attached) -> str:
    """Return one line about a DiLoCo, from what this replica knows by itself."""
    exchange = getattr(diloco, "exchange", None)
    if exchange is None:
        return "DiLoCo(not attached)"
    settings, parts = diloco.settings, diloco.parts
    count = diloco._plan.num_fragments
    rounds = sorted({part.round for part in parts})
    words = [
        f"replica {exchange.replica} of members {list(exchange.members)}",
        f"sync_every={settings.sync_every}",
        f"overlap={_call(settings.overlap.config())}",
        f"outer={_call(settings.outer.config())}",
        f"wire={settings.wire.name}",
        f"{count} fragment{'s'[: count > 1]}",
        f"inner step {diloco.inner_step}",
        f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}",
    ]
    words += ["closed"] * diloco._is_closed
    return f"DiLoCo({', '.join(words)})"


def _call(config: Mapping[str, Any]) -> str:
    arguments = [f"{k}={v!r}" for k, v in config.items() if k != "name" and v is not None]
    return f"{config['name']}({', '.join(arguments)})"
