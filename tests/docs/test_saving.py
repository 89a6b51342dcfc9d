"""docs/reference/checkpoints.md saves and resumes: the resumed run ends as the run that went on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pages import ROOT, Block, blocks_in, run_page
from torch.distributed import TCPStore
from workers import Pool

PAGE = (ROOT / "docs" / "reference" / "checkpoints.md").read_text()
SECTION = PAGE.split("\n## Save and resume\n", 1)[1].split("\n## ", 1)[0]

# Both runs take three steps more than the checkpoint, with an exchange among them.
TRAIN_ON = """
def train_on(batches):
    for _ in range(3):
        loss_of(model, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = [optimizer.state[p][name] for p in model.parameters() for name in optimizer.state[p]]
    return [diloco.inner_step, *(value.tolist() for value in (*model.parameters(), *moments))]
"""
GO_ON = f"{TRAIN_ON}\ntorch.save(train_on(batches), f'end_{{rank}}.pt')\n"
COMPARE = f"{TRAIN_ON}\nassert train_on(iter(loader)) == torch.load(f'end_{{rank}}.pt')\n"


def block_with(call: str) -> Block:
    (found,) = [block for block in blocks_in(SECTION, "checkpoints.md") if call in block.code]
    return found


@pytest.mark.parametrize("library", ["torch", "dcp"])
def test_a_resumed_run_ends_like_one_that_goes_on(
    library: str, replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    save, resume = block_with(f"{library}.save("), block_with(f"{library}.load(")
    blocks = [
        replace(save, code=save.code + GO_ON),
        replace(resume, code=resume.code + COMPARE),
    ]
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in blocks]
    ports = [store.port for store in stores]
    first, second = replicas(2).run(run_page, blocks, ports, str(tmp_path), timeout=60)
    assert first == second and len(first) == 2 and first[0] == first[1]


def test_a_plain_load_leaves_a_fresh_optimizer_without_its_state(
    replicas: Callable[[int], Pool], tmp_path: Path
) -> None:
    code = """
import torch.distributed.checkpoint as dcp

loss_of(model, next(iter(loader))).backward()
optimizer.step()
dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id="plain")
fresh = torch.optim.AdamW(model.parameters(), lr=0.01)
state = fresh.state_dict()
dcp.load({"optimizer": state}, checkpoint_id="plain")
fresh.load_state_dict(state)
assert optimizer.state and not fresh.state
"""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    blocks = [Block("plain.md", 1, "python", code)]
    replicas(2).run(run_page, blocks, [store.port], str(tmp_path), timeout=60)
