"""The sub-command ``diloco-comm replay``: repeat the merges of a syncer from its tape."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.exits import fail, sentence_of

EXAMPLES = """Examples:

\b
diloco-comm replay snapshots
"""


def replay(
    tape: Annotated[Path, typer.Argument(help="Snapshot folder of a syncer that has ended.")],
    every: Annotated[
        bool, typer.Option("--every", help="Print a line for each merge: who, how many steps.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Repeat the merges of decoupled training, and compare each with the tape to the bit.

    The tape begins with the run if the syncer had --keep-tape, else with its newest snapshot.
    """
    from ...asynchronous.decoupled.tape import replay as repeat
    from ...base.log import DamagedLog

    def show(record: dict[str, Any], model: object) -> None:
        if as_json:
            print(json.dumps(record))
            return
        rows = zip(record["reports"], record["weights"], strict=True)
        reports = ", ".join(
            f"{name} ({steps} steps, {tokens} tokens, weight {weight:.4f})"
            for (name, _, _, steps, tokens), weight in rows
        )
        print(f"fragment {record['fragment']} version {record['version']}: {reports}")

    try:
        done = repeat(tape, show if every else lambda record, model: None)
    except (ValueError, OSError, DamagedLog) as error:
        fail(sentence_of(error))
    if as_json:
        print(json.dumps({"schema": 1, **dataclasses.asdict(done)}))
        return
    print(
        f"merges {done.first + 1} to {done.last} give the same bits: {done.reports} reports of "
        f"{len(done.learners)} learners"
        if done.last > done.first
        else f"the tape has no merge after the snapshot of merge {done.first}"
    )
    if done.first:
        print(
            f"merges 1 to {done.first} are not on the tape: the syncer ran without --keep-tape, or "
            "began its tape later"
        )
    if done.is_compared:
        print("the newest snapshot has the same bits too")
