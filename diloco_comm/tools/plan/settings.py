"""Settings for a link: the one that is chosen, and the arguments of ``DiLoCo`` that make it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...methods.outer import SGD, OuterOptimizer
from ...methods.overlap import Overlap, Streaming
from ...ops.wire import ELEMENT_WIRES, WireFormat

# A choice goes through the wires in this order, and through the ways of each wire. int4 is before
# int8, because the recorded runs of Blocking and Streaming lost nothing on int4 (``losses``). Eager
# updates are never chosen, because their loss is higher.
WIRES_CHOSEN = ("int4", "int8")
_WAYS = (("diloco", 0), ("streaming", 1), ("streaming", 5))
# The H of the published table of Streaming DiLoCo (arXiv 2501.18512, Table 4).
MOST_STEPS = 100
_DEFAULT_BLOCK_SIZE = 256
# With fewer bits the outer optimizer is SGD: momentum would carry the noise of a round on.
LEAST_BITS_FOR_MOMENTUM = 2
# The arguments of a configuration that a program gives to ``Wire``.
_OF_WIRE = ("block_size", "error_feedback")


@dataclass(frozen=True)
class Setting:
    """The most frequent exchange of one method and wire that reaches the target on a link."""

    method: str
    delay: int
    wire: str
    sync_every: int
    fragment_layers: int
    utilisation: float

    @property
    def words(self) -> str:
        late = f" with a delay of {self.delay}" if self.method == "streaming" else ""
        return f"{self.method}{late}, H={self.sync_every}, {self.wire}"


def choose(settings: Sequence[Setting], wires: Sequence[str] = WIRES_CHOSEN) -> Setting | None:
    """Return the first setting that exchanges at least every ``MOST_STEPS`` inner steps.

    Where no setting does, the one that exchanges most often.

    Args:
        settings: Settings that reach the target, at most one for each method, delay and wire.
        wires: Those that may be chosen, in order.

    Returns:
        None, if no setting of DiLoCo or Streaming over these wires is among them.
    """
    by_way = {(s.method, s.delay, s.wire): s for s in settings}
    ways = [(*way, wire) for wire in wires for way in _WAYS]
    found = [by_way[way] for way in ways if way in by_way]
    frequent = [setting for setting in found if setting.sync_every <= MOST_STEPS]
    return frequent[0] if frequent else min(found, key=lambda s: s.sync_every, default=None)


def as_arguments(
    setting: Setting, block_size: int, outer: OuterOptimizer | None = None, peers: str | None = None
) -> dict[str, Any]:
    """Return the setting, the ``config`` that ``DiLoCo`` takes, and the two lines of the program.

    A wire below two bits comes with SGD as outer optimizer, a sparse wire with error feedback, too.

    Args:
        outer: The outer optimizer, instead of the default one.
        peers: Source text of an ``Elastic`` for the argument ``peers``, in the line alone.
    """
    arguments: dict[str, Any] = {"sync_every": setting.sync_every, "wire": setting.wire}
    if setting.method == "streaming":
        arguments["fragments"] = f"layers:{setting.fragment_layers}"
        arguments["overlap"] = Streaming(setting.delay)
    if block_size != _DEFAULT_BLOCK_SIZE and setting.wire in ELEMENT_WIRES:
        arguments["block_size"] = block_size
    wire = WireFormat(setting.wire)
    if outer is None and wire.bits_per_element < LEAST_BITS_FOR_MOMENTUM:
        outer = SGD(1.0)
    if outer is not None:
        arguments["outer"] = outer
    if wire.is_sparse:
        arguments["error_feedback"] = True
    options = {name: arguments[name] for name in _OF_WIRE if name in arguments}
    words = {name: _literal(value) for name, value in arguments.items() if name not in options}
    if options:
        more = ", ".join(f"{name}={value!r}" for name, value in options.items())
        words["wire"] = f"Wire({words['wire']}, {more})"
    if peers is not None:
        words["peers"] = peers
    written = ", ".join(f"{name}={text}" for name, text in words.items())
    parts = {k: v for k, v in arguments.items() if isinstance(v, Overlap | OuterOptimizer)}
    names = [type(part).__name__ for part in parts.values()] + ["Wire"] * bool(options)
    names += ["Elastic"] * (peers is not None)
    return {
        "setting": asdict(setting),
        "config": {k: parts[k].config() if k in parts else v for k, v in arguments.items()},
        "imports": f"from diloco_comm import {', '.join(['DiLoCo', *sorted(names)])}",
        "line": f"diloco = DiLoCo(model, optimizer, {written})",
    }


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
