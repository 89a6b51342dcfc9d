"""Programs in forks of the zygote: all that a test sees of them is as in a fresh interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import programs
import psutil
import pytest
from support_paths import ROOT
from zygote import Zygote

pytestmark = pytest.mark.usefixtures("forked_programs")

FACTS = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": globals().get("__file__"), "folder": os.getcwd(),
    "path": sys.path, "variables": dict(os.environ), "optimizer": "torch._dynamo" in sys.modules,
    "main": sys.modules["__main__"].__dict__ is globals(), "group": os.getpgid(0) == os.getpid(),
    "session": os.getsid(0) == os.getpid(), "fds": sorted(os.listdir("/proc/self/fd"), key=int)[:3],
    "spec": getattr(__spec__, "name", None), "input": sys.stdin.read(), "orig": sys.orig_argv[1:],
}))
"""


def run(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=110, **options
    )


def text_of(kind: str, folder: Path) -> list[str]:
    """Return the words by which an interpreter runs the script that tells its facts."""
    (folder / "package").mkdir(exist_ok=True)
    for name in ("script.py", "module.py", "package/__main__.py"):
        (folder / name).write_text(FACTS)
    return {
        "script": ["script.py"],
        "script elsewhere": [str(folder / "script.py")],
        "module": ["-m", "module"],
        "package": ["-m", "package"],
        "text": ["-c", FACTS],
        "unbuffered": ["-u", "script.py"],
    }[kind] + ["3", "two words"]


@pytest.mark.nightly("2 s each; they differ in the kind of program", but=["module"])
@pytest.mark.parametrize(
    "kind", ["script", "script elsewhere", "module", "package", "text", "unbuffered"]
)
def test_a_program_finds_what_a_fresh_interpreter_finds(kind: str, tmp_path: Path) -> None:
    words = text_of(kind, tmp_path)
    options: dict[str, Any] = {
        "cwd": ROOT if kind == "script elsewhere" else tmp_path,
        "env": {**os.environ, "A_VARIABLE": "1"},
        "input": "typed",
        "start_new_session": kind == "text",
    }
    forked = run(words, **options)
    fresh = run(words, executable=sys.executable, **options)
    assert (forked.returncode, forked.stderr) == (0, ""), forked.stderr
    facts, expected = json.loads(forked.stdout), json.loads(fresh.stdout)
    assert facts.pop("optimizer") and not expected.pop("optimizer")
    # A group of its own, also without a session of its own.
    assert facts.pop("group") and expected.pop("group") == (kind == "text")
    assert facts == expected


@pytest.mark.nightly(
    "up to 7 s each; about the processes of the tests",
    but=[
        "print('out')-0-out\\n-",
        "print('out'); raise ValueError('wrong')-1-out\\n-ValueError: wrong\\n",
        "print(-1--None",
    ],
)
@pytest.mark.parametrize(
    ("text", "status", "output", "errors"),
    [
        ("print('out')", 0, "out\n", ""),
        ("import sys; print('half', end=''); sys.exit(3)", 3, "half", ""),
        ("raise SystemExit('a sentence')", 1, "", "a sentence\n"),
        ("print('out'); raise ValueError('wrong')", 1, "out\n", "ValueError: wrong\n"),
        ("import os; os._exit(5)", 5, "", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "", ""),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, "first\nlast\n", ""),
        (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
            0,
            "thread\n",
            "",
        ),
        ("import torch; print(torch.get_num_threads())", 0, None, ""),
        ("import multiprocessing as m; print(m.current_process().name)", 0, "MainProcess\n", ""),
        ("import signal as s; print(s.getsignal(s.SIGINT).__name__)", 0, None, ""),
        ("print(", 1, "", None),
    ],
)
def test_a_program_ends_as_a_fresh_interpreter_does(
    text: str, status: int, output: str | None, errors: str | None
) -> None:
    forked, fresh = run(["-c", text]), run(["-c", text], executable=sys.executable)
    assert forked.returncode == fresh.returncode == status
    assert forked.stdout == fresh.stdout and output in (None, fresh.stdout)
    last = [ended.stderr.splitlines()[-1:] for ended in (forked, fresh)]
    assert last[0] == last[1] and (errors is None or last[1] == errors.splitlines())


