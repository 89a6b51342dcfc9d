"""The steps from one epoch to the next: agree, connect, and settle the rounds of the last one.

``Exchange`` takes them in this order. Each step reads what it needs of the ``Member``, changes
nothing of it, and returns values.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...base.errors import SyncError
from ...ops.wire import Layout
from ..round import Header, Round, Terms
from ..waiting import describe_store
from . import connecting, line, sealing, termination, verdicts
from .meeting import rendezvous
from .meeting.attendance import Limits
from .meeting.founding import Names
from .member import Epoch, Member
from .own_link import Dial
from .plans import Plan
from .stores import bounded, bounded_by
from .termination import Decision

# Seconds in which members that have met begin to connect, and say that it failed.
_PATIENCE_S = 10.0
_POLL_S = 0.001
# Seconds of a group's first broadcast for which a replica looks at the names of the others.
_NAMES_S = 60.0


@dataclass
class Repair:
    """A round that counts and that this replica has not applied; see ``termination``.

    ``terms`` are laid out as ``layout``, that of a mean in the group at the time. A round counts
    only when all survivors have voted, and a replica that votes has the whole result: the terms are
    this replica's own, kept since its exchange ended. ``headers`` are those of that group, in rank
    order; the own header alone where streams were given up before the others had come.
    """

    fragment: int
    round: int
    terms: Terms
    layout: Layout
    headers: list[Header]
    digest: int

    @classmethod
    def of(cls, round: Round) -> Repair:
        headers = round.headers or [round.header]
        return cls(*round.key, round.terms, round.mean_layout, headers, round.digest)


@dataclass(frozen=True)
class Agreement:
    """What the members of a new epoch have agreed on before they connect.

    Attributes:
        store: Of the exchange, with calls that end.
        is_change: Some members come from a group, this replica among them.
    """

    store: dist.Store
    members: tuple[int, ...]
    plan: Plan
    decision: Decision
    is_change: bool

    @property
    def acks(self) -> list[int]:
        """The members that come from a group, and have said how far they are with its rounds."""
        return [replica for replica, info in self.plan.infos.items() if "ack" in info]

    @property
    def epoch(self) -> Epoch:
        """The epoch as it is once all members have confirmed the decision."""
        infos = self.plan.infos
        return Epoch(
            self.plan.epoch,
            self.members,
            joined=tuple(sorted(r for r, info in infos.items() if info.get("join"))),
            agreed_rounds=dict(self.decision.last),
            agreed_step=min((infos[r]["inner_step"] for r in self.acks), default=-1),
            lineage=self.decision.lineage,
        )


def agree(
    member: Member, members: tuple[int, ...], last_rounds: sealing.LastRounds | None, join: bool
) -> Agreement:
    """Agree with ``members`` on the next epoch, and on the rounds of the last one.

    Args:
        last_rounds: None for a new exchange.
        join: A new exchange that comes to an old group.
    """
    store = bounded(member)
    with verdicts.added(member, store):
        plan = _meet(member, store, members, last_rounds, join)
        decision = _decide(member, plan)
    if last_rounds is not None:
        patience = _connect_limit(member) + _PATIENCE_S
        line.claim_line(member, store, plan.infos, plan.epoch, members, patience)
    return Agreement(store, members, plan, decision, last_rounds is not None)


def _decide(member: Member, plan: Plan) -> Decision:
    """Decide what becomes of the rounds under way, from what all survivors have said.

    Raises:
        SyncError: On all of them, if they cannot go on together.
    """
    acks = {r: sealing.from_json(i["ack"]) for r, i in plan.infos.items() if "ack" in i}
    decision = termination.decide(acks, member.num_under_way)
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


def confirm(member: Member, decision: Decision) -> None:
    """Wait until all members are in the new epoch with the same decision, before any settles."""
    commits = [[commit.fragment, commit.round] for commit in decision.commits]
    own = json.dumps([commits, decision.discards]).encode()
    blobs = member.exchange_objects(own)
    differing = [r for r, one in zip(member.members, blobs, strict=True) if one != own]
    if differing:
        raise SyncError(
            f"replicas {differing} settle the rounds under way otherwise than replica "
            f"{member.replica}: they must run the same version of diloco_comm",
            stage="repair",
        )


def missed_rounds(member: Member, decision: Decision) -> list[Round]:
    """Return the rounds that count and that this replica has not applied."""
    missed = []
    for commit in decision.commits:
        if member.replica not in commit.lacking:
            continue
        held = [buffers.held(commit.fragment, commit.round) for buffers in member.all_buffers]
        missed += [round for round in held if round is not None][:1]
    return missed


def connect(member: Member, agreement: Agreement) -> rendezvous.Groups:
    """Leave out the members that do not come along, and connect the others; none where alone."""
    store, plan, members = agreement.store, agreement.plan, agreement.members
    if agreement.is_change:
        survivors = sorted(set(agreement.acks) & set(member.members))
        verdicts.leave_out(member, store, survivors, plan.epoch)
    if len(members) == 1:
        return []
    is_first = all("ack" not in info and not info["join"] for info in plan.infos.values())
    limit = _connect_limit(member, is_first=is_first)
    dial = None
    if member.tcp is not None:
        ways = [plan.infos[replica] for replica in members]
        # The link may have had another exchange before, which counted the same epochs.
        dial = Dial(member.tcp, f"{member.name}/{plan.epoch}/{plan.id}", members, ways)
    with verdicts.added(member, store):
        return connecting.connect_members(
            store, plan, members, member.replica, member.lanes, limit, dial
        )


def _connect_limit(member: Member, *, is_first: bool = False) -> float:
    limit = min(member.timeout, connecting.LIMIT_S)
    if not is_first:
        limit = min(limit, member.join_timeout)
    # The link hears of a member that stops while it connects no sooner than that.
    return limit if member.tcp is None else min(limit, member.suspect_after)


def connect_streams(
    member: Member,
    agreement: Agreement,
    connect: Callable[[], None],
    leave: Callable[[str], None],
    limit: float,
) -> None:
    """Connect the devices of all members, or of none.

    Args:
        connect: Connects the device of this replica.
        leave: Gives that up, for a reason.
        limit: Seconds that ``connect`` may take.
    """
    if len(agreement.members) == 1:
        connect()
        return
    with verdicts.added(member, agreement.store):
        try:
            connecting.connect_streams(
                agreement.store, agreement.plan, agreement.members, member.replica, connect, limit
            )
        except SyncError as error:
            leave(str(error))
            raise


def attach(member: Member, agreement: Agreement, groups: rendezvous.Groups) -> None:
    """Give the engine its groups.

    Raises:
        SyncError: If what the engine was doing does not end.
    """
    plan, members = agreement.plan, agreement.members
    # An address that could not be reached at the meeting says nothing when it fails later.
    ways = [plan.infos[r]["address"] if r in plan.reached else "" for r in members]
    try:
        member.engine.attach(
            epoch=plan.epoch,
            rank=members.index(member.replica),
            replicas=list(members),
            groups=groups,
            store=member.store,
            prefix=f"{plan.epoch}/board",
            addresses=ways,
        )
    except RuntimeError as error:
        raise SyncError(str(error), stage="attach") from error


def _meet(
    member: Member,
    store: dist.Store,
    members: Sequence[int],
    last_rounds: sealing.LastRounds | None,
    join: bool,
) -> Plan:
    settings: dict[str, Any] = {
        "lanes": member.lanes,
        "chunk_bytes": member.chunk_bytes,
        "window": member.window,
        "collectives": member.collectives,
    }
    if member.tcp is not None:
        settings["Link(keys=)"] = "given" if member.tcp.public_key else "none"
    is_first = last_rounds is None and not join
    return rendezvous.agree(
        store,
        member.replica,
        members,
        former=() if last_rounds is None else member.members,
        epoch=member.epoch,
        newest=max(member.epoch, member.newest_group[0]),
        settings=settings,
        say=sealing.Newcomer(member, join)
        if last_rounds is None
        else sealing.Survivor(member, members, last_rounds),
        limits=_limits(member, is_first=is_first),
        is_given_up=_is_given_up(member, members, is_first=is_first),
        place=describe_store(member.store),
        newest_members=member.newest_group[1],
    )


def _is_given_up(member: Member, members: Sequence[int], *, is_first: bool) -> Callable[[], bool]:
    """Return what to ask while this replica waits; a first meeting looks at the others' names."""
    if not is_first or member.board is None:
        return lambda: False
    names = Names(bounded_by(member, member.board), member.replica, members, member.name)

    def is_given_up() -> bool:
        names.look()
        return False

    return is_given_up


