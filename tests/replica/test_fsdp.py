"""FSDP2 inside the replicas: the shards are exchanged, and the run is that of whole parameters."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from choice_groups import grouped
from problems import Regression, batch, equal
from sharded_runs import POLICIES, norms_of, resolved
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from diloco_comm import CO2, SGD, DiLoCo, HeavyBall, Nesterov, ReplicaMismatch, Streaming, SyncError

# It divides by neither number of shards; the head has one row, so all but one shard lack it.
WIDTH = 25
FRAGMENTS = ["layers.*", "norm.*", "head.*"]


def make_mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))


def make_hybrid_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replica", "copy", "shard"))


def inside(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the workers of a replica."""
    return mesh["shard"] if mesh.ndim == 2 else mesh["copy", "shard"]


def make_model(mesh: DeviceMesh | None, **policy: Any) -> nn.Module:
    model = Regression(width=WIDTH)
    if mesh is None:
        return model
    shard([*model.layers, model], mesh, **policy)
    return model


def shard(modules: Iterable[Any], mesh: DeviceMesh, **policy: Any) -> None:
    for module in modules:
        fully_shard(module, mesh=inside(mesh), **policy)
        # One worker has the replica's batch, so that the sum over workers is exact.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def attach(
    model: nn.Module, mesh: DeviceMesh, **arguments: Any
) -> tuple[torch.optim.Optimizer, DiLoCo]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"sync_every": 2, "fragments": FRAGMENTS, "wire": "fp32"}
    settings |= resolved(arguments, optimizer)
    return optimizer, DiLoCo(model, optimizer, **grouped({"mesh": mesh["replica"], **settings}))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, steps: range
) -> None:
    """Train on the replica's batches, which are the first worker's where parameters are sharded."""
    is_mine = not has_shards(model) or not any(inside(mesh).get_coordinate())
    for step in steps:
        x, y = batch(mesh["replica"].get_local_rank(), step, WIDTH)
        (nn.functional.mse_loss(model(x).float(), y) * float(is_mine)).backward()
        optimizer.step()
        optimizer.zero_grad()


def has_shards(model: nn.Module) -> bool:
    return any(isinstance(param, DTensor) for param in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def everything(model: nn.Module, diloco: DiLoCo) -> list[Tensor]:
    """Return local parameters, outer parameters and momentum, whole."""
    state = diloco.state_dict()
    home = state if "outer" in state else state[f"replica_{diloco.exchange.replica}"]
    kept = [home["outer"], *home["buffers"].values()]
    tensors = [*model.parameters(), *(t for group in kept for t in group.values())]
    return [whole(tensor.detach()) for tensor in tensors]


# ---------------------------------------------------------------------------- the unsharded run


def run_both(mesh: DeviceMesh, **arguments: Any) -> list[list[Tensor]]:
    results = []
    for shard_mesh in (None, mesh):
        model = make_model(shard_mesh)
        optimizer, diloco = attach(model, mesh, **copy.deepcopy(arguments))
        with diloco:
            train(model, optimizer, mesh, range(7))
            results.append(everything(model, diloco))
            diloco.flush()
            results.append([*everything(model, diloco), norms_of(diloco)])
    return results


def equals_unsharded(rank: int, world: int, chosen: list[int]) -> list[bool]:
    mesh = make_mesh(world) if world < 8 else make_hybrid_mesh()
    matches = []
    for policy in [POLICIES[index] for index in chosen]:
        arguments = {"outer": Nesterov(0.5), **policy}
        before, flushed, sharded, sharded_flushed = run_both(mesh, **arguments)
        matches += [equal(before, sharded), equal(flushed, sharded_flushed)]
        matches.append(not equal(before, flushed))
    return matches


@pytest.mark.nightly("8 s each; shards of the smallest group stand for all", but=["4-chosen0"])
@pytest.mark.parametrize(("world", "chosen"), [(4, [1, 3, 5]), (6, [0, 2, 4, 6]), (8, [5])])
def test_the_run_is_that_of_whole_parameters(world: int, chosen: list[int], workers) -> None:
    """With 8 workers each replica has two copies of its shards (HSDP)."""
    expected = [True] * 3 * len(chosen)
    assert workers(world).run(equals_unsharded, chosen) == [expected] * world


def shapes_of_shards(rank: int, world: int) -> tuple[list[bool], list[set[int]]]:
    """Return the numbers of dimensions that an optimizer of torch gets, without and with shards."""
    dimensions: list[set[int]] = []

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        dimensions.append({param.ndim for param in params})
        return torch.optim.Adam(params, lr=0.1)

    before, flushed, sharded, sharded_flushed = run_both(make_mesh(world), outer=make)
    return [equal(before, sharded), equal(flushed, sharded_flushed)], dimensions


def test_an_optimizer_of_torch_gets_shards_as_vectors(workers) -> None:
    expected = [{1, 2}, {1}, {1, 2}, {1}, {1}, {1}]
    assert workers(4).run(shapes_of_shards) == [([True, True], expected)] * 4


def one_round_apart(rank: int, world: int) -> tuple[float, float, float]:
    """Return the largest difference after one round, the largest pseudo-gradient, and 1/S."""
    mesh = make_mesh(world)
    outers, largests, elements = [], [], []
    for shard_mesh in (None, mesh):
        model = make_model(shard_mesh)
        arguments = {"outer": SGD(1.0), "wire": "int8", "offsets": [3] * 3, "attach": False}
        optimizer, diloco = attach(model, mesh, sync_every=3, **arguments)
        with diloco:
            for step in range(3):
                train(model, optimizer, mesh, range(step, step + 1))
                largest = max(part.progress().abs().max().item() for part in diloco.parts)
                diloco.step()
            largests.append(largest)
            elements.append(sum(part.outer.numel() for part in diloco.parts))
            outers.append([whole(t) for t in diloco.state_dict()["outer"].values()])
    apart = max((a - b).abs().max().item() for a, b in zip(*outers, strict=True))
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, max(largests))
    return apart, max(everywhere), elements[1] / elements[0]


