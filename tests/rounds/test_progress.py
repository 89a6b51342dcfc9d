"""The lines of a replica about its rounds, and its summary."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_replicas import registry as registry
from problems import Regression, attach, train_step
from registries import Host
from torch.distributed.device_mesh import init_device_mesh
from workers import Pool

from diloco_comm import CO2, Delayed, DiLoCo, Eager, Elastic, NonFinite, Streaming
from diloco_comm.integrations.writers import Figures
from diloco_comm.rounds import progress
from diloco_comm.rounds.metrics import Recorder, SyncMetrics
from diloco_comm.rounds.progress import BURST, PERIOD_S, Bucket, Progress

LOGGER = "diloco_comm.rounds.metrics"
ROUND = SyncMetrics(0, 0, 10, sent_bytes=1000, exchange_s=0.4, exposed_s=0.1, overlap_fraction=0.75)


# ------------------------------------------------------------------ figures and a clock alone


@dataclass
class Group:
    """The names of a group."""

    members: tuple[int, ...] = (0, 1)
    replica: int = 0
    collectives: str = "gloo"


class Told:
    """The progress of a replica whose rounds and clock the test makes."""

    def __init__(self, group: Group, **choices: Any) -> None:
        self.now, self.recorder = 100.0, Recorder()
        options = {"num_parts": 1, "parameter_bytes": 5000, "clock": lambda: self.now} | choices
        self.progress = Progress(self.recorder, group, **options)
        self.progress.begin(["sync_every=10"], 0)

    def round(self, seconds: float = 0.0, **figures: Any) -> None:
        self.now += seconds
        number = self.recorder.totals.num_syncs
        made = replace(ROUND, round=number, inner_step=10 * (number + 1))
        with self.recorder.deferred_callbacks():
            self.recorder.add(replace(made, **figures))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.module == "progress"]


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)


def test_a_burst_of_lines_may_pass_and_then_one_in_ten_seconds() -> None:
    bucket = Bucket(0.0)
    passed = [second for second in range(200) if bucket.take(float(second))]
    assert passed[:BURST] == list(range(BURST))
    assert len(passed) == pytest.approx(BURST + 200 / PERIOD_S, abs=1)
    # After a long silence the burst is whole again, and no larger.
    assert [bucket.take(10_000.0) for _ in range(BURST + 1)] == [True] * BURST + [False]


def test_rounds_without_a_line_are_summed_up_in_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Told(Group())
    for _ in range(BURST + 3):
        told.round()
    told.round(PERIOD_S, is_applied=False, is_reset=True, pseudo_gradient_norm=0.25)
    told.round()
    told.progress.end(104)
    begin, *rounds, last, end = messages(caplog)
    assert begin == (
        "replica 0 of replicas [0, 1] begins: sync_every=10, link=gloo; replica 0 logs the rounds"
    )
    line = "round 0 at inner step 10: replicas [0, 1], 1 kB sent, waited 0.1 s, 75% hidden"
    assert rounds[0] == line and len(rounds) == BURST + 1
    assert rounds[-1] == (
        "4 rounds up to round 8 at inner step 90: replicas [0, 1], 4 kB sent, waited 0.4 s, "
        "75% hidden, norm 0.25, 1 skipped, 1 reset"
    )
    assert last.startswith("round 9 at inner step 100: ")
    # A ring of two sends all 5000 bytes at each of 100 steps: 500 kB, where 10 kB were sent.
    assert end == (
        "replica 0 ends at inner step 104: 9 rounds applied, 1 skipped; 10 kB sent, data parallel "
        "50 times as much; waited 1 s of 10 s (10.0%)"
    )
    told.progress.end(104)
    assert len(messages(caplog)) == len(rounds) + 3


def test_the_figures_of_all_lines_are_those_of_all_rounds(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(Group())
    for number in range(500):
        told.round(0.7, sent_bytes=1, fragment=number % 3)
    told.progress.end(5000)
    counts = [re.search(r"(\d+) bytes sent, waited", line) for line in messages(caplog)]
    assert sum(int(found[1]) for found in counts if found) == 500
    assert len(counts) <= BURST + 500 * 0.7 / PERIOD_S + 3


def test_data_parallel_is_a_ring_of_the_group_at_each_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = Group(members=(0, 1, 2, 3))
    told = Told(group, parameter_bytes=600)
    told.round(inner_step=10)
    group.members = (0, 1)
    told.round(inner_step=15)
    # A loaded state, whose steps were taken before.
    told.progress.inner_step = 1000
    told.round(inner_step=1010)
    told.progress.end(1010)
    ratio = (10 * 600 * 2 * 3 / 4 + 15 * 600) / 3000
    assert f"data parallel {ratio:.3g} times as much" in messages(caplog)[-1]


def test_the_lines_name_fragment_object_and_changes(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(Group(members=tuple(range(9)), replica=0), num_parts=3, name="critic")
    told.round(fragment=2)
    told.recorder.awaited_s.update({4: 2.0, 7: 5.0})
    told.now += 2000.0

    @dataclass(frozen=True)
    class Spent:
        rounds_discarded: int = 2
        forming_s: float = 0.05

    told.progress.end(10, Spent())
    begin, line, end = messages(caplog)
    assert begin.startswith("critic: replica 0 of 9 replicas begins: ")
    assert line.startswith("critic: fragment 2, round 0 at inner step 10: 9 replicas, ")
    assert end.startswith("critic: replica 0 ends at inner step 10: 1 round applied, 2 discarded;")
    assert end.endswith(
        "waited 0.1 s of 2,000 s (0.0%), longest for replica 7 (5 s); "
        "changes of the group took 50 ms"
    )


def test_another_replica_than_the_lowest_logs_rounds_at_level_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = Group(replica=1)
    told = Told(group)
    told.round()
    # The lowest replica has left the group.
    group.members = (1, 2)
    told.round()
    found = [one.levelname for one in caplog.records]
    assert found == ["INFO"] * 2 and "round 1 at" in messages(caplog)[1]
    caplog.set_level(logging.DEBUG, LOGGER)
    group.members = (0, 1, 2)
    told.round()
    assert caplog.records[-1].levelname == "DEBUG"
    told.progress.end(30)
    assert caplog.records[-1].levelname == "INFO"


def test_workers_but_the_first_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(Group(), worker=(1, 2))
    told.round()
    told.progress.end(10)
    assert not messages(caplog)
    Told(Group(), worker=(0, 2))
    assert messages(caplog)[0].endswith("rounds; the figures are of its worker 0 of 2")


# ------------------------------------------------------------------------------ real replicas


class Lines(logging.Handler):
    """Keeps the lines of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelname, record.getMessage()))


