"""DiLoCo around the training loop of torchtitan, by the names of its ``fault_tolerance`` section::

    with semi_sync_training(config.fault_tolerance, model, optimizers, peers=replicas) as diloco:
        for step in ...:                       # torchtitan's loop, unchanged
            ...
            optimizers.step()

``semi_sync_training`` takes the arguments of torchtitan's ``maybe_semi_sync_training``. It needs
neither torchft nor torchft's lighthouse, so it goes around the ``train`` of torchtitan's own
``Trainer``; its ``FaultTolerantTrainer`` needs both. This module does not import torchtitan: the
section is any object with the attributes below, or a dictionary.
Source: torchtitan 0.3.0, ``trainer.py`` and
``experiments/torchft/{manager,trainer,config/job_config}.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from ..methods.outer import SGD, Nesterov
from ..methods.overlap import Blocking, Overlap, Streaming
from ..options import StorePeers, check_names, choices_of, with_defaults
from ..training.arguments import Arguments
from ..training.diloco import DiLoCo
from .attachment import finish
from .division import refuse_if_spans_replicas

if TYPE_CHECKING:
    from typing_extensions import Unpack

_REMEDY = (
    "give it a mesh of this replica's own workers and write semi_sync_training(..., "
    'peers=mesh["replica"]), or start each replica by a torchrun of its own and write '
    "semi_sync_training(..., peers=StorePeers(...))"
)

# The names that the section may have, with torchtitan's defaults.
DEFAULTS: dict[str, Any] = {
    "enable": False,
    "semi_sync_method": None,
    "sync_steps": 5,
    "should_quantize": False,
    "fragment_sync_delay": 0,
    "fragment_update_alpha": 0.0,
    "module_fqns_per_model_fragment": [],
    "num_fragments": 1,
    "replica_id": 0,
    "group_size": 0,
    "min_replica_size": 1,
    "process_group": "gloo",
    "process_group_timeout_ms": 10_000,
    "enable_ft_dataloader_checkpoints": True,
}


@contextmanager
def semi_sync_training(
    fault_tolerance: Any,
    model: nn.Module | Sequence[nn.Module],
    optimizers: Any = None,
    *,
    optimizer: Any = None,
    ft_manager: Any = None,
    n_layers: int = 0,
    fragment_fn: Any = None,
    **arguments: Unpack[Arguments],
) -> Iterator[DiLoCo | None]:
    """Train one of several replicas within the block, if the section enables it.

    At the end of the block the replicas share what was trained since the last exchange. After an
    error nothing is shared.

    Args:
        fault_tolerance: ``config.fault_tolerance`` or a mapping. Without ``enable`` and
            ``semi_sync_method`` ("diloco" or "local_sgd") the block gets None and nothing happens.
        model: The whole model, or torchtitan's list ``model_parts`` if the list has one model.
        optimizers: An optimizer, several, or torchtitan's ``OptimizersContainer``; torchtitan's
            call names it ``optimizer``.
        ft_manager, n_layers, fragment_fn: Without effect. They belong to torchtitan's call, and
            here the section names the fragments.
        arguments: Further arguments of ``DiLoCo``, which win over the section: ``peers``, ``wire``,
            ``outer``, ``overlap``. ``StorePeers(store)`` has this replica's number and the number
            of replicas from ``replica_id`` and ``group_size`` of the section.

    ``sync_steps`` has torchtitan's meaning: each fragment is sent every ``sync_steps`` steps, so
    some fragment is sent every ``sync_steps / num_fragments`` steps. ``should_quantize`` selects
    the wire int8 instead of fp32. The names for fault tolerance (``min_replica_size``,
    ``process_group``) have no effect: see ``change_group``.

    Raises:
        ValueError: If a value of the section is invalid, or the model's gradients are averaged over
            several replicas.
        TypeError: If there is no optimizer, or for arguments that ``DiLoCo`` does not have.
    """
    section = _read(fault_tolerance)
    if (optimizers is None) == (optimizer is None):
        raise TypeError("semi_sync_training takes one of optimizers and optimizer")
    check_names("semi_sync_training", arguments, Arguments.__annotations__)
    if not section["enable"] or section["semi_sync_method"] is None:
        yield None
        return
    chosen = with_defaults(diloco_arguments(section), arguments)
    if isinstance(chosen.get("peers"), StorePeers):
        chosen["peers"] = _place(section, chosen["peers"])
    whole = _whole(model)
    refuse_if_spans_replicas(whole, choices_of(chosen), _REMEDY)
    inner = _optimizers(optimizer if optimizers is None else optimizers)
    with DiLoCo(whole, inner, **chosen) as diloco:
        yield diloco
        # The program may have closed DiLoCo within the block.
        if not diloco._is_closed:
            finish(diloco)


def diloco_arguments(fault_tolerance: Any) -> dict[str, Any]:
    """Translate the section into arguments of ``DiLoCo``.

    Raises:
        ValueError: If a value of the section is invalid.
    """
    section = _read(fault_tolerance)
    method = str(section["semi_sync_method"]).lower()
    wire = "int8" if section["should_quantize"] else "fp32"
    shared = {"sync_every": section["sync_steps"], "wire": wire}
    if method == "local_sgd":
        return {**shared, "outer": SGD(lr=1.0)}
    if method != "diloco":
        raise ValueError(
            "fault_tolerance.semi_sync_method must be 'diloco' or 'local_sgd', got "
            f"{section['semi_sync_method']!r}"
        )
    return {
        **shared,
        "outer": Nesterov(lr=0.7, momentum=0.9),
        "overlap": _overlap(section["fragment_sync_delay"], section["fragment_update_alpha"]),
        "fragments": _fragments(section),
    }


def _overlap(delay: int, alpha: float) -> Overlap:
    return Blocking() if delay == 0 and alpha == 0 else Streaming(delay=delay, alpha=alpha)


def _fragments(section: Mapping[str, Any]) -> Any:
    """Return a number, or lists of name patterns; a module's pattern matches all below it."""
    modules = section["module_fqns_per_model_fragment"]
    if not modules:
        return section["num_fragments"]
    return [[f"{name}.*" for name in names] for names in modules]


