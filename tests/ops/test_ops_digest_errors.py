"""What digest and finish_digest refuse, in one sentence."""

from __future__ import annotations

import device_ops
import pytest
import torch
from test_ops_digest import every_host_impl

from diloco_comm import ops

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

COUNTS = torch.zeros(2, dtype=torch.int64)
CASES = [
    ((torch.zeros(4), torch.zeros(2)), TypeError, r"sums must be [Ll]ong, got [Ff]loat"),
    ((torch.zeros(4), COUNTS.repeat(2)), ValueError, r"sums must have two elements, got 4"),
    ((torch.zeros(4), COUNTS.view(1, 2)), ValueError, r"sums must be one-dimensional .*\[1, 2\]"),
    ((torch.zeros(4), COUNTS.repeat(2)[::2]), ValueError, r"sums must be .*contiguous"),
    ((torch.zeros(8)[::2], COUNTS), ValueError, r"tensor must fill .*without gaps.*\[4\].*\[2\]"),
    ((torch.zeros(8).expand(3, 8), COUNTS), ValueError, r"tensor must fill .*without gaps"),
    ((torch.zeros(4), COUNTS, -1), ValueError, r"first_word must not be negative, got -1"),
]


@every_host_impl
@pytest.mark.parametrize(("args", "error", "match"), CASES)
def test_one_sentence(impl: str, args: tuple, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as raised:
        device_ops.digest(*args, impl=impl)
    sentence = str(raised.value).split("\nException raised from")[0]
    assert "\n" not in sentence.strip() and len(sentence) < 250
    assert not COUNTS.any()


def test_sums_on_another_device() -> None:
    operators = pytest.importorskip("diloco_comm.kernels.operators", reason="needs Triton")
    with pytest.raises(ValueError, match="sums must be on cpu like the others, got meta"):
        given = {"tensor": torch.zeros(4), "sums": COUNTS.to("meta")}
        operators.digest(operators.Arguments(**given, first_word=0, max_blocks=0))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ops.available_impls("cuda"))
def test_sums_on_the_host(impl: str) -> None:
    with pytest.raises(ValueError, match="sums must be on cuda:0 like the others, got cpu"):
        ops.digest(torch.zeros(4, device="cuda"), COUNTS, impl=impl)


def test_finishing_takes_whole_numbers() -> None:
    for arguments in ((1.5, 0, 0), (0, "1", 0), (0, 0, -1)):
        with pytest.raises(TypeError):
            ops.finish_digest(*arguments)
