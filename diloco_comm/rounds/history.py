"""The history of a part's outer state: one number that replicas compare before each exchange.

The history begins as a digest of the outer parameters, the optimizer's buffers and their counters.
Each round that is applied mixes in the digest of its payloads, and its coefficients. Replicas that
hold the same outer state and apply the same rounds have the same history. A difference is found in
the headers, before a payload is added to anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..base.checks import warn
from ..base.errors import ReplicaMismatch, difference, named
from ..base.memory import CPU
from ..exchange.exchange import Exchange
from ..exchange.round import STATE_ADVICE
from ..ops.digests import DigestReading, digest_of
from .handshake import gather_json
from .part import RoundInFlight, SyncedFragment, SyncedPart, hashed, mixed

# ``SameData`` gives up after so many rounds of a fragment: a replica whose parameters do not move,
# or whose device is late, sends no digest.
_MOST_LOOKS = 4


def begin(part: SyncedPart, *, is_shared: bool, saved: int = 0) -> None:
    """Start the history of a part from the state that it holds now.

    Args:
        is_shared: Outer parameters are the same on all replicas. Otherwise (``Eager``, or delays
            that differ) the history does not depend on their values: ``saved`` goes on.
        saved: The history in a saved state; 0 without a saved state.
    """
    part.history = mixed(saved, digest_of_state(part)) if is_shared else saved


def digest_of_state(part: SyncedPart) -> int:
    """Return 64 bits that depend on outer parameters, buffers and numbers of steps."""
    if not isinstance(part, SyncedFragment):
        return 0
    buffers = [tensor for _, tensor in sorted(part.state.tensors().items())]
    others = repr(sorted((name, _plain(value)) for name, value in part.state.extra().items()))
    tensors_digest = digest_of([part.outer, *buffers])
    return mixed(tensors_digest, part.round, part.state.num_steps, hashed(others.encode()))


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return value.tolist() if isinstance(value, Tensor) else value


def standing(parts: Sequence[SyncedPart], *, is_shared: bool) -> list[list[int]]:
    """Return the numbers by which replicas compare their outer state, as JSON types.

    Args:
        is_shared: As in ``begin``.
    """
    return [[part.round, part.history, digest_of_state(part) if is_shared else 0] for part in parts]


def refuse_difference(
    exchange: Exchange, parts: Sequence[SyncedPart], views: Sequence[Sequence[Sequence[int]]]
) -> None:
    """Compare the outer state of all replicas as it is now.

    After a difference the histories differ too, so that no exchange succeeds from then on.

    Args:
        views: ``standing`` of each replica, in rank order.

    Raises:
        ReplicaMismatch: On every replica, naming the first fragment that differs and the replicas.
    """
    own = views[exchange.rank]
    for part in parts:
        values = [tuple(view[part.index]) for view in views]
        if len(set(values)) > 1:
            for each, (_, past, digest) in zip(parts, own, strict=True):
                each.history = mixed(past, digest)
            raise ReplicaMismatch(_sentence(exchange, part, values), stage="outer state")


def refuse_other_past(
    exchange: Exchange, parts: Sequence[SyncedPart], views: Sequence[Sequence[Sequence[int]]]
) -> None:
    """Compare all replicas' histories of each part that is at the same round on all of them.

    Args:
        views: (round, history) of each part, for each replica.

    Raises:
        ReplicaMismatch: As ``refuse_difference``.
    """
    for part in parts:
        values: list[tuple[int, ...]] = [tuple(view[part.index]) for view in views]
        if len({round for round, _ in values}) == 1 and len(set(values)) > 1:
            raise ReplicaMismatch(_sentence(exchange, part, values), stage="outer state")


def unsent(parts: Sequence[SyncedPart], inner_step: int) -> list[int]:
    """Return for each part how many inner steps of training this replica has yet to send.

    The number is 1 if only the values of a lost round are to be sent; 0 if nothing is.
    """
    return [inner_step - part.last_sent or int(part.owed.is_lost) for part in parts]


def stale_parts(
    exchange: Exchange, parts: Sequence[SyncedPart], inner_step: int, beside: Any
) -> tuple[list[SyncedPart], list[Any]]:
    """Return the parts for which some replica has training to send; a collective call.

    Args:
        beside: A further JSON value of this replica.

    Returns:
        The parts, and the values ``beside`` of all replicas, in rank order.
    """
    own = [unsent(parts, inner_step), own_past(parts), beside]
    views = gather_json(exchange, own, is_end=True)
    refuse_other_past(exchange, parts, [past for _, past, _ in views])
    has_news = [any(news[part.index] for news, _, _ in views) for part in parts]
    stale = [part for part, is_new in zip(parts, has_news, strict=True) if is_new and part.buffers]
    return stale, [value for _, _, value in views]


def own_past(parts: Sequence[SyncedPart]) -> list[list[int]]:
    """Return this replica's view for ``refuse_other_past``."""
    return [[part.round, part.history] for part in parts]


