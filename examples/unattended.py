"""A replica of a run that nobody watches: replicas may die and come back at any time.

    diloco-comm registry --journal journal
    diloco-comm launch --registry tcp://127.0.0.1:29400 --run demo examples/unattended.py

docs/tutorials/unattended.md goes through it step by step, over two sites. The script knows neither
the registry nor the other replicas: the launcher tells ``Elastic()``. With --keys all that replicas
send each other is encrypted.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

from diloco_comm import DiLoCo, Elastic, Link
from diloco_comm.elastic.events import Happening, ViewChanged

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--steps", type=int, default=20_000)
parser.add_argument("--sync-every", type=int, default=25)
parser.add_argument("--pause", type=float, default=0.05)  # seconds that each step takes longer
parser.add_argument("--listen", metavar="HOST:PORT")  # of the link; by default any free port
parser.add_argument("--relay", metavar="ADDRESS")  # of the link, where nobody can dial this machine
parser.add_argument("--keys", metavar="FOLDER")  # of the link, or a file NAME.key_secret in it
parser.add_argument("--pid-file", type=Path)  # for the kill of the tutorial
parser.add_argument("--alive-file", type=Path)  # touched at each step, for a liveness probe
options = parser.parse_args()
if options.pid_file is not None:
    options.pid_file.write_text(str(os.getpid()))

torch.set_num_threads(1)
torch.manual_seed(0)
x_held_out = torch.randn(512, 8)
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def loss_of(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))


def tell(happening: Happening) -> None:
    if isinstance(happening, ViewChanged):
        print(happening, flush=True)


peers = Elastic(total_steps=options.steps, suspect_after=10, on_event=tell)
link = Link("tcp", listen=options.listen, relay=options.relay, keys=options.keys)
diloco = DiLoCo(model, optimizer, sync_every=options.sync_every, peers=peers, link=link)
own = diloco.members[diloco.replica_index]
data = torch.Generator().manual_seed(1 + own)  # data of its own for each replica
while not diloco.is_done:
    loss_of(torch.randn(32, 8, generator=data)).backward()
    optimizer.step()  # sends, waits, applies, and changes the group
    optimizer.zero_grad()
    if options.alive_file is not None:
        options.alive_file.touch()
    if diloco.inner_step % (4 * options.sync_every) == 0:
        # Just after an outer step, where all replicas hold the same parameters.
        loss = loss_of(x_held_out).item()
        print(f"step {diloco.inner_step}: loss {loss:.5f}, hash {diloco.outer_hash()}", flush=True)
    time.sleep(options.pause)
diloco.close()
