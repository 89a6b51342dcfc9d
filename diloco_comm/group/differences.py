"""Which setting of two replicas differs, in words."""

from __future__ import annotations

import json
from typing import Any

MISSING = "nothing"
_LONGEST = 200


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
