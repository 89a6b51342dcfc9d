"""Storms hold the invariants of elastic membership, and each check finds what the check is for."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.elastic import checks
from benchmarks.elastic.checks import Life, Metrics, Resources
from benchmarks.elastic.ledger_replica import RUN, Applied, LedgerSettings
from benchmarks.elastic.schedules import make
from benchmarks.elastic.storm_report import results_of, violations
from benchmarks.elastic.storms import Storm, run
from diloco_comm.elastic.registry.journal import Journal
from diloco_comm.group.records import NO_HASH, Attempt, Key, Record
from diloco_comm_tools.demo.crew import DONE, Entered

SETTINGS = LedgerSettings(sync_every=4, step_s=0.05, suspect_after_s=5.0)


@pytest.mark.nightly("make nightly soaks for minutes, too; each invariant has a test of its own")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_invariants_hold_for_some_seconds(tmp_path: Path) -> None:
    schedule = make("soak", 4, 10.0, 2.0, seed=SEED)
    storm = run(schedule, 4, replace(SETTINGS, backend="gloo"), tmp_path)
    assert violations(storm) == []
    results = results_of(storm)
    assert {"kill", "registry"} <= results["faults"].keys()
    assert results["rounds"] > 10 and results["views"] > 1


SEED = 31


@pytest.mark.nightly("a minute of processes; the moments are drawn from a seed by the schedule")
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("has_relay", [False, True])
def test_disturbed_joins_hold_the_invariants(tmp_path: Path, has_relay: bool) -> None:
    schedule = make("moments", 4, 30.0, 15.0, seed=0)
    assert violations(run(schedule, 4, SETTINGS, tmp_path, has_relay=has_relay)) == []


def key(number: int, process: int | None = None) -> Key:
    return Key(number, bytes([number if process is None else process]) * 16)


def following(before: Record | None, *members: Key, inner_step: int = 0) -> Record:
    """Return the record that follows another, or the first one, with these members."""
    numbers = {one.number for one in members}
    base = () if before is None else before.members
    return Record(
        number=1 if before is None else before.number + 1,
        parent=NO_HASH if before is None else before.hash,
        table=bytes(16),
        founding=NO_HASH if before is None else before.run_id,
        attempt=Attempt(members[0].nonce, 1),
        members=members,
        joined=tuple(one.number for one in members if one not in base),
        inner_step=inner_step,
        left_out=tuple(one.number for one in base if one.number not in numbers),
    )


def chain() -> list[Record]:
    """Three replicas train; one dies and comes back; at last the run ends."""
    first = following(None, key(0), key(1), key(2))
    second = following(first, key(0), key(1), inner_step=40)
    third = following(second, key(0), key(1), key(2, 9), inner_step=60)
    last = replace(following(third, *third.members, inner_step=80), is_finished=True)
    return [first, second, third, last]


def contents(records: list[Record]) -> list[bytes]:
    return [record.to_bytes() for record in records]


def test_a_journal_gives_back_all_records(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for record in contents(chain()):
        journal.append([(RUN, record), ("another-run", b"x")])
    journal.close()
    assert list(checks.records_of(tmp_path / "journal", RUN)) == contents(chain())


def test_a_journal_is_read_again_and_again(tmp_path: Path) -> None:
    crew: Any = SimpleNamespace(replicas={}, journal=tmp_path)
    storm = Storm(crew, None, None, [], 1, SETTINGS)  # type: ignore[arg-type]
    written = contents(chain())

    def read_after(*records: bytes) -> list[bytes]:
        journal = Journal(tmp_path)
        for record in records:
            journal.append([(RUN, record)])
        journal.close()
        storm.read_journal()
        return storm.records

    assert read_after(*written[:3]) == written[:3]
    # The registry was killed before it had begun; then it keeps the newest record alone.
    storm.read_journal()
    assert storm.records == written[:3]
    assert read_after(written[3]) == written
    (tmp_path / "journal").unlink()
    # A record that was lost is no record that was read before.
    assert read_after(*written[:2]) == [*written, *written[:2]]


def test_a_chain_is_one() -> None:
    assert checks.check_chain(contents(chain())) == (chain(), [])
    # A process takes the place of another one of its number at once.
    first = chain()[0]
    again = following(first, key(0), key(1), key(2, 9))
    assert checks.check_chain(contents([first, again]))[1] == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda v: [v[0], v[2], v[3]], "view 3 follows 1"),
        (lambda v: v[1:], "view 2 follows None"),
        (lambda v: [v[0], replace(v[1], inner_step=8), *v[2:]], "view 3 does not name the record"),
        (lambda v: [*v[:3], replace(v[3], founding=bytes([7]) * 16)], "is of another founding"),
        (lambda v: [*v, following(v[3], *v[3].members)], "view 5 follows the end of the run"),
        (lambda v: [v[0], replace(v[1], left_out=())], r"leaves out (), and [2] have left"),
        (lambda v: [*v[:2], replace(v[2], joined=())], r"lets in (), and [2] are new"),
    ],
)
def test_a_broken_chain_is_found(change, text: str) -> None:  # type: ignore[no-untyped-def]
    wrong = checks.check_chain(contents(change(chain())))[1]
    assert any(text in one for one in wrong), wrong


def entered(view: int, *members: int) -> Entered:
    return Entered(0.0, view, members, (), (), 0.0, 0)


def applied(number: int, view: int, ledger: dict[int, float], digest: str = "same") -> Applied:
    return Applied(0.0, number, view, 0, f"{digest}{number}", tuple(ledger.items()))


def two_lives() -> dict[int, Life]:
    """Two replicas that learn four steps each in two rounds, and end together."""
    lives = {p: Life(number=p, process=p, how=DONE, outer_hash="end") for p in (0, 1)}
    for life in lives.values():
        life.steps = [0.0] * 8
        life.entered = [entered(1, 0, 1)]
        life.applied = [applied(0, 1, {0: 2.0, 1: 2.0}), applied(1, 1, {0: 4.0, 1: 4.0})]
    return lives


def test_sound_lives_violate_nothing() -> None:
    lives = two_lives()
    assert checks.check_digests(lives.values()) == []
    assert checks.check_ledger(lives) == ({0: 8, 1: 8}, [])
    assert checks.check_views(lives.values(), [following(None, key(0), key(1))]) == []


def test_other_digests_views_and_ends_are_found() -> None:
    lives = two_lives()
    lives[1].applied[1] = applied(1, 2, {0: 4.0, 1: 4.0}, "other")
    lives[1].outer_hash = "another end"
    found = checks.check_digests(lives.values())
    assert [one.partition(":")[0] for one in found] == ["I1", "I2", "I1"]
    assert checks.check_views(lives.values(), [following(None, key(0))])


@pytest.mark.parametrize(
    ("ledger", "text"),
    [
        ({0: 2.0, 1: 4.0}, "process 0 (done) took 8 inner steps, and committed rounds hold 4"),
        ({0: 6.0, 1: 4.0}, "process 0 (done) took 8 inner steps, and committed rounds hold 12"),
        ({0: 4.2, 1: 4.0}, "round 1 holds 4.400 steps of process 0"),
        ({0: 4.0, 1: 4.0, 7: 1.0}, "holds steps of processes [0, 1, 7]"),
    ],
)
def test_a_step_that_is_lost_or_counts_twice_is_found(ledger: dict[int, float], text: str) -> None:
    lives = two_lives()
    if 7 in ledger:
        lives[7] = Life(number=7, process=7, steps=[0.0, 0.0], entered=[entered(2, 7)])
    for process in (0, 1):
        lives[process].applied[1] = applied(1, 1, ledger)
    assert any(text in one for one in checks.check_ledger(lives)[1])


def test_a_leak_is_found() -> None:
    flat = [Resources(3, 40 + i % 2, 12, 200.0) for i in range(30)]
    assert checks.check_flat("a replica", flat, 24.0) == []
    leaking = [Resources(3, 40 + i, 12 + i, 200.0 + 4 * i) for i in range(30)]
    assert len(checks.check_flat("a replica", leaking, 24.0)) == 3


def test_a_process_that_has_ended_holds_nothing() -> None:
    with subprocess.Popen(["true"], stdin=subprocess.DEVNULL) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        # Its parent has yet to wait for the process, whose folder in /proc stands therefore.
        with pytest.raises(ProcessLookupError, match="has ended"):
            checks.resources(ended.pid, 3)
    assert checks.resources(os.getpid(), 3).rss_mib > 0


# The parser refuses a fall in one text, and not from one text to the next.
EXPOSED = """# TYPE sent_bytes counter
# UNIT sent_bytes bytes
sent_bytes_total{{replica="1"}} {value}
{created}# EOF
"""


@pytest.mark.parametrize(
    ("answer", "violations"),
    [
        (b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n", ["with status 500"]),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n# E", []),
        (b"HTTP/1.1 2", []),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n\xff\xfe\xfd\n",
            ["the parser refuses them"],
        ),
        (b"", []),
    ],
)
def test_an_answer_that_breaks_off_is_no_violation_and_a_wrong_one_is(
    answer: bytes, violations: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        metrics = Metrics(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics")
        metrics.read()
        server.join()
    assert len(metrics.wrong) == len(violations)
    assert all(text in wrong for text, wrong in zip(violations, metrics.wrong, strict=True))


@pytest.mark.parametrize(
    ("scrapes", "violations"),
    [
        ([(3, 7.0), (3, 7.0), (9, 7.0)], []),
        ([(3, 7.0), (1, 8.0), (2, 8.0)], []),
        ([(3, 7.0), (1, 7.0), (2, 7.0)], ["fell from 3 to 1"]),
        ([(3, 7.0), (1, 8.0), (0, 8.0)], ["fell from 1 to 0"]),
        ([(3, None)], ["has no time of creation"]),
        ([("three", 7.0)], ["the parser refuses them"]),
    ],
)
def test_a_counter_that_falls_is_found(
    scrapes: list[tuple[object, float | None]], violations: list[str]
) -> None:
    metrics = Metrics("")
    for value, created in scrapes:
        line = "" if created is None else f'sent_bytes_created{{replica="1"}} {created}\n'
        metrics.take(EXPOSED.format(value=value, created=line))
    assert len(metrics.wrong) == len(violations)
    assert all(text in wrong for text, wrong in zip(violations, metrics.wrong, strict=True))
    assert metrics.num_scrapes == len(scrapes)
