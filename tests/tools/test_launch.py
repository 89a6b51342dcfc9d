"""``diloco-comm launch``: replicas that are started again, that leave, and that end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import check_arguments, check_misuse, help_examples, run_cli
from commands import CLI, run_python
from registries import Host
from support_paths import FOLDERS
from zygote import Job, Zygote

from diloco_comm import LeftBehind, ReplicaMismatch, SyncError
from diloco_comm.elastic import exits
from diloco_comm.elastic.state_folder import StateFolder
from diloco_comm.group.records import Key
from diloco_comm_tools.common.workers import free_port
from diloco_comm_tools.launch.run import Launch, Launcher, outcome, own_ends, own_status, pause_s

pytestmark = pytest.mark.usefixtures("forked_programs")

LAUNCH = [*CLI, "launch"]

# Worker 0 of replica 1 dies once, in the middle of the run.
SCRIPT = f"""
import os, sys, time
sys.path[:0] = {FOLDERS!r}
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from pathlib import Path
from fault_replicas import make_model, make_optimizer, take_inner_step
from diloco_comm import DiLoCo, Elastic

folder, sync_every = Path(sys.argv[1]), int(sys.argv[2])
model = make_model()
optimizer = make_optimizer(model)
membership = Elastic(
    total_steps=int(sys.argv[3]), min_replicas=2, suspect_after=6, quorum_wait=60
)
mates = None
if int(os.environ["WORLD_SIZE"]) > 1:
    dist.init_process_group("gloo")
    mates = dist.group.WORLD
diloco = DiLoCo(
    model, optimizer, sync_every=sync_every, peers=membership, shard_group=mates
)
number = diloco.members[diloco.replica_index]
mine = folder / f"replica-{{number}}"
with (folder / f"pids-{{number}}").open("a") as file:
    print(os.getpid(), file=file)
with mine.open("a") as file:
    print(diloco.view, diloco.inner_step, file=file)
while not diloco.is_done:
    take_inner_step(model, optimizer, diloco.replica_index, diloco.inner_step + 1)
    time.sleep(0.01)
    if diloco.inner_step == 20 and (folder / "die").exists() and diloco.replica_index == 1:
        (folder / "die").unlink()
        os._exit(9)
