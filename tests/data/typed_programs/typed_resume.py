"""Save a run, and go on."""

import torch

from diloco_comm import Adam, DiLoCo, Eager

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with DiLoCo(
    model, optimizer, sync_every=100, peers="alone", overlap=Eager(), outer=Adam(lr=0.1)
) as diloco:
    saved = {"diloco": diloco.state_dict(), "config": diloco.config()}
    torch.save(saved, "state.pt")
saved = torch.load("state.pt")
with DiLoCo(model, optimizer, config=saved["config"], checks="warn", offload="cpu") as diloco:
    diloco.load_state_dict(saved["diloco"])