def test_int8_differs_by_one_rounding_at_most(workers) -> None:
    for apart, largest, fraction in workers(4).run(one_round_apart):
        # Blocks are cut within a shard, so scales differ; each side is off by half a code at most.
        assert 0 < apart <= 1.01 * largest / 127
        assert abs(fraction - 0.5) < 0.05


# ------------------------------------------------------------------------------ gathered copies


def evaluate_in_between(rank: int, world: int) -> list[bool]:
    """A forward without a backward leaves the root's parameters gathered."""
    mesh = make_mesh(world)
    x = batch(9, 9, WIDTH)[0]
    model, plain = make_model(mesh), make_model(None)

    def sees(tensors: list[Tensor]) -> bool:
        """Whether a forward of the sharded model sees these parameters."""
        with torch.no_grad():
            for param, tensor in zip(plain.parameters(), tensors, strict=True):
                param.copy_(tensor)
            return torch.equal(model(x), plain(x))

    def weights() -> list[Tensor]:
        return [whole(p.detach()) for p in held]

    checks = []
    with torch.no_grad():
        held = list(model.parameters())
        model(x)
        checks.append(not all(isinstance(p, DTensor) for p in model.parameters()))
    # The optimizer is made before the forward in real code; here it must not see gathered copies.
    optimizer = torch.optim.AdamW(held, lr=0.01)
    arguments = {"sync_every": 2, "fragments": FRAGMENTS, "wire": "fp32", "outer": Nesterov(0.5)}
    with DiLoCo(model, optimizer, **grouped({"mesh": mesh["replica"], **arguments})) as diloco:
        train(model, optimizer, mesh, range(3))
        local = weights()
        checks.append(sees(local))
        with diloco.outer_parameters():
            outer = [whole(t) for t in diloco.state_dict()["outer"].values()]
            checks.append(sees(outer) and not equal(outer, local))
        checks.append(sees(local))
        diloco.flush()
        flushed = weights()
        checks.append(sees(flushed) and not equal(flushed, local))
        train(model, optimizer, mesh, range(3, 6))
        checks.append(sees(weights()))
    return checks


def test_what_is_written_is_seen_after_an_evaluation(workers) -> None:
    assert workers(4).run(evaluate_in_between) == [[True] * 6] * 4