@contextmanager
def kept_lines() -> Iterator[list[tuple[str, str]]]:
    logger, handler = progress.logger, Lines()
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield handler.found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def train(
    rank: int, world: int, choices: dict[str, Any], pause_s: float
) -> tuple[Any, int, int, float]:
    """Train; return the log, the rounds, the bytes, and the waits that no replica is named for."""
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with kept_lines() as lines:
        with DiLoCo(model, optimizer, sync_every=4, **choices) as diloco:
            for step in range(10):
                train_step(model, optimizer, rank, step)
                time.sleep(pause_s * rank)
        diloco.close()
    totals = diloco.totals()
    other_s = totals.exposed_s - sum(diloco._recorder.awaited_s.values())
    return lines, totals.num_syncs, totals.sent_bytes, other_s


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"overlap": Streaming(2), "fragments": 2, "norms": True, "link": "tcp"},
        {"overlap": CO2(), "outer": "heavyball"},
        {"overlap": Eager()},
        {"overlap": Delayed()},
    ],
    ids=["blocking", "streaming", "co2", "eager", "delayed"],
)
def test_each_replica_logs_its_begin_and_end_and_the_lowest_its_rounds(
    choices: dict[str, Any], workers
) -> None:
    (first, num_rounds, sent_bytes, _), (second, *_) = workers(2).run(train, choices, 0.0)
    assert {level for level, _ in first + second} == {"INFO"}
    begin, *rounds, end = [text for _, text in first]
    assert begin.startswith("replica 0 of replicas [0, 1] begins: sync_every=4, overlap=")
    counts = [re.match(r"(\d+) rounds up to ", text) for text in rounds]
    assert sum(int(found[1]) if found else 1 for found in counts) == num_rounds
    assert all("sent, waited" in text for text in rounds)
    # Blocking trains on during no exchange, whatever part of the encoding the exchange overlaps.
    assert choices or all(", 0% hidden" in text for text in rounds)
    assert all(("norm" in text) == ("norms" in choices) for text in rounds)
    assert end.startswith(f"replica 0 ends at inner step 10: {num_rounds} rounds applied; ")
    parameter_bytes = 4 * sum(param.numel() for param in Regression().parameters())
    assert f"data parallel {10 * parameter_bytes / sent_bytes:.3g} times as much" in end
    assert [text.split(" ")[2] for _, text in second] == ["of", "ends"]
    assert second[0][1].endswith("; replica 0 logs the rounds")


