"""The launcher of this process, and replicas that hide the launcher from their trainers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_python, torchrun

from diloco_comm.base import launch
from diloco_comm.base.launch import Launch

pytestmark = pytest.mark.usefixtures("forked_programs")

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "4242",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29400"}


def test_nobody_launched_this_process() -> None:
    assert launch.find({}) is None
    # A batch script has these, but its processes are no tasks.
    assert launch.find({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None


def test_srun() -> None:
    assert launch.find(SRUN) == Launch(5, 8, 1, 4, "node07", 15242)
    chosen = launch.find({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2"})
    assert chosen is not None
    assert (chosen.master_addr, chosen.master_port) == ("10.0.0.1", 2)


def test_torchrun_within_srun_wins() -> None:
    found = launch.find({**SRUN, **TORCHRUN})
    assert found == Launch(1, 2, 1, 1, "127.0.0.1", 29400)
    assert found is not None and found.variables()["RANK"] == "1"


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("login1", "login1"),
        ("a1,b2", "a1"),
        ("node[07-09,12],login1", "node07"),
        ("n[3]", "n3"),
        ("r1n[10-11]-ib,x", "r1n10-ib"),
    ],
)
def test_first_host(node_list: str, host: str) -> None:
    assert launch.first_host(node_list) == host


def test_bad_variables_are_one_sentence() -> None:
    with pytest.raises(ValueError, match="RANK must be a whole number, got 'one'"):
        launch.find({**TORCHRUN, "RANK": "one"})
    with pytest.raises(ValueError, match="set MASTER_ADDR to rank 0's"):
        launch.find({**SRUN, "SLURM_STEP_NODELIST": ""})


TRAINED = """
from diloco_comm.integrations.launch import replica_per_process
replicas = replica_per_process()
import torch
from diloco_comm import SGD, DiLoCo, Link
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, 1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
link, peers = Link(timeout=30), replicas["peers"]
with DiLoCo(model, optimizer, sync_every=1, outer=SGD(1.0), wire="fp32", link=link, peers=peers):
    model.weight.grad = torch.full((1, 1), float(RANK + 1))
    optimizer.step()
tell(device=os.environ["CUDA_VISIBLE_DEVICES"], place=[peers.replica, peers.of])
tell(weight=model.weight.item())
"""


@pytest.mark.nightly("12 s; test_integrations_twice starts a trainer under torchrun")
def test_each_process_of_torchrun_is_a_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    # The weight goes from 1 to 0 and to -1; the mean is -0.5.
    assert torchrun(TRAINED, tmp_path) == [
        {"device": device, "place": [rank, 2], "weight": -0.5}
        for rank, device in enumerate(("4", "6"))
    ]


OTHERS = """
import os
site = {"GROUP_SCRATCH": "/scratch", "LOCAL_DATA_DIR": "/data", "ROLE_OF_HOST": "trainer"}
os.environ |= {**site, "PMI_RANK": str(RANK), "PMI_SIZE": "1"}
before = dict(os.environ)
import torch.distributed as dist
from diloco_comm.integrations.launch import replica_per_process
replica_per_process()
tell(
    taken=sorted(before.keys() - os.environ.keys()),
    changed=[name for name, value in os.environ.items() if before.get(name) != value],
    is_launched=dist.is_torchelastic_launched(),
)
"""


def test_only_the_variables_of_the_launcher_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of torchrun's variables that give a process its rank are removed, none of the site's."""
    # An empty variable hides all GPUs.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (told,) = torchrun(OTHERS, tmp_path, 1)
    kinds = ("", "LOCAL_", "GROUP_", "ROLE_")
    places = {f"{kind}{name}" for kind in kinds for name in ("RANK", "WORLD_SIZE")}
    elastic = ("MAX_RESTARTS", "RESTART_COUNT", "RUN_ID", "USE_AGENT_STORE")
    assert told["taken"] == sorted(
        {"MASTER_ADDR", "MASTER_PORT", "PMI_RANK", "PMI_SIZE", "ROLE_NAME", *places}
        | {f"TORCHELASTIC_{name}" for name in elastic}
    )
    assert told["changed"] == [] and told["is_launched"] is False


FORGOTTEN = """
import torch
from diloco_comm import DiLoCo
from diloco_comm.integrations.launch import replica_per_process
replicas = replica_per_process()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
said = ""
try:
    DiLoCo(model, optimizer, sync_every=1)
except RuntimeError as error:
    said = str(error)
DiLoCo(model, optimizer, sync_every=1, peers="alone").close()
DiLoCo(model, optimizer, sync_every=1, **replicas).close()
tell(said=said)
"""


def test_a_replica_that_is_not_told_of_the_others_is_refused(tmp_path: Path) -> None:
    for told in torchrun(FORGOTTEN, tmp_path, 2):
        assert told["said"].startswith("replica_per_process() has made this process one of 2 repl")
        assert told["said"].endswith("give **replicas to DiLoCo or to its callback")


NO_CALLBACK = """
import sys
sys.stderr = open(f"stderr-{RANK}", "w", buffering=1)
from diloco_comm.integrations.launch import replica_per_process
replicas = replica_per_process()
import torch
from problems import attach
model = torch.nn.Linear(1, 1)
if USES == "alone":
    attach(sync_every=1, peers="alone")[2].close()
elif USES == "replicas":
    attach(sync_every=1, **replicas)[2].close()
if USES != "evaluates":
    torch.optim.SGD(model.parameters(), lr=0.1).step()
tell()
"""


@pytest.mark.parametrize("uses", ["", "evaluates", "alone", "replicas"])
def test_a_replica_whose_trainer_has_no_callback_is_told_so(uses: str, tmp_path: Path) -> None:
    torchrun(NO_CALLBACK.replace("USES", repr(uses)), tmp_path)
    for rank in (0, 1):
        said = (tmp_path / f"stderr-{rank}").read_text()
        assert ("but no DiLoCo was told of the others" in said) == (uses == "")


def too_late(rank: int, world: int) -> Any:
    from diloco_comm.integrations.launch import replica_per_process

    before = dict(os.environ)
    os.environ |= TORCHRUN
    try:
        with pytest.raises(RuntimeError, match=r"before torch\.distributed is initialised"):
            replica_per_process()
    finally:
        os.environ.clear()
        os.environ |= before
    return replica_per_process()


def test_it_comes_first(workers) -> None:
    assert workers(2).run(too_late) == [{}, {}]


@pytest.mark.fresh_interpreter
def test_importing_the_package_imports_no_trainer() -> None:
    code = (
        "import sys, diloco_comm, diloco_comm.integrations, diloco_comm.base.launch\n"
        "diloco_comm.DiLoCo\n"
        "print(*sys.modules)"
    )
    done = run_python("-c", code)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert torch.__name__ in loaded
    assert not loaded & {"transformers", "accelerate", "lightning", "peft", "torchtitan"}
