"""Exit statuses and error messages of sub-commands."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import NoReturn

import typer

FAILED = 1
MISUSED = 2


def note(message: str) -> None:
    """Print one sentence to stderr, and go on."""
    print(f"diloco-comm: {message}", file=sys.stderr)


def misuse(message: str) -> NoReturn:
    """Print one sentence about a wrong option or value, and end with status 2."""
    print(f"diloco-comm: {message}", file=sys.stderr)
    raise typer.Exit(MISUSED)


def fail(message: str) -> NoReturn:
    """Print one sentence about a failure, and end with status 1."""
    print(f"diloco-comm: {message}", file=sys.stderr)
    raise typer.Exit(FAILED)


def sentence_of(error: Exception) -> str:
    """Return an error in one sentence; an error of the operating system names its file."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@contextlib.contextmanager
def in_sentences(
    names: Iterable[str] = (), failures: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """End the command with a sentence: status 2 after a ValueError, status 1 after a failure.

    Args:
        names: Names of arguments, as of ``in_options``.
    """
    try:
        yield
    except ValueError as error:
        misuse(in_options(str(error), names))
    except failures as error:
        fail(sentence_of(error))


def given_options(context: typer.Context) -> dict[str, str]:
    """Return the options that the user gave: name of the argument, and name on the command line."""
    found = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name is not None and source is not None and source.name == "COMMANDLINE":
            found[parameter.name] = max(parameter.opts, key=len)
    return found


def in_options(sentence: str, names: Iterable[str]) -> str:
    """Replace names of arguments in a message of the library by the command's options.

    Args:
        sentence: The message, such as "sync_every must be at least 1".
        names: Names of the arguments. A name of a single word is replaced only where its place in
            the sentence shows that it is an argument.
    """
    for name in names:
        forms = [rf"^(the |outer )?{name}(?= (must|is)\b)", rf"\b{name}=(True)?"]
        forms += [rf"\b{name}\b"] * ("_" in name)
        option = f"--{name.replace('_', '-')}"
        sentence = re.sub(rf"\b{name}=(?!True)(?=\w)", f"{option} ", sentence)
        sentence = re.sub("|".join(forms), option, sentence)
    return sentence
