"""Ways to cut a list of parameters into fragments; ``fragments.make_fragments`` documents them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise

from torch import nn

Named = list[tuple[str, nn.Parameter]]
REST = "rest"


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
