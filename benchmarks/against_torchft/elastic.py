"""Replicas that are killed and started again, under torchft and under ours: what it costs.

    PYTHONPATH=DIR python -m benchmarks.against_torchft.elastic

DIR holds torchft (compare.py says how to install it). Three replicas train the same model on the
same text over loopback; one after the other is killed and started again, then the lighthouse or the
registry is. Both sides go through the same script, in about two minutes each.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.against_torchft import elastic_report
from benchmarks.against_torchft import peer as torchft_peer
from benchmarks.against_torchft.elastic_replica import NUM_REPLICAS, Place
from benchmarks.support import common

SKIPPED = 77
SIDES = ("torchft", "diloco")
# Seconds in which an event must have its effect; then the script goes on without.
_PATIENCE_S = 60.0
# Seconds in which the first processes import their modules and commit.
_START_S = 120.0
_LOOK_S = 0.1


@dataclasses.dataclass
class Process:
    """One process of a replica, and what its log says."""

    replica: int
    started: float
    popen: subprocess.Popen[bytes]
    log: Path
    ended: float | None = None

    def lines(self) -> list[dict[str, Any]]:
        """Return the whole lines of its log; a killed process may leave a torn one."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def times(self, *kinds: str) -> list[float]:
        return [line["at"] for line in self.lines() if line["kind"] in kinds]


class Side:
    """All processes of one side.

    Attributes:
        events: Time, kind and replica of what was done to them.
        restarts: Of replicas whose process ended by itself.

    After ``--limit`` seconds nothing waits any more, so that the script comes to its end.
    """

    def __init__(self, name: str, args: argparse.Namespace, folder: Path) -> None:
        self.name, self._args, self._folder = name, args, folder
        self.processes: list[Process] = []
        self.events: list[tuple[float, str, int]] = []
        self.restarts = 0
        self._present: dict[int, Process] = {}
        self._port = common.free_port()
        self._deadline = time.monotonic() + args.limit
        self._coordinator: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """Kill all processes that still run."""
        running = [one.popen for one in self.processes]
        for popen in [*running, *([self._coordinator] if self._coordinator else [])]:
            _kill(popen)

    # -------------------------------------------------------------------------- coordinator

    def start_coordinator(self) -> None:
        milliseconds = str(round(1000 * self._args.suspect))
        if self.name == "torchft":
            module = "benchmarks.against_torchft.lighthouse"
            words = ["-m", module, str(self._port), milliseconds]
        else:
            words = ["-m", "diloco_comm_tools.cli", "registry"]
            words += ["--listen", f"127.0.0.1:{self._port}"]
            words += ["--journal", str(self._folder / "journal")]
        self._coordinator = self._popen(words, stdout=subprocess.PIPE)
        assert self._coordinator.stdout is not None
        if not self._coordinator.stdout.readline():
            raise RuntimeError(f"the coordinator of {self.name} does not start")

    def kill_coordinator(self) -> None:
        assert self._coordinator is not None
        _kill(self._coordinator)

    @property
    def _address(self) -> str:
        return f"{'http' if self.name == 'torchft' else 'tcp'}://127.0.0.1:{self._port}"

    # ----------------------------------------------------------------------------- replicas

    def start(self, replica: int) -> Process:
        args, number = self._args, len(self.processes)
        log = self._folder / f"process-{number}.jsonl"
        place = Place(
            side=self.name,
            replica=replica,
            process=number,
            coordinator=self._address,
            log=str(log),
            sync_every=args.sync_every,
            step_s=args.step,
            suspect_s=args.suspect,
            width=args.width,
            layers=args.layers,
        )
        words = ["-m", "benchmarks.against_torchft.elastic_replica"]
        words.append(json.dumps(dataclasses.asdict(place)))
        process = Process(replica, time.monotonic(), self._popen(words), log)
        self.processes.append(process)
        self._present[replica] = process
        return process

    def _popen(self, words: list[str], stdout: int | None = None) -> subprocess.Popen[bytes]:
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RUST_LOG": "error"}
        settings |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        with open(self._folder / "errors.txt", "a") as errors:
            return subprocess.Popen(
                [sys.executable, *words],
                env=os.environ | settings,
                stdout=stdout if stdout is not None else errors,
                stderr=errors,
                cwd=common.ROOT,
                start_new_session=True,
            )

    def note(self, kind: str, replica: int = -1) -> float:
        now = time.monotonic()
        self.events.append((now, kind, replica))
        return now

    def commits_of(self, replica: int) -> list[float]:
        return self._present[replica].times("commit")

    def wait(self, seconds: float) -> None:
        end = min(time.monotonic() + seconds, self._deadline)
        while time.monotonic() < end:
            self._look()
            time.sleep(_LOOK_S)

    def until(self, is_so: Callable[[], bool], seconds: float = _PATIENCE_S) -> bool:
        """Wait until something is so; return whether it came in time."""
        end = min(time.monotonic() + seconds, self._deadline)
        while not is_so():
            if time.monotonic() > end:
                return False
            self.wait(_LOOK_S)
        return True

    def _look(self) -> None:
        """Start replicas again whose processes have ended by themselves, as a launcher does."""
        for replica, process in list(self._present.items()):
            if process.ended is None and process.popen.poll() is not None:
                process.ended = time.monotonic()
                self.restarts += 1
                self.start(replica)

    def kill(self, replica: int) -> None:
        process = self._present.pop(replica)
        process.ended = time.monotonic()
        _kill(process.popen)

    def stop(self) -> None:
        """Let all processes measure their loss and end."""
        (self._folder / "stop").touch()
        processes = list(self._present.values())
        self._present = {}
        end = time.monotonic() + _PATIENCE_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.1, end - time.monotonic()))
            process.ended = time.monotonic()


