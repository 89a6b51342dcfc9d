"""Figures, table and plot of benchmarks/training/overlap.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.support import common
from diloco_comm_tools.common import plots


def summarize(
    segments: dict[str, list[dict[str, Any]]], tokens_per_step: int, crowding: float
) -> list[dict[str, Any]]:
    """One row a variant.

    Args:
        segments: Of every variant, "alone" among them, as `overlap.measure` returns them.
        tokens_per_step: Of all replicas together.
        crowding: Replicas a core.
    """
    alone = [s["seconds"] / s["steps"] for s in segments["alone"]]
    rows = []
    for name, own in segments.items():
        step_s = [s["seconds"] / s["steps"] for s in own]
        row: dict[str, Any] = {
            "variant": name,
            "tokens_per_s": common.summary([tokens_per_step / s for s in step_s]),
            "step_ms": common.summary([1e3 * s for s in step_s]),
            "of_alone": common.median_ratio(alone, step_s),
        }
        syncs = sum(s.get("num_syncs", 0.0) for s in own)
        if syncs:
            row.update(_exchange_figures(own, syncs, crowding))
            row["unexplained"] = 1.0 - row["of_alone"] - row["codec_and_wire"] - row["exposed"]
        rows.append(row)
    return rows


def _exchange_figures(own: list[dict[str, Any]], syncs: float, crowding: float) -> dict[str, float]:
    """Figures of the syncs in these segments; see docs/measurements/overlap-results.md."""

    def total(*keys: str) -> float:
        return sum(s[key] for s in own for key in keys)

    # The first sync that a segment finishes was waited for in the `settle` of the one before.
    exposed = total("exposed_s", "settle_s")
    cpu = total("encode_s", "outer_step_s", "other_threads_cpu_s")
    seconds = total("seconds")
    return {
        "overlap_fraction": max(0.0, 1.0 - exposed / total("exchange_s")),
        "exchange_ms": 1e3 * total("exchange_s") / syncs,
        "exposed_ms": 1e3 * exposed / syncs,
        "training_thread_ms": 1e3 * total("encode_s", "outer_step_s") / syncs,
        "codec_and_wire_cpu_ms": 1e3 * cpu / syncs,
        "sent_mb": total("sent_bytes") / syncs / 1e6,
        # Replicas that share cores slow each other down by what each of them computes.
        "codec_and_wire": cpu * max(1.0, crowding) / seconds,
        "exposed": exposed / seconds,
    }


COLUMNS = (
    ("tokens/s", lambda r: f"{r['tokens_per_s']['median']:.0f}"),
    ("of alone", lambda r: f"{100 * r['of_alone']:.1f} %"),
    ("overlap", lambda r: f"{r['overlap_fraction']:.3f}" if "exposed" in r else "-"),
    ("exchange", lambda r: f"{r['exchange_ms']:.0f} ms" if "exposed" in r else "-"),
    ("exposed", lambda r: f"{r['exposed_ms']:.1f} ms" if "exposed" in r else "-"),
    ("CPU", lambda r: f"{r['codec_and_wire_cpu_ms']:.1f} ms" if "exposed" in r else "-"),
    ("CPU share", lambda r: f"{100 * r['codec_and_wire']:.2f} %" if "exposed" in r else "-"),
    ("rest", lambda r: f"{100 * r['unexplained']:.2f} %" if "exposed" in r else "-"),
    ("sent", lambda r: f"{r['sent_mb']:.2f} MB" if "exposed" in r else "-"),
)


def print_rows(report: common.Report, rows: list[dict[str, Any]]) -> None:
    report.print(f"#{'variant':>20}" + "".join(f"{name:>11}" for name, _ in COLUMNS))
    for row in rows:
        cells = "".join(f"{show(row):>11}" for _, show in COLUMNS)
        report.print(f" {row['variant']:>20}{cells}")


def draw(done: list[dict[str, Any]], path: Path) -> None:
    """Draw tokens/s as a share of training alone, one panel a set of workers and link."""
    panels: dict[tuple[int, str], dict[str, float]] = {}
    for entry in done:
        cell = entry["cell"]
        bars = panels.setdefault((cell["workers"], cell["link"]), {})
        for row in entry["rows"]:
            if row["variant"] != "alone":
                bars[f"{row['variant']}, H={cell['H']}"] = 100 * row["of_alone"]
    height = 1.2 + 0.28 * max(map(len, panels.values()))
    figure, axes = plots.new_panels(1, len(panels), 6, height)
    for panel, ((workers, link), bars) in zip(axes[0], panels.items(), strict=True):
        names = sorted(bars, key=lambda name: bars[name])
        panel.barh(names, [bars[name] for name in names], color=plots.BLUE)
        panel.axvline(97, color="0.4", linestyle=":", label="97 %")
        panel.set_xlim(0, max(105, *bars.values()))
        panel.set_xlabel("tokens/s, % of training without communication")
        panel.set_title(f"{workers} replicas\n" + link.replace(", ", ",\n", 1), fontsize=9)
        panel.tick_params(axis="y", labelsize=8)
        plots.legend(panel, fontsize=8, loc="lower center")
    plots.save(figure, path)
