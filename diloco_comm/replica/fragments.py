"""Fragments: which parameters travel together, when, and how replicas compare them.

Parameters have the order of the model, and their identity is ``id(param)``. The parameters of the
optimizers take part: frozen weights stay out. A tied weight counts once, under its first name.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.checks import MOST_INT32, class_of, first_of, integer
from ..ops.implementations import obstacle
from . import sharding

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The prefixes that wrappers put into names: a weight has the same name with and without a wrapper.
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")

FragmentSpec = int | str | Sequence[str | Sequence[str]]
Named = list[tuple[str, nn.Parameter]]
# The pattern of the names that no other pattern matches.
REST = "rest"


@dataclass(frozen=True)
class Fragment:
    """A set of parameters that is exchanged together.

    The local shard of a DTensor takes part. A worker that holds no element of a fragment of
    DTensors exchanges a single zero instead, the *filler*. So that worker has the same rounds and
    failures as the workers with elements.

    Attributes:
        names: Names in the model, in the order of the model.
        params: The parameters themselves; virtually concatenated in memory order.
        modules: FSDP modules that may hold gathered copies of the parameters.
        alignment: Each tensor starts at a multiple of this many elements. The elements between two
            tensors are the *padding*, zero on all replicas.
        filler: The single zero; None where there is an element.
        memory: How the parameters lay in memory when the fragment was made.
        is_plain: The parameters are exchanged whole, and nothing beside them.
    """

    index: int
    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    modules: tuple[Any, ...] = ()
    alignment: int = 1
    filler: Tensor | None = field(init=False, default=None)
    memory: tuple[Memory, ...] = field(init=False)
    gaps: dict[str, Tensor] = field(init=False)
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gaps", self._make_gaps())
        object.__setattr__(self, "memory", tuple(map(memory_of, self.params)))
        if self._needs_filler():
            device = held(self.params[0]).device
            object.__setattr__(self, "filler", torch.zeros(1, dtype=torch.float32, device=device))
        has_more = self.gaps or self.modules or self.placement or self.filler is not None
        is_whole = all(type(param) is nn.Parameter for param in self.params)
        object.__setattr__(self, "is_plain", is_whole and not has_more)

    def _make_gaps(self) -> dict[str, Tensor]:
        """Return the padding after each tensor but the last, by the tensor's name."""
        shards = [held(param) for param in self.params[:-1]]
        counts = [-shard.numel() % self.alignment for shard in shards]
        device = held(self.params[0]).device
        return {
            name: torch.zeros(count, dtype=torch.float32, device=device)
            for name, count in zip(self.names[:-1], counts, strict=True)
            if count
        }

    def _needs_filler(self) -> bool:
        is_empty = not any(held(param).numel() for param in self.params)
        return is_empty and any(sharding.is_sharded(param) for param in self.params)

    def refuse_changes(self) -> None:
        """Raise ValueError if a parameter has changed its shape, strides, dtype or device."""
        if tuple(map(memory_of, self.params)) != self.memory:
            for name, param, before in zip(self.names, self.params, self.memory, strict=True):
                refuse_change(f"parameter {name!r}", param, before)

    @property
    def num_elements(self) -> int:
        """Elements that this worker exchanges, with padding and filler; 0 means no exchange."""
        return sum(tensor.numel() for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return the tensors to exchange, detached; they share memory with the parameters."""
        if self.is_plain:
            return [param.detach() for param in self.params]
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
        return {name: held(param) for name, param in pairs}

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut ``flat`` ([num_elements], any dtype) into views shaped like the parameters.

        The view of a DTensor is a DTensor.
        """
        views, offset = {}, flat.storage_offset()
        for name, param in zip(self.names, self.params, strict=True):
            shard = held(param)
            view = flat.as_strided(shard.shape, shard.stride(), offset)
            views[name] = sharding.like(view, param)
            offset += shard.numel()
            offset += self.gaps[name].numel() if name in self.gaps else 0
        return views

    def cut(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut ``flat`` ([num_elements]) into views for an outer optimizer of torch, by name.

        A view has the shape of its parameter, but of a part of a parameter, and of a parameter
        without dimensions, the view is a vector. Padding and tensors without elements have no view.
        Where that leaves no view, the name "" has all of ``flat``, such as the filler.
        """
        whole = {n for n, p in zip(self.names, self.params, strict=True) if sharding.is_whole(p)}
        views, offset = {}, 0
        for name, piece in self.pieces():
            vector = flat[offset : offset + piece.numel()]
            offset += piece.numel()
            if name in whole and piece.ndim:
                views[name] = vector.as_strided(piece.shape, piece.stride())
            elif name:
                views[name] = vector
        return {name: view for name, view in views.items() if view.numel()} or {"": flat}

    @property
    def placement(self) -> str:
        """Words for the elements that are exchanged here, if they are not all of the parameters."""
        return ""

    def local(self) -> list[Tensor]:
        """Return all elements of the parameters here, also those that other workers exchange."""
        return list(self.named().values())

    def own_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut ``flat`` into views for a replica's own entries of a state, such as residuals."""
        return self.views(flat)

    def has_own(self, saved: Mapping[str, Any]) -> bool:
        """Whether the saved tensors come from ``own_views`` of such a fragment."""
        return any(name in saved for name in self.names)

    def check_own(self, saved: Any) -> None:
        """Raise ValueError unless ``load_own`` can load these saved tensors."""
        self.check(saved)

    def load_own(self, flat: Tensor, saved: Mapping[str, Tensor]) -> None:
        """Copy saved tensors of ``own_views`` into ``flat``."""
        self.load(flat, saved)

    def check(self, saved: Any) -> None:
        """Raise ValueError unless ``load`` can load these saved tensors."""
        for name, param in zip(self.names, self.params, strict=True):
            if not isinstance(saved, Mapping) or name not in saved:
                raise ValueError(f"the saved state lacks parameter {name!r}")
            reason = sharding.misfit(saved[name], param)
            if reason:
                raise ValueError(f"the saved parameter {name!r} {reason}")

    def load(self, flat: Tensor, saved: Mapping[str, Tensor]) -> None:
        """Copy saved tensors, named like the parameters, into ``flat`` ([num_elements])."""
        for (name, view), param in zip(self.views(flat).items(), self.params, strict=True):
            target, source = held(view), sharding.part_of(saved[name], param)
            # The saved tensor is the live one when a checkpoint was loaded in place.
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)


def held(tensor: Tensor) -> Tensor:
    """Return this worker's part of a tensor, detached; see ``sharding.local``."""
    return tensor.detach() if type(tensor) is nn.Parameter else sharding.local(tensor)


Memory = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def memory_of(tensor: Tensor) -> Memory:
    """Return shape, strides, dtype and device of what this worker holds of a tensor."""
    tensor = tensor if type(tensor) is nn.Parameter else sharding.local(tensor)
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
            f"the first of shape {shape}: give the model that owns them, or the optimizer of the "
            "model's own parameters"
        )
    if not named:
        raise ValueError("the optimizer holds no parameter that requires a gradient")
    for name, param in named:
        _check_parameter(name, param)
    first = held(named[0][1]).device
    for name, param in named:
        if held(param).device != first:
            raise TypeError(
                f"parameter {name!r} is on {held(param).device}, {named[0][0]!r} on "
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
    shards = {_WRAPPERS.sub("", name): held(t).detach() for name, t in found.items()}
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
        shard = held(param).detach()
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
    param = held(param)
    if type(param.data) is not Tensor or param.layout != torch.strided:
        raise TypeError(
            f"parameter {name!r} is {class_of(param.data)} with layout {param.layout}: "
            "only plain strided tensors can be exchanged"
        )
    if reason := obstacle(param.device):
        raise TypeError(f"parameter {name!r} is {reason}")
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


def balanced(named: Named, num_fragments: int) -> list[Named]:
    """Cut where the running number of elements is nearest to equal shares."""
    if not 1 <= num_fragments <= len(named):
        raise ValueError(
            f"fragments must be between 1 and the number of parameters {len(named)}, "
            f"got {num_fragments}"
        )
    ends = list(accumulate(param.numel() for _, param in named))
    cuts = [0]
    for p in range(1, num_fragments):
        target = ends[-1] * p / num_fragments
        # Every fragment keeps at least one tensor.
        choices = range(cuts[-1] + 1, len(named) - (num_fragments - p) + 1)
        cuts.append(min(choices, key=lambda cut: abs(ends[cut - 1] - target)))
    cuts.append(len(named))
    return [named[begin:end] for begin, end in pairwise(cuts)]


def by_layers(model: nn.Module, named: Named, spec: str) -> list[Named]:
    """Put layers together, strided or in sequence; parameters outside the layers come last."""
    scheme, _, size_text = spec.partition(":")
    if scheme not in ("layers", "sequential") or not size_text.isdecimal() or int(size_text) < 1:
        raise ValueError(
            f"unknown fragments {spec!r}: it must be a number, 'layers:N', 'sequential:N' "
            "or lists of name patterns"
        )
    layer_of = _layers_of_parameters(model)
    used = sorted({layer_of[id(param)] for _, param in named if id(param) in layer_of})
    if not used:
        raise ValueError(
            f"fragments={spec!r} found no list of layers of one class in "
            f"{type(model).__name__}: give a number or lists of name patterns"
        )
    size = int(size_text)
    num_fragments = -(-len(used) // size)
    parts: list[Named] = [[] for _ in range(num_fragments + 1)]
    for name, param in named:
        if id(param) not in layer_of:
            parts[-1].append((name, param))
            continue
        position = used.index(layer_of[id(param)])
        strided = scheme == "layers"
        parts[position % num_fragments if strided else position // size].append((name, param))
    return [part for part in parts if part]


def _layers_of_parameters(model: nn.Module) -> dict[int, int]:
    """Map id(param) to the number of its layer; a tied weight belongs to its first owner.

    Layers are the children of the outermost containers that hold at least two modules, all of
    one class and all with parameters.
    """
    prefixes: list[str] = []
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(prefix) for prefix in prefixes):
            continue
        if _is_list_of_layers(module):
            root = f"{name}." if name else ""
            prefixes += [f"{root}{child}." for child, _ in module.named_children()]
    layer_of: dict[int, int] = {}
    for name, param in model.named_parameters():
        for layer_idx, prefix in enumerate(prefixes):
            if name.startswith(prefix):
                layer_of[id(param)] = layer_idx
                break
    return layer_of


def _is_list_of_layers(module: nn.Module) -> bool:
    children = list(module.children())
    return (
        isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        and len(children) >= 2
        and len({type(child) for child in children}) == 1
        and all(any(True for _ in child.parameters()) for child in children)
    )


def by_patterns(named: Named, spec: Sequence[str | Sequence[str]]) -> list[Named]:
    """Match names; every parameter must belong to exactly one fragment."""
    patterns = [[entry] if isinstance(entry, str) else list(entry) for entry in spec]
    rest = [index for index, entry in enumerate(patterns) if entry == [REST]]
    if not patterns or len(rest) > 1:
        raise ValueError(f"fragments needs at least one pattern and at most one {REST!r}: {spec}")
    parts: list[Named] = [[] for _ in patterns]
    for name, param in named:
        hits = [
            index
            for index, entry in enumerate(patterns)
            if index not in rest and any(fnmatchcase(name, pattern) for pattern in entry)
        ]
        hits = hits or rest
        if not hits:
            raise ValueError(f"parameter {name!r} is matched by no fragment; add {REST!r}?")
        if len(hits) > 1:
            raise ValueError(f"parameter {name!r} is matched by fragments {hits}, one expected")
        parts[hits[0]].append((name, param))
    for index, part in enumerate(parts):
        if not part:
            raise ValueError(f"fragment {index} with patterns {patterns[index]} matches nothing")
    return parts


# --------------------------------------------------------------------------------------- schedule


@dataclass(frozen=True)
class Schedule:
    """The inner steps at which each fragment is sent.

    Attributes:
        sync_every: Inner steps between two sends of the same fragment (H).
        offsets: 1-based inner step of each fragment's first send, in its first or second round.
    """

    sync_every: int
    offsets: tuple[int, ...]

    @classmethod
    def plan(
        cls, sync_every: int, num_fragments: int, offsets: Sequence[int] | None = None
    ) -> Schedule:
        """Check the numbers; offsets default to floor(H*(p+1)/P), at least 1.

        Raises:
            ValueError: If ``sync_every`` is below 1 or an offset is outside 1..2*sync_every.
            TypeError: If ``offsets`` is no list.
        """
        sync_every = integer("sync_every", sync_every, 1, most=MOST_INT32)
        if offsets is not None:
            offsets = inner_steps(offsets)
        else:
            offsets = [max(1, sync_every * (p + 1) // num_fragments) for p in range(num_fragments)]
        if len(offsets) != num_fragments or any(not 1 <= t <= 2 * sync_every for t in offsets):
            raise ValueError(
                f"offsets must be {num_fragments} inner steps between 1 and 2*sync_every="
                f"{2 * sync_every}, got {list(offsets)}"
            )
        return cls(sync_every, tuple(offsets))

    def due(self, inner_step: int) -> list[int]:
        """Return the fragments that are sent after ``inner_step`` (1-based), lowest first."""
        return [
            index
            for index, offset in enumerate(self.offsets)
            if inner_step >= offset and (inner_step - offset) % self.sync_every == 0
        ]

    def next(self, inner_step: int) -> int:
        """Return the first inner step after this one at which a fragment is sent."""
        every = self.sync_every
        return min(max(t, t + every * ((inner_step - t) // every + 1)) for t in self.offsets)


def inner_steps(offsets: Any) -> list[int]:
    """Return offsets as a list of int.

    Raises:
        TypeError: If they are no list.
        ValueError: If one of them is no integer.
    """
    if isinstance(offsets, (str, bytes)) or not isinstance(offsets, Iterable):
        raise TypeError(f"offsets must be a list of inner steps, got {offsets!r}")
    return [integer("each of offsets", offset) for offset in offsets]


# ----------------------------------------------------------------------------------- descriptions


def describe_parameters(fragments: Sequence[Fragment], *, whole: bool = False) -> list[str]:
    """Describe every parameter in one line: fragment, name, shape, strides, dtype.

    A shard's line also has its position. Further lines name a fragment's alignment, and the range
    that this worker exchanges. Replicas compare these lines.

    Args:
        whole: Describe the whole tensors, without positions and ranges.
    """
    lines = []
    for fragment in fragments:
        if fragment.alignment > 1:
            lines.append(f"fragment {fragment.index} aligned to {fragment.alignment}")
        if fragment.placement and not whole:
            lines.append(f"fragment {fragment.index} {fragment.placement}")
        for name, param in zip(fragment.names, fragment.params, strict=True):
            lines.append(describe(f"{fragment.index} {name}", param, whole=whole))
    return lines


def describe(what: str, tensor: Tensor, *, whole: bool = False) -> str:
    """Describe a tensor in one line: name, shape, strides, dtype, and which shard."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if whole or not sharding.is_sharded(tensor):
        return f"{what} {list(tensor.shape)} {list(tensor.stride())} {dtype}"
    shard = held(tensor)
    shape = f"{list(shard.shape)} {list(shard.stride())}"
    return f"{what} {shape} {dtype}, {sharding.position(tensor)}"


def layout_hash(fragments: Sequence[Fragment], schedule: Schedule, *, whole: bool = False) -> int:
    """Hash names, shapes, dtypes, fragments, H and offsets to 63 bits, alike on all replicas.

    ``whole`` as in ``describe_parameters``: then alike on all shards, too.
    """
    lines = describe_parameters(fragments, whole=whole)
    text = json.dumps([lines, schedule.sync_every, schedule.offsets])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def named_layout(layout: int, name: str) -> int:
    """Return a layout's hash combined with the objects' name; unchanged for the default name."""
    if name == "default":
        return layout
    text = json.dumps([layout, name])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def same_memory(these: str) -> str:
    """Return the sentence about two replicas, or workers, with the same tensors in memory."""
    return (
        f"{these} train the same tensors in shared memory, as torch.multiprocessing passes a model "
        "to its processes: make the model in each process, or begin there with "
        "model = copy.deepcopy(model)"
    )


def shared_memory(tensors: Iterable[Tensor]) -> list[str]:
    """Name the places in shared memory where tensors lie, alike in all processes of a machine.

    Returns:
        A digest of boot, device, inode and offset for each tensor in a shared mapping. A tensor on
        the CPU says by ``is_shared()`` that it lies in one, as ``torch.multiprocessing`` leaves the
        tensors that it passes; on another device that says nothing.
    """
    addresses = [t.data_ptr() for t in tensors if t.device.type == "cpu" and t.numel()
                 and t.is_shared()]  # fmt: skip
    if not addresses:
        return []
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    begins = [int(words[0].partition("-")[0], 16) for words in maps]
    places = []
    for address in addresses:
        index = bisect.bisect(begins, address) - 1
        _, _, offset, device, inode, *_ = maps[index]
        place = f"{boot} {device} {inode} {int(offset, 16) + address - begins[index]}"
        places.append(hashlib.blake2b(place.encode(), digest_size=8).hexdigest())
    return places
