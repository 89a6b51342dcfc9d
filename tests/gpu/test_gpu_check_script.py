"""benchmarks/gpu_check.sh without a GPU: stand-ins for Python's steps, ncu and the sanitizer.

What the steps themselves do is in test_gpu_check.py and test_benchmarks_kernels.py.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import BENCHMARKS, run_benchmark
from commands import run_command

SCRIPT = BENCHMARKS / "gpu" / "check.sh"
STEPS_FILE = BENCHMARKS / "gpu" / "steps.txt"
TABLE = [row.split() for row in STEPS_FILE.read_text().splitlines() if not row.startswith("#")]

# It goes on until it is ended: else the end of the script would not be the end of its output.
CLOCKS = """#!/bin/sh
echo "$@"
exec sleep 600
"""
# Every step's program writes down how it was called, and ends as a file of its name says.
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit
shift  # -m
name=${{1##*.}}
[ "$name" = summary ] && exec {python} -m "$@"
[ "$name" = facts ] && name=$2
echo "$@" >>{calls}
for file in "{endings}/$name" "{endings}/$name $2"; do
    [ -f "$file" ] && . "$file"
done
echo "$name ran"
"""
TOOL = """#!/bin/sh
echo {name} "$@" >>{calls}
"""
STEPS = {
    "A": ["machine", "bars", "counters", "nccl_ranks", "streams", "trace_nccl", "cuda_tests"],
    "B": ["machine", "triton_tests", "kernels", "offload", "forked_call", "frozen"],
    "C": ["machine", "nccl_ranks", "engine_tests", "trace", "training", "large", "group_tests",
          "sanitizers"],
}  # fmt: skip


class Check:
    """A machine of stand-ins, and the check run on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.endings, self.tools = folder / "endings", folder / "tools"
        self.calls = folder / "calls"
        for made in (self.endings, self.tools):
            made.mkdir()
        self._write("python", PYTHON.format(python=sys.executable, **vars(self)))
        for name in ("ncu", "compute-sanitizer"):
            self._write(name, TOOL.format(name=name, calls=self.calls))
        self._write("nvidia-smi", CLOCKS)
        self.end("--versions", """echo '{"impls": ["triton", "cuda"]}'""")

    def _write(self, name: str, text: str) -> None:
        path = self.tools / name
        path.write_text(text)
        path.chmod(0o755)

    def end(self, program: str, script: str) -> None:
        """Let a program of that name, or name and first argument, do this instead."""
        (self.endings / program).write_text(script)

    def run(self, *letter: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": str(self.tools / "python")}
        environment["PATH"] = f"{self.tools}:/usr/bin:/bin"
        command = ["bash", str(SCRIPT), *options, str(self.out), *letter]
        return run_command(command, env=environment)

    def archived(self, name: str) -> str:
        with tarfile.open(self.out / "all.tgz") as archive:
            member = archive.extractfile(f"./{name}")
            assert member is not None
            return member.read().decode()

    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.archived("steps.jsonl").splitlines()]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path)


def bodies() -> dict[str, str]:
    """Return the script's functions."""
    return dict(
        re.findall(r"^(\w+)\(\) \{\n(.*?)^\}", SCRIPT.read_text(), re.DOTALL | re.MULTILINE)
    )


@pytest.mark.parametrize("part", "ABC")
def test_the_limits_of_a_part_fit_in_nine_minutes(part: str) -> None:
    """Each step may take four seconds more, to be ended and archived."""
    functions = bodies()
    text = functions["prepare"] + functions[f"part_{part}"]
    text += functions["probe_nccl"] if "probe_nccl" in text else ""
    limits = {row[1]: (int(row[2]), int(row[4])) for row in TABLE if part in row[0]}
    assert list(limits) == STEPS[part]
    assert set(re.findall(r"\bstep (\w+)", text)) == set(limits)
    seconds_on_top = 4
    for here, seconds in enumerate((540, 1200)):
        whole = sum(limit[here] for limit in limits.values()) + seconds_on_top * len(limits)
        assert whole <= seconds
        assert f"PART_SECONDS={seconds}\n" in SCRIPT.read_text()


