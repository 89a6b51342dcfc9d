"""Decoupled training under faults without end: learners and syncers are killed and stopped.

Everything is checked from outside, by the tapes and by what the learners saw: ``make
soak-decoupled`` runs it for a quarter of an hour, the test here for seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from async_helpers import wait_until
from decoupled_processes import Play

SETTINGS = {"quorum": 2, "receipt": "carry", "wire": "int8", "wire_down": "int4"}
# This learner is left alone: its books, its steps and its memory are looked at.
STEADY = 0
KINDS = ("kill", "stop", "syncer")
# MiB and descriptors by which the steady learner may grow from the first third to the end.
_RSS_MIB, _DESCRIPTORS = 32, 4
# Milliseconds that a step of the long soak may take at most (99 of 100): training waits for nobody.
_STEP_MS = 1000.0


class Soak:
    """Faults drawn from a seed, one after the other, over ``num_learners`` learners.

    Attributes:
        events: How often each kind of fault happened.
        samples: Resident bytes and descriptors of the steady learner.
    """

    def __init__(self, play: Play, num_learners: int, seed: int, pause: float) -> None:
        self.play, self._rng, self._pause = play, random.Random(seed), pause
        self._numbers = range(num_learners)
        self.learners = {number: play.learner(number, pause=pause) for number in self._numbers}
        self.events: Counter[str] = Counter()
        self.samples: list[tuple[int, int]] = []

    def run(self, seconds: float, every_s: float) -> dict[str, Any]:
        """Let things happen for so long, end all, and check; return the figures."""
        play = self.play
        for number in self._numbers:
            play.wait_for(number, merged=2)
        steady = psutil.Process(self.learners[STEADY].pid)
        kinds = self._kinds()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._happen(next(kinds))
            self.samples.append((steady.memory_info().rss, steady.num_fds()))
            time.sleep(self._rng.uniform(0, every_s))
        merged = self._finish()
        return self._results(merged)

    def _kinds(self):
        """Yield every kind in a random order, again and again."""
        while True:
            yield from self._rng.sample(KINDS, len(KINDS))

    def _happen(self, kind: str) -> None:
        self.events[kind] += 1
        number = self._rng.choice([n for n in self._numbers if n != STEADY])
        before = self.play.steps(STEADY)
        if kind == "kill":
            self.learners[number].kill()
            self.learners[number].wait(60)
            self._pass(before)
            self.learners[number] = self.play.learner(number, pause=self._pause)
        elif kind == "stop":
            self.learners[number].send_signal(signal.SIGSTOP)
            self._pass(before)
            self.learners[number].send_signal(signal.SIGCONT)
        else:
            shard = self._rng.randrange(len(self.play.syncers))
            self.play.syncers[shard].kill()
            self.play.syncers[shard].wait(60)
            self._pass(before)
            self.play.start_syncer(shard)
        # After each fault the fragments of all syncers go on.
        self._wait_for_commits()

    def _pass(self, before: int) -> None:
        """Wait until the steady learner has taken steps, which nothing may keep it from."""
        more = self._rng.randrange(10, 60)
        wait_until(lambda: self.play.steps(STEADY) >= before + more, 60)

    def _wait_for_commits(self) -> None:
        before = self.play.newest(STEADY)
        wait_until(
            lambda: all(b > a for a, b in zip(before, self.play.newest(STEADY), strict=True)), 60
        )

    def _finish(self) -> dict[tuple[int, int], int]:
        """End the steady learner by SIGTERM, which waits for its last report; then the others."""
        steady = self.learners[STEADY]
        steady.send_signal(signal.SIGTERM)
        assert steady.wait(60) == 0
        self.play.end()
        return self.play.check_tapes(*self._numbers)

    def _results(self, merged: dict[tuple[int, int], int]) -> dict[str, Any]:
        play = self.play
        play.check_books(STEADY)
        rows = [row for row in play.rows(STEADY) if row[0] != "lost"]
        books = rows[-1][3]
        for p, book in enumerate(books):
            # Nothing is lost or merged twice: the tape has what the learner's books say.
            assert book["lost"] == 0 and book["applied"] == merged[STEADY, p], (p, book, merged)
        seconds = sorted(row[4] for row in rows[1:])
        p99 = seconds[round(0.99 * (len(seconds) - 1))]
        (rss, fds), (last_rss, last_fds) = self.samples[len(self.samples) // 3], self.samples[-1]
        assert last_rss <= rss + _RSS_MIB * 2**20, (rss, last_rss)
        assert last_fds <= fds + _DESCRIPTORS, (fds, last_fds)
        return {
            "events": dict(self.events),
            "steps": rows[-1][0],
            "steps_merged": [book["applied"] for book in books],
            "versions": play.newest(STEADY),
            "step_p50_ms": round(1e3 * seconds[len(seconds) // 2], 2),
            "step_p99_ms": round(1e3 * p99, 2),
            "rss_mib": [round(each / 2**20, 1) for each in (rss, last_rss)],
            "descriptors": [fds, last_fds],
        }


def soak(
    folder: Path, seconds: float, *, learners: int, seed: int, every_s: float, pause: float
) -> dict[str, Any]:
    """Run a soak over two syncers, and return its figures."""
    with Play(folder, SETTINGS, shards=2, lost_after=3.0) as play:
        return Soak(play, learners, seed, pause).run(seconds, every_s)


@pytest.mark.nightly("make nightly soaks for minutes, too; test_decoupled_faults has each fault")
def test_a_short_soak(tmp_path: Path) -> None:
    found = soak(tmp_path, 3.0, learners=3, seed=1, every_s=0.1, pause=0.005)
    assert found["events"] and min(found["versions"]) > 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learners", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(
            Path(folder),
            options.seconds,
            learners=options.learners,
            seed=options.seed,
            every_s=min(5.0, options.seconds / 20),
            pause=0.02,
        )
    json.dump({"seconds": options.seconds, "seed": options.seed, **found}, sys.stdout, indent=1)
    print()
    if found["step_p99_ms"] >= _STEP_MS:
        sys.exit(f"99 of 100 steps take up to {found['step_p99_ms']:g} ms, not below {_STEP_MS:g}")


if __name__ == "__main__":
    main()
