"""Death, restarts and silence of servers and workers, each in its own process."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from async_helpers import status, tcp, wait_until
from async_processes import Child, Scene, read_log

SIZE = 300_001


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with Scene(tmp_path, SIZE) as one:
        yield one


@pytest.mark.nightly("6 s; test_async_lost has a stopped worker")
def test_a_stopped_worker_holds_nobody_up_and_goes_on(scene: Scene) -> None:
    sleeper, steady = scene.worker(0, 40), scene.worker(1, 10_000)
    wait_until(lambda: scene.told(0) > 3 and scene.told(1) > 3, 60)
    sleeper.send_signal(signal.SIGSTOP)
    before = scene.told(1)
    wait_until(lambda: scene.told(1) > before + 20, 60)
    sleeper.send_signal(signal.SIGCONT)
    assert sleeper.wait(60) == 0
    steady.kill()
    steady.wait()
    scene.finish()


# A window of an hour closes only because no live worker trains: the dead are known to be dead.
SERVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dylu": {"dylu": True, "sync_every": 5},
    "grace": {"grace": 3600.0},
}


@pytest.mark.nightly("8 s; test_async_lost has every end of a worker once")
@pytest.mark.parametrize("name", SERVERS)
def test_joining_and_leaving_at_random_leaks_nothing(name: str, tmp_path: Path) -> None:
    with Scene(tmp_path, SIZE, **SERVERS[name]) as scene:
        soak(scene, seconds=4.0, num_workers=4, num_connects=300)


def soak(scene: Scene, seconds: float, num_workers: int, num_connects: int) -> dict[str, object]:
    """Start, kill and end workers at random beside one that stays, and knock on the port.

    Returns:
        What was seen: updates, kills, and the server's memory and descriptors.
    """
    rng = random.Random(5)
    server = psutil.Process(scene.server.pid)
    steady = scene.worker(0, 1_000_000)
    steady.stdout.readline()
    crowd: dict[int, Child] = {}
    kills = joins = connects = 0
    first: tuple[int, int] | None = None
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        index = rng.randrange(1, num_workers)
        old = crowd.pop(index, None)
        if old is None:
            crowd[index] = scene.worker(index, 1_000_000, pause=rng.uniform(0, 0.05))
            joins += 1
        else:
            old.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
            old.wait()
            kills += 1
        while connects < num_connects * (time.monotonic() - begin) / seconds:
            with tcp(scene.address) as connection:
                connection.sendall(rng.randbytes(rng.randrange(40)))
            connects += 1
        time.sleep(rng.uniform(0, 0.5))
        if first is None and time.monotonic() - begin > seconds / 2:
            first = (server.memory_info().rss, server.num_fds())
    for process in (*crowd.values(), steady):
        process.kill()
        process.wait()
    before = scene.told(0)
    assert first is not None and before > 5
    # Descriptors of dead peers are closed; the process is as large as it was half-way.
    wait_until(lambda: server.num_fds() <= first[1] + 2, 60)
    assert server.memory_info().rss < first[0] + 32 * 2**20
    # The last worker is alone: whole rounds, and no waiting.
    last = scene.worker(num_workers, 3)
    assert last.wait(60) == 0
    steps = [row[3] for row in read_log(scene.logs[num_workers])]
    assert steps == [scene.options["sync_every"]] * 3
    report = status(scene.address)
    seen = {
        "seconds": seconds,
        "joins": joins,
        "kills": kills,
        "connects": connects,
        "refused": report["refused"],
        "rss_mib_half_way": round(first[0] / 2**20, 1),
        "rss_mib_at_the_end": round(server.memory_info().rss / 2**20, 1),
        "descriptors_half_way": first[1],
        "descriptors_at_the_end": server.num_fds(),
    }
    header = scene.finish()
    return {**seen, "updates": header["model"]["version"]}


def long_soak(folder: Path, seconds: float = 180.0) -> None:
    """As the tests above, for minutes instead of seconds: ``make soak-async``."""
    results: dict[str, object] = {}
    crowd = "8 workers joining and leaving, 10,000 connects"
    runs: dict[str, tuple[str, Callable[[Scene], object]]] = {
        **{
            f"{crowd}, {name}": (name, lambda scene: soak(scene, seconds, 8, 10_000))
            for name in SERVERS
        },
        "a worker stopped for a minute": ("plain", stopped_for_a_minute),
    }
    for title, (name, run) in runs.items():
        place = folder / str(len(results))
        place.mkdir(parents=True)
        with Scene(place, SIZE, **SERVERS[name]) as scene:
            results[title] = run(scene)
    print(json.dumps(results, indent=1))


def stopped_for_a_minute(scene: Scene) -> dict[str, object]:
    """SIGSTOP a worker for a minute at an arbitrary moment, beside five other workers."""
    sleeper = scene.worker(0, 100_000)
    others = [scene.worker(index, 100_000, pause=0.05) for index in range(1, 4)]
    wait_until(lambda: scene.told(0) > 3, 60)
    sleeper.send_signal(signal.SIGSTOP)
    told, others_told = scene.told(0), sum(scene.told(i) for i in range(1, 4))
    time.sleep(60)
    meanwhile = sum(scene.told(i) for i in range(1, 4)) - others_told
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: scene.told(0) > told + 5, 60)
    for process in (sleeper, *others):
        process.kill()
        process.wait()
    header = scene.finish()
    return {
        "updates of the others meanwhile": meanwhile,
        "updates": header["model"]["version"],
    }


if __name__ == "__main__":
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        long_soak(Path(place), float(sys.argv[1]) if len(sys.argv) > 1 else 180.0)
