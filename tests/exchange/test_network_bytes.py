"""What really leaves the network interface, counted by the kernel.

Everything runs in a network namespace of its own, where the loopback interface carries nothing
else; its counter also holds the headers of TCP and IP, acknowledgements, headers and votes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import ROOT, command_of
from commands import run_command

MEBI = 1 << 20
# Bits of an element at the interface, at most.
LIMITS = {"fp32": 32.5, "int8": 8.13, "int4": 4.13, "e3m0": 4.13}
PRIVATE = command_of("exchange.private_loopback")


@pytest.fixture(scope="module")
def private_loopback() -> list[str]:
    """The words before a command that give it a loopback of its own."""
    probe = run_command([*PRIVATE, "true"], cwd=ROOT)
    if probe.returncode == 77:
        pytest.skip(probe.stdout.strip())
    assert probe.returncode == 0, probe.stderr
    return PRIVATE


def run(words: list[str]) -> str:
    done = run_command(words, cwd=ROOT, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly("12 s; the first tier has the bytes that the engine counts")
@pytest.mark.parametrize("world", [2, 8])
def test_bits_of_an_element(world: int, private_loopback: list[str], tmp_path: Path) -> None:
    count = MEBI + 7  # the last block and the last run are short
    path = tmp_path / "results.json"
    options = [
        "-b",
        str(4 * count),
        "-e",
        str(4 * count),
        "-n",
        "1",
        "-w",
        "0",
        "-c",
        "1",
        "--count-bytes",
    ]
    script = command_of("exchange.all_reduce", "-g", world, *options)
    # The kernel acknowledges more often where the processes are not scheduled at once.
    for _ in range(3):
        run([*private_loopback, *script, "--wire", "int8,int4,e3m0", "--json", str(path)])
        rows: list[dict[str, Any]] = json.loads(path.read_text())["results"]
        assert [row["wire"] for row in rows] == list(LIMITS)
        assert {row["in_place"]["nwrong"] for row in rows} == {0}
        found = {row["wire"]: row["interface_bits"] for row in rows}
        # A codec that sends nothing would also stay below the limit.
        assert all(found[wire] > 0.98 * limit for wire, limit in LIMITS.items()), found
        if all(found[wire] <= limit for wire, limit in LIMITS.items()):
            return
    pytest.fail(f"bits of an element at the interface: {found}, at most {LIMITS}")