rank = int(os.environ["RANK"])
(folder / f"hash-{{diloco.members[diloco.replica_index]}}{{f'-{{rank}}' * (rank > 0)}}").write_text(
    f"{{diloco.outer_hash()}} {{diloco.inner_step}}"
)
diloco.close()
"""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Host]:
    host = Host(journal=tmp_path / "journal")
    yield host
    host.kill()


def start(
    registry: Host,
    folder: Path,
    name: str,
    *arguments: object,
    num_workers: int = 1,
    nodes: list[str] | None = None,
) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT)
    options = ["--registry", registry.address, "--run", "r", "--state-dir", str(folder / name)]
    options += ["--nproc-per-node", str(num_workers), *(nodes or [])]
    return subprocess.Popen(
        [*LAUNCH, *options, str(folder / "train.py"), str(folder), *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.nightly("50 s; test_a_signal_lets_the_replica_leave starts and ends replicas")
@pytest.mark.fresh_interpreter
def test_a_dead_replica_comes_again_and_all_end_at_one_step(registry: Host, tmp_path: Path) -> None:
    (tmp_path / "die").touch()
    launchers = [start(registry, tmp_path, name, 4, 400) for name in "ab"]
    errors = [launcher.communicate(timeout=100)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], errors
    assert "ended with status 75 and starts again in" in "".join(errors)
    ends = {(tmp_path / f"hash-{replica}").read_text() for replica in (0, 1)}
    assert len(ends) == 1 and ends.pop().endswith(" 400")
    starts = [(tmp_path / f"replica-{replica}").read_text().split("\n") for replica in (0, 1)]
    # The second process of replica 1 has the number of the first one.
    assert [len(lines) - 1 for lines in starts] == [1, 2]


SLEEPER = """
import os, sys, time
open(f"{sys.argv[1]}/pid-{os.environ['RANK']}", "w").write(f"{os.getpid()}\\n")
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.fresh_interpreter
def test_all_workers_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script, state = tmp_path / "sleep.py", tmp_path / "state"
    script.write_text(SLEEPER)
    options = ["--registry", "tcp://127.0.0.1:1", "--run", "r", "--state-dir", str(state)]
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    command = [*LAUNCH, *options, "--nproc-per-node", "2", str(script), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as launcher:
        while not all(one.exists() and one.read_text().endswith("\n") for one in files):
            assert launcher.poll() is None
            time.sleep(0.05)
        workers = [int(one.read_text()) for one in files]
        assert all(is_alive(worker) for worker in workers)
        launcher.kill()
    while any(is_alive(worker) for worker in workers):
        time.sleep(0.05)
    # Another launcher may use the folder.
    Launcher(Launch("tcp://127.0.0.1:1", "r", [str(script)], 2, state))


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.nightly("40 s each; they differ in who gets which signal", but=["all"])
@pytest.mark.fresh_interpreter
@pytest.mark.parametrize(
    ("number", "is_for_launcher", "is_for_workers", "num_workers"),
    [
        (signal.SIGTERM, True, False, 1),
        (signal.SIGINT, True, False, 1),
        (signal.SIGTERM, True, True, 1),
        (signal.SIGTERM, True, True, 2),
        (signal.SIGTERM, False, True, 1),
    ],
    ids=["launcher", "launcher-by-ctrl-c", "all", "all-of-two-workers", "worker"],
)
def test_a_signal_lets_the_replica_leave(
    registry: Host,
    tmp_path: Path,
    number: signal.Signals,
    is_for_launcher: bool,
    is_for_workers: bool,
    num_workers: int,
) -> None:
    launchers = [
        start(registry, tmp_path, name, 4, 10**6, num_workers=num_workers) for name in "ab"
    ]
    while not all(len(lines_of(tmp_path / f"pids-{i}")) == num_workers for i in (0, 1)):
        assert all(launcher.poll() is None for launcher in launchers)
        time.sleep(0.05)
    for replica, launcher in enumerate(launchers):
        if is_for_launcher:
            launcher.send_signal(number)
        if is_for_workers:
            for pid in lines_of(tmp_path / f"pids-{replica}"):
                os.kill(int(pid), number)
    errors = [launcher.communicate(timeout=60)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [exits.LEFT, exits.LEFT], errors
    assert all("leaves at its next boundary" in error for error in errors)
    assert not any("starts again" in error for error in errors)


PROGRAM = """
import sys, time
with open(sys.argv[1], "a") as file:
    print(file=file)
time.sleep(float(sys.argv[2]))
sys.exit(3)
"""


def ended_launch(
    folder: Path, at_once_s: float, *options: str, lives_s: float
) -> tuple[int, str, int]:
    """Launch a program that ends with status 3; return how the launcher ended, and the starts."""
    script, starts = folder / "program.py", folder / "starts"
    script.write_text(PROGRAM)
    words = ["--registry", "127.0.0.1:1", "--run", "r", "--state-dir", str(folder / "state")]
    words += [*options, str(script), str(starts), str(lives_s)]
    text = (
        "import atexit, signal\n"
        "from diloco_comm_tools import cli\n"
        "from diloco_comm_tools.launch import run\n"
        f"run._AT_ONCE_S, run._FIRST_PAUSE_S = {at_once_s}, 0.1\n"
        "def check():\n"
        "    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN\n"
        "atexit.register(check)\n"
        "cli.main()\n"
    )
    # Trainers of a cluster set variables of torchrun, which this launch has options for.
    variables = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "3"}
    done = run_python("-c", text, "launch", *words, env=os.environ | variables)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr, len(starts.read_text())


@pytest.mark.fresh_interpreter
def test_a_program_that_fails_at_once_twice_is_not_started_again(tmp_path: Path) -> None:
    """On a busy machine the start alone may take longer than the second that counts."""
    status, said, num_starts = ended_launch(tmp_path, 60.0, lives_s=0.0)
    assert (status, num_starts) == (3, 2), said
    assert "the program has twice ended with status 3 as soon as it was started, and is not" in said
    assert "(restart 1 of 10)" in said and "restart 2" not in said


@pytest.mark.fresh_interpreter
def test_a_program_that_ran_longer_is_started_again(tmp_path: Path) -> None:
    status, said, num_starts = ended_launch(tmp_path, 1.0, "--max-restarts", "2", lives_s=1.5)
    assert (status, num_starts) == (exits.RESTART, 3), said
    assert "the replica has ended with status 75, after 2 restarts" in said


FAKE_TORCHRUN = """
import os, signal, subprocess, sys, time
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from diloco_comm_tools import cli
from diloco_comm_tools.launch import run
run._SHUTDOWN_S = 0.5

def work(arguments):
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
    if HANGS:
        time.sleep(600)
    worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
    failure = ProcessFailure(0, worker.pid, worker.wait(), "")
    raise run.ChildFailedError("work", {0: failure})

run.torchrun.run = work
cli.main()
"""


@pytest.mark.parametrize("hangs", [True, False], ids=["torchrun-hangs", "a-worker-starts-later"])
def test_a_second_signal_ends_a_launcher_before_it_has_workers(tmp_path: Path, hangs: bool) -> None:
    (tmp_path / "x.py").touch()
    words = ["--registry", "127.0.0.1:1", "--run", "r", "--state-dir", str(tmp_path / "state")]
    text = FAKE_TORCHRUN.replace("HANGS", str(hangs))
    done = run_python("-c", text, "launch", *words, tmp_path / "x.py")
    assert done.returncode == 1, done.stderr


@pytest.mark.parametrize(
    ("failed", "is_stopped", "own"),
    [
        ([1, 143, 3], False, [1, -15, -15]),
        ([143, -15], False, [143, -15]),
        ([143, 1], True, [-15, -15]),
        ([1, 78, 69, 75, -9], True, [-15, 78, 69, 75, -9]),
        ([], True, []),
    ],
)
def test_a_worker_that_was_ended_does_not_speak_for_its_program(
    failed: list[int], is_stopped: bool, own: list[int]
) -> None:
    assert own_ends(failed, is_stopped) == own


@pytest.mark.parametrize(
    ("failed", "own"), [((3,), 3), ((-15, 3), 3), ((-9,), None), ((75, 3), None), ((), None)]
)
def test_the_status_of_a_program(failed: tuple[int, ...], own: int | None) -> None:
    assert own_status(failed) == own


@pytest.mark.nightly(
    "2 s each; they differ in the error",
    but=["SyncError('x', stage='left')-143", "ValueError('x')-1"],
)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("ReplicaMismatch('x')", exits.MISFIT),
        ("LeftBehind('x')", exits.RESTART),
        ("SyncError('x', stage='vote')", exits.RESTART),
        ("SyncError('x', stage='quorum')", exits.UNAVAILABLE),
        ("SyncError('x', stage='left')", exits.LEFT),
        ("ValueError('x')", 1),
    ],
)
def test_an_error_ends_the_process_with_its_status(zygote: Zygote, error: str, status: int) -> None:
    names = (LeftBehind, ReplicaMismatch, SyncError)
    script = f"""
        from diloco_comm import {", ".join(name.__name__ for name in names)}
        from diloco_comm.elastic.exits import end_with_status
        end_with_status()
        end_with_status()
        raise {error}
    """
    ended, text = Job(zygote, script).finish()
    assert ended == status
    assert text.count("Traceback") == (status != exits.LEFT)


