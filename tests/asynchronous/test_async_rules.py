"""Server rules against the worked example, against a float64 oracle, and against each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from async_helpers import encode
from torch import Tensor

from diloco_comm import SGD, Adam, HeavyBall, Nesterov
from diloco_comm.asynchronous.coordinator import Coordinator, Outcome, Update
from diloco_comm.asynchronous.model import RUN_ELEMENTS, SharedModel, layout_of
from diloco_comm.asynchronous.payloads import PayloadFile
from diloco_comm.asynchronous.rules import Buffered, DelayedNesterov, Immediate, ServerRule
from diloco_comm.ops.wire import WireFormat

FP32 = WireFormat("fp32")
STREAM = [(0.4, -0.2), (0.1, 0.3), (-0.2, 0.5), (0.3, 0.1), (0.2, -0.1), (0.0, 0.2)]
STALENESS = [0, 1, 1, 2, 0, 12]


@dataclass
class Oracle:
    """One rule in float64, written from the equations: every arrival changes theta at once."""

    kind: str
    lr: float = 0.7
    mu: float = 0.9
    period: int = 1
    c: float = 0.0
    discount: float = 0.0
    max_staleness: float = np.inf
    m: np.ndarray = field(default_factory=lambda: np.zeros(1))
    total: np.ndarray = field(default_factory=lambda: np.zeros(1))
    t: int = 0

    def arrive(self, theta: np.ndarray, g: np.ndarray, staleness: int = 0) -> np.ndarray:
        if staleness > self.max_staleness:
            return theta
        g = g * (1.0 + staleness) ** -self.discount
        n, mu, lr = self.period, self.mu, self.lr
        self.t += 1
        self.total = self.total + g
        is_last = self.t % n == 0
        if self.kind == "delayed":
            if is_last:
                self.m = mu * self.m + self.total / n
                theta = theta - lr * ((1 - self.c * n + self.c) * mu * self.m + g / n)
            else:
                theta = theta - lr * (self.c * mu * self.m + g / n)
        elif is_last:
            mean = self.total / n
            self.m = mu * self.m + mean
            step = {"sgd": mean, "heavy": self.m, "nesterov": mean + mu * self.m}[self.kind]
            theta = theta - lr * step
        if is_last:
            self.total = np.zeros(1)
        return theta


def serve(
    rule: ServerRule,
    start: Tensor,
    stream: list[Tensor],
    staleness: list[int] | None = None,
    wire: WireFormat = FP32,
) -> tuple[list[Tensor], list[Outcome]]:
    """Send a stream of pseudo-gradients through a server's coordinator."""
    model = SharedModel([start.numel()], rule)
    model.initialise([start])
    # Such a staleness needs as many earlier versions.
    model.load(model.tensors(), {**model.scalars(), "version": 100})
    coordinator = Coordinator(model)
    layout = layout_of(start.numel(), wire)
    thetas, outcomes = [], []
    for index, g in enumerate(stream):
        version = model.version - (staleness[index] if staleness else 0)
        update = Update("w", index + 1, version, 1, 1.0, [encode(g, layout)], [layout])
        outcomes.append(coordinator.arrive(update, float(index)))
        thetas.append(model.read_all()[0])
    return thetas, outcomes


def oracle_run(
    oracle: Oracle, start: Tensor, stream: list[Tensor], staleness: list[int] | None = None
) -> list[np.ndarray]:
    theta, thetas = start.double().numpy(), []
    for index, g in enumerate(stream):
        theta = oracle.arrive(theta, g.double().numpy(), staleness[index] if staleness else 0)
        thetas.append(theta)
    return thetas


def assert_close(thetas: list[Tensor], truth: list[np.ndarray], tolerance: float = 1e-6) -> None:
    for theta, true in zip(thetas, truth, strict=True):
        np.testing.assert_allclose(theta.double().numpy(), true, rtol=tolerance, atol=tolerance)


def random_stream(count: int, size: int, seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=rng) * 0.1 for _ in range(count)]


# ---------------------------------------------------------------------------- the worked example