@pytest.mark.parametrize("threads", ["1", "2"])
def test_threads_are_those_of_the_environment(threads: str) -> None:
    text = "import torch; print(torch.get_num_threads())"
    assert (
        run(["-c", text], env={**os.environ, "OMP_NUM_THREADS": threads}).stdout == f"{threads}\n"
    )


def test_random_numbers_are_those_of_no_other_process() -> None:
    text = "import numpy, random, torch; "
    text += (
        "print(torch.initial_seed(), torch.rand(1).item(), numpy.random.rand(), random.random())"
    )
    first, second = (run(["-c", text]).stdout.split() for _ in range(2))
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_signals_and_waiting() -> None:
    text = "import time; print('begun', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        assert psutil.Process(process.pid).parent() != psutil.Process()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired, match=r"timed out after 0\.1 seconds"):
            process.wait(0.1)
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait() == process.poll() == -signal.SIGINT
        process.kill()  # of a process that has ended: nothing
    for stop in (subprocess.Popen.kill, subprocess.Popen.terminate):
        process = subprocess.Popen([sys.executable, "-c", text])
        stop(process)
        assert process.wait(60) in (-signal.SIGKILL, -signal.SIGTERM)
    ended = subprocess.run([sys.executable, "-c", "import sys; sys.stdout.close()"], timeout=60)
    assert ended.returncode == 0


def test_streams_and_descriptors(tmp_path: Path) -> None:
    read, write = os.pipe()
    text = "import os, sys; os.write(int(sys.argv[1]), b'told'); os.write(2, b'error'); print(1)"
    both = tmp_path / "both"
    with both.open("w") as file:
        command = [sys.executable, "-c", text, str(write)]
        ended = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, pass_fds=[write], timeout=60
        )
    os.close(write)
    assert ended.returncode == 0 and both.read_text() == "error1\n"
    assert os.read(read, 10) == b"told" and os.read(read, 10) == b""
    os.close(read)
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([sys.executable, "-c", "exit(2)"], check=True, timeout=60)


def test_a_program_forks_the_programs_that_it_starts(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text("import sys; print('torch' in sys.modules); sys.exit(7)")
    text = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, 'inner.py']))"
    ended = run(["-c", text], cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (7, "True\n")


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["-c", "1"], {"executable": sys.executable}),
        (["-c", "1"], {"env": {**os.environ, "PYTHONPATH": "/tmp"}}),
        (["-c", "1"], {"preexec_fn": int}),
        (["-W", "error", "-c", "1"], {}),
        (["missing.py"], {}),
    ],
)
def test_a_command_that_a_fork_cannot_replace_is_executed(
    words: list[str], options: dict[str, Any]
) -> None:
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, **options)
    assert psutil.Process(process.pid).ppid() == os.getpid()
    process.communicate(timeout=60)
    assert process.returncode == (2 if words == ["missing.py"] else 0)
    with pytest.raises(FileNotFoundError):
        subprocess.Popen([sys.executable, "-c", "1"], cwd="/nowhere")


def test_commands_of_this_environment_are_programs() -> None:
    command = str(Path(sys.executable).parent / "diloco-comm")
    process = subprocess.Popen([command, "--version"], stdout=subprocess.PIPE, text=True)
    assert isinstance(process, programs.Popen) and process._pid_fd is not None
    assert process.communicate(timeout=60)[0].strip() and process.returncode == 0


def test_a_program_ends_with_the_zygote() -> None:
    zygote = Zygote()
    program = programs.Program(["-c", "import time; time.sleep(600)"], "/", dict(os.environ))
    pid, _stream = zygote.fork("program", program)
    zygote.close()
    deadline = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
