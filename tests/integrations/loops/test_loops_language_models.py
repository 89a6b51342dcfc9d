"""Language models as nanoGPT and torchtune train them: no check of the library objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from choice_groups import grouped
from ordinary_loops import GPT, NUM_TOKENS, Loop, Replica, check, get_batch, get_lr
from torch import nn

from diloco_comm import DiLoCo, Streaming

# ------------------------------------------------------------------------------------- nanoGPT


@torch.no_grad()
def estimate_loss(model: nn.Module, rank: int) -> dict[str, float]:
    out = {}
    model.eval()
    for split, first in (("train", 0), ("val", 500)):
        losses = torch.zeros(2)
        for k in range(2):
            _, loss = model(*get_batch(rank, first + k))
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


def train_nanogpt(
    replica: Replica,
    *,
    init_from: str = "scratch",
    loads: str = "before",
    max_iters: int = 10,
    scaled: bool = False,
    **arguments: Any,
) -> DiLoCo:
    """Train as nanoGPT's train.py does.

    Args:
        init_from: "scratch", or "resume" from the checkpoint in the replica's folder.
        loads: Whether a resumed run loads its weights "before" DiLoCo is attached, or "after",
            together with the outer state.
        scaled: Whether the GradScaler is on.
    """
    gradient_accumulation_steps, eval_interval, grad_clip, learning_rate = 2, 5, 1.0, 1e-2
    path = replica.folder / "ckpt.pt"
    iter_num, best_val_loss = 0, 1e9
    model = GPT()
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    optimizer = model.configure_optimizers(learning_rate, fused=scaled)
    checkpoint: dict[str, Any] = {}
    if init_from == "resume":
        checkpoint = torch.load(path, map_location="cpu")
        iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
    if checkpoint and loads == "before":
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    diloco = DiLoCo(model, optimizer, sync_every=4, **grouped(arguments))
    if checkpoint and loads == "after":
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        diloco.load_state_dict(checkpoint["diloco"])
    checkpoint = {}

    X, Y = get_batch(replica.rank, 2 * iter_num)
    while iter_num < max_iters:
        lr = get_lr(iter_num, learning_rate, 2, max_iters)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        if iter_num % eval_interval == 0 and init_from == "scratch":
            losses = estimate_loss(model, replica.rank)
            if losses["val"] < best_val_loss and iter_num > 0:
                best_val_loss = losses["val"]
                checkpoint = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "diloco": diloco.state_dict(),
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                }
                torch.save(checkpoint, path)
        for micro_step in range(gradient_accumulation_steps):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not scaled):
                _, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
            X, Y = get_batch(replica.rank, 2 * iter_num + micro_step + 1)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
    diloco.flush()
    diloco.close()
    assert model.wte.weight is model.lm_head.weight
    return diloco


def nanogpt(replica: Replica) -> list[DiLoCo]:
    """The resumed run attaches the loaded model, and begins with new outer parameters."""
    return [train_nanogpt(replica), train_nanogpt(replica, init_from="resume")]


def nanogpt_resumed_after_attaching(replica: Replica) -> list[DiLoCo]:
    return [train_nanogpt(replica), train_nanogpt(replica, init_from="resume", loads="after")]


def nanogpt_that_evaluates_only(replica: Replica) -> DiLoCo:
    model = GPT()
    diloco = DiLoCo(model, model.configure_optimizers(), sync_every=4)
    estimate_loss(model, replica.rank)
    diloco.close()
    return diloco


def nanogpt_with_a_grad_scaler(replica: Replica) -> DiLoCo:
    return train_nanogpt(replica, scaled=True)


def nanogpt_with_rounds_under_way(replica: Replica) -> list[DiLoCo]:
    settings: dict[str, Any] = {"overlap": Streaming(delay=2, alpha=0.5), "fragments": 2}
    first = train_nanogpt(replica, **settings)
    return [first, train_nanogpt(replica, init_from="resume", loads="after", **settings)]


# ----------------------------------------------------------------------------------- torchtune


def torchtune(replica: Replica) -> DiLoCo:
    """A recipe of torchtune: fused AdamW, a scheduler that steps with it, and a compiled loss."""
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: get_lr(step, 1.0, 2, 10))
    loss_fn = torch.compile(
        nn.CrossEntropyLoss(ignore_index=-100, reduction="sum"), backend="eager"
    )
    diloco = DiLoCo(model, optimizer, sync_every=4)
    accumulation_steps, running_loss, num_tokens = 2, torch.zeros(()), torch.zeros(())
    model.train()
    for epoch in range(2):
        for idx in range(10):
            tokens, labels = get_batch(replica.rank, 10 * epoch + idx)
            num_tokens += (labels != -100).sum()
            logits = model(tokens)[0]
            current_loss = loss_fn(logits.reshape(-1, NUM_TOKENS), labels.reshape(-1))
            running_loss = running_loss + current_loss.detach()
            current_loss.backward()
            if (idx + 1) % accumulation_steps == 0:
                for param in model.parameters():
                    param.grad *= 1 / num_tokens
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                scheduler.step()
                running_loss, num_tokens = torch.zeros(()), torch.zeros(())
    diloco.flush()
    diloco.close()
    return diloco


# ------------------------------------------------------------ checkpointing, compilation, dtypes


def gradient_checkpointing(replica: Replica) -> DiLoCo:
    """The last step ends a round, so the loop needs no flush."""
    model = GPT(checkpointing=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with DiLoCo(model, optimizer, sync_every=4) as diloco:
        for step in range(12):
            _, loss = model(*get_batch(replica.rank, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                with diloco.outer_parameters(), torch.no_grad():
                    model.eval()
                    model(*get_batch(9, step))
                    torch.save(model.state_dict(), replica.folder / "model.pt")
                    model.train()
    return diloco


def compiled_model(replica: Replica) -> DiLoCo:
    torch.compiler.reset()
    model = torch.compile(GPT(), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    diloco = DiLoCo(model, optimizer, sync_every=4)
    for step in range(10):
        if step % 5 == 0:
            model.eval()
            with torch.no_grad():
                model(*get_batch(9, step))
            model.train()
            torch.save(model.state_dict(), replica.folder / "model.pt")
        _, loss = model(*get_batch(replica.rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    diloco.flush()
    diloco.close()
    return diloco


def compiled_optimizer(replica: Replica) -> DiLoCo:
    """As the tutorial of PyTorch compiles the step: in a function of its own."""
    torch.compiler.reset()
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2))
    diloco = DiLoCo(model, optimizer, sync_every=4)

    @torch.compile(fullgraph=False, backend="eager")
    def step_optimizer() -> None:
        optimizer.step()

    for step in range(10):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * replica.rank + step))
        F.mse_loss(model(x), x.flip(1)).backward()
        step_optimizer()
        optimizer.zero_grad()
    diloco.flush()
    diloco.close()
    return diloco


class TiedAutoencoder(nn.Module):
    """Two layers with one matrix: the decoder has the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