def _place(section: Mapping[str, Any], peers: StorePeers) -> StorePeers:
    """Fill in the replica's number and the group's size from the section, if not given in peers."""
    if peers.replica is None:
        peers = dataclasses.replace(peers, replica=section["replica_id"])
    if peers.of is None and peers.members is None:
        peers = dataclasses.replace(peers, of=section["group_size"])
    return peers


def _read(section: Any) -> dict[str, Any]:
    if isinstance(section, Mapping):
        given = dict(section)
    elif dataclasses.is_dataclass(section):
        given = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    else:
        given = {name: getattr(section, name) for name in DEFAULTS if hasattr(section, name)}
    unknown = sorted(given.keys() - DEFAULTS.keys())
    if unknown:
        raise ValueError(f"fault_tolerance has no {', '.join(unknown)}")
    return {**DEFAULTS, **given}


def _whole(model: Any) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    parts = list(model)
    if len(parts) != 1:
        raise ValueError(
            f"a model in {len(parts)} pipeline stages is not supported: give the stage of this "
            "worker, and a group of the workers that hold the same stage"
        )
    return parts[0]


def _optimizers(optimizers: Any) -> Any:
    """Return the optimizers inside an ``OptimizersContainer``, whose own ``step`` has no hooks."""
    inner: Sequence[Optimizer] | None = getattr(optimizers, "optimizers", None)
    if inner is None:
        return list(optimizers) if _is_several(optimizers) else optimizers
    return list(inner)


def _is_several(optimizers: Any) -> bool:
    return isinstance(optimizers, Iterable) and not isinstance(optimizers, Optimizer)
