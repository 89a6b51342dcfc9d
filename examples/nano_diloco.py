"""DiLoCo in plain PyTorch: every number that the library computes on the fp32 wire, and no more.

    python examples/nano_diloco.py
    torchrun --nproc-per-node 2 examples/nano_diloco.py
    torchrun --nproc-per-node 2 examples/nano_diloco.py --library

All replicas of a run print the same hash, and so does a run with ``--library``, where
``diloco_comm.DiLoCo`` does the same. Missing here: all that is fast (kernels, short wires,
an exchange beside training), all that can fail (a replica that dies, values that are NaN), and
frozen parameters and buffers, which the library copies from the lowest replica at the start.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn


class NanoDiLoCo:
    """Train alone for ``sync_every`` steps, then share what was learned (arXiv 2311.08105).

    The outer parameters are the model that all replicas share; the local parameters are those that
    the inner optimizer trains. Their difference is the pseudo-gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync_every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.sync_every, self.lr, self.mu = sync_every, lr, momentum
        self.num_replicas = dist.get_world_size() if dist.is_initialized() else 1
        self.inner_steps = 0
        if self.num_replicas > 1:
            for parameter in self.parameters:
                dist.broadcast(parameter.data, src=0)
        # One flat tensor, as a payload is one piece of memory.
        self.outer = self.local()
        self.momentum = torch.zeros_like(self.outer)
        optimizer.register_step_post_hook(lambda *_: self.step())

    def local(self) -> Tensor:
        """Return a copy of the local parameters, flat: fp32 [N]."""
        return torch.cat([p.detach().flatten().float() for p in self.parameters])

    def step(self) -> None:
        """Count an inner step; each ``sync_every``-th is followed by an outer step."""
        self.inner_steps += 1
        if self.inner_steps % self.sync_every == 0:
            self.outer_step()

    def flush(self) -> None:
        """Share what was trained since the last outer step."""
        if self.inner_steps % self.sync_every:
            self.outer_step()

    @torch.no_grad()
    def outer_step(self) -> None:
        mean = self.mean_of(self.outer - self.local())
        # Nesterov, as torch.optim.SGD(nesterov=True) takes a step with the gradient ``mean``.
        self.momentum = self.mu * self.momentum + mean
        self.outer = self.outer - self.lr * (mean + self.mu * self.momentum)
        parts = self.outer.split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))

    def mean_of(self, pseudo_gradient: Tensor) -> Tensor:
        """Return the mean over the replicas, added up in the order of their ranks.

        The order decides the last bit of a sum, so all replicas add in the same order.
        """
        if self.num_replicas == 1:
            return pseudo_gradient
        gathered = [torch.empty_like(pseudo_gradient) for _ in range(self.num_replicas)]
        dist.all_gather(gathered, pseudo_gradient)
        share = 1.0 / self.num_replicas
        mean = share * gathered[0]
        for other in gathered[1:]:
            mean = mean + share * other
        return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sync-every", type=int, default=8)
    parser.add_argument("--library", action="store_true", help="train with diloco_comm.DiLoCo")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    replica = dist.get_rank() if dist.is_initialized() else 0

    torch.manual_seed(replica)  # weights differ at first: rank 0's count
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if options.library:
        from diloco_comm import DiLoCo, Nesterov

        outer = Nesterov(lr=0.7, momentum=0.9)
        diloco = DiLoCo(model, optimizer, sync_every=options.sync_every, wire="fp32", outer=outer)
    else:
        diloco = NanoDiLoCo(model, optimizer, options.sync_every)

    data = torch.Generator().manual_seed(1000 + replica)  # no two replicas share data
    for _ in range(options.steps):
        x = torch.randn(32, 16, generator=data)
        loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    diloco.flush()

    values = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    print(f"replica {replica}: {hashlib.sha256(values.tobytes()).hexdigest()[:16]}", flush=True)
    if options.library:
        diloco.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
