"""Files that a tool writes: checked before the work, and written after the results are printed.

If a file cannot be written, the error is a sentence that names the option: a ``ValueError`` before
the work, an ``OSError`` after it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Where there is no room for one page there will be none for the results.
_PAGE_BYTES = 4096


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
        real = Path(os.path.realpath(path))
        if not _exists(real):
            _try_folder(real.parent)
        elif real.is_dir():
            raise _os_error(errno.EISDIR)
        elif real.is_file():
            real.open("ab").close()
        elif not os.access(real, os.W_OK):
            raise _os_error(errno.EACCES)


def check_folder(option: str, folder: Path | None, *, may_be_full: bool = False) -> None:
    """Make sure that files can be made in a folder, which need not exist yet.

    Args:
        may_be_full: Accept a full disk, for programs that wait for room.

    Raises:
        ValueError: If no file can be made.
    """
    if folder is not None:
        with _sentence(option, folder, ValueError):
            num_bytes = 0 if may_be_full else _PAGE_BYTES
            _try_folder(Path(os.path.realpath(folder)), num_bytes)


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[Path]:
    """Make the folder of a file that the block writes, and name the option in errors.

    Raises:
        OSError: If the file cannot be written; its text is a sentence.
    """
    with _sentence(option, path, OSError):
        Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
        yield path


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
        raise kind(f"cannot write {option} {path}: {error.strerror or error}") from None


def _try_folder(folder: Path, num_bytes: int = _PAGE_BYTES) -> None:
    """Write a file without a name into the folder, or into its first parent that exists."""
    while not _exists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise _os_error(errno.ENOTDIR)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(num_bytes))


def _exists(path: Path) -> bool:
    """Whether a path exists; unlike ``Path.exists``, an unreadable path raises OSError."""
    try:
        path.stat()
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
