"""Ctrl-C inside an outer step: it happens wholly or not at all, and training may go on."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from choice_groups import grouped
from fault_replicas import default_handler
from problems import Regression, equal, train_step
from torch import Tensor

import diloco_comm
from diloco_comm import CO2, Blocking, Delayed, DiLoCo, Eager, Streaming
from diloco_comm.exchange.exchange import Exchange
from diloco_comm.exchange.round import Header
from diloco_comm.ops.wire import WireFormat
from diloco_comm.rounds.part import SyncedFragment

PACKAGE = str(Path(diloco_comm.__file__).parent)
SYNC_EVERY, LAST = 2, 6
# With 1, at every line, the tests take a minute more.
STRIDE = 31
POLICIES: dict[str, dict[str, Any]] = {
    "blocking": {"overlap": Blocking()},
    "streaming": {"overlap": Streaming(1, 0.5)},
    "delayed": {"overlap": Delayed()},
    "eager": {"overlap": Eager(2), "error_feedback": True},
    "co2": {"overlap": CO2(0.5, "gap-aware")},
}


def interrupt(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)


def interrupt_once_waiting(thread: int) -> None:
    """Send the signal when a thread stays in the same function of the package, as it waits there.

    It must stay for a quarter of a second by ten looks, so that one that merely got no processor
    for that long is no likely mistake.
    """
    place, num_looks = None, 0
    while num_looks < 10:
        time.sleep(0.025)
        frame = sys._current_frames().get(thread)
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        now = None if frame is None else frame.f_code
        num_looks = num_looks + 1 if now is not None and now is place else 0
        place = now
    interrupt()


def attach(**arguments: Any) -> tuple[Regression, torch.optim.Optimizer, DiLoCo]:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"fragments": 2, "offsets": [2, 2], "wire": "int4", "block_size": 32}
    arguments = {"sync_every": SYNC_EVERY, "attach": False, **settings, **arguments}
    return model, optimizer, DiLoCo(model, optimizer, **grouped(arguments))


def train(model: Any, optimizer: Any, diloco: DiLoCo, steps: range, rank: int = 0) -> None:
    for step in steps:
        train_step(model, optimizer, rank, step)
        diloco.step()


def snapshot(model: torch.nn.Module, diloco: DiLoCo) -> list[Tensor]:
    tensors = [p.detach().clone() for p in model.parameters()]
    for part in diloco.parts:
        tensors += [part.outer.clone(), part.state.momentum.clone()]
        tensors.append(torch.tensor([part.round, part.state.num_steps]))
    return tensors


class AtLine:
    """Sends the signal when the package comes to its ``number``-th line."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.number:
                interrupt()
        return self

    def run(self, function: Callable[[], None]) -> bool:
        """Return whether the function was interrupted."""
        sys.settrace(self)
        try:
            function()
            return False
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)


def at_every_line(rank: int, world: int, name: str, stride: int) -> tuple[int, int, int]:
    """Interrupt an outer step of two fragments at each line, and go on from there.

    Returns:
        How many lines there are, and after how many interrupts the step was not done, and done.
    """
    model, optimizer, diloco = attach(**POLICIES[name])
    # The step in which results are due.
    last = LAST + (name == "streaming")
    with default_handler(), diloco:
        train(model, optimizer, diloco, range(last - 1))
        train_step(model, optimizer, rank, last - 1)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), diloco.state_dict()))

        def reset() -> None:
            for target, state in zip((model, optimizer, diloco), saved, strict=True):
                target.load_state_dict(copy.deepcopy(state))

        before = snapshot(model, diloco)
        whole = AtLine(0)
        assert not whole.run(diloco.step)
        after = snapshot(model, diloco)
        train(model, optimizer, diloco, range(last, last + 4))
        end = snapshot(model, diloco)
        num_before = num_after = 0
        for number in range(1, whole.count + 1, stride):
            reset()
            # How often a wait asks again varies.
            line = AtLine(number)
            assert line.run(diloco.step) or line.count < number, number
            now = snapshot(model, diloco)
            is_after = equal(now, after)
            assert is_after or equal(now, before), number
            num_before, num_after = num_before + (not is_after), num_after + is_after
            is_waiting = diloco.inner_step == last and not is_after
            if diloco.inner_step < last:
                diloco.step()
                assert equal(snapshot(model, diloco), after), number
            train(model, optimizer, diloco, range(last, last + 4))
            # What was waited for is applied by the next step, after one more inner step.
            assert is_waiting or equal(snapshot(model, diloco), end), number
            diloco.flush()
            assert not any(part.in_flight for part in diloco.parts)
        return whole.count, num_before, num_after


