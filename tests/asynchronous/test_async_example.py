"""examples/train_async.py: two workers of different speed learn together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from async_helpers import serving

from diloco_comm.asynchronous.rules import DelayedNesterov

pytestmark = pytest.mark.usefixtures("forked_programs")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_async.py"


@pytest.mark.nightly("11 s; test_examples has another example that learns")
def test_train_async_learns(tmp_path: Path) -> None:
    rule = DelayedNesterov(lr=0.3, period=2)
    with serving(rule, sync_every=5, dylu=True) as server:
        workers = [
            subprocess.Popen(
                [sys.executable, str(EXAMPLE), "--server", server.address, "--steps", "40",
                 "--worker", str(index), "--pause", str(0.02 * index)],
                stdout=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
            )
            for index in range(2)
        ]  # fmt: skip
        outputs = [worker.communicate(timeout=100)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0]
    # The second worker may start from a model that the first has trained.
    losses = [[float(x) for x in re.findall(r"validation (\S+)", text)] for text in outputs]
    assert all(len(pair) == 2 for pair in losses)
    assert min(first for first, _ in losses) > 0 and max(first for first, _ in losses) > 5
    assert all(last < 4.5 for _, last in losses)
    assert all("staleness" in text for text in outputs)
