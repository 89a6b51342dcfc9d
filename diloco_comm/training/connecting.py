"""Find the workers of this replica, connect to the other replicas, and make the round runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..exchange.exchange import Exchange
from ..methods.settings import Settings
from ..replica.workers import ReplicaWorkers, ShardGroup
from ..rounds.agreement import handshake
from ..rounds.metrics import Recorder
from ..rounds.runner import RoundRunner
from ..rounds.send_timed import SendTimed
from ..rounds.step_timed import StepTimed
from .planning import Plan

_PASSED_ON = ("group", "replica", "num_replicas", "members", "join_timeout", "suspect_after")


def shard_group_of(shard_group: Any, timeout_s: float) -> ShardGroup | None:
    """Return the argument ``shard_group`` as workers of one replica; None if it is not given."""
    return None if shard_group is None else ShardGroup(shard_group, timeout_s)


def workers_of(plan: Plan, timeout_s: float) -> ReplicaWorkers | None:
    """Return the workers of this replica; None if this worker is the replica's only one."""
    return plan.shard_group or ReplicaWorkers.of(plan.parameters(), timeout_s)


def connect(
    plan: Plan, settings: Settings, arguments: Mapping[str, Any], *, impl: str, timeout_s: float
) -> Exchange:
    """Connect this worker to its peers, the workers of other replicas with the same parameters.

    Args:
        arguments: Those of ``DiLoCo``; ``group`` and ``store`` as ``handshake`` found them.

    Raises:
        ValueError: If the arguments do not go together.
        SyncError: If the peers do not come in time.
    """
    name, group, store = (arguments[key] for key in ("name", "group", "store"))
    return handshake.make_exchange(
        store=store,
        # On a store, workers with other shards are other groups of the same replicas.
        name=f"{name}@{plan.worker}" if plan.worker and store is not None else name,
        line_name=name,
        lanes=settings.lanes,
        chunk_bytes=settings.chunk_bytes,
        timeout=timeout_s,
        impl=impl,
        device=plan.device,
        collectives=handshake.collectives_of(arguments["backend"], group, plan.device),
        join=arguments["init"] == "join",
        num_under_way=max(1, settings.overlap.rounds),
        admission=arguments.get("admission"),
        **{key: arguments[key] for key in _PASSED_ON},
    )


def make_runner(
    exchange: Exchange,
    plan: Plan,
    settings: Settings,
    recorder: Recorder,
    workers: ReplicaWorkers | None,
    impl: str,
    **measures: Any,
) -> RoundRunner:
    """Make the runner whose rounds end when the overlap policy says.

    Args:
        measures: ``weight``, ``norms`` and ``on_reset`` of ``DiLoCo``.
    """
    runner = SendTimed if settings.overlap.rounds else StepTimed
    return runner(
        exchange,
        plan.parts,
        settings,
        recorder,
        layout=plan.layout,
        impl=impl,
        workers=workers,
        **measures,
    )
