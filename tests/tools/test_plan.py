"""The simulator: the paper's table, a node-by-node twin, and closed forms."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cli_helpers import run_cli
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.common import RESULTS
from diloco_comm_tools.common.sizes import parse_count
from diloco_comm_tools.plan.estimate import Request, find_settings, needed_gbps
from diloco_comm_tools.plan.published import (
    GRID,
    INTELLECT_1,
    TABLE_4,
    TABLE_5,
    compare,
    compare_measured,
)
from diloco_comm_tools.plan.request import EFFICIENCY
from diloco_comm_tools.plan.simulator import GRID_GBPS, Schedule, Work, strided, utilisation


def test_table_4_is_reproduced() -> None:
    entries = compare(TABLE_4)
    assert len(entries) == 75
    assert all(abs(entry["grid_steps"]) <= 1 for entry in entries)
    assert sum(entry["gbps"] == entry["published_gbps"] for entry in entries) >= 60


def test_eager_rows_differ_from_the_published_ones() -> None:
    """The comparison says so, like docs/measurements/plan-results.md; the simulator is not bent."""
    entries = [e for e in compare(TABLE_5) if "eager" in e["row"] and "H=100" in e["row"]]
    assert len(entries) == 15
    # Published below what the bytes of a round take in a round's time.
    bound = 100e9 * 13.4 / 4 / (100 * 4.9) / 1e9
    last = next(e for e in entries if e["model"] == "100B" and e["target"] == 0.99)
    assert last["published_gbps"] < 0.99 * bound <= last["gbps"]


def test_grid_is_the_papers() -> None:
    printed = {round(round(float(x), 2), 1) for x in GRID_GBPS}
    published = {x for row in (*TABLE_4, *TABLE_5) for cells in row.gbps for x in cells}
    assert published <= printed


# ------------------------------------------------------------------------ measured runs


def test_the_measured_grid() -> None:
    """Within 12 % of the measured utilisation from 200 Mbit/s on, and 20 % at 50 Mbit/s."""
    entries = compare_measured(GRID)
    assert len(entries) == 16
    assert max(abs(e["error"]) for e in entries if e["gbps"] >= 0.2) <= 0.12
    assert max(abs(e["error"]) for e in entries if e["gbps"] < 0.2) <= 0.20


def test_intellect_1() -> None:
    """The published ratios of MFU, within 12 % as the grid; the ratio without exchanges is 1."""
    entries = compare_measured(INTELLECT_1)
    assert [round(e["published"], 3) for e in entries] == [0.956, 0.857, 0.836]
    assert max(abs(e["error"]) for e in entries) <= 0.12
    unlimited = INTELLECT_1[0].request.utilisation(np.array([1e9]), "step")
    assert unlimited[0] == pytest.approx(1.0)


def test_the_efficiency_is_what_was_measured() -> None:
    """Each point is gloo's share in the run with most samples among four replicas."""
    record = json.loads((RESULTS / "exchange" / "shaped-links.json").read_text())
    rows = [r for r in record["results"] if (r["replicas"], r["method"]) == (4, "gloo")]
    longest = {r["mbits"]: r for r in sorted(rows, key=lambda row: row["samples"])}
    shares = sorted((mbits / 1000, round(r["share"], 2)) for mbits, r in longest.items())
    assert EFFICIENCY == tuple(shares)
    for row in rows:
        ideal_s = row["size"] * 8 * 1.5 / (row["mbits"] * 1e6)
        assert row["share"] == pytest.approx(ideal_s / (row["ms"]["p50"] / 1e3), abs=1e-3)


@pytest.mark.parametrize(
    ("gbps", "share"), [(0.01, 0.87), (0.05, 0.87), (0.2, 0.91), (5.0, 0.94), (0.2**0.5, 0.925)]
)
def test_efficiency_between_and_beyond_the_measured_rates(gbps: float, share: float) -> None:
    """The last one is half-way from 0.2 to 1 by logarithm."""
    request = Request(1e9, 24, 0.1, efficiency=None)
    assert request.efficiency_at(np.array([gbps]))[0] == pytest.approx(share)
    given = Request(1e9, 24, 0.1, efficiency=share)
    link = np.array([gbps])
    assert request.utilisation(link, "step") == pytest.approx(given.utilisation(link, "step"))
    # The best that any schedule can do on the link itself.
    assert request.utilisation(link) == pytest.approx(Request(1e9, 24, 0.1).utilisation(link))


# ------------------------------------------------------------------------ node by node


