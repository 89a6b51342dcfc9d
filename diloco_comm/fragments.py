"""Fragments: which parameters travel together, and at which inner step each set is due.

The order of parameters is the model's, their identity is ``id(param)``, and which of them take
part is decided by the optimizers: frozen weights stay out, a tied weight counts once, under its
first name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REST = "rest"
# What wrappers put into names; the same weight has one name with and without them.
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")

FragmentSpec = int | str | Sequence[str | Sequence[str]]
Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Fragment:
    """A set of parameters that is exchanged together.

    Attributes:
        names: Names in the model, in its order.
        params: The parameters themselves; virtually concatenated in memory order.
        num_elements: Elements of all of them; may be 0, and then nothing is exchanged.
    """

    index: int
    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]

    @property
    def num_elements(self) -> int:
        return sum(param.numel() for param in self.params)

    def tensors(self) -> list[Tensor]:
        """Return the parameters as they lie now, detached; writing to these writes to them."""
        return [param.detach() for param in self.params]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut ``flat`` ([num_elements], any dtype) into views shaped like the parameters."""
        views, offset = {}, flat.storage_offset()
        for name, param in zip(self.names, self.params, strict=True):
            views[name] = flat.as_strided(param.shape, param.stride(), offset)
            offset += param.numel()
        return views


def memory_order(tensor: Tensor) -> Tensor:
    """View a dense tensor of any shape as 1-D, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


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
    return named


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
        f"the optimizer trains parameters that are not exchanged: {', '.join(shown)}; they were "
        "added, replaced or unfrozen after DiLoCo was constructed: construct it anew, on all "
        "replicas"
    )


def _check_parameter(name: str, param: Tensor) -> None:
    if param.dtype not in DTYPES:
        raise TypeError(
            f"parameter {name!r} is {param.dtype}: only float32, bfloat16 and float16 parameters "
            "can be exchanged"
        )
    if type(param.data) is not Tensor or param.layout != torch.strided:
        raise TypeError(
            f"parameter {name!r} is a {type(param.data).__name__} with layout {param.layout}: "
            "only plain strided tensors can be exchanged"
        )
    if param.device.type != "cpu":
        raise TypeError(
            f"parameter {name!r} is on {param.device}: only parameters in CPU memory can be "
            "exchanged"
        )
    if not is_dense(param):
        raise TypeError(
            f"parameter {name!r} of shape {tuple(param.shape)} and strides {param.stride()} has "
            "gaps or overlaps in memory: make it contiguous"
        )


# ---------------------------------------------------------------------------------- fragments


def make_fragments(model: nn.Module, named: Named, spec: FragmentSpec) -> list[Fragment]:
    """Cut the parameters into fragments.

    Args:
        model: Where layers are looked for.
        named: As ``trainable_parameters`` returns them.
        spec: A number (contiguous in model order, balanced by elements); ``"layers:3"`` (every
            P-th layer, 3 to a fragment) or ``"sequential:3"`` (3 neighbouring layers), both with
            what is outside the layers as a last fragment; or one pattern or list of patterns
            (``fnmatch``) for each fragment, where ``"rest"`` takes what no other one matches.

    Raises:
        ValueError: If the parameters cannot be cut that way; says which one or how many.
    """
    if isinstance(spec, bool) or not isinstance(spec, (int, str, Sequence)):
        raise TypeError(f"fragments must be a number, a string or patterns, got {spec!r}")
    if isinstance(spec, int):
        parts = _balanced(named, spec)
    elif isinstance(spec, str):
        parts = _by_layers(unwrap_model(model), named, spec)
    else:
        parts = _by_patterns(named, spec)
    return [
        Fragment(index, tuple(name for name, _ in part), tuple(param for _, param in part))
        for index, part in enumerate(parts)
    ]


def _balanced(named: Named, num_fragments: int) -> list[Named]:
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


def _by_layers(model: nn.Module, named: Named, spec: str) -> list[Named]:
    scheme, _, size_text = spec.partition(":")
    if scheme not in ("layers", "sequential") or not size_text.isdigit() or int(size_text) < 1:
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


def _by_patterns(named: Named, spec: Sequence[str | Sequence[str]]) -> list[Named]:
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


# ----------------------------------------------------------------------------------- schedule


@dataclass(frozen=True)
class Schedule:
    """At which inner step each fragment is sent.

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
        """Check the numbers; offsets default to floor(H*(p+1)/P): all are sent once by step H.

        Raises:
            ValueError: If ``sync_every`` is below 1 or an offset is outside 1..2*sync_every.
        """
        if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
            raise ValueError(f"sync_every must be an integer of at least 1, got {sync_every!r}")
        if offsets is None:
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


# ------------------------------------------------------------------------------------- layout


def describe_parameters(fragments: Sequence[Fragment]) -> list[str]:
    """Describe every parameter in one line: fragment, name, shape, strides, dtype."""
    return [
        describe(f"{fragment.index} {name}", param)
        for fragment in fragments
        for name, param in zip(fragment.names, fragment.params, strict=True)
    ]


def describe(what: str, tensor: Tensor) -> str:
    """Describe a tensor in one line: what it is, shape, strides, dtype."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{what} {list(tensor.shape)} {list(tensor.stride())} {dtype}"


def layout_hash(fragments: Sequence[Fragment], schedule: Schedule) -> int:
    """Hash names, shapes, dtypes, fragments, H and offsets to 63 bits, alike on all replicas."""
    text = json.dumps([describe_parameters(fragments), schedule.sync_every, schedule.offsets])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
