"""A service of the command line, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO


class Hosted:
    """A service of the command line that can be killed and come again; a context manager.

    Args:
        words: Sub-command and its options.
        log: File for its errors; None: this program's own.
        hub: Namespace in which the service runs; "": this program's own.
    """

    def __init__(self, words: Sequence[str], log: IO[str] | None = None, hub: str = "") -> None:
        inside = ["ip", "netns", "exec", hub] if hub else []
        self._command = [*inside, sys.executable, "-m", "diloco_comm_tools.cli", *words]
        self._log = log
        self.start()

    def __enter__(self) -> Hosted:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def wait(self) -> str:
        """Wait until the service listens; return the line that it prints then.

        Raises:
            RuntimeError: If the service has ended.
        """
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"the command has not begun: {' '.join(self._command)}")
        return line.strip()

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        self.process.wait()
