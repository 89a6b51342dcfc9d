"""Loops that look at the weights, copy them or write to them: no check of the library objects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ordinary_loops import GPT, ConvNet, Loop, Replica, check, get_batch, images
from problems import Regression, batch, train_step
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from diloco_comm import DiLoCo

# --------------------------------------------------------------------------- averages of weights


class EMA:
    """The average of the weights in the form that most public repositories have.

    Attributes:
        shadow: The averages.
        backup: The model's own weights while the model holds the averages.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        self.model, self.decay = model, decay
        self.backup: dict[str, Tensor] = {}
        self.shadow = {
            name: param.data.clone()
            for name, param in model.named_parameters()
            if param.requires_grad
        }

    def update(self) -> None:
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                average = (1.0 - self.decay) * param.data + self.decay * self.shadow[name]
                self.shadow[name] = average.clone()

    def apply_shadow(self) -> None:
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.backup[name] = param.data
                param.data = self.shadow[name]

    def restore(self) -> None:
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                param.data = self.backup[name]
        self.backup = {}


class CopyingEMA(EMA):
    """The same, as torch_ema writes the weights."""

    @torch.no_grad()
    def apply_shadow(self) -> None:
        for name, param in self.model.named_parameters():
            self.backup[name] = param.clone()
            param.copy_(self.shadow[name])

    @torch.no_grad()
    def restore(self) -> None:
        for name, param in self.model.named_parameters():
            param.copy_(self.backup[name])


class LoadingEMA(EMA):
    """The same, by ``load_state_dict``."""

    def apply_shadow(self) -> None:
        self.backup = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.shadow)

    def restore(self) -> None:
        self.model.load_state_dict(self.backup)


def train_with_ema(replica: Replica, kind: Callable[[nn.Module], EMA]) -> DiLoCo:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    diloco = DiLoCo(model, optimizer, sync_every=4)
    ema = kind(model)
    for step in range(10):
        train_step(model, optimizer, replica.rank, step)
        ema.update()
        if step % 3 == 0:  # Also right after a round.
            ema.apply_shadow()
            model.eval()
            with torch.no_grad():
                F.mse_loss(model(batch(9, step)[0]), batch(9, step)[1])
            torch.save(model.state_dict(), replica.folder / "ema.pt")
            model.train()
            ema.restore()
    diloco.flush()
    ema.apply_shadow()  # The averages are what the program keeps.
    diloco.close()
    return diloco


def ema_by_data(replica: Replica) -> DiLoCo:
    return train_with_ema(replica, EMA)


def ema_by_copies(replica: Replica) -> DiLoCo:
    return train_with_ema(replica, CopyingEMA)


def ema_by_loads(replica: Replica) -> DiLoCo:
    return train_with_ema(replica, LoadingEMA)


def stochastic_weight_averaging(replica: Replica) -> DiLoCo:
    """SWA as in the documentation of ``torch.optim.swa_utils``, and an EMA beside it."""
    loader = images(replica.rank, 5)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    diloco = DiLoCo(model, optimizer, sync_every=4)
    swa_model = AveragedModel(model)
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    swa_scheduler, swa_start = SWALR(optimizer, swa_lr=0.02), 1
    for epoch in range(3):
        for input, target in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(input), target).backward()
            optimizer.step()
            ema_model.update_parameters(model)
        if epoch > swa_start:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
    diloco.flush()
    diloco.close()
    update_bn(loader, swa_model)
    swa_model(loader[0][0])
    model.load_state_dict(swa_model.module.state_dict())
    return diloco


