"""Read the events of a Kineto trace (JSON) piece by piece, in memory of constant size.

A piece ends between two events, at the characters ``}`` ``,`` ``{``. These characters may also lie
inside an event or a string. Then the piece is no JSON array, and an earlier end is tried: a piece
that parses between two brackets is a list of whole events.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from .trace import TraceError

PIECE_BYTES = 1 << 20
# Most bytes of the text before the events, of the text after them, and of one event.
LARGEST_REST = 64 << 20
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_SPACE = re.compile(r"\s*")
_decode = json.JSONDecoder().raw_decode


class EventReader:
    """Iterate over lists of events; ``metadata`` is complete after the last list.

    Raises:
        TraceError: While iterating, if the file is empty, foreign or truncated.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._file = _unzip(file)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        rest = self._read_head()
        is_last = False
        while not is_last:
            piece = self._read()
            is_last = not piece
            rest += piece
            cut, events = _whole_events(rest)
            if cut:
                rest = rest[cut:]
                yield events
            elif len(rest) > LARGEST_REST:
                raise TraceError(f"{self.path} is no trace: its events are not JSON objects")
        yield self._read_tail(rest)

    def _read(self) -> bytes:
        try:
            return self._file.read(PIECE_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{self.path} is truncated or no gzip file: {error}") from None

    def _read_head(self) -> bytes:
        """Parse the text before the events; return the bytes of events that were read with it."""
        head = b""
        while True:
            piece = self._read()
            head += piece
            if not head:
                raise TraceError(f"{self.path} is empty")
            if head.lstrip()[:1] not in (b"{", b""):
                raise TraceError(f"{self.path} is no Kineto trace: it is not a JSON object")
            found = head.find(b'"traceEvents"')
            while found >= 0:
                array = re.compile(rb'"traceEvents"\s*:\s*\[').match(head, found)
                if array and self._take_members(head[:found].decode(errors="replace")):
                    return head[array.end() :]
                found = head.find(b'"traceEvents"', found + 1)
            if not piece or len(head) > LARGEST_REST:
                raise TraceError(f"{self.path} is no Kineto trace: it has no traceEvents")

    def _take_members(self, text: str) -> bool:
        """Store the members of a text such as ``{"a": 1, "b": 2,``; False for other texts."""
        try:
            self.metadata.update(json.loads(text.rstrip().rstrip(",") + "}"))
        except ValueError:
            return False
        return True

    def _read_tail(self, rest: bytes) -> list[dict[str, Any]]:
        """Parse the last event and the text after the events."""
        truncated = TraceError(f"{self.path} is truncated: its events do not end")
        try:
            text = rest.decode()
        except UnicodeDecodeError:
            raise truncated from None
        events, at = [], _skip(text, 0)
        try:
            while text[at] != "]":
                event, at = _decode(text, at)
                events.append(event)
                at = _skip(text, at)
                if text[at] == ",":
                    at = _skip(text, at + 1)
            members = text[at + 1 :].strip().removeprefix(",").strip()
            self.metadata.update(json.loads("{" + members))
        except (ValueError, IndexError):
            raise truncated from None
        return _checked(events)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn the garbage collector off: JSON has no cycles, and two thirds of the time are saved."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _whole_events(rest: bytes) -> tuple[int, list[dict[str, Any]]]:
    """Return the position after the last whole event, and all whole events."""
    end = len(rest)
    while end > 0:
        at = rest.rfind(b"}", 0, end)
        if at < 0:
            break
        if (between := _BETWEEN.match(rest, at)) is not None:
            try:
                return between.end() - 1, _checked(json.loads(b"[" + rest[: at + 1] + b"]"))
            except ValueError:
                pass
        end = at
    return 0, []


def _checked(events: list[Any]) -> list[dict[str, Any]]:
    return [event for event in events if isinstance(event, dict)]


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found
    return found.end()


def _unzip(file: IO[bytes]) -> IO[bytes]:
    is_gzip = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if is_gzip else file  # type: ignore[return-value]
