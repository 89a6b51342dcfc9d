"""The rooms of ``csrc``: which of them may include which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
ENGINE = "exchange/engine"
EXCHANGE_ROOMS = ("exchange/transport", "exchange/device")
LINK = "exchange/link"
STORE = "exchange/store"
JOINING = "exchange/joining"

# What each room may include beside itself: rooms, with the rooms inside of them, or single files.
# The exchange calls operators through torch's dispatcher, and so includes neither their room nor
# that of the CUDA kernels.
MAY_INCLUDE = {
    "wire": (),
    "codec": ("wire",),
    "codec/scalar": (
        *("wire", "codec/kernels.h", "codec/sparse.h", "codec/step_rule.h"),
        "codec/bench/floors.h",
    ),
    "codec/simd": ("wire", "codec/kernels.h", "codec/sparse.h", "codec/bench/floors.h"),
    "codec/bench": ("codec/codec.h",),
    "cuda": ("wire", "codec/kernels.h", "codec/step_rule.h"),
    "operators": ("wire", "codec", "cuda"),
    LINK: (),
    STORE: (LINK,),
    **dict.fromkeys(EXCHANGE_ROOMS, ()),
    JOINING: (f"{LINK}/copies.h", "exchange/device", "codec/digest.h"),
    ENGINE: (*EXCHANGE_ROOMS, "wire", "codec"),
    "exchange/bindings": (ENGINE, LINK, STORE, JOINING, *EXCHANGE_ROOMS, "codec"),
    "": ("operators/bindings.h", "exchange/bindings/bindings.h"),
}


def includes() -> list[tuple[str, str]]:
    """Return (file, file of ours that it includes), as paths under ``csrc``."""
    found = []
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
            for name in re.findall(r'^#include "(.+)"$', path.read_text(), re.MULTILINE):
                found.append((path.relative_to(CSRC).as_posix(), name))
    return found


def room_of(file: str) -> str:
    return file.rpartition("/")[0]


def is_allowed(file: str, included: str) -> bool:
    room = room_of(file)
    allowed = MAY_INCLUDE[room]
    return room_of(included) == room or any(
        included == one or included.startswith(f"{one}/") for one in allowed
    )


def test_rooms_include_only_what_lies_below_them() -> None:
    found = includes()
    assert len(found) > 100
    wrong = [f"{file} includes {name}" for file, name in found if not is_allowed(file, name)]
    assert not wrong, "\n".join(wrong)


def test_includes_name_files_from_csrc_down() -> None:
    missing = [f"{file}: {name}" for file, name in includes() if not (CSRC / name).is_file()]
    assert not missing, "\n".join(missing)


def test_every_room_has_a_rule() -> None:
    rooms = {room_of(path.relative_to(CSRC).as_posix()) for path in CSRC.rglob("*.*")}
    assert rooms == set(MAY_INCLUDE)


@pytest.mark.parametrize(
    ("file", "included"),
    [
        ("wire/codes.h", "codec/kernels.h"),
        ("codec/codec.cpp", "cuda/kernels.h"),
        ("codec/simd/encode.h", "codec/codec.h"),
        ("cuda/encode.cu", "codec/codec.h"),
        ("cuda/encode.cu", "operators/checks.h"),
        ("exchange/engine/operator_calls.cpp", "operators/checks.h"),
        ("exchange/transport/transport.cpp", "exchange/engine/engine.h"),
        ("exchange/engine/engine.cpp", "exchange/link/link.h"),
        ("exchange/transport/transport.h", "exchange/link/group.h"),
        ("operators/cpu.cpp", "exchange/engine/job.h"),
    ],
)
def test_an_include_upwards_is_refused(file: str, included: str) -> None:
    assert (CSRC / file).is_file() and (CSRC / included).is_file()
    assert not is_allowed(file, included)
