"""Files that a tool writes: checked before the work.

If a file cannot be written, the error is a ``ValueError``, a sentence that names the option. After
the results are printed the tools write their files with ``whole_file``.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from diloco_comm.base import files


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
    with _sentence(option, path):
        files.try_file(path)


def check_folder(option: str, folder: Path | None, *, may_be_full: bool = False) -> None:
    """Make sure that files can be made in a folder, which need not exist yet.

    Args:
        may_be_full: Accept a full disk, for programs that wait for room.

    Raises:
        ValueError: If no file can be made.
    """
    if folder is not None:
        with _sentence(option, folder):
            files.try_folder(folder, 0 if may_be_full else files.PAGE_BYTES)


def checked_plot(option: str, path: Path | None) -> Path | None:
    """As ``check_file``, for a figure; ``.png`` is added to a name without an ending.

    Raises:
        ValueError: If matplotlib is missing or does not know the ending, or the figure cannot be
            written.
    """
    if path is None:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"{option} needs matplotlib, which is not installed: pip install 'diloco_comm[plot]'"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    path = path if path.suffix else path.with_name(f"{path.name}.png")
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        endings = ", ".join(f".{name}" for name in sorted(formats))
        raise ValueError(f"{option} must end in one of {endings}, got {path}")
    check_file(option, path)
    return path


@contextlib.contextmanager
def _sentence(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = files.why_not_written(error, path)
        raise ValueError(f"cannot write {option} {path}: {reason}") from None