@pytest.mark.nightly("3 s each; they differ in the part", but=["A"])
@pytest.mark.parametrize("part", "ABC")
def test_a_part_leaves_an_archive_and_a_summary(part: str, check: Check) -> None:
    done = check.run(part)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in check.out.iterdir()) == ["all.tgz", "summary.txt"]
    steps = check.steps()
    assert [step["step"] for step in steps] == STEPS[part]
    assert {(step["part"], step["status"]) for step in steps} == {(part, 0)}
    for step in steps:
        assert check.archived(f"{step['step']}.log") or step["step"] == "counters"
    summary = (check.out / "summary.txt").read_text()
    assert summary in done.stdout and check.archived("summary.txt") == summary
    assert summary.endswith("every step passed, every bar holds\n")
    calls = check.calls.read_text()
    assert "timestamp,clocks.sm,clocks.mem,power.draw" in check.archived("clocks.csv")
    if part == "A":
        assert "kernels_gpu --check --impl cuda --wires int8,int4,int2r,topk64" in calls
        assert calls.index("kernels_gpu") < calls.index("ncu --clock-control none --set full")
        assert "--page raw --csv" in calls
        assert check.archived("counters.csv").startswith("""# {"impls": ["triton", "cuda"]}""")
        assert "--backend nccl --replicas 2 --least_hidden 95" in calls
    if part == "C":
        assert "--least_hidden 95" in calls
        assert calls.count("benchmarks.gpu.operators") == 2
        for tool in ("memcheck", "racecheck"):
            assert f"--tool {tool} --error-exitcode 9" in calls
            assert check.archived(f"{tool}.log") == ""
        for name in ("group", "graphs", "nonfinite", "stopped"):
            assert calls.index("benchmarks.gpu.training") < calls.index(
                f"tests/gpu/test_gpu_{name}.py"
            )


@pytest.mark.nightly("3 s each; they differ in the part", but=["A"])
@pytest.mark.parametrize("part", "ABC")
def test_a_rehearsal_runs_every_step_without_a_gpu(part: str, check: Check) -> None:
    """Each step with the options of the table; no figure counts as one of a GPU."""
    (check.tools / "ncu").unlink()
    check.end("rehearse", "exit 3")
    done = check.run(part, options=["--rehearse"])
    steps = check.steps()
    assert [step["step"] for step in steps] == STEPS[part]
    emulated = {"A": ["bars", "counters"], "B": ["kernels"], "C": ["large"]}[part]
    assert [step["step"] for step in steps if step["status"]] == emulated
    assert done.returncode == bool(emulated)
    calls = check.calls.read_text().splitlines()
    for call, row in zip(calls, (row for row in TABLE if part in row[0]), strict=True):
        assert call.endswith(" ".join(row[6:]))
    summary = (check.out / "summary.txt").read_text()
    assert summary.startswith("A rehearsal without a GPU") and "bar holds" not in summary


