"""Run ``diloco-comm`` within the test's process, and read the examples of its help."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import typer

from diloco_comm_tools import cli
from diloco_comm_tools.app import app
from diloco_comm_tools.common.commands import MORE

# Typer builds the whole tree of commands at every call, which takes longer than most tests.
command_of = functools.cache(typer.main.get_command)


@dataclass(frozen=True)
class Ended:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


def run_cli(*arguments: object) -> Ended:
    """Run a sub-command as the console script would."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(typer.main, "get_command", command_of),
        # The command chooses what torch says.
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", ["diloco-comm", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
            status: object = 0
        except SystemExit as end:
            status = end.code
    if isinstance(status, str):
        err.write(status + "\n")
        status = 1
    return Ended(int(status or 0), out.getvalue(), err.getvalue())


def check_misuse(ended: Ended, *named: str) -> None:
    """Status 2, nothing printed but one sentence that names what is wrong."""
    assert (ended.status, ended.out) == (2, ""), ended
    assert re.fullmatch(r"diloco-comm: [^\n]+\n", ended.err), ended.err
    for words in named:
        assert words in ended.err


def examples(epilog: str) -> list[list[str]]:
    """Return the arguments of each command in the examples of a ``--help``."""
    lines = [line for line in epilog.splitlines() if line.startswith("diloco-comm ")]
    assert lines
    return [shlex.split(line)[1:] for line in lines]


def help_examples(*path: str) -> dict[str, list[str]]:
    """The lines in the help of each command below ``path`` that run diloco-comm, by its name."""
    command: Any = command_of(app)
    for name in path:
        command = command.commands[name]
    found = {}
    if not hasattr(command, "commands") or command.invoke_without_command:
        text = f"{command.help}\n{command.epilog or ''}"
        lines = [line.strip() for line in text.splitlines()]
        starts = ("diloco-comm ", "torchrun ")
        found[" ".join(path)] = [line for line in lines if line.startswith(starts)]
    for name, below in getattr(command, "commands", {}).items():
        found |= {} if below.hidden else help_examples(*path, name)
    return found


def check_arguments(arguments: list[str], place: str) -> None:
    """The command line would be accepted, and has no hidden option; nothing is run.

    Args:
        place: Where the command stands, for the message.
    """
    command: Any = command_of(app)
    name, context = "diloco-comm", None
    usage_error: Any = typer.BadParameter.__base__
    try:
        while True:
            context = command.make_context(name, list(arguments), parent=context)
            hidden = [
                one.opts[0]
                for one in command.params
                if getattr(one, "hidden", False) and one.rich_help_panel != MORE
            ]
            assert not {word.partition("=")[0] for word in arguments} & {*hidden}, place
            arguments = [*getattr(context, "_protected_args", ()), *context.args]
            if not hasattr(command, "commands") or not arguments:
                return
            name, command, arguments = command.resolve_command(context, arguments)
    except usage_error as error:
        raise AssertionError(f"{place}: {error.format_message()}") from None


def check_documented(keys: Iterable[str], page: str) -> None:
    """Every key stands in a page of ``docs/``, in backquotes."""
    text = (Path(__file__).parents[3] / "docs" / page).read_text()
    assert [key for key in keys if f"`{key}`" not in text] == []


def check_schema(value: Any, schema: Any, path: str = "$") -> None:
    """Compare JSON with a schema of types: a dict has exactly these keys, a list one item type.

    A tuple is a choice; ``None`` is null; a dict with the key ``...`` has any keys.
    """
    if isinstance(schema, tuple):
        matching = [choice for choice in schema if _matches(value, choice)]
        assert matching, f"{path}: {value!r}"
        check_schema(value, matching[0], path)
    elif isinstance(schema, dict):
        assert isinstance(value, Mapping), f"{path}: {value!r}"
        if ... in schema:
            for key, item in value.items():
                check_schema(item, schema[...], f"{path}.{key}")
            return
        assert value.keys() == schema.keys(), f"{path}: {value.keys() ^ schema.keys()}"
        for key, item in schema.items():
            check_schema(value[key], item, f"{path}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), f"{path}: {value!r}"
        for i, item in enumerate(value):
            check_schema(item, schema[0], f"{path}[{i}]")
    else:
        assert _matches(value, schema), f"{path}: {value!r} is no {schema}"


def _matches(value: Any, schema: Any) -> bool:
    if schema is None:
        return value is None
    if isinstance(schema, (dict, list)):
        return isinstance(value, type(schema))
    if schema is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, schema) and (schema is bool or not isinstance(value, bool))
