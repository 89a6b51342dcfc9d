"""Where the tests of Triton's kernels run: on a GPU if there is one, else in the interpreter."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

IS_COMPILED = torch.cuda.is_available()
# One id in both places, because marks name tests by their ids.
IMPLS = [
    pytest.param("triton@cuda", marks=pytest.mark.gpu, id="triton") if IS_COMPILED else "triton"
]
every_impl = pytest.mark.parametrize("impl", IMPLS)
# Sums of int32 wrap on a GPU and in the interpreter of Triton 3.9.
# Triton 3.6 raises an error when it interprets such a sum.
try:
    wraps = IS_COMPILED or not version("triton").startswith("3.6.")
except PackageNotFoundError:
    wraps = False
interpreted = pytest.mark.skipif(IS_COMPILED, reason="Triton is compiled here, not interpreted")
no_overflow_warning = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning:triton.runtime.interpreter"
)
