"""Samples of an older version: a saved state with what followed it, and the bytes of each wire.

    python tests/support/replicas/samples.py FOLDER COMMIT     # of the installed diloco_comm
    python tests/support/replicas/samples.py --wires FOLDER COMMIT  # adds wires that are not there

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
from choice_groups import grouped
from torch import Tensor, nn

from diloco_comm import DiLoCo, Nesterov, Streaming, WireFormat, __version__, ops
from diloco_comm.wire import ELEMENT_WIRES, WIRES, Layout, rng_key

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
        **grouped(
            {
                "wire": WireFormat("int4", BLOCK_SIZE),
                "rounding": "stochastic",
                "seed": 7,
                "error_feedback": True,
                **place,
            }
        ),
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


# Wires without a code for each element round to nearest alone.
FORMS = [
    (wire, rounding)
    for wire in WIRES
    for rounding in ("nearest", "stochastic")
    if wire in ELEMENT_WIRES or rounding == "nearest"
]


def encoded(elements: Tensor, wire: str, rounding: str, impl: str = "") -> Tensor:
    """Return the payload of the elements, laid out for two replicas and two chunks.

    A wire without a code for each element gets several blocks, each with a scale of its own.
    """
    form = WireFormat(wire)
    if not form.has_element_codes:
        elements = torch.cat([elements * (k / 8) for k in range(1, 10)])
    block_size = BLOCK_SIZE if form.has_element_codes and form.has_scales else form.block_size
    layout = Layout.plan(elements.numel(), 2, 2, WireFormat(wire, block_size))
    payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
    key = rng_key(seed=7, replica=1, stage=0, round=3, fragment=2)
    is_random = rounding == "stochastic"
    is_keyed = is_random or form.is_rotated
    options = {"stochastic": is_random, "rng_key": key if is_keyed else 0, "impl": impl}
    place = (0, elements.numel(), layout.run_elements, wire, layout.wire.block_size)
    ops.encode(None, [elements], payload, *place, **options)
    return payload


def add_wires(folder: Path, commit: str) -> None:
    """Keep the payloads of the file, if there is one, and add the payloads of the other wires."""
    file = folder / BYTES
    sample = {"made_with": "", "values": values(), "payloads": {}}
    if file.exists():
        sample = torch.load(file, weights_only=True)
    missing = [form for form in FORMS if " ".join(form) not in sample["payloads"]]
    for wire, rounding in missing:
        sample["payloads"][f"{wire} {rounding}"] = encoded(sample["values"], wire, rounding)
    made = f"{', '.join(dict(missing))} with {made_with(commit)}"
    sample["made_with"] = "; ".join(filter(None, (sample["made_with"], made)))
    torch.save(sample, file)


def made_with(commit: str) -> str:
    return f"diloco_comm {__version__} at {commit}, torch {torch.__version__}"


def main(folder: Path, commit: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, str(folder), commit]
    replicas = [subprocess.Popen([*command, str(r), str(store.port)]) for r in range(2)]
    assert [replica.wait() for replica in replicas] == [0, 0]
    parts = [folder / f"replica-{replica}.pt" for replica in range(2)]
    states = [torch.load(part, weights_only=True) for part in parts]
    torch.save({"made_with": made_with(commit), "replicas": states}, folder / STATE)
    for part in parts:
        part.unlink()
    (folder / BYTES).unlink(missing_ok=True)
    add_wires(folder, commit)


if __name__ == "__main__":
    only_wires = sys.argv[1] == "--wires"
    given_folder, given_commit, *replica_and_port = sys.argv[1 + only_wires :]
    if replica_and_port:
        number, given_port = map(int, replica_and_port)
        torch.save(run_replica(number, given_port), Path(given_folder) / f"replica-{number}.pt")
    elif only_wires:
        add_wires(Path(given_folder), given_commit)
    else:
        main(Path(given_folder), given_commit)
