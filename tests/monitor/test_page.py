"""The page in a headless Chromium: colours, narrow windows, hostile texts, a server away."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from test_http_server import HERE

from benchmarks.support.browser import Browser, browser, find
from benchmarks.support.simulated_host import SimulatedHost, key_of, record_of
from diloco_comm.monitor.http_server import HttpServer, Monitor
from diloco_comm.monitor.report import MAX_SHOWN

pytestmark = pytest.mark.skipif(find() is None, reason="there is no Chromium")

HOSTILE = "<img/src=x/onerror=alert(1)>" + "w" * 60


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


def stopped_run() -> SimulatedHost:
    """Replica 2 has said nothing for 20 seconds, and the others wait for it."""
    now = 0.0
    host = SimulatedHost(lambda: now)
    host.swap(HOSTILE, record_of(1, [0, 1, 2]))
    for number in range(3):
        host.beat(HOSTILE, key_of(number), phase="<b>exchange</b>")
        host.post(HOSTILE, key_of(number), waits_for=(2,) * (number < 2), waits_s=9.0)
    now = 20.0
    for number in range(2):
        host.beat(HOSTILE, key_of(number), phase="<b>exchange</b>")
        host.post(HOSTILE, key_of(number), waits_for=(2,), waits_s=9.0, rate=1e6)
    return host


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_names_the_replica_in_each_window(
    chromium: Browser, width: int, is_dark: bool
) -> None:
    server = HttpServer(HERE, Monitor(stopped_run().snapshot))
    chromium.problems.clear()
    with server.running():
        chromium.show(server.address, width, 900, is_dark=is_dark)
        text = chromium.value("document.body.innerText")
        assert "replica 2: silent for 20 s" in text
        assert "the others wait for replica 2, since 9 s" in text
        assert HOSTILE in text and "<b>exchange</b>" in text
        assert chromium.value("document.images.length") == 0
        assert chromium.value("document.documentElement.scrollWidth") == width
        back = chromium.value("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, back[4:-1].split(","))) < 200) == is_dark
        # Rows stay rows for screen readers, in cards too.
        assert chromium.value("document.querySelectorAll('[role=cell]').length") > 20
        assert chromium.problems == []
    chromium.wait_for("document.body.classList.contains('away')")
    assert "No answer from the server" in chromium.value("document.body.innerText")


def test_a_page_without_runs_says_so(chromium: Browser) -> None:
    server = HttpServer(HERE, Monitor(SimulatedHost().snapshot))
    with server.running():
        chromium.show(server.address, 800, 600)
        assert "No run has sent a message" in chromium.value("document.body.innerText")


def test_the_page_says_how_many_runs_it_leaves_out(chromium: Browser) -> None:
    host = SimulatedHost()
    for number in range(MAX_SHOWN + 2):
        host.post(f"run-{number}", key_of(0))
    server = HttpServer(HERE, Monitor(host.snapshot))
    with server.running():
        chromium.show(server.address, 800, 600)
        chromium.wait_for("document.body.innerText.includes('2 more runs are in /metrics.')")


def test_the_events_and_rounds_are_shown(chromium: Browser) -> None:
    begin = time.monotonic()
    host = SimulatedHost(lambda: time.monotonic() - begin)
    host.swap("r", record_of(1, [0, 1]))
    host.post("r", key_of(0), rounds=4)
    server = HttpServer(HERE, Monitor(host.snapshot))
    with server.running():
        chromium.show(server.address, 800, 600)
        host.swap("r", record_of(2, [0], left_out=(1,)))
        chromium.wait_for("document.body.innerText.includes('view 2: replica 1 is left out')")
        chromium.wait_for("document.querySelector('polyline').getAttribute('points')")
