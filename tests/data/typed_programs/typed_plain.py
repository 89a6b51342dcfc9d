"""DiLoCo around a loop."""

import torch

from diloco_comm import DiLoCo, Nesterov

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
with DiLoCo(model, optimizer, sync_every=100, outer=Nesterov(lr=0.7, momentum=0.9)) as diloco:
    for _ in range(1000):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds: float = diloco.totals().exposed_s
    step: int = diloco.inner_step
