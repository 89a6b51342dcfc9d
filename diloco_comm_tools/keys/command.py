"""The sub-command ``diloco-comm keys``: the keys of registry, servers and links in one folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco_comm.base.errors import named

from ..common.commands import fail, misuse
from ..common.outputs import check_folder

if TYPE_CHECKING:
    from diloco_comm.base.service.keys import Keys

# The paragraphs behind \b keep their line breaks.
EXAMPLES = """Examples, on the machine of replica paris, and with tokyo's public file copied there:

\b
diloco-comm keys make keys paris
diloco-comm keys allow keys tokyo.key
diloco-comm keys list keys
diloco-comm keys remove keys tokyo
"""
MAKE_EXAMPLES = """Examples:

\b
diloco-comm keys make keys paris
diloco-comm keys make keys server paris tokyo --serve
"""
ALLOW_EXAMPLES = """Examples:

\b
diloco-comm keys allow keys tokyo.key lima.key
diloco-comm keys allow keys tokyo.key --replica 1
diloco-comm keys allow keys lima.key --replica 2 --replica 3
diloco-comm keys allow keys monitor.key --reads-only
"""
REMOVE_EXAMPLES = """Examples:

\b
diloco-comm keys remove keys tokyo
"""
LIST_EXAMPLES = """Examples:

\b
diloco-comm keys list keys --json
"""

Folder = Annotated[Path, typer.Argument(help="Folder of keys.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

keys_app = typer.Typer(
    help="Make keys for registry, store, servers and links, and say who may come in.",
    epilog=EXAMPLES,
    no_args_is_help=True,
)


@keys_app.command(epilog=MAKE_EXAMPLES)
def make(
    folder: Folder,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of the pairs.")],
    serves: Annotated[
        bool,
        typer.Option(
            "--serve", help="Make CURVE keys, too, for diloco-comm serve and its clients."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a pair of keys for each name: NAME.key for others, NAME.key_secret for its machine."""
    from diloco_comm.base.service.keys import make_pairs

    with _errors(folder):
        check_folder("FOLDER", folder)
        _print_files(make_pairs(folder, names, serves=serves), as_json=as_json)


@keys_app.command(epilog=ALLOW_EXAMPLES)
def allow(
    folder: Folder,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files NAME.key.")],
    replicas: Annotated[
        list[int] | None,
        typer.Option(
            "--replica",
            min=0,
            help="Number under which a key may take part over a link; several are possible. "
            "Default: any number.",
        ),
    ] = None,
    reads_only: Annotated[
        bool,
        typer.Option(
            "--reads-only",
            help="Let the owners look at a registry or a store, and change nothing there.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Let in the owners of public keys; counts within a second for what runs with this folder.

    The numbers of --replica replace all numbers before. They count when the group changes next.
    """
    from diloco_comm.base.service.keys import allow

    with _errors(folder):
        _print_files(allow(folder, files, replicas or (), reads_only=reads_only), as_json=as_json)


@keys_app.command(epilog=REMOVE_EXAMPLES)
def remove(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="Name of an allowed key.")],
    as_json: AsJson = False,
) -> None:
    """Let an owner in no longer; the connections of that key end within two seconds."""
    from diloco_comm.base.service.keys import remove

    with _errors(folder):
        _print_files([remove(folder, name)], as_json=as_json)


@keys_app.command("list", epilog=LIST_EXAMPLES)
def list_keys(folder: Folder, as_json: AsJson = False) -> None:
    """Show the public keys in a folder: own pairs, and whom the folder lets in."""
    from diloco_comm.base.service.keys import ALLOWED, READERS, SECRET, readable_keys

    with _errors(folder):
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}: `diloco-comm keys make` makes one")
        own = [
            {**_row(path, keys), "secret": path.with_suffix(SECRET).exists()}
            for path, keys in readable_keys(folder).items()
        ]
        allowed = [
            {**_row(path, keys), "replicas": keys.replicas}
            for path, keys in readable_keys(folder / ALLOWED).items()
        ]
        readers = [_row(path, keys) for path, keys in readable_keys(folder / READERS).items()]
    if as_json:
        print(json.dumps({"schema": 1, "own": own, "allowed": allowed, "readers": readers}))
        return
    for row in own:
        _print_row(row, "own pair" if row["secret"] else "public keys alone")
    for row in allowed:
        _print_row(row, f"allowed{_as_replicas(row['replicas'])}")
    for row in readers:
        _print_row(row, "may only read")
    if not allowed:
        print("nobody is allowed")


def _row(path: Path, keys: Keys) -> dict[str, Any]:
    return {"name": path.stem, "curve": keys.curve, "link": keys.link}


def _as_replicas(numbers: tuple[int, ...] | None) -> str:
    if numbers is None:
        return ""
    return f" as {named(numbers)}" if numbers else " as no replica: the line replicas is damaged"


def _print_row(row: dict[str, Any], kind: str) -> None:
    print(f"{row['name']}: {kind}")
    if row["curve"]:
        print(f"  curve {row['curve']}")
    print(f"  link  {row['link']}")


def write_keys(folder: Path, workers: list[str] | None, *, as_json: bool) -> None:
    """Make keys for a server and its clients, and print the files; end with a sentence."""
    from diloco_comm.base.service.keys import make_keys

    with _errors(folder):
        check_folder("FOLDER", folder)
        _print_files(make_keys(folder, workers or None), as_json=as_json)


def _print_files(files: list[Path], *, as_json: bool) -> None:
    paths = [str(path) for path in files]
    print(json.dumps({"schema": 1, "keys": paths}) if as_json else "\n".join(paths))


@contextlib.contextmanager
def _errors(folder: Path) -> Iterator[None]:
    """End the command with a sentence."""
    try:
        yield
    except ValueError as error:
        misuse(str(error))
    except OSError as error:
        reason, file = error.strerror or str(error), error.filename
        fail(f"cannot use {file or f'the keys in {folder}'}: {reason}")