@pytest.mark.parametrize(
    ("failed", "has_left", "is_asked", "status"),
    [
        ((), False, False, exits.DONE),
        ((), True, False, exits.LEFT),
        ((), False, True, exits.DONE),
        ((), True, True, exits.LEFT),
        ((1,), True, False, 1),
        ((-9, -15), False, False, exits.RESTART),
        ((1,), False, False, exits.RESTART),
        ((75,), False, False, exits.RESTART),
        ((-15, 78), False, False, exits.MISFIT),
        ((69,), False, False, exits.UNAVAILABLE),
        ((-15, 143), False, False, exits.LEFT),
        ((1,), False, True, 1),
        ((-15,), False, True, exits.LEFT),
        ((-15, -9), False, True, 1),
    ],
)
def test_the_status_of_a_replica(
    failed: tuple[int, ...], has_left: bool, is_asked: bool, status: int
) -> None:
    assert outcome(failed, has_left, is_asked) == status


# ---------------------------------------------------------------------- replicas of several nodes

# Each worker says that it has begun, and leaves when it is asked to.
MEMBER = """
import os, sys, time
from pathlib import Path
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
with open(f"{sys.argv[1]}/rank-{os.environ['RANK']}", "a") as file:
    print(os.getpid(), *(os.environ[name] for name in names), file=file)
while not Path(os.environ["DILOCO_COMM_STATE_DIR"], "leave").exists():
    time.sleep(0.05)
sys.exit(143)
"""


