"""The asynchronous server: updates at memory speed, round trips of workers, memory.

    python -m benchmarks.asynchronous.server apply         # one thread, 100 million parameters
    python -m benchmarks.asynchronous.server trips         # workers on loopback, against gloo
    python -m benchmarks.asynchronous.server busy          # workers that do not wait for each other
    python -m benchmarks.asynchronous.server memory        # resident memory with 1 to 8 workers

``apply`` compares with a loop that moves the bytes of a Nesterov step and computes nothing of
note, timed in turns with it. ``trips`` times a whole round trip of every worker (encode, send,
apply, fetch exact parameters, write them) and, in turns with it, a raw gloo all_reduce of the same
fp32 bytes between the same processes; and, for information, ZeroMQ carrying the bytes of the round
trip in messages of the same size with no work at either end. ``busy`` lets the workers run as fast
as they can and says how many cores they and the server used: where workers block each other cores
are idle.
docs/measurements/asynchronous-results.md explains the figures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
import zmq
from torch import nn

from benchmarks.support import common
from benchmarks.training.outer_step import resident_bytes
from diloco_comm import Adam, Link, Nesterov
from diloco_comm.asynchronous.coordinator import Coordinator, Update
from diloco_comm.asynchronous.messages import MAX_BODY
from diloco_comm.asynchronous.model import SharedModel
from diloco_comm.asynchronous.rules import DelayedNesterov, Immediate, ServerRule
from diloco_comm.asynchronous.server import AsyncServer
from diloco_comm.asynchronous.worker import AsyncDiLoCo
from diloco_comm.base.memory import empty_pages
from diloco_comm.ops.wire import WireFormat, parse

RULES: dict[str, ServerRule] = {
    "nesterov": Immediate(outer=Nesterov(0.1, 0.9)),
    "delayed, N=4": DelayedNesterov(lr=0.1, period=4),
}
_spawn = multiprocessing.get_context("spawn")
MORE_RULES: dict[str, ServerRule] = {**RULES, "adam": Immediate(outer=Adam(0.01))}


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# ------------------------------------------------------------------------------------------ apply


def floor_of(num_elements: int) -> Callable[[], None]:
    """Return the loop that reads outer, momentum and codes, and writes the first two."""
    count = num_elements // 65536 * 65536
    buffers = [empty_pages((count,), torch.float32) for _ in range(2)]
    buffers.append(empty_pages((count,), torch.int8))
    return lambda: torch.ops.diloco_comm._floor("arrival", buffers)


def measure_apply(report: common.Report, num_elements: int, rounds: int) -> dict:
    torch.set_num_threads(1)
    floor = floor_of(num_elements)
    wire = WireFormat("int8")
    results = {}
    report.print("#  rule            what                  median ms   floor ms   share of floor")
    for name, rule in RULES.items():
        model = SharedModel([num_elements], rule)
        model.initialise([torch.zeros(num_elements)])
        layouts = model.layouts(wire)
        payload = empty_pages((layouts[0].payload_bytes,), torch.uint8)
        # Scales of 1.0 and codes of zero: what the bytes stand for does not change the time.
        blocks = layouts[0].run_elements // wire.block_size
        runs = payload.view(layouts[0].num_runs, layouts[0].run_bytes)
        runs[:, : 2 * blocks].view(torch.bfloat16).fill_(1.0)
        coordinator = Coordinator(model)
        seqs = iter(range(1, 10_000))

        def arrive(coordinator=coordinator, seqs=seqs, payload=payload, layouts=layouts) -> None:
            version = coordinator.model.version
            update = Update("w", next(seqs), version, 1, 1.0, [payload], layouts)
            assert not coordinator.arrive(update, 0.0).refusal

        def apply(model=model, payload=payload, layouts=layouts, rule=rule) -> None:
            model.apply([payload], layouts, rule.weight(0))

        calls = {"apply": apply, "apply and check": arrive}
        for what, call in calls.items():
            times, floors = [], []
            for index in range(rounds + 1):
                # One period: a rule's arrivals differ.
                pair = (
                    sum(seconds_of(call) for _ in range(rule.arrivals)) / rule.arrivals,
                    seconds_of(floor),
                )
                if index:
                    times.append(pair[0])
                    floors.append(pair[1])
            share = common.median_ratio(floors, times)
            report.print(
                f"   {name:14}  {what:18} {1e3 * common.percentile(times, 50):12.2f}"
                f" {1e3 * common.percentile(floors, 50):10.2f} {100 * share:13.1f} %"
            )
            results[f"{name}: {what}"] = {"times_s": times, "floors_s": floors, "share": share}
    return results


# ------------------------------------------------------------------------------------------ trips


class Courier:
    """Carry as many bytes as a round trip by ZeroMQ, in messages of the same size, and no more."""

    def __init__(self, port: int, up: int) -> None:
        self.up = up
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._bytes = torch.zeros(up, dtype=torch.uint8).numpy().data

    def carry(self, down: int) -> None:
        for begin in range(0, self.up, MAX_BODY):
            self._socket.send(self._bytes[begin : begin + MAX_BODY], copy=False)
        self._socket.send(str(down).encode())
        while down > 0:
            down -= len(self._socket.recv(copy=False))

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def carrying() -> Iterator[int]:
    """Answer couriers on a port of this process, from one thread like the server's."""
    context, done = zmq.Context(), threading.Event()
    socket = context.socket(zmq.ROUTER)
    socket.sndhwm = socket.rcvhwm = 0
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    source = torch.zeros(MAX_BODY, dtype=torch.uint8).numpy().data

    def answer() -> None:
        while not done.is_set():
            if not socket.poll(50):
                continue
            peer, body = socket.recv_multipart(copy=False)
            if len(body) > 20:
                continue
            for begin in range(0, down := int(body.bytes), MAX_BODY):
                part = source[: min(MAX_BODY, down - begin)]
                socket.send_multipart([peer.bytes, part], copy=False)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield port
    finally:
        done.set()
        thread.join()
        context.destroy(linger=0)


