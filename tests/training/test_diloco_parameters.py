"""Kinds of parameters, buffers and inner optimizers under DiLoCo."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from choice_groups import grouped
from problems import Regression, batch, equal, parameters_of, train_step
from torch import Tensor, nn

from diloco_comm import SGD, DiLoCo, Streaming

# ----------------------------------------------------------------------- kinds of parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(x)))) + self.empty.sum()


def train_tied(rank: int, world: int) -> tuple[str, int, list[Tensor]]:
    torch.manual_seed(rank)
    model = Tied()
    addresses = [param.data_ptr() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    arguments = {"fragments": ["embedding.*", "rest"], "offsets": [2, 2]}
    with DiLoCo(model, optimizer, sync_every=2, **grouped(arguments)) as diloco:
        for step in range(6):
            tokens = torch.randint(0, 13, (32,), generator=torch.Generator().manual_seed(step))
            nn.functional.cross_entropy(model(tokens), (tokens + rank) % 13).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.head.weight is model.embedding.weight
        assert [param.data_ptr() for param in model.parameters()] == addresses
        elements = sum(part.num_elements for part in diloco.parts)
        return diloco.outer_hash(), elements, parameters_of(model)


def test_tied_and_zero_sized_parameters_are_written_in_place(workers) -> None:
    first, second = workers(2).run(train_tied)
    assert first[:2] == second[:2] and equal(first[2], second[2])
    assert first[1] == 13 * 8 + 8 * 8 + 8


def train_lora(rank: int, world: int) -> tuple[list[Tensor], int]:
    """Low-rank adapters train; the base is frozen, and replica 0 gives its base to all."""
    model = Regression(seed=rank)
    model.requires_grad_(False)
    torch.manual_seed(5)
    for layer in model.layers:
        layer.register_parameter("a", nn.Parameter(torch.randn(2, 24) / 5))
        layer.register_parameter("b", nn.Parameter(torch.zeros(24, 2)))
        layer.register_forward_hook(lambda m, args, out: out + args[0] @ m.a.T @ m.b.T)
    base = list(Regression(seed=0).parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, sync_every=2, fragments="layers:2", offsets=[2, 2]) as diloco:
        for step in range(4):
            train_step(model, optimizer, rank, step)
        elements = sum(part.num_elements for part in diloco.parts)
    after = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    assert equal(base, after)
    return [p.detach().clone() for p in model.parameters() if p.requires_grad], elements


def attach_with_empty_stride(rank: int, world: int) -> tuple[str, list[float]]:
    """numpy gives an empty array a stride of 0; torch keeps the stride."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, float(rank))
    model.empty = nn.Parameter(torch.as_strided(torch.zeros(1), (0,), (0,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=1, wire="fp32", average_buffers=True) as diloco:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        diloco.flush()
        diloco.load_state_dict(diloco.state_dict())
        return diloco.outer_hash(), model.weight.flatten().tolist()


def test_an_empty_parameter_may_have_any_stride(workers) -> None:
    first, second = workers(2).run(attach_with_empty_stride)
    assert first == second


def test_frozen_parameters_stay_and_adapters_travel(workers) -> None:
    first, second = workers(2).run(train_lora)
    assert equal(first[0], second[0]) and first[1] == second[1] == 4 * 2 * 2 * 24
    assert any(tensor.abs().max() > 0 for tensor in first[0][1::2])


def train_low_precision(rank: int, world: int, dtype: torch.dtype) -> tuple[str, float]:
    """Updates below half a unit of the parameter vanish locally, not in the outer parameters."""
    model = Regression(seed=rank).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with DiLoCo(model, optimizer, sync_every=1, outer=SGD(0.05), wire="fp32") as diloco:
        start = diloco.parts[0].outer.clone()
        for step in range(8):
            train_step(model, optimizer, rank, step)
        outer = diloco.state_dict()["outer"]
        for name, param in model.named_parameters():
            assert outer[name].dtype == torch.float32
            assert torch.equal(param.detach(), outer[name].to(dtype))
        moved = (diloco.parts[0].outer != start).float().mean().item()
        between = (diloco.parts[0].outer != diloco.parts[0].outer.to(dtype).float()).any().item()
        assert between
        return diloco.outer_hash(), moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_fp32_outer_ones(dtype: torch.dtype, workers) -> None:
    first, second = workers(2).run(train_low_precision, dtype)
    assert first == second and first[1] > 0.1


def train_mixed(rank: int, world: int) -> str:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(3, 8, 3).bfloat16(), nn.Conv2d(8, 4, 3).half())
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=1) as diloco:
        for step in range(3):
            torch.manual_seed(10 * rank + step)
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            optimizer.step()
            outer = diloco.state_dict()["outer"]
            for name, param in model.named_parameters():
                assert torch.equal(param.detach(), outer[name].to(param.dtype))
        return diloco.outer_hash()


def test_mixed_dtypes_and_memory_formats_in_one_fragment(workers) -> None:
    first, second = workers(2).run(train_mixed)
    assert first == second


