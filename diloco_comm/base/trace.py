"""Ranges that profilers show: ``diloco_comm::encode fragment=0 round=3``.

PyTorch's profiler sees them through ``record_function``; Nsight Systems through NVTX, in the
domain ``diloco_comm``, where the ``nvtx`` package is installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.autograd.profiler import record_function

from . import env

DOMAIN = "diloco_comm"


@contextmanager
def span(stage: str, fragment: int, round: int) -> Iterator[None]:
    """Open a range around one stage of one round."""
    name = f"fragment={fragment} round={round}"
    with _range(stage, name):
        yield


def exchanged(fragment: int, round: int, seconds: float, exposed_s: float) -> None:
    """Record how long an exchange took, and training waited, in the name of a range of no length.

    The exchange runs on a thread that no profiler sees, or on a device, and may have ended long
    before the training thread asks for the result.
    """
    times = f"us={1e6 * seconds:.0f} exposed_us={1e6 * exposed_s:.0f}"
    with _range("exchange", f"fragment={fragment} round={round} {times}"):
        pass


@contextmanager
def _range(stage: str, name: str) -> Iterator[None]:
    with record_function(f"{DOMAIN}::{stage} {name}"), _nvtx_range(f"{stage} {name}"):
        yield


def _nvtx_range(message: str) -> AbstractContextManager[Any]:
    nvtx = _nvtx()
    return nullcontext() if nvtx is None else nvtx.annotate(message, domain=DOMAIN)


def has_nvtx() -> bool:
    """Whether ranges go to NVTX, also while no profiler of PyTorch records."""
    return _nvtx() is not None


@functools.cache
def _nvtx() -> Any:
    if not env.use_nvtx() or importlib.util.find_spec("nvtx") is None:
        return None
    return importlib.import_module("nvtx")
