"""Give newcomers the state of the inner optimizers of a replica that trains, exactly.

The state is ``torch.optim.Optimizer.state``: tensors and numbers of each trained parameter.
Learning rates and other options of ``param_groups`` stay those of the newcomer's program.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..base.errors import ReplicaMismatch, SyncError
from ..base.memory import memory_order
from ..exchange.exchange import Exchange
from ..ops.digests import digest_of
from ..rounds.agreement.handshake import gather_json

# Bytes that travel at once: members that train already need so much room, and no more.
_PIECE_BYTES = 1 << 24


class InnerStates:
    """The state of the inner optimizers of one replica, or of one of its workers.

    Args:
        optimizers: As given to ``DiLoCo``; in the same order on all replicas.

    Attributes:
        copied_bytes: Of inner state that the newcomers of the last group were given.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self.copied_bytes = 0

    def share(self, exchange: Exchange) -> None:
        """Give the newcomers the state of the lowest replica that trains; a collective call.

        Raises:
            ReplicaMismatch: On a newcomer that trains other parameters, or whose source has a state
                that does not consist of tensors and numbers.
            SyncError: On all replicas, if a newcomer's state is not that of the source.
        """
        source_rank = _source_rank(exchange)
        is_source, is_new = exchange.rank == source_rank, exchange.replica in exchange.joined
        blobs = exchange.exchange_objects(self._table() if is_source else b"")
        entries = torch.load(io.BytesIO(blobs[source_rank]), weights_only=True)
        if is_new:
            self._make_room(entries)
        tensors = self._tensors() if is_source or is_new else []
        sizes = [size for entry in entries for size in entry["sizes"]]
        self.copied_bytes = sum(sizes)
        for piece in _pieces(tensors, sizes):
            exchange.broadcast(piece, source_rank)
        digests = gather_json(exchange, f"{digest_of(tensors):016x}" if tensors else "")
        wrong = [
            replica
            for replica, digest in zip(exchange.members, digests, strict=True)
            if replica in exchange.joined and digest != digests[source_rank]
        ]
        if wrong:
            raise SyncError(
                f"replicas {wrong} have another inner state than replica "
                f"{exchange.members[source_rank]}, from which they have received it",
                stage="inner_state",
            )

    def _owners(self) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
        """Yield each trained parameter with its optimizer."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    yield optimizer, param

    def _tensors(self) -> list[Tensor]:
        """Return the bytes of all tensors of the state, uint8, where they lie."""
        return [
            _bytes_of(value)
            for optimizer, param in self._owners()
            for value in optimizer.state.get(param, {}).values()
            if isinstance(value, Tensor)
        ]

    def _table(self) -> bytes:
        """Describe the state of each parameter: its tensors, and all other values as they are."""
        entries = []
        for optimizer, param in self._owners():
            state = optimizer.state.get(param, {})
            values = {str(name): _description(param, value) for name, value in state.items()}
            sizes = [_bytes_of(one).numel() for one in state.values() if isinstance(one, Tensor)]
            entries.append({"shape": list(param.shape), "values": values, "sizes": sizes})
        table = io.BytesIO()
        torch.save(entries, table)
        return table.getvalue()

    def _make_room(self, entries: Sequence[dict[str, Any]]) -> None:
        """Give each parameter a state like that of the source, whose tensors hold anything."""
        owners = list(self._owners())
        own, given = [list(p.shape) for _, p in owners], [entry["shape"] for entry in entries]
        if own != given:
            raise ReplicaMismatch(
                "inner_state=True needs the same parameters in the same order in the optimizers of "
                f"all replicas: this replica's have the shapes {own}, and the group's {given}",
                stage="inner_state",
            )
        for (optimizer, param), entry in zip(owners, entries, strict=True):
            values = entry["values"]
            if other := [name for name, (kind, _) in values.items() if kind == "other"]:
                raise ReplicaMismatch(
                    f"inner_state=True gives tensors and numbers, and {other} in the state of "
                    f"{type(optimizer).__name__} are neither: leave inner_state out",
                    stage="inner_state",
                )
            optimizer.state.pop(param, None)
            if values:
                optimizer.state[param] = {n: _room(param, *one) for n, one in values.items()}


def _source_rank(exchange: Exchange) -> int:
    return min(rank for rank, r in enumerate(exchange.members) if r not in exchange.joined)


def _description(param: Tensor, value: Any) -> tuple[str, Any]:
    """Return of which kind a value is, and what a newcomer needs to make one."""
    if isinstance(value, Tensor):
        if value.shape == param.shape:
            return "like", value.dtype
        is_beside = value.device == param.device
        return "tensor", (list(value.shape), value.dtype, is_beside)
    is_plain = value is None or isinstance(value, int | float | str)
    return ("plain", value) if is_plain else ("other", None)


def _room(param: Tensor, kind: str, what: Any) -> Any:
    if kind == "like":
        # Also of a sharded parameter, and in its order in memory.
        return torch.empty_like(param, dtype=what, requires_grad=False)
    if kind == "tensor":
        shape, dtype, is_beside = what
        return torch.empty(shape, dtype=dtype, device=param.device if is_beside else "cpu")
    return what


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, or of this worker's part of a sharded one."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return memory_order(local.detach()).view(torch.uint8)


def _pieces(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[list[Tensor]]:
    """Yield what travels at once; scratch memory on a replica that has nothing to do with it."""
    scratch = None if tensors else torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="cpu")
    piece: list[Tensor] = []
    room = _PIECE_BYTES
    for place, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + room)
            used = _PIECE_BYTES - room
            one = tensors[place][begin:end] if scratch is None else scratch[used:][: end - begin]
            piece.append(one)
            begin, room = end, room - (end - begin)
            if not room:
                yield piece
                piece, room = [], _PIECE_BYTES
    if piece:
        yield piece