def train_in_bf16(rank: int, world: int) -> tuple[list[Tensor], set[torch.dtype], set[torch.dtype]]:
    mesh = make_mesh(world)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = make_model(mesh, mp_policy=policy)
    optimizer, diloco = attach(model, mesh, wire="int8", outer=Nesterov(0.5))
    with diloco:
        train(model, optimizer, mesh, range(4))
        diloco.flush()
        outer = diloco.state_dict()["outer"].values()
        seen = {model(batch(rank, 0, WIDTH)[0]).dtype}
        pairs = zip(outer, model.parameters(), strict=True)
        assert all(a.shape == b.shape for a, b in pairs)
        return [whole(t) for t in outer], {t.dtype for t in outer}, seen


def test_mixed_precision_keeps_fp32_shards(workers) -> None:
    results = workers(4).run(train_in_bf16)
    assert all(equal(tensors, results[0][0]) for tensors, _, _ in results)
    assert all(dtypes == {torch.float32} for _, dtypes, _ in results)
    assert all(seen == {torch.bfloat16} for _, _, seen in results)


# ---------------------------------------------------------------------------------- checkpoints


def prepare(world: int, **arguments: Any) -> tuple[DeviceMesh, nn.Module, Any, DiLoCo]:
    mesh = make_mesh(world)
    model = make_model(mesh)
    optimizer, diloco = attach(model, mesh, sync_every=3, outer=Nesterov(0.5), **arguments)
    return mesh, model, optimizer, diloco


def save(rank: int, world: int, folder: str, arguments: dict[str, Any]) -> list[Tensor]:
    """Train 4 steps, save, train 5 more."""
    mesh, model, optimizer, diloco = prepare(world, **arguments)
    with diloco:
        train(model, optimizer, mesh, range(4))
        own = f"replica_{diloco.exchange.replica}"
        dcp.save({"diloco": diloco, own: saved_by_the_user(model, optimizer)}, checkpoint_id=folder)
        train(model, optimizer, mesh, range(4, 9))
        return everything(model, diloco)


