"""Training whose membership changes by itself: what ``DiLoCo`` does at the end of a view."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..base.errors import SyncError
from ..elastic.core.events import Form
from ..elastic.options import Elastic
from ..methods.settings import Settings
from ..replica.workers import ReplicaWorkers
from .elastic_group import ElasticGroup, is_about_group
from .planning import Plan

if TYPE_CHECKING:
    from .diloco import DiLoCo

_GIVEN_BY_VIEWS = ("group", "mesh", "store", "replica", "num_replicas", "members")


def elastic_group(
    elastic: Elastic,
    plan: Plan,
    settings: Settings,
    workers: ReplicaWorkers | None,
    timeout_s: float,
) -> ElasticGroup:
    """Come to the registry."""
    shown = {"model": plan.description, "settings": _alike(settings), "of": plan.num_fragments}
    return ElasticGroup(elastic, shown, workers, connect_s=min(timeout_s, 10.0))


def _alike(settings: Settings) -> dict[str, Any]:
    """Return the settings that all members share; a newcomer is given the present outer lr."""
    shared = settings.shared()
    return {**shared, "outer": {k: v for k, v in shared["outer"].items() if k != "lr"}}


def check_membership(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of ``DiLoCo`` that go with ``membership``.

    Raises:
        TypeError, ValueError: For the first one that cannot be.
    """
    membership = arguments["membership"]
    if membership is None:
        return
    if not isinstance(membership, Elastic):
        raise TypeError(f"membership must be an Elastic, got {membership!r}")
    given = [name for name in _GIVEN_BY_VIEWS if arguments[name] is not None]
    if given:
        raise ValueError(f"membership finds the replicas: leave out {', '.join(given)}")
    if arguments["init"] != "broadcast":
        raise ValueError(
            f"membership knows who begins and who joins: leave out init, got {arguments['init']!r}"
        )
    if arguments["backend"] == "nccl":
        raise ValueError('membership exchanges over gloo: give backend="gloo", got "nccl"')


def enter_view(
    begin: Callable[[Mapping[str, Any]], None],
    group: ElasticGroup,
    arguments: Mapping[str, Any],
    members: tuple[int, ...],
    store: dist.Store,
    form: Form,
) -> None:
    """Come to a view, as a founder or a newcomer."""
    view = form.view
    places = {"store": store, "replica": group.replica, "members": members, "group": None}
    source_rank = view.rank_of(view.source) if form.role == "broadcast" else 0
    more = {"init": form.role, "source_rank": source_rank, "admission": group}
    begin({**arguments, **places, **more})


def train_on(group: ElasticGroup, diloco: DiLoCo, take_step: Callable[[], None]) -> None:
    """Take an inner step, and go to the next view where the present one ends."""
    rounds = diloco._rounds
    if group.before_step(rounds, diloco.inner_step):
        _go_on(group, diloco, SyncError("another member has stopped", stage="view"))
    takes_part = bool(diloco._plan.sent_at(diloco.inner_step + 1)) or bool(
        diloco._plan.written_at(diloco.inner_step + 1, diloco._saved_writes)
    )
    try:
        with group.waiting():
            take_step()
    except SyncError as error:
        if not is_about_group(error):
            raise
        _go_on(group, diloco, error)
    else:
        if takes_part and group.is_boundary(rounds):
            _go_on(group, diloco, None)


def repeat_flush(group: ElasticGroup, diloco: DiLoCo, flush: Callable[[], None]) -> None:
    """Flush, and again in the next view where the present one ends before all is shared."""
    while True:
        try:
            with group.waiting():
                flush()
        except SyncError as error:
            if not is_about_group(error):
                raise
            _go_on(group, diloco, error)
            if diloco._rounds.has_unsent(diloco.inner_step) and not group.is_done:
                continue
        return


def _go_on(group: ElasticGroup, diloco: DiLoCo, error: SyncError | None) -> None:
    diloco._rounds.is_change_due = diloco._rounds.announces_change = False

    def change(members: tuple[int, ...], store: dist.Store, form: Form) -> None:
        if form.role != "change":
            raise SyncError(
                f"view {form.view.number} begins anew, and this replica has the state of view "
                f"{form.view.base}: start this replica again",
                stage="view",
            )
        diloco._change_group(members, store)

    group.go_on(change, error)
