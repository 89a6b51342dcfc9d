"""The methods and errors of a registry, and the limits that every implementation keeps."""

from __future__ import annotations

from typing import Protocol

from ...group.table import Look, Table, TableAway

MAX_RECORD_BYTES = 61440
MAX_BEAT_BYTES = 16384
MAX_NAME = 100
MAX_NAME_BYTES = 4 * MAX_NAME
# Seconds without a beat after which a registry forgets a member's last beat.
DROP_AFTER_S = 600.0
# A client whose key is refused tries again for so many seconds, in case the key is allowed.
KEY_WAIT_S = 10.0


class RegistryUnavailable(TableAway, ConnectionError):
    """The registry gave no answer in time, or could not do what it was asked; try again later.

    If the call was a swap, its outcome is unknown: the swap may have happened, and may still happen
    after this error. Read the record again. Write a nonce into each record, so that you can tell
    your own record from an equal one of another writer.
    """


class KeyRefused(RegistryUnavailable):
    """The registry does not accept the key of this client, or no longer."""

    is_refused = True


class RegistryMismatch(TableAway, RuntimeError):
    """At the address is another registry than before, or a registry of another version.

    Nothing was changed there, and no later call will succeed: in an empty registry, a second chain
    of records would begin beside the old one.
    """

    is_other = True


class Registry(Table, Protocol):
    """The table of a run: one record and the beats of the members, which other runs do not see.

    All methods that wait for an answer raise ``RegistryUnavailable`` if none comes within the
    ``timeout_s`` that was given to ``connect``, and ``RegistryMismatch`` if another registry
    answers.
    """

    @property
    def is_durable(self) -> bool:
        """Whether a swap that has returned survives a crash of the registry.

        The server of ``diloco-comm registry`` is asked if it has not answered yet.
        """
        ...

    @property
    def registry_id(self) -> str:
        """The registry's random id, drawn when it began empty; "" before the first answer.

        Every call compares the id with the expected one.
        """
        ...

    def read(self) -> bytes:
        """Return the record, b"" if there is none; linearizable."""
        ...

    def beat(self, member: str, text: bytes) -> dict[str, bytes]:
        """Publish a member's beat in place of its beat before, and return all last beats.

        Beats are not durable: after a restart of the registry a beat is there again when its member
        has beaten again. A beat that no other has followed for long is dropped.

        Args:
            member: 1 to 100 printable characters without spaces. The empty name publishes nothing.
            text: At most 16384 bytes; b"" removes the member's last beat.

        Raises:
            ValueError: If the name is not of that form, or the text is too long.
        """
        ...


class PlainLook:
    """A base class that makes ``Table.look`` of the two calls ``beat`` and ``read``."""

    registry_id: str

    @property
    def id(self) -> bytes:
        return bytes.fromhex(self.registry_id)

    def look(self, name: str, text: bytes) -> Look:
        """Publish a beat, and return all beats, and the record as it is then; see ``Table``."""
        beats = self.beat(name, text)
        return Look(self.read(), beats, {})

    def post(self, name: str, text: bytes) -> None:
        """Do nothing: this registry keeps no posts."""

    def read(self) -> bytes:
        raise NotImplementedError

    def beat(self, member: str, text: bytes) -> dict[str, bytes]:
        raise NotImplementedError


def check_run(run: str) -> str:
    """Return the name of a run.

    Raises:
        ValueError: Unless the name has 1 to 100 printable characters, no space and no slash.
    """
    if not _is_name(run) or "/" in run:
        raise ValueError(
            f"run must have 1 to {MAX_NAME} printable characters, no space and no slash, "
            f"got {run!r}"
        )
    return run


def check_swap(old: bytes, new: bytes) -> None:
    """Raise ValueError if one of the records is too long."""
    for record in (old, new):
        if len(record) > MAX_RECORD_BYTES:
            raise ValueError(
                f"a record has at most {MAX_RECORD_BYTES} bytes, got {len(record)} bytes"
            )


def check_beat(member: str, text: bytes) -> None:
    """Raise ValueError if a member's name is not of the allowed form, or the text is too long."""
    if member and not _is_name(member):
        raise ValueError(
            f"member must have 1 to {MAX_NAME} printable characters and no space, got {member!r}"
        )
    if len(text) > MAX_BEAT_BYTES:
        raise ValueError(f"a beat has at most {MAX_BEAT_BYTES} bytes, got {len(text)} bytes")


def _is_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and 1 <= len(value) <= MAX_NAME
        and value.isprintable()
        and " " not in value
    )
