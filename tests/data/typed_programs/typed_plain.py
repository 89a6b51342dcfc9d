"""DiLoCo around a loop, on the mesh of the replicas."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from diloco_comm import DiLoCo, Nesterov

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
mesh = init_device_mesh("cpu", (2,))
outer = Nesterov(lr=0.7, momentum=0.9)
with DiLoCo(model, optimizer, sync_every=100, outer=outer, peers=mesh, norms=True) as diloco:
    for _ in range(1000):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds: float = diloco.totals().exposed_s
    step: int = diloco.inner_step
