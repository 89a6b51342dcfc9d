"""Measure a relay: rate, memory, time of the processor, and how equal its pairs are.

    python -m benchmarks.exchange.relay --pairs 1,32

The relay is the process that `diloco-comm relay` starts. Plain sockets of this process send through
the relay for some seconds. A plain connection without a relay takes turns with the relay: both
share the cores with the sockets' ends.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.support import common
from benchmarks.support.hosted import Hosted
from benchmarks.training.outer_step import resident_bytes
from diloco_comm.base.service.relay import RECORD, Kind, parse_record, record

_WRITE_BYTES = 1 << 20
_TICKS = os.sysconf("SC_CLK_TCK")
Ends = tuple[socket.socket, socket.socket]


def through_relay(place: tuple[str, int], count: int, stack: ExitStack) -> list[Ends]:
    """Connect pairs of sockets through a relay."""

    def said(words: bytes) -> socket.socket:
        connection = stack.enter_context(socket.create_connection(place))
        connection.sendall(words)
        return connection

    def heard(seat: socket.socket) -> tuple[int, bytes]:
        return parse_record(seat.recv(RECORD.size, socket.MSG_WAITALL))

    nonce = os.urandom(16)
    seat = said(record(Kind.SEAT, nonce))
    assert heard(seat) == (Kind.SEATED, nonce)
    pairs = []
    for _ in range(count):
        sender = said(record(Kind.DIAL, nonce))
        kind, number = heard(seat)
        assert kind == Kind.CALL
        pairs.append((sender, said(record(Kind.ACCEPT, number))))
    return pairs


def without_relay(count: int, stack: ExitStack) -> list[Ends]:
    """Connect pairs of sockets directly."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    pairs = []
    for _ in range(count):
        sender = stack.enter_context(socket.create_connection(listener.getsockname()))
        pairs.append((sender, stack.enter_context(listener.accept()[0])))
    return pairs


def carried(pairs: list[Ends], seconds: float) -> list[int]:
    """Send over all pairs at once for some seconds; return the bytes that each has carried."""
    counts = [0] * len(pairs)
    deadline = time.monotonic() + seconds

    def send(sender: socket.socket) -> None:
        block = bytes(_WRITE_BYTES)
        while time.monotonic() < deadline:
            sender.sendall(block)
        sender.shutdown(socket.SHUT_WR)

    def receive(index: int) -> None:
        block = bytearray(_WRITE_BYTES)
        while num_bytes := pairs[index][1].recv_into(block):
            counts[index] += num_bytes if time.monotonic() < deadline else 0

    threads = [threading.Thread(target=send, args=(sender,)) for sender, _ in pairs]
    threads += [threading.Thread(target=receive, args=(index,)) for index in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def figures(
    counts: list[list[int]], direct: list[list[int]], seconds: float, cpu_s: float, memory: int
) -> dict[str, Any]:
    """Rates, each sample's against the direct one beside, and how equal the pairs were.

    Args:
        counts, direct: Bytes of each pair, for each sample.
        memory: Bytes by which the relay grew.
    """
    rates = [8 * sum(sample) / seconds / 1e9 for sample in counts]
    beside = [8 * sum(sample) / seconds / 1e9 for sample in direct]
    totals = [sum(pair) for pair in zip(*counts, strict=True)]
    direct_totals = [sum(pair) for pair in zip(*direct, strict=True)]
    return {
        "gbit_per_s": statistics.median(rates),
        "direct_gbit_per_s": statistics.median(beside),
        "rate_against_direct": common.median_ratio(rates, beside),
        "largest_over_smallest": max(totals) / min(totals),
        "direct_largest_over_smallest": max(direct_totals) / min(direct_totals),
        "processor_s_per_gb": cpu_s / (sum(totals) / 1e9),
        "grown_bytes": memory,
    }


def measure(count: int, seconds: float, samples: int) -> dict[str, Any]:
    """Measure one number of pairs through a relay of its own."""
    counts, direct = [], []
    cpu_s, memory = 0.0, 0
    with Hosted(["relay", "--listen", "127.0.0.1:0"]) as service:
        host, port = service.wait().removeprefix("tcp://").split(":")
        pid, place = service.process.pid, (host, int(port))
        at_rest = resident_bytes(pid=pid)
        for _ in range(samples):
            with ExitStack() as stack:
                direct.append(carried(without_relay(count, stack), seconds))
            with ExitStack() as stack:
                pairs = through_relay(place, count, stack)
                begin = processor_seconds(pid)
                counts.append(carried(pairs, seconds))
                cpu_s += processor_seconds(pid) - begin
                memory = max(memory, resident_bytes(pid=pid) - at_rest)
    found = figures(counts, direct, seconds, cpu_s, memory)
    return {**found, "resident_bytes": at_rest + memory}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--pairs", default="1,32", help="comma list of numbers of pairs")
    add("-s", "--seconds", type=float, default=3.0, help="seconds of a sample")
    add("-n", "--samples", type=int, default=3, help="samples")
    common.add_output(parser)
    args = parser.parse_args()
    report = common.Report("relay", link="loopback")
    report.print(
        "#   pairs  Gbit/s  direct   ratio  largest/smallest  direct  CPU s/GB  grown MiB  all MiB"
    )
    results = {}
    for count in map(int, args.pairs.split(",")):
        found = results[str(count)] = measure(count, args.seconds, args.samples)
        report.print(
            f"{count:>9} {found['gbit_per_s']:7.2f} {found['direct_gbit_per_s']:7.2f} "
            f"{found['rate_against_direct']:7.3f} {found['largest_over_smallest']:17.3f} "
            f"{found['direct_largest_over_smallest']:7.3f} "
            f"{found['processor_s_per_gb']:9.3f} {found['grown_bytes'] / 2**20:10.1f} "
            f"{found['resident_bytes'] / 2**20:8.1f}"
        )
    common.save(report, args.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
