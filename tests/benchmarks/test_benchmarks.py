"""The benchmarks run, print what docs/measurements/benchmarks.md says, and their checks can fail.

No time is asserted here. Each benchmark runs once, as a user runs it, at a tiny size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmark_runs import ROOT, run_benchmark
from workers import Pool

from benchmarks.support import common
from diloco_comm.ops.wire import Layout, WireFormat

pytestmark = pytest.mark.usefixtures("forked_programs")

Run = Callable[..., tuple[list[str], dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a benchmark and return its lines and its results file."""

    def run_script(name: str, *arguments: str, status: int = 0) -> tuple[list[str], dict[str, Any]]:
        path = tmp_path / "results.json"
        done = run_benchmark(name, *arguments, "--json", path)
        assert done.returncode == status, done.stdout + done.stderr
        document = json.loads(path.read_text()) if path.exists() else {}
        return done.stdout.splitlines(), document

    return run_script


def assert_document(document: dict[str, Any], lines: list[str]) -> None:
    """The results file says when, what, where and how, and holds the full output."""
    for key in ("date", "commit", "machine", "versions", "command", "results"):
        assert key in document, key
    assert document["output"] == lines
    assert document["machine"]["cores"] >= 1
    assert os.uname().nodename not in json.dumps(document["machine"])
    assert document["command"].startswith("python -m benchmarks.")


def table(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines if line and not line.startswith("#")]


def test_exchange_prints_nccl_columns_and_checks_results(run: Run) -> None:
    options = ["-b", "64K", "-e", "128K", "-n", "2", "-w", "1", "-c", "1"]
    lines, document = run(
        "exchange.all_reduce", "-g", "2", *options, "--wire", "int8,int4,gloo_bf16"
    )
    assert_document(document, lines)
    header = next(line for line in lines if "algbw" in line)
    assert header[1:].split()[:9] == ("size count wire impl time algbw busbw wirebw #wrong".split())
    rows = table(lines)
    assert [row[0] for row in rows] == ["65536"] * 4 + ["131072"] * 4
    assert [row[2] for row in rows[:4]] == ["fp32", "int8", "int4", "bf16"]
    assert all(row[8] == "0" for row in rows)
    for row, result in zip(rows, document["results"], strict=True):
        seconds = float(row[4]) / 1e6
        assert float(row[5]) == pytest.approx(int(row[0]) / 1e9 / seconds, rel=0.05, abs=1e-3)
        # Two workers: 2(n-1)/n is one.
        assert float(row[6]) == pytest.approx(float(row[5]))
        assert result["identical"] and result["time_us"]["samples"] == 2


def test_exchange_on_an_emulated_link_says_so(run: Run) -> None:
    options = ["-b", "64K", "-e", "64K", "-n", "1", "-w", "0", "--emulate-link", "0.5,2"]
    lines, document = run("exchange.all_reduce", "-g", "2", *options)
    assert any("link: simulated" in line and "0.5,2" in line for line in lines)
    assert "simulated" in document["link"]
    assert any("vs fp32" in line for line in lines)
    impls = [row["impl"] for row in document["results"]]
    assert "gloo" not in impls


def test_outer_step_compares_with_the_flat_baseline(run: Run) -> None:
    options = ["-c", "1", "-n", "1", "-w", "1", "--width", "16"]
    lines, document = run("training.outer_step", "-g", "2", *options)
    assert_document(document, lines)
    assert "# out of bounds values: 0" in lines
    assert {"diloco", "flat", "blocked_ratio", "honesty"} <= document["results"].keys()


@pytest.mark.nightly("20 s of a benchmark in namespaces")
@pytest.mark.fresh_interpreter
def test_namespaces_carry_the_exchange_and_are_removed(run: Run) -> None:
    from benchmarks.exchange import netns

    reason = netns.missing()
    if reason:
        pytest.skip(reason)
    options = ["-b", "64K", "-e", "64K", "-n", "1", "-w", "0", "--wire", "int8"]
    with netns.Network(2, netns.parse_rate("1gbit")) as network:
        names = [*network.names, network.hub]
        assert all(name in namespaces() for name in names)
    assert not any(name in namespaces() for name in names)
    lines, _ = run("exchange.netns", "--world", "2", "--rate", "500mbit", "--", *options)
    assert any("simulated: 500 Mbit/s" in line for line in lines)
    assert [row[2] for row in table(lines)] == ["fp32", "int8"]


@pytest.fixture
def long_network() -> ModuleType:
    from benchmarks.exchange import netns

    if reason := netns.missing_tun():
        pytest.skip(reason)
    return netns


