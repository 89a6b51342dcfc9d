"""Files of the tools: refused before any work; a later failure never replaces the output."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import typer
from benchmark_runs import BENCHMARKS, run_benchmark
from cli_helpers import check_misuse, run_cli
from commands import CLI, run_command, run_python
from problems import Regression, train_step
from trace_files import GEMM, NCCL, kernel, launch, write_kineto
from typer.models import OptionInfo

from diloco_comm.base.recording import Recorder
from diloco_comm_tools.app import app
from diloco_comm_tools.common import outputs

pytestmark = pytest.mark.usefixtures("forked_programs")

PLAN = ["plan", "--params", "1B", "--layers", "12", "--step-time", "1"]
KERNELS = [launch(0, 1), kernel(NCCL, 5, 20, 7, 1), launch(1, 2), kernel(GEMM, 15, 20, 20, 2)]
EXCHANGE = ["bench", "exchange", "-g", "2", "-b", "64K", "-e", "64K", "-n", "1", "-w", "0"]
# The words of each command that writes, up to the option of its file or folder.
WRITERS: dict[tuple[str, str], list[str]] = {
    ("bench exchange", "--json"): EXCHANGE,
    ("bench outer-step", "--json"): ["bench", "outer-step", "-g", "2"],
    ("bench tune", "--json"): ["bench", "tune", "-g", "2"],
    ("demo", "--out"): ["demo"],
    ("plan", "--plot"): PLAN,
    ("plan", "--write"): [*PLAN, "--gbps", "1"],
    ("profile report", "--plot"): ["profile", "report", "rank0.json"],
    ("registry", "--journal"): ["registry", "--listen", "127.0.0.1:0"],
    ("report", "--out"): ["report"],
    ("serve", "--snapshot"): ["serve", "--listen", "127.0.0.1:0"],
    ("serve decoupled", "--snapshot"): ["serve", "decoupled", "--listen", "127.0.0.1:0"],
}
# A folder has to be there for them, or the option is followed by more words.
OTHERS = {
    *(("bench tune", "--out"), ("launch", "--state-dir"), ("profile run", "--out")),
    ("serve truncate", "--snapshot"),
}
READ = {"--config", "--data", "--http-token", "--model-config", "--safetensors", "--key", "--keys"}


@pytest.fixture
def blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path below a file, where not even root can write."""
    (tmp_path / "file").write_text("kept")
    write_kineto(tmp_path / "rank0.json", KERNELS)
    monkeypatch.chdir(tmp_path)
    return Path("file/results.png")


def full(path: Path) -> Path:
    """Make a file that can be opened and never takes a byte, as on a full disk."""
    path.symlink_to("/dev/full")
    return path


def path_options(group: typer.Typer = app, *path: str) -> Iterator[tuple[str, str]]:
    """Every command of diloco-comm with an option that names a file or folder."""
    for info in [*group.registered_commands, group.registered_callback]:
        if info is None or info.callback is None:
            continue
        name = () if info is group.registered_callback else (info.name or info.callback.__name__,)
        for argument, hint in get_type_hints(info.callback, include_extras=True).items():
            kind, *rest = get_args(hint) or (hint,)
            if rest and Path in (kind, *get_args(kind)) and isinstance(rest[0], OptionInfo):
                # With Annotated the first of the written names stands where a default would.
                words = [f"--{argument}", rest[0].default, *(rest[0].param_decls or ())]
                written = [word for word in words if str(word).startswith("--")]
                yield " ".join(path + name), written[-1].replace("_", "-")
    for below in group.registered_groups:
        assert below.typer_instance is not None and isinstance(below.name, str)
        yield from path_options(below.typer_instance, *path, below.name)


# ------------------------------------------------------------------------ before the work


def test_every_option_of_a_file_is_tried_here() -> None:
    found = {pair for pair in path_options() if pair[1] not in READ}
    assert found == WRITERS.keys() | OTHERS


@pytest.mark.parametrize(("command", "option"), WRITERS, ids=map(" ".join, WRITERS))
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    command: str, option: str, blocked: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = run_cli(*WRITERS[command, option], option, blocked)
    check_misuse(ended, f"cannot write {option} {blocked}: Not a directory")
    assert capfd.readouterr().out == ""
    assert Path("file").read_text() == "kept"


