"""Streaming with four bits and error feedback; then with a wire for each group of parameters."""

import torch

from diloco_comm import DiLoCo, Link, NonFinite, Streaming, Wire

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
diloco = DiLoCo(
    model,
    optimizer,
    sync_every=100,
    fragments="layers:3",
    overlap=Streaming(delay=5, alpha=0.5),
    wire=Wire("int4", block_size=64, error_feedback=True),
    link=Link(lanes=4, timeout=600.0),
    nonfinite=NonFinite("skip", max_skipped=None),
)
diloco.flush(final=True)
diloco.close()
DiLoCo(model, [optimizer], sync_every=4, wire={"bias": "fp32", "rest": "int4"}, link="tcp").close()
