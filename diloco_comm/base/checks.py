"""Checks of single arguments, which return plain Python values; warnings; and loggers.

This module imports nothing of the package, so every other module may import it.
"""

from __future__ import annotations

import logging
import math
import operator
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from types import FrameType
from typing import Any, NoReturn

# Longer timeouts are cut to ten years: far below the 292 years at which a signed 64-bit count of
# nanoseconds overflows.
_MAX_TIMEOUT_S = 10 * 365 * 86400.0
# Largest number in a signed field of 32 bits, such as ``round`` in the headers of exchanges.
MOST_INT32 = 2**31 - 1
# Top-level packages whose frames are not the user's program: a warning looks further out.
_NOT_THE_USERS = frozenset(
    {
        *("diloco_comm", "diloco_comm_tools", "torch"),
        *("contextlib", "functools", "threading"),
        *("transformers", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric"),
    }
)


class Unset(Enum):
    """The default of an argument whose value None has a meaning of its own."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET


def integer(name: str, value: Any, least: int | None = None, *, most: int | None = None) -> int:
    """Return an integer of any type, NumPy's too, as int.

    Raises:
        ValueError: If the value is no integer, a bool, below ``least`` or above ``most``.
    """
    found = None
    if not isinstance(value, bool):
        with suppress(TypeError):
            found = operator.index(value)
    if found is None or (least is not None and found < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be an integer{bound}, got {value!r}")
    if most is not None and found > most:
        raise ValueError(f"{name} must be at most {most}, which a header holds, got {value!r}")
    return found


def number(name: str, value: Any, expected: str = "a number") -> float:
    """Return a number of any type, also a tensor of one element, as float.

    Raises:
        TypeError: If the value is no number, a bool or text.
    """
    if not isinstance(value, (bool, str, bytes)):
        # A tensor of several elements raises RuntimeError.
        with suppress(TypeError, ValueError, RuntimeError):
            return float(value)
    raise TypeError(f"{name} must be {expected}, got {value!r}")


def not_negative(name: str, value: Any, expected: str = "a number") -> float:
    """Return a finite ``number`` of 0 or more, such as a weight or a learning rate.

    Raises:
        ValueError: If the value is negative or not finite.
        TypeError: If the value is no number.
    """
    found = number(name, value, expected)
    if not 0 <= found < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {found}")
    return found


def flag(name: str, value: Any) -> bool:
    """Return a bool.

    Raises:
        TypeError: If the value is no bool, such as "no".
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def choice(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    """Raise ValueError unless the value is one of the allowed values."""
    if value not in allowed:
        names = ", ".join(map(str, allowed))
        raise ValueError(f"{name} must be one of {names}, got {value!r}")


def first_of(names: Sequence[str]) -> str:
    """Quote the first three names for a message, and say if there are others."""
    return ", ".join(map(repr, names[:3])) + (" and others" if len(names) > 3 else "")


def timeout_seconds(timeout: float | timedelta, name: str = "timeout") -> float:
    """Return a timeout in seconds; more than ten years become ten years.

    Raises:
        ValueError: If the timeout is not positive, or infinite.
        TypeError: If the timeout is neither a number nor a timedelta.
    """
    value = number(name, timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {timeout!r}")
    if math.isinf(value):
        raise ValueError(f"{name} must be finite, got {timeout!r}")
    return min(value, _MAX_TIMEOUT_S)


def class_of(value: object) -> str:
    """Return the name of a value's class behind its article, such as "an AdamW" and "an SGD"."""
    name = type(value).__name__
    is_spelled = name[:1] in "FHLMNRSX" and name[1:2].isupper()
    return f"{'an' if is_spelled or name[:1] in 'AEIOaeio' else 'a'} {name}"


def refuse_copy(what: object, remedy: str) -> NoReturn:
    """Raise TypeError for an attempt to pickle or copy an object with connections and threads.

    Args:
        remedy: The sentence that says what to save instead.
    """
    raise TypeError(
        f"{class_of(what)} holds connections and threads, and cannot be pickled or copied: {remedy}"
    )


def warn(sentence: str, category: type[Warning] = UserWarning) -> None:
    """Warn of something at the innermost line that belongs to the user's program.

    On a thread without such a line, the warning shows the caller of this function.
    """
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame) in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    try:
        warnings.warn(sentence, category, stacklevel=2 if frame is None else level)
    except Exception as error:
        # A warning that the program's filters turn into an error is raised. After
        # logging.captureWarnings(True) a handler of the program may fail: that error is only shown.
        if isinstance(error, category) or warnings.showwarning.__module__ != logging.__name__:
            raise
        _show_error()


def logger_of(module: str) -> logging.Logger:
    """Return the logger of a module.

    A handler that the program has installed may raise. The logger prints such an error to stderr
    instead of raising it in the code that logs, which may be in the middle of a step that the other
    replicas take too.
    """
    logger = logging.getLogger(module)
    handle = logger.handle

    def guarded(record: logging.LogRecord) -> None:
        try:
            handle(record)
        except Exception:
            _show_error()

    logger.handle = guarded  # type: ignore[method-assign]
    return logger


def _show_error() -> None:
    """Print the error of a handler, as ``logging.Handler.handleError`` prints one."""
    if logging.raiseExceptions:
        with suppress(Exception):
            traceback.print_exc()


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
