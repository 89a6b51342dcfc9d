"""A version of a fragment on its way to a learner, run by run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....base.memory import empty_pages
from ....ops.wire import Layout
from ...model.shared import decode
from ...protocol.messages import Kind, Message
from ...protocol.window import Position, Window


class Fetch:
    """Fetch the values of a version, or the coded difference to the version before.

    Args:
        send: Sends a message to the server; missing runs are asked for again.
        fragment: Number of the fragment.
        first: Number of the fragment's first piece.
        merged: The learner's last report that was merged.
        layouts: Of the values in fp32, or of the differences.
        is_coded: Fetch the difference.
    """

    def __init__(
        self,
        send: Callable[[Message], bool],
        fragment: int,
        version: int,
        merged: int,
        *,
        first: int,
        layouts: list[Layout],
        is_coded: bool,
    ) -> None:
        self._send, self.fragment, self.version, self.merged = send, fragment, version, merged
        self._first, self._layouts, self.is_coded = first, layouts, is_coded
        if is_coded:
            self._buffers = [empty_pages((lay.payload_bytes,), torch.uint8) for lay in layouts]
        else:
            self._buffers = [empty_pages((lay.num_elements,), torch.float32) for lay in layouts]
        runs = [Position(0, i, run) for i, lay in enumerate(layouts) for run in range(lay.num_runs)]
        self._window = Window(runs, lambda position: layouts[position.fragment].run_bytes)

    @property
    def is_complete(self) -> bool:
        """All runs have arrived."""
        return self._window.is_empty

    def ask(self, *, again: bool = False) -> None:
        """Ask for runs, or again for those that have not arrived."""
        requests = self._window.ask_again() if again else self._window.ask()
        for (_, i, run), count in requests:
            place = (int(self.is_coded), self.version, self._first + i, run)
            self._send(Message(Kind.GET, *place, count=count))

    def take(self, message: Message) -> None:
        """Take runs that belong to this version and were asked for."""
        i, run, body = message.fragment - self._first, message.run, memoryview(message.body)
        if (message.number, message.version) != (int(self.is_coded), self.version):
            return
        while len(body) and Position(0, i, run) in self._window.asked:
            view = self._view(i, run)
            if len(body) < len(view) or not len(view):
                return
            view[:] = body[: len(view)]
            self._window.received(Position(0, i, run))
            run, body = run + 1, body[len(view) :]
        self.ask()

    def _view(self, i: int, run: int) -> memoryview:
        """Return the place of a run's bytes."""
        layout = self._layouts[i]
        begin, end = layout.run_range(run)
        if self.is_coded:
            begin, end = run * layout.run_bytes, (run + 1) * layout.run_bytes
        return self._buffers[i][begin:end].numpy().data.cast("B")

    def values(self, impl: str = "") -> list[Tensor]:
        """Return what has arrived in fp32, [num_elements] for each piece."""
        if not self.is_coded:
            return self._buffers
        pairs = zip(self._buffers, self._layouts, strict=True)
        return [decode(payload, layout, impl=impl) for payload, layout in pairs]
