"""The examples run as their docstrings say, for a few steps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from commands import run_command

from diloco_comm_tools.common import ranks
from diloco_comm_tools.common.workers import run_workers

pytestmark = pytest.mark.usefixtures("forked_programs")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(command: list[str], cwd: Path) -> str:
    ended = run_command(command, cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def run_replicas(command: list[str], number: int, folder: Path) -> str:
    """Run a program as so many replicas, with torchrun's variables; what all of them print."""
    if number == 1:
        return run(command, folder)
    with (folder / "output").open("w+") as file:
        run_workers(command, number, preload=ranks.WITH_OPTIMIZER, stdout=file.fileno())
        file.seek(0)
        return file.read()


@pytest.mark.nightly("10 s each; two replicas are the more difficult case", but=["2"])
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.fresh_interpreter
def test_train_plain_learns(num_replicas: int, tmp_path: Path) -> None:
    """Two replicas have torchrun's variables; test_integrations_launch.py runs torchrun itself."""
    script = [str(EXAMPLES / "train_plain.py"), "--steps", "12", "--sync-every", "5"]
    command = [sys.executable, *script]
    output = run_replicas(command, num_replicas, tmp_path)
    losses = [float(loss) for loss in re.findall(r"validation (\S+)", output)]
    assert len(losses) == 2 and losses[1] < losses[0]
    hashes = re.findall(r"parameters ([0-9a-f]{16})", output)
    assert len(hashes) == num_replicas
    assert len(set(hashes)) == 1


@pytest.mark.nightly("6 s each; two replicas share", but=["2"])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_nano_diloco_is_the_library_bit_for_bit(num_replicas: int, tmp_path: Path) -> None:
    """The last round is a part of one: 50 steps, eight a round."""
    hashes = set()
    for more in ([], ["--library"]):
        command = [sys.executable, str(EXAMPLES / "nano_diloco.py"), *more]
        output = run_replicas(command, num_replicas, tmp_path)
        told = re.findall(r"replica [0-2]: (\w{16})", output)
        assert len(told) == num_replicas
        hashes |= set(told)
    assert len(hashes) == 1
    lines = (EXAMPLES / "nano_diloco.py").read_text().splitlines()
    assert len(lines) <= 150


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    readme = EXAMPLES.parent / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    tell = "print(diloco.outer_hash(), model.weight.std().item() < 0.1)"
    script.write_text(f"{example}{tell}\n")
    output = run_replicas([sys.executable, str(script)], 2, tmp_path)
    # Python writes the end of a line by itself, so the lines of two processes may be joined.
    told = re.findall(r"(\w{16}) (True|False)", output)
    assert len(told) == 2 and told[0] == told[1] and told[0][1] == "True"
    printed = re.findall(r"replica [01]: loss 0\.\d{4}, hash (\w{16})", output)
    assert len(printed) == 2 and set(printed) == {told[0][0]}


@pytest.mark.nightly("20 s; test_train_plain_learns runs the other example")
def test_optimizers_fills_its_table(tmp_path: Path) -> None:
    output = run([sys.executable, str(EXAMPLES / "optimizers.py"), "--steps", "10"], tmp_path)
    header, *rows = output.splitlines()[:4]
    assert header.split()[-5:] == ["alone", "SGD", "HeavyBall", "Nesterov", "Adam"]
    for row in rows:
        alone, *shared = [float(cell) for cell in row.split()[-5:]]
        # An untrained network is at ln 10 = 2.303; a replica alone unlearns what it never sees.
        assert all(0.0 < loss < 2.303 for loss in shared), row
        assert alone > max(shared), row
    assert (tmp_path / "optimizers.png").read_bytes().startswith(b"\x89PNG")