def _limits(member: Member, *, is_first: bool) -> Limits:
    """Return how long to wait; jobs of a first meeting may start long after each other."""
    unheard = member.timeout if is_first else min(member.join_timeout, member.timeout)
    return Limits(member.timeout, unheard, member.suspect_after)


def store_of_group(
    group: dist.ProcessGroup | None, name: str = "default"
) -> tuple[dist.Store, int, int]:
    """Return the store of a group under a prefix that its ranks agree on, own rank, and size.

    A collective call: rank 0 draws the prefix and broadcasts it through the group. With a name the
    prefix needs no agreement, and no order of the calls: calls of one name meet.
    """
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("no group was given and torch.distributed is not initialised")
    if group == dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
        raise ValueError("this process is not a member of the group")
    rank, size = group.rank(), group.size()
    if name != "default":
        return board_of_group(group), rank, size
    token = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8)
    if size > 1:
        kinds = [kind.type for kind in group._device_types]
        on_device = token.to("cpu" if "cpu" in kinds else kinds[0])
        work = group.broadcast([on_device], _broadcast_options())
        names = Names(board_of_group(group), rank, range(size), name)
        # The work of a group written in Python may never say that it is completed.
        until = time.monotonic() + _NAMES_S
        while not work.is_completed() and time.monotonic() < until:
            names.look()
            time.sleep(_POLL_S)
        work.wait()
        token = on_device.cpu()
    prefix = f"diloco_comm/{bytes(token.tolist()).hex()}"
    return dist.PrefixStore(prefix, _group_store(group)), rank, size


def board_of_group(group: dist.ProcessGroup | None) -> dist.Store:
    """Return the part of a group's store that has its named exchanges, and who waits at them."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    return dist.PrefixStore("diloco_comm/named", _group_store(group))


def _broadcast_options() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def _group_store(group: dist.ProcessGroup) -> dist.Store:
    known = dist.distributed_c10d._world.pg_map.get(group)
    if known is not None:
        return known[1]
    return group.get_group_store()