# ------------------------------------------------------------------------------------ buffers


def train_batch_norm(rank: int, world: int, average: bool) -> tuple[Tensor, Tensor, int]:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weight = 1.0 + 2.0 * rank
    seen = []
    arguments = {"average_buffers": average, "weight": weight, "wire": "int4", "attach": False}
    with DiLoCo(model, optimizer, sync_every=2, **grouped(arguments)) as diloco:
        for step in range(4):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(10 * rank + step))
            model(x + 3 * rank).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(model[1].running_mean.clone())
            diloco.step()
        assert all(math.isfinite(m.exposed_s) for m in diloco.metrics())
    return seen[-1], model[1].running_mean.clone(), int(model[1].num_batches_tracked)


def test_buffers_are_averaged_by_weight_and_exactly(workers) -> None:
    (before_0, after_0, count_0), (before_1, after_1, count_1) = workers(2).run(
        train_batch_norm, True
    )
    assert torch.equal(after_0, after_1) and count_0 == count_1 == 4
    assert torch.equal(after_0, before_0 * 0.25 + before_1 * 0.75)


def test_buffers_stay_local_by_default(workers) -> None:
    (before, after, _), (_, other, _) = workers(2).run(train_batch_norm, False)
    assert torch.equal(before, after) and not torch.equal(after, other)


# ------------------------------------------------------------------ parameters that are changed


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 4, 2)
        self.register_buffer("mean", torch.zeros(2, 3, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x)


def convolve(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    like = next(model.parameters())
    model(torch.ones(1, 3, 2, 2, dtype=like.dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def transpose(model: Convolution) -> None:
    weight = model.convolution.weight
    weight.data = weight.data.transpose(2, 3)


def reshape(model: Convolution) -> None:
    model.convolution.bias.data = torch.ones(2, 2)


def spread_buffer(model: Convolution) -> None:
    model.mean = model.mean.to(memory_format=torch.channels_last)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "channels_last": (
        lambda model: model.to(memory_format=torch.channels_last),
        r"parameter 'convolution.weight' was \[4, 3, 2, 2\] \[12, 4, 2, 1\] float32 on cpu .* when "
        r"the model was attached and is \[4, 3, 2, 2\] \[12, 1, 6, 3\] float32 on cpu now",
    ),
    "dtype": (lambda model: model.bfloat16(), "'convolution.weight' was .* float32 .* bfloat16 on"),
    "transposed": (transpose, r"'convolution.weight' was .* \[12, 4, 2, 1\] .* \[12, 4, 1, 2\]"),
    "shape": (reshape, r"'convolution.bias' was \[4\] \[1\] float32 .* is \[2, 2\] \[2, 1\]"),
    "buffer": (
        spread_buffer,
        r"buffer 'mean' was .* \[12, 4, 2, 1\] .* \[12, 1, 6, 3\]",
    ),
}
USES: dict[str, Callable[[DiLoCo], Any]] = {
    "step": lambda diloco: diloco.step(),
    "flush": lambda diloco: diloco.flush(),
    "outer_parameters": lambda diloco: diloco.outer_parameters().__enter__(),
    "consensus": lambda diloco: diloco.consensus(),
    "state_dict": lambda diloco: diloco.state_dict(),
    "load_state_dict": lambda diloco: diloco.load_state_dict({}),
    "change_group": lambda diloco: diloco.change_group([0]),
}


@pytest.mark.parametrize(
    ("change", "use"),
    [*((name, "step") for name in CHANGES), *(("channels_last", name) for name in USES)],
)
def test_memory_that_was_laid_out_anew_is_refused(change: str, use: str) -> None:
    model = Convolution()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make, sentence = CHANGES[change]
    made = DiLoCo(model, optimizer, sync_every=1, average_buffers=True, attach=False)
    with closing(made) as diloco:
        convolve(model, optimizer)
        diloco.step()
        make(model)
        before = parameters_of(model)
        with pytest.raises(ValueError, match=sentence):
            USES[use](diloco)
        assert equal(before, parameters_of(model))


def test_memory_is_looked_at_when_a_result_is_applied() -> None:
    model = Convolution()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=3, overlap=Streaming(1, 0.5)) as diloco:
        for _ in range(3):
            convolve(model, optimizer)
        weight = model.convolution.weight
        weight.data = weight.data.to(memory_format=torch.channels_last)
        with pytest.raises(ValueError, match=r"'convolution\.weight' was .* when the model was"):
            convolve(model, optimizer)
        weight.data, weight.grad = weight.data.contiguous(), None
        convolve(model, optimizer)
        assert diloco.totals().num_syncs == 1


def test_memory_before_the_start_is_free() -> None:
    model = Convolution().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = parameters_of(model)
    with DiLoCo(model, optimizer, sync_every=1) as diloco:
        model.convolution.weight.data = model.convolution.weight.data.clone()
        convolve(model, optimizer)
        assert equal(before, parameters_of(model)) and diloco.totals().num_syncs == 1


# ------------------------------------------------------------------------- kinds of optimizers


def train_with(rank: int, world: int, kind: str) -> tuple[int, list[Tensor]]:
    model = Regression()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:4], "lr": 0.02}, {"params": parameters[4:]}]
    optimizers = {
        "plain": lambda: torch.optim.AdamW(parameters, lr=0.01, foreach=False, fused=False),
        "foreach": lambda: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        "fused": lambda: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        "groups": lambda: torch.optim.AdamW(groups, lr=0.01),
        "sgd_momentum": lambda: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    }
    optimizer = optimizers[kind]()
    with DiLoCo(model, optimizer, sync_every=3, fragments=2) as diloco:
        for step in range(9):
            train_step(model, optimizer, rank, step)
        assert diloco.inner_step == 9
        return len(diloco.metrics()), parameters_of(model)[2:]


