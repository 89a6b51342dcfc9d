"""The batch scripts parse, and do what they say with stand-ins for srun and nsys."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import check_arguments
from commands import run_command

from diloco_comm.base.store_host import open_store
from diloco_comm_tools.common.workers import free_port

ROOT = Path(__file__).resolve().parents[2]
SLURM = ROOT / "examples" / "slurm"


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def environment(folder: Path, **variables: str) -> dict[str, str]:
    python = Path(sys.executable).parent
    return os.environ | {"PATH": f"{folder}:{python}:{os.environ['PATH']}"} | variables


@pytest.mark.parametrize("script", sorted(p.name for p in SLURM.iterdir() if ".s" in p.name))
def test_the_scripts_parse(script: str) -> None:
    assert subprocess.run(["bash", "-n", str(SLURM / script)]).returncode == 0


def test_the_commands_have_options_that_exist() -> None:
    commands = [
        (script.name, shlex.split(found))
        for script in SLURM.glob("*.s*")
        for found in re.findall(r"^(?:srun )?diloco-comm (.*)$", script.read_text(), re.MULTILINE)
    ]
    assert commands
    for name, words in commands:
        check_arguments(words, name)


@pytest.mark.nightly("20 s; test_faults_store has jobs of their own that meet at a store")
@pytest.mark.parametrize(
    ("script", "name", "num_workers", "most"),
    [
        ("replica.sbatch", "replica {}", 1, 1.0),
        ("replica_nodes.sbatch", "replica {} worker {}", 2, 6.0),
    ],
)
def test_each_replica_is_a_job_of_its_own(
    script: str, name: str, num_workers: int, most: float, tmp_path: Path
) -> None:
    stand_in(tmp_path, "srun", 'exec "$@"')
    stand_in(tmp_path, "scontrol", "echo 127.0.0.1")
    store = open_store("127.0.0.1", 0)
    jobs = [
        subprocess.Popen(
            ["bash", str(SLURM / script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(
                tmp_path,
                STORE=store.address,
                REPLICA=str(replica),
                REPLICAS="2",
                GLOO_SOCKET_IFNAME="lo",
                SLURM_NTASKS="1",
                SLURM_NNODES="1",
                SLURM_JOB_ID=str(replica),
                SLURM_JOB_NODELIST="node",
                RENDEZVOUS_PORT=str(free_port()),
                WORKERS_PER_NODE=str(num_workers),
            ),
        )
        for replica in range(2)
    ]
    hashes: list[list[str]] = []
    for replica, job in enumerate(jobs):
        output, errors = job.communicate(timeout=100)
        assert job.returncode == 0, errors
        hashes.append([])
        for worker, line in enumerate(sorted(output.splitlines())):
            form = rf"{name.format(replica, worker)}: loss (\d\.\d{{3}})  (\w{{16}})"
            found = re.fullmatch(form, line)
            assert found is not None, output
            # The sum of eight standard normal numbers has variance 8.
            assert float(found[1]) < most
            hashes[-1].append(found[2])
    assert hashes[0] == hashes[1] and len(hashes[0]) == num_workers


@pytest.mark.parametrize("script", ["replica.sbatch", "replica_nodes.sbatch"])
def test_a_job_without_its_variables_says_which(script: str) -> None:
    ended = run_command(["bash", str(SLURM / script)], cwd=ROOT)
    assert ended.returncode != 0
    assert "STORE: the address that diloco-comm store printed" in ended.stderr


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "3"}, "nsys --output=profiles/rank-3 work"),
        ({"SLURM_PROCID": "2"}, "nsys --output=profiles/rank-2 work"),
        ({"RANK": "8", "DILOCO_PROFILE_RANKS": "0,8"}, "nsys --output=profiles/rank-8 work"),
        ({"RANK": "1", "DILOCO_PROFILE_RANKS": "0,10"}, "work"),
    ],
)
def test_a_profile_for_each_rank(variables: dict[str, str], expected: str, tmp_path: Path) -> None:
    stand_in(tmp_path, "nsys", 'for last in "$@"; do :; done; echo nsys "${@: -2:1}" "$last"')
    stand_in(tmp_path, "work", "echo work")
    command = ["bash", str(SLURM / "profile_rank.sh"), "work"]
    ended = run_command(command, cwd=tmp_path, env=environment(tmp_path, **variables))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == expected.split()


def test_without_nsys_the_command_runs(tmp_path: Path) -> None:
    stand_in(tmp_path, "work", "echo work")
    command = ["bash", str(SLURM / "profile_rank.sh"), "work"]
    bare = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RANK": "0"}
    ended = run_command(command, cwd=tmp_path, env=bare)
    assert ended.stdout == "work\n"
    assert ended.stderr == "profile_rank.sh: nsys is not installed, running rank 0 without it\n"