class Flat(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


@dataclass(frozen=True)
class Job:
    """The work of all workers of a run.

    Attributes:
        size: Elements of the model.
        store: Port of the store at which the workers meet.
        floor: Port of the couriers; 0: none.
        is_free: Workers do not wait for each other.
    """

    workers: int
    size: int
    rounds: int
    wire: str = "int8"
    fetch: str = "parameters"
    floor: int = 0
    is_free: bool = False
    address: str = ""
    store: int = 0


def worker_main(rank: int, job: Job) -> dict:
    """Time round trips, and all_reduces of the same bytes in turns with them."""
    torch.set_num_threads(1)
    world, size = job.workers, job.size
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", job.store, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=200)
    )
    model = Flat(size)
    worker = AsyncDiLoCo(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        server=job.address,
        wire=job.wire,
        fetch=job.fetch,
        link=Link(timeout=100.0),
        attach=False,
    )
    row = run_freely(job, worker, model) if job.is_free else run_in_turns(job, worker, model)
    dist.destroy_process_group()
    return row


def run_in_turns(job: Job, worker: AsyncDiLoCo, model: Flat) -> dict:
    buffer = torch.zeros(job.size)
    trips, reduces, floors, moved = [], [], [], []
    up = int(job.size * parse(job.wire).bits_per_element) // 8
    courier = Courier(job.floor, up) if job.floor else None
    down = 4 * job.size if job.fetch == "parameters" else (job.workers - 1) * up
    worker.on_round = lambda m: moved.append(m.sent_bytes + m.received_bytes)
    for index in range(job.rounds + 1):
        with torch.no_grad():
            model.weight.add_(1e-3 * (dist.get_rank() + 1))
        dist.barrier()
        trip = seconds_of(worker.step)
        dist.barrier()
        reduce = seconds_of(lambda: dist.all_reduce(buffer))
        if index:
            trips.append(trip)
            reduces.append(reduce)
        if courier is not None:
            dist.barrier()
            floors.append(seconds_of(lambda: courier.carry(down)))
    dist.barrier()
    worker.close()
    if courier is not None:
        courier.close()
    return {
        "trips_s": trips, "reduces_s": reduces, "floors_s": floors[1:],
        "bytes": common.percentile(moved[1:], 50),
    }  # fmt: skip


