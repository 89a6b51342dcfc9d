"""Run the commands of a page of ``docs/`` as they stand there, and compare what they print.

Comments of the page mark the blocks, see ``pages``. A line ``...`` of a printed block stands for
any number of lines. Numbers and hashes may differ from the page: the ``form`` of two lines is
compared. This command runs a page for two machines, and writes what was printed this time into the
page:

    PYTHONPATH=$(echo . tests/support/* | tr ' ' :) \\
        python tests/support/tools/page_runner.py docs/tutorials/two-machines.md
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pages import ROOT, blocks_in

SKIP = "..."
_NUMBER = re.compile(r"\b[0-9a-f]{16}\b|\d+(\.\d+)*")
# What bash says when a background job ends depends on whether bash has a terminal.
_OF_BASH = re.compile(r"bash: line \d+: ")


def form(line: str) -> str:
    """Return a line without what differs between two runs: numbers, hashes, width of columns."""
    return " ".join(re.sub("─+", "─", _NUMBER.sub("#", line)).split())


class Terminal:
    """A shell that is typed into, and whose lines are read as they are printed."""

    def __init__(self, prefix: list[str]) -> None:
        self._shell = subprocess.Popen(
            [*prefix, "bash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._may_skip = False
        self.printed: list[str] = []

    def _read(self) -> None:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            if not _OF_BASH.match(line):
                self._lines.put(line.rstrip())

    def type(self, text: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(text)
        self._shell.stdin.flush()

    def expect(self, text: str, seconds: float) -> str:
        """Wait until the lines of a block are printed; return the block with the present lines.

        Raises:
            AssertionError: If another line is printed, or none in time.
        """
        lines = []
        for line in text.splitlines():
            if line == SKIP:
                self._may_skip = True
                lines.append(line)
            elif not line:
                lines.append(line)
            else:
                lines.append(self._expect_line(line, time.monotonic() + seconds))
        return "".join(f"{line}\n" for line in lines)

    def _expect_line(self, line: str, deadline: float) -> str:
        while True:
            try:
                printed = self._lines.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                last = "\n".join(self.printed[-20:])
                raise AssertionError(f"not printed in time: {line!r}, after\n{last}") from None
            self.printed.append(printed)
            if form(printed) == form(line):
                self._may_skip = False
                return printed
            assert self._may_skip or not printed, f"printed {printed!r}, the page says {line!r}"

    def close(self) -> None:
        """End the shell and all that it has started."""
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait()


def run_page(
    page: str, prefix_of: Callable[[str], list[str]], seconds: float
) -> tuple[str, Mapping[str, list[str]]]:
    """Run the marked blocks of a page.

    Args:
        page: The text of the page.
        prefix_of: Words before the shell of a terminal, by its name (``ip netns exec NAME``).
        seconds: How long to wait for a line.

    Returns:
        The page with the lines that were printed this time, and all lines of each terminal.
    """
    terminals: dict[str, Terminal] = {}
    lines = page.splitlines(keepends=True)
    written, end = [], 0
    try:
        for block in (block for block in blocks_in(page) if block.verb):
            for name in block.terminals:
                if name not in terminals:
                    terminals[name] = Terminal(prefix_of(name))
            text = block.code
            for name in block.terminals:
                if block.verb == "run":
                    terminals[name].type(block.code)
                else:
                    text = terminals[name].expect(block.code, seconds)
            begin = block.line - 1
            written += [*lines[end:begin], text]
            end = begin + block.code.count("\n")
    finally:
        for terminal in terminals.values():
            terminal.close()
    return "".join([*written, *lines[end:]]), {
        name: each.printed for name, each in terminals.items()
    }


def run_on_two_machines(page: str, seconds: float = 60.0) -> tuple[str, Mapping[str, list[str]]]:
    """Run a page whose terminals are named ``a`` or ``b`` for the machine, as in ``a-store``."""
    import cut_links

    with cut_links.Site(2) as site:
        names = dict(zip("ab", site.names, strict=True))
        return run_page(page, lambda name: ["ip", "netns", "exec", names[name[0]]], seconds)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(run_on_two_machines(path.read_text())[0])