def shares(rank: int, world: int, choices: dict[str, Any]) -> list[tuple[bool, float]]:
    """Return of each round whether the call that sent it has applied it, and its hidden share.

    The model is so large that the exchange begins before the encoding has ended.
    """
    model = torch.nn.Linear(2000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sent: set[tuple[int, int]] = set()
    with DiLoCo(model, optimizer, sync_every=4, wire="int4", **choices) as diloco:
        for _ in range(12):
            model(torch.ones(2000)).sum().backward()
            optimizer.step()
            for part in diloco._look_at_parts():
                sent |= {(part.index, flight.number) for flight in part.in_flight}
        metrics = [one for one in diloco.metrics() if one.inner_step < 12]
    # A round that no step has seen on its way was applied by the call that sent it.
    return [((one.fragment, one.round) not in sent, one.overlap_fraction) for one in metrics]


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"overlap": Eager(first="sync"), "fragments": 2},
        {"overlap": Streaming(0), "fragments": 2},
    ],
    ids=["blocking", "eager", "streaming"],
)
def test_a_round_that_is_applied_by_the_call_that_sends_it_hides_nothing(
    choices: dict[str, Any], workers
) -> None:
    (first, _) = workers(2).run(shares, choices)
    assert first[0] == (True, 0.0)
    assert all(share == 0.0 for at_once, share in first if at_once)


@pytest.mark.parametrize("choices", [{}, {"overlap": CO2()}], ids=["blocking", "co2"])
def test_the_summary_names_the_replica_that_was_waited_for(
    choices: dict[str, Any], workers
) -> None:
    """The flush of CO2 waits twice for a round: both waits count."""
    first, second = workers(2).run(train, choices, 0.05)
    assert re.search(r", longest for replica 1 \(0\.\d+ s\)$", first[0][-1][1])
    assert first[-1] >= 0 and second[-1] >= 0


def test_the_line_of_a_round_names_the_replica_that_was_waited_for(workers) -> None:
    (lines, *_), (others, *_) = workers(2).run(train, {}, 0.5)
    # Replica 1 comes to its first send 1.5 s later, to the second one 2 s later. The flush has a
    # meeting before its round, which waits for no one then.
    named = r"waited \S+ s, longest for replica 1 \(\d\S* s\), 0% hidden$"
    assert [bool(re.search(named, text)) for _, text in lines[1:-1]] == [True, True, False]
    assert not any("longest" in text for _, text in others)


class Broken(logging.Handler):
    """Raises, where the handlers of Python's library would keep the error to themselves."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError(record.getMessage())


def train_with_a_broken_handler(rank: int, world: int) -> tuple[Any, str]:
    model, optimizer, diloco = attach(rank, sync_every=2, on_nonfinite="reset")
    handler, stderr = Broken(), io.StringIO()
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stderr(stderr), diloco:
            for step in range(6):
                # Round 0 resets replica 1, and round 1 is skipped: both replicas have a NaN.
                if (step == 1 and rank == 1) or step == 3:
                    with torch.no_grad():
                        next(model.parameters()).fill_(math.nan)
                train_step(model, optimizer, rank, step)
    finally:
        logging.getLogger().removeHandler(handler)
    totals = diloco.totals()
    return (totals.num_syncs, totals.num_skipped, diloco.outer_hash()), stderr.getvalue()


def test_an_error_of_a_handler_does_not_stop_the_training(workers) -> None:
    (first, of_first), (second, of_second) = workers(2).run(train_with_a_broken_handler)
    assert first == second and first[:2] == (3, 1)
    for text in (of_first, of_second):
        assert "RuntimeError: reset: fragment 0, round 0: replica 1 " in text
        assert "RuntimeError: skipped: " in text


def test_each_module_logs_by_a_guarded_logger() -> None:
    package = Path(progress.__file__).parents[1]
    for path in package.rglob("*.py"):
        assert "getLogger(__name__" not in path.read_text(), path


def train_with_workers(rank: int, world: int) -> list[tuple[str, str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    peers = {"peers": mesh["replica"], "shard_group": mesh["shard"]}
    with kept_lines() as lines, DiLoCo(model, optimizer, sync_every=2, **peers):
        for step in range(4):
            train_step(model, optimizer, rank // 2, step)
    return lines


def test_worker_0_of_each_replica_speaks(workers) -> None:
    lines = workers(4).run(train_with_workers)
    assert [len(found) for found in lines] == [4, 0, 2, 0]
    assert lines[0][0][1].endswith("rounds; the figures are of its worker 0 of 2")


def test_a_replica_alone_has_no_bytes(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, diloco = attach(num_replicas=1, sync_every=2)
    with diloco:
        for step in range(4):
            train_step(model, optimizer, 0, step)
    begin, *rounds, end = messages(caplog)
    assert "link=" not in begin
    assert rounds == [f"round {n} at inner step {2 * n + 2}: replicas [0]" for n in range(2)]
    assert end == "replica 0 ends at inner step 4: 2 rounds applied"


def train_elastic(rank: int, world: int, address: str) -> list[tuple[str, str]]:
    """Replica 0 leaves after one of its first rounds; replica 1 goes on alone."""
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    peers = Elastic(address, run="test", replica=rank, founding_wait=5.0, total_steps=12)
    with kept_lines() as lines, DiLoCo(model, optimizer, sync_every=2, peers=peers) as diloco:
        while not diloco.is_done:
            train_step(model, optimizer, rank, diloco.inner_step)
            if rank == 0 and diloco.inner_step == 1:
                diloco.leave()
                time.sleep(2.0)
    return lines


def test_the_lowest_replica_that_is_left_logs_the_rounds(
    fresh_workers: Callable[..., Pool], registry: Host
) -> None:
    pool = fresh_workers(2, init_group=False)
    first, second = pool.run(train_elastic, registry.address, timeout=80)
    begin, *rounds, end = [text for _, text in first]
    assert begin.startswith("replica 0 of replicas [0, 1] begins: ")
    left = len(rounds)
    places = [f"round {n} at inner step {2 * n + 2}" for n in range(6)]
    assert [text.split(":")[0] for text in rounds] == places[:left]
    assert end.startswith(f"replica 0 ends at inner step {2 * left}: {left} round")
    begin, *rounds, end = [text for _, text in second]
    assert begin.startswith("replica 1 of replicas [0, 1] begins: ")
    assert rounds == [f"{place}: replicas [1]" for place in places[left:]]
    assert re.match(r"replica 1 ends at inner step 12: 6 rounds applied; .*; changes of the ", end)


@pytest.mark.parametrize("error", [ValueError("own"), KeyboardInterrupt()])
def test_an_error_of_the_program_comes_out_after_the_summary(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, diloco = attach(num_replicas=1, sync_every=2)
    with pytest.raises(type(error)) as raised, diloco:
        train_step(model, optimizer, 0, 0)
        raise error
    assert raised.value is error
    assert messages(caplog)[1:] == ["replica 0 ends at inner step 1: 0 rounds applied"]


def test_a_constructor_that_fails_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, diloco = attach(num_replicas=1)
    with diloco, pytest.raises(RuntimeError, match="attached to a DiLoCo"):
        DiLoCo(model, optimizer, sync_every=2, peers="alone")
    assert len(messages(caplog)) == 2


def test_a_round_that_is_skipped_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, diloco = attach(num_replicas=1, sync_every=1, nonfinite=NonFinite("skip"))
    with closing(diloco):
        model.head.bias.grad = torch.full((1,), math.nan)
        optimizer.step()
    assert [text.split(": ")[1] for text in messages(caplog)[1:]] == [
        "replicas [0], 1 skipped",
        "0 rounds applied, 1 skipped",
    ]


def test_a_trainer_that_shows_the_figures_gets_no_line_for_each_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer, diloco = attach(num_replicas=1, sync_every=1)
    with diloco:
        figures = Figures(diloco)
        train_step(model, optimizer, 0, 0)
        assert figures.take()
    assert len(messages(caplog)) == 2
