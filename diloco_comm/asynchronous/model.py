"""The shared model of a server: fragments, versions, and updates applied in order of arrival.

A *version* is the number of updates applied. Workers read a version run by run while later updates
arrive. As long as a worker reads an older version, the model keeps the payloads of the later
updates instead of a copy of itself, and computes later versions run by run when they are read.
An update is *folded* once the buffers contain it.
Clocks, sockets and names of workers are in ``coordinator.py`` and ``server.py``.

Delay compensation compares the parameters that a worker trained from with the newest parameters, so
its rules keep these versions (``KeptVersions``). Each kept version is one copy of the parameters in
a file without a name, so that the server's memory does not grow with the number of workers; only
while the disk is full, the copies are in memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from .. import ops
from ..base.checks import logger_of
from ..base.memory import empty_pages
from ..ops.wire import Layout, WireFormat
from .payloads import Payload, payload_files, write_run
from .rules import FusedState, RuleState, ServerRule

# Elements of a run, the largest range of a fragment in one message: 1 MiB of fp32.
RUN_ELEMENTS = 1 << 18
_UNIT = 1024  # a multiple of every block size, except for sparse wires


def layout_of(num_elements: int, wire: WireFormat) -> Layout:
    """Return how a fragment is divided into the runs that server and workers exchange."""
    unit = max(_UNIT, wire.block_size)
    run = min(RUN_ELEMENTS, max(unit, -(-num_elements // unit) * unit))
    return Layout(num_elements, max(1, -(-num_elements // run)), run, wire)


@dataclass
class Applied:
    """An update that is folded into the buffers, or will be once no older version is read.

    Attributes:
        payloads, layouts: The encoded pseudo-gradient of each fragment.
        weight: Factor of the pseudo-gradient.
        release: Called when the model needs the payloads no more.
    """

    payloads: Sequence[Payload]
    layouts: Sequence[Layout]
    weight: float
    release: Callable[[], None]

    @property
    def num_bytes(self) -> int:
        return sum(payload.nbytes for payload in self.payloads)


class SharedModel:
    """Outer parameters by fragment, changed by a rule.

    Args:
        sizes: Elements of each fragment.
        rule: How an arrival changes the model.
        outers: The parameters, fp32 [num_elements] each; the model keeps these tensors.
        impl: Force an implementation of the operators.

    Attributes:
        version: Updates applied so far.
        is_initialised: The parameters have been set.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        rule: ServerRule,
        *,
        outers: Sequence[Tensor] | None = None,
        impl: str = "",
    ) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError(f"every fragment must have at least 1 element, got {list(sizes)}")
        self.rule, self.impl = rule, ops.resolve_impl(impl)
        is_given = outers is not None
        if outers is None:
            outers = [empty_pages((size,), torch.float32) for size in sizes]
        self.states: list[RuleState] = [rule.make_state(outer) for outer in outers]
        self.sizes = tuple(sizes)
        self.is_initialised = is_given
        self.version = 0
        # The log holds the updates after version ``_logged``; the buffers are at ``_folded``.
        self._folded = self._logged = 0
        # Reading an update's file has failed halfway, so the buffers are at no version.
        self._is_broken = False
        self._log: deque[Applied] = deque()
        self._readers: Counter[int] = Counter()
        self._pins: Counter[int] = Counter()
        self._kept_from: int | None = None

    @property
    def num_elements(self) -> int:
        return sum(self.sizes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the parameters and of the rule's buffers."""
        return sum(state.num_bytes for state in self.states)

    def initialise(self, flats: Sequence[Tensor]) -> None:
        """Set the parameters: one fp32 [num_elements] for each fragment."""
        for state, flat in zip(self.states, flats, strict=True):
            state.outer.copy_(flat)
        self.is_initialised = True

    def layouts(self, wire: WireFormat) -> list[Layout]:
        """Return how the payload of each fragment is laid out on this wire."""
        return [layout_of(size, wire) for size in self.sizes]

    # -------------------------------------------------------------------------------- updates

    def apply(
        self,
        payloads: Sequence[Payload],
        layouts: Sequence[Layout],
        weight: float,
        release: Callable[[], None] = lambda: None,
    ) -> int:
        """Apply one update and return the new version.

        Args:
            payloads: One for each fragment; the model owns them until it calls ``release``.
            weight: Factor of the pseudo-gradient.
            release: Called when the model needs the payloads no more.
        """
        assert self.is_initialised
        self._log.append(Applied(payloads, layouts, weight, release))
        self.version += 1
        self._fold()
        return self.version

    def _fold(self) -> None:
        """Fold updates into the buffers up to the oldest version that is read, or to the newest."""
        target = min(self._readers, default=self.version)
        while self._folded < target and not self._is_broken:
            self._apply_to_buffers(self._log[self._folded - self._logged])
            self._folded += 1
        self._forget(self.version if self._kept_from is None else self._kept_from)

    def _apply_to_buffers(self, update: Applied) -> None:
        try:
            for state, payload, layout in zip(
                self.states, update.payloads, update.layouts, strict=True
            ):
                state.arrive(payload, layout, update.weight, self.impl)
        except OSError as error:
            self._is_broken = True
            raise OSError(
                f"the update to version {self._folded + 1} cannot be read from its file: "
                f"{error.strerror or error}; the model in memory holds a part of the update and is "
                "given up"
            ) from error

    def _forget(self, version: int) -> None:
        """Release the payloads of folded updates up to this version, unless they are pinned."""
        last = min(version, self._folded, *self._pins)
        while self._logged < last:
            self._log.popleft().release()
            self._logged += 1

    # -------------------------------------------------------------------------------- readers

    @property
    def oldest_read(self) -> int | None:
        """The oldest version that is held for a reader; None if none is."""
        return min(self._readers, default=None)

    def hold(self) -> int:
        """Keep the present version readable and return its number; end with ``release``."""
        self._readers[self.version] += 1
        return self.version

    def release(self, version: int) -> None:
        """End one ``hold`` of the version."""
        assert self._readers[version] > 0
        self._readers[version] -= 1
        if not self._readers[version]:
            del self._readers[version]
        self._fold()

    def read(self, version: int, fragment: int, run: int) -> Tensor:
        """Return a run of a version that is held, fp32, valid until the version is released."""
        assert self._readers[version] > 0
        if version == self._folded:
            return self.states[fragment].visible(*self._run_range(fragment, run))
        return self._part(version, fragment, run).visible()

    def _run_range(self, fragment: int, run: int) -> tuple[int, int]:
        return layout_of(self.sizes[fragment], WireFormat("fp32")).run_range(run)

    def _part(self, version: int, fragment: int, run: int) -> RuleState:
        """Return a copy of a run's state at a version that is held."""
        begin, end = self._run_range(fragment, run)
        part = self.states[fragment].part(begin, end)
        first = self._folded - self._logged
        for update in islice(self._log, first, version - self._logged):
            layout, payload = update.layouts[fragment], update.payloads[fragment]
            run_bytes = layout.run_bytes
            one_run = Layout(end - begin, 1, layout.run_elements, layout.wire)
            part.arrive(payload[run * run_bytes : (run + 1) * run_bytes], one_run, update.weight)
        return part

    def read_buffer(self, version: int, fragment: int, run: int, index: int) -> Tensor:
        """Return a run of one of the buffers of a version that is held, as ``read`` does.

        Args:
            index: 0 for the parameters after the last outer step; from 1 on, the buffers in the
                order of ``RuleState.tensors``.
        """
        begin, end = self._run_range(fragment, run)
        if version == self._folded:
            state = self.states[fragment]
        else:
            state, begin, end = self._part(version, fragment, run), 0, end - begin
        return (state.outer, *state.tensors().values())[index][begin:end]

    def read_all(self) -> list[Tensor]:
        """Return the newest parameters, fp32 [num_elements] for each fragment, copied."""
        if self._folded == self.version:
            return [state.visible().clone() for state in self.states]
        version = self.hold()
        try:
            fp32 = WireFormat("fp32")
            return [
                torch.cat([self.read(version, f, r) for r in range(layout_of(n, fp32).num_runs)])
                for f, n in enumerate(self.sizes)
            ]
        finally:
            self.release(version)

    # --------------------------------------------------------------------------------- followers

    @property
    def can_be_followed(self) -> bool:
        """Whether a worker that has the buffers of a version can apply the later updates."""
        return not self.rule.compensation and all(isinstance(s, FusedState) for s in self.states)

    def keep_from(self, version: int | None) -> None:
        """Keep the payloads of updates after a version while memory allows; None keeps none."""
        self._kept_from = version
        self._forget(self.version if version is None else version)

    def forget_oldest(self) -> bool:
        """Release the oldest update that is only kept for followers; False if there is none."""
        before = self._logged
        self._forget(before + 1)
        return self._logged > before

    def updates_since(self, version: int) -> list[Applied] | None:
        """Return the updates from a version to the newest; None if one has been released."""
        if not self._logged <= version <= self.version:
            return None
        return list(islice(self._log, version - self._logged, None))

    def pin(self, version: int) -> None:
        """Keep the updates after a version, even if memory is short; end with ``unpin``."""
        assert self._logged <= version
        self._pins[version] += 1

    def unpin(self, version: int) -> None:
        """End one ``pin`` of the version."""
        assert self._pins[version] > 0
        self._pins[version] -= 1
        if not self._pins[version]:
            del self._pins[version]
        self._forget(self.version if self._kept_from is None else self._kept_from)

    def update(self, version: int) -> Applied:
        """Return the update that made a version, which is pinned."""
        return self._log[version - 1 - self._logged]

    # ---------------------------------------------------------------------------------- saving

    @property
    def is_folded(self) -> bool:
        """Whether the buffers are at the newest version; only then may they be saved."""
        return self._folded == self.version

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, fp32, under names of the form ``0/momentum``."""
        named = {}
        for index, state in enumerate(self.states):
            named[f"{index}/outer"] = state.outer
            named.update({f"{index}/{name}": t for name, t in state.tensors().items()})
        return named

    def scalars(self) -> dict[str, object]:
        return {"version": self.version, "states": [state.scalars() for state in self.states]}

    def load(self, tensors: dict[str, Tensor], scalars: dict) -> None:
        """Restore what ``tensors`` and ``scalars`` returned; tensors may be the model's own."""
        assert self.is_folded and not self._readers
        for index, state in enumerate(self.states):
            prefix = f"{index}/"
            own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            saved = own.pop("outer")
            if saved is not state.outer:
                state.outer.copy_(saved)
            state.load(own, scalars["states"][index])
        self.version = self._folded = self._logged = int(scalars["version"])
        self.is_initialised = True


def decode(payload: Tensor, layout: Layout, *, impl: str = "") -> Tensor:
    """Return the decoded values of a payload, fp32 [num_elements]."""
    values = empty_pages((layout.num_elements,), torch.float32)
    ops.decode([payload], [1.0], [values], *layout.whole, impl=impl)
    return values


logger = logger_of(__name__)


def make_room(sizes: Sequence[int]) -> list[Payload]:
    """Return room for payloads of these sizes, in a file, or in memory if the disk is full."""
    try:
        return list(payload_files(None, sizes))
    except OSError as error:
        logger.warning("there is no room for a file of %d bytes: %s", sum(sizes), error.strerror)
        return [empty_pages((size,), torch.uint8) for size in sizes]


class KeptVersions:
    """Keeps each version of a model as long as a worker trains from it; ``len`` is their number."""

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
        """Return g + factor*g*g*(theta_now - theta_then), as fp32 in the room of ``make_room``.

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
