"""Run benchmarks as a user does: as modules, from the checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from commands import run_command
from PIL import Image

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"


def command_of(name: str, *arguments: object) -> list[str]:
    """Return the command of a benchmark, named as in ``exchange.all_reduce``."""
    return [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]


def run_benchmark(
    name: str, *arguments: object, timeout: float = 100, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a benchmark to its end; what it printed and its status."""
    command = command_of(name, *arguments)
    return run_command(command, cwd=ROOT, timeout=timeout, **options)


def shows(plot: Path, *colours: str) -> bool:
    """Return whether a figure has pixels of each colour; a palette may be off by a few levels."""
    with Image.open(plot) as image:
        found = image.convert("RGB").getcolors(image.width * image.height)
    assert found is not None
    pixels = [pixel for _, pixel in found]
    wanted = [bytes.fromhex(colour.removeprefix("#")) for colour in colours]
    return all(
        any(max(abs(a - b) for a, b in zip(pixel, one, strict=True)) <= 4 for pixel in pixels)
        for one in wanted
    )
