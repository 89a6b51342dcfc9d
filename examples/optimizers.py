"""A first lesson: which optimizer inside, which one outside?

    python examples/optimizers.py          prints a table and writes optimizers.png

Four replicas, processes on this machine, learn to read handwritten digits (scikit-learn's, 8x8
pixels). Each sees mostly digits that its peers do not see: replica 0 the zeros, ones and twos,
and so on. Alone they cannot learn the others' digits. Every 10 steps an outer optimizer applies
the mean of what they have learned. Validation loss (nats) of the shared model after 200 steps:

    inner / outer       alone        SGD  HeavyBall   Nesterov       Adam
    SGD momentum        1.039      0.276      0.307      0.322      0.245
    Nesterov            0.930      0.273      0.311      0.310      0.253
    Adam                0.962      0.454      0.325      0.266      0.277

Any outer optimizer beats training alone. Momentum outside pays most in the first rounds (see the
plot), and when the inner optimizer takes small steps. It takes about 20 seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from diloco_comm import SGD, Adam, DiLoCo, HeavyBall, Nesterov

NUM_REPLICAS = 4
SYNC_EVERY = 10
BATCH_SIZE = 16

INNER: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.03, momentum=0.9),
    "Nesterov": lambda parameters: torch.optim.SGD(
        parameters, lr=0.03, momentum=0.9, nesterov=True
    ),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
}
OUTER = {
    "alone": None,
    "SGD": SGD(lr=1.0),  # plain averaging: FedAvg
    "HeavyBall": HeavyBall(lr=0.3, momentum=0.9),
    "Nesterov": Nesterov(lr=0.7, momentum=0.9),  # DiLoCo's choice
    "Adam": Adam(lr=0.3, eps=0.1),
}
# Validation loss at the start and after each round, for each (inner, outer).
Curves = dict[tuple[str, str], list[float]]


def main() -> None:
    """Start the replicas; the first one prints the table and draws the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="inner steps of each replica")
    parser.add_argument("--plot", type=Path, default=Path("optimizers.png"))
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (store.port, options.steps, options.plot)
    # One process imports all this (torch._dynamo comes with any optimizer); they start at once.
    mp.set_forkserver_preload(["torch._dynamo", "sklearn.datasets", "diloco_comm"])
    mp.start_processes(replica_main, arguments, NUM_REPLICAS, start_method="forkserver")


def replica_main(replica: int, store_port: int, num_steps: int, plot: Path) -> None:
    """Train this replica once with each pair of optimizers."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=replica, world_size=NUM_REPLICAS)
    curves: Curves = {}
    for inner in INNER:
        for outer in OUTER:
            curves[inner, outer] = train(replica, inner, outer, num_steps)
    if replica == 0:
        print_table(curves)
        draw(curves, plot)
        print(f"plot: {plot}")
    dist.destroy_process_group()


def train(replica: int, inner: str, outer: str, num_steps: int) -> list[float]:
    """Train a new network and return its validation losses."""
    images, labels, validation_images, validation_labels = digits_of(replica)
    torch.manual_seed(0)  # the same initial network everywhere
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = INNER[inner](model.parameters())
    outer_optimizer = OUTER[outer]
    diloco = None
    if outer_optimizer is not None:
        diloco = DiLoCo(model, optimizer, sync_every=SYNC_EVERY, outer=outer_optimizer, wire="int8")

    def validate() -> float:
        """Mean over the replicas; after an outer step they are all equal."""
        with torch.no_grad():
            loss = F.cross_entropy(model(validation_images), validation_labels)
        dist.all_reduce(loss)
        return loss.item() / NUM_REPLICAS

    losses = [validate()]
    batches = torch.Generator().manual_seed(replica)  # other examples on each replica
    for step in range(1, num_steps + 1):
        batch = torch.randint(len(images), (BATCH_SIZE,), generator=batches)
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % SYNC_EVERY == 0:
            losses.append(validate())
    if diloco is not None:
        diloco.close()
    return losses


def digits_of(replica: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels of this replica, then those for validation, the same for all.

    Four of five training images show the digits that belong to this replica.
    """
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    index = torch.arange(len(labels))
    validation = index % 5 == 0
    is_own = labels * NUM_REPLICAS // 10 == replica
    # The rest is dealt out evenly, and thinned to a quarter of the replica's own digits.
    is_other = ~is_own & (index % (3 * NUM_REPLICAS) == replica)
    training = ~validation & (is_own | is_other)
    return images[training], labels[training], images[validation], labels[validation]


def print_table(curves: Curves) -> None:
    print(f"{'inner / outer':<14}" + "".join(f"{outer:>11}" for outer in OUTER))
    for inner in INNER:
        cells = (f"{curves[inner, outer][-1]:>11.3f}" for outer in OUTER)
        print(f"{inner:<14}" + "".join(cells))


def draw(curves: Curves, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, inner in zip(figure.subplots(1, len(INNER), sharey=True), INNER, strict=True):
        for outer in OUTER:
            losses = curves[inner, outer]
            steps = [SYNC_EVERY * i for i in range(len(losses))]
            axes.plot(steps, losses, label=outer, linestyle=":" if outer == "alone" else "-")
        axes.set_title(f"inner: {inner}")
        axes.set_xlabel("inner steps of each replica")
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.set_yticks([0.3, 0.5, 1, 2, 3], ["0.3", "0.5", "1", "2", "3"])
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="outer", frameon=False)
    figure.axes[0].set_ylabel("validation loss (nats)")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