def _kill(popen: subprocess.Popen[bytes]) -> None:
    if popen.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()


@contextlib.contextmanager
def opened(name: str, args: argparse.Namespace) -> Iterator[Side]:
    with tempfile.TemporaryDirectory(prefix=f"elastic-{name}-") as folder:
        side = Side(name, args, Path(folder))
        try:
            side.start_coordinator()
            yield side
        finally:
            side.close()


def churn(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Take one side through the script, and return its figures."""
    with opened(name, args) as side:
        for replica in range(NUM_REPLICAS):
            side.start(replica)
        if not side.until(lambda: _all_commit_after(side, 0.0), _START_S):
            errors = (side._folder / "errors.txt").read_text()
            raise RuntimeError(f"the replicas of {name} did not begin:\n{errors[-3000:]}")
        side.note("begin")
        side.wait(args.calm)
        for cycle in range(args.cycles):
            replica = (cycle + 1) % NUM_REPLICAS
            side.note("kill", replica)
            side.kill(replica)
            side.wait(args.pause)
            side.note("start", replica)
            process = side.start(replica)
            side.until(lambda process=process: bool(process.times("commit")))  # type: ignore[misc]
            side.wait(args.calm)
        side.note("coordinator down")
        side.kill_coordinator()
        side.wait(args.outage)
        side.start_coordinator()
        side.note("coordinator up")
        side.until(lambda: _all_commit_after(side, side.events[-1][0]))
        side.wait(args.calm)
        side.note("end")
        side.stop()
        return elastic_report.figures_of(side, args)


def _all_commit_after(side: Side, at: float) -> bool:
    return all((side.commits_of(replica) or [0.0])[-1] > at for replica in range(NUM_REPLICAS))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cycles", type=int, default=3, help="replicas that are killed and started again")
    add("--sync-every", type=int, default=20, help="inner steps a round (H)")
    add("--step", type=float, default=0.1, help="seconds that an inner step takes at least")
    add("--suspect", type=float, default=5.0, help="seconds of silence after which one is dead")
    add("--pause", type=float, default=3.0, help="seconds from a kill to the start of a process")
    add("--calm", type=float, default=10.0, help="seconds of training between events")
    add("--outage", type=float, default=6.0, help="seconds without lighthouse or registry")
    add("--limit", type=float, default=210.0, help="seconds for each side; then its script ends")
    add("--width", type=int, default=128, help="width of the model")
    add("--layers", type=int, default=2, help="layers of the model")
    add("--sides", type=lambda text: text.split(","), default=list(SIDES), help="a comma list")
    common.add_output(parser, default=common.RESULTS / "elastic" / "against-torchft.json")
    common.add_plot(parser, help="figure of both sides over time")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if unknown := set(args.sides) - set(SIDES):
        parser.error(f"--sides are among {', '.join(SIDES)}, not {', '.join(sorted(unknown))}")
    reason = torchft_peer.missing() if "torchft" in args.sides else None
    if reason:
        print(f"# skipped: {reason}")
        return SKIPPED
    script = {"H": args.sync_every, "step_s": args.step, "suspect_s": args.suspect}
    script |= {"cycles": args.cycles, "torchft": torchft_peer.VERSION}
    report = common.Report(
        "against_torchft.elastic", workers=NUM_REPLICAS, link="loopback", **script
    )
    results: dict[str, Any] = {}
    with common.stoppable():
        for name in args.sides:
            results[name] = churn(name, args)
    elastic_report.print_table(report, results)
    common.save(report, args.json, results)
    common.save_plot(args.plot, lambda path: elastic_report.plot(results, path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
