"""Sentences about several replicas, worded as the engine words them (``find_mismatch``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def named(replicas: Sequence[int]) -> str:
    """Name replicas by their numbers: "replica 1", or "replicas 0, 2"."""
    numbers = ", ".join(map(str, replicas))
    return f"replica {numbers}" if len(replicas) == 1 else f"replicas {numbers}"


def difference(name: str, values: Mapping[str, Sequence[int]]) -> str:
    """Say that something is not equal on all replicas; ``values`` has the replicas of each value.

    Headers of exchanges are compared and named by the engine alone.
    """
    shown = "; ".join(f"{value} on {named(replicas)}" for value, replicas in values.items())
    return f"{name} differs between replicas: {shown}"