@pytest.mark.nightly("11 s; about the list of files in the script")
def test_every_file_of_gpu_tests_is_run(check: Check) -> None:
    """Whatever pytest collects for a GPU, with as many ranks of NCCL as the check tries.

    Exchanges have one phase with two ranks, two phases with three and four, and with five one more
    wire, on which the owners encode a mean.
    """
    assert check.run().returncode == 0
    ranks = set(re.findall(r"nccl_probe --ranks (\d+)", check.calls.read_text()))
    files = sorted(map(str, (BENCHMARKS.parent / "tests/gpu").glob("test_gpu_*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only", *files]
    environment = {**os.environ, "DILOCO_TEST_NCCL_RANKS": max(ranks), "PYTEST_ADDOPTS": ""}
    done = run_command(command, env=environment)
    marked = set(re.findall(r"^tests/gpu/(test_gpu_\w+\.py)::", done.stdout, re.MULTILINE))
    assert {"test_gpu_engine.py", "test_gpu_stopped.py"} < marked, done.stdout + done.stderr
    for world in range(1, 6):
        assert f"test_streams_equal_the_engine[cuda-{world}]" in done.stdout
    assert set(re.findall(r"tests/gpu/(test_gpu_\w+\.py)", check.calls.read_text())) == marked


@pytest.mark.nightly("2 s each; a branch of the script alone")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_what_a_sanitizer_finds_is_said(tool: str, check: Check) -> None:
    """The other one is run to its end all the same."""
    text = TOOL.format(name="compute-sanitizer", calls=check.calls)
    finds = f'case "$*" in *{tool}*) echo "1 error"; exit 9 ;; esac\n'
    check._write("compute-sanitizer", text + finds)
    done = check.run("C")
    assert done.returncode == 1 and done.stdout.endswith("not proven: sanitizers\n")
    assert check.archived(f"{tool}.log") == "1 error\n"
    assert check.calls.read_text().count("benchmarks.gpu.operators") == 2


@pytest.mark.nightly("6 s; each part stays")
def test_all_parts_in_turn_add_to_one_archive(check: Check) -> None:
    """A failure in the first stops nothing, and is named at the end."""
    check.end("kernels_gpu --check", "exit 3")
    done = check.run("A")
    assert done.returncode == 1 and done.stdout.endswith("not proven: bars\n")
    (check.endings / "kernels_gpu --check").unlink()
    done = check.run("B")
    assert done.returncode == 1 and done.stdout.endswith("not proven: bars\n")
    # The same part again replaces what it said.
    done = check.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [step["step"] for step in check.steps()] == [*STEPS["A"], *STEPS["B"], *STEPS["C"]]


@pytest.mark.nightly("8 s; a part that leaves an archive stays")
def test_a_step_that_hangs_is_ended_and_the_archive_has_what_was_before(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is cut to a second here: the part has as much time left."""
    script = SCRIPT.read_text().replace("PART_SECONDS=540", "PART_SECONDS=8")
    copy = check.folder / "benchmarks" / "gpu" / "check.sh"
    copy.parent.mkdir(parents=True)
    copy.write_text(script)
    for name in ("__init__.py", "gpu/summary.py", "gpu/steps.txt"):
        (check.folder / "benchmarks" / name).write_text((BENCHMARKS / name).read_text())
    monkeypatch.setitem(globals(), "SCRIPT", copy)
    check.end("kernels_gpu", "trap '' TERM; echo row; sleep 600 & wait; sleep 600")
    check.end("run_tests", f"cp {check.out}/all.tgz {check.folder}/then.tgz")
    done = check.run("B")
    assert done.returncode == 1, done.stdout + done.stderr
    steps = {step["step"]: step for step in check.steps()}
    assert list(steps) == STEPS["B"]
    assert steps["kernels"]["status"] in (124, 137) and steps["kernels"]["seconds"] < 60
    assert check.archived("kernels.log") == "row\n"
    assert "timed out" in done.stdout and "not proven: kernels" in done.stdout
    # While a step runs, the archive has all those before it.
    with tarfile.open(check.folder / "then.tgz") as archive:
        assert "./machine.log" in archive.getnames()


@pytest.mark.nightly("2 s; a branch of the script alone")
def test_without_cuda_kernels_triton_is_measured(check: Check) -> None:
    check.end("--versions", """echo '{"impls": ["triton"]}'""")
    done = check.run("A")
    assert done.returncode == 1
    ended = {step["step"]: step["status"] for step in check.steps()}
    rest = [name for name in STEPS["A"][1:] if name != "cuda_tests"]
    assert [*ended] == ["machine", "cuda_kernels", *rest]
    assert ended["bars"] == 0 and ended["cuda_kernels"] is None
    assert "kernels_gpu --check --impl triton" in check.calls.read_text()
    assert done.stdout.endswith("not proven: cuda_kernels\n")


@pytest.mark.parametrize("reason", ["build the extension first", "no CUDA device"])
def test_without_an_extension_or_a_device_all_parts_end_early(reason: str, check: Check) -> None:
    """Nothing is built on the spot: one file takes longer than the part's steps."""
    check.end("--versions", f"echo {reason}; exit 1")
    done = check.run()
    assert done.returncode == 1 and reason in done.stdout
    assert [step["step"] for step in check.steps()] == ["machine"] * 3
    assert "not proven: machine" in done.stdout


@pytest.mark.nightly("3 s; a branch of the script alone")
def test_without_ncu_and_with_one_nccl_rank(check: Check) -> None:
    """Neither fails the check; both are said."""
    (check.tools / "ncu").unlink()
    check.end("nccl_probe", "exit 1")
    done = check.run("A")
    assert done.returncode == 0, done.stdout
    assert "ncu is not on PATH" in done.stdout and done.stdout.count(" unproven ") == 2
    assert "--backend nccl --replicas 1" in check.calls.read_text()


@pytest.mark.nightly("11 s; a part that leaves an archive stays")
def test_an_archive_that_would_be_too_large_leaves_the_traces_out(check: Check) -> None:
    events = check.folder / "events.json.gz"
    events.write_bytes(os.urandom(16 << 20))
    check.end("trace", 'for last in "$@"; do :; done; cp ' + str(events) + ' "$last"')
    done = check.run("C")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (check.out / "all.tgz").stat().st_size < 1 << 20
    with tarfile.open(check.out / "all.tgz") as archive:
        names = archive.getnames()
    assert "./trace.log" in names and "./trace-events.json.gz" not in names


def test_a_small_trace_is_in_the_archive(check: Check) -> None:
    events = check.folder / "events.json.gz"
    events.write_bytes(gzip.compress(b"{}"))
    check.end("trace", 'for last in "$@"; do :; done; cp ' + str(events) + ' "$last"')
    assert check.run("C").returncode == 0
    with tarfile.open(check.out / "all.tgz") as archive:
        member = archive.extractfile("./trace-events.json.gz")
        assert member is not None and gzip.decompress(member.read()) == b"{}"


@pytest.mark.parametrize("arguments", [[], ["--rehearse"], ["OUT", "D"], ["OUT", "A", "B"]])
def test_usage(arguments: list[str], tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), *arguments]
    done = run_command(command, cwd=tmp_path)
    assert done.returncode == 2 and "usage:" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["check", "ncu", "build", "sanitize"])
def test_help(script: str) -> None:
    for arguments, status in (([], 2), (["-h"], 0), (["--help"], 0)):
        command = ["bash", str(SCRIPT.with_stem(script)), *arguments]
        done = run_command(command)
        assert done.returncode == status
        assert (done.stderr if status else done.stdout).startswith("usage: benchmarks/gpu")


def test_without_an_interpreter_nothing_is_run(check: Check) -> None:
    check._write("python", "#!/bin/sh\nexit 1\n")
    done = check.run("A")
    told = f"PYTHON must be a Python that runs, got {check.tools}/python\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
    assert not list(check.out.iterdir())


# ------------------------------------------------------------------------------------- the summary

STEP = {"part": "A", "status": 0, "seconds": 3, "limit": 30, "reason": ""}


def summarised(folder: Path, *steps: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    lines = [json.dumps(STEP | step) for step in steps]
    (folder / "steps.jsonl").write_text("\n".join(lines) + "\n")
    return run_benchmark("gpu.summary", folder, timeout=60)


@pytest.mark.parametrize(
    ("step", "status", "shown"),
    [
        ({"step": "trace"}, 0, "overlap 97.0 %"),
        ({"step": "nccl_ranks", "status": 1}, 0, "unproven"),
        ({"step": "cuda_tests", "status": 1}, 1, "not proven: cuda_tests"),
        ({"step": "kernels", "status": 124}, 1, "timed out"),
        ({"step": "racecheck", "status": None, "reason": "no time"}, 1, "no time"),
    ],
)
def test_summary(step: dict[str, Any], status: int, shown: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps({"summary": "overlap 97.0 %"}))
    done = summarised(tmp_path, {"step": "machine"}, step)
    assert done.returncode == status, done.stdout
    assert shown in done.stdout


def test_the_summary_names_the_bars_that_are_missed(tmp_path: Path) -> None:
    row = {"operator": "encode", "wire": "int8", "impl": "cuda", "host_us": 12.0}
    rows = [row | {"layout": "one", "share_percent": 91.2},
            row | {"layout": "odd", "share_percent": 41.0, "host_us": None},
            row | {"layout": "one", "wire": "fp32", "share_percent": 77.0}]  # fmt: skip
    bar = {"name": "encode int8 odd (%)", "value": 41.0, "is": ">=", "must": 80, "holds": False}
    held = bar | {"name": "encode int8 one (%)", "holds": True}
    results = {"rows": rows, "bars": [bar, held]}
    (tmp_path / "bars.json").write_text(json.dumps({"summary": "1 of 2", "results": results}))
    done = summarised(tmp_path, {"step": "bars"})
    assert done.returncode == 1
    assert "missed by bars: encode int8 odd (%): 41.0, must be >= 80" in done.stdout
    assert "encode int8 one" not in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("encode")]
    assert line.split() == ["encode", "cuda", "91", "%", "(12", "us)", "-", "41", "%"]
    assert done.stdout.endswith("not proven: bars of bars\n")


def test_a_predicted_miss_is_shown_and_fails_nothing(tmp_path: Path) -> None:
    bar = {"name": "reduce of 4 int4 (%)", "value": 33.0, "is": ">=", "must": 75, "holds": False}
    results = {"rows": [], "bars": [bar | {"predicted": "instructions bound it"}]}
    (tmp_path / "bars.json").write_text(json.dumps({"results": results}))
    done = summarised(tmp_path, {"step": "bars"})
    assert done.returncode == 0, done.stdout
    shown = "missed by bars, as predicted: reduce of 4 int4 (%): 33.0, must be >= 75"
    assert f"{shown} (instructions bound it)" in done.stdout


def test_a_bar_without_a_figure_is_unproven_and_fails_nothing(tmp_path: Path) -> None:
    bar = {"name": "hidden part (%)", "value": None, "is": ">=", "must": 95, "holds": False}
    (tmp_path / "trace_nccl.json").write_text(json.dumps({"results": {"bars": [bar]}}))
    done = summarised(tmp_path, {"step": "nccl_ranks", "status": 1}, {"step": "trace_nccl"})
    assert done.returncode == 0, done.stdout + done.stderr
    told = "\nunproven: nccl_ranks, hidden part (%) of trace_nccl\nno step failed\n"
    assert done.stdout.endswith(told)


@pytest.mark.nightly("4 s; a part that leaves an archive stays")
def test_a_file_that_grows_stops_no_archive(check: Check) -> None:
    """A process that outlives its step writes while tar reads."""
    writer = 'while :; do echo text; done >"$folder/grows.log" & sleep 3; kill $!'
    find = "folder=$(ls -dt ${TMPDIR:-/tmp}/tmp.* | head -n 1)"
    impls = """echo '{"impls": ["triton", "cuda"]}'"""
    check.end("--versions", f"{impls}; ({find}; {writer}) & sleep 1")
    done = check.run("C")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [step["step"] for step in check.steps()] == STEPS["C"]


def test_an_import_that_takes_too_long_stops_nothing(check: Check) -> None:
    """A limit that was too short says nothing about the extension."""
    check.end("--versions", "exit 124")
    done = check.run("A")
    assert done.returncode == 1 and done.stdout.endswith("not proven: machine\n")
    assert [step["step"] for step in check.steps()] == STEPS["A"]
    assert "kernels_gpu --check --impl cuda" in check.calls.read_text()


def test_summary_of_nothing(tmp_path: Path) -> None:
    done = run_benchmark("gpu.summary", tmp_path, timeout=60)
    assert done.returncode == 2 and "no steps of a GPU check" in done.stderr


# ---------------------------------------------------------------------------- the steps' programs


@pytest.mark.parametrize("operator", ["encode", "outer_step", "reduce", "decode"])
def test_an_operator_for_nsight_compute(
    operator: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.gpu import profile as gpu_profile

    words = ["gpu_profile.py", operator, "decode", "--device=cpu", "--size=1M"]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu_profile.main() == 0
    said = capsys.readouterr().out
    assert said.startswith(operator) and said.endswith("bytes an element\n")
    assert said.count("bytes an element") == 2


@pytest.mark.nightly("22 s; the parts that stay run the same script")
def test_facts_without_a_device() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for option, status in (("--versions", 0), ("--first-call", 1), ("--forked-call", 1)):
        done = run_benchmark("gpu.facts", option, env=environment)
        assert done.returncode == status, done.stdout + done.stderr
        assert status == 0 or "device" in done.stdout
