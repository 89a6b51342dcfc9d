"""Every code block of the documents runs, or says in its page why it does not.

Python runs on two replicas, whose outer parameters must be equal in the end. Commands are read:
the shell's syntax, the options of ``diloco-comm``, the targets of make, the files they name.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import check_arguments
from pages import PAGES, ROOT, Block, blocks_of, commands_of, language_of, run_page
from torch.distributed import TCPStore
from workers import Pool

BLOCKS = {str(page.relative_to(ROOT)): blocks_of(page) for page in PAGES}
OF_PYTHON = ("python", "doctest")


def runnable(languages: tuple[str, ...]) -> list[str]:
    """The pages with a block in one of the languages that is not marked."""
    return [
        name
        for name, blocks in BLOCKS.items()
        if any(block.language in languages and not block.reason for block in blocks)
    ]


@pytest.mark.nightly("pages are run nightly; the README stands for them", but=["README.md"])
@pytest.mark.parametrize("page", runnable(OF_PYTHON))
def test_python_runs(page: str, trainer_replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    blocks = [b for b in BLOCKS[page] if b.language in OF_PYTHON and not b.reason]
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in blocks]
    ports = [store.port for store in stores]
    first, second = trainer_replicas(2).run(run_page, blocks, ports, str(tmp_path), timeout=60)
    assert first == second


@pytest.mark.parametrize("page", runnable(("shell",)))
def test_commands_are_right(page: str) -> None:
    blocks = [b for b in BLOCKS[page] if b.language == "shell"]
    script = "\n".join(re.sub(r"^\$ ", "", block.code, flags=re.M) for block in blocks)
    syntax = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert syntax.stderr == "", page
    for block in (b for b in blocks if not b.reason):
        for words in commands_of(block):
            check_command(block, words)


def check_command(block: Block, words: list[str]) -> None:
    """Options, targets, modules and files of this project must exist."""
    for start in ("diloco-comm", "diloco_comm_tools.cli"):
        if start in words:
            check_arguments(words[words.index(start) + 1 :], block.place)
            return
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
        assert {word for word in words[1:] if "=" not in word} <= targets, block.place
    if "-m" in words and (module := words[words.index("-m") + 1]).startswith("benchmarks."):
        path = ROOT / module.replace(".", "/")
        script = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert script.exists(), block.place
    ours = r"(?:benchmarks|examples|tests|docs|csrc|kernels|\.ci)/\S+"
    files = [word for word in words if re.fullmatch(ours, word) and "results/" not in word]
    assert [file for file in files if not (ROOT / file).exists()] == [], block.place


def test_a_block_that_is_not_run_gives_a_reason() -> None:
    reasons = {block.place: block.reason for blocks in BLOCKS.values() for block in blocks}
    assert [place for place, reason in reasons.items() if reason and len(reason.split()) < 3] == []


@pytest.mark.parametrize(
    ("paragraph", "language"),
    [
        ("make demo    # all\n", "shell"),
        ("DILOCO_CUDA=ON pip install .\n", "shell"),
        ("# on the first machine\ndiloco-comm store\n", "shell"),
        (">>> 1 + 1\n2\n", "doctest"),
        ("diloco = DiLoCo(model, optimizer)\n", "python"),
        ("import diloco_comm.backend\n", "python"),
        ("# link: simulated\n", "text"),
        ("encode   payload <- Q(outer - local)\n", "text"),
        ("run_elements = ceil(N / R), rounded up\n", "text"),
    ],
)
def test_language_of_an_indented_paragraph(paragraph: str, language: str) -> None:
    assert language_of(paragraph) == language


def test_comments_before_a_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- setup\nx = 1\n-->\n<!-- continues -->\n```python\ny = x\n```\n\n"
        "<!-- not run: no such machine -->\n```sh\nlaunch\n```\n\nWords.\n\n```text\n1 2\n```\n"
    )
    first, second, third = blocks_of(page)
    assert first == Block("page.md", 6, "python", "y = x\n", setup="x = 1\n", continues=True)
    assert second == Block("page.md", 11, "shell", "launch\n", reason="no such machine")
    assert third == Block("page.md", 17, "text", "1 2\n")


@pytest.mark.parametrize(
    "words",
    [
        ["diloco-comm", "store", "--prt", "1"],
        ["make", "tset"],
        ["sh", "benchmarks/no.sh"],
        ["python", "-m", "benchmarks.no"],
    ],
)
def test_a_wrong_command_is_found(words: list[str]) -> None:
    with pytest.raises(AssertionError):
        check_command(Block("page.md", 1, "shell", ""), words)
