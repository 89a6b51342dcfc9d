"""The code blocks of the documents: where each stands, its language, and how Python blocks are run.

Comments of a page, which its reader does not see, tell more about the block that follows:

    <!-- not run: it needs a GPU -->     why it is not run, or its options are not read
    <!-- continues -->                   the block goes on with the names of the block before
    <!-- run a b -->                     the block is typed in the terminals a and b
    <!-- prints a -->                    the block is what terminal a prints from there on
    <!-- setup                           Python that runs first; the reader knows these names
    num_steps = 4
    -->

A block without such a comment begins with the names of ``START``. A fence says its language. An
indented block is taken apart at its empty lines, and ``language_of`` decides for each paragraph.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import gc
import os
import re
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Names that every block may use: a small model, its optimizer, and data that all replicas have.
START = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from diloco_comm import DiLoCo

rank = int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(256, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)

def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""

COMMANDS = {
    *("diloco-comm", "make", "pip", "python", "python3", "torchrun", "srun", "sudo", "nsys", "ncu"),
    *("git", "cd", "export", "source", "ssh", "curl", "nc", "sh", "bash", "docker", "pytest"),
}
LANGUAGES = {
    **dict.fromkeys(("python", "py"), "python"),
    **dict.fromkeys(("sh", "bash", "shell", "console"), "shell"),
    "pycon": "doctest",
}
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        line: 1-based line of the page on which the code begins.
        language: "python", "doctest", "shell" or "text"; "text" is no code.
        reason: Why Python is not run, or options are not checked; empty if they are.
        setup: Python that runs before the block.
        continues: The block goes on with the names of the page's block before.
        verb, terminals: "run" or "prints", and where, for ``page_runner``; else empty.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str = ""
    setup: str = ""
    continues: bool = False
    verb: str = ""
    terminals: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Read the blocks of a page, with what the comments before each say about it."""
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    return blocks_in(page.read_text(), name)


def blocks_in(text: str, name: str = "") -> list[Block]:
    """Read the blocks of a text; ``name`` is that of its page."""
    found, about = [], {}
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "html_block":
            about |= _about(token.content)
        elif token.type in ("fence", "code_block"):
            for line, code in _pieces(token):
                word = token.info.partition(" ")[0]
                language = LANGUAGES.get(word, "text") if word else language_of(code)
                found.append(Block(name, line, language, code, **about))
            about = {}
        elif token.type in ("paragraph_open", "heading_open"):
            about = {}
    return found


def _about(comments: str) -> dict[str, Any]:
    about: dict[str, Any] = {}
    for comment in re.findall(r"<!--(.*?)-->", comments, re.DOTALL):
        word, _, rest = comment.strip().partition("\n")
        if word == "setup":
            about["setup"] = rest + "\n"
        elif word == "continues":
            about["continues"] = True
        elif marked := re.fullmatch(r"(run|prints) ([\w -]+)", word):
            about |= {"verb": marked[1], "terminals": tuple(marked[2].split())}
        elif comment.strip().startswith("not run:"):
            about["reason"] = comment.strip().removeprefix("not run:").strip()
    return about


def _pieces(token: Any) -> Iterator[tuple[int, str]]:
    """Yield first line and text: a fence whole, an indented block paragraph by paragraph."""
    first = token.map[0] + 1
    if token.type == "fence":
        yield first + 1, token.content
        return
    for paragraph in re.finditer(r"(?:[^\n]*\S[^\n]*\n?)+", token.content):
        yield first + token.content[: paragraph.start()].count("\n"), paragraph.group()


def language_of(paragraph: str) -> str:
    """Tell commands, Python and its prompts from figures, formulas and printed tables."""
    if paragraph.startswith((">>> ", "$ ")):
        return "doctest" if paragraph.startswith(">") else "shell"
    if any(is_command(words) for words in paragraph.splitlines()):
        return "shell"
    try:
        statements = ast.parse(paragraph).body
    except SyntaxError:
        return "text"
    return "python" if any(_does_something(statement) for statement in statements) else "text"


def _does_something(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else ast.Call
    return not isinstance(value, (ast.Name, ast.Constant, ast.BinOp, ast.Compare, ast.Tuple))


def is_command(line: str) -> bool:
    """Whether a line, after assignments to the environment, begins with a command."""
    words = line.split()
    while words and ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    return bool(words) and (words[0] in COMMANDS or (ROOT / words[0]).is_file())


# --------------------------------------------------------------------------------------- commands


def commands_of(block: Block) -> list[list[str]]:
    """Return the words of each command of a shell block, without prompts and printed lines."""
    lines = block.code.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    found = []
    for line in lines:
        for part in re.split(r"\s(?:&&|\|\||\||;|&)(?:\s|$)", line):
            words = shlex.split(part, comments=True)
            while words and ASSIGNMENT.fullmatch(words[0]):
                words = words[1:]
            if words:
                found.append(words)
    return found


# ----------------------------------------------------------------------- Python, in the replicas


def run_page(
    rank: int, world: int, blocks: list[Block], ports: list[int], folder: str
) -> list[str]:
    """Run the blocks of a page as replica ``rank``; the page's shared folder is the current one.

    Args:
        ports: Of a store for each block: groups of different blocks must not meet.

    Returns:
        The hashes of the outer parameters of each ``DiLoCo`` that a block has left.
    """
    os.chdir(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*train on the same data")
        return _run_all(rank, world, blocks, ports)


def _run_all(rank: int, world: int, blocks: list[Block], ports: list[int]) -> list[str]:
    hashes, names = [], {}
    for block, port in zip(blocks, ports, strict=True):
        if not block.continues:
            _end(names)
            _launch(rank, world, port)
            names = {"__name__": "__main__"}
            exec(START, names)
        _meet(block.setup + block.code)
        exec(block.setup, names)
        try:
            _run(block, names)
        except BaseException as error:
            raise AssertionError(f"{block.place}: {type(error).__name__}: {error}") from error
        hashes += [diloco.outer_hash() for diloco in _attached(names)]
    _end(names)
    return hashes


def _run(block: Block, names: dict[str, Any]) -> None:
    if block.language == "doctest":
        example = doctest.DocTestParser().get_doctest(block.code, names, block.place, None, 0)
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
        failed, _ = runner.run(example, clear_globs=False)
        assert not failed, "the output is another one"
        return
    # Empty lines in front, so that a traceback names the page's line.
    code = "\n" * (block.line - 1) + block.code
    exec(compile(code, block.page, "exec"), names)


def _launch(rank: int, world: int, port: int) -> None:
    """Set the variables of a launcher whose store is there already."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _meet(code: str) -> None:
    """Have a default group, unless the code makes one itself or does without."""
    import torch.distributed as dist

    makes_one = "init_process_group" in code or "replica_per_process" in code
    if not makes_one and not dist.is_initialized():
        dist.init_process_group("gloo")


def _attached(names: dict[str, Any]) -> list[Any]:
    from diloco_comm import DiLoCo

    return [value for value in names.values() if isinstance(value, DiLoCo)]


def _end(names: dict[str, Any]) -> None:
    import torch.distributed as dist

    for diloco in _attached(names):
        diloco.close()
    names.clear()
    gc.collect()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
