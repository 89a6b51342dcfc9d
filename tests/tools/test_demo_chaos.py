"""The chaos demo: real processes that are killed, stopped and started, and no process left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cli_helpers import check_documented, check_misuse, run_cli
from commands import running
from rich.console import Console
from test_demo import DEMO, running_in_group, wait_for_line

from diloco_comm_tools.common.console import present
from diloco_comm_tools.demo.chaos import STANDING, STARTING, TRAINING, WAITING, Record, run
from diloco_comm_tools.demo.crew import LEFT_BEHIND, Ended, Entered, Place, Replica, Stepped
from diloco_comm_tools.demo.model import ModelConfig
from diloco_comm_tools.demo.settings import Chaos

TINY = Chaos(
    pause_s=0.5,
    outage_s=1.5,
    sync_every=5,
    step_s=0.03,
    inner_lr=1e-2,
    suspect_after_s=3.0,
    model=ModelConfig(context=16, width=32, num_layers=1),
)
PAGE = "tutorials/demo.md"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_events_have_their_effect(tmp_path: Path) -> None:
    text = Console(file=(tmp_path / "text").open("w"), force_terminal=False, width=100)
    results = run(TINY, text)
    present(text, results, tmp_path, 1.0, as_json=False)
    text.file.close()
    # The loss of a model this small says nothing.
    assert [claim.text for claim in results.claims()[:-1] if not claim.holds] == []
    numbers = json.loads((tmp_path / "chaos.json").read_text())
    check_documented(numbers, PAGE)
    for rows in ("events", "views"):
        check_documented(numbers[rows][0], PAGE)
    assert [event["kind"] for event in numbers["events"]] == [
        *("begin", "kill", "registry down", "registry up", "join", "stop", "resume", "end")
    ]
    assert numbers["views"][-1]["members"] == [0, 1, 2, 4]
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")
    printed = (tmp_path / "text").read_text()
    assert "replica 3 is killed" in printed and "\x1b[" not in printed


@pytest.mark.nightly("21 s; test_demo has the end of all processes of a demo")
@pytest.mark.timeout(300)
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    with running_in_group([*DEMO, "--chaos", "--out", tmp_path]) as process:
        wait_for_line(process.stdout.readline, "replicas 0 to 3 begin")
        children = psutil.Process(process.pid).children(recursive=True)
        # The registry and the replicas are forked by a child of the demo.
        assert len([child for child in children if child.ppid() != process.pid]) == 5
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "ended by SIGINT" in errors and "Traceback" not in errors
    assert not psutil.wait_procs(children, timeout=20)[1]


# Replicas of a crew that do nothing.
IDLE = """
import signal, sys
from pathlib import Path
from diloco_comm_tools.demo.crew import Crew

def idle(pipe, place, given):
    pipe.send("ready")
    signal.pause()

if __name__ == "__main__":
    with Crew(idle, None, Path(sys.argv[1]), []) as crew:
        for number in (0, 1):
            crew.start(number)
        while not all(replica.pipe.poll() for replica in crew.replicas.values()):
            pass
        crew.stop(1)
        print("ready", flush=True)
        sys.stdin.read()
"""


@pytest.mark.nightly("10 s; test_demo has the end of all processes of a demo")
def test_all_end_when_the_parent_is_killed_also_one_that_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text(IDLE)
    command = [sys.executable, tmp_path / "idle.py", tmp_path]
    with running(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        wait_for_line(process.stdout.readline, "ready")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len([child for child in children if child.ppid() != process.pid]) == 3
    assert not psutil.wait_procs(children, timeout=20)[1]


@pytest.mark.parametrize("option", ["--replicas", "--steps", "--gbps", "--rtt-ms"])
def test_options_of_the_comparison_are_refused(option: str, tmp_path: Path) -> None:
    ended = run_cli("demo", "--chaos", "--out", tmp_path / "demo", option, "4")
    check_misuse(ended, f"--chaos has replicas and times of its own: leave out {option}")
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sync-every", "0"], "--sync-every must be at least 1, got 0"),
        (["--data", "no-such-file"], "cannot read --data no-such-file"),
    ],
)
def test_wrong_options_are_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    check_misuse(run_cli("demo", "--chaos", "--out", tmp_path, *arguments), message)


def test_a_folder_that_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = run_cli("demo", "--chaos", "--out", tmp_path / "file" / "demo")
    check_misuse(ended, "cannot write --out")


def replica(number: int, process: int) -> Replica:
    return Replica(Place(number, process, ""), None, None, started=10.0)  # type: ignore[arg-type]


def test_bands_tell_training_from_waiting_and_from_standing_still() -> None:
    record = Record(10.0, step_s=0.1)
    one = replica(1, 0)
    record.started(one)
    record.add(one, Stepped(12.0, 1, 5.0))
    record.add(one, Stepped(13.0, 2, 4.0))  # a slow round is no wait
    record.add(one, Entered(15.0, 2, (0, 1), (), (3,), 1.5, 0))
    record.add(one, Stepped(15.2, 3, 3.0))
    record.add(one, Stepped(16.0, 4, 3.0))
    track = record.track_of(one)
    track.stopped, track.resumed = 6.1, 9.0
    record.add(one, Ended(20.0, LEFT_BEHIND))
    bands = [(round(band.begin, 1), round(band.end, 1), band.what) for band in record.bands(track)]
    assert bands == [
        (0.0, 2.0, STARTING),
        (2.0, 3.0, TRAINING),
        (3.0, 5.2, WAITING),
        (5.2, 6.0, TRAINING),
        (6.0, 6.1, TRAINING),
        (6.1, 9.0, STANDING),
        (9.0, 10.0, WAITING),
    ]
    assert record.views[2].seconds == 1.5


def test_rates_and_losses_are_of_all_replicas() -> None:
    record = Record(0.0, step_s=0.1)
    for process in range(2):
        one = replica(process, process)
        record.started(one)
        for i in range(20):
            record.add(one, Stepped(0.05 + 0.1 * i, i, 4.0 + process))
    assert record.rate(tokens_per_step=8, width_s=1.0) == [(0.5, 160.0)]
    assert record.mean_loss(window_s=1.0, every_s=1.0) == [(1.0, pytest.approx(4.5))]
    assert record.num_steps_between(0.0, 0.5) == 10
