"""Write files of results: try the place before the work, and leave a whole file or none after it.

A full disk, a limit on the size of files and a folder that cannot be written end in an ``OSError``
that names the file and the reason, and, for a full disk, the bytes that are free. Functions that
need torch import it themselves, because tools that only plan work without torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)
# The size of a file that is written as a test: a disk without room for it has none for results.
PAGE_BYTES = 4096
# The name of a checkpoint's folder ends with the step at which the checkpoint was saved.
_STEP = re.compile(r"(.*?)(\d+)$")


def try_file(path: Path) -> None:
    """Find out whether a file can be written; change no file, and leave no file behind.

    Raises:
        OSError: If the file, or the first of its folders that is missing, cannot be made.
    """
    real = Path(os.path.realpath(path))
    if not _exists(real):
        try_folder(real.parent)
    elif real.is_dir():
        raise _error(errno.EISDIR)
    elif real.is_file():
        real.open("ab").close()
    elif not os.access(real, os.W_OK):
        raise _error(errno.EACCES)


def try_folder(folder: Path, num_bytes: int = PAGE_BYTES) -> None:
    """Find out whether files can be made in a folder, or in its nearest parent that exists.

    The test writes a temporary file, which is gone when the function returns.

    Raises:
        OSError: If that cannot be done.
    """
    folder = Path(os.path.realpath(folder))
    while not _exists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise _error(errno.ENOTDIR)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(num_bytes))


def _exists(path: Path) -> bool:
    """Whether a path exists; unlike ``Path.exists``, an unreadable path raises OSError."""
    try:
        path.stat()
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def why_not_written(error: BaseException, path: Path) -> str:
    """Say why a file could not be written, with the bytes that are free if the disk is full."""
    found = _os_error(error)
    if found is None:
        return str(error).partition("\n")[0]
    said = found.strerror or str(found)
    real = Path(os.path.realpath(path))
    is_device = os.path.exists(real) and not os.path.isfile(real)
    if found.errno not in _FULL or is_device:
        return said
    folder = real.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return f"{said}, {shutil.disk_usage(folder).free} bytes are free"


def _os_error(error: BaseException | None) -> OSError | None:
    """Return the OSError in the chain of causes of an error, since torch hides one; or None."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


@contextlib.contextmanager
def whole_file(what: str, path: Path) -> Iterator[Path]:
    """Give the block a file beside ``path`` to write, which then takes the place of ``path``.

    If the block fails, nothing of its file is left, and ``path`` is as before. The block gets
    ``path`` itself where no other file can take its place: a device, a pipe, an open file such as
    ``/dev/stdout``, and a file in a folder in which none can be made.

    Args:
        what: The name of the file's content in the message, such as "the trace".

    Raises:
        OSError: If the file cannot be written; its text is a sentence.
    """
    real = Path(os.path.realpath(path))
    partial = real.with_suffix(f".{os.getpid()}.partial{path.suffix}")
    written = partial
    try:
        if _keeps_its_place(path):
            written = path
            yield path
            return
        real.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb") as file:
            # Some file systems find out only now that the disk is full.
            os.fsync(file.fileno())
        os.replace(partial, real)
    except (OSError, RuntimeError) as error:
        if _os_error(error) is None:
            raise
        raise OSError(f"cannot write {what} {path}: {why_not_written(error, written)}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _keeps_its_place(path: Path) -> bool:
    if not _exists(path):
        return False
    absolute = path.absolute()
    is_open_file = absolute.parts[1] == "proc" or (
        absolute.parts[1] == "dev" and absolute.is_symlink()
    )
    folder = Path(os.path.realpath(path)).parent
    return is_open_file or not path.is_file() or not os.access(folder, os.W_OK)


def save_state(what: str, state: Any, path: Path) -> None:
    """Write a state with ``torch.save``, whole or not at all.

    Raises:
        OSError: If the file cannot be written; its text is a sentence.
    """
    import torch

    # torch gets an open file: given a path, it does not tell why it cannot write.
    with whole_file(what, path) as partial, partial.open("wb") as file:
        torch.save(state, file)


def load_state(file: Path, remedy: str) -> Any:
    """Read a state that ``save_state`` has written into the folder of a checkpoint.

    The file is read once more to compare its checksums, which takes about a second for each GiB.

    Args:
        remedy: The advice in the message on how to give another folder.

    Raises:
        ValueError: If the file is not there, or not whole; names the newest checkpoint beside it
            that has a whole one.
    """
    import torch

    reason = "is not there"
    if file.is_file():
        if _is_whole(file):
            return torch.load(file, map_location="cpu", weights_only=True)
        reason = "is not whole"
    newest = newest_whole(file)
    advice = remedy if newest is None else f"the newest checkpoint that is whole is {newest}"
    also = "" if newest is None else f": {remedy}"
    raise ValueError(f"training goes on from a checkpoint, but {file} {reason}: {advice}{also}")


def newest_whole(file: Path) -> Path | None:
    """Return the folder of the highest step that has a whole file of this name.

    The files are read from the newest down, to the first one that is whole.

    Args:
        file: A file in the folder of a checkpoint, such as ``checkpoint-500/diloco.pt``; the
            folders beside it with the same name and another number are looked at.
    """
    own = _STEP.match(file.parent.name)
    if own is None or not file.parent.parent.is_dir():
        return None
    found: list[tuple[int, Path]] = []
    for folder in file.parent.parent.iterdir():
        name = _STEP.match(folder.name)
        if name and name[1] == own[1]:
            found.append((int(name[2]), folder))
    newest_first = (folder for _, folder in sorted(found, reverse=True))
    return next((folder for folder in newest_first if _is_whole(folder / file.name)), None)


def _is_whole(file: Path) -> bool:
    """Whether a file that ``torch.save`` wrote exists, and every checksum in it is right."""
    try:
        with zipfile.ZipFile(file) as parts:
            return parts.testzip() is None
    # A damaged header raises errors of many types.
    except Exception:
        return False
