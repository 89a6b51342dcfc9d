"""A small demo: real processes, real text, the files that it writes, and no process left."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_helpers import check_documented, check_misuse, help_examples, run_cli
from commands import CLI, run_command, running

from diloco_comm import Streaming
from diloco_comm_tools.demo.data import Batches, load_corpus, validation_windows
from diloco_comm_tools.demo.replica import overlap_of
from diloco_comm_tools.demo.settings import ROWS, STREAMING, Comparison

pytestmark = pytest.mark.usefixtures("forked_programs")

DEMO = [*CLI, "demo"]
NUM_REPLICAS = 3
NUM_STEPS = 20
SYNC_EVERY = 10
TINY = ["--replicas", f"{NUM_REPLICAS}", "--steps", f"{NUM_STEPS}", "--sync-every", f"{SYNC_EVERY}"]
FAST_LINK = ["--gbps", "10", "--rtt-ms", "0"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """Run the demo once; return its progress and tables, its JSON and its folder."""
    out = tmp_path_factory.mktemp("demo")
    # The example of the help, with options behind it that make it short.
    example = help_examples("demo")["demo"][0]
    command = [*DEMO, *example.split()[2:], *TINY, *FAST_LINK, "--out", str(out), "--json"]
    ended = run_command(command)
    assert ended.returncode == 0, ended.stderr
    check_documented(json.loads(ended.stdout), "tutorials/demo.md")
    assert ended.stdout == (out / "demo.json").read_text()
    return ended.stderr, json.loads(ended.stdout), out


def test_all_rows_train_from_the_same_weights(demo: tuple[str, dict[str, Any], Path]) -> None:
    rows = demo[1]["rows"]
    assert [row["name"] for row in rows] == [row.name for row in ROWS]
    assert len({row["initial_loss"] for row in rows}) == 1
    for row in rows:
        assert math.isfinite(row["final_loss"])
        assert row["final_loss"] < row["initial_loss"]
        assert [point["step"] for point in row["validation"]] == [0, 10, 20]
        assert [point["step"] for point in row["training"]] == [10, 20]


def test_replicas_end_bit_identical(demo: tuple[str, dict[str, Any], Path]) -> None:
    final_hashes = set()
    for row in demo[1]["rows"]:
        hashes = [replica["outer_hash"] for replica in row["replicas"]]
        assert len(hashes) == NUM_REPLICAS
        assert len(set(hashes)) == 1
        assert row["is_identical"]
        assert hashes[0][:10] in demo[0]
        final_hashes.add(hashes[0])
    # Different methods end at different models: the hash is of the trained parameters.
    assert len(final_hashes) == len(ROWS)


def test_bytes_are_those_of_the_wire(demo: tuple[str, dict[str, Any], Path]) -> None:
    """Each replica sends 2 (W-1)/W of the model per exchange, and headers of some hundred bytes."""
    rows = {row["name"]: row for row in demo[1]["rows"]}
    bits = {"fp32": 32, "int8": 8 + 16 / 256, "int4": 4 + 16 / 256}
    for name, row in rows.items():
        num_exchanges = NUM_STEPS if name == "DDP fp32" else NUM_STEPS // SYNC_EVERY
        # Half of the streamed model is sent first at step 5, and once more at the end.
        num_exchanges += 0.5 if row["method"] == "Streaming" else 0
        for replica in row["replicas"]:
            model_bytes = replica["num_parameters"] * bits[row["wire"]] / 8
            payload = num_exchanges * model_bytes * 2 * (NUM_REPLICAS - 1) / NUM_REPLICAS
            # A replica that owns a short run sends a little less than the others.
            assert 0.995 * payload < replica["sent_bytes"] < 1.03 * payload, name
    ratio = rows["DDP fp32"]["sent_bytes"] / rows["DiLoCo int8"]["sent_bytes"]
    assert demo[1]["bytes_ratio"] == pytest.approx(ratio)


def test_output_names_what_a_reader_needs(demo: tuple[str, dict[str, Any], Path]) -> None:
    text, results, out = demo
    assert "10 Gbit/s" in text and "emulated" in text
    assert f"{results['unigram_entropy_nats']:.3f}" in text
    assert str(out / "demo.png") in text
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "\x1b[" not in text, "no terminal codes in a log"


@pytest.fixture
def running_demo(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A demo that trains for minutes, in a separate process group, and its children."""
    with running_in_group(
        [*DEMO, "--replicas", "2", "--steps", "100000", "--out", tmp_path]
    ) as process:
        wait_for_line(process.stdout.readline, "2 replicas train")
        # The replicas are forked by a child of the demo.
        until = time.monotonic() + 60.0
        children: list[psutil.Process] = []
        while sum(child.ppid() != process.pid for child in children) < 2:
            assert time.monotonic() < until
            time.sleep(0.3)
            children = psutil.Process(process.pid).children(recursive=True)
        yield process, children


