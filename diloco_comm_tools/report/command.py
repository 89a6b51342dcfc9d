"""``diloco-comm report``: installation, settings and the end of log files, as one file.

The file is for a bug report that others read. Keys, tokens and passwords are masked: those whose
values this machine tells (environment variables, CURVE keys in a file), wherever they stand, and
everything that has the form of one.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_comm.base import env
from diloco_comm.base.files import whole_file

from ..common.commands import fail, in_sentences, misuse
from ..common.outputs import check_file

# The paragraphs behind \b keep their line breaks.
EXAMPLES = """Examples:

\b
diloco-comm report
diloco-comm report train.log registry.log --config diloco.json --out report.txt
"""
MASK = "***"
# Columns of the part that doctor prints: so many that no value is wrapped, which would hide a
# secret from the search.
_WIDTH = 100_000
# The most characters of a line of a log, and how many lines before the shown ones are searched for
# the begin of a key.
_LONGEST = 4000
_LINES_OF_A_KEY = 400
# Shorter values of secret variables are words such as "1", which stand everywhere.
_SHORTEST = 6
# How the names of secret variables, fields and options end. A count of tokens is no secret.
_PASSWORD = r"(?:passw(?:or)?d|passphrase|[-_]pwd|[-_]pass|secret)"
_SECRET = (
    rf"(?:(?:api|secret|access|private|account|auth)[-_]?key|[-_]key|token|credentials?|cookie"
    rf"|{_PASSWORD})"
)
_SECRET_NAME = re.compile(rf"(?i)(?:^key|{_SECRET})$")
# The text between a name and its value; JSON inside a line of JSON has backslashes.
_IS = r"\\*[\"']?\s*[:=]\s*\\*(?!\*\*\*)"
# A quoted value ends at its quote; another one at a space or at a quote around name and value.
_QUOTED = r"[bru]?(?:\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|[\"'][^\n]*)"
_VALUE = rf"(?:{_QUOTED}|[^\s\"']+?(?=[,;)\]}}]*(?:[\s\"']|$)))"
# A header ends at the end of the line, or at the quote around its value.
_HEADER = rf"(?:\bauthorization|cookie){_IS}"
_SCHEME = r"(?:[a-z][\w\-]{0,30}[ \t]+(?=\S))?"
# The characters of a key of CURVE. Public keys are masked, too: they look as secret ones.
_Z85 = r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]"
_PRIVATE_KEY = r"[A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
# The forms of secrets. A match is masked, except for the text of its group.
_FORMS = tuple(
    re.compile(form)
    for form in (
        rf"()-----BEGIN {_PRIVATE_KEY}(?s:.*?)(?:-----END {_PRIVATE_KEY}|\Z)",
        # The rest of a key whose first line is not there: a short last line, and whole lines.
        rf"()(?:(?<![\w+/=])[A-Za-z0-9+/=]+\s+)?-----END {_PRIVATE_KEY}",
        r"()(?<![\w+/.\-])(?=[^\s]{0,59}\d)(?=[^\s]{0,59}[A-Z])(?=[^\s]{0,59}[a-z])"
        r"[A-Za-z0-9+/]{60,}={0,2}(?![\w.\-])",
        # tcp://user:password@host
        r"(://)[^\s/]+(?=@)",
        rf"(?i)({_HEADER}[bru]?\"{_SCHEME})[^\"\n]+",
        rf"(?i)({_HEADER}[bru]?'{_SCHEME})[^'\n]+",
        rf"(?i)({_HEADER}{_SCHEME})(?!\s|[bru]?[\"'])[^\n']+",
        r"(?i)(\bbearer\s+)[\w.~+/=\-]{6,}",
        # name = value, "name": "value"
        rf"(?i)({_PASSWORD}{_IS}){_VALUE}",
        rf"(?i)({_SECRET}{_IS})(?![\d.]+(?:[\s,;}}]|$)){_VALUE}",
        rf"(?i)((?<![\w\-])--[\w\-]*{_SECRET}\s+){_VALUE}",
        # The value of a plain "key", unless it is a word of a program.
        rf"(?i)((?<![a-z0-9])key{_IS}[\"']?)(?!\d+\b)[\w+/~=\-]{{8,}}(?!\.?[\w+/~=\-(\[])",
        r"()\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|AIza|wandb_)[\w\-]{12,}",
        r"()\beyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*",
        # A key of W&B, or another one of 40 hexadecimal digits.
        r"()\b[0-9a-f]{40}\b",
        # CURVE: 40 characters of Z85, with a digit or some signs, a capital and a small letter.
        # Signs before and after them may be the sentence's own.
        rf"()(?:(?<!{_Z85})|(?<=[=:(\[{{<>@&]))"
        rf"(?={_Z85}{{0,39}}\d|(?:{_Z85}{{0,12}}[+^!*?&{{}}@%$#]){{3}})"
        rf"(?={_Z85}{{0,39}}[A-Z])(?={_Z85}{{0,39}}[a-z])"
        rf"{_Z85}{{40}}(?=[)\]}}<>.:!?&]*(?!{_Z85}))",
    )
)


def report(
    logs: Annotated[
        list[Path] | None, typer.Argument(help="Log files whose last lines the report has.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The report.")] = Path("diloco-comm-report.txt"),
    config: Annotated[
        Path | None,
        typer.Option(help="JSON file of arguments; default: DILOCO_COMM_CONFIG."),
    ] = None,
    lines: Annotated[int, typer.Option(min=1, help="Last lines of each log.")] = 200,
    self_test: Annotated[
        bool, typer.Option(help="Let two processes on this machine exchange and compare.")
    ] = True,
    timeout: Annotated[float, typer.Option(help="Seconds the self-test may take.")] = 120.0,
) -> None:
    """Write doctor's findings, versions, settings and the end of logs into one file.

    Keys, tokens and passwords are masked. Read the file before you send it: names of hosts, folders
    and runs are in it.
    """
    if not 0 < timeout < float("inf"):
        misuse(f"--timeout must be a positive number, got {timeout:g}")
    if config is None and env.config_path():
        config = Path(env.config_path())
    with in_sentences():
        check_file("--out", out)
        for read in [*(logs or ()), *([config] if config else [])]:
            _refuse_to_read(read, out)
        secrets = secrets_of(os.environ)
        ends = {log: _last_lines(log, lines + _LINES_OF_A_KEY) for log in logs or ()}
        arguments = None if config is None else _read(config)
    from ..doctor import command, facts

    found = facts.examine()
    findings = facts.judge(found)
    test = command.self_test_of(findings, timeout) if self_test else None
    shown = {**found, "self_test": test, "job": None, "findings": facts.as_json(findings)}
    sections = {
        "doctor": _doctor(shown),
        "environment": "\n".join(_environment(os.environ)),
        "arguments": "no file of arguments" if arguments is None else f"{config}\n{arguments}",
    }
    text, num_masked = mask(_joined(sections), secrets)
    # torch's own text has no secrets, but hashes that look like some.
    text = _joined({"versions": _versions()}) + text
    for log, end in ends.items():
        # Mask before lines are cut: part of a secret would not be recognised.
        masked, count = mask(end, secrets)
        num_masked += count
        shown_lines = [line[:_LONGEST] for line in masked.splitlines()[-lines:]]
        text += _joined({f"last {lines} lines of {log}": "\n".join(shown_lines)})
    try:
        with whole_file("--out", out) as path, open(_private(path), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        fail(str(error))
    num_lines = len(text.splitlines())
    print(f"{out}: {num_lines} lines, {num_masked} values are masked; read it before you send it")


def _refuse_to_read(read: Path, out: Path) -> None:
    """Raise for a file that has no end, or that the report would replace."""
    if os.path.exists(read) and not os.path.isfile(read):
        raise ValueError(f"{read} is no regular file: give the files of logs")
    if os.path.exists(out) and os.path.exists(read) and os.path.samefile(read, out):
        raise ValueError(f"--out {out} is a file that the report reads: give another place")


def _joined(sections: Mapping[str, str]) -> str:
    return "".join(f"==== {title} ====\n{body.rstrip()}\n\n" for title, body in sections.items())


def mask(text: str, secrets: Iterable[str] = ()) -> tuple[str, int]:
    """Return a text without keys, tokens and passwords, and the number of masked values.

    Args:
        secrets: Values that are masked wherever they stand.
    """
    num_masked = 0
    for secret in sorted(secrets, key=len, reverse=True):
        num_masked += text.count(secret)
        text = text.replace(secret, MASK)
    for form in _FORMS:
        text, count = form.subn(rf"\g<1>{MASK}", text)
        num_masked += count
    return text, num_masked


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Return the secrets that the environment names: values of variables, and keys."""
    found = set()
    for name, value in environment.items():
        if not _SECRET_NAME.search(name):
            continue
        # os.path, because pathlib raises an error for a value that is too long for a path.
        if os.path.isfile(value):
            found |= _keys_in(Path(value))
        elif os.path.isdir(value):
            for file in Path(value).glob("*.key_secret"):
                found |= _keys_in(file)
        else:
            found.add(value)
    return {value for value in found if len(value) >= _SHORTEST}


