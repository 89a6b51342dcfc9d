"""Train with workers of different speed that wait for nobody.

    diloco-comm serve --listen 127.0.0.1:29500 --sync-every 20 --period 2 --lr 0.3 --dylu &
    python examples/train_async.py --worker 0 &
    python examples/train_async.py --worker 1 --pause 0.1 &      # a slower machine
    diloco-comm serve status tcp://127.0.0.1:29500

Workers may be started, stopped and killed at any time; the server goes on with those that are
there. Everything below is a training loop for one machine; the line that makes it asynchronous is
marked.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco_comm import Wire
from diloco_comm.asynchronous.worker import AsyncDiLoCo

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--server", default="tcp://127.0.0.1:29500")
parser.add_argument("--worker", type=int, default=0)  # reads every 4th file, from this one on
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--pause", type=float, default=0.0)  # seconds that each step takes longer
parser.add_argument("--wire", default="int8")  # fp32, bf16, int8, int4, ...
options = parser.parse_args()

context, batch_size, width = 32, 16, 64
torch.set_num_threads(1)
torch.manual_seed(options.worker)

files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
held_out, files = files[::16], [file for i, file in enumerate(files) if i % 16]


def read(paths: list[Path]) -> Tensor:
    text = b"\n".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


training_text, validation_text = read(files[options.worker % 4 :: 4]), read(held_out)


class NextByte(nn.Module):
    """A recurrent network that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.memory(self.embedding(text))[0])


def loss_of(windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def validate() -> float:
    begins = torch.linspace(0, len(validation_text) - context - 1, 64).long()
    with torch.no_grad():
        return loss_of(validation_text[begins[:, None] + torch.arange(context + 1)]).item()


model = NextByte()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
diloco = AsyncDiLoCo(  # this is all
    model,
    optimizer,
    server=options.server,
    wire=Wire(options.wire, error_feedback=True),
    on_round=lambda r: print(f"round {r.seq}: {r.steps} steps, staleness {r.staleness}"),
)
print(f"validation {validate():.4f} with the parameters of version {diloco.version}", flush=True)
for _ in range(options.steps):
    begins = torch.randint(len(training_text) - context - 1, (batch_size, 1))
    loss_of(training_text[begins + torch.arange(context + 1)]).backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(options.pause)
diloco.flush()
print(f"validation {validate():.4f} with the parameters of version {diloco.version}", flush=True)
diloco.close()
