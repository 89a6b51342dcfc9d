"""The state folder: files in which a launcher and its replica tell each other about the replica."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..base.files import whole_file
from ..group.records import NO_RECORD, NONCE_BYTES, Key

REPLICA_FILE, LEAVE_FILE = "replica.json", "leave"


class StateFolder:
    """A folder on the host of one replica: its number, and a file that asks it to leave.

    The number stays when the replica's process ends, so that the next process has the same number.
    The wish to leave is a file, because a signal may not reach the replica.

    Raises:
        OSError: If the folder cannot be made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    def owner(self) -> str | None:
        """Return the name of the run of this folder's replica; None before its first view."""
        return self._read().get("run")

    def last_process(self, run: str) -> Key | None:
        """Return the replica's last process; None if there was none.

        Raises:
            ValueError: If the folder belongs to another run.
        """
        values = self._read()
        if not values:
            return None
        if values["run"] != run:
            raise ValueError(
                f"the state folder {self.path} belongs to a replica of run {values['run']!r}, and "
                f"this replica is of run {run!r}: give each run its own folder"
            )
        return Key(values["replica"], bytes.fromhex(values["nonce"]))

    @property
    def file(self) -> Path:
        """The JSON file with the replica's number, nonce, run, registry and view."""
        return self.path / REPLICA_FILE

    @property
    def registry_id(self) -> str:
        """Id of the last process's registry; "" if it has taken all steps, or there was none.

        Raises:
            ValueError: If the folder is damaged.
        """
        return str(self._read().get("registry", ""))

    @property
    def last_view(self) -> int:
        """Number of the last process's view in that registry; NO_RECORD if there was none."""
        return max(NO_RECORD, int(self._read().get("view", NO_RECORD)))

    def remember(self, run: str, key: Key, *, registry_id: str = "", view: int = NO_RECORD) -> None:
        """Note number and nonce of this process, its view, and the registry of that view."""
        values = {"run": run, "replica": key.number, "nonce": key.nonce.hex(), "has_left": False}
        self._write({**values, "registry": registry_id, "view": view})

    def note_end(self) -> None:
        """Note that this replica has taken all steps: the next process takes any registry."""
        if values := self._read():
            self._write({**values, "registry": "", "view": NO_RECORD})

    def note_leaving(self) -> None:
        """Note that this replica has left its group, as it was asked to."""
        if values := self._read():
            self._write({**values, "has_left": True})

    @property
    def has_left(self) -> bool:
        """Whether the replica's last process has left its group, as it was asked to."""
        return bool(self._read().get("has_left", False))

    def ask_to_leave(self) -> None:
        """Let the replica leave at its next boundary."""
        (self.path / LEAVE_FILE).touch()

    @property
    def is_asked_to_leave(self) -> bool:
        return (self.path / LEAVE_FILE).exists()

    def prepare(self) -> None:
        """Forget the wish to leave and the leaving of the last process, before the next starts."""
        (self.path / LEAVE_FILE).unlink(missing_ok=True)
        if values := self._read():
            self._write({**values, "has_left": False})

    def _read(self) -> dict[str, Any]:
        try:
            values = json.loads(self.file.read_text())
            if _is_sound(values):
                return dict(values)
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            pass
        raise ValueError(
            f"{self.file} is damaged, or of a version before 0.2: delete the file, and the replica "
            "gets a number"
        )

    def _write(self, values: dict[str, Any]) -> None:
        # Also after a loss of power, the file has all of the new values or all of the old ones.
        with whole_file("the state of the replica", self.file) as partial:
            partial.write_text(json.dumps(values))


def _is_sound(values: Any) -> bool:
    """Whether these are the values that ``StateFolder`` writes."""
    if not isinstance(values, dict):
        return False
    number, view, nonce = (values.get(name) for name in ("replica", "view", "nonce"))
    texts = values.get("run"), nonce, values.get("registry")
    is_number = type(number) is int and number >= 0 and type(view) is int
    is_nonce = re.fullmatch(f"[0-9a-f]{{{2 * NONCE_BYTES}}}", str(nonce)) is not None
    return is_number and is_nonce and all(type(one) is str for one in texts)