class TiedSeq2Seq(nn.Module):
    """Three modules share one embedding, which is tied again after a load, as Hugging Face does."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(NUM_TOKENS, 8)
        self.encoder, self.decoder = nn.Embedding(NUM_TOKENS, 8), nn.Embedding(NUM_TOKENS, 8)
        self.lm_head = nn.Linear(8, NUM_TOKENS, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        for module in (self.encoder, self.decoder, self.lm_head):
            module.weight = self.shared.weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.decoder(target) + self.encoder(source).mean(1, keepdim=True))


def tied_weights(replica: Replica) -> list[DiLoCo]:
    model, autoencoder = TiedSeq2Seq(), TiedAutoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    other = torch.optim.AdamW(autoencoder.parameters(), lr=1e-2)
    runs = [DiLoCo(model, optimizer, sync_every=4), DiLoCo(autoencoder, other, sync_every=3)]
    for step in range(10):
        x, y = get_batch(replica.rank, step)
        F.cross_entropy(model(x, x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        F.mse_loss(autoencoder(x.float()), x.float()).backward()
        other.step()
        other.zero_grad()
        if step == 5:
            # Loading one's own weights, and tying them again, changes nothing.
            model.load_state_dict(model.state_dict())
            model.tie_weights()
    for diloco in runs:
        diloco.flush()
        diloco.close()
    assert model.lm_head.weight is model.shared.weight
    return runs


def bf16_adamw(replica: Replica) -> DiLoCo:
    model = GPT().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return train_bf16(replica, model, optimizer)


def bf16_sgd(replica: Replica) -> DiLoCo:
    model = GPT().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return train_bf16(replica, model, optimizer)


def train_bf16(replica: Replica, model: nn.Module, optimizer: torch.optim.Optimizer) -> DiLoCo:
    diloco = DiLoCo(model, optimizer, sync_every=4)
    for step in range(10):
        _, loss = model(*get_batch(replica.rank, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    diloco.flush()
    diloco.close()
    return diloco


# ------------------------------------------------------------------------------------ the tests

LOOPS: dict[Loop, list[tuple[int, int]]] = {
    # Ten steps are rounds at 4 and 8 and the flush; the resumed run takes five of them.
    nanogpt: [(10, 3), (5, 2)],
    nanogpt_resumed_after_attaching: [(10, 3), (10, 2)],
    nanogpt_with_a_grad_scaler: [(10, 3)],
    nanogpt_that_evaluates_only: [(0, 0)],
    nanogpt_with_rounds_under_way: [(10, 6), (10, 5)],
    torchtune: [(10, 3)],
    gradient_checkpointing: [(12, 3)],
    compiled_model: [(10, 3)],
    compiled_optimizer: [(10, 3)],
    tied_weights: [(10, 3), (10, 4)],
    bf16_adamw: [(10, 3)],
    bf16_sgd: [(10, 3)],
}


@pytest.mark.nightly(
    "compilations take seconds; the first tier has nanoGPT, checkpointing, tied and bf16 weights",
    but=[
        "nanogpt",
        "nanogpt_resumed_after_attaching",
        "nanogpt_with_a_grad_scaler",
        "nanogpt_that_evaluates_only",
        "gradient_checkpointing",
        "tied_weights",
        "bf16_adamw",
    ],
)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_no_check_objects(loop: Loop, workers, tmp_path: Path) -> None:
    check(workers(2), loop, tmp_path, *LOOPS[loop])