def test_other_options_of_a_place_that_cannot_be_written(blocked: Path, tmp_path: Path) -> None:
    is_run = "open('ran', 'w')"
    command = ["profile", "run", "--out", blocked, "--", sys.executable, "-c", is_run]
    check_misuse(run_cli(*command), f"cannot write --out {blocked}: Not a directory")
    assert not Path("ran").exists()
    ended = run_cli("bench", "tune", "-g", "2", "--out", tmp_path)
    check_misuse(ended, f"cannot write --out {tmp_path}: Is a directory")
    Path("train.py").touch()
    registry = ["--registry", "tcp://127.0.0.1:1", "--run", "r"]
    ended = run_cli("launch", *registry, "--state-dir", blocked, "train.py")
    check_misuse(ended, f"cannot write --state-dir {blocked}: Not a directory")
    ended = run_cli("serve", "keygen", blocked)
    check_misuse(ended, f"cannot write FOLDER {blocked}: Not a directory")


def test_a_figure_of_no_known_format_is_refused(blocked: Path) -> None:
    check_misuse(run_cli(*PLAN, "--plot", "plan.docx"), "--plot must end in one of", ".png")
    ended = run_cli("profile", "report", "rank0.json", "--plot", "timeline.docx")
    check_misuse(ended, "--plot must end in one of", ".png")


def test_a_figure_without_an_ending_is_png(blocked: Path) -> None:
    ended = run_cli(*PLAN, "--plot", "curve")
    assert ended.status == 0 and ended.out.endswith("plot: curve.png\n")
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_check_leaves_nothing_behind(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("old results")
    before = kept.stat().st_mtime_ns
    for path in (kept, tmp_path / "new.json", tmp_path / "a/b/c.json", Path("/dev/null")):
        outputs.check_file("--json", path)
    outputs.check_folder("--out", tmp_path / "a/b")
    assert list(tmp_path.iterdir()) == [kept]
    assert (kept.read_text(), kept.stat().st_mtime_ns) == ("old results", before)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kept/x.json", "Not a directory"),
        ("folder", "Is a directory"),
        ("n" * 300, "File name too long"),
        ("/proc/nothing/x.json", "No such file or directory"),
    ],
)
def test_the_reason_is_named(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "kept").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=f"^cannot write --json .*: {reason}$"):
        outputs.check_file("--json", tmp_path / name)


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        # Root may write everywhere; another user asks instead.
        tmp_path.chmod(0o755)
        code = "import os; os.setuid(65534); "
    else:
        tmp_path.chmod(0o555)
        code = ""
    code += "from diloco_comm_tools.common import outputs as o; from pathlib import Path; "
    code += f"o.check_file('--json', Path({str(tmp_path / 'x.json')!r}))"
    imported = f"import diloco_comm_tools.common.outputs; {code}"
    ended = run_python("-c", imported)
    assert ended.returncode == 1 and "Permission denied" in ended.stderr


# ------------------------------------------------------------------------ after the work


def check_kept(ended: Any, printed: str, *said: str) -> None:
    """Status 1, the results on stdout, and one sentence."""
    assert ended.status == 1, ended
    assert printed in ended.out
    assert re.fullmatch(r"diloco-comm: [^\n]+\n", ended.err), ended.err
    for words in said:
        assert words in ended.err


