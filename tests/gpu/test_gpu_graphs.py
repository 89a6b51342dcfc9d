"""A training step that is a CUDA graph, with ``DiLoCo.step`` between its replays."""

from __future__ import annotations

from typing import Any

import devices
import pytest
import torch
from device_training import METHODS, Replica, inner_step, train
from devices import DEVICES
from problems import equal
from test_gpu_streams import on_streams, use_streams


def addresses(replica: Replica) -> list[int]:
    """Where all lies that a graph of the training step, or of the operators, would have fixed."""
    kept = [*replica.model.parameters(), *replica.model.buffers()]
    for part in replica.diloco.parts:
        buffers: Any = part.buffers
        kept += [part.outer, *part.state.tensors().values()] if part.outer is not None else []
        kept += [payload.tensor for payload in (*buffers._owns, *buffers._results)]
    return [tensor.data_ptr() for tensor in kept]


def replayed(rank: int, world: int, device: str, library: str, backend: str) -> list[bool]:
    """Train with the captured inner step; the same bits as without, at fixed addresses."""
    here = use_streams(rank, device, library)
    arguments = {**METHODS["diloco"], "lanes": 1}
    expected = train(rank, torch.device("cpu"), 13, **arguments)
    own = on_streams(arguments) if backend == "nccl" else arguments
    replica = Replica(rank, here, num_steps=13, **own)
    batch = [torch.empty_like(param) for param in replica.model.parameters()]

    def load(step: int) -> None:
        for static, added in zip(batch, replica.noise[step], strict=True):
            static.copy_(added)

    # Nothing is in flight, so that the engine's thread asks no events meanwhile.
    replay = devices.capture(lambda: inner_step(replica.model, batch), here)
    fixed: list[list[int]] = []
    for step in range(13):
        load(step)
        replay()
        replica.diloco.step()
        if step >= 4:
            fixed.append(addresses(replica))
    before = replica.all()
    replica.diloco.flush()
    given = before + replica.all()
    replica.diloco.close()
    return [equal(expected, given), all(places == fixed[0] for places in fixed)]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_training_step(device: str, backend: str, replicas, stand_in) -> None:
    world = 1 if device == "cuda" else 2
    results = replicas(world).run(replayed, device, stand_in, backend)
    assert results == [[True, True]] * world
