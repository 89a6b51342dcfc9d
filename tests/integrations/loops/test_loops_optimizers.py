"""Loops with several optimizers, other optimizers and sharded models: no check objects to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from choice_groups import grouped
from ordinary_loops import GPT, Loop, Replica, check, get_batch
from problems import Regression, batch, train_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainers import needs

from diloco_comm import SGD, DiLoCo, Eager, Nesterov, Streaming

# ------------------------------------------------------------------------------------------ GANs


class GAN(nn.Module):
    """A generator and a discriminator of points in the plane."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)
        )
        self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def points(rank: int, num_batches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 2, generator=generator) + 2 + rank for _ in range(num_batches)]


def train_gan(
    replica: Replica, attach: Callable[[GAN, torch.optim.Optimizer, torch.optim.Optimizer], DiLoCo]
) -> DiLoCo:
    """Train as PyTorch's DCGAN example does."""
    gan = GAN()
    netG, netD = gan.generator, gan.discriminator
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    diloco = attach(gan, optimizerG, optimizerD)
    for real in points(replica.rank, 10):
        netD.zero_grad()
        criterion(netD(real), torch.ones(8, 1)).backward()
        fake = netG(torch.randn(8, 4))
        criterion(netD(fake.detach()), torch.zeros(8, 1)).backward()
        optimizerD.step()
        netG.zero_grad()
        criterion(netD(fake), torch.ones(8, 1)).backward()
        optimizerG.step()
    diloco.flush()
    diloco.close()
    return diloco


def gan(replica: Replica) -> DiLoCo:
    return train_gan(replica, lambda gan, g, d: DiLoCo(gan, [g, d], sync_every=4))


def gan_with_the_generator_attached(replica: Replica) -> DiLoCo:
    """Each replica keeps a discriminator of its own."""
    return train_gan(replica, lambda gan, g, d: DiLoCo(gan.generator, g, sync_every=4))


def gan_in_two_groups(replica: Replica) -> DiLoCo:
    """Generator and discriminator are attached apart, under two names."""
    others: list[DiLoCo] = []

    def attach(gan: GAN, g: torch.optim.Optimizer, d: torch.optim.Optimizer) -> DiLoCo:
        others.append(DiLoCo(gan.discriminator, d, sync_every=5))
        return DiLoCo(gan.generator, g, sync_every=4)

    diloco = train_gan(replica, attach)
    others[0].flush()
    others[0].close()
    return diloco


def set_requires_grad(net: nn.Module, requires_grad: bool) -> None:
    for param in net.parameters():
        param.requires_grad = requires_grad


