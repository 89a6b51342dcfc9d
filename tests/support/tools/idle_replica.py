"""A replica of a crew that does nothing."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection
from typing import Any

from diloco_comm_tools.demo.crew import Place


def idle(pipe: Connection, place: Place, given: Any) -> None:
    pipe.send("ready")
    signal.pause()