@pytest.mark.parametrize("kind", ["plain", "foreach", "fused", "groups", "sgd_momentum"])
def test_kinds_of_inner_optimizers(kind: str, workers) -> None:
    (num_syncs, first), (_, second) = workers(2).run(train_with, kind)
    assert num_syncs == 6
    # The last fragment was sent at step 9, with H=3 and offsets (1, 3).
    assert equal(first[-4:], second[-4:])


def train_several_optimizers(rank: int, world: int) -> tuple[int, int, str]:
    model = Regression()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizers = [
        torch.optim.SGD(matrices, lr=0.01, momentum=0.9),
        torch.optim.AdamW(vectors, lr=0.01),
    ]
    with DiLoCo(model, optimizers, sync_every=2) as diloco:
        for step in range(6):
            x, y = batch(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            # The order of the calls does not matter.
            for optimizer in optimizers[:: 1 if step % 2 else -1]:
                optimizer.step()
                optimizer.zero_grad()
        assert equal(parameters_of(model), [p.detach() for p in model.parameters()])
        return diloco.inner_step, len(diloco.metrics()), diloco.outer_hash()


def test_several_optimizers_are_one_logical_step(workers) -> None:
    first, second = workers(2).run(train_several_optimizers)
    assert first == second and first[:2] == (6, 3)


def train_accumulating(rank: int, world: int) -> tuple[int, str]:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, sync_every=2) as diloco:
        for micro_step in range(12):
            x, y = batch(rank, micro_step)
            nn.functional.mse_loss(model(x), y).backward()
            if micro_step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        assert diloco.inner_step == 4
        return len(diloco.metrics()), diloco.outer_hash()


def test_gradient_accumulation_counts_optimizer_steps(workers) -> None:
    first, second = workers(2).run(train_accumulating)
    assert first == second and first[0] == 2


def train_compiled(rank: int, world: int, backend: str) -> tuple[int, list[Tensor]]:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    compiled = torch.compile(model, backend=backend)
    step_compiled = torch.compile(optimizer.step, backend=backend)
    with DiLoCo(compiled, optimizer, sync_every=2, wire="fp32", outer=SGD(1.0)) as diloco:
        for step in range(4):
            x, y = batch(rank, step)
            nn.functional.mse_loss(compiled(x), y).backward()
            step_compiled()
            optimizer.zero_grad()
        assert "norm.weight" in diloco.state_dict()["outer"]
        return diloco.inner_step, parameters_of(model)


def save_beside(diloco: DiLoCo) -> None:
    torch.save({"model": {}, "diloco": diloco}, io.BytesIO())


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy, save_beside])
def test_a_diloco_that_is_copied_names_its_state(copied: Callable[[Any], Any]) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        DiLoCo(model, optimizer, sync_every=2, peers="alone") as diloco,
        pytest.raises(TypeError, match=r"a DiLoCo holds connections.*save diloco.state_dict\(\)"),
    ):
        copied(diloco)


def train_eagerly(rank: int, world: int) -> tuple[int, list[Tensor]]:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, sync_every=2, wire="fp32", outer=SGD(1.0)) as diloco:
        for step in range(4):
            train_step(model, optimizer, rank, step)
        return diloco.inner_step, parameters_of(model)


@pytest.mark.nightly("20 s; eager leaves out the graph of the backward alone", but=["eager"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_and_compiled_step(workers, backend: str) -> None:
    """The compiled forward must see what the outer step wrote."""
    steps, expected = workers(2).run(train_eagerly)[0]
    for compiled_steps, values in workers(2).run(train_compiled, backend, timeout=110):
        assert compiled_steps == steps == 4
        for value, other in zip(values, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly("a minute; test_compiled_model_and_compiled_step has other backends")
@pytest.mark.slow
def test_inductor(workers) -> None:
    _, expected = workers(1).run(train_eagerly)[0]
    ((steps, values),) = workers(1).run(train_compiled, "inductor", timeout=110)
    assert steps == 4
    for value, other in zip(values, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)
