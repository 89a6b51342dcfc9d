"""Options, sentences and exit statuses of sub-commands.

Options may be fields of dataclasses, and rare ones are left out of a short help page.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

FAILED = 1
MISUSED = 2

# The panel of rare options; ``--help-all`` shows it.
MORE = "More options"
# For each command, options of earlier versions that are sub-commands of the same names now. If a
# command line has several, the first one in this list counts.
FORMER: Mapping[str, Sequence[str]] = {
    "plan": ("--published", "--failures", "--decoupled"),
    "serve": ("--status", "--truncate", "--decoupled"),
}


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


# --------------------------------------------------------------------- options by dataclasses


def option(help: str, *names: str) -> Any:
    """Describe an option that is a field of a dataclass."""
    return typer.Option(*names, help=help)


def rare(help: str, *names: str) -> Any:
    """Describe an option that only ``--help-all`` shows."""
    return typer.Option(*names, help=help, hidden=True, rich_help_panel=MORE)


def _show_all(context: typer.Context, is_asked: bool) -> None:
    if not is_asked:
        return
    rare_ones: list[Any] = [
        one for one in context.command.params if getattr(one, "rich_help_panel", None) == MORE
    ]
    for one in rare_ones:
        one.hidden = False
    typer.echo(context.get_help())
    for one in rare_ones:
        one.hidden = True
    raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        callback=_show_all,
        is_eager=True,
        help="Show the rare options, too.",
    ),
]


def with_dataclasses(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of its arguments that are dataclasses.

    A field's ``Annotated`` type describes its option, and has the field's default. A dataclass that
    refuses its values with a ValueError ends the command with that sentence.
    """
    hints = get_type_hints(function, include_extras=True)
    kinds: dict[str, Any] = {
        name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)
    }
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in kinds:
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=keyword, annotation=hints[name]))
            continue
        of_fields = get_type_hints(kinds[name], include_extras=True)
        parameters += [
            _parameter(field.name, field.default, of_fields[field.name])
            for field in dataclasses.fields(kinds[name])
        ]
    parameters.append(_parameter("help_all", False, HelpAll))

    @functools.wraps(function)
    def command(help_all: bool, **values: Any) -> None:
        for name, kind in kinds.items():
            names = [field.name for field in dataclasses.fields(kind)]
            with in_sentences(names):
                values[name] = kind(**{one: values.pop(one) for one in names})
        function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def is_for_below(context: typer.Context, given: Mapping[str, str]) -> bool:
    """Whether a sub-command of this command is called; an error if options precede its name."""
    name = context.invoked_subcommand
    if name is not None and given:
        options = ", ".join(given.values())
        misuse(f"{options} stands before {name}: write the options of {name} behind its name")
    return name is not None


def as_today(arguments: list[str]) -> list[str]:
    """Return a command line in which former options (``FORMER``) are the sub-commands of today."""
    if not arguments:
        return []
    command, *words = arguments
    end = words.index("--") if "--" in words else len(words)
    found = {word.partition("=")[0] for word in words[:end]}
    if command == "plan" and "--workers" in found:
        note("--workers is deprecated: its name is --replicas")
        words[:end] = [re.sub("^--workers(?=$|=)", "--replicas", word) for word in words[:end]]
    options = FORMER.get(command, ())
    for former in options:
        if former in found:
            # A value behind "=" is an argument of the sub-command.
            values = [word.removeprefix(f"{former}=") for word in words[:end]]
            return [command, former[2:], *(v for v in values if v not in options), *words[end:]]
    return [command, *words]
