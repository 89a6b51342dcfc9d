"""``diloco-comm doctor``: facts, the self-test, checks of a job, findings, sentences."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import check_documented, check_misuse, check_schema, examples, run_cli
from commands import CLI, run_command, run_python
from workers import Pool

from diloco_comm import __version__, ops
from diloco_comm.ops import implementations
from diloco_comm_tools.common import workers
from diloco_comm_tools.doctor import command as doctor_command
from diloco_comm_tools.doctor import facts as doctor
from diloco_comm_tools.doctor import job as doctor_job
from diloco_comm_tools.doctor import job as doctor_selftest
from diloco_comm_tools.doctor import report as doctor_report
from diloco_comm_tools.doctor.facts import Finding

pytestmark = pytest.mark.usefixtures("forked_programs")

FINDING = {"level": str, "what": str, "remedy": str}
SCHEMA: dict[str, Any] = {
    "schema": int,
    "versions": {...: (str, None)},
    "extension": {
        "path": (str, None),
        "error": (str, None),
        "implementations": [str],
        "default": (str, None),
    },
    "processor": {
        "model": str,
        "architecture": str,
        "features": str,
        "cores": int,
        "threads": int,
        "memory_gib": float,
    },
    "gpu": {
        "cuda": (str, None),
        "rocm": (str, None),
        "nccl": (str, None),
        "devices": [str],
        "operators": [str],
    },
    "network": {
        "hostname_resolves_to": (str, None),
        "interfaces": [str],
        "gloo_interface": (str, None),
        "nccl_interface": (str, None),
    },
    "settings": {"timeout_s": (float, None), "environment": {...: str}},
    "self_test": ({"ok": bool, "seconds": float, "error": (str, None), "in_time": bool}, None),
    "job": (
        {
            "world": int,
            "replicas": (int, None),
            "host_of_rank": [int],
            "differences": {...: {...: [int]}},
            "links": [{"ranks": [int], "latency_us": float, "gbps": float}],
        },
        None,
    ),
    "findings": [FINDING],
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("DILOCO_COMM_", "GLOO_", "NCCL_", "SLURM_", "TORCH_NCCL_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)


def facts_with(**changes: Any) -> dict[str, Any]:
    """Facts of this machine with some replaced: ``network={"gloo_interface": "lo"}``."""
    facts = copy.deepcopy(doctor.examine())
    facts["network"]["hostname_resolves_to"] = "10.0.0.1"
    for section, values in changes.items():
        facts[section].update(values)
    return facts


def test_the_password_of_a_proxy_is_no_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_COMM_PROXY_PASSWORD", "sesame")
    facts = doctor.examine()
    assert facts["settings"]["environment"]["DILOCO_COMM_PROXY_PASSWORD"] == "***"
    assert "sesame" not in json.dumps(facts)
    assert not [one for one in doctor.judge(facts) if "PASSWORD" in one.what]


# ------------------------------------------------------------------------ the command


@pytest.mark.fresh_interpreter
def test_first_example_passes_its_own_test() -> None:
    first, *_ = examples(doctor_command.EXAMPLES)
    ended = run_cli(*first, "--json")
    report = json.loads(ended.out)
    check_schema(report, SCHEMA)
    assert report["self_test"]["ok"], report["self_test"]
    assert report["versions"]["diloco_comm"] == __version__
    assert report["versions"]["torch"] == torch.__version__
    assert report["extension"]["default"] == ops.available_impls()[-1]
    assert (ended.status, ended.err) == (0, "")


def test_second_example_prints_json_without_a_test() -> None:
    _, second, _ = examples(doctor_command.EXAMPLES)
    ended = run_cli(*second)
    report = json.loads(ended.out)
    check_schema(report, SCHEMA)
    assert (ended.status, ended.err, report["self_test"]) == (0, "", None)


def test_text_tells_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_COMM_IMPL", "scalar")
    monkeypatch.setenv("DILOCO_COMM_LANE", "2")
    ended = run_cli("doctor", "--no-self-test")
    assert ended.status == 0
    words = " ".join(ended.out.split())
    assert f"torch {torch.__version__}" in words
    assert "chosen: scalar" in words
    assert "warning: nothing reads DILOCO_COMM_LANE; the variables are DILOCO_COMM_" in words


def test_the_line_of_a_gpu_says_what_serves_it_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "the extension was built without CUDA kernels"
    monkeypatch.setattr(implementations, "cuda_obstacle", lambda device=None: why)
    monkeypatch.setattr(implementations, "has_triton", lambda: True)
    gpu = {"cuda": "12.8", "rocm": None, "nccl": None, "devices": ["A", "B"]}
    gpu["operators"] = ["served by CUDA kernels", implementations.served_by(0)]
    why = "served by Triton, because the extension was built without CUDA kernels"
    lines = f"A, served by CUDA kernels\nB, {why}; torch has CUDA 12.8"
    assert doctor_report._gpu(gpu) == lines


@pytest.mark.parametrize(
    ("impl", "capability", "built", "triton", "support", "sentence"),
    [
        ("triton", (9, 0), True, True, [1], "served by Triton, because DILOCO_COMM_IMPL is triton"),
        ("scalar", (9, 0), True, True, [1], "served by CUDA kernels"),
        ("cuda", (9, 0), False, True, [], "not served: impl must be one of triton on cuda tensors"),
        ("cuda", (9, 0), True, True, [0, 13000, 12080, 0], "not served: impl must be one of trit"),
        ("", (9, 0), True, True, [0, 13000, 12080, 0], "served by Triton, because the driver is"),
        ("", (9, 0), False, False, [], "not served: Triton is needed here, because the extension"),
        ("", (7, 5), True, True, [0, 13000, 13000, 750, 800], "not served: a tensor is on cuda:0"),
        ("", (9, 0), True, True, None, "not served: CUDA is not initialised"),
    ],
)
def test_a_gpu_that_the_operators_refuse_is_an_error(
    impl: str,
    capability: tuple[int, int],
    built: bool,
    triton: bool,
    support: list[int] | None,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """The driver's answer is a list, or an error that the probe raises."""

    def ask(device: int) -> list[int]:
        if support is None:
            raise RuntimeError("CUDA is not initialised\nraised from here")
        return support if len(support) > 1 else [1, 13000, 13000, 900, 900]

    monkeypatch.setenv("DILOCO_COMM_IMPL", impl)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.ops.diloco_comm, "_cuda_support", ask, raising=False)
    monkeypatch.setattr(implementations, "_has_built_kernels", lambda: built)
    monkeypatch.setattr(implementations, "has_triton", lambda: triton)
    facts = doctor.examine()
    (said,) = facts["gpu"]["operators"]
    assert said.startswith(sentence) and "\n" not in said
    errors = [finding.what for finding in doctor.judge(facts) if finding.level == "error"]
    is_served = said.startswith("served")
    assert errors == ([] if is_served else [f"GPU 0, A, is {said}"])
    if not is_served:
        with pytest.raises((ValueError, RuntimeError)):
            ops.resolve_impl("", "cuda", "encode", 0)
    assert not recwarn.list


