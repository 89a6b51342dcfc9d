"""A worker of asynchronous training."""

import torch

from diloco_comm import Link, Wire
from diloco_comm.asynchronous import AsyncDiLoCo

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with AsyncDiLoCo(
    model,
    optimizer,
    server="tcp://127.0.0.1:29500",
    name="a",
    wire=Wire("int4", error_feedback=True),
    link=Link(timeout=60.0),
    nonfinite="skip",
) as diloco:
    optimizer.step()
    version: int = diloco.version
