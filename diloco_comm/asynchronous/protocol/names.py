"""Names of workers: given by the user, or made from host and rank."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator

import torch.distributed as dist

from ...base import launch
from ...base.checks import logger_of
from .messages import MAX_NAME, MAX_NUMBER, Kind, Message

logger = logger_of(__name__)

# Room for a rank or a process and a number.
_MAX_HOST = MAX_NAME - 24
_MAX_ALIKE = 10_000


def check_name(name: str) -> str:
    """Return a name.

    Raises:
        ValueError: If the name is too long, empty, or not printable.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise ValueError(f"name must have 1 to {MAX_NAME} printable characters, got {name!r}")
    return name


def default_name() -> str:
    """Name this worker after host and rank (node7-rank3), or host and process (node7-pid4242)."""
    host = socket.gethostname().split(".")[0]
    host = "".join(letter for letter in host if letter.isprintable())[:_MAX_HOST] or "host"
    rank = _rank()
    return f"{host}-pid{os.getpid()}" if rank is None else f"{host}-rank{rank}"


def _rank() -> int | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    try:
        found = launch.find()
    except ValueError:
        return None
    return None if found is None else found.rank


def alternatives(name: str) -> Iterator[str]:
    """Yield the name, then names to use if another worker has it: node7-rank0-2, -3, ..."""
    yield name
    for number in range(2, _MAX_ALIKE):
        yield f"{name}-{number}"


class Identity:
    """A worker as its server knows the worker: a name, and the number of the next update.

    Args:
        name: The worker's name, or None for a name made from the host.
        sizes, layout: Elements of the fragments and hash of the model.

    Attributes:
        greeting, model: Kind and JSON fields of the first message, beside the name.
        steps: Inner steps taken, of a learner of decoupled training.
        next_seq: Number of the update that comes next, or is on its way.
        newest: Newest version that the server has told this worker of; -1 if none.
        begun: Name and number under which runs of update ``next_seq`` have been sent; None while no
            run has been sent.
    """

    def __init__(self, name: str | None, sizes: list[int], layout: int) -> None:
        own = alternatives(default_name()) if name is None else iter([check_name(name)])
        self.name, self._others, self._may_change = next(own), own, name is None
        # Tells this worker from another live worker of the same name, and from a successor.
        self._instance = secrets.randbelow(MAX_NUMBER - 1) + 1
        self.greeting, self.model = Kind.HELLO, {"sizes": sizes, "layout": layout}
        self.steps = 0
        self.next_seq, self.newest = 1, -1
        self._history: int | None = None
        self.begun: tuple[str, int] | None = None
        self._num_changes, self._is_new = 0, True

    def hello(self) -> Message:
        """Return the worker's first message."""
        place = (self._instance, self.steps, int(self._may_change), self._num_changes)
        return Message(self.greeting, *place, meta={"worker": self.name, **self.model})

    def is_answer(self, message: Message) -> bool:
        """Whether a message answers a HELLO with the present name, not with an earlier one."""
        return message.run == self._num_changes

    @property
    def is_in_doubt(self) -> bool:
        """Runs of the update were sent, and the server cannot tell whether it was applied."""
        return self.begun not in (None, (self.name, self.next_seq))

    def begin(self) -> None:
        """Note that runs of the update are sent, under the present name and number."""
        self.begun = (self.name, self.next_seq)

    def take_another_name(self) -> bool:
        """Take the next name; False if the user has given the present name."""
        name = next(self._others, None)
        if name is None:
            return False
        logger.info("another worker is called %s: this one is %s", self.name, name)
        self.name, self._is_new = name, True
        self._num_changes += 1
        return True

    def count_on(self, welcome: Message) -> bool:
        """Number the next update after the newest update that the server knows.

        Returns:
            False if the server knows less than it has told this worker. From here on the worker
            counts from the server's number. So the server takes the next update as new, and no part
            of that update has been applied: otherwise the server would know its number.
        """
        last, history = welcome.number, welcome.meta["history"]
        is_older = self._history not in (None, history) and welcome.meta["began"] < self.newest
        # The newest update may be this worker's own, whose outcome never arrived here.
        own = self.next_seq if self.begun == (self.name, self.next_seq) else self.next_seq - 1
        if self._is_new or welcome.fragment or last > own:
            # The other updates came from a predecessor, or from another worker of this name.
            self.next_seq = last + 1
        elif last < self.next_seq - 1:
            is_older = True
            if not self.is_in_doubt:
                self.begun = None
            self.next_seq = last + 1
        self._is_new, self._history = False, history
        if is_older:
            self.newest = welcome.version
        return not is_older