class Node:
    """The launcher of a node, in a process of its own, with a patience of six seconds."""

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        node: int,
        *options: str,
        limit_s: float = 90.0,
        script: str = MEMBER,
    ) -> None:
        (folder / "member.py").write_text(script)
        words = ["--registry", "tcp://127.0.0.1:1", "--run", "r", "--nnodes", "2"]
        words += ["--node-rank", str(node), "--rdzv-endpoint", endpoint, *options]
        if "--state-dir" not in options:
            words += ["--state-dir", str(folder / "state")]
        limits = {"DILOCO_COMM_SUSPECT_AFTER_S": "6", "DILOCO_COMM_TIMEOUT_S": str(limit_s)}
        self.process = subprocess.Popen(
            [*LAUNCH, *words, str(folder / "member.py"), str(folder)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | limits,
        )

    def end(self, status: int) -> str:
        """Wait for the launcher's end; return what the launcher has said."""
        said = self.process.communicate(timeout=100)[1]
        assert self.process.returncode == status, said
        assert "Traceback" not in said
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def wait_for_members(folder: Path, num_starts: int, num_workers: int = 4) -> list[list[str]]:
    """Wait until each worker has been started so often; return the words of its last start."""
    while True:
        lines = [lines_of(folder / f"rank-{rank}") for rank in range(num_workers)]
        if all(len(one) >= num_starts for one in lines):
            return [one[-1].split() for one in lines]
        time.sleep(0.05)


@pytest.fixture
def endpoint() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.mark.fresh_interpreter
def test_two_nodes_form_one_replica_and_start_and_leave_together(
    tmp_path: Path, endpoint: str
) -> None:
    launchers = [Node(tmp_path, endpoint, node, "--nproc-per-node", "2") for node in (1, 0)]
    try:
        members = wait_for_members(tmp_path, 1)
        host, ports = endpoint.partition(":")[0], {words[6] for words in members}
        for rank, (_, *words) in enumerate(members):
            assert words[:5] == [str(rank), "4", str(rank % 2), str(rank // 2), host]
        assert len(ports) == 1
        os.kill(int(members[3][0]), signal.SIGKILL)
        again = wait_for_members(tmp_path, 2)
        assert not {words[0] for words in members} & {words[0] for words in again}
        assert {words[6] for words in again} != ports
        launchers[0].process.terminate()
        said = [launcher.end(exits.LEFT) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert "SIGTERM: the replica leaves at its next boundary" in said[0]
    assert "SIGTERM on node 1: the replica leaves at its next boundary" in said[1]
    assert "ended with status 75 and starts again in" in said[1]
    assert all(len(lines_of(tmp_path / f"rank-{rank}")) == 2 for rank in range(4))


@pytest.mark.nightly("20 s each; the test above restarts a replica of two nodes")
@pytest.mark.fresh_interpreter
@pytest.mark.parametrize("lost", [0, 1])
def test_a_launcher_that_was_killed_comes_again(tmp_path: Path, endpoint: str, lost: int) -> None:
    launchers = [Node(tmp_path, endpoint, node) for node in (0, 1)]
    try:
        wait_for_members(tmp_path, 1, 2)
        launchers[lost].kill()
        launchers[lost] = Node(tmp_path, endpoint, lost)
        members = wait_for_members(tmp_path, 2, 2)
        assert [words[1:3] for words in members] == [["0", "2"], ["1", "2"]]
        launchers[0].process.terminate()
        for launcher in launchers:
            launcher.end(exits.LEFT)
    finally:
        for launcher in launchers:
            launcher.kill()


@pytest.mark.nightly("10 s; test_two_nodes_form_one_replica is in the first tier")
@pytest.mark.fresh_interpreter
def test_a_node_whose_first_node_is_lost_waits_and_says_so(tmp_path: Path, endpoint: str) -> None:
    first, second = (Node(tmp_path, endpoint, node, limit_s=8.0) for node in (0, 1))
    try:
        (_, worker) = wait_for_members(tmp_path, 1, 2)
        first.kill()
        said = second.end(exits.UNAVAILABLE)
        assert not is_alive(int(worker[0]))
    finally:
        second.kill()
    assert f"waited 8 s for the launcher of node 0 at {endpoint}: " in said


@pytest.mark.nightly("3 s; the other option has the same way", but=["--max-restarts"])
@pytest.mark.parametrize("option", ["--nproc-per-node", "--max-restarts"])
def test_settings_that_differ_between_nodes_are_named(
    tmp_path: Path, endpoint: str, option: str
) -> None:
    launchers = [Node(tmp_path, endpoint, node, option, f"{node + 1}") for node in (0, 1)]
    for launcher in launchers:
        said = launcher.end(exits.MISFIT)
        assert said.count(f"{option} is 1 on node 0 and 2 on node 1: all nodes") == 1


@pytest.mark.nightly("10 s; test_settings_that_differ has another refusal")
@pytest.mark.fresh_interpreter
def test_a_second_launcher_of_a_node_is_refused(tmp_path: Path, endpoint: str) -> None:
    launchers = [Node(tmp_path, endpoint, node) for node in (0, 1)]
    try:
        wait_for_members(tmp_path, 1, 2)
        other = Node(tmp_path, endpoint, 1, "--state-dir", str(tmp_path / "other"))
        said = other.end(exits.MISFIT)
        assert "another launcher with --node-rank 1 runs already" in said
        again = Node(tmp_path, endpoint, 0, "--state-dir", str(tmp_path / "other"))
        assert "node 0 cannot listen at --rdzv-endpoint" in again.end(2)
        assert all(len(lines_of(tmp_path / f"rank-{rank}")) == 1 for rank in (0, 1))
        launchers[1].process.terminate()
        for launcher in launchers:
            launcher.end(exits.LEFT)
    finally:
        for launcher in launchers:
            launcher.kill()


@pytest.mark.nightly("3 s each; they differ in who listens", but=["True"])
@pytest.mark.parametrize("is_mute", [True, False])
def test_an_endpoint_that_does_not_answer(tmp_path: Path, endpoint: str, is_mute: bool) -> None:
    """A mute port accepts a connection, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        place = f"127.0.0.1:{mute.getsockname()[1]}" if is_mute else endpoint
        said = Node(tmp_path, place, 1, limit_s=1.0).end(exits.UNAVAILABLE)
    assert f"waited 1 s for the launcher of node 0 at {place}: " in said
    assert len(said.splitlines()) == 1


@pytest.mark.nightly("3 s; test_an_endpoint_that_does_not_answer has the other side")
def test_a_node_that_does_not_come_is_named(tmp_path: Path, endpoint: str) -> None:
    said = Node(tmp_path, endpoint, 0, limit_s=1.0).end(exits.UNAVAILABLE)
    assert said == f"diloco-comm: waited 1 s for node 1 to come to {endpoint}\n"


# A worker of node 0 fails once; the others turn SIGTERM into a status, as many programs do.
HANDLING = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
rank = os.environ["RANK"]
with open(f"{sys.argv[1]}/rank-{rank}", "a") as file:
    print(os.getpid(), file=file)
fails = Path(sys.argv[1], "fail")
while not Path(os.environ["DILOCO_COMM_STATE_DIR"], "leave").exists():
    time.sleep(0.05)
    if rank == "0" and fails.exists():
        fails.unlink()
        sys.exit(1)
sys.exit(143)
"""


@pytest.mark.nightly("20 s; test_a_worker_that_was_ended has the statuses")
@pytest.mark.fresh_interpreter
def test_a_handler_of_sigterm_does_not_let_the_replica_leave(tmp_path: Path, endpoint: str) -> None:
    options = ["--nproc-per-node", "2"]
    launchers = [Node(tmp_path, endpoint, node, *options, script=HANDLING) for node in (0, 1)]
    try:
        wait_for_members(tmp_path, 1)
        (tmp_path / "fail").touch()
        wait_for_members(tmp_path, 2)
        launchers[1].process.terminate()
        for launcher in launchers:
            launcher.end(exits.LEFT)
    finally:
        for launcher in launchers:
            launcher.kill()


# The worker of node 0 ends at once, and the other one hears no signal.
DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(f"{sys.argv[1]}/rank-{os.environ['RANK']}", "a") as file:
    print(os.getpid(), file=file)
if os.environ["RANK"] == "1":
    time.sleep(600)
"""


@pytest.mark.nightly("20 s each; test_a_second_signal_is_obeyed has the launchers' words")
@pytest.mark.fresh_interpreter
@pytest.mark.parametrize("asked", [0, 1])
def test_two_signals_for_one_launcher_end_all(tmp_path: Path, endpoint: str, asked: int) -> None:
    launchers = [Node(tmp_path, endpoint, node, script=DEAF) for node in (0, 1)]
    try:
        members = wait_for_members(tmp_path, 1, 2)
        while is_alive(int(members[0][0])):
            time.sleep(0.05)
        for _ in range(2):
            launchers[asked].process.terminate()
            time.sleep(1.0)
        said = [launcher.end(1) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert "a second signal there ends it now" in said[1 - asked]
    assert f"SIGTERM on node {asked}: this second signal has ended the replica" in said[1]


@pytest.mark.nightly("30 s; the tests above have the launchers of two nodes")
@pytest.mark.fresh_interpreter
def test_a_replica_of_two_nodes_trains_with_a_replica_of_one(
    registry: Host, tmp_path: Path, endpoint: str
) -> None:
    nodes = [["--nnodes", "2", "--node-rank", f"{i}", "--rdzv-endpoint", endpoint] for i in (0, 1)]
    launchers = [start(registry, tmp_path, "a", 4, 80, nodes=words) for words in nodes]
    launchers.append(start(registry, tmp_path, "b", 4, 80, num_workers=2))
    errors = [launcher.communicate(timeout=100)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0, 0], errors
    # Each worker has a part of the outer state.
    for part in ("", "-1"):
        ends = {(tmp_path / f"hash-{replica}{part}").read_text() for replica in (0, 1)}
        assert len(ends) == 1 and ends.pop().endswith(" 80")
    assert [len(lines_of(tmp_path / f"pids-{replica}")) for replica in (0, 1)] == [2, 2]


def test_pauses_grow_up_to_a_limit() -> None:
    for number, longest in ((1, 1.0), (3, 4.0), (40, 60.0)):
        pauses = [pause_s(number) for _ in range(50)]
        assert len(set(pauses)) > 1
        assert all(0.5 * longest <= pause <= 1.5 * longest for pause in pauses)


def test_a_folder_is_of_one_run_and_one_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    options = ["launch", "--registry", "tcp://127.0.0.1:1", "--state-dir", tmp_path / "state"]
    StateFolder(tmp_path / "state").remember("other", Key(3, bytes(16)))
    check_misuse(run_cli(*options, "--run", "r", script), "'other'", "'r'")
    sound = {"run": "r", "replica": 3, "nonce": "n", "registry": "", "view": 0}
    before_0_2 = {"run": "r", "replica": 3, "nonce": "n"}
    file = tmp_path / "state" / "replica.json"
    wrong = [{**sound, name: [7]} for name in sound] + [{**sound, "replica": -1}]
    for damaged in ([1], {}, before_0_2, *wrong):
        file.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=r"is damaged, or of a version before .*: delete"):
            StateFolder(tmp_path / "state").last_process("r")
    file.write_bytes(b"\xff" * 1000)
    check_misuse(run_cli(*options, "--run", "r", script), "replica.json is damaged")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--registry", "10.0.0.5", "--run", "r", "x.py"], "--registry must be tcp://host:port"),
        (
            ["--registry", "http://10.0.0.5:1", "--run", "r", "x.py"],
            "--registry must be tcp://host",
        ),
        (["--registry", "tcp://127.0.0.1:1", "--run", "a b", "x.py"], "--run"),
        (["--registry", "tcp://127.0.0.1:1", "--run", "r", "missing.py"], "missing.py"),
        (["--run", "r", "x.py"], "--registry"),
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank must be below --nnodes 2, got 2"),
        (["--nnodes", "2"], "--nnodes 2 needs --rdzv-endpoint host:port"),
        (["--nnodes", "2", "--rdzv-endpoint", "a"], "--rdzv-endpoint must be"),
        (["--nnodes", "1", "--rdzv-endpoint", "a"], "--rdzv-endpoint must be"),
        (["--nnodes", "2", "--rdzv-endpoint", "0.0.0.0:9"], "--rdzv-endpoint must name node 0"),
        (["--nnodes", "2", "--rdzv-endpoint", "192.0.2.1:9"], "node 0 cannot listen at --rdzv-"),
    ],
)
def test_wrong_arguments_are_one_sentence(tmp_path: Path, arguments: list[str], named: str) -> None:
    if "--nnodes" in arguments:
        (tmp_path / "x.py").touch()
        arguments = ["--registry", "tcp://127.0.0.1:1", "--run", "r", *arguments]
        arguments += ["--state-dir", str(tmp_path / "state"), str(tmp_path / "x.py")]
    check_misuse(run_cli("launch", *arguments), named)


def test_the_examples_of_the_help_are_accepted() -> None:
    for line in help_examples("launch")["launch"]:
        check_arguments(line.split()[1:], line)
