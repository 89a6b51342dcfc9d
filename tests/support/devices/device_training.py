"""Training whose inner steps give the same bits on every device, for tests of the engine on one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import devices
import torch
from choice_groups import grouped
from torch import Tensor, nn

from diloco_comm import CO2, SGD, Adam, Delayed, DiLoCo, Eager, HeavyBall, Nesterov, Streaming
from diloco_comm.ops.wire import ELEMENT_WIRES

SHAPES = ((33, 65), (7,), (0, 3), (128, 129), (1,), (255,))

METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"outer": Nesterov(0.7, 0.9), "wire": "int8"},
    "fedavg": {"outer": SGD(1.0), "wire": "fp32", "lanes": 2},
    "streaming": {
        "overlap": Streaming(2, 0.5),
        "fragments": 3,
        "wire": "int4",
        "average_buffers": True,
    },
    "delayed": {
        "average_buffers": True,
        "overlap": Delayed(2),
        "wire": "fp8_e4m3",
        "rounding": "stochastic",
        "seed": 3,
    },
    "eager": {"overlap": Eager(), "fragments": 2, "wire": "int4", "error_feedback": True},
    "eager_2": {"overlap": Eager(2), "wire": "int4", "error_feedback": True},
    "co2": {
        "overlap": CO2(clip=0.5, gap="gap-aware"),
        "outer": HeavyBall(0.3, 0.9),
        "wire": "bf16",
    },
    "gathered": {
        "overlap": Streaming(2, 0.5),
        "outer": SGD(1.0),
        "wire": "sub8",
        "fragments": 2,
        "chunk_bytes": 64,
    },
    # With five replicas the mean is on int1r.
    "owned": {"overlap": Delayed(), "outer": SGD(1.0), "wire": "sub2", "chunk_bytes": 512},
    "sparse": {
        "overlap": Eager(),
        "outer": SGD(1.0),
        "wire": "topk256",
        "error_feedback": True,
        "chunk_bytes": 64,
    },
    "adam": {"outer": Adam(), "wire": "e3m0", "error_feedback": True, "rounding": "stochastic"},
}


# Those to run with so many replicas: three and four have a reduction, and residuals of it.
NAMES = {
    1: ["diloco", "eager"],
    2: ["diloco", "fedavg", "streaming", "co2"],
    3: ["streaming", "delayed", "gathered"],
    4: ["eager", "adam", "sparse"],
    5: ["owned"],
}


class Tensors(nn.Module):
    """Parameters of odd sizes and mixed dtypes, and a buffer that is averaged."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float16)
        self.tensors = nn.ParameterList()
        for i, shape in enumerate(SHAPES):
            value = torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)])
            self.tensors.append(nn.Parameter(value.to(device)))
        self.register_buffer("statistics", torch.randn(11, generator=generator).to(device))


def all_noise(model: nn.Module, rank: int, num_steps: int) -> list[list[Tensor]]:
    """What each inner step adds to each parameter, on the model's device."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        [
            (0.05 * torch.randn(p.shape, generator=generator)).to(p.dtype).to(p.device)
            for p in model.parameters()
        ]
        for _ in range(num_steps)
    ]


@torch.no_grad()
def inner_step(model: nn.Module, noise: list[Tensor]) -> None:
    """One rounding for each operation: the same bits everywhere."""
    for param, added in zip(model.parameters(), noise, strict=True):
        param.mul_(0.984375).add_(added)


class Replica:
    """A model on a device, its noise, and DiLoCo; ``checks``: the host must not wait in a step."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        *,
        checks: bool = False,
        num_steps: int = 20,
        **arguments: Any,
    ) -> None:
        self.device, self.checks = device, checks
        self.model = Tensors(device, seed=rank)
        self.noise = all_noise(self.model, rank, num_steps)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        options = {"sync_every": 4, "chunk_bytes": 2048, "attach": False}
        if arguments.get("wire", "int8") in ELEMENT_WIRES:
            options["block_size"] = 64
        self.diloco = DiLoCo(self.model, optimizer, **grouped({**options, **arguments}))

    def steps(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            inner_step(self.model, self.noise[step])
            # A fragment's first launches may bring tables of addresses to a GPU.
            checks = self.checks and (self.device.type != "cuda" or step >= 9)
            with devices.no_host_wait(self.device) if checks else nullcontext():
                self.diloco.step()

    def all(self) -> list[Tensor]:
        """Copy everything that the replica has into host memory."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for part in self.diloco.parts:
            if part.outer is not None:
                tensors += [part.outer, *part.state.tensors().values()]
        return [tensor.detach().cpu().clone() for tensor in tensors]


def train(rank: int, device: torch.device, num_steps: int, **arguments: Any) -> list[Tensor]:
    """Train a replica, flush, and return what it has had before and after."""
    replica = Replica(rank, device, num_steps=num_steps, **arguments)
    with replica.diloco as diloco:
        replica.steps(0, num_steps)
        before = replica.all()
        diloco.flush()
        return before + replica.all()
