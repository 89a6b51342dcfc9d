"""Predict the rows of ``kernels_gpu.py`` for CUDA's kernels that no device has run yet.

    python -m benchmarks.operators.kernels_gpu_predicted

A row's share of the copy is ceiling / (1 + x^4)^(1/4): x is the time of its instructions over the
time of its memory. The fourth power fits what both devices recorded for encode and reduce of int8
and int4 within 4 points. The ceiling is the memory's: reads are faster than a copy's mix of reads
and writes. The recorded share of the kernel as it was gives x, which is multiplied by instructions
an element (now / then); by 0.40 + 0.004 for each warp of a multiprocessor (then / now), the part of
the issue slots that 32 warps of encode and 20 of reduce used; and, if only an H200 was recorded, by
the speed of an H100's memory over an H200's. New records replace the factors.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.operators.kernels_gpu_cases import DEFAULT_WIRES, MORE_PASSES, Case, Data, cases
from benchmarks.support import common

COPY_GBPS = {"H100": 3007.0, "H200": 4218.0}
# Above a copy's speed by so much if all is read, below by as much if all is written.
READS_GAIN = {"H100": 0.025, "H200": 0.05}
# Warps of a multiprocessor by registers: then, and with whole tiles alone.
WARPS = {"encode": (32, 40), "reduce": (20, 36), "decode": (20, 56)}
# Instructions an element then and now. A term of a sum without dot products takes 6 (int8) or 7
# (int4), a weight of its own one more; four more terms by dot products take 3.5 or 5.
INSTRUCTIONS = {
    ("encode", "int8"): (25.6, 12.1),
    ("encode", "int4"): (25.6, 13.1),
    ("reduce of 4", "int8"): (35.6, 17.8),
    ("reduce of 4", "int4"): (39.4, 15.9),
    ("reduce of 8", "int8"): (35.6, 21.3),
    ("reduce of 8", "int4"): (39.4, 26.4),
    ("reduce of 3", "int8"): (35.6, 29.6),
    ("reduce of 3", "int4"): (39.4, 32.4),
    ("reduce of 4 weighted", "int8"): (35.6, 39.6),
    ("reduce of 4 weighted", "int4"): (39.4, 43.4),
}


Records = dict[str, dict[tuple[str, str, str], dict[str, Any]]]


def recorded() -> Records:
    """Read the rows of CUDA's kernels that each device has run."""
    found: Records = {}
    for device, name in (("H200", "kernels.json"), ("H100", "kernels-h100.json")):
        results = json.loads((common.RESULTS / "gpu" / name).read_text())["results"]
        found[device] = {
            (row["operator"], row["wire"], row["layout"]): row.get("cuda", row)
            for row in results["rows"] + results.get("fp8_by_hardware", [])
            if row.get("impl", "cuda") == "cuda"
        }
    # With registers for four blocks, which blocks.json has.
    found["H200"]["outer_step", "fp32", "one"] = {"share_percent": 97.0}
    return found


def issue(share: float, ceiling: float) -> float:
    """Return x of a recorded share; no share tells an x below 0.45."""
    return (min(share / ceiling, 0.99) ** -4 - 1) ** 0.25


def predict(case: Case, device: str, records: Records) -> dict[str, float]:
    """Return the shares, and the ratio to compiled code where something is known of that code."""
    kind = case.operator.replace("+", " ").split()[0]
    read_part = (sum(case.reads) + sum(case.updates)) / case.traffic_bytes
    ceilings = {name: 1 + gain * (2 * read_part - 1) for name, gain in READS_GAIN.items()}
    key = ("reduce of 4" if kind == "reduce" else case.operator, case.wire, case.layout)
    place = device if key in records[device] else "H200"
    record = records[place].get(key, {"share_percent": 100 * ceilings[place]})
    factor = COPY_GBPS[device] / COPY_GBPS[place]
    if case.layout != "odd":
        then, now = INSTRUCTIONS.get((case.operator, case.wire), (1.0, 1.0))
        before, after = WARPS.get(kind, (1, 1))
        factor *= now / then * (0.40 + 0.004 * before) / (0.40 + 0.004 * after)
    if kind == "reduce":
        # The record is of four terms: five arrays are read or written for an element.
        factor *= 5 / len((*case.reads, *case.writes))
    x = issue(record["share_percent"] / 100, ceilings[place])
    share = ceilings[device] * (1 + (x * factor) ** 4) ** -0.25
    part = share / ceilings[device]
    found = {"share_percent": round(100 * share, 1), "traffic_percent": round(100 * part, 1)}
    timed = records["H200"].get(case.key, {})
    if case.key in MORE_PASSES:
        found["compile_ratio"] = MORE_PASSES[case.key] / case.traffic_bytes * share
    elif timed.get("compile_ratio"):
        theirs = issue(timed["share_percent"] / 100 / timed["compile_ratio"], ceilings["H200"])
        theirs *= COPY_GBPS[device] / COPY_GBPS["H200"]
        found["compile_ratio"] = part * (1 + theirs**4) ** 0.25
    elif case.operator == "encode+feedback":
        found["compile_ratio"] = part  # one pass, at the memory's rate
    return {name: round(value, 2) for name, value in found.items()}


def main() -> None:
    records = recorded()
    for case in cases(Data(1 << 20, "cpu"), (*DEFAULT_WIRES, "topk64")):
        found = {device: predict(case, device, records) for device in COPY_GBPS}
        print(*filter(None, case.key), json.dumps(found))


if __name__ == "__main__":
    main()