def simulate_nodes(work: Work, schedule: Schedule, gbps: float, rtt_s: float) -> float:
    """Walk through every node of every step in plain floats; mean seconds of a late round."""
    rounds, counted = 480, 240
    num_layers = work.num_layers
    node_s = work.step_s / (3 * num_layers - 1)
    wire_s = work.num_params / num_layers * work.bits / (gbps * 1e9)
    now, free, begin = 0.0, 0.0, 0.0
    ready: dict[tuple[int, int], float] = {}
    for step in range(rounds * schedule.sync_every):
        if step == (rounds - counted) * schedule.sync_every:
            begin = now
        for layer in range(num_layers):
            now = max(now, ready.get((step, layer), 0.0)) + node_s
        sent = {
            layer
            for layers in schedule.sends.get(step % schedule.sync_every, [])
            for layer in layers
        }
        for layer in reversed(range(num_layers)):
            now += node_s if layer else 0.0  # with respect to activations
            now += node_s  # with respect to parameters
            if layer in sent:
                free = max(free, now) + wire_s
                arrival = free + work.one_ways * rtt_s / 2
                ready[step + 1 + schedule.delay, layer] = arrival
    return (now - begin) / counted


@pytest.mark.nightly("7 s; the first tier plans without the graph of a model")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    num_layers=st.integers(1, 7),
    fragment_layers=st.integers(1, 7),
    sync_every=st.integers(1, 6),
    delay=st.integers(0, 12),
    rtt_s=st.sampled_from([0.0, 0.3, 5.0]),
    step_of=st.randoms(use_true_random=False),
)
def test_layer_granularity_equals_the_graph(
    num_layers: int, fragment_layers: int, sync_every: int, delay: int, rtt_s: float, step_of
) -> None:
    work = Work(8e9, num_layers, 1.0, 10.0)
    sends: dict[int, list[list[int]]] = {}
    for layers in strided(num_layers, min(fragment_layers, num_layers)):
        sends.setdefault(step_of.randrange(sync_every), []).append(layers)
    schedule = Schedule(sync_every, sends, delay)
    gbps = np.array([3.0, 27.0, 81.0, 500.0])
    shares = utilisation(work, schedule, gbps, rtt_s=rtt_s)
    for value, share in zip(gbps, shares, strict=True):
        seconds = simulate_nodes(work, schedule, float(value), rtt_s)
        assert share == pytest.approx(sync_every / seconds, rel=1e-6)


# ------------------------------------------------------------------------ closed forms


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_blocking_step_waits_for_one_exchange(workers: int) -> None:
    request = Request(1e9, 24, 0.1, workers=workers, sync_every=30, wire="int8", rtt_ms=40)
    bits = (8 + 16 / 256) * 2 * (workers - 1) / workers
    assert request.bits_per_param == pytest.approx(bits)
    messages = 3 if workers == 2 else 4
    gbps = np.array([0.1, 1.0, 10.0])
    exchange_s = 1e9 * bits / (gbps * 1e9) + messages * 0.020
    expected = 3.0 / (3.0 + exchange_s)
    np.testing.assert_allclose(request.utilisation(gbps, "step"), expected, rtol=1e-12)


@pytest.mark.parametrize("method", ["delayed", "eager", "co2"])
@pytest.mark.parametrize("granularity", ["layer", "step"])
def test_a_round_late_is_bound_by_throughput_alone(method: str, granularity: str) -> None:
    """With one fragment a whole round may pass; only bytes that take longer than it are felt."""
    request = Request(1e9, 24, 0.1, method=method, sync_every=50, bits=10)
    bound = 1e9 * 10 / (50 * 0.1) / 1e9
    shares = request.utilisation(bound * np.array([0.25, 0.5, 1.0001, 4.0]), granularity)
    np.testing.assert_allclose(shares[2:], 1.0, rtol=1e-3)
    # Below it the link is never idle.
    np.testing.assert_allclose(shares[:2], [0.25, 0.5], rtol=0.02)


def test_streaming_hides_what_fits_into_its_delay() -> None:
    def share(delay: int) -> float:
        request = Request(
            1e9, 24, 0.1, method="streaming", sync_every=30, delay=delay, bits=8, rtt_ms=100
        )
        return float(request.utilisation(np.array([20.0]), "step")[0])

    # 0.4 s on the link and 0.15 s of latency: five and a half steps.
    assert share(6) == pytest.approx(1.0)
    assert share(5) == pytest.approx(3.0 / 3.05)
    assert share(0) == pytest.approx(3.0 / 3.55)


@pytest.mark.parametrize("method", ["dp", "diloco", "streaming", "eager"])
@pytest.mark.parametrize("granularity", ["layer", "step"])
def test_more_bandwidth_never_hurts(method: str, granularity: str) -> None:
    fragment = 3 if method in ("streaming", "eager") else 0
    request = Request(1e9, 24, 0.1, method=method, fragment_layers=fragment, wire="bf16")
    shares = request.utilisation(GRID_GBPS, granularity)
    assert np.all(np.diff(shares) >= -1e-9)
    assert 0 < shares[0] < 0.6 and shares[-1] <= 1.0


