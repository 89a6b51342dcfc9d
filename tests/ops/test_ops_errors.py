"""Every wrong argument is refused with one sentence that names it, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable

import device_ops as ops
import pytest
import torch
from codec_cases import HOST_IMPLS

from diloco_comm import ops as public_ops
from diloco_comm.ops.wire import WireFormat

N, RUN = 1000, 512
RUN_BYTES = WireFormat("int8", 256).run_bytes(RUN)


def encode(**changes) -> None:
    arguments = {
        "outer": torch.zeros(N),
        "params": [torch.zeros(600), torch.zeros(20, 20)],
        "payload": torch.zeros(2 * RUN_BYTES, dtype=torch.uint8),
        "begin": 0,
        "end": N,
        "run_elements": RUN,
        "wire": "int8",
        "block_size": 256,
    }
    ops.encode(**{**arguments, **changes})


def reduce(**changes) -> None:
    arguments = {
        "received": torch.zeros(3 * RUN_BYTES, dtype=torch.uint8),
        "result": torch.zeros(RUN_BYTES, dtype=torch.uint8),
        "weights": [0.5, 0.25, 0.25],
        "num_elements": 500,
        "run_elements": RUN,
        "wire": "int8",
        "block_size": 256,
    }
    ops.reduce(**{**arguments, **changes})


def outer_step(**changes) -> None:
    arguments = {
        "outer": torch.zeros(N),
        "momentum": torch.zeros(N),
        "params": [torch.zeros(600), torch.zeros(20, 20)],
        "payloads": [torch.zeros(2 * RUN_BYTES, dtype=torch.uint8)],
        "coefficients": [1.0],
        "begin": 0,
        "end": N,
        "run_elements": RUN,
        "wire": "int8",
        "block_size": 256,
        "optimizer": "nesterov",
        "lr": 0.7,
    }
    ops.outer_step(**{**arguments, **changes})


def outer_step_adam(**changes) -> None:
    arguments = {
        "outer": torch.zeros(N),
        "exp_avg": torch.zeros(N),
        "exp_avg_sq": torch.zeros(N),
        "params": [torch.zeros(N)],
        "payloads": [torch.zeros(2 * RUN_BYTES, dtype=torch.uint8)],
        "coefficients": [1.0],
        "begin": 0,
        "end": N,
        "run_elements": RUN,
        "wire": "int8",
        "block_size": 256,
        "lr": 0.3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 0.1,
        "step": 1,
    }
    ops.outer_step_adam(**{**arguments, **changes})


def decode(**changes) -> None:
    arguments = {
        "payloads": [torch.zeros(2 * RUN_BYTES, dtype=torch.uint8)],
        "coefficients": [1.0],
        "outs": [torch.zeros(N)],
        "begin": 0,
        "end": N,
        "run_elements": RUN,
        "wire": "int8",
        "block_size": 256,
    }
    ops.decode(**{**arguments, **changes})


def bytes_of(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


CASES: list[tuple[Callable, dict, type[Exception], str]] = [
    (encode, {"wire": "int2"}, ValueError, r"wire .*fp32, .*e3m0.*'?int2"),
    (encode, {"block_size": 100}, ValueError, r"block_size .*32, .*1024, got 100"),
    (encode, {"block_size": 2048}, ValueError, r"block_size .*got 2048"),
    (encode, {"run_elements": 300}, ValueError, r"run_elements .*multiple .*256, got 300"),
    (encode, {"run_elements": 0}, ValueError, r"run_elements .*got 0"),
    (encode, {"run_elements": 2**59, "wire": "fp32"}, ValueError, r"at most 2\^48, got 576460"),
    (encode, {"run_elements": 2**48 + 256}, ValueError, r"run_elements .*at most 2\^48"),
    (encode, {"begin": 100}, ValueError, r"\[100, 1000\) must be whole runs of 512"),
    (encode, {"end": 600}, ValueError, r"\[0, 600\) must be whole runs of 512"),
    (encode, {"end": 1001}, ValueError, r"\[0, 1001\) must lie in .*\[0, 1000\)"),
    (encode, {"begin": -512}, ValueError, r"\[-512, 1000\) must lie in"),
    (encode, {"outer": torch.zeros(999)}, ValueError, r"outer must have 1000 .*got 999"),
    (
        encode,
        {"outer": torch.zeros(N).double()},
        TypeError,
        r"outer must be [Ff]loat.*got [Dd]ouble",
    ),
    (encode, {"outer": torch.zeros(2 * N)[::2]}, ValueError, r"outer must be .*contiguous"),
    (encode, {"params": [torch.zeros(N).int()]}, TypeError, r"params must be float32.*got [Ii]nt"),
    (
        encode,
        {"params": [torch.zeros(600), torch.zeros(20, 40)[:, ::2]]},
        ValueError,
        r"params .*\[20, 20\] .*\[40, 2\]",
    ),
    (encode, {"payload": bytes_of(RUN_BYTES)}, ValueError, r"payload .* 2 .*got 528 bytes"),
    (encode, {"payload": torch.zeros(N)}, TypeError, r"payload must be .*got [Ff]loat"),
    (encode, {"residual": torch.zeros(5)}, ValueError, r"residual .*1000 elements.*\[5\]"),
    (encode, {"residual": torch.zeros(N).half()}, TypeError, r"residual must be .*got [Hh]alf"),
    (
        encode,
        {"residual": torch.zeros(N), "new_residual": torch.zeros(N).bfloat16()},
        TypeError,
        r"residual and new_residual must have one dtype",
    ),
    (encode, {"nonfinite": torch.zeros(1)}, TypeError, r"nonfinite must be .*got [Ff]loat"),
    (encode, {"nonfinite": torch.zeros(2).long()}, ValueError, r"nonfinite .*one element, got 2"),
    (reduce, {"weights": [0.5, 0.5]}, ValueError, r"received .*2 .*got 1584"),
    (reduce, {"weights": []}, ValueError, r"weights"),
    (reduce, {"result": bytes_of(16)}, ValueError, r"result .*got 16 bytes"),
    (reduce, {"num_elements": 513}, ValueError, r"num_elements .*512.*513"),
    (reduce, {"num_elements": -1}, ValueError, r"num_elements .*-1"),
    (reduce, {"residual": torch.zeros(N)}, ValueError, r"residual .*500 elements"),
    (outer_step, {"optimizer": "lion"}, ValueError, r"optimizer must be sgd, .*got 'lion'"),
    (outer_step, {"momentum": None}, ValueError, r"nesterov needs a momentum"),
    (outer_step, {"momentum": torch.zeros(3)}, ValueError, r"momentum must have 1000 .*got 3"),
    (outer_step, {"clip": 0.0}, ValueError, r"clip must be positive, got 0"),
    (outer_step, {"clip": float("nan")}, ValueError, r"clip must be positive, got nan"),
    (outer_step, {"coefficients": [1.0, 2.0]}, ValueError, r"equally many, got 1 and 2"),
    (outer_step, {"payloads": [], "coefficients": []}, ValueError, r"payloads must hold .*got 0"),
    (outer_step, {"payloads": [bytes_of(528)]}, ValueError, r"payloads .* 2 .*got 528 bytes"),
    (outer_step, {"verdict": torch.zeros(1)}, TypeError, r"verdict must be .*got [Ff]loat"),
    (outer_step, {"params": [torch.zeros(3)]}, ValueError, r"\[0, 1000\) must lie in .*\[0, 3\)"),
    (outer_step_adam, {"step": 0}, ValueError, r"step counts from 1, got 0"),
    (outer_step_adam, {"exp_avg_sq": torch.zeros(3)}, ValueError, r"exp_avg_sq must have 1000"),
    (decode, {"outs": [torch.zeros(N).double()]}, TypeError, r"outs must be .*got [Dd]ouble"),
    (decode, {"outs": [torch.zeros(8).expand(125, 8)]}, ValueError, r"outs .*without gaps"),
    (decode, {"payloads": [bytes_of(1057)]}, ValueError, r"payloads .*got 1057 bytes"),
]


@pytest.mark.parametrize("impl", HOST_IMPLS)
def test_one_sentence(impl: str) -> None:
    for function, changes, error, match in CASES:
        with pytest.raises(error, match=match) as raised:
            function(**({"impl": impl} | changes))
        sentence = str(raised.value).split("\nException raised from")[0]
        assert "\n" not in sentence.strip() and len(sentence) < 250, sentence


@pytest.mark.parametrize("function", [encode, reduce, outer_step, outer_step_adam, decode])
@pytest.mark.parametrize("impl", HOST_IMPLS)
def test_the_unchanged_arguments_are_accepted(function: Callable, impl: str) -> None:
    function(impl=impl)


@pytest.mark.parametrize("impl", HOST_IMPLS)
def test_merge_and_norms(impl: str) -> None:
    with pytest.raises(ValueError, match=r"outer must have 4 elements .*got 5"):
        ops.merge(torch.zeros(5), [torch.zeros(2, 2)], impl=impl)
    with pytest.raises(ValueError, match=r"outer must have 4 elements .*got 5"):
        ops.norms(torch.zeros(5), [torch.zeros(2, 2)], torch.zeros(2).double(), impl=impl)
    with pytest.raises(TypeError, match=r"out must be .*[Dd]ouble.*got [Ff]loat"):
        ops.norms(None, [torch.zeros(4)], torch.zeros(2), impl=impl)
    with pytest.raises(ValueError, match="out must have two elements, got 3"):
        ops.norms(None, [torch.zeros(4)], torch.zeros(3).double(), impl=impl)


@pytest.mark.parametrize("impl", HOST_IMPLS)
def test_nothing_is_written_when_an_argument_is_wrong(impl: str) -> None:
    payload = torch.full((2 * RUN_BYTES,), 0xA5, dtype=torch.uint8)
    with pytest.raises(ValueError, match="residual"):
        encode(payload=payload, residual=torch.zeros(5), impl=impl)
    assert (payload == 0xA5).all()


def test_an_unknown_implementation_lists_those_that_run() -> None:
    with pytest.raises(ValueError, match=re.escape(", ".join(public_ops.available_impls()))):
        encode(impl="neon")


def test_the_environment_names_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_COMM_IMPL", "sse9")
    with pytest.raises(ValueError, match="sse9"):
        encode()
    encode(impl="scalar")
    monkeypatch.setenv("DILOCO_COMM_IMPL", "scalar")
    encode()
