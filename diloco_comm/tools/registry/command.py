"""The sub-command ``diloco-comm registry`` and its own sub-command ``keygen``."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.exits import fail, in_options, misuse, sentence_of
from ..common.hosting import (
    AddressAsJson,
    Listen,
    RelayPort,
    closed_by_signal,
    relay_beside,
    serve_until_signal,
)
from ..common.outputs import check_folder
from ..common.printing import announcer

# The paragraphs behind \b keep their line breaks.
EXAMPLES = """Examples:

\b
diloco-comm registry --journal journal
diloco-comm registry --journal journal --listen 10.0.0.5:29400 --keys keys
"""
KEYGEN_EXAMPLES = """Examples:

\b
diloco-comm registry keygen keys --worker paris --worker tokyo
"""

registry_app = typer.Typer(
    help="Host the registry at which replicas agree on their group, or make its keys.",
    epilog=EXAMPLES,
)


@registry_app.callback(invoke_without_command=True)
def registry(
    context: typer.Context,
    journal: Annotated[
        Path | None,
        typer.Option(help="Folder of the journal; without it a restart forgets all runs."),
    ] = None,
    listen: Listen = "127.0.0.1:29400",
    keys: Annotated[Path | None, typer.Option(help="Folder of CURVE keys.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen on an open address without keys.")
    ] = False,
    drop_after: Annotated[
        float, typer.Option(help="Seconds after which a silent replica's last beat is dropped.")
    ] = 600.0,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate",
            help="Cut a damaged journal off at the damage, keep the rest beside it, and end.",
        ),
    ] = False,
    relay_port: RelayPort = None,
    as_json: AddressAsJson = False,
) -> None:
    """Host the registry of elastic membership, until Ctrl-C or SIGTERM.

    One registry serves many runs. Training goes on while the registry is away; only changes of the
    group wait.
    """
    if context.invoked_subcommand is None:
        # A journal that is cut off half is no normal end.
        with contextlib.nullcontext() if truncate else closed_by_signal():
            options = {"keys": keys, "insecure": insecure, "drop_after": drop_after}
            _host(context, listen, relay_port, journal, truncate, as_json, options)


def _host(
    context: typer.Context,
    listen: str,
    relay_port: int | None,
    journal: Path | None,
    truncate: bool,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    """Host the registry, or cut its journal off, and end with a sentence if that fails."""
    from ...base.log import DamagedLog
    from ...elastic.registry.journal import FILE, Journal
    from ...elastic.registry.server import RegistryServer

    try:
        check_folder("--journal", journal, may_be_full=True)
        if truncate:
            if journal is None or not os.path.lexists(journal / FILE):
                misuse("--truncate needs --journal with the folder of a journal")
            opened = Journal(journal, truncates=True)
            opened.close()
            print(opened.cut or f"{opened.path} is not damaged: nothing was cut off")
            return
        server = RegistryServer(listen, journal=journal, **options)
        if journal is None:
            print("diloco-comm: without --journal a restart forgets all runs", file=sys.stderr)
        with relay_beside(listen, relay_port):
            serve_until_signal(server, announcer(as_json))
    except ValueError as error:
        misuse(in_options(str(error), context.params))
    except DamagedLog as error:
        fail(str(error))
    except OSError as error:
        fail(sentence_of(error))


@registry_app.command(epilog=KEYGEN_EXAMPLES)
def keygen(
    folder: Annotated[Path, typer.Argument(help="Folder for the keys.")] = Path("keys"),
    worker: Annotated[
        list[str] | None, typer.Option(help="Name of a replica's pair; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the paths in JSON.")] = False,
) -> None:
    """Make CURVE keys for a registry and its replicas."""
    from ..keys.command import write_keys

    write_keys(folder, worker, as_json=as_json)
