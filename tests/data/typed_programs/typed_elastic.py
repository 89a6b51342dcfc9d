"""Replicas that come and go."""

import torch

from diloco_comm import DiLoCo, Elastic, HeavyBall, Link

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
elastic = Elastic("tcp://127.0.0.1:29400", run="llama", total_steps=1000)
with DiLoCo(
    model,
    optimizer,
    sync_every=10,
    overlap="blocking",
    outer=HeavyBall(lr=0.7),
    peers=elastic,
    link=Link(timeout=60),
) as diloco:
    while not diloco.is_done:
        optimizer.step()
    members: tuple[int, ...] = diloco.members
