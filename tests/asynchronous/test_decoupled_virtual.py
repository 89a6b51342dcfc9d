"""Decoupled training on the virtual clock: against Streaming DiLoCo, the ledgers, failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from choice_groups import grouped
from decoupled_helpers import Setting, counting
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Regression, parameters_of, train_step
from torch import Tensor

from diloco_comm import DiLoCo, Nesterov, Streaming
from diloco_comm.asynchronous.decoupled.learner import Receipt
from diloco_comm.asynchronous.decoupled.syncer import QuorumRule
from diloco_comm.asynchronous.decoupled.virtual import DecoupledRun, Link

CARRY = Receipt(mode="carry")
STEPS, EVERY, FRAGMENTS = 13, 4, 3


# ------------------------------------------------------------------ equal to Streaming DiLoCo


def streaming(rank: int, world: int, wire: str, alpha: float) -> list[list[Tensor]]:
    """Return the parameters after each step of a real run."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"wire": wire, "outer": Nesterov(0.7, 0.9), "fragments": FRAGMENTS}
    after = []
    with DiLoCo(
        model, optimizer, sync_every=EVERY, overlap=Streaming(0, alpha), **grouped(options)
    ) as diloco:
        names = [part.fragment.names for part in diloco.parts]
        for step in range(STEPS):
            train_step(model, optimizer, rank, step)
            after.append(parameters_of(model))
    return [names, *after]


def decoupled(world: int, wire: str, alpha: float, names: list) -> list[list[list[Tensor]]]:
    """Return, for each learner, the parameters after each step of the virtual run."""
    with one_thread():
        return _decoupled(world, wire, alpha, names)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute as the workers of the real run do: more threads sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _decoupled(world: int, wire: str, alpha: float, names: list) -> list[list[list[Tensor]]]:
    models = [Regression() for _ in range(world)]
    after: list[list[list[Tensor]]] = [[] for _ in models]

    def step_of(rank: int):  # type: ignore[no-untyped-def]
        model = models[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        count = iter(range(1000))

        def step() -> None:
            train_step(model, optimizer, rank, next(count))

        return step

    parts = []
    for model in models:
        named = dict(model.named_parameters())
        parts.append([[named[name].detach() for name in each] for each in names])
    receipt = Receipt(mode="blend", alpha=alpha) if alpha else Receipt()
    setting = Setting(
        wire=wire,
        outer=Nesterov(0.7, 0.9),
        receipt=receipt,
        rule=QuorumRule(quorum=world, gamma=0.0),
        sync_every=EVERY,
    )
    run = setting.run(parts, [step_of(rank) for rank in range(world)], seconds=[0.5] * world)
    for number in range(1, STEPS + 1):
        run.until(seconds=0.5 * number)
        for rank, model in enumerate(models):
            after[rank].append(parameters_of(model))
    assert not run.refusals
    return after


@pytest.mark.parametrize(
    ("world", "wire", "alpha"),
    [(2, "fp32", 0.0), (2, "int4", 0.0), (2, "fp32", 0.5), (4, "fp32", 0.0)],
)
def test_a_full_quorum_without_delay_is_streaming_diloco(
    world: int, wire: str, alpha: float, workers
) -> None:
    """K = M, no grace window, equal tokens, the mean, no delay: bit for bit, after every step."""
    real = workers(world).run(streaming, wire, alpha)
    virtual = decoupled(world, wire, alpha, real[0][0])
    for rank in range(world):
        for step in range(STEPS):
            for a, b in zip(real[rank][1 + step], virtual[rank][step], strict=True):
                assert torch.equal(a, b), (rank, step)


# ---------------------------------------------------------------------------------- the ledgers


def check_ledgers(run: DecoupledRun, *, may_lose: bool) -> None:
    for one in run.learners.values():
        for part in one.learner.fragments:
            for book, unit in ((part.steps, 1), (part.tokens, one.tokens)):
                assert book.learned == one.learner.num_steps * unit
                parts = (book.applied, book.under_way, book.kept, book.lost)
                assert book.learned == sum(parts) and min(parts) >= 0
                assert may_lose or not book.lost


def check_commits(run: DecoupledRun) -> None:
    """Versions follow one another, and no report is merged twice."""
    for index in range(len(run.syncer.fragments)):
        own = [commit for commit in run.commits if commit.fragment == index]
        assert [commit.version for commit in own] == list(range(1, len(own) + 1))
        named = [pair for commit in own for pair in commit.merged.items()]
        assert len(named) == len(set(named))
        assert all(abs(sum(commit.merge.weights) - 1) < 1e-12 for commit in own)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.sampled_from([0.3, 0.5, 1.0, 2.7]), min_size=2, max_size=5),
    quorum=st.integers(1, 5),
    tau=st.integers(0, 5),
    latency=st.sampled_from([0.0, 0.1, 3.0]),
    mode=st.sampled_from(["overwrite", "carry", "blend"]),
    outage=st.sampled_from([None, (3.0, 4.0), (2.5, 30.0), (7.1, 7.3)]),
    detection=st.sampled_from([0.0, 5.0]),
)
def test_books_balance(
    steps: list[float],
    quorum: int,
    tau: int,
    latency: float,
    mode: str,
    outage: tuple[float, float] | None,
    detection: float,
) -> None:
    models, train = counting(len(steps))
    setting = Setting(receipt=Receipt(mode=mode), rule=QuorumRule(quorum=quorum, delay=tau))
    run = setting.run(
        models,
        train,
        seconds=steps,
        tokens=[1 + i for i in range(len(steps))],
        outages={1: [outage]} if outage else {},
        link=Link(latency_s=latency, bytes_per_s=1e4),
        detection_s=detection,
    )
    run.until(seconds=60.0)
    check_ledgers(run, may_lose=mode == "overwrite" or outage is not None)
    check_commits(run)
    assert {commit.fragment for commit in run.commits} == {0, 1}
    fastest = max(run.learners.values(), key=lambda one: one.learner.num_steps)
    lost_s = sum(b - a for a, b in fastest.outages) + 2 * latency + 1
    assert fastest.learner.num_steps >= (60.0 - lost_s) / fastest.step_s - 1  # never blocked


