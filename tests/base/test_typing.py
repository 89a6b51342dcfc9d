"""The types of the package, as a user's program sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "data" / "typed_programs"
# A line that a type checker must refuse, and the kind of its error.
WRONG = {
    'DiLoCo(model, optimizer, sync_every="100")': "arg-type",
    "DiLoCo(model, sync_every=100)": "call-arg",
    "DiLoCo(model, optimizer, sync_every=100, wire=4)": "arg-type",
    "DiLoCo(model, optimizer, sync_every=100, link=Wire())": "arg-type",
    "DiLoCo(model, optimizer, sync_every=100, peers=2)": "arg-type",
    'Wire("int4", blocksize=64)': "call-arg",
    'Wire("int4", error_feedback="yes")': "arg-type",
    "Link(lane=4)": "call-arg",
    "Link(lanes=1.5)": "arg-type",
    "NonFinite(on_reset=3)": "arg-type",
    "StorePeers(replica=0, of=2)": "call-arg",
    "local_sgd(model, optimizer)": "call-arg",
    "fedavg(model, optimizer, sync_every=4)": "call-arg",
    "eager_diloco(model, optimizer, block_size=64)": "call-arg",
    "eager_diloco(model, optimizer, wires='int4')": "call-arg",
    "AsyncDiLoCo(model, optimizer)": "call-arg",
    'AsyncDiLoCo(model, optimizer, server="tcp://h:1", lanes=2)': "call-arg",
    'DecoupledDiLoCo(model, optimizer, server="tcp://h:1", tokens="many")': "arg-type",
    'Callback(sync_every="4")': "arg-type",
    "Callback(sync_evry=4)": "call-arg",
    'DiLoCo(model, optimizer, sync_every=4).flush(final="yes")': "arg-type",
    "text: str = DiLoCo(model, optimizer, sync_every=4).inner_step": "assignment",
}
HEAD = """
import torch

from diloco_comm import (
    DiLoCo, Link, NonFinite, StorePeers, Wire, eager_diloco, fedavg, local_sgd,
)
from diloco_comm.asynchronous import AsyncDiLoCo, DecoupledDiLoCo
from diloco_comm.integrations.huggingface import DiLoCoCallback as Callback

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def errors(folder: Path, *programs: Path) -> list[str]:
    """Return what ``mypy --strict`` says of programs."""
    pytest.importorskip("mypy")
    # Reading the trainers takes minutes.
    config = folder / "mypy.ini"
    skipped = ("transformers", "accelerate", "lightning")
    config.write_text(
        "[mypy]\nstrict = True\nshow_error_codes = True\n"
        + "".join(
            f"[mypy-{name}.*]\nignore_missing_imports = True\nfollow_imports = skip\n"
            for name in skipped
        )
        + "[mypy-diloco_comm.*]\nfollow_imports = silent\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--no-error-summary"]
    command += ["--cache-dir", str(folder / "cache"), "--scripts-are-modules", *map(str, programs)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.stderr == ""
    return [line for line in run.stdout.splitlines() if ": error: " in line]


@pytest.mark.nightly("mypy reads torch, for a minute and longer")
@pytest.mark.timeout(600)
def test_programs_have_no_errors_and_each_wrong_line_is_found(tmp_path: Path) -> None:
    programs = sorted(PROGRAMS.glob("*.py"))
    wrong = tmp_path / "wrong.py"
    wrong.write_text(HEAD + "".join(f"{line}\n" for line in WRONG))
    first = len(HEAD.splitlines()) + 1
    found = errors(tmp_path, *programs, wrong)
    in_wrong = [line for line in found if "wrong.py" in line]
    assert len(programs) == 10 and [line for line in found if line not in in_wrong] == []
    for number, (line, kind) in enumerate(WRONG.items(), first):
        here = [text for text in in_wrong if f"wrong.py:{number}:" in text]
        assert here and any(f"[{kind}]" in text for text in here), (line, here)
    assert {int(text.split(":")[1]) for text in in_wrong} == set(range(first, first + len(WRONG)))
