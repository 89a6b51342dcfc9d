"""A launch of several processes that nothing joins is no training of each of them alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from async_helpers import attach as attach_worker
from async_helpers import serving
from commands import torchrun
from problems import attach

from diloco_comm.base import launch

pytestmark = pytest.mark.usefixtures("forked_programs")

FORGOTTEN = """
import torch, torch.distributed as dist
from problems import attach, train_step

tell(alone=said(lambda: attach(sync_every=1)))
model, optimizer, diloco = attach(sync_every=1, num_replicas=1)
with diloco:
    train_step(model, optimizer, RANK, 0)
    tell(meant=[diloco.exchange.size, diloco.totals().num_syncs])
dist.init_process_group("gloo")
with attach(sync_every=1)[2] as diloco:
    tell(joined=diloco.exchange.size)
with attach(sync_every=1, num_replicas=1)[2] as diloco:
    tell(meant_again=diloco.exchange.size)
dist.destroy_process_group()
"""


def test_torchrun_without_a_process_group(tmp_path: Path) -> None:
    for told in torchrun(FORGOTTEN, tmp_path):
        assert told["alone"].startswith(
            "RuntimeError: torchrun has started 2 processes, but torch.distributed is not "
            "initialised and peers= is not given"
        )
        assert "call torch.distributed.init_process_group() first" in told["alone"]
        assert 'peers="alone" if this process is meant to be the only replica' in told["alone"]
        assert told["meant"] == [1, 1]
        assert told["joined"] == 2 and told["meant_again"] == 1


def test_torchrun_of_one_process_is_one_replica(tmp_path: Path) -> None:
    script = "from problems import attach\ntell(size=attach()[2].exchange.size)"
    assert torchrun(script, tmp_path, 1) == [{"size": 1}]


SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        (SRUN, "srun"),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "4"}, "torchrun"),
        # torchrun of one process inside a task of srun: torchrun's variables count.
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}, None),
        ({**SRUN, "SLURM_NTASKS": "1"}, None),
        # A batch script, and the shell of salloc, are single processes of their job.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, None),
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, None),
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}, None),
        ({}, None),
    ],
)
def test_what_launchers_leave(variables: dict[str, str], launcher: str | None) -> None:
    if launcher is None:
        launch.refuse_if_forgotten(variables)
        return
    with pytest.raises(RuntimeError, match=f"^{launcher} has started"):
        launch.refuse_if_forgotten(variables)


def test_srun_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="srun has started 2 processes"):
        attach()
    attach(num_replicas=1)[2].close()


def test_asynchronous_workers_are_alone_by_design(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with serving() as server:
        model, worker = attach_worker(server.address, "alone")
        model.descend(model.values())
        worker.step()
        worker.close()