def test_errors_set_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_COMM_IMPL", "abacus")
    ended = run_cli("doctor", "--json")
    report = json.loads(ended.out)
    check_schema(report, SCHEMA)
    assert ended.status == 1
    # An extension that cannot be used is not tested.
    assert report["self_test"] is None
    assert report["findings"][0]["level"] == "error"
    assert "abacus" in report["findings"][0]["what"]


def test_documented_keys_are_those_of_the_json() -> None:
    keys = {*SCHEMA, *FINDING}
    for section in ("extension", "processor", "gpu", "network", "settings"):
        keys |= SCHEMA[section].keys()
    for section in ("self_test", "job"):
        keys |= SCHEMA[section][0].keys()
    check_documented(keys, "reference/doctor.md")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--replicas", 2], "--replicas is for a launched job"),
        (["--megabytes", 8], "--megabytes is for a launched job: start doctor by torchrun or srun"),
        (["--megabytes", 0], "--megabytes must be a positive number, got 0"),
        (["--timeout", "inf"], "--timeout must be a positive number, got inf"),
    ],
)
def test_impossible_requests_are_one_sentence(arguments: list[object], named: str) -> None:
    check_misuse(run_cli("doctor", *arguments), named)


# ------------------------------------------------------------------------ the self-test


def test_self_test_reports_a_replica_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_COMM_IMPL", "abacus")
    result = doctor_selftest.run_self_test(100)
    assert not result["ok"] and result["in_time"]
    assert "impl must be one of" in result["error"] and "abacus" in result["error"]


def test_self_test_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text("import signal; signal.pause()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(doctor_selftest, "MODULE", "endless")
    ended = run_cli("doctor", "--timeout", "1e-9")
    assert ended.status == 1
    (said,) = [line for line in ended.out.splitlines() if line.startswith("error: ")]
    assert said == (
        "error: the self-test failed: replica 0 did not end within 1e-09 s; "
        "the machine may be busy: --timeout raises the limit"
    )


# ------------------------------------------------------------------------ findings


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"network": {"hostname_resolves_to": "127.0.1.1"}}, "warning", "resolves to 127.0.1.1"),
        ({"network": {"hostname_resolves_to": "::1"}}, "warning", "resolves to ::1"),
        ({"network": {"hostname_resolves_to": None}}, "warning", "does not resolve"),
        ({"network": {"gloo_interface": "lo,eth77"}}, "error", "names eth77, which does not exist"),
        ({"settings": {"timeout_s": 5.0}}, "warning", "an exchange fails after 5 s"),
        (
            {"settings": {"timeout_s": None, "environment": {"DILOCO_COMM_TIMEOUT_S": "x"}}},
            "error",
            "DILOCO_COMM_TIMEOUT_S must be a positive number, got 'x'",
        ),
        (
            {"settings": {"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}},
            "warning",
            "the exchange's streams wait behind the training's",
        ),
        ({"extension": {"error": "the C++ extension is not built"}}, "error", "not built"),
    ],
)
def test_traps_are_found(changes: dict[str, Any], level: str, words: str) -> None:
    (finding,) = doctor.judge(facts_with(**changes))
    assert finding.level == level
    assert words in finding.what


