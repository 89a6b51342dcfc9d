"""Files that a tool writes: checked before the work, and written after the results are printed.

If a file cannot be written, the error is a sentence that names the option: a ``ValueError`` before
the work, an ``OSError`` after it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ...base import files


def check_file(option: str, path: Path | None) -> None:
    """Make sure that a file can be written, its folder made for it where there is none.

    The check changes no file and leaves no file behind. Writing may still fail later.

    Args:
        option: The option that names the file, for the error.
        path: The file; None for no check.

    Raises:
        ValueError: If the file cannot be written.
    """
    if path is None:
        return
    with _sentence(option, path, ValueError):
        files.try_file(path)


def check_folder(option: str, folder: Path | None, *, may_be_full: bool = False) -> None:
    """Make sure that files can be made in a folder, which need not exist yet.

    Args:
        may_be_full: Accept a full disk, for programs that wait for room.

    Raises:
        ValueError: If no file can be made.
    """
    if folder is not None:
        with _sentence(option, folder, ValueError):
            files.try_folder(folder, 0 if may_be_full else files.PAGE_BYTES)


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[Path]:
    """Make the folder of a file that the block writes, and name the option in errors.

    A file that was not there before is not left behind in parts.

    Raises:
        OSError: If the file cannot be written; its text is a sentence.
    """
    was_there = os.path.lexists(path)
    with _sentence(option, path, OSError):
        Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
        try:
            yield path
        except OSError:
            if not was_there:
                path.unlink(missing_ok=True)
            raise


def plot_file(path: Path | None) -> Path | None:
    """Return the file of a figure; ``.png`` is added to a name without an ending."""
    if path is None or path.suffix:
        return path
    return path.with_name(f"{path.name}.png")


def check_plot(option: str, path: Path | None) -> None:
    """As ``check_file``, for a figure of matplotlib.

    Raises:
        ValueError: If the figure cannot be written, or matplotlib does not know the ending.
    """
    if path is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        endings = ", ".join(f".{name}" for name in sorted(formats))
        raise ValueError(f"{option} must end in one of {endings}, got {path}")
    check_file(option, path)


@contextlib.contextmanager
def _sentence(option: str, path: Path, kind: type[ValueError] | type[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = files.reason_of(error, path)
        raise kind(f"cannot write {option} {path}: {reason}") from None
