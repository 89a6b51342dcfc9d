"""The section on TRL: two replicas that SFTTrainer trains end with the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pages import ROOT, Block, blocks_of, run_page
from torch.distributed import TCPStore
from trainers import needs
from workers import Pool


def train(rank: int, world: int, blocks: list[Block], port: int, folder: str) -> bytes:
    run_page(rank, world, blocks, [port], folder)
    return (Path(folder) / f"model-{rank}" / "model.safetensors").read_bytes()


@needs("trl")
@pytest.mark.nightly("TRL is not among the packages that the tests install")
def test_sft_trainer(trainer_replicas: Callable[[int], Pool], tmp_path: Path) -> None:
    page = blocks_of(ROOT / "docs/how-to/huggingface.md")
    blocks = [block for block in page if "from trl" in block.code]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    replicas = trainer_replicas(2)
    first, second = replicas.run(train, blocks, store.port, str(tmp_path), timeout=60)
    assert first == second
