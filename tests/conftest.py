"""Fixtures that give tests real processes; see workers.py and zygote.py, and tiers.py."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import devices
import programs
import pytest
import torch
from workers import Crew, Pool
from zygote import Zygote, look_up_names_in_files_only

pytest_plugins = ["pytester", "tiers"]

# Without a GPU Triton's kernels run in its interpreter. Triton looks when it is imported, which any
# test in this process may bring about.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts pytest in the background lets pytest ignore SIGINT, and so all programs of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes share the processors; a thread of OpenMP without work would spin on one of them.
torch.set_num_threads(1)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Collected tests stay, so the garbage collector need not look at it again and again.
gc.disable()

look_up_names_in_files_only()
# The programs that tests start look names up as they like, but wait for an answer only once.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.hookimpl(trylast=True)  # After -m has taken its tests away.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What takes longest comes first, so that it is not left to one worker at the end: files with
    # slow tests, then files of few tests, which run whole programs.
    has_slow = {item.path for item in items if item.get_closest_marker("slow")}
    num_tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in has_slow, num_tests[item.path]))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file to one process, and all files that need imported trainers to the same one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "trainers" if needs_trainers(config.rootpath / file) else file

    return Scheduling(config, log)


@cache
def needs_trainers(file: Path) -> bool:
    text = file.read_text()
    return "trainer_replicas" in text or "forked_trainers" in text


def pytest_runtest_setup(item: pytest.Item) -> None:
    programs.Popen.is_forking = item.get_closest_marker("fresh_interpreter") is None


def pytest_collection_finish() -> None:
    """Take what lives as long as the tests from the garbage collector, which they call often."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    yield process
    process.close()


@pytest.fixture(scope="module")
def forked_programs(zygote: Zygote) -> Iterator[None]:
    """Fork the Python programs that tests start by ``subprocess``; see programs.py."""
    with forking(zygote):
        yield


@contextmanager
def forking(zygote: Zygote) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs.Popen, "line", zygote.line, raising=False)
        patch.setattr(programs.Popen, "owner", os.getpid(), raising=False)
        patch.setattr(subprocess, "Popen", programs.Popen)
        yield


@pytest.fixture(scope="session")
def crew(zygote: Zygote) -> Iterator[Crew]:
    processes = Crew(zygote)
    yield processes
    processes.close()


@pytest.fixture
def workers(crew: Crew) -> Callable[[int], Pool]:
    """``workers(n)``: n persistent processes with a gloo default group of size n."""
    return crew.pool


@pytest.fixture
def fresh_workers(zygote: Zygote) -> Iterator[Callable[..., Pool]]:
    """``fresh_workers(n, init_group=True)``: processes of this test alone, which it may kill."""
    crews: list[Crew] = []

    def make(world: int, *, init_group: bool = True) -> Pool:
        crews.append(Crew(zygote))
        pool = crews[-1].pool(world, init_group=init_group)
        pool.workers = crews[-1].first(world)
        return pool

    yield make
    for processes in crews:
        processes.close()


@pytest.fixture(scope="module")
def replicas(zygote: Zygote) -> Iterator[Callable[[int], Pool]]:
    """Like ``workers``, of one module alone: a stand-in device stays in who has loaded it."""
    crew = Crew(zygote)
    yield crew.pool
    crew.close()


@pytest.fixture(scope="session")
def trainer_zygote() -> Iterator[Zygote]:
    """A process that has imported trainers, which takes several seconds."""
    from trainers import is_installed

    libraries = ("transformers.trainer", "accelerate", "lightning.pytorch", "peft")
    process = Zygote([library for library in libraries if is_installed(library)])
    yield process
    process.close()


@pytest.fixture
def forked_trainers(trainer_zygote: Zygote) -> Iterator[None]:
    """Like ``forked_programs``, with trainers imported."""
    with forking(trainer_zygote):
        yield


@pytest.fixture(scope="module")
def trainer_replicas(trainer_zygote: Zygote) -> Iterator[Callable[[int], Pool]]:
    """``trainer_replicas(n)``: processes without a process group that have imported trainers."""
    crew = Crew(trainer_zygote)
    yield lambda world: crew.pool(world, init_group=False)
    crew.close()


@pytest.fixture
def stand_in(request: pytest.FixtureRequest) -> str:
    """The library of the stand-in device, or "" where the test runs on a GPU."""
    on_gpu = request.node.get_closest_marker("gpu") is not None
    return "" if on_gpu else devices.build_stand_in()