def test_data_parallel_in_steps_waits_for_all_layers() -> None:
    """With a slow link the first gradient leaves after L+2 nodes and the link is busy from then."""
    request = Request(1e9, 24, 0.1, method="dp", bits=32)
    seconds = 0.1 * (24 + 2) / 71 + 1e9 * 32 / 1e9
    assert request.utilisation(np.array([1.0]), "step")[0] == pytest.approx(0.1 / seconds)


def test_data_parallel_in_steps_sends_buckets_one_after_the_other() -> None:
    """Layers of 8 MB: one in the first bucket, four in the next, the last one alone."""
    request = Request(12e6, 6, 1.0, method="dp", bits=32, rtt_ms=200)
    # The first bucket leaves after 6 + 2 of 17 nodes; on a slow link all others follow it at once.
    seconds = 8 / 17 + 12e6 * 32 / 0.01e9 + 3 * 0.3
    assert request.utilisation(np.array([0.01]), "step")[0] == pytest.approx(1 / seconds)


def test_latency_can_make_a_target_unreachable() -> None:
    request = Request(1e9, 24, 0.1, sync_every=10, rtt_ms=1000)
    # A second of steps, and a second and a half of messages.
    needed = needed_gbps(request.utilisation(GRID_GBPS, "step"))
    assert set(needed.values()) == {None}


def test_settings_reach_their_target_and_are_the_smallest_tried() -> None:
    request = Request(7e9, 32, 2.0, rtt_ms=50)
    found = find_settings(request, gbps=1.0, target=0.9)
    assert {s.method for s in found} == {"diloco", "streaming", "eager"}
    for setting in found:
        assert setting.utilisation >= 0.9
        again = Request(
            7e9,
            32,
            2.0,
            method=setting.method,
            wire=setting.wire,
            sync_every=setting.sync_every,
            delay=setting.delay,
            fragment_layers=setting.fragment_layers,
            rtt_ms=50,
        )
        link = np.array([1.0])
        assert again.utilisation(link, "step")[0] == pytest.approx(setting.utilisation)
    by_wire = {s.wire: s.sync_every for s in found if s.method == "eager"}
    assert by_wire["int4"] <= by_wire["int8"] <= by_wire["bf16"] <= by_wire["fp32"]


def test_memory_counts_outer_state_and_payloads() -> None:
    """2.5 model sizes for int8 blocking: what benchmarks/against_torchft/compare.py measures."""
    size = 4e9
    assert Request(1e9, 24, 0.1).extra_memory_bytes == pytest.approx(2.5 * size, rel=0.01)
    eager = Request(1e9, 24, 0.1, method="eager", wire="int4").extra_memory_bytes
    assert eager == pytest.approx(2.5 * size, rel=0.02)
    assert Request(1e9, 24, 0.1, method="dp").extra_memory_bytes == 0
    # Each replica holds the payloads of all on a wire that is gathered.
    gathered = Request(1e9, 24, 0.1, workers=8, wire="sub4").extra_memory_bytes
    assert gathered == pytest.approx(1e9 * (8 + 8 * 0.2656 / 8), rel=0.001)
    # With many replicas, an own payload and a mean on int1r; but not under Eager.
    reduced = Request(1e9, 24, 0.1, workers=16, wire="sub8").extra_memory_bytes
    assert reduced == pytest.approx(1e9 * (8 + (0.1406 + 1.0625) / 8), rel=0.001)
    eager = Request(1e9, 24, 0.1, workers=16, wire="sub8", method="eager").extra_memory_bytes
    assert eager == pytest.approx(1e9 * (8 + 2 * 16 * 0.1406 / 8), rel=0.001)


# ---------------------------------------- Counts of parameters as people write them: 7B, 350M, 25e6


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7e9),
        ("1.5T", 1.5e12),
        ("350m", 350e6),
        ("10K", 1e4),
        ("25e6", 25e6),
        ("1.001k", 1001),
    ],
)
def test_counts_are_written_as_people_say_them(text: str, count: float) -> None:
    assert parse_count("--params", text) == count
    ended = run_cli("plan", "--params", text, "--layers", 24, "--step-time", 0.1, "--json")
    assert json.loads(ended.out)["request"]["params"] == count


@pytest.mark.parametrize("text", ["", "B", "7X", "7BB", "seven", "1e3K"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be a number such as 25e6, 350M, 7B or 1\.5T"):
        parse_count("--params", text)


@pytest.mark.parametrize("text", ["0", "-1B", "nan", "inf"])
def test_a_count_is_positive(text: str) -> None:
    with pytest.raises(ValueError, match="--params must be a positive number, got"):
        parse_count("--params", text)
