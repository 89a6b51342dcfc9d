"""Train a small language model, byte by byte; then let several replicas of it learn together.

    python examples/train_plain.py                                     1 replica:  2.31
    torchrun --nproc-per-node 2 examples/train_plain.py                2 replicas: 2.25
    torchrun --nproc-per-node 4 examples/train_plain.py --wire int4    4 replicas: 2.22

The numbers are the validation loss, in nats a byte, after 300 steps of each replica. Everything
below is a training loop for one machine; the two lines that make it DiLoCo are marked.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from diloco_comm import DiLoCo

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--sync-every", type=int, default=50)  # inner steps between two outer steps
parser.add_argument("--wire", default="int8")  # fp32, bf16, int8, int4, ...
options = parser.parse_args()

context = 64  # bytes that the model looks back
batch_size = 16
width = 128
peak_lr = 2e-3

# torchrun tells each process which replica it is. Alone, this is the only one.
replica = int(os.environ.get("RANK", 0))
num_replicas = int(os.environ.get("WORLD_SIZE", 1))
if num_replicas > 1:
    dist.init_process_group("gloo")
torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_replicas))
torch.manual_seed(0)

# The text: Python's own sources. Each replica reads other files than its peers.
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
held_out, files = files[::16], [file for i, file in enumerate(files) if i % 16]


def read(paths: list[Path]) -> Tensor:
    text = b"\n".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


training_text = read(files[replica::num_replicas])
validation_text = read(held_out)


class ByteTransformer(nn.Module):
    """Two transformer layers that predict the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width,
            nhead=4,
            dim_feedforward=4 * width,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.byte(tokens) + self.position.weight[:length]
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def loss_of(model: nn.Module, text: Tensor, begin: Tensor) -> Tensor:
    """Return the loss on the windows of the text that begin at the given offsets."""
    window = text[begin[:, None] + torch.arange(context + 1)]
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module) -> float:
    begin = torch.linspace(0, len(validation_text) - context - 1, 256).long()
    return loss_of(model, validation_text, begin).item()


model = ByteTransformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, peak_lr, total_steps=options.steps, pct_start=0.1
)
diloco = DiLoCo(model, optimizer, sync_every=options.sync_every, wire=options.wire)  # DiLoCo: 1

if replica == 0:
    print(f"{num_replicas} replica(s), {sum(p.numel() for p in model.parameters()):,} parameters")
    print(f"step    0  validation {validate(model):.3f}")
batches = torch.Generator().manual_seed(replica)
for step in range(1, options.steps + 1):
    begin = torch.randint(len(training_text) - context - 1, (batch_size,), generator=batches)
    loss = loss_of(model, training_text, begin)
    loss.backward()
    optimizer.step()  # every 50th step of the optimizer is followed by an outer step
    optimizer.zero_grad()
    schedule.step()
    if replica == 0 and step % 50 == 0:
        print(f"step {step:4d}  training {loss.item():.3f}")

diloco.flush(final=True)  # DiLoCo: 2. Share the last steps; all replicas are equal now.
if replica == 0:
    sent = sum(sync.sent_bytes for sync in diloco.metrics())
    print(f"step {step:4d}  validation {validate(model):.3f}  sent {sent / 1e6:.1f} MB")
print(f"replica {replica}: parameters {diloco.outer_hash()[:16]}")
diloco.close()
if num_replicas > 1:
    dist.destroy_process_group()
