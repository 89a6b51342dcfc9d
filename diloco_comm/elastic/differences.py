"""Which setting of two replicas differs, in words."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from ..base.service.keys import LinkKeys
from .hosting import settings_of
from .views import View

MISSING = "nothing"
_LONGEST = 200


def found_difference(
    view: View, address: str, shown: str, timeout_s: float, keys: LinkKeys | None = None
) -> str:
    """Say what differs from the lowest member of a view; "" if that member does not answer.

    Args:
        address: ``tcp://host:port`` of the store at which that member is found.
        shown: What this replica has, as JSON.
        keys: This replica's keys, for the store of that member.
    """
    try:
        theirs = json.loads(settings_of(view, address, timeout_s, keys))
    except (dist.DistError, ValueError):
        return ""
    found = difference(json.loads(shown), theirs)
    return f" ({found}, on replica {view.lowest.id})" if found else ""


def difference(here: Any, there: Any, name: str = "") -> str:
    """Say where two values of JSON types differ first; "" if they are equal.

    Args:
        here, there: What this replica and another one have.
        name: Of the value, with dots; "" at the top.
    """
    if here == there:
        return ""
    if isinstance(here, dict) and isinstance(there, dict):
        values = {key: (here.get(key, MISSING), there.get(key, MISSING)) for key in here | there}
        key = next(key for key, (ours, theirs) in values.items() if ours != theirs)
        return difference(*values[key], f"{name}.{key}" if name else key)
    if isinstance(here, list) and isinstance(there, list):
        longest = range(max(len(here), len(there)))
        ours, theirs = ([*one, *[MISSING] * (len(longest) - len(one))] for one in (here, there))
        place = next(index for index in longest if ours[index] != theirs[index])
        return difference(ours[place], theirs[place], f"{name}[{place}]")
    return f"{name} is {_shown(here)} here and {_shown(there)} there"


def _shown(value: Any) -> str:
    text = value if value == MISSING else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