def gan_that_freezes_by_turns(replica: Replica) -> DiLoCo:
    """As in CycleGAN: the discriminator is frozen while the generator learns."""
    gan = GAN()
    optimizer_G = torch.optim.Adam(gan.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_D = torch.optim.Adam(gan.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    diloco = DiLoCo(gan, [optimizer_G, optimizer_D], sync_every=4)
    for real in points(replica.rank, 10):
        fake = gan.generator(torch.randn(8, 4))
        set_requires_grad(gan.discriminator, False)
        optimizer_G.zero_grad()
        ((gan.discriminator(fake) - 1) ** 2).mean().backward()
        optimizer_G.step()
        set_requires_grad(gan.discriminator, True)
        optimizer_D.zero_grad()
        ((gan.discriminator(real) - 1) ** 2).mean().backward()
        (gan.discriminator(fake.detach()) ** 2).mean().backward()
        optimizer_D.step()
        set_requires_grad(gan.discriminator, False)
    diloco.flush()
    diloco.close()
    return diloco


def wasserstein_gan(replica: Replica) -> DiLoCo:
    """WGAN: the critic takes two steps for one of the generator, and its weights are clamped."""
    gan = GAN()
    optimizerD = torch.optim.RMSprop(gan.discriminator.parameters(), lr=5e-4)
    optimizerG = torch.optim.RMSprop(gan.generator.parameters(), lr=5e-4)
    diloco = DiLoCo(gan, [optimizerD, optimizerG], sync_every=4)
    data = iter(points(replica.rank, 10))
    for _ in range(5):
        for _ in range(2):
            real = next(data)
            optimizerD.zero_grad()
            fake = gan.generator(torch.randn(8, 4)).detach()
            (gan.discriminator(fake).mean() - gan.discriminator(real).mean()).backward()
            optimizerD.step()
            for p in gan.discriminator.parameters():
                p.data.clamp_(-0.01, 0.01)
        optimizerG.zero_grad()
        (-gan.discriminator(gan.generator(torch.randn(8, 4))).mean()).backward()
        optimizerG.step()
    diloco.flush()
    diloco.close()
    return diloco


# ---------------------------------------------------------------------------- Muon and the rest


class Muon(torch.optim.Optimizer):
    """Momentum that Newton and Schulz's iteration makes orthogonal, as in modded-nanogpt."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(state["momentum_buffer"], group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x


def muon_and_adamw(replica: Replica) -> DiLoCo:
    model = GPT()
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = [Muon(matrices), torch.optim.AdamW(others, lr=3e-3, betas=(0.8, 0.95))]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    diloco = DiLoCo(model, optimizers, sync_every=4)
    for step in range(10):
        _, loss = model(*get_batch(replica.rank, step))
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 - step / 10)
        for group in optimizers[0].param_groups:
            group["momentum"] = 0.85 + 0.01 * step
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    diloco.flush()
    diloco.close()
    return diloco


# ------------------------------------------------------------------------------ one's own count


def steps_counted_by_the_loop(replica: Replica) -> DiLoCo:
    """``attach=False``: the loop says itself when it has taken a step."""
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    diloco = DiLoCo(model, optimizer, sync_every=4, attach=False)
    for step in range(10):
        x, y = batch(replica.rank, step)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        diloco.step()
        optimizer.zero_grad()
    diloco.flush()
    diloco.close()
    return diloco


def optimizers_within_backward(replica: Replica) -> DiLoCo:
    """As in PyTorch's tutorial: each parameter has an optimizer, which steps when it has a grad."""
    model = Regression()
    optimizer_dict = {p: torch.optim.Adam([p], lr=1e-2, foreach=False) for p in model.parameters()}
    diloco = DiLoCo(model, list(optimizer_dict.values()), sync_every=4)

    def optimizer_hook(parameter: nn.Parameter) -> None:
        optimizer_dict[parameter].step()
        optimizer_dict[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(optimizer_hook)
    for step in range(10):
        x, y = batch(replica.rank, step)
        F.mse_loss(model(x), y).backward()
    diloco.flush()
    diloco.close()
    return diloco


class NoamOpt:
    """The wrapper of "The Annotated Transformer", which is no torch optimizer."""

    def __init__(self, model_size: int, warmup: int, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.model_size, self.warmup = model_size, warmup
        self._step, self._rate = 0, 0.0

    def step(self) -> None:
        self._step += 1
        self._rate = self.model_size**-0.5 * min(self._step**-0.5, self._step * self.warmup**-1.5)
        for p in self.optimizer.param_groups:
            p["lr"] = self._rate
        self.optimizer.step()


def a_wrapper_of_an_optimizer(replica: Replica) -> DiLoCo:
    model = GPT()
    adam = torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9)
    opt = NoamOpt(16, 8, adam)
    diloco = DiLoCo(model, opt, sync_every=4)
    for step in range(10):
        _, loss = model(*get_batch(replica.rank, step))
        loss.backward()
        opt.step()
        opt.optimizer.zero_grad()
    diloco.flush()
    diloco.close()
    return diloco


class CautiousAdamW(torch.optim.AdamW):
    """A class that prepares the gradients and lets its parent take the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad / (p.grad.norm() + 1e-6)
        return super().step(closure)


def a_class_above_adamw(replica: Replica) -> DiLoCo:
    return train_regression(replica, lambda parameters: CautiousAdamW(parameters, lr=1e-2))


def lbfgs(replica: Replica) -> DiLoCo:
    model = Regression()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    diloco = DiLoCo(model, optimizer, sync_every=4)
    for step in range(10):
        x, y = batch(replica.rank, step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    diloco.flush()
    diloco.close()
    return diloco


# ----------------------------------------------------------------------- large steps, other state


def train_regression(
    replica: Replica,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    sync_every: int = 4,
    num_steps: int = 10,
    warmup: int = 3,
    **arguments: Any,
) -> DiLoCo:
    model = Regression()
    optimizer = make(list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1))
    )
    diloco = DiLoCo(model, optimizer, sync_every=sync_every, **grouped(arguments))
    for step in range(num_steps):
        train_step(model, optimizer, replica.rank, step)
        scheduler.step()
    diloco.flush()
    diloco.close()
    return diloco


def large_momentum(replica: Replica) -> list[DiLoCo]:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=5e-3, momentum=0.99)

    return [
        train_regression(replica, make, num_steps=22),
        train_regression(replica, make, sync_every=10, num_steps=32),
    ]


def momentum_with_a_warm_up(replica: Replica) -> list[DiLoCo]:
    """Steps grow over several rounds, and each replica pulls to its own data."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)

    kinds: list[dict[str, Any]] = [
        {},
        {"outer": SGD(1.0), "wire": "fp32"},
        {"overlap": Streaming(delay=1, alpha=0.5)},
        {"overlap": Eager(), "outer": Nesterov(0.2, 0.9)},
        {"outer": SGD(1.0), "sync_every": 10},
    ]
    return [train_regression(replica, make, num_steps=33, warmup=20, **kind) for kind in kinds]


def averages_of_adamw(replica: Replica) -> list[DiLoCo]:
    """Local SGD, which averages the parameters: outer steps undo what replicas learn apart."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    averaging = {"outer": SGD(1.0), "wire": "fp32"}
    return [
        train_regression(replica, make, num_steps=61, warmup=warmup, **averaging)
        for warmup in (0, 20)
    ]


def adamw_with_a_large_rate(replica: Replica) -> list[DiLoCo]:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)

    return [
        train_regression(replica, make, num_steps=22),
        train_regression(replica, make, sync_every=10, num_steps=32),
    ]


def optimizers_with_other_states(replica: Replica) -> list[DiLoCo]:
    """States that are no moments: copies of the first weights, averages, products of rows."""
    kinds: list[Any] = [
        lambda parameters: torch.optim.ASGD(parameters, lr=1e-2, t0=0),
        lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
        lambda parameters: torch.optim.Rprop(parameters, lr=1e-3),
        lambda parameters: torch.optim.Adadelta(parameters, lr=1.0),
        lambda parameters: torch.optim.RAdam(parameters, lr=1e-2),
    ]
    return [train_regression(replica, make) for make in kinds]


def eight_bits_of_bitsandbytes(replica: Replica) -> DiLoCo:
    from bitsandbytes.optim import AdamW8bit

    return train_regression(replica, lambda p: AdamW8bit(p, lr=1e-2, min_8bit_size=1))


def eight_bits_of_torchao(replica: Replica) -> DiLoCo:
    from torchao.optim import AdamW8bit

    return train_regression(replica, lambda p: AdamW8bit(p, lr=1e-2), num_steps=6)


def sharded_replicas(replica: Replica) -> DiLoCo:
    """Each of two replicas shards its model over two workers, and gathers it to evaluate."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Regression(width=24)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    diloco = DiLoCo(model, optimizer, sync_every=4, peers=mesh["replica"])
    for step in range(10):
        if step % 3 == 0:
            model.eval()
            model.unshard()
            with torch.no_grad():
                model(batch(9, step)[0])
            model.reshard()
            model.train()
        x, y = batch(replica.rank, step)
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    diloco.flush()
    diloco.close()
    return diloco


# ------------------------------------------------------------------------------------ the tests

LOOPS: dict[Loop, list[tuple[int, int]]] = {
    gan: [(10, 3)],
    gan_with_the_generator_attached: [(10, 3)],
    gan_in_two_groups: [(10, 3)],
    gan_that_freezes_by_turns: [(10, 3)],
    wasserstein_gan: [(10, 3)],
    muon_and_adamw: [(10, 3)],
    steps_counted_by_the_loop: [(10, 3)],
    optimizers_within_backward: [(10, 3)],
    a_wrapper_of_an_optimizer: [(10, 3)],
    a_class_above_adamw: [(10, 3)],
    lbfgs: [(10, 3)],
    large_momentum: [(22, 6), (32, 4)],
    momentum_with_a_warm_up: [(33, 9), (33, 9), (33, 9), (33, 9), (33, 4)],
    averages_of_adamw: [(61, 16), (61, 16)],
    adamw_with_a_large_rate: [(22, 6), (32, 4)],
    optimizers_with_other_states: [(10, 3)] * 5,
    eight_bits_of_bitsandbytes: [(10, 3)],
    eight_bits_of_torchao: [(6, 2)],
}
NEEDS = {eight_bits_of_bitsandbytes: "bitsandbytes", eight_bits_of_torchao: "torchao"}


@pytest.mark.nightly(
    "the first tier has one loop of each kind; 8-bit optimizers compile their step",
    but=[
        "gan",
        "gan_with_the_generator_attached",
        "gan_that_freezes_by_turns",
        "muon_and_adamw",
        "steps_counted_by_the_loop",
        "optimizers_within_backward",
        "adamw_with_a_large_rate",
    ],
)
@pytest.mark.parametrize(
    "loop",
    [pytest.param(loop, marks=[needs(NEEDS[loop])] if loop in NEEDS else []) for loop in LOOPS],
    ids=lambda loop: loop.__name__,
)
def test_no_check_objects(loop: Loop, workers, tmp_path: Path) -> None:
    check(workers(2), loop, tmp_path, *LOOPS[loop])


@pytest.mark.nightly("3 s; test_fsdp has shards and gathered copies under the same checks")
def test_no_check_objects_to_shards(workers, tmp_path: Path) -> None:
    check(workers(4), sharded_replicas, tmp_path, (10, 3), num_shards=2)