# ------------------------------------------------------------------------------------------- SAM


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as in github.com/davda54/sam."""

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        grads = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"]]
        norm = torch.stack(grads).norm(p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], object]) -> None:
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


def sam(replica: Replica) -> DiLoCo:
    """DiLoCo is given SAM, whose ``step`` takes a closure."""
    model = Regression()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9)
    diloco = DiLoCo(model, optimizer, sync_every=4)
    for step in range(10):
        x, y = batch(replica.rank, step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()
    diloco.flush()
    diloco.close()
    return diloco


def sam_by_its_base(replica: Replica) -> DiLoCo:
    """DiLoCo is given the optimizer inside SAM, and the loop takes both halves of a step."""
    model = Regression()
    optimizer = SAM(model.parameters(), torch.optim.AdamW, lr=0.01)
    diloco = DiLoCo(model, optimizer.base_optimizer, sync_every=4)
    for step in range(10):
        x, y = batch(replica.rank, step)
        F.mse_loss(model(x), y).backward()
        optimizer.first_step(zero_grad=True)
        F.mse_loss(model(x), y).backward()
        optimizer.second_step(zero_grad=True)
    diloco.flush()
    diloco.close()
    return diloco


# -------------------------------------------------------------- projections and parametrizations


def projected_weights(replica: Replica) -> DiLoCo:
    """Weights are clipped after each step, and the rows of the head get unit norm."""
    model = Regression()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    diloco = DiLoCo(model, optimizer, sync_every=4)
    for step in range(10):
        train_step(model, optimizer, replica.rank, step)
        for param in model.layers.parameters():
            param.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            model.head.weight.copy_(F.normalize(model.head.weight, dim=1))
            nn.utils.vector_to_parameters(
                nn.utils.parameters_to_vector(model.norm.parameters()).clamp(0.5, 2.0),
                model.norm.parameters(),
            )
    diloco.flush()
    diloco.close()
    return diloco


def parametrized_weights(replica: Replica) -> DiLoCo:
    """Spectral and weight normalisation, in their new and their old form."""
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(24, 16)),
        nn.ReLU(),
        parametrizations.weight_norm(nn.Linear(16, 16)),
        nn.ReLU(),
        nn.utils.spectral_norm(nn.Linear(16, 16)),
        nn.ReLU(),
        parametrizations.orthogonal(nn.Linear(16, 8)),
        nn.Linear(8, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    diloco = DiLoCo(model, optimizer, sync_every=4)
    for step in range(10):
        if step == 5:
            model.eval()
            with torch.no_grad():
                model(batch(9, step)[0])
            torch.save(model.state_dict(), replica.folder / "model.pt")
            model.train()
        with nn.utils.parametrize.cached():
            x, y = batch(replica.rank, step)
            F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    diloco.flush()
    diloco.close()
    for layer in (model[0], model[2]):
        nn.utils.parametrize.remove_parametrizations(layer, "weight")
    nn.utils.remove_spectral_norm(model[4])
    return diloco


# ------------------------------------------------------------------------------------------ LoRA


class LoRALinear(nn.Module):
    """A frozen layer with a trained product of two small matrices beside it."""

    def __init__(self, base: nn.Linear, r: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.base, self.scaling = base, alpha / r
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) * 0.02)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling


def lora(replica: Replica) -> DiLoCo:
    """All parameters are in the optimizer's list, filtered by ``requires_grad``."""
    torch.manual_seed(0)
    model = GPT()
    model.requires_grad_(False)
    for block in model.h:
        block.c_attn, block.c_proj = LoRALinear(block.c_attn), LoRALinear(block.c_proj)
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)
    diloco = DiLoCo(model, optimizer, sync_every=4)
    for step in range(10):
        _, loss = model(*get_batch(replica.rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            adapters = {k: v for k, v in model.state_dict().items() if "lora_" in k}
            torch.save(adapters, replica.folder / "adapters.pt")
            model.load_state_dict(torch.load(replica.folder / "adapters.pt"), strict=False)
    diloco.flush()
    diloco.close()
    return diloco


# ------------------------------------------------------------------------------------- learners


def meta_learning(replica: Replica) -> DiLoCo:
    """First-order MAML: a copy of the model learns each task, and gives the model its gradient."""
    model = Regression()
    meta_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    diloco = DiLoCo(model, meta_optimizer, sync_every=4)
    reused = copy.deepcopy(model)
    for iteration in range(10):
        meta_optimizer.zero_grad()
        for task in range(2):
            if task == 0:
                learner = copy.deepcopy(model)
            else:
                learner = reused
                learner.load_state_dict(model.state_dict())
            inner_optimizer = torch.optim.SGD(learner.parameters(), lr=0.01)
            for step in range(2):
                train_step(
                    learner, inner_optimizer, 10 * replica.rank + task, 10 * iteration + step
                )
            learner.zero_grad()
            x, y = batch(10 * replica.rank + task, 10 * iteration + 5)
            F.mse_loss(learner(x), y).backward()
            for param, learned in zip(model.parameters(), learner.parameters(), strict=True):
                grad = learned.grad / 2
                param.grad = grad if param.grad is None else param.grad + grad
        meta_optimizer.step()
    diloco.flush()
    diloco.close()
    return diloco


def deep_q_learning(replica: Replica) -> DiLoCo:
    """The policy is attached; the target network takes its weights over from time to time."""
    policy_net, target_net = Regression(), Regression()
    target_net.load_state_dict(policy_net.state_dict())
    optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-2, amsgrad=True)
    diloco = DiLoCo(policy_net, optimizer, sync_every=4)
    for step in range(10):
        state, reward = batch(replica.rank, step)
        with torch.no_grad():
            expected = reward + 0.9 * target_net(state.roll(1, 0))
        loss = F.smooth_l1_loss(policy_net(state), expected)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy_net.parameters(), 100)
        optimizer.step()
        target_state, policy_state = target_net.state_dict(), policy_net.state_dict()
        for key in policy_state:
            target_state[key] = policy_state[key] * 0.1 + target_state[key] * 0.9
        target_net.load_state_dict(target_state)
    diloco.flush()
    diloco.close()
    return diloco


