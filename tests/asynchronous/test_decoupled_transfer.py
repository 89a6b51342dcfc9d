"""How reports and commits travel: many runs, old versions, grace windows, keys, the status."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from async_helpers import Peer, wait_until
from cli_helpers import check_documented, run_cli
from decoupled_processes import SIZE, attach, hash_of, make_server

from diloco_comm.asynchronous import DecoupledDiLoCo, DecoupledServer
from diloco_comm.asynchronous.messages import Kind, Message
from diloco_comm.asynchronous.model import RUN_ELEMENTS

LARGE = 9 * RUN_ELEMENTS + 12_347


def trained(server: DecoupledServer, size: int, steps: int) -> DecoupledDiLoCo:
    """Train a learner alone, and compare its shared parameters with the syncer's."""
    model, learner = attach(server.address, "a", size)
    torch.manual_seed(0)
    for _ in range(steps):
        model.descend(torch.randn(size))
        learner.step()
        assert learner.flush(60.0, remainder=False)
    assert server.state.model is not None
    for part, published in zip(
        learner._learner.fragments, server.state.model.published, strict=True
    ):
        assert part.version == published.version >= 1
        assert hash_of([q.base for q in part.pieces]) == hash_of(published.values)
    return learner


@pytest.mark.parametrize(
    ("wire", "wire_down"), [("fp32", "fp32"), ("int4", "int4"), ("topk64", "fp32")]
)
def test_large_fragments_travel_in_many_runs(wire: str, wire_down: str) -> None:
    settings = {"wire": wire, "wire_down": wire_down, "error_feedback": wire == "topk64"}
    with make_server(settings) as server:
        learner = trained(server, LARGE, 5)
        assert learner.metrics.refused == 0
        # A newcomer fetches all runs in fp32.
        _, other = attach(server.address, "b", LARGE)
        pairs = zip(learner._learner.fragments, other._learner.fragments, strict=True)
        assert all(
            torch.equal(x.base, y.base)
            for a, b in pairs
            for x, y in zip(a.pieces, b.pieces, strict=True)
        )
        for each in (learner, other):
            each.close()


def join(peer: Peer, server: DecoupledServer, name: str) -> None:
    meta = {
        "worker": name, "layout": server.state.layout, "total": 2, "sizes": [SIZE - 1, 1],
        "pieces": [1, 1], "alone": [0, 0], "settings": server.state.settings.of_learners,
    }  # fmt: skip
    peer.say(Message(Kind.JOIN, 7, meta=meta))


def test_a_version_is_kept_while_a_slow_learner_reads_it() -> None:
    """And no longer: then the learner is sent to a newer one."""
    with make_server({"receipt": "carry"}) as server, Peer(server.address) as peer:
        model, learner = attach(server.address, "a")

        def commit(more: int) -> None:
            version = learner.metrics.versions[0]
            while learner.metrics.versions[0] < version + more:
                model.descend(torch.ones(SIZE))
                learner.step()
                assert learner.flush(20.0, remainder=False)

        def ask(version: int) -> Message | None:
            peer.say(Message(Kind.GET, 0, version, 0, 0))
            return peer.hear(skip=(Kind.ADMITTED, Kind.COMMIT, Kind.CALL))

        join(peer, server, "slow")
        first = ask(0)
        assert first is not None and first.kind == Kind.DATA
        zeros = bytes(first.body)
        commit(3)
        again = ask(0)
        assert again is not None and again.kind == Kind.DATA and bytes(again.body) == zeros
        peer.say(Message(Kind.DONE, 0, 0, 0))
        gone = ask(0)
        assert gone is not None and (gone.kind, gone.version) == (Kind.GONE, 0)
        newest = ask(learner.metrics.versions[0])
        assert newest is not None and newest.kind == Kind.DATA and bytes(newest.body) != zeros
        learner.close()


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_a_grace_window_lets_a_second_report_in(gamma: float) -> None:
    """Steps of an hour: the window closes early, because all learners have reported."""
    settings = {"gamma": gamma, "delay": 1000, "fragments": 1, "receipt": "carry"}
    with make_server(settings) as server:
        pairs = [attach(server.address, name) for name in "ab"]
        (_, a), (_, b) = pairs
        # The fourth step of a is the first that makes the syncer call, so b takes no step after it.
        for model, learner in [pairs[1]] * 3 + [pairs[0]] * 4:
            model.descend(torch.ones(SIZE))
            learner._ended_at -= 3600.0
            learner.step()
        wait_until(lambda: a._shards[0].carrier.calls() and b._shards[0].carrier.calls())
        a.poll()
        if not gamma:
            assert a.flush(20.0, remainder=False) and a.metrics.versions == (1,)
        else:

            def is_open() -> bool:
                a.poll()  # One poll may not take all calls, as one step may not.
                return server.report()["fragments"][0]["phase"] == "grace"

            wait_until(is_open)
        assert a.metrics.merged == (gamma == 0)
        b.poll()
        assert a.flush(20.0, remainder=False) and b.flush(20.0, remainder=False)
        # Without a window the merge was without b, whose report comes in the next round, if any.
        assert a.metrics.merged == 1 and b.metrics.merged >= int(gamma)
        if gamma:
            assert a.metrics.versions == b.metrics.versions == (1,)
        for _, learner in pairs:
            learner.close()


def test_a_protected_syncer(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert run_cli("serve", "keygen", keys, "--worker", "w1").status == 0
    with make_server(keys=keys) as server:
        model, learner = attach(server.address, "w1", keys=keys, key_name="w1")
        for _ in range(2):
            model.descend(torch.ones(SIZE))
            learner.step()
            assert learner.flush(20.0)
        assert learner.metrics.merged == 4
        learner.close()


def test_the_status_says_what_the_page_says(tmp_path: Path) -> None:
    with make_server(snapshot=tmp_path / "s") as server:
        learner = trained(server, SIZE, 6)
        report = server.report()
        check_documented(report, "explanation/decoupled.md")
        assert report["learners"]["a"]["steps"] == 6
        assert report["learners"]["a"]["merged"] == learner.metrics.merged == report["commits"]
        assert report["storage"]["unsaved_updates"] == 0
        shown = run_cli("serve", "status", server.address)
        assert shown.status == 0 and f"{report['commits']} merges" in shown.out
        assert "quorum 1, every 4 steps" in shown.out
        assert repr(learner) == (
            f"DecoupledDiLoCo('a', server='{server.address}', steps=6, "
            f"versions={list(learner.metrics.versions)})"
        )
        learner.close()


def test_names_of_the_package_are_found_late() -> None:
    import diloco_comm.asynchronous as package
    from diloco_comm.asynchronous.worker import AsyncDiLoCo

    assert package.AsyncDiLoCo is AsyncDiLoCo and package.DecoupledServer is DecoupledServer
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        package.Nothing  # noqa: B018