@contextmanager
def running_in_group(command: Sequence[object]) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a process group of its own, which gets what a terminal sends."""
    options = {"start_new_session": True, "preexec_fn": heed_control_c}
    with running(command, stderr=subprocess.PIPE, **options) as process:
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def heed_control_c() -> None:
    """A job that a shell runs in the background ignores Ctrl-C, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_line(readline: Callable[[], str], text: str) -> None:
    while line := readline():
        if text in line:
            return
    raise AssertionError(f"the output ended before {text!r}")


@pytest.mark.nightly("21 s; test_dead_replica_is_reported has the end of all other processes")
def test_ctrl_c_leaves_no_process(
    running_demo: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    process, children = running_demo
    # As a terminal does: to every process of the foreground group.
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "diloco-comm: ended by SIGINT\n" in errors
    assert "Traceback" not in errors
    assert not psutil.wait_procs(children, timeout=10)[1]


@pytest.mark.nightly("22 s; test_launch has a launcher that is killed")
def test_replicas_end_when_the_parent_is_killed(
    running_demo: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    process, children = running_demo
    process.kill()
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_dead_replica_is_reported(
    running_demo: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    process, children = running_demo
    replicas = [child for child in children if child.ppid() != process.pid]
    assert len(replicas) == 2
    replicas[-1].kill()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "replica" in errors
    assert not psutil.wait_procs(children, timeout=10)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least --sync-every 50, got 0"),
        (["--steps", "75"], "--steps must be a multiple of --sync-every 50, got 75"),
        (["--replicas", "1"], "--replicas must be at least 2, got 1"),
        (["--sync-every", "0"], "--sync-every must be at least 1, got 0"),
        (["--gbps", "0"], "--gbps must be a positive number, got 0"),
        (["--gbps", "nan"], "--gbps must be a positive number, got nan"),
        (["--rtt-ms", "-1"], "--rtt-ms must be a number of at least 0, got -1"),
        (["--data", "no-such-file"], "cannot read --data no-such-file: No such file"),
    ],
)
def test_wrong_options_are_one_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    check_misuse(run_cli("demo", "--out", tmp_path / "demo", *arguments), message)


def test_a_text_that_is_too_short_is_misuse(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("to be or not to be")
    check_misuse(run_cli("demo", "--out", tmp_path, "--data", path), "give --data a file of")


@pytest.mark.parametrize("sync_every", [1, 2, 5, 6, 50])
def test_a_streamed_fragment_arrives_before_it_is_sent_again(sync_every: int) -> None:
    settings = Comparison(num_steps=sync_every, sync_every=sync_every)
    policy = overlap_of(STREAMING, settings)
    assert isinstance(policy, Streaming)
    assert policy.delay == min(5, sync_every - 1)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("to be or not to be\n" * 100)
    with pytest.raises(ValueError, match="too little text for 4 replicas"):
        load_corpus(path, 4)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_shards_are_disjoint_and_validation_is_held_out(num_shards: int, tmp_path: Path) -> None:
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{i:07d}\n" for i in range(100_000)))
    corpus = load_corpus(path, num_shards)
    parts = [*corpus.shards, corpus.validation]
    lines = [line for part in parts for line in part.split(b"\n") if len(line) == 7]
    assert len(lines) == len(set(lines)) == 100_000
    assert len(corpus.validation) >= path.stat().st_size // 17
    sizes = [len(shard) for shard in corpus.shards]
    assert max(sizes) <= 1.1 * min(sizes)


def test_standard_library_gives_every_replica_its_own_text() -> None:
    corpus = load_corpus(None, 4)
    assert len(set(corpus.shards)) == 4
    assert 2.0 < corpus.unigram_entropy < math.log(256)


def test_batches_repeat_with_the_seed_and_targets_are_shifted() -> None:
    text = bytes(range(256)) * 4
    one, two, other = (Batches(text, 3, 8, seed) for seed in (1, 1, 2))
    inputs, targets = one.next()
    assert inputs.shape == targets.shape == (3, 8)
    assert (targets == (inputs + 1) % 256).all()
    assert (two.next()[0] == inputs).all()
    assert not (other.next()[0] == inputs).all()
    assert validation_windows(text, 5, 8).shape == (5, 9)


def test_inner_learning_rate_warms_up_and_decays() -> None:
    settings = Comparison(num_steps=400, warmup_steps=50, inner_lr=1.0)
    rates = [settings.inner_lr_at(step) for step in range(400)]
    assert rates[0] == pytest.approx(1 / 50)
    assert max(rates) == pytest.approx(1.0) and rates.index(max(rates)) in (49, 50)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[50:] == sorted(rates[50:], reverse=True)