@pytest.mark.nightly("10 s each; one command of several processes", but=["exchange"])
@pytest.mark.parametrize(
    ("words", "options"),
    [
        (EXCHANGE, ["--json"]),
        (["bench", "tune", "-g", "2", "-b", "64K", "-n", "3", "--lanes", "1"], ["--out", "--json"]),
        (["bench", "outer-step", "-g", "2", "--params", "10K", "-n", "1"], ["--json"]),
    ],
    ids=["exchange", "tune", "outer-step"],
)
def test_results_of_several_processes_are_printed_though_the_disk_is_full(
    words: list[str], options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [full(tmp_path / f"{option[2:]}.json") for option in options]
    written = [word for pair in zip(options, map(str, paths), strict=True) for word in pair]
    step = ["--step-time", "0.001"] if "outer-step" in words else []
    ended = run_cli(*words, *step, *written)
    printed, said = capfd.readouterr()
    assert (ended.status, ended.out, ended.err) == (1, "", "")
    assert any(line and not line.startswith("#") for line in printed.splitlines())
    assert said.splitlines() == [
        f"diloco-comm: cannot write {option} {path}: No space left on device"
        for option, path in zip(options, paths, strict=True)
    ]


def test_tables_are_printed_though_the_plot_is_not_written(blocked: Path, tmp_path: Path) -> None:
    path = full(tmp_path / "plot.png")
    reason = f"cannot write --plot {path}: No space left on device"
    check_kept(run_cli(*PLAN, "--plot", path), "Gbit/s needed", reason)
    config = full(tmp_path / "diloco.json")
    reason = f"cannot write --write {config}: No space left on device"
    check_kept(run_cli(*PLAN, "--gbps", "1", "--write", config), "Gbit/s needed", reason)
    reason = f"cannot write --plot {path}: No space left on device"
    report = ["profile", "report", "rank0.json", "--plot", path]
    check_kept(run_cli(*report), "50.00 %", reason)
    ended = run_cli(*report, "--json")
    check_kept(ended, '"schema": 1', reason)
    assert len(json.loads(ended.out)["ranks"]) == 1


@pytest.mark.nightly("25 s each; another test prints tables so")
@pytest.mark.parametrize("as_json", [False, True])
def test_the_demo_is_printed_though_nothing_is_written(as_json: bool, tmp_path: Path) -> None:
    for name in ("demo.json", "demo.png"):
        full(tmp_path / name)
    words = ["demo", "--replicas", "2", "--steps", "2", "--sync-every", "2", "--gbps", "10"]
    command = [*CLI, *words, "--out", str(tmp_path)]
    command += ["--json"] * as_json
    ended = run_command(command)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("diloco-comm: cannot write --out") and "No space left" in last
    assert "Traceback" not in ended.stderr
    assert "hash of the shared parameters" in (ended.stderr if as_json else ended.stdout)
    if as_json:
        assert len(json.loads(ended.stdout)["rows"]) == 7


# ------------------------------------------------------------------------ in a training hook


def record_some_steps(folder: Path, before_the_end: Any = None) -> None:
    """Train twelve steps with a recorder of steps 3 to 6; an error in a hook would end training."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(folder, skip=2, steps=4)
    hook = recorder.attach()
    try:
        for step in range(12):
            train_step(model, optimizer, 0, step)
    finally:
        hook.remove()
        recorder.stop()


@pytest.mark.parametrize("is_full", [False, True], ids=["no folder", "full disk"])
def test_a_trace_that_cannot_be_written_is_logged_once(
    is_full: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "traces"
    if is_full:
        folder.mkdir()
        full(folder / f"rank0.json.{os.getpid()}.partial.gz")
    else:
        folder.write_text("")
    with caplog.at_level(logging.ERROR):
        record_some_steps(folder)
    (record,) = [one for one in caplog.records if one.name.startswith("diloco_comm")]
    reason = "No space left on device" if is_full else "File exists"
    told = f"rank 0 has no trace, and training goes on: cannot write the trace {folder}"
    assert record.getMessage() == f"{told}/rank0.json.gz: {reason}"
    # The name of half a trace would be that of a whole trace.
    assert not is_full or list(folder.iterdir()) == []


TRAIN = """
import pathlib, torch
from diloco_comm import DiLoCo
pathlib.Path("traces").write_text("taken since the check")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with DiLoCo(model, optimizer, sync_every=2):
    for step in range({steps}):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
print("trained to the end")
"""


@pytest.mark.nightly("20 s each; one end of the training", but=["in a step"])
@pytest.mark.parametrize("steps", [9, 4], ids=["in a step", "at the end"])
def test_training_goes_on_without_its_trace(steps: int, tmp_path: Path) -> None:
    """The program ends before the last step to record, and the trace is written then."""
    (tmp_path / "train.py").write_text(TRAIN.format(steps=steps))
    options = ["--out", "traces", "--skip", "2", "--steps", "4", "--"]
    command = [*CLI, "profile", "run", *options, sys.executable, "train.py"]
    ended = run_command(command, cwd=tmp_path)
    assert ended.stdout == "trained to the end\n"
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("cannot write the trace") == 1
    assert ended.returncode == 1 and "diloco-comm: no trace was written" in ended.stderr


# ------------------------------------------------------------------------ benchmarks


def scripts_that_write() -> Iterator[tuple[str, str]]:
    for path in sorted(BENCHMARKS.rglob("*.py")):
        text = path.read_text()
        if path.name != "common.py" and "def main(" in text:
            name = ".".join(path.relative_to(BENCHMARKS).with_suffix("").parts)
            for call, option in re.findall(r'common\.add_(\w+)\(parser(?:, "(--\w+)")?', text):
                yield name, f"--{call}" if call in ("plot", "runs") else option or "--json"


def test_no_benchmark_writes_a_file_that_is_not_looked_at() -> None:
    found = dict(scripts_that_write())
    assert len(found) > 15
    for path in BENCHMARKS.rglob("*.py"):
        unchecked = re.findall(
            r'add(?:_argument)?\(\s*"--(json|plot|runs|out|trace)"', path.read_text()
        )
        assert unchecked == [], path.name


NEEDED = {"asynchronous.server": ["apply"], "bars": ["--only", "15"]}


@pytest.mark.parametrize(("script", "option"), list(scripts_that_write()))
def test_benchmarks_refuse_such_a_place_before_any_work(
    script: str,
    option: str,
    blocked: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *NEEDED.get(script, []), option, str(blocked)])
    module = importlib.import_module(f"benchmarks.{script}")
    with pytest.raises(SystemExit) as ended:
        module.main()
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert f"cannot write {option} {blocked}: Not a directory" in err


def test_a_benchmark_prints_though_the_disk_is_full(tmp_path: Path) -> None:
    path = full(tmp_path / "x.json")
    for script, words in (
        ("exchange.all_reduce", ["-g", "2", "-b", "64K", "-e", "64K", "-n", "1", "-w", "0"]),
        ("training.profile_speed", ["--gigabytes", "0.001"]),
    ):
        ended = run_benchmark(script, *words, "--json", path)
        assert ended.returncode == 1
        assert ended.stderr == f"cannot write --json {path}: No space left on device\n"
        assert len(ended.stdout.splitlines()) > 4


def test_option_type_of_the_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = importlib.import_module("benchmarks.support.common")
    parser = argparse.ArgumentParser()
    common.add_output(parser, "--json")
    assert parser.parse_args([]).json is None
    assert parser.parse_args(["--json", str(tmp_path / "x")]).json == tmp_path / "x"


@pytest.mark.fresh_interpreter
def test_a_full_standard_output_is_one_sentence() -> None:
    command = [*CLI, "plan", "--params", "7B"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*command, "--layers", "32", "--step-time", "2", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    sentence = "diloco-comm: the output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, sentence)


# ------------------------------------------------------------------------------ progress bars


def run_on_terminal(words: list[str]) -> tuple[str, str]:
    """Run a command whose stderr alone is a terminal; return stdout and what the terminal got."""
    parent, child = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [*CLI, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=child, env=environment) as run:
        os.close(child)
        shown = b""
        # A terminal that nobody holds any more ends with an error in place of no bytes.
        with contextlib.suppress(OSError):
            while part := os.read(parent, 1 << 16):
                shown += part
        os.close(parent)
        assert run.stdout is not None
        out = run.stdout.read().decode()
    assert run.returncode == 0, shown.decode()
    return out, shown.decode()


def test_a_bar_is_shown_on_a_terminal_and_nowhere_else() -> None:
    words = [*EXCHANGE, "--wire", "int4"]
    out, shown = run_on_terminal(words)
    assert "64K" in shown and "100%" in shown and "int4" in shown
    # The bar takes itself away, and never hides the cursor.
    assert shown.endswith("\x1b[2K") and "\x1b[?25l" not in shown
    assert "\x1b" not in out and "int4" in out
    piped = run_command([*CLI, *words])
    assert piped.returncode == 0 and piped.stderr == ""
    assert [line.split()[:1] for line in piped.stdout.splitlines()] == [
        line.split()[:1] for line in out.splitlines()
    ]


@pytest.mark.timeout(300)
@pytest.mark.nightly("30 s; bench has the same bar")
def test_the_bars_of_the_demo_stay_and_its_json_is_clean(tmp_path: Path) -> None:
    size = ["--replicas", "2", "--steps", "4", "--sync-every", "2", "--gbps", "10", "--rtt-ms", "0"]
    out, shown = run_on_terminal(["demo", *size, "--json", "--out", str(tmp_path)])
    rows = [row["name"] for row in json.loads(out)["rows"]]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    bars = re.findall(r"([A-Z]\S+ \S+) +\S+ +100% .*?loss [0-9.]+", plain)
    assert list(dict.fromkeys(bars)) == rows