def run_freely(job: Job, worker: AsyncDiLoCo, model: Flat) -> dict:
    """Make round trips one after the other, each worker at its own pace."""
    trips = []
    dist.barrier()
    begin, cpu_s = time.time(), time.process_time()
    for _ in range(job.rounds):
        with torch.no_grad():
            model.weight.add_(1e-3)
        trips.append(seconds_of(worker.step))
    end, cpu_s = time.time(), time.process_time() - cpu_s
    dist.barrier()
    worker.close()
    return {"trips_s": trips, "begin": begin, "end": end, "cpu_s": cpu_s}


def run_workers(server: AsyncServer, job: Job) -> list[dict]:
    """Let each worker do its work in a process of its own; return what each has measured."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = replace(job, address=server.address, store=store.port)
    # Nobody ends before all have met: each process takes one rank.
    with ProcessPoolExecutor(job.workers, mp_context=_spawn) as pool:
        return list(pool.map(worker_main, range(job.workers), [job] * job.workers, timeout=400))


def measure_trips(report: common.Report, size: int, rounds: int) -> dict:
    results = {}
    report.print(
        "#  workers   wire   fetch        trip ms (p10-p90)        all_reduce ms   ratio"
        "   of the bytes alone   MB up+down"
    )
    for num_workers, wire, fetch in (
        (1, "int8", "parameters"),
        (2, "int8", "parameters"),
        (2, "int8", "updates"),
        (2, "fp32", "parameters"),
        (4, "int8", "parameters"),
        (4, "int4", "parameters"),
        (4, "int4", "updates"),
    ):
        torch.set_num_threads(1)
        with AsyncServer(RULES["nesterov"], sync_every=1) as server, carrying() as port:
            rows = run_workers(server, Job(num_workers, size, rounds, wire, fetch, port))
        trips = [max(at) for at in zip(*(row["trips_s"] for row in rows), strict=True)]
        reduces = [max(at) for at in zip(*(row["reduces_s"] for row in rows), strict=True)]
        floors = [max(at) for at in zip(*(row["floors_s"] for row in rows), strict=True)]
        ratio, floor = (common.median_ratio(times, reduces) for times in (trips, floors))
        p10, p50, p90 = (1e3 * common.percentile(trips, p) for p in (10, 50, 90))
        moved = common.percentile([row["bytes"] for row in rows], 50) / 1e6
        report.print(
            f"   {num_workers:7d}   {wire:5}  {fetch:10} {p50:8.1f} ({p10:.1f}-{p90:.1f})"
            f" {1e3 * common.percentile(reduces, 50):18.1f} {ratio:9.2f} {floor:15.2f}"
            f" {moved:16.1f}"
        )
        results[f"{num_workers} workers, {wire}, {fetch}"] = {
            "trips_s": trips, "reduces_s": reduces, "ratio": ratio, "mb_per_trip": moved,
            "floors_s": floors, "floor_ratio": floor,
            "apply_s": server.state.status.apply_s, "updates": num_workers * (rounds + 1),
        }  # fmt: skip
    return results


def measure_busy(report: common.Report, size: int, rounds: int) -> dict:
    results = {}
    report.print(
        "#  workers   wire   updates/s   server cores   worker cores   least-most mean trip ms"
    )
    for num_workers in (1, 2, 4):
        torch.set_num_threads(1)
        samples: list[tuple[float, float]] = []
        done = threading.Event()

        def watch(samples=samples, done=done) -> None:
            while not done.wait(0.05):
                samples.append((time.time(), time.process_time()))

        with AsyncServer(RULES["nesterov"], sync_every=1) as server:
            watcher = threading.Thread(target=watch)
            watcher.start()
            rows = run_workers(server, Job(num_workers, size, rounds, is_free=True))
            done.set()
            watcher.join()
        # While all of them run.
        begin, end = max(row["begin"] for row in rows), min(row["end"] for row in rows)
        inside = [sample for sample in samples if begin <= sample[0] <= end]
        (first, cpu_before), (last, cpu_after) = inside[0], inside[-1]
        server_cores = (cpu_after - cpu_before) / (last - first)
        worker_cores = sum(row["cpu_s"] / (row["end"] - row["begin"]) for row in rows)
        rate = sum(rounds / (row["end"] - row["begin"]) for row in rows)
        means = [1e3 * sum(row["trips_s"]) / rounds for row in rows]
        report.print(
            f"   {num_workers:7d}   int8  {rate:10.1f} {server_cores:14.2f} {worker_cores:14.2f}"
            f" {min(means):15.1f}-{max(means):.1f}"
        )
        results[f"{num_workers} workers"] = {
            "updates_per_s": rate, "server_cores": server_cores, "worker_cores": worker_cores,
            "mean_trips_ms": means,
        }  # fmt: skip
    return results


# ----------------------------------------------------------------------------------------- memory


def measure_memory(report: common.Report, size: int, rounds: int) -> dict:
    results = {}
    report.print(
        "#  rule           workers   wire   fetch        peak MiB above an idle one   model sizes"
    )
    for rule_name, num_workers, wire, fetch in (
        ("nesterov", 1, "int8", "parameters"),
        ("nesterov", 8, "int8", "parameters"),
        ("delayed, N=4", 8, "int8", "parameters"),
        ("delayed, N=4", 8, "fp32", "parameters"),
        ("adam", 8, "fp32", "parameters"),
        ("nesterov", 8, "int8", "updates"),
    ):  # fmt: skip
        job = Job(num_workers, size, rounds, wire, fetch)
        with ProcessPoolExecutor(1, mp_context=_spawn) as pool:
            peak = pool.submit(peak_of, rule_name, job).result(timeout=500)
        sizes = peak / (4 * size)
        report.print(
            f"   {rule_name:14} {num_workers:7d}   {wire:5}  {fetch:10}"
            f" {peak / 2**20:12.0f} {sizes:25.2f}"
        )
        results[f"{rule_name}, {num_workers} workers, {wire}, {fetch}"] = sizes
    return results


def peak_of(rule_name: str, job: Job) -> int:
    """Serve in this process; return the bytes by which its resident memory grew at most."""
    torch.set_num_threads(1)
    with AsyncServer(MORE_RULES[rule_name], sync_every=1):
        pass
    idle = resident_bytes()
    with AsyncServer(MORE_RULES[rule_name], sync_every=1) as server:
        run_workers(server, job)
    return resident_bytes("VmHWM") - idle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measures = {
        "apply": (measure_apply, 100_000_000, 9),
        "trips": (measure_trips, 10_000_000, 15),
        "busy": (measure_busy, 10_000_000, 40),
        "memory": (measure_memory, 25_000_000, 2),
    }
    parser.add_argument("what", choices=list(measures))
    parser.add_argument("--elements", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=None)
    common.add_output(parser)
    options = parser.parse_args()
    measure, elements, rounds = measures[options.what]
    elements, rounds = options.elements or elements, options.rounds or rounds
    path = options.json or common.RESULTS / "asynchronous" / f"async-server-{options.what}.json"
    common.check_default(parser, "--json", path)
    report = common.Report(f"asynchronous server, {options.what}", elements=elements)
    results = measure(report, elements, rounds)
    common.save(report, path, results)


if __name__ == "__main__":
    main()
