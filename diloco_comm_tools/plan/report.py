"""What ``diloco-comm plan`` shows: tables and a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..common import plots
from ..common.console import plain_table, print_whole
from .published import MODELS
from .request import CHOOSABLE, TARGETS, WIRES_CHOSEN
from .simulator import GRID_GBPS

NONE_IS_ENOUGH = "> 1000"
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes with three digits and a decimal unit."""
    exponent = 0
    while num_bytes >= 999.5 and exponent < len(_UNITS) - 1:
        num_bytes /= 1000
        exponent += 1
    return f"{num_bytes:.3g} {_UNITS[exponent]}"


def print_plan(
    console: Console, plan: dict[str, Any], *, all_wires: bool = False, only_chosen: bool = False
) -> None:
    """Print the tables of ``estimate.make_plan``.

    Args:
        all_wires: Add the table that compares wires.
        only_chosen: Leave out all but the settings that were chosen for the link.
    """
    request = plan["request"]
    if only_chosen:
        _print_chosen(console, plan["link"], _why_not(plan))
        return
    console.print(_headline(plan))
    print_whole(console, _bandwidths(plan))
    console.print(
        f"A replica sends {format_bytes(plan['bytes_per_round'])} a round, "
        f"{format_bytes(plan['bytes_per_day'])} a day at full utilisation, and needs "
        f"{format_bytes(plan['extra_memory_bytes'])} beside model, gradients and inner optimizer."
    )
    if all_wires:
        print_whole(console, _wires(plan))
    if plan["auto"]:
        console.print(f"\nWire {plan['auto']}")
    if link := plan["link"]:
        console.print(
            f"\nOn {link['gbps']:g} Gbit/s, {link['rtt_ms']:g} ms round trip: utilisation "
            f"{link['utilisation']:.1%} ({link['layer_utilisation']:.1%} if every layer left and "
            f"were waited for by itself), {link['lost_s_per_day'] / 3600:.2f} hours lost a day, "
            f"{format_bytes(link['bytes_per_day'])} sent a day."
        )
        print_whole(console, _settings(link, request))
        _print_chosen(console, link, _why_not(plan))


def _headline(plan: dict[str, Any]) -> str:
    request = plan["request"]
    method = request["method"]
    words = [f"{request['params']:.4g} parameters, {request['layers']} layers"]
    words += [f"{request['step_time']:g} s a step, {request['workers']} replicas", method]
    if method != "dp":
        words.append(f"H={request['sync_every']}")
    if method == "streaming":
        words.append(f"delay {request['delay']}")
    if method not in ("dp", "diloco"):
        layers = request["fragment_layers"]
        words.append(f"fragments of {layers} layers" if layers else "one fragment")
    source = "given" if request["bits"] is not None else request["wire"]
    return f"{', '.join(words)}, {plan['bits_per_param']:.4g} bits a parameter ({source})"


def _bandwidths(plan: dict[str, Any]) -> Table:
    heads = ["utilisation", *(f"{target:.0%}" for target in TARGETS)]
    table = plain_table(heads, "Gbit/s needed")
    rtt_ms = plan["request"]["rtt_ms"]
    suffix = f", {rtt_ms:g} ms round trip" if rtt_ms else ""
    rows = [("ideal, layer by layer" + suffix, plan["bandwidth_gbps"])]
    rows += [("this library" + suffix, plan["step_bandwidth_gbps"])]
    for entry in plan["by_rtt_ms"]:
        if entry["rtt_ms"] != rtt_ms:
            name = f"this library, {entry['rtt_ms']:g} ms round trip"
            rows.append((name, entry["step_bandwidth_gbps"]))
    for name, needed in rows:
        cells = (needed[f"{target:g}"] for target in TARGETS)
        table.add_row(name, *map(_bandwidth, cells))
    return table


def _wires(plan: dict[str, Any]) -> Table:
    heads = ("wire", "bits a parameter", "bytes a round", "extra memory", "loss over fp32")
    title = "All wires with these replicas, most bits first"
    table = plain_table((*heads, "utilisation"), title)
    for row in plan["wires"]:
        lost, share = row["loss_over_fp32"], row["utilisation"]
        table.add_row(
            row["wire"],
            f"{row['bits_per_param']:.4g}",
            format_bytes(row["bytes_per_round"]),
            format_bytes(row["extra_memory_bytes"]),
            "-" if lost is None else f"{lost:+.3f}",
            "-" if share is None else f"{share:.1%}",
        )
    return table


def _bandwidth(gbps: float | None) -> str:
    """Show a bandwidth of the grid; the first one means "at most", as no smaller one was tried."""
    if gbps is None:
        return NONE_IS_ENOUGH
    return f"<= {gbps:g}" if gbps <= GRID_GBPS[0] else f"{gbps:g}"


def _settings(link: dict[str, Any], request: dict[str, Any]) -> Table:
    title = f"Smallest H tried that reaches {link['target']:.0%} on this link"
    table = plain_table(["method", *link["wires_tried"]], title)
    found = {(s["method"], s["delay"], s["wire"]): s["sync_every"] for s in link["settings"]}
    ways = [("dp", 0, "data parallel"), ("diloco", 0, "diloco")]
    ways += [("streaming", 1, "streaming, delay 1"), ("streaming", 5, "streaming, delay 5")]
    ways += [("eager", 0, "eager")]
    for method, delay, name in ways:
        cells = (found.get((method, delay, wire)) for wire in link["wires_tried"])
        table.add_row(name, *("-" if h is None else str(h) for h in cells))
    return table


