"""The page of ``--http``: processor time with 1,000 replicas, and the documentation's pictures.

    python -m benchmarks.elastic.page cost
    python -m benchmarks.elastic.page pictures docs/_static

The replicas of ``cost`` are simulated. The pictures are of a real run, which needs a Chromium: one
of three replicas is killed, started again, and another one is stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import signal
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.support import common
from benchmarks.support.browser import browser
from benchmarks.support.hosted import Hosted
from benchmarks.support.simulated_host import BEGAN, SimulatedHost, key_of, record_of
from diloco_comm.monitor import openmetrics
from diloco_comm.monitor.report import status
from diloco_comm.monitor.status import State, advance

RUN, SYNC_EVERY, STEP_S = "llama-1b", 20, 0.05


def cost(num_replicas: int) -> dict[str, float]:
    """Return the median processor time in milliseconds of each part of one look, of ten looks."""
    now = 0.0
    host, state = SimulatedHost(lambda: now), State(BEGAN, BEGAN)
    host.swap(RUN, record_of(1, list(range(num_replicas))))
    taken: dict[str, list[float]] = {"advance": [], "status.json": [], "metrics": []}
    sizes: dict[str, float] = {}
    for look in range(10):
        now = 5.0 * look
        for number in range(num_replicas):
            step = 100 * look + number % 7
            host.beat(RUN, key_of(number), phase="steps", inner_step=step)
            host.post(
                RUN, key_of(number), group_size=num_replicas, view=1, phase="steps", rounds=look,
                inner_step=step, sent_bytes=1 << 30, received_bytes=1 << 30, exchange_s=2.5 * look,
                waited_s=0.5 * look, changing_s=0.1, goodput=0.99, round_trip_s=0.08, rate=1.25e7,
                waits_for=(3,) * (number % 2), waits_s=6.0, norm=0.5, version="0.3.0",
            )  # fmt: skip
        snapshot = host.snapshot()
        times = [time.process_time()]
        state = advance(state, snapshot, BEGAN + now)
        times.append(time.process_time())
        text = json.dumps(status(state, "0.3.0"))
        times.append(time.process_time())
        metrics = openmetrics.render(state, "0.3.0")
        times.append(time.process_time())
        for one, begin, end in zip(taken.values(), times, times[1:], strict=False):
            one.append(1000 * (end - begin))
        sizes = {"status_bytes": len(text), "metrics_bytes": len(metrics)}
    return {name: round(statistics.median(found), 1) for name, found in taken.items()} | sizes


# --------------------------------------------------------------------------------- a real run


def train(registry: str, number: int) -> None:
    """Train a small model until the process is ended."""
    import torch

    from diloco_comm import DiLoCo, Elastic

    torch.set_num_threads(1)
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peers = Elastic(registry, run=RUN, replica=number, min_replicas=2, suspect_after=120)
    with DiLoCo(model, optimizer, sync_every=SYNC_EVERY, wire="int4", peers=peers):
        while True:
            model(torch.randn(8, 512)).square().mean().backward()
            time.sleep(STEP_S)
            optimizer.step()
            optimizer.zero_grad()


class Training:
    """A registry with a page, and replicas; each is a process.

    Attributes:
        page: Address of the page.
    """

    def __init__(self) -> None:
        words = ["registry", "--json", "--listen", "127.0.0.1:0", "--http", "0"]
        self._server = Hosted(words)
        announced = json.loads(self._server.wait())
        self._registry, self.page = announced["address"], announced["http"]
        self._replicas: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        words = common.benchmark_command("elastic.page", "replica", self._registry, number)
        self._replicas[number] = subprocess.Popen(words)

    def send(self, number: int, what: signal.Signals) -> None:
        self._replicas[number].send_signal(what)

    def wait_for(self, what: str, holds: Callable[[dict[str, Any]], object]) -> None:
        """Look at the status until something holds.

        Raises:
            TimeoutError: After five minutes.
        """
        print(f"waits for {what}", flush=True)
        end = time.monotonic() + 300
        while time.monotonic() < end:
            with urllib.request.urlopen(self.page + "status.json") as answer:
                runs = json.load(answer)["runs"]
            if runs and holds(runs[0]):
                return
            time.sleep(1)
        raise TimeoutError(f"no {what}: {json.dumps(runs)}")

    def close(self) -> None:
        for process in self._replicas.values():
            process.kill()
            process.wait()
        self._server.end()


def rounds_of(number: int) -> Callable[[dict[str, Any]], object]:
    return lambda run: run["view"] and run["rounds"] >= number


def has_event(text: str) -> Callable[[dict[str, Any]], object]:
    return lambda run: any(text in event["text"] for event in run["events"])


def save(path: Path, picture: bytes) -> None:
    """Write a PNG with few colours, which is a third as large."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(48)
    image.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


def pictures(folder: Path) -> None:
    """Let a replica be killed and return, stop another one, and write pictures of the page."""
    with contextlib.closing(Training()) as run, browser() as shown:
        for number in range(3):
            run.start(number)
        run.wait_for("rounds of all", rounds_of(10))
        run.send(1, signal.SIGKILL)
        run.wait_for("a view of two", has_event("replica 1 is left out"))
        run.start(1)
        run.wait_for("a view of three", has_event("replicas [1] join"))
        run.wait_for("rounds of all", rounds_of(40))
        run.send(2, signal.SIGSTOP)
        run.wait_for("words about replica 2", has_event("others wait for replica 2"))
        run.wait_for("its silence", has_event("replica 2 is silent"))
        shown.show(run.page, 1000, 1060)
        save(folder / "monitor-stopped.png", shown.picture())
        shown.show(run.page, 390, 760, is_dark=True)
        save(folder / "monitor-narrow.png", shown.picture())
        run.send(2, signal.SIGCONT)
        run.wait_for("its return", has_event("replica 2 is heard again"))
        assert not shown.problems, shown.problems


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("what", choices=("cost", "pictures", "replica"))
    parser.add_argument("rest", nargs="*", help="pictures: the folder")
    parser.add_argument("-n", "--replicas", type=int, default=1000)
    common.add_output(parser)
    given = parser.parse_args()
    if given.what == "cost":
        report, found = common.Report("elastic.page", workers=given.replicas), cost(given.replicas)
        report.print(json.dumps(found))
        common.save(report, given.json, found)
    elif given.what == "pictures":
        pictures(Path(given.rest[0]))
    else:
        train(given.rest[0], int(given.rest[1]))


if __name__ == "__main__":
    main()