def _sentence(exchange: Exchange, part: SyncedPart, values: Sequence[tuple[int, ...]]) -> str:
    groups: dict[str, list[int]] = {}
    for replica, value in zip(exchange.members, values, strict=True):
        groups.setdefault(_shown(value), []).append(replica)
    return f"{difference(f'the outer state of fragment {part.index}', groups)}: {STATE_ADVICE}"


def _shown(value: tuple[int, ...]) -> str:
    round, *digests = value
    return f"round {round}, digest {mixed(*digests):#018x}"


# ---------------------------------------------------------------- replicas on the same data


class SameData:
    """Warns once if the first rounds show that replicas train on the same data.

    Replicas begin with equal parameters. After some steps on different data the parameters differ,
    in the fragments that the data change. The headers of the first rounds carry digests of the
    local parameters, until all fragments are compared or one of them differs on all replicas. The
    host does not wait for a digest that a device computes: the fragment's next round carries it.

    Attributes:
        is_wanted: Whether digests are still needed; ``begin`` sets it.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self.is_wanted = exchange, False
        self._first_step = 0
        self._first: dict[int, int] = {}
        self._readings: dict[int, DigestReading] = {}
        # By fragment: how many rounds were compared, and which replicas had equal parameters.
        self._num_looks: dict[int, int] = {}
        self._alike: dict[int, set[int]] = {}

    def begin(self, parts: Sequence[SyncedPart], inner_step: int) -> None:
        """Take digests of the parameters with which training begins, or goes on after a load."""
        self.is_wanted, self._first_step = True, inner_step
        indices = [part.index for part in parts if part.has_outer]
        self._num_looks, self._alike = dict.fromkeys(indices, 0), {}
        self._readings = {}
        if self._exchange.size > 1:
            self._first = {p.index: digest_of(p.tensors()) for p in parts if p.has_outer}

    def digest(self, part: SyncedPart, inner_step: int, *, waits: bool) -> int:
        """Return a digest of a part's local parameters, below 2^32; 0 if there is none to compare.

        Args:
            waits: Wait until the part's device has computed the digest.
        """
        # Equal parameters after one step prove nothing: under Adam that step depends only on the
        # signs of the gradients.
        is_early = inner_step < self._first_step + 2 or self._exchange.size == 1
        if not self.is_wanted or is_early or not part.has_outer:
            return 0
        now = DigestReading(part.tensors())
        reading: DigestReading | None = now
        if part.device != CPU and not waits:
            reading, self._readings[part.index] = self._readings.get(part.index), now
            if reading is None or not reading.is_done:
                return 0
        assert reading is not None
        digest = reading.digest()
        # Parameters that have not moved are equal on all replicas.
        return 0 if digest == self._first.get(part.index) else digest % (2**32 - 1) + 1

    def look(self, flight: RoundInFlight) -> None:
        """Compare the digests of a round that was applied."""
        part, headers = flight.part, flight.wait().headers
        # A round from a saved state has one header, and was sent by an earlier process.
        if not self.is_wanted or not part.has_outer or len(headers) != len(flight.members):
            return
        owners: dict[int, set[int]] = {}
        for replica, header in zip(flight.members, headers, strict=True):
            if header.digest:
                owners.setdefault(header.digest, set()).add(replica)
        self._num_looks[part.index] += 1
        if len(owners) == len(headers) or self._num_looks[part.index] == _MOST_LOOKS:
            self.is_wanted = False
        elif owners:
            self._alike[part.index] = max(owners.values(), key=len)
        is_known = all(n > 1 or i in self._alike for i, n in self._num_looks.items())
        alike = sorted(set.intersection(*self._alike.values())) if self._alike else []
        if self.is_wanted and is_known and len(alike) > 1:
            self.is_wanted = False
            who = "all replicas" if len(alike) == len(headers) else named(alike)
            warn(
                f"{who} had equal parameters at a send up to inner step {headers[0].inner_step}: "
                "they train on the same data, or on one mean of their gradients (does "
                "DistributedDataParallel span them?), and learn no more than one replica; give "
                "each replica its own part of the data, see DiLoCo.shard",
                RuntimeWarning,
            )
