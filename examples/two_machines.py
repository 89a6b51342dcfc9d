"""One replica of two, each on a machine of its own; either may die and come back.

    diloco-comm store --listen 127.0.0.1:29400
    python examples/two_machines.py --store tcp://127.0.0.1:29400 --replica 0
    python examples/two_machines.py --store tcp://127.0.0.1:29400 --replica 1
    python examples/two_machines.py --store tcp://127.0.0.1:29400 --replica 1 --join   after a death

Both processes send over one port each, which --listen and --advertise name; by default any port of
this machine. With --keys all that they send is encrypted; the store then needs --keys, too.
docs/tutorials/two-machines.md goes through this program step by step. The replica that is left is
alone, so that it alone decides when the other one may come back. Several survivors would have to
agree on the step, since change_group is a call that all of them make together.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

from diloco_comm import (
    DiLoCo,
    LeftBehind,
    Link,
    ReplicaMismatch,
    StorePeers,
    SyncError,
    connect_store,
)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--store", required=True)
parser.add_argument("--replica", type=int, required=True, choices=[0, 1])
parser.add_argument("--join", action="store_true")  # the other replica trains already
parser.add_argument("--listen", metavar="HOST:PORT")  # such as 0.0.0.0:29700
parser.add_argument("--advertise", metavar="HOST:PORT")  # "": nobody can dial this machine
parser.add_argument("--relay", metavar="HOST:PORT")  # for two machines that nobody can dial
parser.add_argument("--proxy", metavar="URL")  # http://host:port or socks5://...
parser.add_argument("--keys", metavar="FOLDER")  # made by `diloco-comm keys make`
parser.add_argument("--steps", type=int, default=1500)
parser.add_argument("--sync-every", type=int, default=25)
parser.add_argument("--pause", type=float, default=0.05)  # seconds that each step takes longer
options = parser.parse_args()

both, coming_back = [0, 1], "two_machines/coming_back"
store = connect_store(options.store, keys=options.keys, proxy=options.proxy)

torch.set_num_threads(1)
torch.manual_seed(0)
x_held_out = torch.randn(512, 8)
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def loss_of(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))


if options.join:
    store.set(coming_back, "")
diloco = DiLoCo(
    model,
    optimizer,
    sync_every=options.sync_every,
    peers=StorePeers(store, replica=options.replica, members=both),
    link=Link(
        "tcp",
        listen=options.listen,
        advertise=options.advertise,
        keys=options.keys,
        relay=options.relay,
        proxy=options.proxy,
    ),
    init="join" if options.join else "broadcast",
)
print(f"replica {options.replica}: {list(diloco.members)} at step {diloco.inner_step}", flush=True)


def change_group(members: str | list[int]) -> None:
    """Go on with these members; if that fails, with the replicas that are still there."""
    while True:
        try:
            diloco.change_group(members)
            break
        except (LeftBehind, ReplicaMismatch):
            raise  # the other replica has gone on, or trains another model
        except SyncError as error:
            print(f"replica {options.replica}: {error}", flush=True)
            members = "survivors"
            time.sleep(1)
    print(f"replica {options.replica}: going on with {list(diloco.members)}", flush=True)


data = torch.Generator().manual_seed(1 + options.replica)  # data of its own for each replica
while diloco.inner_step < options.steps:
    loss_of(torch.randn(32, 8, generator=data)).backward()
    try:
        optimizer.step()  # every 25th step is followed by an exchange and an outer step
    except LeftBehind:
        raise  # the other replica has gone on: start again with --join
    except SyncError as error:
        print(f"replica {options.replica}: {error}", flush=True)
        change_group("survivors")
        optimizer.zero_grad()
        continue  # no exchange has made the replicas equal here
    optimizer.zero_grad()
    if len(diloco.members) == 1 and store.check([coming_back]):
        store.delete_key(coming_back)
        change_group(both)
    if diloco.inner_step % (4 * options.sync_every) == 0:
        # Just after an outer step, where both replicas hold the same parameters.
        loss = loss_of(x_held_out).item()
        print(f"step {diloco.inner_step}: loss {loss:.5f}, hash {diloco.outer_hash()}", flush=True)
    time.sleep(options.pause)

diloco.flush(final=True)
loss = loss_of(x_held_out).item()
print(f"replica {options.replica}: loss {loss:.5f}, hash {diloco.outer_hash()}", flush=True)
diloco.close()
