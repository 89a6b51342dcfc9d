"""A state that a signal handler asks for: it is whole, or one sentence names ``after_step``."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.optim.optimizer
from problems import Regression, equal, train_step
from torch import Tensor, nn

import diloco_comm
from diloco_comm import CO2, Blocking, Delayed, DiLoCo, Eager, Streaming, Wire

# The package, the optimizers of torch, and the loop of these tests.
FILES = (*(str(Path(m.__file__).parent) for m in (diloco_comm, torch.optim)), __file__)
STRIDE, LAST, AFTER = 97, 6, 4
POLICIES: dict[str, dict[str, Any]] = {
    "blocking": {"overlap": Blocking()},
    "streaming": {"overlap": Streaming(1, 0.5)},
    "delayed": {"overlap": Delayed()},
    "eager": {"overlap": Eager(2), "wire": Wire("int4", block_size=32, error_feedback=True)},
    "co2": {"overlap": CO2(0.5, "gap-aware")},
}


class AtOpcode:
    """Sends SIGUSR1 before the ``number``-th bytecode of ``FILES``."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self.number:
                os.kill(os.getpid(), signal.SIGUSR1)
        return self

    def run(self, function: Callable[[], object]) -> None:
        sys.settrace(self)
        try:
            function()
        finally:
            sys.settrace(None)


@contextmanager
def handled(handler: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def attach(**arguments: Any) -> tuple[Regression, torch.optim.Optimizer, DiLoCo]:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"sync_every": 2, "fragments": 2, "offsets": [2, 2], **arguments}
    return model, optimizer, DiLoCo(model, optimizer, **settings)


def snapshot(model: torch.nn.Module, diloco: DiLoCo) -> list[Tensor]:
    tensors = [p.detach().clone() for p in model.parameters()]
    for part in diloco.parts:
        tensors += [part.outer.clone(), torch.tensor([part.round, part.last_sent])]
    return tensors


def at_every_bytecode(rank: int, world: int, name: str, stride: int) -> tuple[int, ...]:
    """Ask for the state at each bytecode of a step in which results are due, and of its loop.

    Returns:
        How many bytecodes there are; how many asked for a state and had it at once, and later.
    """
    model, optimizer, diloco = trained = attach(**POLICIES[name])
    last = LAST + (name == "streaming")
    found: list[Any] = []
    messages: list[str] = []

    def save() -> None:
        found.append(copy.deepcopy([one.state_dict() for one in trained]))

    def save_now_or_later() -> None:
        try:
            save()
        except RuntimeError as error:
            messages.append(str(error))
            diloco.after_step(save)

    def load(states: Any) -> None:
        for target, state in zip(trained, states, strict=True):
            target.load_state_dict(copy.deepcopy(state))

    def train(first: int, end: int) -> None:
        for step in range(first, end):
            train_step(model, optimizer, rank, step)

    with diloco, handled(save_now_or_later):
        train(0, last - 1)
        save()
        begin = found.pop()
        whole = AtOpcode(0)
        whole.run(lambda: train(last - 1, last))
        train(last, last + AFTER)
        end = snapshot(model, diloco)
        for number in range(1, whole.count + 1, stride):
            load(begin)
            place = AtOpcode(number)
            place.run(lambda: train(last - 1, last))
            train(diloco.inner_step, last + AFTER)
            assert equal(snapshot(model, diloco), end), number
            # How often a wait asks again varies.
            assert len(found) == (place.count >= number), number
            for states in found:
                load(states)
                train(diloco.inner_step, last + AFTER)
                assert equal(snapshot(model, diloco), end), number
            num_found, found[:] = len(found), []
        assert num_found <= 1
        assert all("diloco.after_step(f)" in message for message in messages), set(messages)
        return whole.count, len(range(1, whole.count + 1, stride)) - len(messages), len(messages)


