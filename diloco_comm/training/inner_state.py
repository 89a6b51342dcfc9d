"""Gives newcomers an exact copy of the inner optimizers' state of a replica that trains.

The state is ``torch.optim.Optimizer.state``: tensors and numbers of each trained parameter, under
the parameter's name in the model. Learning rates and other options of ``param_groups`` stay those
of the newcomer's program.

If a state cannot be given, training goes on: the newcomer begins with its own state, and all
replicas log why.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..base.checks import class_of, logger_of
from ..base.errors import SyncError
from ..base.memory import memory_order
from ..exchange.exchange import Exchange
from ..ops.digests import digest_of
from ..replica import sharding
from ..replica.fragments import Named, is_dense
from ..rounds.handshake import gather_json

logger = logger_of(__name__)

# Bytes of one copy. Tensors on a GPU need this much host memory meanwhile.
_PIECE_BYTES = 1 << 25
# Options of torch's optimizers that choose how a step is computed, but do not change the state.
_WAYS = ("foreach", "fused", "capturable", "differentiable")


class _Owner(NamedTuple):
    """A trained parameter, with the optimizer and the group of options that it is in."""

    param: Tensor
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]

    @property
    def state(self) -> dict[Any, Any]:
        return self.optimizer.state.get(self.param, {})

    @property
    def kind(self) -> str:
        return f"{type(self.optimizer).__module__}.{type(self.optimizer).__qualname__}"


class _Form(NamedTuple):
    """The form of a tensor of the state, or of this worker's shard, for a newcomer to allocate."""

    shape: list[int]
    strides: list[int]
    dtype: torch.dtype
    is_sharded: bool
    is_beside: bool  # on the parameter's device

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class InnerStates:
    """The state of the inner optimizers of one replica, or of one of its workers.

    Args:
        named: The trained parameters, by their names in the model.
        optimizers: The optimizers that were given to ``DiLoCo``.

    Attributes:
        copied_bytes: Bytes of inner state that the last group gave to each newcomer that took it.

    Raises:
        TypeError: If an optimizer has no ``state`` by parameter, as the optimizers of torch have.
    """

    def __init__(self, named: Named, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._names = {id(param): name for name, param in named}
        self._optimizers = list(optimizers)
        self.copied_bytes = 0
        # The newcomer's own states before it was given others.
        self._before: list[tuple[_Owner, dict[Any, Any] | None]] = []
        for optimizer in self._optimizers:
            if not isinstance(getattr(optimizer, "state", None), MutableMapping):
                raise TypeError(
                    "inner_state=True needs optimizers with a state for each parameter, as those "
                    f"of torch.optim have, got {type(optimizer).__name__}"
                )

    def describe(self) -> dict[str, str]:
        """Return, by parameter, words that must be equal on all replicas: class and options.

        The options are the ones that are True or words, and whether there is a momentum. Options
        that only choose how a step is computed, such as ``fused``, are left out.
        """
        return {
            name: " ".join([owner.kind, *sorted(_switches(owner.group))])
            for name, owner in sorted(self._owners().items())
        }

    def share(self, exchange: Exchange) -> None:
        """Give the newcomers the state of the lowest replica that trains; a collective call.

        Raises:
            SyncError: On all replicas, if a newcomer has not received the exact state of the
                source, or a replica is gone; a newcomer's optimizers are unchanged then.
        """
        self.copied_bytes = 0
        source_rank = _source_rank(exchange)
        is_source, is_new = exchange.rank == source_rank, exchange.replica in exchange.joined
        blobs = exchange.exchange_objects(self._table() if is_source else b"")
        table = torch.load(io.BytesIO(blobs[source_rank]), weights_only=True)
        own = self._difference(table) if is_new and not table["refusal"] else table["refusal"]
        refusals = gather_json(exchange, own)
        for replica, refusal in zip(exchange.members, refusals, strict=True):
            if replica in exchange.joined and refusal:
                logger.warning(
                    "replica %d is not given the inner state of replica %d, and goes on with its "
                    "own: %s",
                    replica,
                    exchange.members[source_rank],
                    refusal,
                )
        ranks = [exchange.members.index(replica) for replica in exchange.joined]
        if ranks := [rank for rank in ranks if not refusals[rank]]:
            self._copy(exchange, source_rank, ranks, table["entries"])

    def forget(self) -> None:
        """Give the optimizers of a newcomer their own state back; idempotent."""
        for owner, before in self._before:
            owner.optimizer.state.pop(owner.param, None)
            if before is not None:
                owner.optimizer.state[owner.param] = before
        self._before = []

    def keep(self) -> None:
        """Keep the state that this newcomer was given, as its view has begun."""
        self._before = []

    # -------------------------------------------------------------------------- the copy

    def _copy(
        self, exchange: Exchange, source_rank: int, ranks: Sequence[int], table: dict[str, Any]
    ) -> None:
        entries = {
            name: {key: _Form(*what) if is_tensor else what for key, (is_tensor, what) in row}
            for name, (_, row) in table.items()
        }
        states: dict[str, dict[str, Any]] = {}
        if exchange.rank == source_rank:
            owners = self._owners()
            states = {name: owners[name].state for name in entries}
        elif exchange.rank in ranks:
            states = self._rooms(entries)
        values = [value for state in states.values() for value in state.values()]
        tensors = [_bytes_of(value) for value in values if isinstance(value, Tensor)]
        forms = [form for entry in entries.values() for form in entry.values()]
        sizes = [form.num_bytes for form in forms if isinstance(form, _Form)]
        for piece in _pieces(sizes):
            parts = [tensors[i][begin:end] for i, begin, end in piece] if states else []
            exchange.copy_to(parts, source_rank, ranks, [end - begin for _, begin, end in piece])
        digests = gather_json(exchange, f"{digest_of(tensors):016x}" if states else "")
        wrong = [exchange.members[rank] for rank in ranks if digests[rank] != digests[source_rank]]
        if wrong:
            raise SyncError(
                f"replicas {wrong} have received another inner state than replica "
                f"{exchange.members[source_rank]} has",
                stage="inner_state",
            )
        self.copied_bytes = sum(sizes)
        if exchange.rank in ranks:
            self._install(states)

    def _rooms(self, entries: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return a new state for each parameter, with uninitialised tensors to copy into.

        The optimizer gets these states by ``_install``, only after the digests were compared.
        """
        owners = self._owners()
        return {
            name: {
                key: _room(owners[name].param, key, what) if isinstance(what, _Form) else what
                for key, what in entry.items()
            }
            for name, entry in entries.items()
        }

    def _install(self, states: dict[str, dict[str, Any]]) -> None:
        owners = self._owners()
        for name, state in states.items():
            owner = owners[name]
            self._before.append((owner, owner.optimizer.state.pop(owner.param, None)))
            if state:
                placed = {key: _placed(owner, key, value) for key, value in state.items()}
                owner.optimizer.state[owner.param] = placed

    # -------------------------------------------------------------------- descriptions

    def _owners(self) -> dict[str, _Owner]:
        """Return the owners by name; not kept, as ``Optimizer.load_state_dict`` replaces groups."""
        found: dict[str, _Owner] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    name = self._names.get(id(param))
                    if name is None:
                        continue  # it is frozen
                    while name in found:
                        name += ", again"  # in one more optimizer
                    found[name] = _Owner(param, optimizer, group)
        return found

    def _table(self) -> bytes:
        """Return, as bytes, a description of each parameter's state, or why it cannot be given."""
        entries: dict[str, Any] = {}
        refusal = next((r for r in map(_loose_state, self._optimizers) if r), "")
        for name, owner in sorted(self._owners().items()):
            row = []
            for key, value in owner.state.items():
                if _is_carried(owner.param, key, value):
                    row.append((key, _described(owner.param, value)))
                elif not refusal:
                    refusal = (
                        f"{owner.kind} keeps {key!r} of {name!r}, {class_of(value)}, and "
                        "inner_state=True gives dense tensors and numbers under names"
                    )
            entries[name] = owner.kind, row
        file = io.BytesIO()
        torch.save({"refusal": refusal, "entries": {} if refusal else entries}, file)
        return file.getvalue()

    def _difference(self, table: dict[str, Any]) -> str:
        """Return why this newcomer cannot take the state that the table describes; "" if it can."""
        own, given = self._owners(), table["entries"]
        if other := sorted(own.keys() ^ given.keys()):
            place = "only here" if other[0] in own else "not here"
            return f"its optimizers train {other[0]!r} {place}"
        for name, (kind, row) in given.items():
            if own[name].kind != kind:
                return f"{name!r} is trained by {own[name].kind} here and by {kind} there"
            here, there = set(own[name].state), {key for key, _ in row}
            if here and there and here != there:
                return (
                    f"the state of {name!r} consists of {sorted(map(str, here))} here and of "
                    f"{sorted(there)} there"
                )
        return ""


def warn_of_schedules(optimizers: Sequence[Any], inner_step: int) -> None:
    """Warn of learning rate schedules that have taken fewer steps than ``inner_step``.

    An optimizer does not know its schedulers, so this function finds them by the garbage collector,
    if a scheduler has wrapped the ``step`` of the optimizer.
    """
    scheduled = [one for one in optimizers if hasattr(one.step, "_wrapped_by_lr_sched")]
    if not inner_step or not scheduled:
        return
    found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
    for optimizer in scheduled:
        own = [s for s in found if not isinstance(s, ReduceLROnPlateau) and _moves(s, optimizer)]
        taken = max((getattr(s, "last_epoch", 0) for s in own), default=inner_step)
        if taken < inner_step:
            logger.warning(
                "training goes on at inner step %d, and the learning rate of this replica is "
                "behind: its %s has taken %d steps; call scheduler.step() %d times before the "
                "first step, unless it counts epochs",
                inner_step,
                type(own[0]).__name__,
                taken,
                inner_step - taken,
            )


def _moves(schedule: LRScheduler, optimizer: Any) -> bool:
    """Whether a schedule, which may be under construction, is for this optimizer."""
    its = getattr(schedule, "optimizer", None)
    # Wrappers such as accelerate's have the optimizer inside.
    return optimizer in (its, getattr(its, "optimizer", None))


def _source_rank(exchange: Exchange) -> int:
    return min(rank for rank, r in enumerate(exchange.members) if r not in exchange.joined)


def _switches(group: dict[str, Any]) -> Iterator[str]:
    for key, value in group.items():
        if key in _WAYS:
            continue
        if value is True or (key == "momentum" and value):
            yield key
        elif isinstance(value, str):
            yield f"{key}={value}"


def _loose_state(optimizer: torch.optim.Optimizer) -> str:
    """Return a sentence if the optimizer has a state that belongs to no parameter; else ""."""
    loose = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if not loose:
        return ""
    return (
        f"{type(optimizer).__name__} keeps a state under {loose[0]!r}, and inner_state=True gives "
        "the states of parameters"
    )


def _is_carried(param: Tensor, key: Any, value: Any) -> bool:
    if not isinstance(key, str):
        return False
    if value is None or type(value) in (bool, int, float, str):
        return True
    if not isinstance(value, Tensor):
        return False
    # The newcomer makes a DTensor that is sharded like its parameter, so others cannot be given.
    if sharding.is_sharded(value) and sharding.position(value) != sharding.position(param):
        return False
    local = sharding.local(value)
    return type(local.data) is Tensor and local.layout == torch.strided and is_dense(local)


def _described(param: Tensor, value: Any) -> tuple[bool, Any]:
    """Return whether a value is a tensor, and the tensor's form or else the value."""
    if not isinstance(value, Tensor):
        return False, value
    local = sharding.local(value)
    is_beside = local.device == sharding.local(param).device
    form = list(local.shape), list(local.stride()), local.dtype
    return True, (*form, sharding.is_sharded(value), is_beside)


def _room(param: Tensor, key: str, form: _Form) -> Tensor:
    # Counts of steps are on the host at first, as in torch; ``_placed`` may move them.
    device = sharding.local(param).device if form.is_beside and key != "step" else "cpu"
    room = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=device)
    return sharding.like(room, param) if form.is_sharded else room


def _placed(owner: _Owner, key: str, value: Any) -> Any:
    """Return a value; a count of steps on the device if the optimizer's options want it there.

    Torch's ``load_state_dict`` does the same.
    """
    is_on_device = owner.group.get("fused") or owner.group.get("capturable")
    if key == "step" and is_on_device and isinstance(value, Tensor):
        return value.to(dtype=torch.float32, device=sharding.local(owner.param).device)
    return value


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's bytes, uint8; of a sharded one, this worker's shard."""
    return memory_order(sharding.local(tensor)).view(torch.uint8)


def _pieces(sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the ranges of each copy: index of a tensor, and begin and end of its bytes.

    Args:
        sizes: Bytes of each tensor.
    """
    piece: list[tuple[int, int, int]] = []
    room = _PIECE_BYTES
    for place, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + room)
            piece.append((place, begin, end))
            begin, room = end, room - (end - begin)
            if not room:
                yield piece
                piece, room = [], _PIECE_BYTES
    if piece:
        yield piece
