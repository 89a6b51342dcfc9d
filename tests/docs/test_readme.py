"""README.md: short, and readable on a page that has no checkout beside it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_readme_is_short_and_names_the_test_command() -> None:
    assert len(README.splitlines()) <= 120
    assert "\n    make test " in README
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text()


def test_a_package_describes_itself_by_links_to_the_web_alone() -> None:
    code = "import setuptools; from distutils.core import run_setup; "
    code += "print(run_setup('setup.py', stop_after='init').metadata.long_description)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    targets = re.findall(r"\]\(([^)]*)\)", ended.stdout)
    assert targets and all(target.startswith("https://") for target in targets)
    # All but the links and the picture is there.
    text = re.sub(r"!\[.*?\]\(.*?\)\n\n", "", README)
    assert re.sub(r"\]\(.*?\)|\[", "", ended.stdout.rstrip("\n")) == re.sub(
        r"\]\(.*?\)|\[", "", text.rstrip("\n")
    )


def test_every_file_that_names_the_version_names_the_same_one() -> None:
    """Between two releases the changelog begins with a section without a version."""
    named = {
        "diloco_comm/__init__.py": r'^__version__ = "(.*)"$',
        "pyproject.toml": r'^version = "(.*)"$',
        "CITATION.cff": r"^version: (.*)$",
        "CHANGELOG.md": r"^## (\d\S*) \(\d{4}-\d\d-\d\d\)$",
    }
    versions = {}
    for name, pattern in named.items():
        found = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
        assert found is not None, name
        versions[name] = found[1]
    assert len(set(versions.values())) == 1, versions
