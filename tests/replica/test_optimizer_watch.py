"""Optimizers that undo what is exchanged, or whose steps nobody counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from async_helpers import serving as serving_async
from choice_groups import grouped
from decoupled_processes import make_server
from problems import Regression, train_step
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks

from diloco_comm import DiLoCo, Link, Streaming
from diloco_comm.asynchronous import AsyncDiLoCo, DecoupledDiLoCo

WIDTH = 32


class WithCopies(Optimizer):
    """SGD that steps on copies of the weights and writes the copies over the parameters."""

    def __init__(self, params: Any, lr: float, *, in_state: bool) -> None:
        super().__init__(params, {"lr": lr})
        self._in_state = in_state
        self._outside: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                kept = self.state[param] if self._in_state else self._outside
                key = "master" if self._in_state else param
                if key not in kept:
                    kept[key] = param.detach().float().clone()
                kept[key].add_(param.grad.float(), alpha=-group["lr"])
                param.copy_(kept[key])


class Lookahead:
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


class SGDScheduleFree(torch.optim.SGD):
    def train(self) -> None: ...

    def eval(self) -> None: ...


class WithModes(torch.optim.SGD):
    """An optimizer that may average its iterates, and does not."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Slow(torch.optim.SGD):
    """The common form of a Lookahead that is part of an optimizer."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)  # type: ignore[arg-type]
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("slow_buffer", param.detach().clone())


def train(model: nn.Module, optimizer: Any, rank: int, steps: int) -> None:
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        features = torch.randn(8, WIDTH, generator=generator).to(dtype)
        optimizer.zero_grad()
        (model(features) - (2 * rank - 1)).square().mean().backward()
        optimizer.step()


# ------------------------------------------------------------------------- copies of the weights


def train_with_copies(
    rank: int, world: int, in_state: bool, sync_every: int, options: dict[str, Any]
) -> str:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16 if in_state else torch.float32)
    optimizer = WithCopies(model.parameters(), 0.05, in_state=in_state)
    diloco = DiLoCo(model, optimizer, sync_every=sync_every, **grouped({"wire": "fp32", **options}))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "one inner step after")
            train(model, optimizer, rank, 10 * sync_every)
    except (RuntimeError, RuntimeWarning) as error:
        return f"{error} after {diloco.inner_step}"
    finally:
        diloco.close()
    return ""


@pytest.mark.parametrize("sync_every", [2, 6])
def test_a_copy_in_the_state_is_found_at_the_first_send(sync_every: int, workers) -> None:
    for text in workers(2).run(train_with_copies, True, sync_every, {}):
        assert "WithCopies keeps an fp32 copy of parameter 'weight' in its state 'master'" in text
        assert text.endswith(f"after {sync_every}")


@pytest.mark.parametrize(
    ("options", "last"),
    [({}, 16), ({"overlap": Streaming(1), "fragments": 2}, 14)],
    ids=["blocking", "streaming"],
)
def test_a_copy_elsewhere_is_found_by_writes_that_did_not_last(
    options: dict[str, Any], last: int, workers
) -> None:
    for text in workers(2).run(train_with_copies, False, 4, options):
        assert "of the outer step was undone" in text
        assert int(text.split()[-1]) == last


def train_as_usual(rank: int, world: int, name: str, sync_every: int) -> float:
    """Return the largest undone share of ten exchanges."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    if name == "adamw":
        optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with DiLoCo(model, optimizer, sync_every=sync_every, wire="fp32") as diloco:
        assert diloco._watch is not None and diloco._watch._copies is not None
        copies, shares = diloco._watch._copies, []
        for _ in range(10 * sync_every):
            train(model, optimizer, rank, 1)
            if copies._is_measured:
                shares.append(copies.shares()[0])
        diloco.flush()
    assert len(set(shares)) >= 9
    return max(shares)


@pytest.mark.parametrize("sync_every", [4, 10])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_an_ordinary_optimizer_undoes_little(name: str, sync_every: int, workers) -> None:
    for share in workers(2).run(train_as_usual, name, sync_every):
        assert share < 0.5


def test_a_constant_in_the_state_is_no_copy() -> None:
    model = nn.LayerNorm(WIDTH).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with DiLoCo(model, optimizer, sync_every=2, peers="alone"):
        for param in model.parameters():
            optimizer.state[param]["largest"] = param.detach().float()
        train(model, optimizer, 0, 4)


# ------------------------------------------------------------------------------ two sets of weights