def test_a_machine_without_traps_has_no_findings() -> None:
    assert doctor.judge(facts_with()) == []
    # The library sets these itself, around its own group.
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"):
        for value in ("0", "1", "3"):
            assert doctor.judge(facts_with(settings={"environment": {name: value}})) == []
    # Where an interface is named, the host's name does not matter.
    network = {"gloo_interface": "lo", "hostname_resolves_to": "127.0.0.1"}
    assert doctor.judge(facts_with(network=network)) == []


# ------------------------------------------------------------------------ jobs


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
            {"rank": 3, "world": 4, "local_rank": 1},
        ),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"},
            {"rank": 5, "world": 8, "local_rank": 1},
        ),
    ],
)
def test_launchers_are_known(environment: dict[str, str], job: dict[str, int] | None) -> None:
    assert doctor_job.launch(environment) == job


def examine_in_job(
    rank: int, world: int, versions: dict[int, str], replicas: int | None
) -> tuple[dict[str, Any], list[Finding]]:
    facts = copy.deepcopy(doctor.examine())
    facts["versions"]["torch"] = versions.get(rank, "2.13.0")
    own = [Finding("warning", "only here", "none")] if rank == 1 else []
    own.append(Finding("warning", "everywhere", "none"))
    job = doctor_job.examine_job(facts, replicas, 100_000)
    return job, [*doctor_job.gather_findings(own), *doctor_job.judge_job(job)]


def test_ranks_see_the_same_job(workers: Callable[[int], Pool]) -> None:
    results = workers(3).run(examine_in_job, {2: "2.6.0"}, 3)
    job, findings = results[0]
    assert all(result == results[0] for result in results)
    assert job["host_of_rank"] == [0, 0, 0]
    assert job["differences"] == {"torch": {"2.13.0": [0, 1], "2.6.0": [2]}}
    assert [link["ranks"] for link in job["links"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(link["latency_us"] > 0 and link["gbps"] > 0 for link in job["links"])
    words = {finding.what: finding.level for finding in findings}
    assert words["torch differs: 2.13.0 on ranks 0, 1; 2.6.0 on rank 2"] == "error"
    assert {"everywhere", "rank 1: only here"} <= words.keys()


def test_workers_of_a_replica_are_told_of_ddp(workers: Callable[[int], Pool]) -> None:
    _, findings = workers(2).run(examine_in_job, {}, 2)[0]
    assert not any("DistributedDataParallel" in finding.what for finding in findings)
    job = {"world": 4, "replicas": 2, "differences": {}, "links": []}
    (finding,) = doctor_job.judge_job(job)
    assert finding.what.startswith("2 replicas of 2 ranks: DistributedDataParallel averages over")


def test_a_slow_link_is_named() -> None:
    links = [{"ranks": [0, i], "latency_us": 10.0, "gbps": g} for i, g in enumerate((9, 10, 2), 1)]
    job = {"world": 4, "replicas": None, "differences": {}, "links": links}
    (finding,) = doctor_job.judge_job(job)
    assert finding.what == "ranks 0 and 3 have 2 Gbit/s, the median is 9"


@pytest.mark.parametrize("world", [2, 5, 16, 17, 100])
def test_every_rank_is_in_a_pair(world: int) -> None:
    pairs = doctor_job.pairs_of(world)
    assert len(pairs) == len(set(pairs)) <= max(doctor_job.MOST_PAIRS, 3 * world // 2)
    assert {rank for pair in pairs for rank in pair} == set(range(world))
    assert all(0 <= a < b < world for a, b in pairs)
    if world <= 16:
        assert len(pairs) == world * (world - 1) // 2


def test_example_under_torchrun_speaks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (line,) = [line for line in doctor_command.EXAMPLES.splitlines() if "torchrun" in line]
    port = str(workers.free_port())
    launcher = ["-m", "torch.distributed.run", "--master-port", port]
    ended = run_python(*launcher, *line.split()[1:], "--json", "--megabytes", "0.1")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    check_schema(report, SCHEMA)
    assert (report["job"]["world"], report["job"]["replicas"]) == (2, 2)
    assert len(report["job"]["links"]) == 1
    assert report["self_test"] is None


@pytest.mark.fresh_interpreter
@pytest.mark.nightly("a fresh interpreter; the test below has the sentence")
def test_a_rank_that_is_not_there_leaves_no_stack() -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(workers.free_port())}
    ended = run_command(
        [*CLI, "doctor", "--timeout", "1"],
        env=os.environ | place | {"RANK": "1", "WORLD_SIZE": "2"},
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("diloco-comm: rank 1 of 2 did not get through to the others (--timeout")


def test_missing_rank_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    check_misuse(run_cli("doctor"), "no MASTER_ADDR and MASTER_PORT to meet at")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    ended = run_cli("doctor", "--timeout", "1")
    assert (ended.status, ended.out) == (1, "")
    assert "rank 0 of 2 did not get through to the others (--timeout 1 s): " in ended.err
    assert len(ended.err.splitlines()) == 1
