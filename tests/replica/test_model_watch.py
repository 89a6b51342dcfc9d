"""Weights that a program puts into a model which is attached already."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from async_helpers import serving as serving_async
from decoupled_processes import make_server
from problems import Regression, equal, parameters_of, train_step
from torch import nn

from diloco_comm import Delayed, DiLoCo, Eager, Link, Overlap, ReplicaMismatch, Streaming
from diloco_comm.asynchronous import AsyncDiLoCo, DecoupledDiLoCo

WIDTH = 8


def make(lr: float = 0.02) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Regression(WIDTH)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def other_weights(seed: int = 3) -> dict[str, torch.Tensor]:
    return Regression(WIDTH, seed=seed).state_dict()


def into_the_parts(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Load into each child of the model by itself."""
    for name, child in model.named_children():
        prefix = f"{name}."
        child.load_state_dict(
            {key.removeprefix(prefix): v for key, v in weights.items() if key.startswith(prefix)}
        )


LOADS: dict[str, Callable[[nn.Module, dict[str, torch.Tensor]], object]] = {
    "model": lambda model, weights: model.load_state_dict(weights),
    "parts": into_the_parts,
    "compiled": lambda model, weights: torch.compile(model).load_state_dict(
        {f"_orig_mod.{key}": value for key, value in weights.items()}
    ),
    "ddp": lambda model, weights: nn.Sequential(model).load_state_dict(
        {f"0.{key}": value for key, value in weights.items()}
    ),
}


# ------------------------------------------------------------------------- before the first step


def load_and_train(rank: int, world: int, load: str, overlap: Overlap | None) -> bool:
    """Load before or after the construction; the rest of the run must have the same bits."""
    ends = []
    for is_late in (False, True):
        model, optimizer = make()
        if not is_late:
            model.load_state_dict(other_weights())
        with DiLoCo(model, optimizer, sync_every=2, overlap=overlap, wire="fp32") as diloco:
            if is_late:
                LOADS[load](model, other_weights())
            for step in range(5):
                train_step(model, optimizer, rank, step, WIDTH)
            diloco.flush()
            ends.append(parameters_of(model))
    return equal(*ends)


@pytest.mark.parametrize(
    ("load", "overlap"),
    [("model", None), ("parts", Streaming(1)), ("compiled", Eager()), ("ddp", Delayed())],
)
def test_weights_loaded_before_the_first_step_are_taken_over(
    load: str, overlap: Overlap | None, workers
) -> None:
    assert workers(2).run(load_and_train, load, overlap) == [True, True]


def load_on_one(rank: int, world: int) -> str:
    model, optimizer = make()
    with DiLoCo(model, optimizer, sync_every=2, wire="fp32", link=Link(timeout=20)) as diloco:
        if rank == 1:
            model.load_state_dict(other_weights())
        try:
            for step in range(2):
                train_step(model, optimizer, rank, step, WIDTH)
        except ReplicaMismatch as error:
            return f"{error} after {diloco.inner_step}"
    return ""


def test_weights_loaded_on_one_replica_alone_are_a_mismatch(workers) -> None:
    for text in workers(2).run(load_on_one):
        assert "differ" in text and text.endswith("after 2"), text


# -------------------------------------------------------------------------- in the middle of a run


@pytest.mark.parametrize("checks", ["raise", "warn", "off"])
def test_weights_loaded_in_the_middle_are_told(
    checks: str, recwarn: pytest.WarningsRecorder
) -> None:
    model, optimizer = make()
    with DiLoCo(model, optimizer, sync_every=2, peers="alone", checks=checks):
        train_step(model, optimizer, 0, 0, WIDTH)
        model.load_state_dict(other_weights())
        if checks == "raise":
            with pytest.raises(RuntimeError, match="loaded into the model after 1 inner steps"):
                train_step(model, optimizer, 0, 1, WIDTH)
        train_step(model, optimizer, 0, 2, WIDTH)
    told = [str(one.message) for one in recwarn if "were loaded" in str(one.message)]
    assert len(told) == (checks == "warn")


@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize("change", ["load", "replace"])
def test_a_flush_looks_too(steps: int, change: str) -> None:
    model, optimizer = make()
    with DiLoCo(model, optimizer, sync_every=4, peers="alone") as diloco:
        for step in range(steps):
            train_step(model, optimizer, 0, step, WIDTH)
        if change == "load":
            model.load_state_dict(other_weights())
        else:
            new_head(model)
        sentence = "were loaded into the model" if change == "load" else "another parameter under"
        with pytest.raises(RuntimeError, match=sentence):
            diloco.flush()


