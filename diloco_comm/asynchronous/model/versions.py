"""Versions that workers train from, kept for rules with delay compensation.

Delay compensation compares the parameters that a worker trained from with the newest parameters.
Each kept version is one copy of the parameters in a file without a name, so the server's memory
does not grow with the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ...base.checks import logger_of
from ...base.memory import empty_pages
from ...ops.wire import Layout, WireFormat
from ..protocol.payloads import Payload, payload_files, write_run
from .shared import SharedModel, decode

logger = logger_of(__name__)


def make_room(sizes: Sequence[int]) -> list[Payload]:
    """Return room for payloads of these sizes, in a file, or in memory if the disk is full."""
    try:
        return list(payload_files(None, sizes))
    except OSError as error:
        logger.warning("there is no room for a file of %d bytes: %s", sum(sizes), error.strerror)
        return [empty_pages((size,), torch.uint8) for size in sizes]


class KeptVersions:
    """Versions of a model, each kept as long as a worker trains from it."""

    def __init__(self, model: SharedModel) -> None:
        self._model = model
        self._layouts = model.layouts(WireFormat("fp32"))
        self._users: Counter[int] = Counter()
        self._kept: dict[int, list[Payload]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self) -> int:
        """Keep the present version and return its number; end with ``drop``."""
        model = self._model
        version = model.hold()
        try:
            if not self._users[version]:
                flats = make_room([layout.payload_bytes for layout in self._layouts])
                for fragment, layout in enumerate(self._layouts):
                    for run in range(layout.num_runs):
                        values = model.read(version, fragment, run)
                        write_run(flats[fragment], run * layout.run_bytes, _bytes(values))
                self._kept[version] = flats
        finally:
            model.release(version)
        self._users[version] += 1
        return version

    def drop(self, version: int) -> None:
        """End one ``keep`` of the version."""
        self._users[version] -= 1
        if not self._users[version]:
            del self._users[version], self._kept[version]

    def compensate(
        self, payloads: Sequence[Payload], layouts: Sequence[Layout], started: int, factor: float
    ) -> tuple[list[Payload], list[Layout]]:
        """Return g + factor*g*g*(theta_now - theta_then), encoded in fp32, in a file.

        Args:
            payloads, layouts: g, with layouts of ``layout_of``.
            started: The kept version whose parameters are theta_then.
        """
        results = make_room([layout.payload_bytes for layout in self._layouts])
        version = self._model.hold()
        try:
            for fragment, (payload, layout) in enumerate(zip(payloads, layouts, strict=True)):
                for run in range(layout.num_runs):
                    g = _decode(payload, layout, run)
                    now = self._model.read(version, fragment, run)
                    step = self._layouts[fragment].run_bytes
                    kept = self._kept[started][fragment][run * step : run * step + g.nbytes]
                    g += factor * g * g * (now - kept.view(torch.float32))
                    write_run(results[fragment], run * step, _bytes(g))
        finally:
            self._model.release(version)
        return results, self._layouts


def _decode(payload: Payload, layout: Layout, run: int) -> Tensor:
    begin, end = layout.run_range(run)
    size = layout.run_bytes
    one_run = Layout(end - begin, 1, layout.run_elements, layout.wire)
    return decode(payload[run * size : (run + 1) * size], one_run)


def _bytes(values: Tensor) -> memoryview:
    return values.numpy().data.cast("B")
