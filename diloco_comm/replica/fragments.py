"""Fragments: which parameters travel together.

Parameters have the order of the model, and their identity is ``id(param)``. The parameters of the
optimizers take part: frozen weights stay out. A tied weight counts once, under its first name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..base.checks import first_of, integer
from ..ops.implementations import is_served
from . import sharding
from .fragment_rules import Named, balanced, by_layers, by_patterns

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The prefixes that wrappers put into names: a weight has the same name with and without a wrapper.
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")

FragmentSpec = int | str | Sequence[str | Sequence[str]]


@dataclass(frozen=True)
class Fragment:
    """A set of parameters that is exchanged together.

    Of a DTensor the local shard takes part. A worker that holds no element of a fragment of
    DTensors exchanges a single zero instead, the *filler*. So that worker has the same rounds and
    failures as the workers with elements.

    Attributes:
        names: Names in the model, in the order of the model.
        params: The parameters themselves; virtually concatenated in memory order.
        modules: FSDP modules that may hold gathered copies of the parameters.
        alignment: Each tensor starts at a multiple of this many elements. What is between two
            tensors is the *padding*: elements that are zero on all replicas.
        filler: The single zero; None where there is an element.
        memory: How the parameters lay in memory when the fragment was made.
    """

    index: int
    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    modules: tuple[Any, ...] = ()
    alignment: int = 1
    filler: Tensor | None = field(init=False, default=None)
    memory: tuple[Memory, ...] = field(init=False)
    gaps: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gaps", self._make_gaps())
        object.__setattr__(self, "memory", tuple(map(memory_of, self.params)))
        if self._needs_filler():
            device = sharding.local(self.params[0]).device
            object.__setattr__(self, "filler", torch.zeros(1, device=device))

    def _make_gaps(self) -> dict[str, Tensor]:
        """Return the padding after each tensor but the last, by the tensor's name."""
        shards = [sharding.local(param) for param in self.params[:-1]]
        counts = [-shard.numel() % self.alignment for shard in shards]
        device = sharding.local(self.params[0]).device
        return {
            name: torch.zeros(count, device=device)
            for name, count in zip(self.names[:-1], counts, strict=True)
            if count
        }

    def _needs_filler(self) -> bool:
        is_empty = not any(sharding.local(param).numel() for param in self.params)
        return is_empty and any(sharding.is_sharded(param) for param in self.params)

    def refuse_changes(self) -> None:
        """Raise ValueError if a parameter does not lie in memory as it did."""
        for name, param, before in zip(self.names, self.params, self.memory, strict=True):
            refuse_change(f"parameter {name!r}", param, before)

    @property
    def num_elements(self) -> int:
        """Elements that this worker holds; with 0 elements nothing is exchanged."""
        return sum(tensor.numel() for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return what is exchanged, detached; writing to the tensors writes to the parameters."""
        filler = [] if self.filler is None else [self.filler]
        return [*(piece for _, piece in self.pieces()), *filler]

    def pieces(self) -> list[tuple[str, Tensor]]:
        """Return this worker's tensors with their padding, which has the name ""."""
        return self._padded(self.named())

    def _padded(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        pieces = []
        for name, tensor in tensors.items():
            pieces.append((name, tensor))
            if name in self.gaps:
                pieces.append(("", self.gaps[name]))
        return pieces

    def padding(self) -> list[tuple[int, int]]:
        """Return the elements [begin, end) that are padding, counted through ``tensors``."""
        found, offset = [], 0
        for name, piece in self.pieces():
            if not name:
                found.append((offset, offset + piece.numel()))
            offset += piece.numel()
        return found

    def named(self) -> dict[str, Tensor]:
        """Return this worker's part of each parameter, detached; see ``tensors`` for writing."""
        sharding.reshard(self.modules)
        pairs = zip(self.names, self.params, strict=True)
        return {name: sharding.local(param) for name, param in pairs}

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut ``flat`` ([num_elements], any dtype) into views shaped like the parameters.

        The view of a DTensor is a DTensor.
        """
        views, offset = {}, flat.storage_offset()
        for name, param in zip(self.names, self.params, strict=True):
            shard = sharding.local(param)
            view = flat.as_strided(shard.shape, shard.stride(), offset)
            views[name] = sharding.like(view, param)
            offset += shard.numel()
            offset += self.gaps[name].numel() if name in self.gaps else 0
        return views

    @property
    def placement(self) -> str:
        """Say which elements are exchanged here, if the parameters do not show it."""
        return ""

    def local(self) -> list[Tensor]:
        """Return all elements of the parameters here, also those that other workers exchange."""
        return list(self.named().values())

    def own_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut ``flat`` for the part of a saved state that this worker has for itself."""
        return self.views(flat)

    def has_own(self, saved: Mapping[str, Any]) -> bool:
        """Whether the saved tensors come from ``own_views`` of such a fragment."""
        return any(name in saved for name in self.names)

    def check_own(self, saved: Any) -> None:
        """Raise ValueError unless ``load_own`` can take what ``own_views`` gave."""
        self.check(saved)

    def load_own(self, flat: Tensor, saved: Mapping[str, Tensor]) -> None:
        """Copy what ``own_views`` gave into ``flat``."""
        self.load(flat, saved)

    def check(self, saved: Any) -> None:
        """Raise ValueError unless ``load`` can take the saved tensors."""
        for name, param in zip(self.names, self.params, strict=True):
            if not isinstance(saved, Mapping) or name not in saved:
                raise ValueError(f"the saved state lacks parameter {name!r}")
            reason = sharding.misfit(saved[name], param)
            if reason:
                raise ValueError(f"the saved parameter {name!r} {reason}")

    def load(self, flat: Tensor, saved: Mapping[str, Tensor]) -> None:
        """Copy saved tensors, named like the parameters, into ``flat`` ([num_elements])."""
        for (name, view), param in zip(self.views(flat).items(), self.params, strict=True):
            target, source = sharding.local(view), sharding.part_of(saved[name], param)
            # The saved tensor is the live one when a checkpoint was loaded in place.
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)


Memory = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def memory_of(tensor: Tensor) -> Memory:
    """Return shape, strides, dtype and device of what this worker holds of a tensor."""
    tensor = sharding.local(tensor) if sharding.is_sharded(tensor) else tensor
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def refuse_change(what: str, tensor: Tensor, before: Memory) -> None:
    """Raise ValueError unless ``memory_of(tensor)`` is ``before``.

    The outer parameters are kept in the order of that memory.
    """
    now = memory_of(tensor)
    if now != before:
        old, new = (
            f"{list(shape)} {list(strides)} {str(dtype).removeprefix('torch.')} on {device}"
            for shape, strides, dtype, device in (before, now)
        )
        raise ValueError(
            f"{what} was {old} (shape, strides, dtype) when the model was attached and is {new} "
            "now: change the model before that, or attach it anew, on all replicas"
        )


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill a stretch of memory, in any order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


# --------------------------------------------------------------------------------- parameters


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's module inside torch.compile's and DDP's wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def trainable_parameters(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Named:
    """List the parameters to exchange, in the model's order and under its names.

    Raises:
        ValueError: If an optimizer holds a parameter that the model lacks, or there are none.
        TypeError: If a parameter is not float32, bfloat16 or float16, or not dense in memory.
    """
    # FSDP registers its shards, which the optimizer holds, only while nothing is gathered.
    sharding.reshard(sharding.fsdp_modules(model))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    wanted = {id(p): p for group in groups for p in group["params"] if p.requires_grad}
    named: Named = []
    for name, param in unwrap_model(model).named_parameters():
        if id(param) in wanted:
            named.append((_WRAPPERS.sub("", name), param))
            del wanted[id(param)]
    if wanted:
        shape = tuple(next(iter(wanted.values())).shape)
        raise ValueError(
            f"the optimizer holds {len(wanted)} parameters that the model does not have, "
            f"the first of shape {shape}: give the model that owns them"
        )
    if not named:
        raise ValueError("the optimizer holds no parameter that requires a gradient")
    for name, param in named:
        _check_parameter(name, param)
    first = sharding.local(named[0][1]).device
    for name, param in named:
        if sharding.local(param).device != first:
            raise TypeError(
                f"parameter {name!r} is on {sharding.local(param).device}, {named[0][0]!r} on "
                f"{first}: all that one worker trains must be on one device"
            )
    return named


def unexchanged_tensors(model: nn.Module, exchanged: Collection[str]) -> dict[str, Tensor]:
    """Return frozen parameters and buffers by name: no exchange makes them alike on all replicas.

    The buffers are the persistent ones, other than the statistics of normalisations, which each
    replica has for its own data. For a DTensor this worker's shard is returned. A tensor without
    storage of its own, such as one on ``meta`` or of a quantised type, is left out.

    Args:
        exchanged: The names of tensors that are exchanged.
    """
    found: dict[str, Tensor] = {}
    model = unwrap_model(model)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            found[name] = param
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    shards = {_WRAPPERS.sub("", name): sharding.local(t).detach() for name, t in found.items()}
    return {
        name: shard
        for name, shard in shards.items()
        if name not in exchanged and _has_plain_memory(shard)
    }


def uncopied_tensors(model: nn.Module, exchanged: Collection[str]) -> dict[str, Tensor]:
    """Return frozen parameters of quantised types, and buffers that are not persistent, by name.

    ``unexchanged_tensors`` leaves them out: replicas often have the same, but may differ on
    purpose. A quantised parameter, such as the base of a LoRA, is several plain tensors.
    """
    found: dict[str, Tensor] = {}
    model = unwrap_model(model)
    for name, param in model.named_parameters():
        shard = sharding.local(param).detach()
        if not param.requires_grad and not _has_plain_memory(shard):
            found |= _plain_tensors(name, shard)
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None:
                found |= _plain_tensors(f"{path}.{name}" if path else name, buffer)
    names = {name: _WRAPPERS.sub("", name) for name in found}
    return {names[name]: t for name, t in found.items() if names[name] not in exchanged}


def all_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters by name, without the prefixes of wrappers; frozen and tied ones too."""
    sharding.reshard(sharding.fsdp_modules(model))
    named = unwrap_model(model).named_parameters(remove_duplicate=False)
    return {_WRAPPERS.sub("", name): param for name, param in named}


def buffer_names(model: nn.Module) -> set[str]:
    """Return the names of all buffers, without the prefixes of wrappers."""
    return {_WRAPPERS.sub("", name) for name, _ in unwrap_model(model).named_buffers()}


def _plain_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a tensor, or the inner tensors of one of a quantised class."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner = tensor.__tensor_flatten__()[0]
        each = [_plain_tensors(f"{name}.{one}", getattr(tensor, one)) for one in inner]
        return {key: value for found in each for key, value in found.items()}
    plain = tensor.detach().as_subclass(Tensor)
    return {name: plain} if _has_plain_memory(plain) else {}


def _has_plain_memory(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_plain and tensor.device.type != "meta" and is_dense(tensor)


def refuse_new_parameters(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], known: set[int]
) -> None:
    """Raise ValueError if the optimizers train a parameter whose id is not among the known ones."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    new = [p for group in groups for p in group["params"] if p.requires_grad and id(p) not in known]
    if not new:
        return
    names = {id(p): _WRAPPERS.sub("", name) for name, p in unwrap_model(model).named_parameters()}
    shown = [names.get(id(p), f"one of shape {tuple(p.shape)} outside the model") for p in new]
    raise ValueError(
        f"the optimizer trains parameters that are not exchanged: {first_of(shown)}; they were "
        "added, replaced or unfrozen after DiLoCo was constructed: on all replicas, keep copies of "
        "the state_dict() of the model and of DiLoCo, close(), construct DiLoCo anew, and load both"
    )


def _check_parameter(name: str, param: Tensor) -> None:
    if param.dtype not in DTYPES:
        raise TypeError(
            f"parameter {name!r} is {param.dtype}: only float32, bfloat16 and float16 parameters "
            "can be exchanged"
        )
    param = sharding.local(param)
    if type(param.data) is not Tensor or param.layout != torch.strided:
        raise TypeError(
            f"parameter {name!r} is a {type(param.data).__name__} with layout {param.layout}: "
            "only plain strided tensors can be exchanged"
        )
    if not is_served(param.device):
        raise TypeError(
            f"parameter {name!r} is on {param.device}: only parameters on a GPU or in CPU memory "
            "can be exchanged"
        )
    if not is_dense(param):
        raise TypeError(
            f"parameter {name!r} of shape {tuple(param.shape)} and strides {param.stride()} has "
            "gaps or overlaps in memory: make it contiguous"
        )


# ---------------------------------------------------------------------------------- fragments


def make_fragments(model: nn.Module, named: Named, spec: FragmentSpec) -> list[Fragment]:
    """Cut the parameters into fragments, as ``cut_parameters`` says."""
    return fragments_of(model, cut_parameters(model, named, spec))


def fragments_of(
    model: nn.Module, parts: Sequence[Named], alignments: Sequence[int] | None = None
) -> list[Fragment]:
    """Return a fragment for each part.

    Args:
        alignments: Each tensor of a part starts at a multiple of this many elements.
    """
    modules = sharding.fsdp_modules(model)
    return [
        Fragment(
            index,
            tuple(name for name, _ in part),
            tuple(param for _, param in part),
            modules,
            1 if alignments is None else alignments[index],
        )
        for index, part in enumerate(parts)
    ]


def cut_parameters(model: nn.Module, named: Named, spec: FragmentSpec) -> list[Named]:
    """Cut the parameters into the parts of the fragments.

    Args:
        model: Where layers are looked for.
        named: As ``trainable_parameters`` returns them.
        spec: A number (contiguous in model order, balanced by elements); ``"layers:3"`` (every
            P-th layer, 3 to a fragment) or ``"sequential:3"`` (3 neighbouring layers), both with
            the parameters outside the layers as a last fragment; or one pattern or list of patterns
            (``fnmatch``) for each fragment, where ``"rest"`` takes the names that match no other.

    Raises:
        ValueError: If the parameters cannot be cut that way; says which one or how many.
        TypeError: If ``spec`` is none of these.
    """
    spec = fragment_spec(spec)
    if isinstance(spec, int):
        return balanced(named, spec)
    if isinstance(spec, str):
        return by_layers(unwrap_model(model), named, spec)
    return by_patterns(named, spec)


def fragment_spec(spec: Any) -> FragmentSpec:
    """Return a specification of fragments in plain values.

    Raises:
        TypeError: If it is neither a number, a string nor patterns.
    """
    if isinstance(spec, str):
        return spec
    if isinstance(spec, Sequence) and all(map(_is_pattern, spec)):
        return [entry if isinstance(entry, str) else list(entry) for entry in spec]
    with suppress(ValueError):
        return integer("fragments", spec)
    raise TypeError(f"fragments must be a number, a string or patterns, got {spec!r}")


def _is_pattern(entry: Any) -> bool:
    if isinstance(entry, str):
        return True
    return isinstance(entry, Sequence) and all(isinstance(one, str) for one in entry)