@pytest.mark.parametrize("latency", [0.0, 0.4, 2.3])
def test_carry_keeps_every_step_of_a_single_learner(latency: float) -> None:
    """SGD(1) on one report is the report: the parameters are always minus the steps."""
    models, train = counting(1)
    setting = Setting(receipt=CARRY)
    run = setting.run(models, train, seconds=[0.5], link=Link(latency_s=latency))
    for now in range(1, 40):
        run.until(seconds=float(now))
        num_steps = run.learners["0"].learner.num_steps
        assert num_steps == 2 * now
        for tensor in (t for each in models[0] for t in each):
            assert tensor.tolist() == [-num_steps] * tensor.numel()
    assert len(run.commits) >= 10


def test_carry_keeps_the_progress_that_missed_a_merge() -> None:
    """K = 1 and no grace: the slow learner's steps are all applied in the end, or kept."""
    models, train = counting(2, sizes=(2,))
    setting = Setting(receipt=CARRY, rule=QuorumRule(quorum=1, gamma=0.0), sync_every=2)
    run = setting.run(models, train, seconds=[0.5, 1.7], link=Link(latency_s=0.1))
    run.until(seconds=100.0)
    check_ledgers(run, may_lose=False)
    slow = run.learners["1"].learner.fragments[0]
    assert slow.steps.learned == 58 and slow.steps.applied >= 1
    assert any("starts from version" in refusal or "idle" in refusal for refusal in run.refusals)
    # The parameters hold what is kept, on top of the last version that the learner has.
    kept = slow.steps.kept + slow.steps.under_way
    assert (models[1][0][0] - slow.pieces[0].base).tolist() == [-float(kept)] * 2


def test_overwrite_loses_what_missed_a_merge() -> None:
    models, train = counting(2, sizes=(2,))
    setting = Setting(rule=QuorumRule(quorum=1, gamma=0.0), sync_every=2)
    run = setting.run(models, train, seconds=[0.5, 1.7], link=Link(latency_s=0.1))
    run.until(seconds=100.0)
    check_ledgers(run, may_lose=True)
    assert run.learners["1"].learner.fragments[0].steps.lost > 0


@pytest.mark.parametrize(
    ("wire", "error_feedback"),
    # A sparse wire's residual decays on purpose, so it is tried without one.
    [("int8", False), ("int8", True), ("int4", True), ("int2r", True), ("topk64", False)],
)
def test_carry_finds_the_snapshot_again(wire: str, error_feedback: bool) -> None:
    """One learner, any wire: what the shared model lacks is in the parameters or the residual."""
    rng = torch.Generator().manual_seed(3)
    tensor = torch.zeros(600)
    moves = torch.randn(200, 600, generator=rng)
    count = iter(range(200))

    def step() -> None:
        tensor.sub_(moves[next(count)])

    setting = Setting(wire=wire, receipt=CARRY, error_feedback=error_feedback)
    run = setting.run([[[tensor]]], [step], seconds=[0.5], link=Link(latency_s=0.7))
    run.until(seconds=40.0)
    assert len(run.commits) > 5
    piece = run.learners["0"].learner.fragments[0].pieces[0]
    expected = -moves[: run.learners["0"].learner.num_steps].double().sum(0)
    actual = tensor.double()
    if error_feedback:
        assert piece.residuals.value is not None
        actual = actual - piece.residuals.value
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()


