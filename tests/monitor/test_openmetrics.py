"""The metrics, read by the parser of the Prometheus client."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from test_status import World, snapshots

from benchmarks.support.simulated_host import BEGAN, SimulatedHost, key_of
from diloco_comm.monitor.openmetrics import OF_HOST, PREFIX, names, render
from diloco_comm.monitor.status import Snapshot, State, advance

ROOT = Path(__file__).resolve().parents[2]
Samples = dict[tuple[str, str, str], float]


def families(state: State) -> list[Metric]:
    return list(text_string_to_metric_families(render(state, "1.2.3")))


def samples(state: State) -> Samples:
    """The values by name, run and replica."""
    return {
        (one.name, one.labels.get("run", ""), one.labels.get("replica", "")): one.value
        for family in families(state)
        for one in family.samples
    }


def test_a_run_has_all_metrics_of_replicas_and_of_runs() -> None:
    world = World()
    world.figures[2] = {
        "norm": 0.5, "rate": 1e6, "round_trip_s": 0.02, "sent_bytes": 1 << 40, "changing_s": 1.5,
        "goodput": 0.9,
    }  # fmt: skip
    world.silent = {1}
    world.go(30)
    facts = {family.name: 7 for family in OF_HOST}
    state = advance(world.state, world.host.snapshot()._replace(facts=facts), world.now)
    found = samples(state)
    assert {name for name, _, _ in found if not name.endswith("_created")} == names()
    assert found["diloco_sent_bytes_total", "r", "2"] == 1 << 40
    assert found["diloco_sent_bytes_created", "r", "2"] == BEGAN
    assert found["diloco_pseudo_gradient_norm", "r", "2"] == 0.5
    assert ("diloco_pseudo_gradient_norm", "r", "0") not in found
    assert found["diloco_silence_seconds", "r", "0"] == 0.0
    assert found["diloco_members", "r", ""] == 3
    assert found["diloco_heard_replicas", "r", ""] == 2
    assert found["diloco_host_connections", "", ""] == 7
    assert {one.labels["version"] for one in families(state)[0].samples} == {"1.2.3"}


def test_names_follow_the_rules_of_units() -> None:
    for family in families(World().state):
        assert family.type in ("counter", "gauge", "info") and family.documentation.endswith(".")
        assert not family.unit or family.name.endswith(f"_{family.unit}")


def test_the_newest_process_of_a_replica_counts() -> None:
    now = 0.0
    host = SimulatedHost(lambda: now)
    host.post("r", key_of(1), rounds=50)
    state = advance(State(BEGAN, BEGAN), host.snapshot(), BEGAN)
    now = 6.0
    host.post("r", key_of(1, start=1), rounds=2, created=BEGAN + 5)
    found = samples(advance(state, host.snapshot(), BEGAN + 6))
    assert found["diloco_rounds_total", "r", "1"] == 2
    assert found["diloco_rounds_created", "r", "1"] == BEGAN + 5


def test_a_run_that_has_ended_keeps_its_figures_and_is_not_judged() -> None:
    world = World((0, 1), elastic=False)
    world.go(30)
    world.host.posts.clear()
    world.silent = {0, 1}
    world.go(20)
    found = samples(world.state)
    assert found["diloco_rounds_total", "r", "1"] == 3
    assert ("diloco_silence_seconds", "r", "1") not in found
    assert ("diloco_heard_replicas", "r", "") not in found
    assert found["diloco_host_runs", "", ""] == 0


def test_labels_are_escaped() -> None:
    host = SimulatedHost()
    run = 'a"b\\n\n\\{},\u2028\r\x00é'
    host.post(run, key_of(0))
    found = samples(advance(State(BEGAN, BEGAN), host.snapshot(), BEGAN))
    name = r"""a"b\\n\n\\{},\u2028\r\x00é"""
    assert found["diloco_rounds_total", name, "0"] == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(snapshots, min_size=1, max_size=3), st.floats() | st.integers())
def test_any_texts_give_metrics_that_can_be_read(found: list[Snapshot], fact: float) -> None:
    state, before = State(BEGAN, BEGAN), Samples()
    for second, snapshot in enumerate(found):
        state = advance(
            state, snapshot._replace(facts={"host_requests": abs(fact)}), BEGAN + second
        )
        now = samples(state)
        for key, value in now.items():
            name = key[0]
            if name.endswith("_total") and name != f"{PREFIX}host_requests_total" and key in before:
                began = (name.replace("_total", "_created"), *key[1:])
                assert value >= before[key] or now[began] != before[began]
        before = now


def test_the_dashboard_shows_metrics_that_are_served() -> None:
    """The dashboard has no metric that is not served; each metric of replicas is in a panel."""
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    text = " ".join(
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    )
    shown = set(re.findall(rf"\b{PREFIX}[a-z_]+", text))
    assert shown <= names()
    # A dashboard leaves out what another panel shows, or what is constant.
    assert names() - shown == {
        "diloco_build_info", "diloco_group_size", "diloco_view", "diloco_view_changes_total",
        "diloco_host_requests_total", "diloco_server_parameters", "diloco_server_duplicates_total",
        "diloco_server_apply_seconds_total", "diloco_pseudo_gradient_norm",
        "diloco_unshown_runs", "diloco_unshown_processes", "diloco_host_refused_posts_total",
    }  # fmt: skip


def test_a_member_that_was_never_heard_is_silent_since_the_host_began() -> None:
    world = World()
    world.silent = {0}
    world.go(5)
    found = samples(world.state)
    assert found["diloco_silence_seconds", "r", "0"] == 5
    assert ("diloco_rounds_total", "r", "0") not in found