def _keys_in(file: Path) -> set[str]:
    # A file that this user may not read has told no secret to the logs, either.
    with contextlib.suppress(OSError):
        return set(re.findall(r'"([^"\n]{40}|[0-9a-f]{64})"', file.read_text(errors="replace")))
    return set()


def _environment(environment: Mapping[str, str]) -> list[str]:
    """Return the variables of this package and of the libraries below it, one a line."""
    wanted = re.compile(
        r"DILOCO_COMM_|NCCL_|TORCH|GLOO_|OMP_|MKL_|CUDA_|HIP_|MASTER_|RANK$|WORLD_SIZE$|LOCAL_"
        r"|SLURM_(JOB_NUM_NODES|NTASKS|PROCID|LOCALID|NODEID)$|PYTHON|LD_PRELOAD$"
    )
    return [f"{name}={value}" for name, value in sorted(environment.items()) if wanted.match(name)]


def _doctor(shown: dict[str, Any]) -> str:
    from rich.console import Console

    from ..doctor.report import print_report

    text = io.StringIO()
    print_report(Console(file=text, width=_WIDTH), shown)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _versions() -> str:
    import torch

    from ..common.reports import about, record_text

    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    said = [f"written {now} by {sys.executable}", record_text(about()), torch.__config__.show()]
    return "\n".join(said)


def _last_lines(path: Path, count: int) -> str:
    """Return the end of a log.

    Raises:
        ValueError: If it cannot be read.
    """
    try:
        with path.open(errors="replace") as file:
            kept = deque((line.rstrip("\n") for line in file), maxlen=count)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    return "\n".join(kept)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def _private(path: Path) -> int:
    """Open a file to write that no other user can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor
