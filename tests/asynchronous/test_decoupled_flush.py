"""The end of decoupled training: ``flush`` brings the last steps into the shared model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from async_helpers import wait_until
from decoupled_processes import SIZE, Play, attach, make_server

from diloco_comm.asynchronous import DecoupledDiLoCo, DecoupledServer
from diloco_comm.asynchronous.decoupled.settings import DecoupledSettings
from diloco_comm.asynchronous.decoupled.syncer import FragmentRound
from diloco_comm.asynchronous.decoupled.tape import replay
from diloco_comm.asynchronous.link import read_status
from diloco_comm.asynchronous.messages import Kind, Message
from diloco_comm.asynchronous.window import WINDOW_FRAGMENTS

CARRY = {"receipt": "carry"}


def train(pair: tuple, steps: int) -> None:
    """Subtract 1 from every element in each step."""
    model, learner = pair
    for _ in range(steps):
        model.descend(torch.ones(SIZE))
        learner.step()


def flush_later(learner: DecoupledDiLoCo, seconds: float = 60.0) -> Callable[[], bool]:
    """Flush in another thread; return a function that waits for the result."""
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(learner.flush(seconds)))
    thread.start()

    def result() -> bool:
        thread.join(90)
        return results.pop()

    return result


def check_books(learner: DecoupledDiLoCo, steps: int) -> None:
    for ledger in (*learner.metrics.step_ledgers, *learner.metrics.token_ledgers):
        assert (ledger.learned, ledger.applied) == (steps, steps)
        assert ledger.under_way == ledger.kept == ledger.lost == 0


def shared_by(server: DecoupledServer) -> set[float]:
    """Return the values that the elements of a stopped server's shared model have."""
    return {value for each in server.parameters() for flat in each for value in flat.tolist()}


def steps_on_tape(folder: Path) -> dict[tuple[int, str], int]:
    """Return the merged inner steps by fragment and learner; fail if a report counts twice."""
    merged: dict[tuple[int, str], int] = {}
    seen: set[tuple[int, str, int]] = set()

    def note(record: dict, model: object) -> None:
        for name, seq, _, steps, _ in record["reports"]:
            p = record["fragment"]
            assert (p, name, seq) not in seen
            seen.add((p, name, seq))
            merged[p, name] = merged.get((p, name), 0) + steps

    replay(folder, note)
    return merged


@pytest.mark.parametrize("shards", [1, 2])
def test_all_steps_of_a_learner_are_in_the_shared_model(shards: int) -> None:
    """120 steps with a call every 50 steps: the flush shares the last 20 steps too."""
    with ExitStack() as stack:
        settings = {**CARRY, "sync_every": 50}
        servers = [
            stack.enter_context(make_server({**settings, "shard": f"{i}/{shards}"}))
            for i in range(shards)
        ]
        pair = attach([server.address for server in servers], "a")
        train(pair, 120)
        assert pair[1].flush(60.0)
        check_books(pair[1], 120)
        with pair[1].outer_parameters():
            assert torch.equal(pair[0].values(), torch.full((SIZE,), -120.0))
        # A second flush has nothing to share, and a later one has what was trained since.
        versions = pair[1].metrics.versions
        assert pair[1].flush(60.0) and pair[1].metrics.versions == versions
        train(pair, 7)
        assert pair[1].flush(60.0)
        check_books(pair[1], 127)
        pair[1].close()
    for server in servers:
        assert shared_by(server) == {-127.0}


def test_a_flush_without_the_remainder_waits_for_what_is_under_way() -> None:
    with make_server({**CARRY, "sync_every": 50}) as server:
        pair = attach(server.address, "a")
        train(pair, 3)
        assert pair[1].flush(60.0, remainder=False)
        assert all(book.kept == 3 for book in pair[1].metrics.step_ledgers)
        pair[1].close()
    assert shared_by(server) == {0.0}


def test_a_flush_takes_a_call_that_comes_after_its_first_look() -> None:
    with make_server({**CARRY, "fragments": 1}) as server:
        pair = attach(server.address, "a")
        _, learner = pair
        carrier, poll, note = (
            learner._shards[0].carrier,
            learner.poll,
            learner._shards[0].carrier.note,
        )
        notes: list[int] = []

        def noted() -> int:
            notes.append(note())
            return notes[-1]

        def look_and_wait() -> None:
            poll()
            learner.poll = poll  # type: ignore[method-assign]
            if not learner._learner.fragments[0].is_busy:
                wait_until(lambda: carrier.calls() and carrier.is_settled_after(notes[0]), 20)

        train(pair, 4)
        learner.poll, carrier.note = look_and_wait, noted  # type: ignore[method-assign]
        assert learner.flush(20.0, remainder=False)
        assert learner.metrics.merged == 1
        learner.close()


@contextmanager
def training(pair: tuple) -> Iterator[Callable[[], int]]:
    """Train in another thread without a pause; give a function that returns the steps so far."""
    is_over, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while not is_over.is_set():
                train(pair, 1)
                is_over.wait(0.002)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: pair[1].metrics.steps
    finally:
        is_over.set()
        thread.join(60)
    assert not errors


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_learner_ends_early_and_the_other_one_trains_on(tmp_path: Path, quorum: int) -> None:
    """A learner that has ended need not close before the other learner merges alone."""
    settings = {**CARRY, "sync_every": 50, "quorum": quorum}
    with make_server(settings, snapshot=tmp_path, keep_tape=True) as server:
        early, late = attach(server.address, "early"), attach(server.address, "late")
        train(early, 20)
        with training(late) as steps:
            wait_until(lambda: steps() > 5)
            assert early[1].flush(60.0)
            check_books(early[1], 20)
            before, versions = steps(), late[1].metrics.versions
            # The schedule goes on without the learner that rests.
            wait_until(lambda: steps() > before + 120 and late[1].metrics.versions > versions, 60)
        assert late[1].flush(60.0)
        num_late = late[1].metrics.steps
        check_books(late[1], num_late)
        for _, learner in (early, late):
            learner.close()
    wanted = {(p, name): n for p in (0, 1) for name, n in (("early", 20), ("late", num_late))}
    assert steps_on_tape(tmp_path) == wanted


def test_a_flush_waits_for_the_quorum_until_the_other_learner_rests_too() -> None:
    with make_server({**CARRY, "sync_every": 50, "quorum": 2}) as server:
        one, other = attach(server.address, "one"), attach(server.address, "other")
        train(one, 10)
        assert not one[1].flush(0.5) and one[1].metrics.merged == 0
        # This learner has nothing to report.
        assert other[1].flush(60.0)
        assert one[1].flush(60.0)
        check_books(one[1], 10)
        # With its next step the other learner counts again, once the syncer has heard of that.
        train(other, 1)
        wait_until(lambda: read_status(server.address)["learners"]["other"]["steps"] == 1)
        train(one, 1)
        assert not one[1].flush(0.5)
        assert other[1].flush(60.0) and one[1].flush(60.0)
        for pair, steps in ((one, 11), (other, 1)):
            check_books(pair[1], steps)
            pair[1].close()


def test_a_syncer_that_is_killed_in_a_flush_counts_every_step_once(tmp_path: Path) -> None:
    settings = {**CARRY, "sync_every": 50, "quorum": 2}
    with Play(tmp_path, settings) as play:
        one, other = attach(play.addresses, "w0"), attach(play.addresses, "w1")
        for pair in (one, other):
            train(pair, 10)
        result = flush_later(one[1])

        def has_reported() -> bool:
            return all("w0" in each["reported"] for each in play.status()["fragments"])

        wait_until(has_reported)
        play.syncer.kill()
        play.syncer.wait(60)
        # Its reports are gone with the process; a step goes on without a syncer.
        train(other, 1)
        play.start_syncer()
        assert other[1].flush(60.0) and result()
        check_books(one[1], 10)
        check_books(other[1], 11)
        for _, learner in (one, other):
            learner.close()
        play.end()
        assert play.check_tapes() == {(0, 0): 10, (0, 1): 10, (1, 0): 11, (1, 1): 11}


def test_a_learner_that_is_killed_in_a_flush_and_comes_back(tmp_path: Path) -> None:
    """The report that has arrived counts once; the newcomer begins with the shared model."""
    with Play(tmp_path, {**CARRY, "sync_every": 50, "quorum": 2}) as play:
        other = attach(play.addresses, "w1")
        ended = play.learner(0, updates=10)

        def has_reported() -> bool:
            return all("w0" in each["reported"] for each in play.status()["fragments"])

        wait_until(has_reported, 60)
        ended.kill()
        ended.wait(60)
        wait_until(lambda: set(play.status()["learners"]) == {"w1"})
        again = play.learner(0, updates=6)
        train(other, 5)
        assert other[1].flush(60.0)
        assert again.wait(60) == 0
        check_books(other[1], 5)
        other[1].close()
        play.end()
        assert play.check_tapes(0) == {(0, 0): 16, (0, 1): 16, (1, 0): 5, (1, 1): 5}


def spoiled(learner: DecoupledDiLoCo, times: int) -> None:
    """Put a NaN into so many of the learner's next reports."""
    encode = learner._learner.reports

    def reports() -> list:
        nonlocal times
        made = encode()
        for _, _, payloads in made:
            if times > 0:
                payloads[0][:4] = torch.tensor([0, 0, 192, 127], dtype=torch.uint8)
            times -= 1
        return made

    learner._learner.reports = reports  # type: ignore[method-assign]


def test_a_report_that_is_refused_in_a_flush_is_called_for_again() -> None:
    with make_server({**CARRY, "fragments": 1}) as server:
        pair = attach(server.address, "a")
        spoiled(pair[1], 2)
        train(pair, 1)
        assert pair[1].flush(60.0) and pair[1].metrics.refused == 2
        check_books(pair[1], 1)
        pair[1].close()
    assert shared_by(server) == {-1.0}


def test_a_block_says_which_steps_are_in_no_shared_model() -> None:
    """The syncer refuses every report until the flush at the end of the block gives up."""
    with make_server({**CARRY, "sync_every": 50}) as server:
        pair = attach(server.address, "a", timeout=1.0)
        spoiled(pair[1], 1_000_000)
        with pytest.warns(RuntimeWarning, match="learner a .* is lost, up to inner step 7"):
            with pair[1]:
                train(pair, 7)
    assert shared_by(server) == {0.0}


def test_a_flush_says_that_a_commit_has_replaced_steps() -> None:
    """The receipt ``overwrite`` keeps no progress that is in no merged report."""
    with make_server({"fragments": 1, "sync_every": 50, "receipt": "overwrite"}) as server:
        one, other = attach(server.address, "one"), attach(server.address, "other")
        spoiled(one[1], 1_000_000)
        train(one, 3)
        train(other, 2)
        result = flush_later(one[1])
        assert other[1].flush(60.0)
        assert not result()
        (book,) = one[1].metrics.step_ledgers
        assert (book.applied, book.lost, book.kept) == (0, 3, 0)
        check_books(other[1], 2)
        for _, learner in (one, other):
            learner.close()
    assert shared_by(server) == {-2.0}


def test_a_flush_of_many_fragments_looks_at_each_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window of fragments is on its way, so that each message finds room in its queue."""
    size, looks = 200, [0]
    merge = FragmentRound.merge

    def counted(here: FragmentRound, now: float) -> object:
        looks[0] += 1
        return merge(here, now)

    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(size)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = DecoupledSettings(
        fragments=size, sync_every=size, gamma=0.0, wire="fp32", receipt="carry"
    )
    server = DecoupledServer(settings)
    offered: set[int] = set()
    most, unsent = [0, 0], list[Message]()
    sending, offering = server._send, server._handlers[Kind.OFFER]

    def send(peer: bytes, message: Message, *rest: int) -> bool:
        is_sent = sending(peer, message, *rest)
        if not is_sent:
            unsent.append(message)
        if message.kind == Kind.VERDICT:
            offered.discard(message.fragment)
        return is_sent

    def offer(session: object, message: Message) -> None:
        offered.add(message.fragment)
        most[0] = max(most[0], len(offered))
        here = server.state.told[session.peer]  # type: ignore[attr-defined]
        most[1] = max(most[1], len(here.on_way))
        offering(session, message)  # type: ignore[arg-type]

    for part in (server._receiver, server._teller):
        part._send = send
    server._handlers[Kind.OFFER] = offer
    with server, DecoupledDiLoCo(model, optimizer, server=server.address, name="a") as learner:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for _ in range(3):
            optimizer.step()
        monkeypatch.setattr(FragmentRound, "merge", counted)
        assert learner.flush(60.0)
        monkeypatch.undo()
        assert min(learner.metrics.versions) == 1
    assert size <= looks[0] <= 10 * size
    assert 1 <= most[0] <= WINDOW_FRAGMENTS and 1 <= most[1] <= WINDOW_FRAGMENTS
    assert unsent == []