# --------------------------------------------------------------------------- quorum and grace


def test_grace_lets_the_slow_learner_in() -> None:
    """With a window of up to one step, merges have both learners; without one they have either."""
    shares = {}
    for grace in (0.0, 1.0):
        models, train = counting(2, sizes=(2,))
        rule = QuorumRule(quorum=1, gamma=grace, delay=4)
        setting = Setting(receipt=CARRY, rule=rule, sync_every=6)
        run = setting.run(models, train, seconds=[0.5, 0.6], link=Link(latency_s=0.01))
        run.until(seconds=120.0)
        shares[grace] = sum(len(commit.merged) == 2 for commit in run.commits) / len(run.commits)
    assert shares[1.0] > 0.9 and shares[0.0] < 0.1


def test_a_stopped_learner_does_not_stop_the_others() -> None:
    models, train = counting(3)
    setting = Setting(receipt=CARRY, rule=QuorumRule(quorum=3), sync_every=2)
    run = setting.run(
        models, train, seconds=[0.5] * 3, outages={2: [(5.25, 35.0)]}, detection_s=2.0
    )
    run.until(seconds=60.0)
    assert [one.learner.num_steps for one in run.learners.values()] == [120, 120, 60]
    during = [commit for commit in run.commits if set(commit.merged) == {"0", "1"}]
    assert len(during) >= 40
    # After its return the learner takes part again, from the newest version.
    assert set(run.commits[-1].merged) == {"0", "1", "2"}
    assert [p.version for p in run.learners["2"].learner.fragments] == [
        r.version for r in run.syncer.rounds
    ]


@pytest.mark.parametrize("outage", [(7.1, 7.3), (9.0, 9.1)])
def test_a_learner_that_returns_unnoticed_gets_the_model_before_any_commit(outage: tuple) -> None:
    """Commits that were on their way are lost with the old connection, and none comes before."""
    models, train = counting(3)
    setting = Setting(receipt=CARRY, sync_every=2)
    run = setting.run(
        models,
        train,
        seconds=[0.5, 0.5, 0.6],
        outages={1: [outage]},
        link=Link(latency_s=1.0),
        detection_s=50.0,
    )
    run.until(seconds=40.0)
    check_ledgers(run, may_lose=True)
    assert run.learners["1"].learner.fragments[0].version >= run.syncer.rounds[0].version - 2


def test_a_step_that_an_outage_ends_is_not_taken() -> None:
    """The step from 5.0 to 5.5 is lost, though the learner is back before its end."""
    models, train = counting(1)
    run = Setting(receipt=CARRY).run(models, train, seconds=[0.5], outages={0: [(5.2, 5.3)]})
    run.until(seconds=10.0)
    # Ten steps until 5.0, and nine from 5.3 to 9.8.
    assert run.learners["0"].learner.num_steps == 19


def test_rda_pieces_train_too() -> None:
    models = [[[torch.zeros(8, 4), torch.zeros(4)]] for _ in range(2)]

    def step_of(model: list[list[Tensor]], by: float):  # type: ignore[no-untyped-def]
        def step() -> None:
            model[0][0].view(-1)[0] -= by
            model[0][1] -= by

        return step

    setting = Setting(merge="rda", rule=QuorumRule(quorum=2, gamma=0.0), sync_every=1)
    run = setting.run(
        models, [step_of(models[0], 1.0), step_of(models[1], 3.0)], seconds=[1.0, 1.0]
    )
    run.until(seconds=1.0)
    assert run.commits[0].factors == [pytest.approx([1.0, 1 / 3]), [0.5, 0.5]]
    assert models[0][0][0].view(-1)[0].item() == pytest.approx(-2.0)
    assert torch.equal(models[0][0][0], models[1][0][0])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: Receipt(mode="drop"),
            "receipt must be one of overwrite, carry, blend, got 'drop'",
        ),
        (lambda: Receipt(mode="blend", alpha=2.0), "alpha must lie in \\[0, 1\\], got 2.0"),
        (lambda: Link(latency_s=-1.0), "latency_s must not be negative"),
        (lambda: made(seconds=[0.0]), "step_s must be positive and tokens at least 1, got 0.0"),
        (lambda: made(seconds=[1.0], outages={0: [(3.0, 2.0)]}), "outages must follow one another"),
    ],
)
def test_refusals(call, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def made(**options) -> DecoupledRun:
    models, train = counting(1)
    return Setting().run(models, train, **options)


def test_progress_that_is_not_finite_is_refused() -> None:
    models, _ = counting(1)

    def step() -> None:
        models[0][0][0].fill_(float("nan"))

    run = Setting().run(models, [step], seconds=[1.0])
    with pytest.raises(ValueError, match="learner '0' cannot report on fragment 0: a value is not"):
        run.until(seconds=10.0)
