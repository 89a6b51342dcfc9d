"""Figures and table of benchmarks/against_torchft/compare.py."""

from __future__ import annotations

from typing import Any

from benchmarks.support import common

PEERS = ("torchft", "torchft_buckets")
OURS = ("diloco_fp32", "diloco_int8")
PLAIN = "plain"
VARIANTS = (*PEERS, "alone", PLAIN, *OURS)


def add_ratios(results: dict[str, Any]) -> None:
    """Summaries, CPU beyond training alone, and ratios taken round by round."""
    for name, result in results.items():
        samples = result["samples"]
        if "alone" in results and name != "alone":
            alone = results["alone"]["samples"]["cpu"]
            samples["cpu_extra"] = [a - b for a, b in zip(samples["cpu"], alone, strict=True)]
        result.update({key: common.summary(values) for key, values in samples.items()})
        for peer in (p for p in PEERS if p in results and name in OURS):
            theirs = results[peer]["samples"]
            uncoordinated = [
                b - c for b, c in zip(theirs["blocked"], theirs["coordination"], strict=True)
            ]
            ratios = {
                "blocked": common.median_ratio(theirs["blocked"], samples["blocked"]),
                "blocked_without_coordination": common.median_ratio(
                    uncoordinated, samples["blocked"]
                ),
            }
            result[f"against_{peer}"] = ratios
    if PLAIN in results and "diloco_int8" in results:
        ours, floor = (results[name]["samples"]["blocked"] for name in ("diloco_int8", PLAIN))
        results["diloco_int8"]["over_plain"] = common.median_ratio(ours, floor)


def print_table(report: common.Report, results: dict[str, Any]) -> None:
    columns = ("blocked", "quorum+", "CPU", "round", "memory", "loss", "distance", "x torchft")
    report.print("#")
    report.print(f"#{'':>16}" + "".join(f"{c:>10}" for c in columns) + f"{'x buckets':>10}")
    units = ("ms", "commit ms", "ms extra", "ms", "models", "nats", "", "blocked", "blocked")
    report.print(f"#{'':>16}" + "".join(f"{u:>10}" for u in units))
    for name, result in results.items():
        names = ("blocked", "coordination")
        cells = [result.get(key, {"median": 0.0})["median"] * 1e3 for key in names]
        cells += [result.get("cpu_extra", {"median": 0.0})["median"] * 1e3]
        cells += [result["round"]["median"] * 1e3]
        row = "".join(f"{cell:10.1f}" for cell in cells)
        memory = result.get("memory", {}).get("peak_sizes")
        row += f"{'-':>10}" if memory is None else f"{memory:10.2f}"
        row += f"{result['loss']:10.4f}"
        row += f"{result['distance']:10.2g}" if "distance" in result else f"{'-':>10}"
        for peer in PEERS:
            ratio = result.get(f"against_{peer}")
            row += f"{'-':>10}" if ratio is None else f"{ratio['blocked']:10.2f}"
        report.print(f" {name:>16}{row}")
    for name, result in results.items():
        if "encode" in result:
            parts = [result[key]["median"] * 1e3 for key in ("encode", "exposed", "outer_step")]
            text = "encode {:.1f}, waiting {:.1f}, outer step {:.1f} ms".format(*parts)
            report.print(f"# {name} blocks by {text}")
        if "over_plain" in result:
            ratio = f"{result['over_plain']:.2f} x as long as the plain traffic of its passes"
            report.print(f"# {name} blocks {ratio}")
    report.print("# blocked: in a round of H inner steps, slowest replica, median of the rounds;")
    report.print("#   'quorum+commit' is the part of it that is torchft's coordination.")
    report.print("# CPU ms extra: CPU of all threads in a round, beyond training alone.")
    report.print("# memory: growth of the resident set at its peak, in sizes of the fp32 model.")
    report.print(
        "# loss: outer parameters on held-out text; distance: of the outer parameters from"
    )
    report.print("#   torchft's, over the way that those went from the start.")
    report.print("# torchft's should_quantize needs a GPU, and is off: torchft sends fp32.")
