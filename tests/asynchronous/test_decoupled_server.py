"""Decoupled training over a real server: equal to Streaming DiLoCo, coded commits, newcomers."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from decoupled_processes import SIZE, attach, hash_of, make_server
from problems import Regression, parameters_of, train_step
from torch import Tensor

from diloco_comm import DiLoCo, Link, Nesterov, Streaming
from diloco_comm.asynchronous import DecoupledDiLoCo
from diloco_comm.asynchronous.decoupled.learner import Learner

STEPS, EVERY, FRAGMENTS = 10, 4, 3

# ------------------------------------------------------------------ equal to Streaming DiLoCo


def streaming(rank: int, world: int, wire: str, alpha: float) -> list[list[Tensor]]:
    """Return the parameters after each step of a synchronous run."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"wire": wire, "outer": Nesterov(0.7, 0.9), "fragments": FRAGMENTS}
    after = []
    with DiLoCo(
        model, optimizer, sync_every=EVERY, overlap=Streaming(0, alpha), **grouped(options)
    ):
        for step in range(STEPS):
            train_step(model, optimizer, rank, step)
            after.append(parameters_of(model))
    return after


def decoupled(rank: int, world: int, addresses: list[str]) -> list[list[Tensor]]:
    """Return the parameters after each step; all learners settle each step together."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    after = []
    with DecoupledDiLoCo(
        model, optimizer, server=addresses, name=str(rank), link=Link(timeout=60.0)
    ) as learner:
        dist.barrier()
        for step in range(STEPS):
            train_step(model, optimizer, rank, step)
            # The syncers count the steps of all learners before one of them reports.
            tokens = [shard.carrier.note() for shard in learner._shards]
            for shard, token in zip(learner._shards, tokens, strict=True):
                while shard.carrier._noted < token:
                    shard.carrier.wait(0.1)
            dist.barrier()
            assert learner.flush(60.0, remainder=False)
            after.append(parameters_of(model))
            dist.barrier()
        figures = learner.metrics
        assert figures.refused == 0 and figures.merged == figures.reports == sum(figures.versions)
    return after


@pytest.mark.parametrize(
    ("world", "wire", "alpha", "shards"),
    [(2, "fp32", 0.5, 1), (2, "int4", 0.0, 2)],
)
def test_a_full_quorum_over_a_server_is_streaming_diloco(
    world: int, wire: str, alpha: float, shards: int, workers
) -> None:
    """K = M, no grace window, equal tokens, the mean: bit for bit, after every step."""
    settings = {
        "fragments": FRAGMENTS, "sync_every": EVERY, "quorum": world, "gamma": 0.0, "wire": wire,
        "receipt": "blend" if alpha else "overwrite", "alpha": alpha,
    }  # fmt: skip
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                make_server({**settings, "shard": f"{i}/{shards}"}, outer=Nesterov(0.7, 0.9))
            )
            for i in range(shards)
        ]
        found = workers(world).run(decoupled, [server.address for server in servers])
    wanted = workers(world).run(streaming, wire, alpha)
    for rank in range(world):
        for step in range(STEPS):
            for a, b in zip(wanted[rank][step], found[rank][step], strict=True):
                assert torch.equal(a, b), (rank, step)


# --------------------------------------------------------------------------------- coded commits


def bases_of(learner: DecoupledDiLoCo) -> dict[int, int]:
    """Return the hash of the shared parameters that a learner has, by fragment."""
    parts: list = learner._learner.fragments
    return {p: hash_of([piece.base for piece in part.pieces]) for p, part in enumerate(parts)}


@pytest.mark.nightly("1 s each; two pairs of wires", but=["int4-int4", "topk64-topk64"])
@pytest.mark.parametrize(
    ("wire", "wire_down"),
    [("int4", "int4"), ("int1r", "bf16"), ("fp8_e4m3", "int2r"), ("topk64", "topk64")],
)
def test_coded_commits_keep_all_bases_equal(wire: str, wire_down: str) -> None:
    """Also those of a newcomer, which takes what the others have, not what the syncer has."""
    torch.manual_seed(0)
    settings = {
        "quorum": 2, "wire": wire, "wire_down": wire_down, "receipt": "carry",
        "error_feedback": wire == "topk64",
    }  # fmt: skip
    with make_server(settings) as server:
        a_model, a = attach(server.address, "a")
        b_model, b = attach(server.address, "b")
        seen: list[tuple[tuple[int, ...], dict[int, int]]] = []

        def train(rounds: int) -> None:
            for _ in range(rounds):
                for model, learner in ((a_model, a), (b_model, b)):
                    model.descend(torch.randn(SIZE))
                    learner.step()
                settle(a, b)
                assert a.metrics.versions == b.metrics.versions
                assert bases_of(a) == bases_of(b)
                seen.append((a.metrics.versions, bases_of(a)))

        train(12)
        _, newcomer = attach(server.address, "c")
        assert newcomer.metrics.versions == a.metrics.versions == (3, 3)
        assert bases_of(newcomer) == bases_of(a)
        newcomer.close()
        train(4)
        for learner in (a, b):
            learner.close()
    model = server.state.model
    assert model is not None
    shared = [fragment.values for fragment in model.syncer.fragments]
    coded = {p: hash_of(each.values) for p, each in enumerate(model.published)}
    assert coded == seen[-1][1]
    # What the syncer has and the learners have not is the residual: not zero, and not growing.
    # The other fragment has a single element, which may be exact on the wire.
    error = (shared[0][0] - model.published[0].values[0]).norm() / shared[0][0].norm()
    assert 0 < error < (1.0 if wire_down == "topk64" else 0.5)


def settle(*learners: DecoupledDiLoCo) -> None:
    """Bring all learners to one point: counted, reported, and committed."""
    tokens = [(each, each._shards[0].carrier.note()) for each in learners]
    for each, token in tokens:
        while each._shards[0].carrier._noted < token:
            each._shards[0].carrier.wait(0.1)
    while not all([each.flush(0.01, remainder=False) for each in learners]):
        pass


def test_a_coded_commit_is_smaller_and_near_the_difference() -> None:
    received = {}
    for wire_down in ("fp32", "int4"):
        with make_server({"wire_down": wire_down}) as server:
            model, learner = attach(server.address, "a")
            before = learner.metrics.received_bytes
            for _ in range(8):
                model.descend(torch.ones(SIZE))
                learner.step()
                settle(learner)
            received[wire_down] = learner.metrics.received_bytes - before
            # The calls come after steps 2, 6 and 4, 8. int4 rounds its scales, in 8 bits.
            with learner.outer_parameters():
                error = model.values() - torch.tensor([-6.0] * (SIZE - 1) + [-8.0])
            assert error.abs().max() <= (0.0 if wire_down == "fp32" else 4 / 256)
            learner.close()
    assert received["int4"] < received["fp32"] / 3


# ------------------------------------------------------------------------- what learners may do


def test_a_learner_that_was_away_skips_versions() -> None:
    """It gets the newest version, and learns whether its own report was merged on the way."""
    with make_server({"receipt": "carry", "wire_down": "int4"}) as server:
        a_model, a = attach(server.address, "a")
        b_model, b = attach(server.address, "b")
        for _ in range(24):
            a_model.descend(torch.ones(SIZE))
            a.step()
            settle(a)
        assert min(a.metrics.versions) >= 5 and b.metrics.versions == (0, 0)
        b_model.descend(torch.ones(SIZE))
        b.step()
        settle(b, a)
        assert b.metrics.versions == a.metrics.versions and bases_of(a) == bases_of(b)
        assert b.metrics.commits <= 6
        a.close()
        b.close()


def test_a_lost_report_is_offered_again_with_the_same_bytes() -> None:
    """Error feedback survives a miss: the residual changes with a merge alone."""
    settings = {"wire": "int4", "error_feedback": True, "receipt": "carry", "quorum": 2}
    torch.manual_seed(1)
    with make_server(settings) as server:
        models = [attach(server.address, name) for name in "ab"]
        for _ in range(12):
            for model, learner in models:
                model.descend(torch.randn(SIZE))
                learner.step()
            settle(*[learner for _, learner in models])
        inner: Learner = models[0][1]._learner
        residuals = [q.residuals.value.clone() for p in inner.fragments for q in p.pieces]
        assert all(each.abs().max() > 0 for each in residuals)
        # A report of a learner alone, with a quorum of two, is never merged.
        model, learner = models[0]
        for _ in range(4):
            model.descend(torch.randn(SIZE))
            learner.step()
        is_settled = learner.flush(0.2, remainder=False)
        assert not is_settled or learner.metrics.reports == learner.metrics.merged
        now = [q.residuals.value for p in inner.fragments for q in p.pieces]
        assert all(torch.equal(x, y) for x, y in zip(residuals, now, strict=True))
        for _, each in models:
            each.close()