EXAMPLE = {
    "nesterov": [
        (0.468, 1.266), (0.1082, 0.9804), (0.11338, 0.24736), (-0.406958, -0.230376),
        (-0.9522622, -0.4643384), (-1.31703598, -1.00390456),
    ],
    "buffer": [
        (1, 1), (0.6675, 0.9335), (0.6675, 0.9335), (0.45925, 0.50615), (0.45925, 0.50615),
        (0.170325, 0.244035),
    ],
    "delayed": [
        (0.86, 1.07), (0.6675, 0.9335), (0.7375, 0.7585), (0.45925, 0.50615),
        (0.38925, 0.54115), (0.170325, 0.244035),
    ],
}  # fmt: skip
EXAMPLE_RULES = {
    "nesterov": Immediate(outer=Nesterov(0.7, 0.9)),
    "buffer": Buffered(period=2, outer=Nesterov(0.7, 0.9)),
    "delayed": DelayedNesterov(lr=0.7, momentum=0.9, period=2, activation=0.0),
}
EXAMPLE_ORACLES = {
    "nesterov": Oracle("nesterov"),
    "buffer": Oracle("nesterov", period=2),
    "delayed": Oracle("delayed", period=2),
}


@pytest.mark.parametrize("name", EXAMPLE)
def test_worked_example(name: str) -> None:
    stream = [torch.tensor(g) for g in STREAM]
    thetas, _ = serve(EXAMPLE_RULES[name], torch.ones(2), stream)
    truth = [np.array(theta) for theta in EXAMPLE[name]]
    assert_close(thetas, truth)
    for true, theta in zip(
        truth, oracle_run(EXAMPLE_ORACLES[name], torch.ones(2), stream), strict=True
    ):
        np.testing.assert_allclose(theta, true, atol=1e-7)


# ------------------------------------------------------------------------------ against the oracle

CASES = {
    "sgd": (Immediate(outer=SGD(0.3)), Oracle("sgd", lr=0.3)),
    "heavy ball": (Immediate(outer=HeavyBall(0.2, 0.8)), Oracle("heavy", lr=0.2, mu=0.8)),
    "nesterov": (Immediate(outer=Nesterov(0.1, 0.9)), Oracle("nesterov", lr=0.1)),
    "polynomial": (
        Immediate(outer=Nesterov(0.1, 0.9), discount=0.5),
        Oracle("nesterov", lr=0.1, discount=0.5),
    ),
    "polynomial with a threshold": (
        Immediate(outer=Nesterov(0.1, 0.9), discount=0.5, max_staleness=10),
        Oracle("nesterov", lr=0.1, discount=0.5, max_staleness=10),
    ),
    "buffer of 3": (
        Buffered(period=3, outer=HeavyBall(0.2, 0.8)),
        Oracle("heavy", lr=0.2, mu=0.8, period=3),
    ),
    "discounted buffer": (
        Buffered(period=4, outer=Nesterov(0.5, 0.7), discount=1.0),
        Oracle("nesterov", lr=0.5, mu=0.7, period=4, discount=1.0),
    ),
    "delayed, c=0": (DelayedNesterov(period=3), Oracle("delayed", period=3)),
    "delayed, c=0.1": (
        DelayedNesterov(period=4, activation=0.1),
        Oracle("delayed", period=4, c=0.1),
    ),
    "delayed, c=1/N": (
        DelayedNesterov(lr=0.4, momentum=0.8, period=5, activation=0.2),
        Oracle("delayed", lr=0.4, mu=0.8, period=5, c=0.2),
    ),
    "delayed, N=1, c=1": (
        DelayedNesterov(period=1, activation=1.0),
        Oracle("delayed", period=1, c=1.0),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 7, 4099])
def test_against_the_oracle(name: str, size: int) -> None:
    rule, oracle = CASES[name]
    oracle = Oracle(**{**oracle.__dict__, "m": np.zeros(1), "total": np.zeros(1)})
    stream = random_stream(13, size, seed=size)
    staleness = [0, 1, 1, 2, 0, 12, 3, 11, 10, 0, 5, 7, 1]
    start = torch.linspace(-1, 1, size)
    thetas, outcomes = serve(rule, start, stream, staleness)
    assert_close(thetas, oracle_run(oracle, start, stream, staleness), 3e-6)
    refused = [s for s, o in zip(staleness, outcomes, strict=True) if o.refusal == "stale"]
    assert refused == ([12, 11] if rule.max_staleness == 10 else [])


