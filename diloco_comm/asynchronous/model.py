"""The shared model of a server: fragments, versions, and updates applied in order of arrival.

A version is the number of updates applied. A worker may read one version at leisure, run by run,
while later updates arrive: as long as somebody reads an older version the payloads of the updates
since are kept instead of copies of the model, and what a later reader sees is computed run by run.
No clock, no transport, no workers' names: those are ``coordinator.py``'s and ``server.py``'s.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..exchange import empty_pages
from ..wire import Layout, WireFormat
from .rules import RuleState, ServerRule
from .spool import Payload

# Elements of a run: what travels in one message, 1 MiB of fp32.
RUN_ELEMENTS = 1 << 18
_UNIT = 1024  # a multiple of every block size


def layout_of(num_elements: int, wire: WireFormat) -> Layout:
    """Cut a fragment into the runs that server and workers exchange."""
    run = min(RUN_ELEMENTS, max(_UNIT, -(-num_elements // _UNIT) * _UNIT))
    return Layout(num_elements, max(1, -(-num_elements // run)), run, wire)


@dataclass
class _Applied:
    """An update that is applied, or will be as soon as nobody reads an older version."""

    payloads: Sequence[Payload]
    layouts: Sequence[Layout]
    weight: float
    release: Callable[[], None]


class SharedModel:
    """Outer parameters by fragment, changed by a rule.

    Args:
        sizes: Elements of each fragment.
        rule: What an arrival does.
        outers: The parameters themselves, fp32 [num_elements] each, which are kept.
        impl: Force an implementation of the operators.

    Attributes:
        version: Updates applied so far.
        is_initialised: The parameters have been given.
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
        self._folded = 0
        self._log: deque[_Applied] = deque()
        self._readers: Counter[int] = Counter()

    @property
    def num_elements(self) -> int:
        return sum(self.sizes)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the parameters and of what the rule keeps."""
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
            payloads: One for each fragment; they belong to the model until ``release`` is called.
            weight: Factor of the pseudo-gradient.
        """
        assert self.is_initialised
        self._log.append(_Applied(payloads, layouts, weight, release))
        self.version += 1
        self._fold()
        return self.version

    def _fold(self) -> None:
        """Bring the buffers to the oldest version that is read, or to the newest."""
        target = min(self._readers, default=self.version)
        while self._folded < target:
            update = self._log.popleft()
            for state, payload, layout in zip(
                self.states, update.payloads, update.layouts, strict=True
            ):
                state.arrive(payload, layout, update.weight, self.impl)
            self._folded += 1
            update.release()

    # -------------------------------------------------------------------------------- readers

    @property
    def oldest_read(self) -> int | None:
        """The oldest version that somebody reads."""
        return min(self._readers, default=None)

    def hold(self) -> int:
        """Keep the present version readable and return its number; end with ``let_go``."""
        self._readers[self.version] += 1
        return self.version

    def let_go(self, version: int) -> None:
        """End one ``hold`` of the version."""
        assert self._readers[version] > 0
        self._readers[version] -= 1
        if not self._readers[version]:
            del self._readers[version]
        self._fold()

    def read(self, version: int, fragment: int, run: int) -> Tensor:
        """Return a copy of a run of a version that is held, fp32."""
        assert self._readers[version] > 0
        layout = layout_of(self.sizes[fragment], WireFormat("fp32"))
        begin, end = layout.run_range(run)
        if version == self._folded:
            visible = self.states[fragment].visible(begin, end)
            shares = visible.data_ptr() == self.states[fragment].outer[begin:end].data_ptr()
            return visible.clone() if shares else visible
        part = self.states[fragment].part(begin, end)
        for update in list(self._log)[: version - self._folded]:
            theirs = update.layouts[fragment]
            payload = update.payloads[fragment]
            run_bytes = theirs.run_bytes
            only = Layout(end - begin, 1, theirs.run_elements, theirs.wire)
            part.arrive(payload[run * run_bytes : (run + 1) * run_bytes], only, update.weight)
        return part.visible()

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
            self.let_go(version)

    # ---------------------------------------------------------------------------------- saving

    @property
    def is_folded(self) -> bool:
        """The buffers hold the newest version; only then may they be saved."""
        return self._folded == self.version

    def tensors(self) -> dict[str, Tensor]:
        """Return everything to be saved, fp32, under names of the form ``0/momentum``."""
        named = {}
        for index, state in enumerate(self.states):
            named[f"{index}/outer"] = state.outer
            named.update({f"{index}/{name}": t for name, t in state.tensors().items()})
        return named

    def scalars(self) -> dict[str, object]:
        return {"version": self.version, "states": [state.scalars() for state in self.states]}

    def load(self, tensors: dict[str, Tensor], scalars: dict) -> None:
        """Take over what ``tensors`` and ``scalars`` gave; the tensors may be the own ones."""
        assert self.is_folded and not self._readers
        for index, state in enumerate(self.states):
            prefix = f"{index}/"
            own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            saved = own.pop("outer")
            if saved is not state.outer:
                state.outer.copy_(saved)
            state.load(own, scalars["states"][index])
        self.version = self._folded = int(scalars["version"])
        self.is_initialised = True
