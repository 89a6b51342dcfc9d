"""Warnings show the line of the program that was at work, however deep this package was then."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from problems import Regression, batch
from torch import nn

from diloco_comm import DiLoCo
from diloco_comm.base.checks import class_of


def line_here(offset: int = 0) -> str:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"{frame.f_back.f_code.co_filename}:{frame.f_back.f_lineno + offset}"


def told(caught: list[warnings.WarningMessage], words: str) -> list[str]:
    return [f"{one.filename}:{one.lineno}" for one in caught if words in str(one.message)]


def backward(model: nn.Module, rank: int = 0) -> None:
    x, y = batch(rank, 0)
    nn.functional.mse_loss(model(x), y).backward()


def test_a_warning_of_the_optimizers_hook_shows_the_step() -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with (
        DiLoCo(model, optimizer, sync_every=1, peers="alone"),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        backward(model)
        optimizer.step()
        assert told(caught, "have gradients but") == [line_here(-1)]


class Broken(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("this handler is broken")


@pytest.mark.parametrize("is_error", [False, True])
def test_an_error_of_a_handler_of_warnings_stops_no_step(
    is_error: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning that the program has made an error is one, and a handler's error is shown."""
    model = Regression()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    handler = Broken()
    with DiLoCo(model, optimizer, sync_every=1, peers="alone"), warnings.catch_warnings():
        warnings.simplefilter("error" if is_error else "always")
        logging.getLogger("py.warnings").addHandler(handler)
        logging.captureWarnings(True)
        try:
            backward(model)
            with (
                pytest.raises(RuntimeWarning, match="have gradients but")
                if is_error
                else nullcontext()
            ):
                optimizer.step()
        finally:
            logging.captureWarnings(False)
            logging.getLogger("py.warnings").removeHandler(handler)
    assert ("RuntimeError: this handler is broken" in capsys.readouterr().err) is not is_error


def test_a_check_that_warns_shows_the_step_behind_a_schedule() -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with (
        DiLoCo(model, optimizer, sync_every=4, peers="alone", checks="warn"),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        backward(model)
        optimizer.step()
        model.load_state_dict(Regression(seed=1).state_dict())
        optimizer.step()
        assert told(caught, "were loaded into the model") == [line_here(-1)]


def lines_of_two(rank: int, world: int) -> tuple[bool, bool]:
    """Whether the constructor's warning, and the warning at the end, show lines of this program."""
    model = nn.parallel.DistributedDataParallel(Regression())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        diloco = DiLoCo(model, optimizer, sync_every=4)
        begun = told(caught, "different replicas") == [line_here(-1)]
        backward(model, rank)
        optimizer.step()
        diloco.close()
        end = line_here(-1)
    return begun, told(caught, "is lost, up to inner step 1") == [end]


def test_the_constructor_and_the_end_of_a_block(workers: Callable[[int], object]) -> None:
    assert workers(2).run(lines_of_two) == [(True, True)] * 2  # type: ignore[attr-defined]


def test_a_thread_without_a_line_of_the_program_warns_all_the_same() -> None:
    import threading

    from diloco_comm.base.checks import warn

    with pytest.warns(UserWarning, match="^nobody's line$"):
        thread = threading.Thread(target=warn, args=("nobody's line",))
        thread.start()
        thread.join()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AdamW", "an AdamW"),
        ("SGD", "an SGD"),
        ("NAdam", "an NAdam"),
        ("int", "an int"),
        ("Tensor", "a Tensor"),
        ("Muon", "a Muon"),
        ("HashStore", "a HashStore"),
        ("NoneType", "a NoneType"),
    ],
)
def test_a_class_stands_behind_its_article(name: str, expected: str) -> None:
    assert class_of(type(name, (), {})()) == expected
