"""Save and load what DiLoCo keeps, and hand it to a replica that joins.

The layout of a saved state (a ``torch.distributed.checkpoint`` Stateful):

    version, layout, inner_step
    parts/<fragment>        round, last_sent, extra (what the outer optimizer adds)
    outer/<parameter>       fp32, the parameter's shape
    buffers/<buffer>/<parameter>            momentum and the like, fp32
    replica_<r>/residual/<parameter>        only with error feedback, and different on each replica
    replica_<r>/reduce_residual/<fragment>

All keys but ``replica_<r>`` hold the same values on every replica. Tensors are views of the live
buffers, not copies: save them before the next step. The user's local parameters and inner
optimizer differ between replicas too and need keys of their own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .exchange import Exchange
from .parts import ParameterPart, Part

VERSION = 1


def collect(
    parts: Sequence[Part], *, replica: int, layout: int, inner_step: int, shared: bool
) -> dict[str, Any]:
    """Build the saved state; see the module's docstring.

    Raises:
        ValueError: If ``shared`` but something differs between replicas.
    """
    state: dict[str, Any] = {
        "version": VERSION,
        "layout": layout,
        "inner_step": inner_step,
        "parts": {str(part.index): _numbers(part) for part in parts},
        "outer": {},
        "buffers": {},
    }
    own: dict[str, Any] = {"residual": {}, "reduce_residual": {}}
    for part in _parameter_parts(parts):
        state["outer"].update(part.fragment.views(part.outer))
        for name, flat in part.state.tensors().items():
            state["buffers"].setdefault(name, {}).update(part.fragment.views(flat))
        if part.slot is not None and part.slot.residual is not None:
            own["residual"].update(part.fragment.views(part.slot.residual))
        if part.slot is not None and part.slot.reduce_residual is not None:
            own["reduce_residual"][str(part.index)] = part.slot.reduce_residual
    if any(own.values()):
        if shared:
            raise ValueError(
                "error feedback keeps residuals that differ between replicas: save on every "
                "replica, not on one alone"
            )
        state[f"replica_{replica}"] = own
    return state


def restore(
    parts: Sequence[Part], state: Mapping[str, Any], *, replica: int, layout: int, strict: bool
) -> int:
    """Copy a saved state in, in place, and return its inner step.

    Raises:
        ValueError: If it does not fit this model, schedule or replica.
    """
    if state.get("version") != VERSION:
        raise ValueError(f"saved state has version {state.get('version')}, {VERSION} expected")
    if state["layout"] != layout:
        raise ValueError(
            "the saved state is of another layout: names, shapes, dtypes, fragments, sync_every "
            "and offsets must be those of the save"
        )
    for part in parts:
        _set_numbers(part, state["parts"][str(part.index)])
    for part in _parameter_parts(parts):
        _copy(part.fragment.views(part.outer), state["outer"])
        _restore_optimizer(part, state)
        _restore_residuals(part, state.get(f"replica_{replica}"), replica, strict)
    return int(state["inner_step"])


def _parameter_parts(parts: Sequence[Part]) -> list[ParameterPart]:
    return [part for part in parts if isinstance(part, ParameterPart)]


def _numbers(part: Part) -> dict[str, Any]:
    numbers: dict[str, Any] = {"round": part.round, "last_sent": part.last_sent}
    if isinstance(part, ParameterPart):
        numbers["extra"] = part.state.extra()
    return numbers


def _set_numbers(part: Part, numbers: Mapping[str, Any]) -> None:
    part.round, part.last_sent = int(numbers["round"]), int(numbers["last_sent"])
    if isinstance(part, ParameterPart):
        part.state.num_steps = part.round


def _copy(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        if name not in saved:
            raise ValueError(f"the saved state lacks parameter {name!r}")
        # The saved tensor is the live one when a checkpoint was loaded in place.
        if saved[name].data_ptr() != tensor.data_ptr():
            tensor.copy_(saved[name])


def _restore_optimizer(part: ParameterPart, state: Mapping[str, Any]) -> None:
    flats = {}
    for buffer, saved in state["buffers"].items():
        flats[buffer] = torch.empty_like(part.outer)
        _copy(part.fragment.views(flats[buffer]), saved)
    part.state.load(flats, dict(state["parts"][str(part.index)]["extra"]))


def _restore_residuals(
    part: ParameterPart, saved: Mapping[str, Any] | None, replica: int, strict: bool
) -> None:
    slot = part.slot
    if slot is None or slot.residual is None:
        return
    shard = None if saved is None else saved["reduce_residual"].get(str(part.index))
    own_shard = slot.reduce_residual
    fits = saved is not None and (own_shard is None or shard is not None)
    if fits and own_shard is not None and shard is not None:
        fits = own_shard.shape == shard.shape
    if fits and saved is not None:
        _copy(part.fragment.views(slot.residual), saved["residual"])
        if own_shard is not None and shard is not None:
            own_shard.copy_(shard)
        return
    if strict:
        raise ValueError(
            f"the saved state holds no error-feedback residuals that fit replica {replica} in a "
            "group of this size: it was saved by other replicas; strict=False starts them at zero"
        )
    slot.residual.zero_()
    if own_shard is not None:
        own_shard.zero_()


# ------------------------------------------------------------------------------------ joining


def send_or_receive(
    exchange: Exchange,
    parts: Sequence[Part],
    inner_step: int,
    outer_lr: float | None,
    source_rank: int,
) -> tuple[int, float | None]:
    """Give every member the source's outer state, exactly.

    Returns:
        The source's inner step, and its outer learning rate (None when that is a function).
    """
    numbers = {str(part.index): _numbers(part) for part in parts}
    file = io.BytesIO()
    torch.save({"inner_step": inner_step, "outer_lr": outer_lr, "parts": numbers}, file)
    blobs = exchange.exchange_objects(file.getvalue())
    meta = torch.load(io.BytesIO(blobs[source_rank]), weights_only=True)
    is_source = exchange.rank == source_rank
    for part in parts:
        own = meta["parts"][str(part.index)]
        _set_numbers(part, own)
        if not isinstance(part, ParameterPart):
            # Statistics differ between replicas until their next round: only newcomers take them.
            is_new = is_source or exchange.replica in exchange.joined
            tensors = part.tensors()
            exchange.broadcast(tensors if is_new else [t.clone() for t in tensors], source_rank)
            continue
        flats = part.state.tensors()
        exchange.broadcast([part.outer, *flats.values()], source_rank)
        if not is_source:
            part.state.load(flats, own["extra"])
    return int(meta["inner_step"]), meta["outer_lr"]