def test_adam_and_any_torch_optimizer_take_the_mean() -> None:
    stream = random_stream(6, 300, seed=1)
    start = torch.ones(300)
    adam, _ = serve(Buffered(period=2, outer=Adam(lr=0.3)), start, stream)
    factory = lambda params: torch.optim.RMSprop(params, lr=0.01)  # noqa: E731
    other, _ = serve(Buffered(period=2, outer=factory), start, stream)
    for outer, thetas in (
        (lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.9, 0.95), eps=0.1), adam),
        (factory, other),
    ):
        param = torch.nn.Parameter(start.clone())
        optimizer = outer([param])
        for index in range(3):
            param.grad = (stream[2 * index] + stream[2 * index + 1]) / 2
            optimizer.step()
            torch.testing.assert_close(thetas[2 * index + 1], param.data, rtol=1e-5, atol=1e-6)


def test_delay_compensation() -> None:
    """A worker that starts from theta_0 and arrives after another one."""
    lam, lr = 0.5, 0.1
    model = SharedModel([5], Immediate(outer=SGD(lr), compensation=lam))
    start, (g0, g1) = torch.linspace(0, 1, 5), random_stream(2, 5, seed=3)
    model.initialise([start])
    coordinator = Coordinator(model)
    layout = layout_of(5, FP32)
    for name in "ab":
        coordinator.start(name)
    for name, g in (("a", g0), ("b", g1)):
        coordinator.arrive(Update(name, 1, 0, 1, 1.0, [encode(g, layout)], [layout]), 0.0)
    theta1 = start.double() - lr * g0.double()
    compensated = g1.double() + lam * g1.double() ** 2 * (theta1 - start.double())
    truth = theta1 - lr * compensated
    np.testing.assert_allclose(model.read_all()[0], truth, rtol=1e-6, atol=1e-6)


