"""Replicas that are separate jobs, and go on after a failure."""

import torch

from diloco_comm import Delayed, DiLoCo, StorePeers, SyncError

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
peers = StorePeers("tcp://127.0.0.1:29400", replica=0, members=[0, 2, 5], name="run")
with DiLoCo(
    model, optimizer, sync_every=100, peers=peers, init="check", overlap=Delayed(5), outer="sgd"
) as diloco:
    try:
        optimizer.step()
    except SyncError:
        diloco.change_group("survivors")
