"""``diloco-comm plan decoupled``: numbers by hand, against the virtual clock, refusals."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import pytest
from cli_helpers import check_arguments, check_documented, check_misuse, check_schema, run_cli
from decoupled_helpers import Setting, counting

from diloco_comm.asynchronous.decoupled.syncer import Call, Commit, QuorumRule
from diloco_comm.asynchronous.decoupled.virtual import DecoupledRun, Link
from diloco_comm_tools.plan.decoupled import DecoupledRequest, make_report

BY_HAND = [
    "--params", "1e6", "--step-time", 1, "--replicas", 4, "--sync-every", 20, "--fragments", 10,
    "--wire", "fp32", "--delay", 3, "--rtt-ms", 200,
]  # fmt: skip
SCHEMA: dict[str, Any] = {
    "request": {
        "params": float,
        "step_time": float,
        "learners": int,
        "sync_every": int,
        "fragments": int,
        "wire": str,
        "wire_down": str,
        "rtt_ms": float,
        "quorum": int,
        "gamma": float,
        "delay": int,
    },
    "report_bytes": float,
    "commit_bytes": float,
    "call_every_s": float,
    "learner_gbps": {"up": float, "down": float},
    "syncer_gbps": {"in": float, "out": float},
    "learner_bytes_per_day": {"up": float, "down": float},
    "in_time_gbps": (float, None),
    "link": (
        {
            "gbps": float,
            "load": float,
            "quorum_s": float,
            "sync_s": float,
            "slack_s": float,
            "window_s": float,
            "steps_late": float,
        },
        None,
    ),
    "syncer": {"gbps": (float, None), "load": (float, None), "syncers": (int, None)},
    "serve": [str],
    "program": [str],
}


def planned(*arguments: object) -> dict[str, Any]:
    ended = run_cli("plan", "decoupled", *arguments, "--json")
    assert (ended.status, ended.err) == (0, "")
    report = json.loads(ended.out)
    check_schema(report["decoupled"], SCHEMA)
    return report["decoupled"]


def test_numbers_by_hand() -> None:
    """400 kB a fragment every 2 s; on 400 kB/s one second up and one second down."""
    plan = planned(*BY_HAND, "--gbps", 0.0032)
    assert (plan["report_bytes"], plan["commit_bytes"], plan["call_every_s"]) == (4e5, 4e5, 2.0)
    assert plan["learner_gbps"] == pytest.approx({"up": 0.0016, "down": 0.0016})
    assert plan["syncer_gbps"] == pytest.approx({"in": 0.0064, "out": 0.0064})
    assert plan["learner_bytes_per_day"]["up"] == pytest.approx(2e5 * 86400)
    # Three steps, less a quarter of one and one and a half round trips, for 800 kB.
    assert plan["in_time_gbps"] == pytest.approx(8e5 / 2.45 * 8 / 1e9)
    link = plan["link"]
    assert link["load"] == pytest.approx(0.5)
    assert (link["quorum_s"], link["sync_s"]) == (pytest.approx(1.45), pytest.approx(1.1))
    assert (link["slack_s"], link["window_s"]) == (pytest.approx(0.45), pytest.approx(0.225))
    assert link["steps_late"] == pytest.approx(1.45 + 0.225 + 1.1)
    keys = [*SCHEMA, *SCHEMA["request"], *SCHEMA["link"][0], *SCHEMA["syncer"]]
    check_documented(keys, "reference/plan.md")


def test_each_wire_counts_in_its_direction() -> None:
    plan = planned(*BY_HAND, "--wire", "int4", "--wire-down", "int8")
    assert plan["report_bytes"] == 1e5 * 4.0625 / 8 and plan["commit_bytes"] == 1e5 * 8.0625 / 8


def test_no_link_is_enough_without_an_overlap() -> None:
    assert planned(*BY_HAND, "--delay", 0)["in_time_gbps"] is None
    shown = run_cli("plan", "decoupled", *BY_HAND, "--delay", 0).out
    assert "No link brings a fragment back within 0 inner steps" in shown


def test_tables() -> None:
    shown = run_cli("plan", "decoupled", *BY_HAND, "--gbps", 0.0032).out
    assert "4 learners, H=20, 10 fragments, fp32 up, fp32 down, a call every 2 s" in shown
    assert "slack 0.45 s. The grace window lasts 0.225 s" in shown
    slow = run_cli("plan", "decoupled", *BY_HAND, "--gbps", 0.001).out
    assert "0.001 Gbit/s are too few: the busier direction needs 160% of them" in slow


SYNCER = [*BY_HAND, "--gbps", 0.0032]


@pytest.mark.parametrize(
    ("gbps", "load", "syncers", "words"),
    [
        (0.0064, 1.0, 1, None),
        # Half of ten fragments each.
        (0.0032, 2.0, 2, "4 learners needs 200% of its 0.0032 Gbit/s. Take 2 syncers"),
        # Three syncers would have 4, 3 and 3 fragments: the first one needs 0.4 of the whole.
        (0.0064 / 2.9, 2.9, 4, "Take 4 syncers on links of their own, or raise --sync-every."),
        (0.0005, 12.8, None, "Not even one syncer for each fragment is enough: raise"),
    ],
)
def test_a_syncer_that_is_the_bottleneck(
    gbps: float, load: float, syncers: int | None, words: str | None
) -> None:
    syncer = planned(*SYNCER, "--syncer-gbps", gbps)["syncer"]
    assert syncer == {"gbps": gbps, "load": pytest.approx(load), "syncers": syncers}
    shown = run_cli("plan", "decoupled", *SYNCER, "--syncer-gbps", gbps).out
    assert ("The syncer is the bottleneck" in shown) == (words is not None)
    assert words is None or words in shown


def test_the_link_of_a_syncer_is_as_wide_as_a_learners() -> None:
    assert planned(*SYNCER)["syncer"] == planned(*SYNCER, "--syncer-gbps", 0.0032)["syncer"]
    assert planned(*BY_HAND)["syncer"] == {"gbps": None, "load": None, "syncers": 1}


@pytest.mark.parametrize("syncers", [1, 2])
def test_the_lines_to_paste(syncers: int) -> None:
    own = [*BY_HAND, "--gbps", 0.0064 / syncers, "--tokens-per-step", 4096]
    plan = planned(*own)
    assert len(plan["serve"]) == syncers
    for i, line in enumerate(plan["serve"]):
        arguments = shlex.split(line)[1:]
        check_arguments(arguments, "serve")
        given = dict(zip(arguments[2::2], arguments[3::2], strict=True))
        assert given["--sync-every"] == "20" and given["--delay"] == "3"
        assert (given["--wire"], given["--wire-down"]) == ("fp32", "fp32")
        assert given.get("--shard") == (f"{i}/{syncers}" if syncers > 1 else None)
    learner = mock.Mock()
    imported, line = plan["program"]
    names: dict[str, Any] = {"model": None, "optimizer": None}
    exec(imported, names)
    exec(line, names | {"DecoupledDiLoCo": learner})
    hosts = ["HOST"] if syncers == 1 else ["HOST0", "HOST1"]
    servers = [f"tcp://{host}:29500" for host in hosts]
    server = servers[0] if syncers == 1 else servers
    learner.assert_called_once_with(None, None, server=server, tokens=4096, keys="keys")
    shown = run_cli("plan", "decoupled", *own).out
    assert all(f"    {line}\n" in shown for line in [*plan["serve"], *plan["program"]])


def test_the_model_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"n_embd": 24, "n_layer": 3, "vocab_size": 50, "n_positions": 16}
    path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    plan = planned("--model-config", path, "--step-time", 1, "--fragments", 3)
    assert plan["request"]["params"] == 23_304


def times_of_rounds(run: DecoupledRun, seconds: float) -> list[float]:
    """Return the virtual seconds from each call to its commit."""
    advance, called, taken = run.syncer.advance, {}, []

    def noted(now: float) -> list[Call | Commit]:
        messages = advance(now)
        for message in messages:
            if isinstance(message, Call):
                called[message.fragment] = now
            else:
                taken.append(now - called[message.fragment])
        return messages

    run.syncer.advance = noted  # type: ignore[method-assign]
    run.until(seconds=seconds)
    return taken


@pytest.mark.parametrize("quorum", [1, 2, 4])
def test_time_to_the_quorum_against_the_virtual_clock(quorum: int) -> None:
    """Learners whose steps drift against each other, and no window: a merge at the quorum."""
    size, rule = 6000, QuorumRule(quorum=quorum, gamma=0.0)
    models, train = counting(4, sizes=(size,))
    bytes_per_s, rtt_s = 4.0 * size / 0.3, 0.2
    run = Setting(rule=rule, sync_every=6).run(
        models,
        train,
        seconds=[0.97, 0.99, 1.01, 1.03],
        link=Link(latency_s=rtt_s / 2, bytes_per_s=bytes_per_s),
    )
    taken = times_of_rounds(run, 400.0)
    request = DecoupledRequest(size, 1.0, 4, 6, 1, "fp32", "fp32", rule, 1e3 * rtt_s)
    expected = request.quorum_s(bytes_per_s * 8 / 1e9)
    assert len(taken) > 50
    # The call's own learner needs no answer to its step: the plan is a round trip above it at most.
    assert expected - rtt_s - 0.1 < fmean(taken) < expected + 0.1


def test_more_learners_and_fragments() -> None:
    """The syncer's traffic grows with M; a learner's does not depend on P."""
    one = DecoupledRequest(1e9, 1.0, 2, 24, 24)
    few = make_report(replace(one, fragments=1), None)["decoupled"]
    many = make_report(replace(one, learners=16), None)["decoupled"]
    two = make_report(one, None)["decoupled"]
    assert few["learner_gbps"]["down"] == pytest.approx(two["learner_gbps"]["down"])
    assert many["syncer_gbps"]["out"] == pytest.approx(8 * two["syncer_gbps"]["out"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "decoupled training needs --params and --step-time"),
        ([*BY_HAND, "--quorum", 5], "--quorum must be at most --replicas 4, got 5"),
        ([*BY_HAND, "--quorum", 0], "--quorum must be an integer of at least 1, got 0"),
        ([*BY_HAND, "--gamma", 2], "--gamma must lie in [0, 1], got 2.0"),
        ([*BY_HAND, "--delay", -1], "--delay must not be negative, got -1"),
        ([*BY_HAND, "--fragments", 0], "--fragments must be at least 1, got 0"),
        ([*BY_HAND, "--replicas", 0], "--replicas must be at least 1, got 0"),
        ([*BY_HAND, "--step-time", 0], "--step-time must be a positive number, got 0"),
        ([*BY_HAND, "--wire-down", "int5"], "unknown wire 'int5'"),
        ([*BY_HAND, "--write", "x.json"], "No such option: --write"),
        ([*BY_HAND, "--syncer-gbps", 0], "--syncer-gbps must be a positive number, got 0"),
        ([*BY_HAND, "--tokens-per-step", 0], "--tokens-per-step must be at least 1, got 0"),
        ([*BY_HAND, "--gbps", 0], "--gbps must be a positive number, got 0"),
        ([*BY_HAND, "--rtt-ms", -1], "--rtt-ms must be a number of at least 0, got -1"),
        ([*BY_HAND, "--sync-every", 2000000], "--sync-every must be at most 1000000"),
    ],
)
def test_misuse(arguments: list[object], sentence: str) -> None:
    check_misuse(run_cli("plan", "decoupled", *arguments), sentence)