def test_what_workers_start_from_is_kept_once_for_each_version_in_files() -> None:
    """Twelve workers, two fragments, one of two runs: the applied update is that of the formula."""
    lam, lr, sizes = 0.5, 0.1, [RUN_ELEMENTS + 77, 5]
    model = SharedModel(sizes, Immediate(outer=SGD(lr), compensation=lam))
    thetas = [torch.rand(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    model.initialise(thetas)
    coordinator, layouts = Coordinator(model), model.layouts(FP32)
    names, started = [str(index) for index in range(12)], {}

    def start(name: str) -> None:
        coordinator.start(name)
        started[name] = [theta.clone() for theta in thetas]

    for name in names:
        start(name)
    assert len(coordinator.versions) == 1
    for index, name in enumerate(names[:4] * 2):
        gs = [torch.rand(size, generator=torch.Generator().manual_seed(index)) for size in sizes]
        payloads = [encode(g, layout) for g, layout in zip(gs, layouts, strict=True)]
        update = Update(name, 1 + index // 4, model.version, 1, 1.0, payloads, layouts)
        released: list[int] = []
        assert not coordinator.arrive(update, 0.0, lambda: released.append(1)).refusal  # noqa: B023
        assert released == [1]
        for i, g in enumerate(gs):
            step = g + lam * g * g * (thetas[i] - started[name][i])
            thetas[i] -= lr * step
        assert all(map(torch.equal, model.read_all(), thetas))
        start(name)
    # Eight workers still train from the first version, four from versions after the last updates.
    assert len(coordinator.versions) == 5
    kept = [payload for flats in coordinator.versions._kept.values() for payload in flats]
    assert all(isinstance(payload, PayloadFile) for payload in kept)
    for name in names:
        coordinator.leave(name)
    assert len(coordinator.versions) == 0


def test_compensation_without_room_for_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diloco_comm.asynchronous.model.payload_files", no_room)
    test_delay_compensation()
    assert "there is no room for a file" in caplog.text


# --------------------------------------------------------------------------------- bit for bit


def bits(thetas: list[Tensor]) -> list[list[int]]:
    return [theta.view(torch.int32).tolist() for theta in thetas]


@pytest.mark.parametrize("wire", ["fp32", "int8", "e3m0"])
def test_delayed_with_period_1_is_nesterov(wire: str) -> None:
    stream, start = random_stream(8, 1027, seed=5), torch.linspace(-1, 1, 1027)
    one, _ = serve(DelayedNesterov(period=1), start, stream, wire=WireFormat(wire))
    other, _ = serve(Immediate(outer=Nesterov(0.7, 0.9)), start, stream, wire=WireFormat(wire))
    assert bits(one) == bits(other)


@pytest.mark.parametrize("period", [2, 3, 4])
def test_delayed_without_activation_is_the_buffer_at_every_nth_arrival(period: int) -> None:
    stream, start = random_stream(12, 1027, seed=6), torch.linspace(-1, 1, 1027)
    wire = WireFormat("int8")
    one, _ = serve(DelayedNesterov(period=period), start, stream, wire=wire)
    other, _ = serve(Buffered(period=period), start, stream, wire=wire)
    assert bits(one[period - 1 :: period]) == bits(other[period - 1 :: period])
    assert bits(one[:1]) != bits(other[:1])


@pytest.mark.parametrize(
    "rule",
    [
        Immediate(), Immediate(outer=HeavyBall()), Immediate(outer=SGD()), Buffered(period=3),
        DelayedNesterov(period=3, activation=0.2), Buffered(period=2, outer=Adam()),
    ],
    ids=lambda rule: f"{type(rule).__name__}-{rule.arrivals}",
)  # fmt: skip
@pytest.mark.parametrize("wire", ["fp32", "int8", "int4"])
def test_an_old_version_stays_readable_while_updates_arrive(rule: ServerRule, wire: str) -> None:
    form, size = WireFormat(wire), 300_001
    stream, start = random_stream(7, size, seed=7), torch.linspace(-1, 1, size)
    truth, _ = serve(rule, start, stream, wire=form)
    model = SharedModel([size], rule)
    model.initialise([start])
    layout = layout_of(size, form)
    released: list[int] = []
    held = []
    for index, g in enumerate(stream):
        if index in (1, 3, 4):
            held.append(model.hold())
        model.apply(
            [encode(g, layout)], [layout], rule.weight(0), lambda i=index: released.append(i)
        )
    assert held == [1, 3, 4] and released == [0]
    for version in held:
        runs = [model.read(version, 0, run) for run in range(layout.num_runs)]
        assert torch.equal(torch.cat(runs), truth[version - 1])
    assert torch.equal(model.read_all()[0], truth[-1])
    model.release(3)
    assert released == [0]
    model.release(1)
    assert released == [0, 1, 2, 3] and model.oldest_read == 4
    model.release(4)
    assert released == list(range(7)) and model.is_folded
    assert torch.equal(model.read_all()[0], truth[-1])


# ------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize("activation", [-0.01, 0.26, 1.0, float("nan")])
def test_activation_outside_its_range_is_refused(activation: float) -> None:
    with pytest.raises(ValueError, match=r"activation must lie in \[0, 1/period\]"):
        DelayedNesterov(period=4, activation=activation)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Buffered(period=0), "period must be"),
        (lambda: Buffered(period=True), "period must be"),
        (lambda: Immediate(discount=-1.0), "discount must be"),
        (lambda: Immediate(max_staleness=-1), "max_staleness must not"),
        (lambda: Immediate(compensation=float("inf")), "compensation must be finite"),
        (lambda: SharedModel([], Immediate()), "at least 1 element"),
        (lambda: Coordinator(SharedModel([1], Immediate()), sync_every=0), "sync_every must be"),
        (lambda: Coordinator(SharedModel([1], Immediate()), grace=-1.0), "grace must be"),
    ],
)
def test_bad_arguments(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
