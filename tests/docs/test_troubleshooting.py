"""Each sentence that the page of troubleshooting quotes is one of the sources.

And docs/how-to/operate-elastic.md has each line of the log that says why an elastic replica waits.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from diloco_comm.group import plans

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "how-to").glob("troubleshooting*.md"))
ANY = "..."
# A row begins with its symptom: one sentence, or several that a break separates.
SYMPTOM = re.compile(r"^\| (`.+?) \| ", re.MULTILINE)
ROWS = [row for page in PAGES for row in SYMPTOM.findall(page.read_text())]
QUOTED = [quoted for row in ROWS for quoted in re.findall("`(.+?)`", row)]
# Shorter parts of a sentence tell nothing.
SHORTEST = 8


def python_strings(source: str) -> list[str]:
    """Return the strings of a source, with ``...`` for what is put in."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            words = [v.value if isinstance(v, ast.Constant) else ANY for v in node.values]
            found.append("".join(map(str, words)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%(\.\d)?[sdfg]", ANY, node.value))
    return found


def cpp_strings(path: Path) -> list[str]:
    """Return the literals of a file; those that touch are one."""
    joined = re.sub(r'"\s*\n\s*"', "", path.read_text())
    return [text.replace('\\"', '"') for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)]


@pytest.fixture(scope="module")
def sentences() -> str:
    found = []
    for path in ROOT.glob("diloco_comm*/**/*.py"):
        found += python_strings(path.read_text())
    for path in (ROOT / "csrc").rglob("*.cpp"):
        found += cpp_strings(path)
    return "\n".join(found)


def test_the_pages_quote_sentences() -> None:
    assert len(PAGES) == 1 and len(QUOTED) > 50 and len(QUOTED) == len(set(QUOTED))


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_sentence_is_in_the_sources(quoted: str, sentences: str) -> None:
    parts = [part.strip() for part in quoted.split(ANY)]
    told = [part for part in parts if len(part) >= SHORTEST]
    assert told, "only variable parts are quoted"
    assert [part for part in told if part not in sentences] == []


def reasons_to_wait() -> list[str]:
    """Return the beginnings of the reasons, up to their first comma, as regular expressions."""
    group = ROOT / "diloco_comm" / "group"
    source = "\n".join((group / f"{name}.py").read_text() for name in ("plans", "agreement"))
    # A fixed group waits for demands.
    source = source.replace(inspect.getsource(plans._demanded), "")
    strings = [
        text for text in python_strings(source) if text.startswith(("until ", "for replicas "))
    ]
    beginnings = {re.split("[,:;] ", text)[0] for text in strings}
    return sorted(".+?".join(map(re.escape, text.split(ANY))) for text in beginnings)


@pytest.mark.parametrize("reason", reasons_to_wait())
def test_the_table_of_log_lines_has_each_reason_to_wait(reason: str) -> None:
    page = (ROOT / "docs" / "how-to" / "operate-elastic.md").read_text()
    assert re.search(f"`{reason}", page)
