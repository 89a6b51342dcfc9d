"""Compare what ``diloco-comm plan`` predicts with what benchmarks/training/overlap.py measures.

    python -m benchmarks.training.plan_against_measured --json FILE

On each emulated link replicas train with several policies. The prediction is given the model's
size, H, the wire, the link, and the time of a step without communication in the same run; nothing
is fitted. The error is that of the utilisation, as a share of the measured one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support import common
from benchmarks.training import overlap
from diloco_comm_tools.plan.estimate import Request

# Gbit/s and round trip in ms. Data parallel joins where a step of it takes seconds, not minutes.
LINKS = ((0.05, 50.0), (0.1, 100.0), (0.2, 50.0), (0.5, 10.0))
SLOWEST_FOR_DDP = 0.1
VARIANTS = "blocking:int4,streaming:int4:5,eager:int4"


def measure(args: argparse.Namespace, gbps: float, rtt_ms: float) -> dict[str, Any]:
    """Run benchmarks/training/overlap.py on one link and return its report."""
    variants = VARIANTS + (",ddp" if gbps >= SLOWEST_FOR_DDP else "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "overlap.json"
        command = common.benchmark_command("training.overlap")
        command += ["-g", str(args.nprocs), "-n", str(args.iters), "--ddp-steps", "1"]
        command += ["--sync-every", str(args.sync_every), "--variants", variants]
        command += ["--gbps", str(gbps), "--rtt-ms", str(rtt_ms), "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


def predict(
    document: dict[str, Any], name: str, gbps: float, rtt_ms: float, step_s: float
) -> float:
    """Predict the utilisation of one variant of benchmarks/training/overlap.py."""
    variant = overlap.Variant.parse(name)
    defaults = overlap.make_parser().parse_args([])
    method = {"blocking": "diloco", "ddp": "dp"}.get(variant.policy, variant.policy)
    request = Request(
        document["parameters"],
        defaults.layers,
        step_s,
        workers=document["workers"],
        method=method,
        sync_every=document["H"],
        delay=variant.delay,
        wire=variant.wire,
        rtt_ms=rtt_ms,
    )
    return float(request.utilisation(np.array([gbps]), "step")[0])


def compare(document: dict[str, Any], gbps: float, rtt_ms: float) -> list[dict[str, Any]]:
    """Put the predictions beside the rows of one report."""
    alone = next(row for row in document["results"] if row["variant"] == "alone")
    step_s = alone["step_ms"]["median"] / 1e3
    rows = []
    for row in document["results"]:
        if row["variant"] == "alone":
            continue
        predicted = predict(document, row["variant"], gbps, rtt_ms, step_s)
        rows.append(
            {
                "gbps": gbps,
                "rtt_ms": rtt_ms,
                "variant": row["variant"],
                "step_ms": 1e3 * step_s,
                "measured": row["of_alone"],
                "predicted": predicted,
                "error": predicted / row["of_alone"] - 1,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-g", "--nprocs", type=int, default=2, help="replicas, one process of one thread each")
    add("-n", "--iters", type=int, default=7, help="segments measured of each variant")
    add("--sync-every", type=int, default=10, help="inner steps a round (H)")
    common.add_output(parser)
    args = parser.parse_args()
    links = "simulated, in the engine: see the rows"
    report = common.Report("plan", workers=args.nprocs, link=links, H=args.sync_every)
    report.print(f"#{'link':>22}{'variant':>18}{'measured':>10}{'predicted':>11}{'error':>9}")
    rows = []
    with common.stoppable():
        for gbps, rtt_ms in LINKS:
            for row in compare(measure(args, gbps, rtt_ms), gbps, rtt_ms):
                link = f"{gbps:g} Gbit/s, {rtt_ms:g} ms"
                shares = f"{row['measured']:>10.1%}{row['predicted']:>11.1%}{row['error']:>+9.1%}"
                report.print(f" {link:>22}{row['variant']:>18}{shares}")
                rows.append(row)
    worst = max(rows, key=lambda row: abs(row["error"]))
    report.print(
        f"# largest error: {worst['error']:+.1%} ({worst['variant']}, {worst['gbps']:g} Gbit/s)"
    )
    common.save(report, args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
