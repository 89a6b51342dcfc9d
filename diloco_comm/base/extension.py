"""Versions that must fit: of the C++ extension and torch, and of processes that talk to each other.

``load`` loads the extension, or says in one sentence why this Python and torch cannot load it.
torch's C++ interface changes between its minor versions, so the extension runs only with the minor
version of torch that it was built for. Under another version it does not load, or it loads and
misreads torch's objects.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import mmap
import re
from pathlib import Path

import torch

_NAME = "diloco_comm._C"
# module.cpp writes this text into the extension, followed by the version.
_MARK = b"diloco_comm is built for torch "

# Versions of the protocols between processes of this package. Raise a number with every change that
# a process with the number before would misread. The headers of exchanges have a version of their
# own, in csrc/exchange/transport/message.h.
# HANDSHAKE: the meeting of replicas on a store, and the JSON that they compare there, before their
# first exchange, at a flush and after a change of the group. A new size of the exchanges' headers
# needs a new number here, too: two replicas that post different sizes abort before they compare the
# version in the headers.
HANDSHAKE = 3
# GROUP: beats of members in the table of a group, as JSON; a group's records and messages have
# other versions.
GROUP = 1
# TRANSFER: requests of a replica that joins, and its donors' answers, over the link.
TRANSFER = 4
# ASYNCHRONOUS: frames between a server of asynchronous or decoupled training and its workers.
ASYNCHRONOUS = 5

# The name of HANDSHAKE among the settings that replicas compare. A peer of a release without such a
# version shows this name in its message about the difference.
HANDSHAKE_NAME = "handshake version of diloco_comm"


def load() -> None:
    """Import the extension, which registers ``torch.ops.diloco_comm.*``.

    Raises:
        ImportError: If the extension is missing, built for another torch, or cannot be loaded; its
            ``name`` is the extension.
    """
    built_for = _built_for()
    if built_for is not None and built_for != minor_version(torch.__version__):
        raise ImportError(
            f"the C++ extension of diloco_comm is built for torch {built_for}, and this is torch "
            f"{torch.__version__}: install torch {built_for} (`pip install 'torch=={built_for}.*'`)"
            ", or build the extension for this one (`pip install --no-build-isolation "
            "--force-reinstall --no-deps .` in its sources)",
            name=_NAME,
        )
    try:
        importlib.import_module(_NAME)
    except ImportError as error:
        raise ImportError(
            "the C++ extension of diloco_comm is not built for this Python and torch "
            f"(torch {torch.__version__}): run `pip install --no-build-isolation .` in its sources "
            f"({error})",
            name=_NAME,
        ) from error


def minor_version(version: str) -> str:
    """Return "2.13" for "2.13.0+cpu" and "2.13.0a0+git1234"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _built_for() -> str | None:
    """Read the minor version of torch from the extension's file; None if the file has none."""
    spec = importlib.util.find_spec(_NAME)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    with open(spec.origin, "rb") as file:
        try:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            # The file is empty: loading the extension gives a better error.
            return None
        with content:
            begin = content.find(_MARK) + len(_MARK)
            found = re.match(rb"\d+\.\d+", content[begin : begin + 16])
            return None if found is None else found[0].decode()


def package_version() -> str:
    """Return the version of this package, for messages."""
    from .. import __version__

    return __version__


def refusal(given: int, spoken: int) -> str:
    """Return the sentence about a message of another version.

    Args:
        given: Protocol version of the message.
        spoken: Protocol version that is spoken here.
    """
    return (
        f"protocol version {given} was given, {spoken} is spoken here, by diloco_comm "
        f"{package_version()}: install the same version of diloco_comm on both sides"
    )


_MOST_KNOWN = 16


class RefusedVersions:
    """The protocol versions that a server has refused; each is logged once.

    Args:
        peer: The word for a refused process in the log, such as "a worker".
    """

    def __init__(self, logger: logging.Logger, peer: str) -> None:
        self._logger, self._peer = logger, peer
        self._known: set[int] = set()

    def log(self, version: int, error: Exception) -> None:
        """Log the refusal of a version, unless that version was logged before."""
        # A stranger may send any number of versions, so that only the first few are logged.
        if type(version) is int and version not in self._known and len(self._known) < _MOST_KNOWN:
            self._known.add(version)
            self._logger.warning("%s was refused: %s", self._peer, error)
