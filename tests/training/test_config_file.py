"""Arguments from a file: ``config=`` and ``DILOCO_COMM_CONFIG``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from choice_groups import grouped

from diloco_comm import DiLoCo, Eager, HeavyBall
from diloco_comm.ops.wire import WireFormat


def attach(**arguments: Any) -> DiLoCo:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return DiLoCo(model, optimizer, **grouped(arguments))


def test_a_file_is_as_good_as_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    with attach(sync_every=7, wire="int4", overlap=Eager(), outer=HeavyBall(0.3, 0.2)) as first:
        expected = first.config()
    path.write_text(json.dumps(expected))
    for config in (expected, path, str(path)):
        with attach(config=config) as diloco:
            assert diloco.config() == expected
    with attach(config=path, wire=WireFormat("fp16", 64)) as diloco:
        assert diloco.config() == {**expected, "wire": "fp16", "block_size": 64}
    monkeypatch.setenv("DILOCO_COMM_CONFIG", str(path))
    with attach() as diloco:
        assert diloco.config() == expected
    with attach(wire="fp32") as diloco:
        assert diloco.config() == {**expected, "wire": "fp32"}
    for wire, size in (("sub8", 1024), ("int2r", 256), ("topk64", 4096), ("int8", 64)):
        options = {"error_feedback": wire == "topk64"}
        with attach(config={**expected, "block_size": 64}, wire=wire, **options) as diloco:
            assert diloco.config()["block_size"] == size
            saved = diloco.config()
        with attach(config=saved) as diloco:
            assert diloco.config() == saved
        with attach(config=saved, wire="int4") as diloco:
            assert diloco.config()["block_size"] == (64 if wire == "int8" else 256)
    with attach(config={"sync_every": 3}) as diloco:
        assert diloco.settings.wire.config() == "int8"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"sync_evry": 3}', r"has unknown arguments \['sync_evry'\]"),
        ("[1, 2]", "must hold a JSON object of arguments, got a list"),
        ("{", "is not JSON"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_bad_file_is_one_sentence(
    text: str | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=rf"config {path} {sentence}"):
        attach(config=path)
    monkeypatch.setenv("DILOCO_COMM_CONFIG", str(path))
    with pytest.raises(ValueError, match=rf"DILOCO_COMM_CONFIG {path} {sentence}"):
        attach()
