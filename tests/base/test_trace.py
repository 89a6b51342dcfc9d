"""Ranges in a profile, and environment variables."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager

import pytest
import torch
from choice_groups import grouped
from problems import Regression, train_step

from diloco_comm import DiLoCo, ops
from diloco_comm.base import env, trace


def test_profile_shows_stage_fragment_and_round() -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=2, fragments=2) as diloco:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for step in range(4):
                train_step(model, optimizer, 0, step)
        metrics = diloco.metrics()
    assert len(metrics) == 4
    names = [e.name for e in profile.events() if e.name.startswith("diloco_comm::")]
    for stage in ("encode", "wait", "outer_step"):
        expected = [f"diloco_comm::{stage} fragment={f} round={r}" for r in (0, 1) for f in (0, 1)]
        assert [name for name in names if f"::{stage} fragment" in name] == expected
    exchanges = [name for name in names if "::exchange" in name]
    assert exchanges == [
        f"diloco_comm::exchange fragment={m.fragment} round={m.round} us={1e6 * m.exchange_s:.0f} "
        f"exposed_us={1e6 * m.exposed_s:.0f}"
        for m in metrics
    ]


def test_nvtx_ranges_have_our_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    @contextmanager
    def annotate(message: str, domain: str):
        opened.append((domain, message))
        yield

    monkeypatch.setitem(sys.modules, "nvtx", types.SimpleNamespace(annotate=annotate))
    monkeypatch.setattr(trace.importlib.util, "find_spec", lambda name: object())
    trace._nvtx.cache_clear()
    try:
        with trace.span("encode", 3, 7):
            assert opened == [("diloco_comm", "encode fragment=3 round=7")]
        monkeypatch.setenv("DILOCO_COMM_NVTX", "0")
        trace._nvtx.cache_clear()
        with trace.span("encode", 3, 8):
            assert len(opened) == 1
    finally:
        trace._nvtx.cache_clear()


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_COMM_LANES", "2")
    monkeypatch.setenv("DILOCO_COMM_CHUNK_BYTES", "4096")
    monkeypatch.setenv("DILOCO_COMM_TIMEOUT_S", "7.5")
    fastest = ops.available_impls()[-1]
    monkeypatch.setenv("DILOCO_COMM_IMPL", fastest)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=1) as diloco:
        assert (diloco.settings.lanes, diloco.settings.chunk_bytes) == (2, 4096)
        assert (diloco.exchange.timeout, diloco.impl) == (7.5, fastest)
    arguments = {"lanes": 1, "chunk_bytes": 100, "timeout": 3, "impl": "scalar"}
    with DiLoCo(model, optimizer, sync_every=1, **grouped(arguments)) as diloco:
        assert (diloco.settings.lanes, diloco.settings.chunk_bytes) == (1, 100)
        assert (diloco.exchange.timeout, diloco.impl) == (3.0, "scalar")


@pytest.mark.parametrize("text", ["x", "0", "-1", "inf"])
def test_environment_must_be_positive_numbers(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_COMM_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=f"DILOCO_COMM_TIMEOUT_S must be a positive.*{text}"):
        env.timeout_s()