def resume(rank: int, world: int, folder: str, arguments: dict[str, Any]) -> list[Tensor]:
    mesh, model, optimizer, diloco = prepare(world, **arguments)
    with diloco:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        hooks, diloco._hooks = diloco._hooks, None
        hooks.remove()
        optimizer.step()
        optimizer.zero_grad()
        own = f"replica_{diloco.exchange.replica}"
        state = {"diloco": diloco, own: saved_by_the_user(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        assert diloco.inner_step == 4
        for step in range(4, 9):
            train(model, optimizer, mesh, range(step, step + 1))
            diloco.step()
        return everything(model, diloco)


def saved_by_the_user(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {id(param): name for name, param in model.named_parameters()}
    state = {names[id(param)]: dict(values) for param, values in optimizer.state.items()}
    return {"model": dict(model.named_parameters()), "optimizer": state}


@pytest.mark.nightly("8 s; test_shard_group has another number of workers")
def test_a_checkpoint_is_read_by_another_number_of_shards(workers, tmp_path: Path) -> None:
    arguments = {"error_feedback": True, "fragments": 2}
    expected = workers(4).run(save, str(tmp_path), arguments)
    again = workers(4).run(resume, str(tmp_path), arguments)
    assert all(equal(a, b) for a, b in zip(again, expected, strict=True))
    thirds = workers(6).run(resume, str(tmp_path), arguments)
    for rank, tensors in enumerate(thirds):
        assert equal(tensors, expected[rank // 3 * 2])


def test_a_checkpoint_with_rounds_under_way(workers, tmp_path: Path) -> None:
    arguments = {"overlap": Streaming(delay=2), "wire": "int8"}
    expected = workers(4).run(save, str(tmp_path), arguments)
    again = workers(4).run(resume, str(tmp_path), arguments)
    assert all(equal(a, b) for a, b in zip(again, expected, strict=True))


def norms_between_steps(rank: int, world: int) -> list[float]:
    """Nothing is sent in most steps; what is measured in the others is that of all shards."""
    mesh, norms = make_mesh(world), []
    for shard_mesh in (None, mesh):
        model = make_model(shard_mesh)
        settings = {"sync_every": 4, "fragments": 1, "norms": True}
        optimizer, diloco = attach(model, mesh, **settings)
        with diloco:
            train(model, optimizer, mesh, range(8))
            norms += [metrics.pseudo_gradient_norm for metrics in diloco.metrics()]
    return norms


def norms_of_partly_sharded(rank: int, world: int) -> list[list[float]]:
    """A fragment begins and ends with parameters that both workers hold whole."""
    mesh, norms = make_mesh(world), []
    for is_sharded in (False, True):
        model = Regression(width=WIDTH)
        if is_sharded:
            shard(model.layers[1:], mesh)
            for param in model.parameters():
                if not isinstance(param, DTensor):
                    add = partial(sum_gradient, mesh=inside(mesh))
                    param.register_post_accumulate_grad_hook(add)
        optimizer, diloco = attach(model, mesh, sync_every=4, fragments=1, norms=True)
        with diloco:
            train(model, optimizer, mesh, range(8))
            norms.append([metrics.pseudo_gradient_norm for metrics in diloco.metrics()])
    return norms


def sum_gradient(param: Tensor, mesh: DeviceMesh) -> None:
    assert param.grad is not None
    dist.all_reduce(param.grad, group=mesh.get_group())


def test_what_both_workers_hold_counts_once_in_the_norms(workers) -> None:
    for plain, sharded in workers(4).run(norms_of_partly_sharded):
        assert len(plain) == 2 and sharded == pytest.approx(plain, rel=1e-6)


def test_norms_with_steps_that_send_nothing(workers) -> None:
    for norms in workers(4).run(norms_between_steps):
        assert len(norms) == 4 and norms[:2] == norms[2:] and all(norm > 0 for norm in norms)


# --------------------------------------------------------------------------------------- errors


def spoil_one_shard(rank: int, world: int) -> tuple[list[str], list[int], list[Tensor], Tensor]:
    """Worker 1 of replica 0 sends a NaN in its first fragment, once; everybody goes on."""
    mesh = make_mesh(world)
    model = make_model(mesh)
    policy = {"overlap": CO2(0.5, "gap-aware"), "outer": HeavyBall(0.5, 0.5), "norms": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = next(model.parameters()).to_local()
    steps = itertools.count(1)

    def spoil(*_: Any) -> None:
        if next(steps) == 6 and rank == 1:
            first.data.view(-1)[0] = torch.nan

    optimizer.register_step_post_hook(spoil)
    settings = {"sync_every": 2, "offsets": [2] * 3, "fragments": FRAGMENTS, "wire": "int8"}
    with DiLoCo(
        model, optimizer, **grouped({"mesh": mesh["replica"], **settings, **policy})
    ) as diloco:
        errors = []
        for step in range(12):
            try:
                train(model, optimizer, mesh, range(step, step + 1))
            except SyncError as error:
                optimizer.zero_grad()
                errors.append(f"{type(error).__name__} {error.replicas} {error}")
        diloco.flush()
        rounds = [part.round for part in diloco.parts]
        return errors, rounds, everything(model, diloco), norms_of(diloco)[-6:]


def test_a_round_of_one_shard_that_is_voted_down(workers) -> None:
    results = workers(4).run(spoil_one_shard)
    for rank, (errors, _, tensors, norms) in enumerate(results):
        assert len(errors) == 1 and errors[0].startswith("NonFiniteError (0,)")
        assert ("worker 1 of this replica failed" in errors[0]) == (rank % 2 == 0)
        assert equal(tensors, results[0][2])
        assert equal([norms], [results[0][3]]) and norms.isfinite().all()
    # The other shard's round was applied; this one's is sent again a turn after the error.
    assert [rounds for _, rounds, _, _ in results] == [[6, 6, 6], [4, 6, 6]] * 2


def attach_wrongly(rank: int, world: int) -> tuple[str, str]:
    mesh = make_mesh(world)
    model = make_model(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = ""
    try:
        DiLoCo(model, optimizer, sync_every=2, peers=mesh["shard"])
    except ReplicaMismatch as error:
        message = str(error)
    model = fully_shard(Regression(width=WIDTH), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(UserWarning, match="different replicas") as record,
        pytest.raises(ReplicaMismatch, match=r"part \[0, .\] of \[2, 2\]"),
    ):
        DiLoCo(model, optimizer, sync_every=2, peers=mesh["replica"])
    dist.barrier()
    return message, str(record[0].message)


def test_shards_are_not_taken_for_replicas(workers) -> None:
    for mismatch, warning in workers(4).run(attach_wrongly):
        assert "part [0] of [2]" in mismatch and "part [1] of [2]" in mismatch
        assert "FullyShardedDataParallel" in warning and "mesh" in warning
