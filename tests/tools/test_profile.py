"""Figures of a trace: against Holistic Trace Analysis, by hand, and for every piece size."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import (
    GEMM,
    NCCL,
    Nsys,
    event,
    kernel,
    launch,
    random_events,
    write_kineto,
)

from diloco_comm_tools.profile import trace as intervals
from diloco_comm_tools.profile.report import make_report, read_traces
from diloco_comm_tools.profile.trace import TraceError

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12)


def report_of(*paths: Path) -> dict[str, Any]:
    return make_report(read_traces(paths))


# ------------------------------------------------------------------------ arithmetic


@settings(max_examples=200, deadline=None, derandomize=True)
@given(a=PAIRS, b=PAIRS)
def test_unions_and_intersections_count_microseconds(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    def covered(pairs: list[tuple[int, int]]) -> set[int]:
        return {us for begin, dur in pairs for us in range(begin, begin + dur)}

    def merged(pairs: list[tuple[int, int]]):
        values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
        return intervals.merge(values[:, 0], values[:, 0] + values[:, 1])

    assert intervals.length(merged(a)) == len(covered(a))
    assert intervals.intersection(merged(a), merged(b)) == len(covered(a) & covered(b))


# ------------------------------------------------------------------------ HTA


def hta_percentages(paths: dict[int, Path]) -> dict[int, float]:
    """Return the overlap of each rank by Holistic Trace Analysis."""
    hta_trace = pytest.importorskip("hta.common.trace")
    from hta.analyzers.communication_analysis import CommunicationAnalysis

    logging.getLogger("hta").setLevel(logging.ERROR)
    trace = hta_trace.Trace(trace_files={rank: str(path) for rank, path in paths.items()})
    trace.load_traces(use_multiprocessing=False)
    frame = CommunicationAnalysis.get_comm_comp_overlap(trace, visualize=False)
    return dict(zip(frame["rank"], frame["comp_comm_overlap_pctg"], strict=True))


@pytest.mark.nightly("up to 3 s each; they differ in the trace", but=["2-False", "5-True"])
@pytest.mark.parametrize("has_fractions", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_overlap_is_that_of_holistic_trace_analysis(
    tmp_path: Path, num_steps: int, has_fractions: bool
) -> None:
    paths = {}
    for rank, suffix in ((0, "json"), (1, "json.gz")):
        events = random_events(10 * num_steps + rank, num_steps, has_fractions)
        paths[rank] = write_kineto(tmp_path / f"trace{rank}.{suffix}", events, rank)
    theirs = hta_percentages(paths)
    ranks = report_of(*paths.values())["ranks"]
    assert {r["rank"]: round(100 * r["overlap"], 2) for r in ranks} == theirs
    assert all(5 < share < 95 for share in theirs.values())


# ------------------------------------------------------------------------ by hand


def test_traffic_is_split_by_group_and_by_range(tmp_path: Path) -> None:
    ours = {"Process Group Description": "diloco_comm/0/0"}
    inner = {"Process Group Description": "default_pg"}
    encode = "diloco_comm::encode fragment=0 round=0"
    events = [
        event(encode, "user_annotation", 0, 12),
        event("diloco_comm::wait fragment=0 round=0", "user_annotation", 60, 5),
        launch(1, 1),
        launch(2, 2),
        # Launched in our range, but by another thread.
        launch(3, 3, thread=2),
        launch(11, 4),
        kernel(NCCL, 100, 50, 7, 1, **ours),
        kernel(NCCL, 200, 30, 7, 3, **inner),
        # No description: the kernel is the library's, because a range of the library launched it.
        kernel(NCCL, 300, 10, 7, 4),
        kernel(GEMM, 120, 90, 20, 2),
    ]
    (rank,) = report_of(write_kineto(tmp_path / "a.json", events))["ranks"]
    assert (rank["communication_us"], rank["overlapped_us"], rank["exposed_us"]) == (90, 40, 50)
    assert (rank["ours"]["communication_us"], rank["ours"]["overlapped_us"]) == (60, 30)
    assert (rank["inner"]["communication_us"], rank["inner"]["overlapped_us"]) == (30, 10)
    assert rank["overlap"] == pytest.approx(4 / 9)
    assert rank["computation_us"] == 90
    assert rank["phases"] == {
        "encode": {"count": 1, "total_us": 12.0, "max_us": 12.0},
        "wait": {"count": 1, "total_us": 5.0, "max_us": 5.0},
    }


def test_without_a_gpu_exchanges_are_communication(tmp_path: Path) -> None:
    def ours(stage: str, round: int, ts: float, dur: float, more: str = "") -> dict[str, Any]:
        name = f"diloco_comm::{stage} fragment=1 round={round}{more}"
        return event(name, "user_annotation", ts, dur)

    events = [
        ours("encode", 0, 100, 10),
        # This exchange ended before the wait: 100 to 400.
        ours("wait", 0, 1000, 1),
        ours("exchange", 0, 1001, 0, " us=300 exposed_us=1"),
        # This exchange ends with its wait, 2000 to 2601, whatever the engine has measured.
        ours("encode", 1, 2000, 10),
        ours("wait", 1, 2500, 101),
        ours("exchange", 1, 2601, 0, " us=700 exposed_us=101"),
        event("gloo:all_reduce", "cpu_op", 3000, 50),
        event("aten::addmm", "cpu_op", 0, 150),
        event("aten::addmm", "cpu_op", 2100, 200),
        event("aten::add_", "cpu_op", 2200, 100),
    ]
    (rank,) = report_of(write_kineto(tmp_path / "a.json", events))["ranks"]
    assert rank["device"] == "cpu"
    assert rank["ours"]["communication_us"] == 300 + 601
    assert rank["ours"]["overlapped_us"] == 50 + 200
    assert rank["inner"]["communication_us"] == 50
    assert rank["phases"]["exchange"] == {"count": 2, "total_us": 1000.0, "max_us": 700.0}


def test_exchanges_over_gloo_are_ours_beside_kernels(tmp_path: Path) -> None:
    """The total stays that of the kernels, as in Holistic Trace Analysis."""
    events = [
        event("diloco_comm::encode fragment=0 round=0", "user_annotation", 100, 5),
        event(
            "diloco_comm::exchange fragment=0 round=0 us=40 exposed_us=0", "user_annotation", 200, 0
        ),
        kernel(GEMM, 110, 10, 7, 1),
        kernel(NCCL, 300, 10, 7, 2),
    ]
    (rank,) = report_of(write_kineto(tmp_path / "a.json", events))["ranks"]
    assert (rank["ours"]["communication_us"], rank["ours"]["overlapped_us"]) == (40, 10)
    assert (rank["communication_us"], rank["inner"]["communication_us"]) == (10, 10)
    (rank,) = report_of(
        write_kineto(
            tmp_path / "b.json",
            [
                *events,
                kernel(NCCL, 400, 7, 7, 3, **{"Process Group Description": "diloco_comm/1/0"}),
            ],
        )
    )["ranks"]
    assert (rank["ours"]["communication_us"], rank["communication_us"]) == (7, 17)


def test_slowest_rank_computes_longest(tmp_path: Path) -> None:
    paths = [
        write_kineto(
            tmp_path / f"rank{rank}.json", [kernel(GEMM, 0, dur, 7, 1), launch(0, 1)], rank=None
        )
        for rank, dur in ((0, 50), (3, 70), (5, 60))
    ]
    report = report_of(*reversed(paths))
    assert [rank["rank"] for rank in report["ranks"]] == [0, 3, 5]
    assert report["slowest_rank"] == 3
    assert report["ranks"][0]["overlap"] is None


def test_files_without_a_rank_get_free_numbers(tmp_path: Path) -> None:
    events = [kernel(GEMM, 0, 1, 7, 1)]
    paths = [write_kineto(tmp_path / f"{name}.json", events, None) for name in ("x", "rank0", "y")]
    ranks = {Path(r["file"]).stem: r["rank"] for r in report_of(*paths)["ranks"]}
    assert ranks == {"x": 1, "rank0": 0, "y": 2}
    with pytest.raises(TraceError, match=r"are both of rank 0"):
        report_of(paths[1], paths[1])


# ------------------------------------------------------------------------ reading


@pytest.mark.parametrize("indent", [None, 2])
def test_what_an_event_has_is_no_event(tmp_path: Path, indent: int | None) -> None:
    events = random_events(3, 1, True)
    plain = report_of(write_kineto(tmp_path / "a.json", events, 3, indent))
    nested = {"list": [{"a": 1}, {"b": [{}, {}]}], "text": 'é"}, {"ph": "X', "like": {"ph": "X"}}
    events.insert(5, event("nested", "python_function", 0, 1, **nested))
    (rank,) = report_of(write_kineto(tmp_path / "a.json", events, 3, indent))["ranks"]
    assert rank == plain["ranks"][0] and rank["rank"] == 3


def test_a_trace_without_events_is_whole(tmp_path: Path) -> None:
    (rank,) = report_of(write_kineto(tmp_path / "a.json", []))["ranks"]
    assert (rank["communication_us"], rank["overlap"], rank["span_us"]) == (0.0, None, 0.0)


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_every_truncation_is_found(tmp_path: Path, suffix: str) -> None:
    events = random_events(1, 1, False)[:4]
    whole = write_kineto(tmp_path / f"whole.{suffix}", events).read_bytes()
    path = tmp_path / f"cut.{suffix}"
    for size in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(TraceError, match=r"is empty|is truncated|is no Kineto trace"):
            report_of(path)


# ------------------------------------------------------------------------ Nsight Systems


def test_nsys_export_gives_the_known_overlap(tmp_path: Path) -> None:
    nsys = Nsys(tmp_path / "rank2.sqlite")
    thread = Nsys.PROCESS + 5
    nsys.add_range("diloco_comm", 0, None, thread, domain=3, kind=75)
    nsys.add_range("encode fragment=0 round=0", 1_000, 9_000, thread, domain=3)
    nsys.add_range("wait fragment=0 round=0", 20_000, 21_500, thread, domain=3, kind=60, by_id=True)
    # The same words in a foreign domain, and a range that never ended.
    nsys.add_range("encode fragment=0 round=9", 30_000, 40_000, thread, domain=4)
    nsys.add_range("encode fragment=0 round=8", 30_000, None, thread, domain=3)
    nsys.add_launch(2_000, 1, thread)
    nsys.add_launch(2_500, 2, thread + 1)
    nsys.add_kernel(NCCL, 10_000, 30_000, 1)
    nsys.add_kernel(NCCL, 50_000, 60_000, 2)
    nsys.add_kernel(GEMM, 25_000, 52_500, 3)
    nsys.add_kernel("Memset (Device)", 10_000, 20_000, 4)
    (rank,) = report_of(nsys.close())["ranks"]
    assert (rank["rank"], rank["device"]) == (2, "gpu")
    assert (rank["communication_us"], rank["overlapped_us"]) == (30.0, 7.5)
    assert (rank["exposed_us"], rank["overlap"]) == (22.5, 0.25)
    assert (rank["ours"]["communication_us"], rank["ours"]["overlapped_us"]) == (20.0, 5.0)
    assert (rank["inner"]["communication_us"], rank["inner"]["overlapped_us"]) == (10.0, 2.5)
    assert rank["phases"] == {
        "encode": {"count": 1, "total_us": 8.0, "max_us": 8.0},
        "wait": {"count": 1, "total_us": 1.5, "max_us": 1.5},
    }


def test_processes_of_one_export_are_ranks(tmp_path: Path) -> None:
    nsys = Nsys(tmp_path / "node.sqlite")
    for idx, dur_ns in enumerate((5_000, 9_000)):
        nsys.add_kernel(GEMM, 0, dur_ns, process=Nsys.PROCESS + (idx << 24))
    report = report_of(nsys.close())
    assert [rank["computation_us"] for rank in report["ranks"]] == [5.0, 9.0]
    assert report["slowest_rank"] == 1


def test_export_with_ranges_alone(tmp_path: Path) -> None:
    """A run without a GPU, or without --trace=cuda, has no kernels' table at all."""
    nsys = Nsys(tmp_path / "a.sqlite")
    name = "diloco_comm::outer_step fragment=2 round=1"
    nsys.add_range(name, 0, 4_000, Nsys.PROCESS)
    (rank,) = report_of(nsys.close())["ranks"]
    assert rank["overlap"] is None
    assert rank["phases"]["outer_step"]["total_us"] == 4.0
