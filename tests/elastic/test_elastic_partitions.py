"""A network falls apart between replicas or from their registry, and is whole again.

However it is cut, there is one line of views: one side goes on, and the other side comes back as a
newcomer, with the same bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cut_links
import pytest
import registries
from elastic_replicas import PACE_S
from fault_replicas import BLOCK, hash_of, make_model, make_optimizer, take_inner_step
from workers import Pool

from diloco_comm import DiLoCo, Elastic, LeftBehind, Link, Wire
from diloco_comm.elastic.events import ViewChanged

H = 4
HUB = -1
# Below the time of one test, and above what a beat on a loaded machine takes.
SUSPECT_AFTER_S = 3.0


def serve_inside(out: Connection, address: str, options: dict[str, Any]) -> None:
    namespace = options.pop("namespace")
    cut_links.enter(namespace)
    registries.serve_main(out, address, options)


@dataclass
class End:
    outer: str
    local: str
    inner_step: int
    views: list[ViewChanged]
    num_left_behind: int


class Life:
    """One replica that comes again when it was left behind."""

    def __init__(self, rank: int, site: cut_links.Site, registry: str, ends: tuple[int, int]):
        self.rank, self.site, self.registry, self.ends = rank, site, registry, ends
        self.views: list[ViewChanged] = []
        self.num_left_behind = 0
        self.is_cut = self.is_healed = False

    def live(self, how: str) -> End:
        while True:
            model = make_model()
            optimizer = make_optimizer(model)
            with self._attach(model, optimizer) as diloco:
                try:
                    self._train(diloco, model, optimizer, how)
                except LeftBehind:
                    self.num_left_behind += 1
                    continue
                diloco.flush()
                outer, local = diloco.outer_hash(), hash_of(list(model.parameters()))
                step = diloco.inner_step
            return End(outer, local, step, self.views, self.num_left_behind)

    def _attach(self, model: Any, optimizer: Any) -> DiLoCo:
        membership = Elastic(
            self.registry,
            run="test",
            replica=self.rank,
            suspect_after=SUSPECT_AFTER_S,
            founding_wait=1.0,
            quorum_wait=40,
            insecure=True,
            on_event=lambda one: self.views.append(one) if isinstance(one, ViewChanged) else None,
        )
        return DiLoCo(
            model,
            optimizer,
            peers=membership,
            sync_every=H,
            wire=Wire(block_size=BLOCK),
            link=Link(chunk_bytes=512, timeout=60.0, suspect_after=SUSPECT_AFTER_S),
        )

    def _train(self, diloco: DiLoCo, model: Any, optimizer: Any, how: str) -> None:
        """Train together, cut the network, heal it when one is alone, and train together again."""
        while not self._is_over(diloco):
            together = [view for view in self.views if len(view.members) == 2]
            if self.rank == 0 and together and not self.is_cut:
                if diloco.inner_step >= together[0].inner_step + H:
                    self.is_cut = True
                    self.site.cut(*self.ends, how)
            if self.is_cut_off_and_alone(diloco):
                self.is_healed = True
                self.site.heal(*self.ends)
            take_inner_step(model, optimizer, self.rank, diloco.inner_step + 1)
            time.sleep(PACE_S)

    def is_cut_off_and_alone(self, diloco: DiLoCo) -> bool:
        """Whether the other one has gone, so that the network can be healed."""
        was_together = any(len(view.members) == 2 for view in self.views)
        return was_together and len(diloco.members) == 1 and not self.is_healed

    def _is_over(self, diloco: DiLoCo) -> bool:
        """Whether both have trained together again for a while."""
        last = self.views[-1]
        is_again = self.is_healed or self.num_left_behind > 0
        is_late = diloco.inner_step >= last.inner_step + 2 * H
        return is_again and len(diloco.members) == 2 and is_late


def live(
    rank: int, world: int, site: cut_links.Site, registry: str, ends: tuple[int, int], how: str
) -> End:
    os.environ["DILOCO_COMM_REPORT_S"] = "1"
    cut_links.enter(site.names[rank])
    return Life(rank, site, registry, ends).live(how)


@pytest.fixture(scope="module")
def reason() -> str:
    return cut_links.missing()


@pytest.mark.nightly("31 s; the explorer and the simulator of the core have cut networks")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "how", "survivor"),
    [(HUB, "both ways", 0), (HUB, "one way", 0), (0, "both ways", 0), (1, "both ways", 1)],
    ids=["both-ways", "one-way", "registry-with-0", "registry-with-1"],
)
def test_a_cut_network_has_one_line_of_views(
    fresh_workers: Callable[..., Pool],
    tmp_path: Path,
    reason: str,
    place: int,
    how: str,
    survivor: int,
) -> None:
    if reason:
        pytest.skip(reason)
    with cut_links.Site(2) as site:
        namespace = site.hub if place == HUB else site.names[place]
        ip = cut_links.HUB if place == HUB else cut_links.address(place)
        options = {"namespace": namespace, "journal": tmp_path / "journal", "insecure": True}
        registry = registries.Host(serve_inside, f"tcp://{ip}:0", **options)
        try:
            pool = fresh_workers(2, init_group=False)
            ends = pool.run(live, site, registry.address, (0, 1), how, timeout=60)
        finally:
            registry.kill()
    assert len({(end.outer, end.local, end.inner_step) for end in ends}) == 1
    by_number: dict[int, tuple[int, ...]] = {}
    for end in ends:
        for view in end.views:
            assert by_number.setdefault(view.number, view.members) == view.members
    # One side alone has gone on, and the other side has come back as a newcomer.
    alone = [members for number, members in sorted(by_number.items()) if len(members) == 1]
    assert (survivor,) in alone
    loser = ends[1 - survivor]
    assert loser.num_left_behind == 1 and ends[survivor].num_left_behind == 0
    assert loser.views[-1].joined == (1 - survivor,)
    numbers = [view.number for view in loser.views if len(view.members) == 2]
    assert not any(by_number[one] == (1 - survivor,) for one in by_number if one > min(numbers))
