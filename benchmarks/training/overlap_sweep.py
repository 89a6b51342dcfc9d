"""The cells of ``benchmarks/training/overlap.py --sweep``."""

from __future__ import annotations

import argparse
import copy
import functools
import json
from typing import Any

from benchmarks.exchange import netns
from benchmarks.support import common
from benchmarks.training import overlap, overlap_report

# Delay and wire at H=30; then H. The delays give the exchange from one step to a whole round.
_STREAMING = "streaming:int4:1,streaming:int4:3,streaming:int4:10,streaming:int8:10"
_CELLS = (
    (30, "ddp,blocking:fp32,blocking:int4,eager:int4"),
    (30, _STREAMING),
    (30, "eager:int8,eager:e3m0,eager:fp32,co2:int4"),
    (10, "blocking:int4,streaming:int4:3,eager:int4,eager:int8"),
)


def cells(args: argparse.Namespace) -> list[argparse.Namespace]:
    """All cells, on the emulated link, and on the shaped one where there is one."""
    links = [(args.gbps, args.rtt_ms, "")]
    if netns.missing() is None:
        links.append((0.0, 0.0, "100mbit"))
    found = []
    for gbps, rtt_ms, namespaces in links:
        for world in (2, 4):
            for sync_every, variants in _CELLS if not namespaces else _CELLS[:1]:
                cell = copy.copy(args)
                cell.gbps, cell.rtt_ms, cell.namespaces = gbps, rtt_ms, namespaces
                cell.nprocs, cell.sync_every = world, sync_every
                cell.variants = overlap.parse_variants(variants)
                found.append(cell)
    return found


def key_of(cell: argparse.Namespace) -> dict[str, Any]:
    """What tells a cell from all others."""
    names = [variant.name for variant in cell.variants]
    numbers = ("batch", "context", "width", "layers", "lanes", "rounds")
    return {
        "workers": cell.nprocs,
        "link": overlap.link_name(cell),
        "H": cell.sync_every,
        "variants": names,
        **{name: getattr(cell, name) for name in numbers},
    }


def run(args: argparse.Namespace) -> int:
    """Measure the cells that the file of the runs lacks; it is written after each of them."""
    path = args.runs
    done: list[dict[str, Any]] = json.loads(path.read_text())["results"] if path.exists() else []
    if any("cell" not in entry for entry in done):
        print(f"error: {path} has results of one cell, not of a sweep: give another --runs")
        return 2
    report = common.Report("overlap", link="in each cell", variants="in each cell")
    with common.stoppable():
        for cell in cells(args):
            key = key_of(cell)
            found = next((old for old in done if old["cell"] == key), None)
            if found is None:
                found = {"cell": key, "commit": common.commit(), "rows": overlap.run_cell(cell)}
                done.append(found)
                common.save(report, path, done)
            link = key["link"]
            report.print(f"# {key['workers']} workers, H {key['H']}, {link}")
            overlap_report.print_rows(report, found["rows"])
    common.save(report, args.json, done)
    common.save_plot(args.plot, functools.partial(overlap_report.draw, done))
    return 0