@pytest.mark.nightly("3 s each; they differ in the policy", but=["eager"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_is_done_or_is_not(name: str, workers) -> None:
    ((num_lines, num_before, num_after),) = workers(1).run(at_every_line, name, STRIDE, timeout=300)
    assert num_lines > 100 and num_before > 2 and num_after > 2


def in_the_middle(rank: int, world: int, name: str, is_shared: bool) -> tuple[bool, str]:
    """The first of two fragments is applied when the signal comes, on one of the processes."""
    group = {"shard_group": dist.group.WORLD, "group": dist.new_group([rank])} if is_shared else {}
    if is_shared:
        group["group"] = [dist.new_group([r]) for r in range(world)][rank]
    model, optimizer, diloco = attach(**POLICIES[name], **group)
    apply, was_interrupted = SyncedFragment.apply, False

    def interrupted(part: SyncedFragment, *arguments: Any, **options: Any) -> None:
        apply(part, *arguments, **options)
        if rank == 1 and part.index == 0 and diloco.inner_step == LAST:
            interrupt()

    SyncedFragment.apply = interrupted  # type: ignore[method-assign]
    with default_handler(), diloco:
        try:
            for step in range(LAST + 4):
                train_step(model, optimizer, 0 if is_shared else rank, step)
                try:
                    diloco.step()
                except KeyboardInterrupt:
                    was_interrupted = diloco.inner_step == LAST
        finally:
            SyncedFragment.apply = apply  # type: ignore[method-assign]
        diloco.flush()
        return was_interrupted, str([p.tolist() for p in model.parameters()])


@pytest.mark.parametrize(("name", "is_shared"), [("blocking", False), ("eager", True)])
def test_others_do_not_notice(name: str, is_shared: bool, workers) -> None:
    first, second = workers(2).run(in_the_middle, name, is_shared)
    assert (first[0], second[0]) == (False, True)
    assert first[1] == second[1]


def while_a_peer_is_awaited(rank: int, world: int, call: str) -> None:
    """The peer is a second Exchange of this process, and never comes to the exchange."""
    store, made = dist.HashStore(), {}

    def make(replica: int) -> None:
        made[replica] = Exchange(store, replica, [0, 1])

    threads = [threading.Thread(target=make, args=(replica,)) for replica in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    exchange = made[0]
    buffers = exchange.buffers(100, WireFormat("int8"))
    work = exchange.start(buffers, outer=None, params=[torch.ones(100)], header=Header())
    with default_handler():
        main = threading.get_ident()
        waiter = threading.Thread(target=interrupt_once_waiting, args=(main,), daemon=True)
        with pytest.raises(KeyboardInterrupt):
            waiter.start()
            exchange.emulate_link(1.0) if call == "emulate_link" else exchange.close()
        waiter.join()
    assert work.done() == (call == "close")
    for exchange in made.values():
        exchange._close(patience_s=0.0)


@pytest.mark.parametrize("call", ["emulate_link", "close"])
def test_a_wait_for_an_earlier_exchange_ends(call: str, workers) -> None:
    workers(1).run(while_a_peer_is_awaited, call)


def twice(rank: int, world: int) -> list[str]:
    """A second Ctrl-C breaks in."""
    model, optimizer, diloco = attach(overlap=Delayed())
    apply, messages = SyncedFragment.apply, []

    def interrupted(part: SyncedFragment, *arguments: Any, **options: Any) -> None:
        interrupt(2 if diloco.inner_step == LAST else 0)
        apply(part, *arguments, **options)

    SyncedFragment.apply = interrupted  # type: ignore[method-assign]
    with default_handler(), diloco:
        try:
            with pytest.raises(KeyboardInterrupt):
                train(model, optimizer, diloco, range(LAST))
        finally:
            SyncedFragment.apply = apply  # type: ignore[method-assign]
        for call in (diloco.step, diloco.flush, diloco.state_dict):
            with pytest.raises(RuntimeError) as error:
                call()
            messages.append(str(error.value))
    return messages


def test_a_second_interrupt_leaves_one_sentence(workers) -> None:
    (messages,) = workers(1).run(twice)
    assert len(set(messages)) == 1 and "broke an outer step off in the middle" in messages[0]
