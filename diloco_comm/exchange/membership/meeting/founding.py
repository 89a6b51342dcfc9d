"""Whether a newcomer may found a group, where one may run on the store already."""

from __future__ import annotations

import torch.distributed as dist

from ....base.errors import SyncError
from ..plans import current_group, number_is_taken, place_of
from .attendance import Pulses
from .meetings import Meeting

# Looks, about a second each, in which a counter must have risen to be that of a running group.
_RISES = 3


def refuse_second_founding(
    store: dist.Store, meeting: Meeting, pulses: Pulses, *, joins: bool
) -> None:
    """Refuse a newcomer whose group runs already, or whose number another process has.

    A counter that has risen several times is that of a process which lives. A group that has
    failed, or that a member has left, may be founded anew: its members are waited for. A group of
    which no member is here is waited for, too, for a while: where all replicas are started again,
    an old process may take its time to end.

    Args:
        joins: The newcomer comes to an old group.

    Raises:
        SyncError: If the newcomer is refused.
    """
    risen, here = pulses.risen(_RISES), meeting.members_here()
    if not risen and (joins or not here):
        return
    replica = meeting.replica
    epoch, members = current_group(store)
    if replica in risen & set(members):
        raise number_is_taken(replica, place_of(store, replica), epoch)
    # A counter that rose may be that of a process that died since, or of one with this number.
    is_open = replica in pulses.risen(1) and not pulses.risen(4 * _RISES)
    if joins or (is_open and not here):
        return
    if not here and not risen & set(members):
        return
    marks = [f"{epoch}/board/any_failed", f"{epoch}/board/any_left"]
    if not here and any(store.check([mark]) for mark in marks):
        return
    text = (
        f"the group of replicas {members or here} runs already"
        f"{f', in epoch {epoch}' if epoch else ''}: a newcomer, also a replica that was started "
        'again, attaches with init="join", while the others call change_group with replica '
        f"{replica} among the members"
    )
    rises = bool(pulses.rising(_RISES) & set(members))
    if not here and not meeting.has_run_long(rises):
        meeting.warn_once(text)
        return
    raise SyncError(text, stage="rendezvous")