@pytest.mark.parametrize("kind", ["wrapper", "modes"])
def test_an_optimizer_with_two_sets_of_weights_is_refused(kind: str) -> None:
    model = Regression(WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    given = Lookahead(inner) if kind == "wrapper" else SGDScheduleFree(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="keeps a second set of weights"):
        DiLoCo(model, given, sync_every=2, peers="alone")  # type: ignore[arg-type]


def test_modes_alone_are_no_second_set() -> None:
    model = Regression(WIDTH)
    DiLoCo(model, WithModes(model.parameters(), lr=0.1), sync_every=2, peers="alone").close()


def test_slow_weights_in_the_state_are_found() -> None:
    model = Regression(WIDTH)
    optimizer = Slow(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=2, peers="alone"):
        train_step(model, optimizer, 0, 0, WIDTH)
        with pytest.raises(RuntimeError, match="its state 'slow_buffer'"):
            train_step(model, optimizer, 0, 1, WIDTH)


def test_parameters_in_no_optimizer_are_named() -> None:
    model = Regression(WIDTH)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=2, peers="alone"):
        train_step(model, optimizer, 0, 0, WIDTH)
        with pytest.warns(RuntimeWarning, match="gradients but .* given: 'layers"):
            train_step(model, optimizer, 0, 1, WIDTH)


@pytest.mark.filterwarnings("error")
def test_a_teacher_in_the_model_is_in_no_optimizer() -> None:
    model = Regression(WIDTH)
    model.teacher = nn.Linear(WIDTH, 1)
    head = [param for name, param in model.named_parameters() if "teacher" not in name]
    optimizer = torch.optim.SGD(head, lr=0.1)
    with DiLoCo(model, optimizer, sync_every=2, peers="alone"):
        for step in range(4):
            train_step(model, optimizer, 0, step, WIDTH)


# --------------------------------------------------------------------------- steps without a count


@contextmanager
def attached(door: str, model: nn.Module, optimizer: Optimizer, checks: str) -> Iterator[Any]:
    if door == "diloco":
        with DiLoCo(model, optimizer, sync_every=2, peers="alone", checks=checks) as diloco:
            yield diloco
        return
    server = serving_async() if door == "async" else make_server({"fragments": ["*"]})
    make: Callable[..., Any] = AsyncDiLoCo if door == "async" else DecoupledDiLoCo
    with server as served:
        place = {"server": served.address, "name": "a", "link": Link(timeout=20.0)}
        worker = make(model, optimizer, checks=checks, **place)
        try:
            yield worker
        finally:
            worker.close()


@pytest.mark.parametrize("door", ["diloco", "async", "decoupled"])
def test_an_optimizer_made_anew_is_told(door: str) -> None:
    model = Regression(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(door, model, optimizer, "raise"):
        train_step(model, optimizer, 0, 0, WIDTH)
        other = torch.optim.Adam(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="an Adam that was not given has stepped parameters"):
            train_step(model, other, 0, 1, WIDTH)


def test_a_step_in_backward_is_told() -> None:
    model = Regression(WIDTH)
    own = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    whole = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: own[param].step())
    with DiLoCo(model, whole, sync_every=2, peers="alone"):
        with pytest.raises(RuntimeError, match="its steps are not counted"):
            model(torch.randn(4, WIDTH)).sum().backward()


def test_a_warning_comes_once(recwarn: pytest.WarningsRecorder) -> None:
    model = Regression(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=2, peers="alone", checks="warn"):
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            train_step(model, other, 0, step, WIDTH)
    assert sum("not counted" in str(one.message) for one in recwarn) == 1


class Nested(Optimizer):
    """An optimizer that leaves its step to another one."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("given", ["inner", "outer"])
def test_nested_optimizers_make_one_step(given: str) -> None:
    model = Regression(WIDTH)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    nested = Nested(base)
    with DiLoCo(model, base if given == "inner" else nested, sync_every=2, peers="alone") as diloco:
        for step in range(4):
            train_step(model, nested, 0, step, WIDTH)
        assert diloco.inner_step == 4


class Collecting(Nested):
    """A wrapper that takes a step of the inner optimizer every second time."""

    num_calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_calls += 1
        if self.num_calls % 2 == 0:
            self.base.step()


@pytest.mark.filterwarnings("error")
def test_a_wrapper_that_moves_nothing_has_not_stepped() -> None:
    model = Regression(WIDTH)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = Collecting(base)
    with DiLoCo(model, base, sync_every=2, peers="alone") as diloco:
        for step in range(4):
            train_step(model, wrapper, 0, step, WIDTH)
        assert diloco.inner_step == 2


def test_a_hook_of_all_optimizers_breaks_no_graph() -> None:
    model = Regression(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=2, peers="alone"):
        hooks = optimizer_hooks._global_optimizer_pre_hooks.values()
        ours = [hook for hook in hooks if hook.__name__ == "diloco_look_at_step"]

        @torch.compile(fullgraph=True, backend="eager")
        def call(x: Tensor) -> Tensor:
            for hook in ours:
                hook(optimizer, (), {})
            return x + 1

        assert ours and call(torch.ones(1)).item() == 2.0


class Override(torch.optim.SGD):
    """An optimizer that adds to the step of its parent."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


