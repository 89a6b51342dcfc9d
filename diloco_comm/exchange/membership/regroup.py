"""Enter an epoch: agree on it, settle the rounds of the last one, and connect."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...base.errors import SyncError
from ...ops.wire import Layout
from ..headers import Header
from ..round import Round, Terms
from ..waiting import describe_store
from . import connecting, rendezvous, sealing, termination, verdicts
from .attendance import Limits
from .meetings import Plan, announce
from .termination import Decision

if TYPE_CHECKING:
    from ..exchange import Exchange


# In which members that have met begin to connect, and say that it failed.
_PATIENCE_S = 10.0


@dataclass
class Repair:
    """A round that counts and that this replica has not applied; see ``termination``.

    ``terms`` are laid out as ``layout``, which is that of the group at the time. A round counts
    only when all survivors have voted, and who votes has the whole result: the terms are this
    replica's own, kept since its exchange ended. ``headers`` are those of that group, in rank
    order; our own alone where streams were given up before the others' had come.
    """

    fragment: int
    round: int
    terms: Terms
    layout: Layout
    headers: list[Header]
    digest: int


def enter(
    exchange: Exchange,
    members: Sequence[int],
    store: dist.Store | None,
    *,
    last_rounds: sealing.LastRounds | None,
    join: bool,
) -> list[Repair]:
    """Bring ``exchange`` into a new epoch with ``members``.

    Args:
        last_rounds: None for a new exchange.
        join: A new exchange that comes to an old group.
    """
    if store is not None:
        exchange.use_store(store)
    bounded = verdicts.bounded(exchange)
    with verdicts.added(exchange, bounded):
        plan = _agree(exchange, bounded, members, last_rounds, join)
        decision = _decide(exchange, plan)
    acks = [r for r, info in plan.infos.items() if "ack" in info]
    if last_rounds is not None:
        patience = _connect_limit(exchange) + _PATIENCE_S
        verdicts.claim_line(exchange, bounded, plan.infos, plan.epoch, members, patience)
    # Set before any member can enter the epoch: the next change of the group must know which
    # members may have entered. But no group begins without a member that has lost the line.
    exchange.newest_group = plan.epoch, tuple(members)
    if last_rounds is not None:
        survivors = sorted(set(acks) & set(exchange.members))
        verdicts.leave_out(exchange, bounded, survivors, plan.epoch)
    size = len(members)
    is_first = all("ack" not in info and not info["join"] for info in plan.infos.values())
    groups = []
    if size > 1:
        groups = _connect(exchange, bounded, plan, members, is_first=is_first)
    _attach(exchange, plan, members, groups)
    _enter_streams(exchange, bounded, plan, members)
    exchange.members, exchange.epoch = tuple(members), plan.epoch
    exchange.last_error = None
    announce(bounded, plan, members)
    del groups
    if decision.commits or decision.discards:
        _confirm(exchange, decision)
    exchange.joined = tuple(sorted(r for r, i in plan.infos.items() if i.get("join")))
    exchange.agreed_rounds = dict(decision.last)
    exchange.agreed_step = min((plan.infos[r]["inner_step"] for r in acks), default=-1)
    exchange.lineage = decision.lineage
    missed = _missed_rounds(exchange, decision)
    for buffers in exchange.all_buffers:
        buffers.settle(missed)
        exchange.plan_buffers(buffers)
    return [
        Repair(
            r.header.fragment, r.header.round, r.terms, r.layout, r.headers or [r.header], r.digest
        )
        for r in missed
    ]


def _decide(exchange: Exchange, plan: rendezvous.Plan) -> Decision:
    """Decide what becomes of the rounds under way, from what all survivors have said.

    Raises:
        SyncError: On all of them, if they cannot go on together.
    """
    acks = {r: sealing.from_json(i["ack"]) for r, i in plan.infos.items() if "ack" in i}
    decision = termination.decide(acks, exchange.num_under_way)
    refusal = decision.refusal
    if refusal is not None:
        error = SyncError(
            refusal.message,
            fragment=refusal.fragment,
            round=refusal.round,
            stage=refusal.stage,
            missing=refusal.missing,
            survivors=sorted(acks.keys() - set(refusal.missing)),
        )
        error.decision = f"epoch {plan.epoch}"
        raise error
    return decision


def _confirm(exchange: Exchange, decision: Decision) -> None:
    """Let nobody settle before all are in the new epoch with the same decision."""
    commits = [[commit.fragment, commit.round] for commit in decision.commits]
    own = json.dumps([commits, decision.discards]).encode()
    blobs = exchange.exchange_objects(own)
    differing = [r for r, one in zip(exchange.members, blobs, strict=True) if one != own]
    if differing:
        raise SyncError(
            f"replicas {differing} settle the rounds under way otherwise than replica "
            f"{exchange.replica}: they must run the same version of diloco_comm",
            stage="repair",
        )


def _missed_rounds(exchange: Exchange, decision: Decision) -> list[Round]:
    """Return the rounds that count and that this replica has not applied."""
    missed = []
    for commit in decision.commits:
        if exchange.replica not in commit.lacking:
            continue
        held = [buffers.held(commit.fragment, commit.round) for buffers in exchange.all_buffers]
        missed += [round for round in held if round is not None][:1]
    return missed


def _connect(
    exchange: Exchange, store: dist.Store, plan: Plan, members: Sequence[int], *, is_first: bool
) -> list[dist.ProcessGroupGloo]:
    limit = min(exchange.timeout, connecting.LIMIT_S) if is_first else _connect_limit(exchange)
    with verdicts.added(exchange, store):
        return connecting.connect_members(
            store, plan, members, exchange.replica, exchange.lanes, limit
        )


def _connect_limit(exchange: Exchange) -> float:
    return min(exchange.timeout, connecting.LIMIT_S, exchange.join_timeout)


def _enter_streams(
    exchange: Exchange, store: dist.Store, plan: Plan, members: Sequence[int]
) -> None:
    """Connect the devices of all members, or of none; without NCCL there is nothing to connect."""
    rank, size = members.index(exchange.replica), len(members)

    def connect() -> None:
        exchange.enter_streams(exchange.store, plan.epoch, rank, size)

    if exchange.collectives != "nccl" or size == 1:
        connect()
        return
    limit = exchange.streams_limit()
    with verdicts.added(exchange, store):
        try:
            connecting.connect_streams(store, plan, members, exchange.replica, connect, limit)
        except SyncError as error:
            exchange.leave_streams(str(error))
            raise


def _attach(
    exchange: Exchange, plan: Plan, members: Sequence[int], groups: list[dist.ProcessGroupGloo]
) -> None:
    """Give the engine its groups; that what it was doing does not end is a SyncError."""
    # A way that did not work when all began says nothing when it does not work later.
    ways = [plan.infos[r]["address"] if r in plan.reached else "" for r in members]
    try:
        exchange._engine.attach(
            epoch=plan.epoch,
            rank=members.index(exchange.replica),
            replicas=list(members),
            groups=groups,
            store=exchange.store,
            prefix=f"{plan.epoch}/board",
            addresses=ways,
        )
    except RuntimeError as error:
        raise SyncError(str(error), stage="attach") from error


def _agree(
    exchange: Exchange,
    store: dist.Store,
    members: Sequence[int],
    last_rounds: sealing.LastRounds | None,
    join: bool,
) -> rendezvous.Plan:
    settings = {
        "lanes": exchange.lanes,
        "chunk_bytes": exchange.chunk_bytes,
        "window": exchange.window,
        "collectives": exchange.collectives,
    }
    return rendezvous.agree(
        store,
        exchange.replica,
        members,
        former=() if last_rounds is None else exchange.members,
        epoch=exchange.epoch,
        newest=max(exchange.epoch, exchange.newest_group[0]),
        settings=settings,
        say=sealing.Newcomer(exchange, join)
        if last_rounds is None
        else sealing.Survivor(exchange, members, last_rounds),
        limits=_limits(exchange, is_first=last_rounds is None and not join),
        place=describe_store(exchange.store),
        newest_members=exchange.newest_group[1],
    )


def _limits(exchange: Exchange, *, is_first: bool) -> Limits:
    """Return how long to wait; jobs of a first meeting may start long after each other."""
    unheard = exchange.timeout if is_first else min(exchange.join_timeout, exchange.timeout)
    return Limits(exchange.timeout, unheard, exchange.suspect_after)


def store_of_group(group: dist.ProcessGroup | None) -> tuple[dist.Store, int, int]:
    """Return the store of a group under a prefix that its ranks agree on, our rank, and the size.

    A collective call: rank 0 draws the prefix and broadcasts it through the group.
    """
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("no group was given and torch.distributed is not initialised")
    if group == dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
        raise ValueError("this process is not a member of the group")
    rank, size = group.rank(), group.size()
    token = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8)
    if size > 1:
        kinds = [kind.type for kind in group._device_types]
        on_device = token.to("cpu" if "cpu" in kinds else kinds[0])
        group.broadcast([on_device], _broadcast_options()).wait()
        token = on_device.cpu()
    prefix = f"diloco_comm/{bytes(token.tolist()).hex()}"
    return dist.PrefixStore(prefix, _group_store(group)), rank, size


def _broadcast_options() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def _group_store(group: dist.ProcessGroup) -> dist.Store:
    known = dist.distributed_c10d._world.pg_map.get(group)
    if known is not None:
        return known[1]
    return group.get_group_store()
