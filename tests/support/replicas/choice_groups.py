"""Arguments of ``DiLoCo`` from choices side by side, as the tables of the tests have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from diloco_comm import Link, NonFinite, StorePeers, Wire
from diloco_comm.options import ALONE, DEFAULTS

KINDS: dict[str, type] = {"wire": Wire, "link": Link, "nonfinite": NonFinite, "peers": StorePeers}
# The argument and the field of each choice, by its name in a configuration.
HOMES = {
    one.metadata.get("choice", one.name): (argument, one.name)
    for argument, kind in KINDS.items()
    for one in fields(kind)
}


def grouped(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``DiLoCo``, each choice in its group; other arguments stay as they are.

    Args:
        choices: A choice has its name of ``DiLoCo.config()``. ``group``, ``mesh`` and
            ``membership`` are ``peers``; the peers of one replica without a store are "alone".
    """
    homes = {name: home for name, home in HOMES.items() if name not in ("wire", "name")}
    found = {name: value for name, value in choices.items() if name not in homes}
    for name in ("group", "mesh", "membership"):
        if (value := found.pop(name, None)) is not None:
            found["peers"] = value
    for name, (argument, field) in homes.items():
        if name not in choices or choices[name] is DEFAULTS[name]:
            continue
        kind: Any = KINDS[argument]
        group = found.get(argument)
        group = group if isinstance(group, kind) else kind(group)
        found[argument] = replace(group, **{field: choices[name]})
    peers = found.get("peers")
    if isinstance(peers, StorePeers) and (peers.store, peers.replica, peers.of) == (None, None, 1):
        found["peers"] = ALONE
    return found
