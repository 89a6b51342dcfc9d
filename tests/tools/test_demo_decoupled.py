"""The demo of decoupled training: real processes, one slow and one killed, and the files."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from cli_helpers import check_documented, check_misuse, run_cli
from rich.console import Console

from diloco_comm_tools.common.console import present
from diloco_comm_tools.demo.crew import Stepped
from diloco_comm_tools.demo.decoupled import Results, Track, run
from diloco_comm_tools.demo.model import ModelConfig
from diloco_comm_tools.demo.settings import Decoupled

TINY = Decoupled(
    num_replicas=3,
    num_steps=80,
    sync_every=4,
    step_s=0.03,
    model=ModelConfig(context=16, width=32, num_layers=1),
)
PAGE = "tutorials/demo.md"


@pytest.mark.timeout(600)
def test_the_others_go_on(tmp_path: Path) -> None:
    text = Console(file=(tmp_path / "text").open("w"), force_terminal=False, width=160)
    results = run(TINY, text)
    present(text, results, tmp_path, 1.0, as_json=False)
    text.file.close()
    normal, slow, killed = results.tracks
    assert killed.ended is None and killed.steps[-1].at < results.killed_at + 1.0
    for track in (normal, slow):
        assert track.steps[-1].at > results.killed_at and track.ended is not None
        assert track.ended.merged and track.ended.sent_bytes and track.ended.received_bytes
    assert len(slow.steps) < len(normal.steps)
    before, after = results.versions(0)
    assert 0 < before < after
    # The syncer knows of the end of the killed learner, and merges without it.
    assert results.status["lost"] == 1
    numbers = json.loads((tmp_path / "decoupled.json").read_text())
    check_documented([*numbers, *numbers["learners"][0], *numbers["learners"][0]["end"]], PAGE)
    assert [bool(one["end"]) for one in numbers["learners"]] == [True, True, False]
    assert len(numbers["claims"]) == 4
    assert (tmp_path / "decoupled.png").read_bytes().startswith(b"\x89PNG")
    printed = (tmp_path / "text").read_text()
    assert "learner 2 is killed" in printed and "2 killed" in printed and "\x1b[" not in printed
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    # The fork server may live on; it has no child.
    assert sum("forkserver" in command for command in commands) <= 1


def results_of(step_s: dict[int, tuple[float, float]]) -> Results:
    """Return results of learners with these seconds a step before and after the kill at 10 s."""
    tracks = [Track() for _ in range(3)]
    for index, (before, after) in step_s.items():
        at = 0.0
        while at < 20.0:
            at += before if at < 10.0 else after
            if index != 2 or at < 10.0:
                tracks[index].steps.append(Stepped(at, int(at), 1.0))
    return Results(TINY, tracks, 0.0, 10.0, 20.0)


def test_a_run_in_which_the_others_slow_down_is_told() -> None:
    good = results_of({0: (0.1, 0.1), 1: (0.3, 0.3), 2: (0.1, 0.1)})
    good.losses = lambda: (5.0, 3.0)  # type: ignore[method-assign]
    assert [claim.holds for claim in good.claims()] == [True] * 4
    slower = results_of({0: (0.1, 0.15), 1: (0.3, 0.3), 2: (0.1, 0.1)})
    slower.losses = lambda: (5.0, 5.5)  # type: ignore[method-assign]
    assert [claim.holds for claim in slower.claims()] == [False, True, True, False]
    waiting = results_of({0: (0.3, 0.3), 1: (0.3, 0.3), 2: (0.3, 0.3)})
    waiting.losses = lambda: (5.0, 3.0)  # type: ignore[method-assign]
    assert [claim.holds for claim in waiting.claims()] == [True, False, True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "2"], "--replicas must be at least 3 with --decoupled, got 2"),
        (["--sync-every", "0"], "--sync-every must be at least 1, got 0"),
        (["--steps", "10"], "--steps must be at least twice --sync-every 10, got 10"),
        (["--gbps", "1"], "--decoupled has no emulated link: leave out --gbps"),
        (["--rtt-ms", "1"], "--decoupled has no emulated link: leave out --rtt-ms"),
        (["--chaos"], "--chaos and --decoupled exclude each other"),
        (["--data", "no-such-file"], "cannot read --data no-such-file"),
    ],
)
def test_misuse(arguments: list[str], message: str, tmp_path: Path) -> None:
    check_misuse(run_cli("demo", "--decoupled", "--out", tmp_path, *arguments), message)
