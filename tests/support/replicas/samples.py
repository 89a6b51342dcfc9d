"""Samples of an older version: a saved state with what followed it, and the bytes of each wire.

    python tests/support/replicas/samples.py FOLDER COMMIT     # of the installed diloco_comm

Inner steps subtract multiples of 1/1024 and the rest is defined bit by bit, so the numbers do not
depend on the machine.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco_comm import DiLoCo, Nesterov, Streaming, WireFormat, __version__, ops
from diloco_comm.wire import ELEMENT_WIRES, Layout, rng_key

STATE, BYTES = "streaming-state.pt", "wire-bytes.pt"
# After ten steps the first fragment's third round is under way.
SAVED_STEP, NUM_STEPS = 10, 15
NUM_ELEMENTS, BLOCK_SIZE = 1000, 32


# ------------------------------------------------------------------------------------ saved state


def attach(**place: Any) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
    """Two fragments, sent in turn, with momentum, residuals and random rounding."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
    for index, param in enumerate(model.parameters()):
        param.data = _multiples(param, index, 3).div_(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 16)
    diloco = DiLoCo(
        model,
        optimizer,
        sync_every=4,
        fragments=2,
        overlap=Streaming(delay=2, alpha=0.5),
        outer=Nesterov(0.4, 0.9),
        wire=WireFormat("int4", BLOCK_SIZE),
        rounding="stochastic",
        seed=7,
        error_feedback=True,
        **place,
    )
    return model, optimizer, diloco


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, replica: int, first: int, last: int
) -> None:
    for step in range(first, last):
        for index, param in enumerate(model.parameters()):
            param.grad = _multiples(param, step + 5 * index, 7 + 4 * replica).div_(64)
        optimizer.step()


def _multiples(like: Tensor, start: int, factor: int) -> Tensor:
    """Integers from -16 to 16 that follow no simple order."""
    indices = torch.arange(like.numel()) + 97 * start
    return (indices * factor % 33 - 16).float().reshape(like.shape)


def state_of(model: nn.Module, diloco: DiLoCo) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "diloco": diloco.state_dict()})


def run_replica(replica: int, port: int) -> dict[str, Any]:
    """Return the state at ``SAVED_STEP``, and that after ``NUM_STEPS`` and a flush."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    model, optimizer, diloco = attach(store=store, replica=replica, num_replicas=2)
    with diloco:
        train(model, optimizer, replica, 0, SAVED_STEP)
        saved = state_of(model, diloco)
        train(model, optimizer, replica, SAVED_STEP, NUM_STEPS)
        diloco.flush()
        return {"saved": saved, "end": state_of(model, diloco), "hash": diloco.outer_hash()}


# ---------------------------------------------------------------------------------- bytes on wire


def values() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM_ELEMENTS, generator=generator)


def encoded(elements: Tensor, wire: str, rounding: str, impl: str = "") -> Tensor:
    """Return the payload of the elements, laid out for two replicas and two chunks."""
    block_size = BLOCK_SIZE if WireFormat(wire).has_scales else WireFormat(wire).block_size
    layout = Layout.plan(NUM_ELEMENTS, 2, 2, WireFormat(wire, block_size))
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    form = (layout.run_elements, wire, layout.wire.block_size)
    key = rng_key(seed=7, replica=1, stage=0, round=3, fragment=2)
    is_random = rounding == "stochastic"
    options = {"stochastic": is_random, "rng_key": key if is_random else 0, "impl": impl}
    ops.encode(None, [elements], payload, 0, NUM_ELEMENTS, *form, **options)
    return payload


def main(folder: Path, commit: str) -> None:
    made_with = f"diloco_comm {__version__} at {commit}, torch {torch.__version__}"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, str(folder), commit]
    replicas = [subprocess.Popen([*command, str(r), str(store.port)]) for r in range(2)]
    assert [replica.wait() for replica in replicas] == [0, 0]
    parts = [folder / f"replica-{replica}.pt" for replica in range(2)]
    states = [torch.load(part, weights_only=True) for part in parts]
    torch.save({"made_with": made_with, "replicas": states}, folder / STATE)
    elements = values()
    payloads = {
        f"{wire} {rounding}": encoded(elements, wire, rounding)
        for wire in ELEMENT_WIRES
        for rounding in ("nearest", "stochastic")
    }
    sample = {"made_with": made_with, "values": elements, "payloads": payloads}
    torch.save(sample, folder / BYTES)
    for part in parts:
        part.unlink()


if __name__ == "__main__":
    given_folder, given_commit, *replica_and_port = sys.argv[1:]
    if replica_and_port:
        number, given_port = map(int, replica_and_port)
        torch.save(run_replica(number, given_port), Path(given_folder) / f"replica-{number}.pt")
    else:
        main(Path(given_folder), given_commit)
