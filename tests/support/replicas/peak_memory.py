"""The largest memory of the tensors that a function makes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.autograd.profiler import profile


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most bytes of CPU tensors that are held at a time, beyond those held before."""
    with profile(profile_memory=True) as profiler:
        function()
    events = profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return max(accumulate(num_bytes for _, num_bytes in sorted(changes, key=lambda each: each[0])))