def test_a_step_that_calls_its_parents_step_counts_once() -> None:
    model = Regression(WIDTH)
    # torch runs the hooks in the parent's step too, once the parent class had an instance.
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Override(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=2, peers="alone") as diloco:
        train_step(model, optimizer, 0, 0, WIDTH)
        assert diloco.inner_step == 1


@pytest.mark.filterwarnings("error")
def test_an_optimizer_of_other_parameters_is_nobodys_concern() -> None:
    model, other = Regression(WIDTH), Regression(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=2, peers="alone"):
        train_step(other, torch.optim.SGD(other.parameters(), lr=0.1), 0, 0, WIDTH)
    # The hooks see all optimizers: after close() they are gone.
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, 0, WIDTH)


@pytest.mark.parametrize("door", ["diloco", "async", "decoupled"])
def test_a_parameter_that_left_the_optimizer_is_named(door: str) -> None:
    model = Regression(WIDTH)
    optimizer = torch.optim.SGD(
        [{"params": model.layers.parameters()}, {"params": [*model.head.parameters()]}], lr=0.1
    )
    if door != "diloco":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer.add_param_group({"params": model.norm.parameters()})
    with attached(door, model, optimizer, "raise") as diloco:
        train_step(model, optimizer, 0, 0, WIDTH)
        del optimizer.param_groups[0]["params"][0]
        with pytest.raises(RuntimeError, match="is in no group of the optimizer any more"):
            for step in range(4):
                train_step(model, optimizer, 0, step, WIDTH)
            diloco.flush()


# ---------------------------------------------------------------------------- an end without flush


def end(rank: int, world: int, way: str) -> list[str]:
    model = Regression(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with DiLoCo(model, optimizer, sync_every=4, wire="fp32") as diloco:
                for step in range(6):
                    train_step(model, optimizer, rank, step, WIDTH)
                if way == "flush":
                    diloco.flush()
                if way == "saved":
                    diloco.state_dict()
                if way in ("close", "saved"):
                    diloco.close()
                if way == "error":
                    raise KeyError(way)
        except KeyError:
            pass
    return [str(one.message) for one in told]


def close_strictly(rank: int, world: int) -> bool:
    model = Regression(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = DiLoCo(model, optimizer, sync_every=4, wire="fp32")
    train_step(model, optimizer, rank, 0, WIDTH)
    with warnings.catch_warnings(), pytest.raises(RuntimeWarning, match="is lost"):
        warnings.simplefilter("error")
        diloco.close()
    return diloco._is_closed


def test_a_warning_that_is_an_error_closes_all_the_same(workers) -> None:
    assert workers(2).run(close_strictly) == [True, True]


@pytest.mark.parametrize(
    ("way", "is_told"),
    [("flush", False), ("", False), ("close", True), ("saved", False), ("error", False)],
)
def test_an_end_without_flush_is_told(way: str, is_told: bool, workers) -> None:
    for rank, told in enumerate(workers(2).run(end, way)):
        lost = f"what replica {rank} learned since its last exchange is lost, up to inner step 6"
        assert [lost in text for text in told] == [True] * is_told, told


@pytest.mark.parametrize("attach", [True, False])
@pytest.mark.parametrize(
    ("module", "trainer"),
    [("deepspeed.runtime.zero.stage3", "DeepSpeed"), ("megatron.core.optimizer", "Megatron")],
)
def test_an_optimizer_that_steps_copies_is_refused(module: str, trainer: str, attach: bool) -> None:
    """Both wrap an optimizer of flat copies, and are none of torch themselves."""
    model = Regression()
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(162))], lr=0.1)
    kind = type("ZeroOptimizer", (), {"__module__": module, "optimizer": inner})
    with pytest.raises(TypeError, match=f"^ZeroOptimizer of {trainer} steps copies of the model"):
        DiLoCo(model, kind(), sync_every=2, peers="alone", attach=attach)