@pytest.mark.nightly("4 s each; they differ in the policy", but=["streaming"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_state_is_whole_or_refused_in_one_sentence(name: str, workers) -> None:
    ((num_places, num_now, num_later),) = workers(1).run(
        at_every_bytecode, name, STRIDE, timeout=300
    )
    assert num_places > 1000 and num_now > 2 and num_later > 10


def alone(**arguments: Any) -> tuple[Regression, torch.optim.Optimizer, DiLoCo]:
    return attach(peers="alone", **arguments)


def test_each_function_is_called_once_at_the_end_of_the_step() -> None:
    """Also if it was given twice; by a step that sends nothing, flush, close, and at once after."""
    model, optimizer, diloco = alone(sync_every=3, offsets=[3, 3])
    calls: list[int] = []

    def look() -> None:
        calls.append(diloco.inner_step)
        assert diloco.state_dict()["inner_step"] == diloco.inner_step

    with diloco:
        for step in range(3):
            diloco.after_step(look)
            diloco.after_step(look)
            assert len(calls) == step
            train_step(model, optimizer, 0, step)
        assert calls == [1, 2, 3]
        diloco.after_step(look)
        diloco.flush()
        assert calls[3:] == [3]
        diloco.after_step(look)
        diloco.close()
        assert calls[4:] == [3]
        diloco.after_step(look)
    assert calls[5:] == [3]
    with pytest.raises(TypeError, match="after_step takes a function without arguments, got 3"):
        diloco.after_step(3)  # type: ignore[arg-type]


def test_an_error_of_a_function_comes_out_of_a_step_that_is_done() -> None:
    model, optimizer, diloco = alone()
    calls: list[str] = []

    def fail() -> None:
        calls.append("fail")
        diloco.after_step(lambda: calls.append("next step"))
        raise KeyError("disk")

    with diloco:
        diloco.after_step(fail)
        diloco.after_step(lambda: calls.append("after it"))
        with pytest.raises(KeyError, match="disk"):
            train_step(model, optimizer, 0, 0)
        assert diloco.inner_step == 1 and calls == ["fail", "after it"]
        diloco.after_step(lambda: diloco.consensus() and None)
        with pytest.raises(RuntimeError, match="nor can after_step"):
            train_step(model, optimizer, 0, 1)
        assert diloco.inner_step == 2 and calls[2:] == ["next step"]
        diloco.after_step(lambda: sys.exit(7))
        with pytest.raises(SystemExit):
            train_step(model, optimizer, 0, 2)
        assert diloco.inner_step == 3


def test_a_step_that_fails_refuses_no_later_state() -> None:
    """The function waits for a step that ends; the state is asked for between steps."""
    weights = iter([1.0, -1.0, 1.0])
    model, optimizer, diloco = alone(sync_every=1, offsets=[1, 1], weight=lambda: next(weights))
    calls: list[int] = []
    with diloco:
        train_step(model, optimizer, 0, 0)
        diloco.after_step(lambda: calls.append(diloco.inner_step))
        with pytest.raises(ValueError, match="weight"):
            train_step(model, optimizer, 0, 1)
        assert not calls and diloco.state_dict()["inner_step"] == 2
        train_step(model, optimizer, 0, 2)
        assert calls == [3]


def state_in_closure(diloco: DiLoCo, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Take a step whose closure asks for a state and for the outer parameters."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        assert diloco.state_dict()["inner_step"] == diloco.inner_step
        with diloco.outer_parameters():
            pass
        loss = sum(param.square().sum() for param in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "LBFGS"])
def test_a_closure_runs_before_the_step(kind: str) -> None:
    """LBFGS calls its closure between two updates too, and is refused."""
    model = Regression()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, sync_every=2, peers="alone", checks="raise") as diloco:
        for number in range(1, 4):
            if kind == "LBFGS":
                with pytest.raises(RuntimeError, match="in the middle of a step"):
                    state_in_closure(diloco, optimizer, model)
            else:
                state_in_closure(diloco, optimizer, model)
                assert diloco.inner_step == number


def test_a_later_hook_runs_after_the_step() -> None:
    """The function of ``after_step`` may also end the training before that hook runs."""
    model, optimizer, diloco = alone()
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(diloco.state_dict()["inner_step"]))
    train_step(model, optimizer, 0, 0)
    diloco.after_step(diloco.close)
    train_step(model, optimizer, 0, 1)
    train_step(model, optimizer, 0, 2)
    assert steps == [1, 2, 2] and diloco.inner_step == 2


def test_the_end_of_a_block_is_the_end_of_a_step() -> None:
    """A block that an error leaves calls no function."""
    calls: list[str] = []
    for way in ("whole", "failed"):
        with contextlib.suppress(KeyError), alone()[2] as diloco:
            diloco.after_step(lambda: calls.append(way))  # noqa: B023
            if way == "failed":
                raise KeyError
    assert calls == ["whole"]


CALLS: dict[str, Callable[[DiLoCo], object]] = {
    "state_dict": DiLoCo.state_dict,
    "load_state_dict": lambda diloco: diloco.load_state_dict({}),
    "flush": DiLoCo.flush,
    "consensus": DiLoCo.consensus,
    "change_group": lambda diloco: diloco.change_group([0]),
    "outer_parameters": lambda diloco: diloco.outer_parameters().__enter__(),
}


@pytest.mark.parametrize("attach_hooks", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_what_a_handler_may_not_call_in_a_step(name: str, attach_hooks: bool) -> None:
    """Between the update of the weights and DiLoCo's own work, and in a flush."""
    model, optimizer, diloco = alone(attach=attach_hooks)
    messages: list[str] = []

    def call() -> None:
        with pytest.raises(RuntimeError) as caught:
            CALLS[name](diloco)
        messages.append(str(caught.value))

    hook = optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)
    with diloco, handled(call):
        train_step(model, optimizer, 0, 0)
        flush, diloco._rounds.flush = diloco._rounds.flush, lambda *_: call()  # type: ignore[method-assign]
        diloco.flush()
        diloco._rounds.flush = flush  # type: ignore[method-assign]
        assert diloco.inner_step == attach_hooks
    sentence = f"{name}() came in the middle of a step, where model and state do not fit together: "
    sentence += "let diloco.after_step(f) call f when the step has ended"
    assert messages == [sentence] * 2
