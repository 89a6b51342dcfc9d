"""Enter an epoch: agree on it, connect, and bring replicas that are one round behind up to date."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from . import _C, rendezvous
from .errors import SyncError
from .pending import Round, Terms
from .wire import Layout

if TYPE_CHECKING:
    from .exchange import Exchange

# Connections between live hosts take milliseconds; a peer that vanished must not cost the timeout.
_CONNECT_LIMIT_S = 120.0
# A store answers in milliseconds; one whose host hangs must not hold us for ever.
_STORE_LIMIT_S = 10.0


@dataclass
class Repair:
    """A round that the other replicas have applied and this one has not.

    ``terms`` are laid out as ``layout``, which is that of the group at the time. A round is applied
    somewhere only when all ranks have voted, and who votes has the whole result: the terms are this
    replica's own, kept since its exchange failed at the vote.
    """

    fragment: int
    round: int
    terms: Terms
    layout: Layout


def enter(
    exchange: Exchange,
    members: Sequence[int],
    store: dist.Store | None,
    *,
    last_rounds: dict[int, int] | None,
    join: bool,
) -> list[Repair]:
    """Bring ``exchange`` into a new epoch with ``members``.

    Args:
        last_rounds: None for a new exchange.
        join: A new exchange that comes to an old group.
    """
    if store is not None:
        exchange.store = dist.PrefixStore(f"diloco_comm/{exchange.name}", store)
    bounded = _C.bounded_store(exchange.store, min(exchange.timeout, _STORE_LIMIT_S))
    plan = _agree(exchange, bounded, members, last_rounds, join)
    survivors = {r: i["rounds"] for r, i in plan.infos.items() if i["rounds"] is not None}
    last = {r: {int(f): n for f, n in v.items()} for r, v in survivors.items()}
    needs = find_repairs(last, exchange.num_under_way)
    lineage = _common_lineage({r: plan.infos[r]["lineage"] for r in survivors})
    rank, size = members.index(exchange.replica), len(members)
    groups = []
    if size > 1:
        limit = min(exchange.timeout, _CONNECT_LIMIT_S)
        groups = rendezvous.build_groups(bounded, plan.epoch, rank, size, exchange.lanes, limit)
    _attach(exchange, plan.epoch, members, groups)
    exchange.enter_streams(exchange.store, plan.epoch, rank, size)
    exchange.members, exchange.epoch = tuple(members), plan.epoch
    exchange.joined = tuple(sorted(r for r, i in plan.infos.items() if i["join"]))
    exchange.agreed_rounds = _newest(survivors)
    exchange.agreed_step = min((plan.infos[r]["inner_step"] for r in survivors), default=-1)
    del groups
    missed = _missed_rounds(exchange, needs) if needs else []
    exchange.lineage = lineage
    for slot in exchange.slots:
        slot.settle(missed)
        exchange.plan_slot(slot)
    return [Repair(r.header.fragment, r.header.round, r.terms, r.layout) for r in missed]


def _attach(
    exchange: Exchange,
    epoch: int,
    members: Sequence[int],
    groups: list[dist.ProcessGroupGloo],
) -> None:
    """Give the engine its groups; that what it was doing does not end is a SyncError."""
    try:
        exchange._engine.attach(
            epoch=epoch,
            rank=members.index(exchange.replica),
            replicas=list(members),
            groups=groups,
            store=exchange.store,
            prefix=f"{epoch}/board",
        )
    except RuntimeError as error:
        raise SyncError(str(error), stage="attach") from error


def _agree(
    exchange: Exchange,
    store: dist.Store,
    members: Sequence[int],
    last_rounds: dict[int, int] | None,
    join: bool,
) -> rendezvous.Plan:
    settings = {
        "lanes": exchange.lanes,
        "chunk_bytes": exchange.chunk_bytes,
        "window": exchange.window,
        "collectives": exchange.collectives,
    }
    rounds = None if last_rounds is None else {str(f): n for f, n in last_rounds.items()}
    return rendezvous.agree(
        store,
        exchange.replica,
        members,
        epoch=exchange.epoch,
        settings=settings,
        info={
            "rounds": rounds,
            "join": join,
            "inner_step": exchange.inner_step,
            "lineage": [
                max([exchange.lineage, *(slot.applied_epoch for slot in exchange.slots)]),
                max([exchange.lineage, *(slot.voted_epoch for slot in exchange.slots)]),
            ],
        },
        timeout=exchange.timeout,
    )


def _common_lineage(lineages: dict[int, list[int]]) -> int:
    """Return the newest epoch where a round was applied.

    Args:
        lineages: The newest epochs where each survivor has applied a round, and voted for one.

    Raises:
        SyncError: If a replica was left behind: the others have applied rounds in an epoch without
            it. A round of its own with the same number is not the same.
    """
    newest = max((applied for applied, _ in lineages.values()), default=0)
    behind = sorted(r for r, (_, voted) in lineages.items() if voted < newest)
    if behind:
        raise SyncError(
            f"replicas {behind} did not take part in epoch {newest}, where others have applied "
            "rounds: let them join anew",
            stage="rendezvous",
            missing=behind,
        )
    return newest


def _newest(survivors: dict[int, dict[str, int]]) -> dict[int, int]:
    newest: dict[int, int] = {}
    for rounds in survivors.values():
        for fragment, number in rounds.items():
            newest[int(fragment)] = max(number, newest.get(int(fragment), number))
    return newest


def find_repairs(
    last_rounds: dict[int, dict[int, int]], most: int = 1
) -> list[tuple[int, int, list[int]]]:
    """Compare the last applied rounds of the survivors.

    Args:
        last_rounds: fragment -> round, for each surviving replica.
        most: Rounds that a replica may be behind: those of a fragment that may be under way.

    Returns:
        (fragment, round, replicas that have not applied it), by fragment and round.

    Raises:
        SyncError: If a replica is further behind, or lists other fragments.
    """
    fragments = sorted({fragment for rounds in last_rounds.values() for fragment in rounds})
    repairs = []
    for fragment in fragments:
        lacking = [r for r, rounds in sorted(last_rounds.items()) if fragment not in rounds]
        if lacking:
            raise SyncError(f"replicas {lacking} gave no last round of fragment {fragment}")
        newest = max(rounds[fragment] for rounds in last_rounds.values())
        far = {r: v[fragment] for r, v in last_rounds.items() if v[fragment] < newest - most}
        if far:
            raise SyncError(
                f"fragment {fragment}: the group is at round {newest}, but "
                + ", ".join(f"replica {r} at {number}" for r, number in sorted(far.items()))
                + f"; at most {most} missing can be repaired: let it join anew",
                fragment=fragment,
                round=newest,
                stage="rendezvous",
                missing=sorted(far),
            )
        for number in range(newest - most + 1, newest + 1):
            behind = [r for r, v in sorted(last_rounds.items()) if v[fragment] < number]
            if behind:
                repairs.append((fragment, number, behind))
    return repairs


def _missed_rounds(exchange: Exchange, needs: list[tuple[int, int, list[int]]]) -> list[Round]:
    """Return the rounds that this replica alone has not applied; a collective call.

    Raises:
        SyncError: On every replica, if one that is behind does not hold what it voted for.
    """
    missed = []
    lacking: list[tuple[int, int]] = []
    for fragment, number, behind in needs:
        if exchange.replica not in behind:
            continue
        held = [slot.held(fragment, number) for slot in exchange.slots]
        missed += [round for round in held if round is not None][:1]
        if not any(held):
            lacking.append((fragment, number))
    blobs = exchange.exchange_objects(json.dumps(lacking).encode())
    for replica, blob in zip(exchange.members, blobs, strict=True):
        for fragment, number in json.loads(blob):
            raise SyncError(
                f"replica {replica} lacks round {number} of fragment {fragment}, which others have "
                "applied, and has not voted for it: let it join anew",
                fragment=fragment,
                round=number,
                stage="repair",
                missing=(replica,),
            )
    return missed


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
