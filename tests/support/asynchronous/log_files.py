"""Read and write the records of a server's files, for tests that falsify them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from diloco_comm.asynchronous.payloads import PayloadFile
from diloco_comm.asynchronous.snapshots import JOURNAL, SNAPSHOT
from diloco_comm.base.log import Log

# A record: its JSON, or the text in place of it, and its bytes.
Row = tuple[Any, bytes]


def _kind(path: Path) -> str:
    return JOURNAL if path.name.startswith("journal") else SNAPSHOT


def read_rows(path: Path) -> list[Row]:
    """Return the records of a snapshot or a journal."""
    log = Log(path, _kind(path), is_writable=False)
    rows = [
        (json.loads(r.head), bytes(PayloadFile(log, r.body, r.body_bytes)[:].numpy()))
        for r in log.read()
    ]
    log.release()
    return rows


def write_rows(path: Path, rows: list[Row]) -> None:
    """Replace a file by one with these records, whose checksums and digests are right."""

    def fill(log: Log) -> None:
        for head, body in rows:
            text = head if isinstance(head, bytes) else json.dumps(head).encode()
            tensors = [torch.frombuffer(bytearray(body), dtype=torch.uint8)] if body else []
            log.append(text, tensors, len(body), is_durable=False)

    Log.create(path, _kind(path), fill=fill).close()


# ---------------------------------------------------------------------------- falsified JSON


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all numbers and texts in JSON."""
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from leaves(value[key], (*path, key))
    else:
        yield path


def put(head: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    head = copy.deepcopy(head)
    at = head
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return head


def others(value: Any) -> list[Any]:
    """Return values that falsify a field: near the right one, and of other types."""
    if isinstance(value, str):
        return [value + "x", value[:-1] + ("0" if value[-1:] != "0" else "1"), None]
    if isinstance(value, float):
        return [value * (1 + 1e-9), 2 * value, "1.0"]
    if value is None:
        return ["0", 1]
    return [value + 1, value - 1, value + 100, 2**70, str(value), None]


def at(head: dict[str, Any], path: tuple[Any, ...]) -> Any:
    value: Any = head
    for key in path:
        value = value[key]
    return value
