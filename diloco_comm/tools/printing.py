"""What sub-commands print for people or, with ``--json``, for programs."""

from __future__ import annotations

import json
from collections.abc import Callable


def announcer(as_json: bool) -> Callable[[str], None]:
    """Return what prints the address that a command listens on, at once."""

    def announce(address: str) -> None:
        text = json.dumps({"schema": 1, "address": address}) if as_json else address
        print(text, flush=True)

    return announce
