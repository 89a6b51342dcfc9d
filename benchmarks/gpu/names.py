"""Say which names of torch the package uses and this torch lacks; status 1 if there are any.

    python -m benchmarks.gpu.names [FOLDER]

Sources are read, not run. Checked are dotted names that begin with an import of torch, such as
``dist.ProcessGroupNCCL.Options``, and members of what is a class of torch by its annotation or by
the call that made it, such as ``options.config.max_ctas``. It needs no GPU, but a torch with CUDA:
that of CPUs has no NCCL.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "diloco_comm"


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` as text, or nothing for what is more than that."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        front = dotted(node.value)
        return front and f"{front}.{node.attr}"
    return ""


def imports(tree: ast.AST) -> dict[str, str]:
    """Map names in a source to the names in torch that they stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def resolve(name: str) -> Any:
    """Return what a dotted name in torch stands for.

    Raises:
        AttributeError: If there is no such thing.
    """
    found: Any = importlib.import_module("torch")
    path = "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except ImportError:
                raise AttributeError(path) from None
    return found


def full_name(text: str, known: dict[str, str]) -> str:
    """Replace the name that was imported by what it stands for; nothing if it was not."""
    front, _, rest = text.partition(".")
    return f"{known[front]}.{rest}".rstrip(".") if front in known else ""


def classes(tree: ast.AST, known: dict[str, str]) -> Iterator[tuple[str, type]]:
    """Yield names that are objects of a class of torch, by their annotation or first call."""
    for node in ast.walk(tree):
        pairs: list[tuple[ast.AST, ast.AST]] = []
        if isinstance(node, ast.arg) and node.annotation:
            pairs = [(ast.Name(node.arg), node.annotation)]
        elif isinstance(node, ast.AnnAssign):
            pairs = [(node.target, node.annotation)]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            pairs = [(target, node.value.func) for target in node.targets]
        for target, source in pairs:
            if isinstance(source, ast.BinOp):  # Class | None
                source = source.left
            try:
                found = resolve(full_name(dotted(source), known))
            except (AttributeError, ValueError):
                continue
            if isinstance(found, type) and dotted(target):
                yield dotted(target), found


def member(owner: type, path: str) -> bool:
    """Whether objects of a class have a member, and that has one, and so on."""
    first, _, rest = path.partition(".")
    # A source may have asked which kind of object it is.
    if not any(hasattr(kind, first) for kind in (owner, *owner.__subclasses__())):
        return False
    if not rest or owner.__name__ != "Options":
        return True
    found: Any = owner()  # NCCL's options, whose members are objects themselves
    for part in path.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def used(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the names of torch that a source uses, and whether they are there."""
    tree = ast.parse(path.read_text())
    known = imports(tree)
    texts = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    # Beginnings of longer names come as nodes of their own.
    for text in sorted(filter(None, {*texts, *known})):
        name = full_name(text, known)
        if name and not name.startswith("torch.ops."):  # whose names are ours
            try:
                resolve(name)
                yield name, True
            except AttributeError:
                yield name, False
    for part in tree.body:
        yield from members_in(part, known)


def members_in(tree: ast.AST, known: dict[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield members of torch's objects that a class or a function uses; ``known`` are imports."""
    objects: dict[str, set[type]] = {}
    for name, owner in classes(tree, known):
        if any(base.__name__ == "pybind11_object" for base in owner.__mro__):
            objects.setdefault(name, set()).add(owner)
    # A member that the source asks for, as ``hasattr(group, "member")``, may be missing.
    asked = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name("hasattr"), [owner, ast.Constant(name)]):
                asked.add(f"{dotted(owner)}.{name}")
    texts = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for text in sorted(filter(None, texts - asked)):
        # `self.group` is what the argument `group` was.
        front, _, last = text.removeprefix("self.").partition(".")
        owners = objects.get(front, set()) if last else set()
        if owners:
            kinds = " or ".join(sorted(owner.__qualname__ for owner in owners))
            yield f"{kinds} object.{last}", any(member(owner, last) for owner in owners)


def main() -> int:
    import torch

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE
    names: dict[str, bool] = {}
    for path in sorted(folder.rglob("*.py")):
        for name, is_there in used(path):
            if not is_there:
                print(f"{path.relative_to(folder.parent)}: torch {torch.__version__} has no {name}")
            names[name] = is_there
    num_missing = len(names) - sum(names.values())
    print(f"{len(names)} names of torch {torch.__version__}, {num_missing} missing")
    of_groups = [name for name in names if "ProcessGroup" in name or "nccl" in name.lower()]
    print(f"of them NCCL's and process groups': {', '.join(sorted(of_groups))}")
    return 0 if names and all(names.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
