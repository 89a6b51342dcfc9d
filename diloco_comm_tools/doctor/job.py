"""Checks of this process (a selftest), and of all ranks of a launched job: versions, links."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .facts import Finding

# The replicas import this module as their program.
MODULE = "diloco_comm_tools.doctor.job"
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


# ---------------------------------------------------------------------------------------------- job


LATENCY_ROUNDS = 20
BANDWIDTH_ROUNDS = 3
# With more pairs than this, each rank is paired only with the next one and with the one half the
# ranks away.
MOST_PAIRS = 120
# A link slower than the median by this factor is reported.
SLOW_LINK = 3.0


def launch(environment: Mapping[str, str] = os.environ) -> dict[str, int] | None:
    """Return rank, size and local rank under torchrun or srun, else None.

    This function changes no variable; ``join`` does.
    """
    for names in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ):
        values = [environment.get(name) for name in names]
        if values[0] is not None and values[1] is not None and int(values[1]) > 1:
            rank, world, local = (int(value or 0) for value in values)
            return {"rank": rank, "world": world, "local_rank": local}
    return None


def join(job: Mapping[str, int], timeout_s: float) -> None:
    """Join the job's default group over gloo.

    Raises:
        ValueError: If the address of rank 0 is not known.
    """
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise ValueError(
            "the job has ranks but no MASTER_ADDR and MASTER_PORT to meet at: set them, "
            "or start it by torchrun"
        )
    dist.init_process_group(
        "gloo",
        init_method="env://",
        rank=job["rank"],
        world_size=job["world"],
        timeout=timedelta(seconds=timeout_s),
    )


def examine_job(facts: dict[str, Any], replicas: int | None, num_bytes: int) -> dict[str, Any]:
    """Compare all ranks and measure their links; the result is the same on every rank.

    Args:
        facts: The facts of this rank, from ``facts.examine``.
        replicas: Number of replicas that the ranks form, if known.
        num_bytes: Size of the messages whose bandwidth is measured.

    Raises:
        ValueError: If the ranks do not divide into the replicas.
    """
    world = dist.get_world_size()
    if replicas is not None and (replicas < 1 or world % replicas):
        raise ValueError(f"--replicas must divide the {world} ranks, got {replicas}")
    everything: list[Any] = [None] * world
    dist.all_gather_object(everything, {"host": socket.gethostname(), "facts": facts})
    hosts = [entry["host"] for entry in everything]
    numbers = {host: idx for idx, host in enumerate(dict.fromkeys(hosts))}
    return {
        "world": world,
        "replicas": replicas,
        # Hosts by number: a report should not show host names.
        "host_of_rank": [numbers[host] for host in hosts],
        "differences": differences([entry["facts"] for entry in everything]),
        "links": measure_links(num_bytes),
    }


def gather_findings(own: list[Finding]) -> list[Finding]:
    """Return the findings of all ranks, each once, with its ranks unless all ranks have it."""
    world = dist.get_world_size()
    everything: list[Any] = [None] * world
    dist.all_gather_object(everything, own)
    found = []
    for finding in dict.fromkeys(itertools.chain.from_iterable(everything)):
        ranks = [rank for rank, theirs in enumerate(everything) if finding in theirs]
        where = "" if len(ranks) == world else f"rank {', '.join(map(str, ranks))}: "
        found.append(Finding(finding.level, where + finding.what, finding.remedy))
    return found


def differences(all_facts: list[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Return the facts that differ between ranks: for each value the ranks that have it."""
    found = {}
    for name, values in _comparable(all_facts).items():
        if len(set(values)) > 1:
            ranks: dict[str, list[int]] = {}
            for rank, value in enumerate(values):
                ranks.setdefault(value, []).append(rank)
            found[name] = ranks
    return found