def _why_not(plan: dict[str, Any]) -> str:
    """Say that nothing reaches the target, and what may help."""
    request, link = plan["request"], plan["link"]
    target, wires = f"{link['target']:.0%}", tuple(link["chosen_wires"])
    if plan["auto"] is not None:
        return f"No wire reaches {target} with these settings. Raise --sync-every."
    words = f"No setting of DiLoCo or Streaming over {' or '.join(wires)} that was tried reaches"
    may_choose = request["method"] in CHOOSABLE and request["bits"] is None
    advice = " --wire auto tries shorter wires, too." if wires == WIRES_CHOSEN else ""
    return f"{words} {target}.{advice if may_choose else ''}"


def _print_chosen(console: Console, link: dict[str, Any], why_not: str) -> None:
    if link["chosen"] is None:
        console.print(why_not)
        return
    chosen = link["chosen"]
    share = chosen["setting"]["utilisation"]
    console.print(f"Chosen for this link (utilisation {share:.1%}):")
    print_program(console, [chosen["imports"], chosen["line"]])
    for line in _what_it_takes(chosen):
        console.print(line)


def print_program(console: Console, lines: Sequence[str]) -> None:
    """Print lines to paste, each as one line however wide the console is."""
    console.print()
    for line in lines:
        console.print(f"    {line}", markup=False)
    console.print()


def _what_it_takes(chosen: dict[str, Any]) -> Iterator[str]:
    """Yield lines on traffic, memory, cost and loss of the chosen settings."""
    yield (
        f"With these settings a replica sends {format_bytes(chosen['bytes_per_day'])} a day, "
        f"{format_bytes(chosen['bytes_per_month'])} in 30 days, and needs "
        f"{format_bytes(chosen['extra_memory_bytes'])} beside model, gradients and inner optimizer."
    )
    if usd := chosen["usd_per_1e9_tokens"]:
        yield (
            f"1e9 tokens cost {usd['total']:,.2f} USD: GPUs {usd['gpus']:,.2f}, egress "
            f"{usd['egress']:,.2f}."
        )
    if chosen["why"]:
        yield chosen["why"]
    if loss := chosen["loss"]:
        yield from _loss_lines(loss)


def _loss_lines(loss: dict[str, Any]) -> Iterator[str]:
    names = {"sync_every": "H", "wire": "wire", "overlap": "overlap"}
    terms = ", ".join(
        f"{names[term]} {'not recorded' if nats is None else format(nats, '+.3f')}"
        for term, nats in loss["terms"].items()
    )
    total = "not known" if loss["nats"] is None else f"{loss['nats']:+.3f} nats a byte"
    yield f"Expected loss over DiLoCo on fp32 with H=10, by the recorded runs: {total} ({terms})."
    if loss["extrapolated"]:
        yield f"Extrapolated beyond these runs: {'; '.join(loss['extrapolated'])}."


def print_published(console: Console, title: str, entries: Sequence[dict[str, Any]]) -> None:
    """Print published numbers with ours behind them where they differ."""
    models = [model for model, *_ in MODELS]
    table = plain_table(["", *models], title, models)
    for name in dict.fromkeys(entry["row"] for entry in entries):
        own = [entry for entry in entries if entry["row"] == name]
        cells = (
            "  ".join(_published_cell(e) for e in own if e["model"] == model) for model in models
        )
        table.add_row(name, *cells)
    print_whole(console, table)
    exact = sum(entry["grid_steps"] == 0 for entry in entries)
    near = sum(
        entry["grid_steps"] is not None and abs(entry["grid_steps"]) <= 1 for entry in entries
    )
    console.print(
        f"{len(entries)} numbers: {exact} equal, {near} within one step of the grid. "
        "published/ours where they differ."
    )


def _published_cell(entry: dict[str, Any]) -> str:
    published, ours = entry["published_gbps"], entry["gbps"]
    if entry["grid_steps"] == 0:
        return f"{published:g}"
    return f"{published:g}/{NONE_IS_ENOUGH if ours is None else format(ours, 'g')}"


def print_measured(console: Console, title: str, entries: Sequence[dict[str, Any]]) -> None:
    """Print measured utilisation with the prediction behind it."""
    table = plain_table(("", "Gbit/s", "measured", "predicted", "error"), title)
    for entry in entries:
        table.add_row(
            entry["row"],
            f"{entry['gbps']:.3g}",
            f"{entry['published']:.2%}",
            f"{entry['predicted']:.2%}",
            f"{entry['error']:+.1%}",
        )
    print_whole(console, table)


def plot_plan(plan: dict[str, Any], path: Path) -> None:
    """Draw utilisation over bandwidth; needs matplotlib, and no display."""
    figure, panels = plots.new_panels(1, 1, 7, 4.2)
    axes = panels[0, 0]
    curve = plan["curve"]
    for key, colour, line, label in (
        ("layer", plots.BLACK, "--", "ideal, layer by layer"),
        ("step", plots.BLUE, "-", "this library"),
    ):
        shares = [100 * share for share in curve[key]]
        axes.plot(curve["gbps"], shares, line, color=colour, label=label)
    if link := plan["link"]:
        axes.axvline(link["gbps"], color="0.6", linewidth=1, linestyle=":")
        axes.plot(
            link["gbps"], 100 * link["utilisation"], "o", color=plots.VERMILION, label="the link"
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 103)
    axes.set_xlabel("bandwidth of a replica's link (Gbit/s)")
    axes.set_ylabel("compute utilisation (%)")
    axes.set_title(_headline(plan), fontsize="x-small")
    plots.legend(axes, loc="lower right")
    plots.save(figure, path)