@pytest.mark.nightly("10 s of a benchmark in namespaces")
@pytest.mark.fresh_interpreter
@pytest.mark.usefixtures("long_network")
def test_an_exchange_over_a_long_link_takes_its_time(run: Run) -> None:
    link = ["--rate", "20mbit", "--round-trip", "40", "--loss", "0.01"]
    options = ["-b", "1M", "-n", "1", "-r", "1", "--wire", "fp32"]
    benchmark = ["--benchmark", "exchange.one_port", "--", "against-gloo", *options]
    lines, document = run("exchange.netns", *link, *benchmark)
    assert any("20 Mbit/s each way, round trip 40 ms, loss 1 %" in line for line in lines)
    # 1 MiB takes 419 ms at this rate.
    assert document["results"]["fp32 1048576"]["tcp"]["p10"] > 0.4


@pytest.mark.nightly("4 s of namespaces; benchmarks alone use them")
def test_a_long_link_delays_and_loses_packets(long_network: ModuleType) -> None:
    with long_network.LongNetwork(20.0, round_trip_ms=40.0, loss=0.2) as network:
        inside = [["ip", "netns", "exec", name, sys.executable, "-c"] for name in network.names]
        echo = subprocess.Popen([*inside[0], ECHO], stdout=subprocess.PIPE, text=True)
        with echo:
            assert echo.stdout is not None and echo.stdout.readline() == "ready\n"
            done = subprocess.run([*inside[1], ASK], capture_output=True, text=True, timeout=30)
            echo.kill()
    first_ms, num_answers = map(float, done.stdout.split())
    # About 128 of the 200 datagrams come back.
    assert first_ms >= 40.0 and 90 < num_answers < 165


@pytest.mark.nightly("20 s of a benchmark in namespaces")
@pytest.mark.fresh_interpreter
@pytest.mark.usefixtures("long_network")
def test_a_slow_link_fails_no_round(run: Run) -> None:
    slow = ["--rate", "2mbit", "--round-trip", "40", "--queue", "2"]
    rounds = ["--seconds", "4", "-b", "1M", "--suspect-after", "2"]
    benchmark = ["--benchmark", "exchange.one_port", "--", "rounds", *rounds]
    _, document = run("exchange.netns", *slow, *benchmark)
    # A round takes twice as long as the silence after which a replica counts as dead.
    assert document["results"]["errors"] == [] and document["results"]["longest_s"] > 4.0


ECHO = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    one.bind(("192.0.2.1", 5000))
    print("ready", flush=True)
    while True:
        one.sendto(*one.recvfrom(100))
"""
ASK = """
import socket, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    one.settimeout(2.0)
    begin, times = time.monotonic(), []
    for _ in range(200):
        one.sendto(bytes(50), ("192.0.2.1", 5000))
    try:
        while True:
            one.recv(100)
            times.append(time.monotonic() - begin)
    except TimeoutError:
        print(1e3 * times[0], len(times))
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def test_check_counts_wrong_elements_and_disagreeing_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from diloco_comm_tools.bench import methods

    exact = methods.exact_mean(2, 1000, torch.float32)
    bound = torch.full_like(exact, 0.05)
    result = exact.float()
    result[5] += 0.1
    result[7] = float("nan")
    monkeypatch.setattr(methods, "same_on_all_ranks", lambda tensor: True)
    assert methods.count_wrong(result, exact, bound) == 2
    monkeypatch.setattr(methods, "same_on_all_ranks", lambda tensor: False)
    assert methods.count_wrong(result, exact, bound) == 1000