def resume_with(rank: int, world: int, order: str) -> str:
    """Resume in the middle of a round; return what the first step says."""
    model, optimizer = make()
    with DiLoCo(model, optimizer, sync_every=4, wire="fp32") as diloco:
        for step in range(6):
            train_step(model, optimizer, rank, step, WIDTH)
        saved = copy.deepcopy([model.state_dict(), diloco.state_dict()])
        diloco.flush()
    model, optimizer = make()
    if order == "before":
        model.load_state_dict(saved[0])
    with DiLoCo(model, optimizer, sync_every=4, wire="fp32") as diloco:
        if order == "after":
            model.load_state_dict(saved[0])
        diloco.load_state_dict(saved[1])
        if order == "by hand":
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param.copy_(saved[0][name])
        try:
            train_step(model, optimizer, rank, 6, WIDTH)
        except RuntimeError as error:
            return str(error)
        finally:
            diloco.flush()
    return ""


@pytest.mark.parametrize("order", ["before", "after", "by hand"])
def test_a_resume_that_lost_the_local_weights_is_told(order: str, workers) -> None:
    first, second = workers(2).run(resume_with, order)
    assert first == "" and second.startswith("this replica goes on") == (order == "before"), second


@pytest.mark.parametrize("steps", [4, 6], ids=["after an exchange", "in the middle"])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_resume_without_the_models_weights(steps: int, is_loaded: bool) -> None:
    """After an exchange the state knows the weights; in the middle of a round nobody does."""
    model, optimizer = make()
    with DiLoCo(model, optimizer, sync_every=4, peers="alone", checks="off") as diloco:
        for step in range(steps):
            train_step(model, optimizer, 0, step, WIDTH)
        states = copy.deepcopy((model.state_dict(), diloco.state_dict()))
    torch.manual_seed(17)
    model, optimizer = make()
    for param in model.parameters():
        nn.init.normal_(param)
    diloco = DiLoCo(model, optimizer, sync_every=4, peers="alone")
    diloco.load_state_dict(states[1])
    if is_loaded:
        model.load_state_dict(states[0])
    if steps == 4 and not is_loaded:
        with pytest.warns(RuntimeWarning, match="load the model's state too"):
            train_step(model, optimizer, 0, steps, WIDTH)
    else:
        train_step(model, optimizer, 0, steps, WIDTH)
    diloco.flush()
    diloco.close()


def swap_average(model: nn.Module, diloco: DiLoCo) -> None:
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict(other_weights())
    model.load_state_dict(own)


def load_the_same(model: nn.Module, diloco: DiLoCo) -> None:
    model.load_state_dict(model.state_dict())


def load_into_a_copy(model: nn.Module, diloco: DiLoCo) -> None:
    copy.deepcopy(model).load_state_dict(other_weights())
    restored = pickle.loads(pickle.dumps(model))
    restored.load_state_dict(other_weights())


def resume(model: nn.Module, diloco: DiLoCo) -> None:
    saved = copy.deepcopy([model.state_dict(), diloco.state_dict()])
    model.load_state_dict(saved[0])
    diloco.load_state_dict(saved[1])


def resume_the_other_way_round(model: nn.Module, diloco: DiLoCo) -> None:
    saved = copy.deepcopy([model.state_dict(), diloco.state_dict()])
    into_the_parts(model, other_weights())
    diloco.load_state_dict(saved[1])
    model.load_state_dict(saved[0])


def load_within_outer_parameters(model: nn.Module, diloco: DiLoCo) -> None:
    with diloco.outer_parameters():
        model.load_state_dict(other_weights())


def look_at_outer_parameters(model: nn.Module, diloco: DiLoCo) -> None:
    with diloco.outer_parameters():
        torch.save(model.state_dict(), io.BytesIO())


