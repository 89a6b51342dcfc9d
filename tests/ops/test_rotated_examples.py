"""The rotated wires on blocks whose bytes were computed by hand or apart from the package."""

from __future__ import annotations

import pytest
import torch
from codec_cases import CPU_IMPLS
from torch import Tensor

from diloco_comm import ops
from diloco_comm.ops import reference_rotation
from diloco_comm.ops.wire import ROTATED_WIRES, WireFormat

IMPLS = [pytest.param("reference", id="reference"), *CPU_IMPLS]
every_impl = pytest.mark.parametrize("impl", IMPLS)


def no_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reference_rotation, "random_signs", lambda key, count: torch.zeros(count).bool()
    )


def polynomial(count: int) -> tuple[Tensor, Tensor]:
    """Return values and signs of which the bytes below were computed."""
    i = torch.arange(count)
    return ((37 * i**2 + 11 * i) % 101 - 50).float() / 64, (i**2 + i // 3) % 2 == 1


def two_values() -> Tensor:
    x = torch.zeros(256)
    x[0], x[1] = 1.0, -0.5
    return x


def encode(x: Tensor, wire: str, *, least_squares: bool = False) -> tuple[str, str, Tensor]:
    """Return the scale and the code of one block in hexadecimal digits, and the run."""
    form = WireFormat(wire)
    run = torch.zeros(form.run_bytes(form.block_size), dtype=torch.uint8)
    bad = reference_rotation.encode_run(x, run, form.block_size, form, 0, least_squares)
    assert bad == int((~(x.abs() <= 2.0**116)).sum())
    code = run[form.code_offset(form.block_size) :][: form.code_bytes(form.block_size)]
    return run[8:10].numpy()[::-1].tobytes().hex(), code.numpy().tobytes().hex(), run


def decode(run: Tensor, wire: str, count: int) -> list[float]:
    form = WireFormat(wire)
    return reference_rotation.decode_run(run, form.block_size, form, count).tolist()


def test_two_values_without_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    no_signs(monkeypatch)
    scale, code, run = encode(two_values(), "int2r")
    assert (scale, code) == ("3a1b", "aa" * 32 + "00" * 32)
    decoded = [0.98388671875, -0.52978515625, 0.0, 0.0]
    assert decode(run, "int2r", 4) == decoded
    assert encode(two_values(), "int2r", least_squares=True)[:2] == (scale, code)
    scale, code, run = encode(two_values(), "int1r")
    assert (scale, code) == ("3ba0", "00" * 32)
    assert decode(run, "int1r", 256) == [1.25] + [0.0] * 255
    assert encode(two_values(), "int1r", least_squares=True)[0] == "3b80"


SIGNS = "dfc9c2b5a87e471794f26eb5ef267f5420cfa9bc4b4cba966f735d22f83097bd"
LARGE = "4ccc5102688d410110e14e050430b04181a639c304014214001c89811600902a"
POLYNOMIAL = {
    # wire: the unbiased scale, that of least squares, the code, the first decoded values
    "int2r": (
        "3b99",
        "3b87",
        LARGE + SIGNS,
        [-0.98052978515625, -0.1307373046875, 0.32684326171875, 0.298828125],
    ),
    "int1r": ("3d0a", "3ca8", SIGNS, [-0.943359375, 0.0, 0.0, 0.404296875]),
    "sub2": ("3d09", None, None, None),
    "sub4": ("3d8d", None, "ebc946c42a4f519accd24e1d67e8767c", None),
    "sub8": (
        "3e13",
        None,
        "ebc946c42a4f519accd24e1d67e8767c",
        [-0.57421875, 0.57421875, 3.4453125, 2.296875],
    ),
    "sub16": ("3ea3", None, "ebc946c42a4f519a", None),
}


@pytest.mark.parametrize("wire", ROTATED_WIRES)
def test_polynomial_values(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, signs = polynomial(WireFormat(wire).block_size)
    monkeypatch.setattr(reference_rotation, "random_signs", lambda key, count: signs)
    unbiased, least_squares, code, values = POLYNOMIAL[wire]
    scale, encoded, run = encode(x, wire)
    assert scale == unbiased
    if code is not None:
        assert encoded.startswith(code)
    if wire != "sub4" and code is not None:
        assert encoded == code
    if least_squares is not None:
        assert encode(x, wire, least_squares=True)[:2] == (least_squares, encoded)
    if values is not None:
        assert decode(run, wire, 4) == values


def test_one_value_has_eight_images_in_sub8(monkeypatch: pytest.MonkeyPatch) -> None:
    no_signs(monkeypatch)
    x = torch.zeros(1024)
    x[5] = 3.0
    scale, code, run = encode(x, "sub8")
    assert (scale, code) == ("3cc0", "5a" * 16)
    assert decode(run, "sub8", 1024) == [3.0 if i % 128 == 5 else 0.0 for i in range(1024)]


@pytest.mark.parametrize("wire", ROTATED_WIRES)
def test_a_bad_element_makes_its_block_null(wire: str) -> None:
    x = torch.full((WireFormat(wire).block_size,), 0.001)
    x[7] = torch.inf
    scale, code, run = encode(x, wire)
    assert scale == "0000" and set(code) == {"0"}
    assert decode(run, wire, len(x)) == [0.0] * len(x)


# The key, two scales, padding, two codes: that of 44 values has a period of 64 coefficients.
RUN = (
    "efcdab8967452301073d593c00000000"
    "68fb43592d55c3a2700f23845f4ef8de73cce75713633e3fdb96676b390bedbd"
    "6bb82e31fbf8be716bb82e31fbf8be716bb82e31fbf8be716bb82e31fbf8be71"
)


@every_impl
def test_a_whole_run_with_signs_of_its_own(impl: str) -> None:
    x, _ = polynomial(300)
    run = torch.zeros(WireFormat("int1r").run_bytes(512), dtype=torch.uint8)
    ops.encode(None, [x], run, 0, 300, 512, "int1r", 256, rng_key=0x0123456789ABCDEF, impl=impl)
    assert run.numpy().tobytes().hex() == RUN
    out = torch.empty(300)
    ops.decode([run], [1.0], [out], 0, 300, 512, "int1r", 256, impl=impl)
    assert out[[0, 1, 256]].tolist() == [-0.9228515625, 0.3955078125, -0.6357421875]
