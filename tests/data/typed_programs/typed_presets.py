"""Settings that have a name."""

import torch
import torch.distributed as dist

from diloco_comm import Link, Wire, co2, eager_diloco, fedavg, local_sgd, streaming_diloco

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fedavg(model, optimizer, sync_every=10, weight=lambda: 32.0).close()
local_sgd(model, optimizer, sync_every=10, wire="bf16", peers=dist.group.WORLD).close()
streaming_diloco(model, optimizer, wire=Wire(seed=3), link=Link(lanes=2)).close()
eager_diloco(model, optimizer, peers="alone", nonfinite="skip").close()
co2(model, [optimizer], norms=True).close()
