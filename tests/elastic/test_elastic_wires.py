"""A replica dies and another joins on the wires below four bits; all end with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from elastic_replicas import Fault, Run, check_one_line, live
from elastic_replicas import registry as registry
from registries import Host
from workers import Pool

from diloco_comm import SGD, Blocking, Eager, Streaming

WIRES: dict[str, dict[str, Any]] = {
    "int2r": {"overlap": Blocking()},
    "sub8": {"overlap": Eager(), "outer": SGD(1.0)},
    "topk64": {
        "overlap": Streaming(delay=2, alpha=0.5),
        "fragments": 3,
        "outer": SGD(1.0),
        "error_feedback": True,
    },
}


@pytest.mark.nightly("15 s; another wire of each kind joins in test_one_joins_and_one_dies")
@pytest.mark.slow
def test_one_joins_where_a_mean_has_a_wire_of_its_own(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    options = {"wire": "sub2", "block_size": None, "chunk_bytes": 64, "outer": SGD(1.0)}
    joins = {4: 12, 5: 40}
    run = Run(4, 160, joins=joins, joins_in_turn=True, options=options, pace_until=5)
    pool = fresh_workers(6, init_group=False)
    ends = pool.run(live, pool.store, registry.address, run, timeout=60)
    check_one_line(ends)
    assert len({(end.outer, end.local, end.members, end.inner_step) for end in ends}) == 1
    assert [view.joined for view in ends[0].views if view.joined][1:] == [(4,), (5,)]


@pytest.mark.nightly(
    "25 s each; test_elastic_training has the same in fp32, the frozen runs have the wires"
)
@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
def test_one_joins_and_one_dies(
    fresh_workers: Callable[..., Pool], registry: Host, wire: str
) -> None:
    fault = Fault(1, 20, "kill", "vote", num_peers=1, num_members=4)
    options = {"wire": wire, "block_size": None, "chunk_bytes": 64, **WIRES[wire]}
    run = Run(3, 240, joins={3: 12}, faults=(fault,), options=options, pace_until=3)
    pool = fresh_workers(4, init_group=False)
    ends = pool.run(live, pool.store, registry.address, run, timeout=60, expect_exit={1})
    check_one_line(ends)
    living = [end for end in ends if end is not None]
    assert len({(end.outer, end.local, end.members, end.inner_step) for end in living}) == 1
    assert living[0].members == (0, 2, 3) and living[0].inner_step == 240
    assert any(view.joined == (3,) for view in living[0].views)