@pytest.mark.parametrize(
    "between",
    [
        swap_average,
        load_the_same,
        load_into_a_copy,
        resume,
        resume_the_other_way_round,
        look_at_outer_parameters,
        load_within_outer_parameters,
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_a_program_may_do_between_two_steps(
    between: Callable[[nn.Module, DiLoCo], None],
) -> None:
    model, optimizer = make()
    with DiLoCo(model, optimizer, sync_every=2, peers="alone") as diloco:
        for step in range(6):
            train_step(model, optimizer, 0, step, WIDTH)
            between(model, diloco)


# ----------------------------------------------------------------------------- other parameters


def assign(model: nn.Module) -> None:
    model.load_state_dict(other_weights(), assign=True)


def new_head(model: nn.Module) -> None:
    model.head = nn.Linear(WIDTH, 1)


def parametrized(model: nn.Module) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.head)


@pytest.mark.parametrize("replace", [assign, new_head, parametrized])
def test_a_replaced_parameter_is_named(replace: Callable[[nn.Module], None]) -> None:
    model, optimizer = make()
    with DiLoCo(model, optimizer, sync_every=2, peers="alone"):
        train_step(model, optimizer, 0, 0, WIDTH)
        replace(model)
        with pytest.raises(RuntimeError, match=r"has another parameter under the name '[a-z]+.*'"):
            for step in range(2):
                train_step(model, optimizer, 0, step, WIDTH)


def test_a_parameter_that_was_frozen_is_named() -> None:
    model, optimizer = make()
    with DiLoCo(model, optimizer, sync_every=2, peers="alone"):
        for step in range(5):
            if step == 3:
                model.head.weight.requires_grad_(False)
            train_step(model, optimizer, 0, step, WIDTH)
        with pytest.raises(RuntimeError, match=r"'head.weight' had requires_grad=False for a who"):
            train_step(model, optimizer, 0, 5, WIDTH)


@pytest.mark.filterwarnings("error")
def test_a_part_that_never_moves_is_not_all_of_a_parameter() -> None:
    """The first row of an embedding, of the padding, gets no gradient."""
    model = nn.ModuleDict({"rows": nn.Embedding(4, 2048, padding_idx=0), "head": nn.Linear(1, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: model["rows"].requires_grad_(False) and None)
    with DiLoCo(model, optimizer, sync_every=2, peers="alone"):
        for _ in range(8):
            model.requires_grad_(True)
            optimizer.zero_grad()
            (model["rows"](torch.arange(4)).sum() + model["head"](torch.ones(1)).sum()).backward()
            optimizer.step()


@pytest.mark.filterwarnings("error")
def test_a_parameter_that_is_frozen_for_a_part_of_each_step_is_trained() -> None:
    model, optimizer = make()
    # Before the hook that sends.
    optimizer.register_step_post_hook(lambda *_: model.head.requires_grad_(False) and None)
    with DiLoCo(model, optimizer, sync_every=2, peers="alone"):
        for step in range(8):
            model.head.requires_grad_(True)
            train_step(model, optimizer, 0, step, WIDTH)


def test_a_parameter_that_moves_into_an_adapter_is_the_same() -> None:
    model, optimizer = make()
    with DiLoCo(model, optimizer, sync_every=2, peers="alone"):
        model.head = nn.Sequential(model.head)
        for step in range(4):
            train_step(model, optimizer, 0, step, WIDTH)


# ------------------------------------------------------------------------------- the other doors


def attach_async(model: nn.Module, optimizer: Any, checks: str) -> Any:
    server = serving_async()
    address = server.__enter__().address
    worker = AsyncDiLoCo(
        model, optimizer, server=address, name="a", link=Link(timeout=20.0), checks=checks
    )
    return server, worker


def attach_decoupled(model: nn.Module, optimizer: Any, checks: str) -> Any:
    server = make_server({"fragments": ["*"]})
    address = server.__enter__().address
    worker = DecoupledDiLoCo(
        model, optimizer, server=address, name="a", link=Link(timeout=20.0), checks=checks
    )
    return server, worker


@pytest.mark.parametrize("attach", [attach_async, attach_decoupled])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_server_has_the_weights_already(
    attach: Callable[[nn.Module, Any, str], Any], is_late: bool
) -> None:
    model, optimizer = make()
    server, worker = attach(model, optimizer, "raise")
    try:
        if is_late:
            train_step(model, optimizer, 0, 0, WIDTH)
        model.load_state_dict(other_weights())
        with pytest.raises(RuntimeError, match="the server's weights"):
            train_step(model, optimizer, 0, 1, WIDTH)
    finally:
        worker.close()
        server.__exit__(None, None, None)


# -------------------------------------------------------------------------------- shared memory


def make_shared(given: Any) -> nn.Module:
    """Return the given model, or a new one with the given tensor as a weight."""
    if isinstance(given, nn.Module):
        return given
    model = Regression(WIDTH)
    model.head.weight = nn.Parameter(given)
    return model


def attach_shared(rank: int, world: int, passed: bytes) -> list[str]:
    told = []
    given = pickle.loads(passed)
    for is_copied in (False, True):
        model = make_shared(copy.deepcopy(given) if is_copied else given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            DiLoCo(model, optimizer, sync_every=2, link=Link(timeout=30)).close()
            told.append("")
        except ReplicaMismatch as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("given", ["model", "tensor"])
def test_one_model_in_shared_memory_is_refused(given: str, workers) -> None:
    """The tensors are passed as ``torch.multiprocessing`` passes the arguments of a process."""
    model = Regression(WIDTH).share_memory()
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        passed = ForkingPickler.dumps(model if given == "model" else model.head.weight.detach())
        results = workers(2).run(attach_shared, bytes(passed))
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    for shared, copied in results:
        assert "replicas 0 and 1 train the same tensors in shared memory" in shared
        assert copied == ""
