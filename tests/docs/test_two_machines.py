"""The commands of docs/tutorials/two-machines.md print what the page says, in two namespaces."""

from __future__ import annotations

import re
import shutil

import cut_links
import page_runner
import pytest

PAGE = page_runner.ROOT / "docs" / "tutorials" / "two-machines.md"


@pytest.mark.nightly("30 s of processes; test_code_blocks reads the page's commands")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_page_runs_as_it_says() -> None:
    reason = cut_links.missing()
    if reason:
        pytest.skip(reason)
    # The page's commands make them in the folder of the clone, which A and B share here.
    folders = [page_runner.ROOT / name for name in ("keys-a", "keys-b")]
    try:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        _, printed = page_runner.run_on_two_machines(PAGE.read_text())
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    lines = {name: [line for line in printed[name] if "hash" in line] for name in "ab"}
    last = {re.sub(r"replica \d: ", "", lines[name][-1]) for name in "ab"}
    assert len(last) == 1 and "loss" in last.pop()
    # Before replica 1 was killed, too.
    assert lines["a"][:3] == lines["b"][:3]


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ("one 1\nthree\n", "printed 'two 2', the page says 'three'"),
        ("one 1\n...\nfour\n", "not printed in time: 'four'"),
    ],
)
def test_a_page_that_is_wrong_fails(block: str, sentence: str) -> None:
    page = "<!-- run a -->\n```bash\necho one 7; echo two 2; echo three\n```\n"
    page += f"<!-- prints a -->\n```text\n{block}```\n"
    with pytest.raises(AssertionError, match=re.escape(sentence)):
        page_runner.run_page(page, lambda name: [], seconds=2.0)


def test_what_was_printed_is_written_into_the_page() -> None:
    page = "<!-- run a b -->\n```bash\necho loss 0.25; echo; echo other; echo end\n```\nText.\n"
    page += "<!-- prints a -->\n```text\nloss 0.5\n...\nend\n```\nEnd.\n"
    written, printed = page_runner.run_page(page, lambda name: [], seconds=10.0)
    assert written == page.replace("0.5", "0.25")
    assert printed["a"] == ["loss 0.25", "", "other", "end"]
