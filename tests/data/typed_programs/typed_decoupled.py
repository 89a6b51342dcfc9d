"""A learner of decoupled training."""

import torch

from diloco_comm import Link, Wire
from diloco_comm.asynchronous import DecoupledDiLoCo

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with DecoupledDiLoCo(
    model,
    optimizer,
    server=["tcp://127.0.0.1:29500", "tcp://127.0.0.1:29501"],
    tokens=8192,
    wire=Wire(rounding="stochastic", seed=3),
    link=Link(timeout=60.0),
) as diloco:
    optimizer.step()
    is_merged: bool = diloco.flush(30.0)
