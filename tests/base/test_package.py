"""The names of the package: they come with their first use, and torch comes with them."""

from __future__ import annotations

import pytest
from commands import run_python

import diloco_comm


def test_every_public_name_is_there() -> None:
    for name in diloco_comm.__all__:
        assert getattr(diloco_comm, name).__name__ == name
    assert dir(diloco_comm) == sorted(diloco_comm.__all__)
    with pytest.raises(AttributeError, match="'diloco_comm' has no attribute 'Diloco'"):
        diloco_comm.Diloco  # noqa: B018


@pytest.mark.parametrize(
    "line",
    [
        "from diloco_comm import *",
        "import diloco_comm.ops",
        "diloco_comm.ops",
        "diloco_comm.DiLoCo",
    ],
)
def test_torch_comes_with_the_first_name(line: str) -> None:
    program = (
        "import sys, diloco_comm\n"
        "assert 'torch' not in sys.modules\n"
        f"{line}\n"
        "import torch\n"
        "assert torch.ops.diloco_comm.encode and diloco_comm.DiLoCo.__name__ == 'DiLoCo'\n"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