def floor_of_an_all_reduce(rank: int, world: int, wire: str, count: int) -> tuple[int, bool]:
    sys.path.insert(0, str(ROOT))
    from benchmarks.exchange import loopback_floor

    floor = loopback_floor.Floor(wire)
    floor.prepare(count)
    floor.load(torch.ones(count))
    floor.sent.fill_(1 + rank)
    floor.run()
    # From each peer as many bytes as went to it, and the whole tensor is written.
    halves = floor.received.view(world - 1, -1) == torch.tensor(
        [[1 + peer] for peer in range(world) if peer != rank]
    )
    is_written = bool((floor.tensor.view(torch.uint8) == 1).all())
    return floor.phases * floor.sent.numel(), bool(halves.all()) and is_written


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_the_floor_moves_the_bytes_of_the_engine(
    wire: str, world: int, workers: Callable[[int], Pool]
) -> None:
    size = Layout.plan(5000, world, 1, WireFormat(wire, 256)).payload_bytes
    expected = size if world == 2 else 2 * (world - 1) * (size // world)
    result = workers(world).run(floor_of_an_all_reduce, wire, 5000)
    assert result == [(expected, True)] * world


def test_the_all_reduce_is_measured_beside_its_floor(run: Run) -> None:
    lines, document = run("exchange.loopback_floor", "-g", "2", "-e", "64K", "-n", "3")
    assert_document(document, lines)
    results = document["results"]
    assert results.keys() == {"int8", "int4"}
    for row, found in zip(table(lines), results.values(), strict=True):
        for cell, name in zip(row[1:4], ("ours", "floor", "gloo"), strict=True):
            assert float(cell) == pytest.approx(1e3 * found[name]["median"], abs=0.01)
            assert found[name]["samples"] == 3
        assert float(row[4]) == pytest.approx(found["over_floor"], abs=1e-3)
    # One all-reduce of gloo's stands beside all wires.
    assert results["int8"]["gloo"] == results["int4"]["gloo"]


@pytest.mark.nightly("4 s; the rates are no promise of the library")
def test_the_link_is_measured_beside_gloo(run: Run) -> None:
    lines, document = run(
        "exchange.one_port", "against-gloo", "-b", "64K", "-n", "3", "--wire", "fp32"
    )
    assert_document(document, lines)
    (found,) = document["results"].values()
    (row,) = table(lines)
    for cell, name in zip(row[2:4], ("gloo", "tcp"), strict=True):
        assert float(cell) == pytest.approx(1e3 * found[name]["median"], abs=0.01)
        assert found[name]["samples"] == 3
    assert float(row[4]) == pytest.approx(found["rate_against_gloo"], abs=1e-3)
    assert float(row[5]) == pytest.approx(found["processor_against_gloo"], abs=1e-3)
    assert found["processor_s_per_gb"] > 0


def test_the_link_against_gloo_is_taken_sample_by_sample() -> None:
    from benchmarks.exchange import one_port

    found = one_port.figures([2.0, 9.0, 6.0], [4.0, 9.0, 12.0], 8_000_000_000)
    assert found["rate_against_gloo"] == 2.0
    assert found["tcp_gb_per_s"] == pytest.approx(8 / 6)


@pytest.mark.nightly("3 s; the rates are no promise of the library")
def test_a_relay_is_measured_beside_plain_sockets(run: Run) -> None:
    lines, document = run("exchange.relay", "--pairs", "2", "-s", "0.2", "-n", "1")
    assert_document(document, lines)
    (found,) = document["results"].values()
    (row,) = table(lines)
    assert float(row[1]) == pytest.approx(found["gbit_per_s"], abs=0.01) and found["gbit_per_s"] > 0
    assert float(row[3]) == pytest.approx(found["rate_against_direct"], abs=1e-3)
    assert found["processor_s_per_gb"] > 0
    assert found["resident_bytes"] > found["grown_bytes"] >= 0


def test_the_pairs_of_a_relay_are_compared_over_all_samples() -> None:
    from benchmarks.exchange import relay

    found = relay.figures([[3, 1], [3, 5]], [[4, 4], [8, 8]], 1e-9, 6.0, 7)
    assert found["largest_over_smallest"] == 1.0 and found["gbit_per_s"] == pytest.approx(48)
    assert found["rate_against_direct"] == 0.5 and found["processor_s_per_gb"] == pytest.approx(
        0.5e9
    )


def test_figures_beside_the_floor_are_taken_sample_by_sample() -> None:
    from benchmarks.exchange import loopback_floor

    found = loopback_floor.figures([2.0, 9.0, 6.0], [1.0, 6.0, 2.0], [4.0, 9.0, 12.0])
    assert found["over_floor"] == 2.0
    assert (found["ours_vs_gloo"], found["floor_vs_gloo"]) == (2.0, 4.0)


def test_bars_of_the_floors_want_little_more_than_the_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks import bars
    from benchmarks.against_torchft import peer as torchft_peer

    def run_benchmark(name: str, *options: object) -> Any:
        if name == "exchange.loopback_floor":
            one = {"over_floor": 1.2, "ours_vs_gloo": 2.1, "floor_vs_gloo": 2.5}
            return {"int8": one, "int4": {**one, "over_floor": 1.3}}
        if name == "exchange.all_reduce":
            return [{"wire": "int8", "size": 1 << 20, "vs_reference": 1.5}]
        assert "plain,diloco_int8" in options and "--time-only" in options
        return {"diloco_int8": {"over_plain": 1.4 if "--lockstep" in options else 1.1}}

    monkeypatch.setattr(bars, "run_benchmark", run_benchmark)
    monkeypatch.setattr(torchft_peer, "missing", lambda: "torchft is not installed")
    found = [*bars.loopback(), *bars.against_others()]
    by_bar = [(f.bar, f.value, f.verdict.split(":")[0]) for f in found]
    assert by_bar[:4] == [(11, 1.2, "must"), (11, 1.3, "FAIL")] * 2
    assert by_bar[4:12] == [(11, 2.1, "info"), (11, 2.5, "info")] * 4
    assert by_bar[16] == (17, 1.1, "aim")
    skipped = (17, None, "skipped")
    assert by_bar[17:22] == [skipped, skipped, (17, 1.4, "info"), skipped, skipped]
    assert by_bar[22:] == [(16, None, "skipped")] * 2


def test_bars_of_the_wires_below_four_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import bars
    from benchmarks.exchange import netns

    def run_on_link(world: int, rate: str, *options: object) -> Any:
        assert (rate, options[options.index("--wire") + 1]) == ("100mbit", "int2r,int1r,sub8")
        wires = ("int2r", "int1r", "sub8")
        return [{"wire": w, "impl": "avx2", "size": 1, "vs_reference": 20.0} for w in wires]

    monkeypatch.setattr(bars, "run_on_link", run_on_link)
    monkeypatch.setattr(netns, "missing", lambda: None)
    found = [(f.bar, f.must, f.verdict) for f in bars.block_wires_on_link()]
    assert found[:3] == [(22, 13.0, "ok"), (22, 24.0, "FAIL"), (22, 100.0, "FAIL")]
    # The ideal of two phases is 32 bits over the wire's; three gathered payloads replace 1.5.
    ideals = [32 / 2.0625, 32 / 1.0625, 0.5 * 32 / 0.140625]
    assert [must for _, must, _ in found[3:]] == pytest.approx([0.85 * ideal for ideal in ideals])


def test_block_bars_have_a_figure_for_each_limit() -> None:
    from benchmarks import bars
    from benchmarks.operators import roofline

    threads = torch.get_num_threads()
    figures, seconds = roofline.measure_block_bars(1 << 18, rounds=7)
    torch.set_num_threads(threads)
    assert [figure["bar"] for figure in figures] == [19, 19, 20, 21, 21, 21]
    rows = [bars.Figure(**figure) for figure in figures]
    assert all(row.value is not None and 0 < row.value for row in rows)
    floor, times = seconds["floor read2"], seconds["encode int2r"]
    assert figures[0]["value"] == pytest.approx(100 * common.median_ratio(floor, times))


def test_bars_verdicts() -> None:
    from benchmarks import bars

    def verdict(value: float | None, must: float | None, aim: float | None, higher: bool) -> str:
        return bars.Figure(9, "x", value, must, aim, higher, "no root").verdict

    assert verdict(3.9, 3.6, 3.85, True) == "aim"
    assert verdict(3.7, 3.6, 3.85, True) == "must"
    assert verdict(3.5, 3.6, 3.85, True) == "FAIL"
    assert verdict(0.5, 0.55, 0.48, False) == "must"
    assert verdict(0.6, 0.55, 0.48, False) == "FAIL"
    assert verdict(8.2, 8.13, None, False) == "FAIL"
    assert verdict(8.1, 8.13, None, False) == "ok"
    assert verdict(0.9, None, 1.0, True) == "below aim"
    assert verdict(None, 3.6, 3.85, True) == "skipped: no root"
    assert verdict(float("nan"), 3.6, 3.85, True) == "FAIL"


@pytest.mark.parametrize(
    ("cpu", "isa", "name"),
    [
        ("AMD EPYC", "AVX2", "bars-amd-avx2.json"),
        ("Intel(R) Xeon(R) Platinum 8581C", "AVX512", "bars-intel-avx512.json"),
        ("aarch64", "DEFAULT", "bars-aarch-default.json"),
        ("", "NO AVX", "bars-other-no-avx.json"),
    ],
)
def test_bars_have_a_record_for_each_kind_of_processor(cpu: str, isa: str, name: str) -> None:
    from benchmarks import bars

    assert bars.record_name({"cpu": cpu, "isa": isa}) == name


def test_bars_cover_the_list() -> None:
    from benchmarks import bars

    assert sorted(bar for group in bars.GROUPS for bar in group) == [*range(1, 23)]
    assert bars.parse_only("9,10") == {9, 10}
    with pytest.raises(Exception, match="bars among"):
        bars.parse_only("99")


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("64K", 65536), ("1M", 1 << 20), ("0.5G", 1 << 29)]
)
def test_sizes(text: str, size: int) -> None:
    assert common.parse_size(text) == size
    assert common.parse_size(common.format_size(size)) == size
