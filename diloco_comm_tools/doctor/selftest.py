"""The self-test: two processes on this machine exchange, step, and compare their results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

# The replicas import this module as their program.
MODULE = "diloco_comm_tools.doctor.selftest"
WORLD = 2
NUM_ELEMENTS = 100_003
WIRES = ("fp32", "int8", "int4")


def run_self_test(limit_s: float) -> dict[str, Any]:
    """Start two replicas and return whether they agree; a failure of a replica is no exception.

    Args:
        limit_s: Seconds after which replicas that still run are killed.

    Returns:
        ``ok``, ``seconds``, ``error`` (one sentence, or None), and ``in_time``: False after the
        limit, which says nothing about the installation.
    """
    from diloco_comm.base.store_host import open_store

    begin = time.monotonic()
    store = open_store("127.0.0.1", 0)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _loopback()}
    processes = []
    for rank in range(WORLD):
        command = [sys.executable, "-m", MODULE, str(rank), str(store.port), repr(limit_s)]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        error, in_time = _judge(processes, begin + limit_s)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.communicate()
    if not in_time:
        error = f"{error} within {limit_s:g} s"
    seconds = time.monotonic() - begin
    return {"ok": error is None, "seconds": seconds, "error": error, "in_time": in_time}


def _loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


def _judge(processes: list[subprocess.Popen[str]], deadline: float) -> tuple[str | None, bool]:
    """Return what is wrong, or None, and whether the replicas have ended before the deadline."""
    results = []
    for rank, process in enumerate(processes):
        try:
            out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"replica {rank} did not end", False
        if process.returncode:
            words = err.strip().splitlines() or [f"status {process.returncode}"]
            return f"replica {rank} failed: {words[-1]}", True
        results.append(json.loads(out.splitlines()[-1]))
    for name, value in results[0].items():
        if results[1][name] != value:
            return f"the replicas differ after {name}", True
    return None, True


def _replica(rank: int, port: int, limit_s: float) -> dict[str, str]:
    """Exchange over every wire, train two rounds, and return hashes of the results."""
    import hashlib
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from diloco_comm import DiLoCo, Link, all_reduce, shutdown
    from diloco_comm.base.store_host import dial_store

    def digest(tensor: torch.Tensor) -> str:
        return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()

    limit = timedelta(seconds=limit_s)
    store = dial_store("127.0.0.1", port, limit_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
    hashes = {}
    values = [
        torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(r)) for r in range(WORLD)
    ]
    mean = sum(values) / WORLD
    assert isinstance(mean, torch.Tensor)
    for wire in WIRES:
        tensor = values[rank].clone()
        all_reduce(tensor, wire=wire, timeout=limit_s)
        # At 4 bits, Gaussian values in blocks of 256 have an error of about 13 %.
        error = float((tensor - mean).norm() / mean.norm())
        if error > {"fp32": 1e-6, "int8": 0.02, "int4": 0.3}[wire]:
            raise RuntimeError(f"the mean over the {wire} wire is wrong by {error:.2g}")
        hashes[f"all_reduce over the {wire} wire"] = digest(tensor)
    model = torch.nn.Linear(100, 33)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, optimizer, sync_every=2, link=Link(timeout=limit_s)):
        for step in range(4):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(8, 100, generator=generator)).square().mean().backward()
            optimizer.step()
    hashes["two outer steps"] = digest(model.weight)
    shutdown()
    dist.destroy_process_group()
    return hashes


if __name__ == "__main__":
    print(json.dumps(_replica(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