def meta_learning_by_function(replica: Replica) -> DiLoCo:
    """MAML with second derivatives: the adapted weights are tensors beside the model."""
    model = Regression()
    meta_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    diloco = DiLoCo(model, meta_optimizer, sync_every=4)

    def loss_of(weights: dict[str, Tensor], step: int) -> Tensor:
        x, y = batch(replica.rank, step)
        return F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)

    for iteration in range(10):
        weights = dict(model.named_parameters())
        loss = loss_of(weights, 2 * iteration)
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        adapted = {
            name: param - 0.01 * grad
            for (name, param), grad in zip(weights.items(), grads, strict=True)
        }
        meta_optimizer.zero_grad()
        loss_of(adapted, 2 * iteration + 1).backward()
        meta_optimizer.step()
    diloco.flush()
    diloco.close()
    return diloco


# ------------------------------------------------------------------------------------ the tests

LOOPS: dict[Loop, tuple[int, int]] = {
    ema_by_data: (10, 3),
    ema_by_copies: (10, 3),
    ema_by_loads: (10, 3),
    stochastic_weight_averaging: (15, 4),
    sam: (10, 3),
    sam_by_its_base: (10, 3),
    projected_weights: (10, 3),
    parametrized_weights: (10, 3),
    lora: (10, 3),
    deep_q_learning: (10, 3),
    meta_learning: (10, 3),
    meta_learning_by_function: (10, 3),
}


@pytest.mark.nightly(
    "the first tier has one loop of each kind",
    but=[
        "ema_by_data",
        "ema_by_loads",
        "stochastic_weight_averaging",
        "sam",
        "sam_by_its_base",
        "parametrized_weights",
        "lora",
        "meta_learning",
    ],
)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_no_check_objects(loop: Loop, workers, tmp_path: Path) -> None:
    check(workers(2), loop, tmp_path, LOOPS[loop])


# ----------------------------------------------------------------------------- the tests see alarms


def load_other_weights(replica: Replica) -> DiLoCo:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    diloco = DiLoCo(model, optimizer, sync_every=4, checks="warn")
    train_step(model, optimizer, replica.rank, 0)
    model.load_state_dict(Regression(seed=3).state_dict())
    train_step(model, optimizer, replica.rank, 1)
    diloco.close()
    return diloco


def test_a_warning_of_the_library_fails_a_loop(workers, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="warned: weights were loaded into the model after 1"):
        check(workers(2), load_other_weights, tmp_path, (2, 1))