def _comparable(all_facts: list[dict[str, Any]]) -> dict[str, list[str]]:
    compared = {
        name: [str(facts["versions"].get(name)) for facts in all_facts]
        for name in ("diloco_comm", "torch", "python", "numpy", "triton")
    }
    compared["nccl"] = [str(facts["gpu"]["nccl"]) for facts in all_facts]
    compared["default implementation"] = [str(f["extension"]["default"]) for f in all_facts]
    variables = {
        name
        for facts in all_facts
        for name in facts["settings"]["environment"]
        if name.startswith("DILOCO_COMM_")
    }
    for name in sorted(variables):
        compared[name] = [str(f["settings"]["environment"].get(name)) for f in all_facts]
    return compared


def measure_links(num_bytes: int) -> list[dict[str, Any]]:
    """Time messages between pairs of ranks, one pair at a time.

    Returns:
        One entry for each pair: ``ranks``, ``latency_us`` (half a round trip of 8 bytes), ``gbps``.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    measured = []
    for a, b in pairs_of(world):
        dist.barrier()
        if rank in (a, b):
            seconds = [_ping(a, b, 8, LATENCY_ROUNDS), _ping(a, b, num_bytes, BANDWIDTH_ROUNDS)]
        else:
            seconds = [0.0, 0.0]
        # Take the times that the lower rank of the pair has measured.
        times = torch.tensor(seconds, dtype=torch.float64)
        dist.broadcast(times, src=a)
        latency_s, message_s = times.tolist()
        gbps = 8 * num_bytes / max(message_s, 1e-9) / 1e9
        measured.append({"ranks": [a, b], "latency_us": 1e6 * latency_s, "gbps": gbps})
    return measured


def pairs_of(world: int) -> list[tuple[int, int]]:
    """Return all pairs of ranks; of many ranks only those that ``MOST_PAIRS`` describes."""
    pairs = list(itertools.combinations(range(world), 2))
    if len(pairs) <= MOST_PAIRS:
        return pairs
    near = {tuple(sorted((rank, (rank + 1) % world))) for rank in range(world)}
    far = {tuple(sorted((rank, (rank + world // 2) % world))) for rank in range(world)}
    return sorted((a, b) for a, b in near | far)


def _ping(a: int, b: int, num_bytes: int, rounds: int) -> float:
    """Return the median one-way seconds of a message from ``a`` to ``b`` and back."""
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    is_first, peer = dist.get_rank() == a, b if dist.get_rank() == a else a
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        if is_first:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            dist.recv(message, peer)
            dist.send(message, peer)
        seconds.append((time.perf_counter() - begin) / 2)
    # The first message makes the connection.
    return statistics.median(seconds[1:])


def judge_job(job: dict[str, Any]) -> list[Finding]:
    """Return the errors and warnings about a job."""
    found = []
    for name, ranks in job["differences"].items():
        shown = "; ".join(
            f"{value} on rank{'s' if len(own) > 1 else ''} {', '.join(map(str, own[:8]))}"
            + (" ..." if len(own) > 8 else "")
            for value, own in ranks.items()
        )
        # All implementations of the operators give the same bytes, so they may differ.
        level = "warning" if name in ("default implementation", "python", "numpy") else "error"
        found.append(Finding(level, f"{name} differs: {shown}", "give all ranks the same"))
    found += _judge_links(job["links"])
    replicas, world = job["replicas"], job["world"]
    if replicas is not None and world > replicas > 1:
        what = f"{replicas} replicas of {world // replicas} ranks: DistributedDataParallel averages"
        what += f" over all {world} ranks in every step unless it is told its replica's"
        remedy = 'DistributedDataParallel(model, process_group=mesh["shard"].get_group())'
        found.append(Finding("warning", what, remedy))
    return found


def _judge_links(links: list[dict[str, Any]]) -> list[Finding]:
    if len(links) < 2:
        return []
    median = statistics.median(link["gbps"] for link in links)
    slow = [link for link in links if link["gbps"] * SLOW_LINK < median]
    return [
        Finding(
            "warning",
            f"ranks {link['ranks'][0]} and {link['ranks'][1]} have {link['gbps']:.3g} Gbit/s, "
            f"the median is {median:.3g}",
            "every exchange waits for the slowest link",
        )
        for link in slow
    ]
