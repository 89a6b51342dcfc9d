"""The findings of ``diloco-comm doctor --links``, each with what to do, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ...base.service.addresses import parse_address
from ..common.printing import print_whole
from .facts import Finding

# A gain that outlasts the noise of two short measurements, and pays for a lane's process groups.
LANES_GAIN = 1.5
# A connection that fills a queue by itself loses fewer packets: cubic loses some once in many round
# trips. At 1 % and 80 ms the equation of TCP's throughput leaves a connection 1.8 Mbit/s.
LOSS = 0.005
# In one region a round trip is shorter, and the defaults do.
LONG_TRIP_MS = 20.0
# Slower than that, a model of 100 million parameters needs more than .8 s a round at int8.
SLOW_GBPS = 1.0


def judge_links(report: dict[str, Any]) -> list[Finding]:
    """Return the findings about all pairs; errors say that a pair cannot train."""
    replicas = {one["replica"]: one for one in report["replicas"]}
    found: list[Finding] = []
    for pair in report["pairs"]:
        if pair["link"]:
            found.append(_judge_link(pair))
            continue
        found += _judge_reach(pair, replicas)
        if pair["error"]:
            what = f"the measurement of replicas {_both(pair)} broke off: {pair['error']}"
            remedy = "run doctor again; if the same is said, the way between them loses connections"
            found.append(Finding("error", what, remedy))
        found += [*_judge_lanes(pair), *_judge_loss(pair, replicas)]
    return [*found, *_advise(report["pairs"])]


def _both(pair: dict[str, Any]) -> str:
    return "{} and {}".format(*pair["replicas"])


def _judge_reach(pair: dict[str, Any], replicas: dict[int, Any]) -> list[Finding]:
    refused = [(one["from"], one["to"], one["place"], one["reason"]) for one in pair["refused"]]
    if pair["way"] is not None:
        return [
            Finding(
                "warning",
                f"replica {to} cannot be dialled from replica {dialler} at {place} ({reason}), so "
                f"replica {to} dials",
                f'open TCP port {_port(place)} of replica {to}, or give its link advertise=""',
            )
            for dialler, to, place, reason in refused
        ]
    start = f"replicas {_both(pair)} do not reach each other: "
    if any(one["way"] == "relay" for one in pair["refused"]):
        *_, place, reason = refused[-1]
        remedy = f"look whether the relay runs, and open TCP port {_port(place)} there"
        return [Finding("error", f"{start}no way by the relay at {place} ({reason})", remedy)]
    if refused:
        words = [
            f"replica {to} cannot be dialled from replica {dialler} at {place} ({reason})"
            for dialler, to, place, reason in refused
        ]
        ports = [f"TCP port {_port(place)} of replica {to}" for _, to, place, _ in refused]
        remedy = f"open {' or '.join(ports)}, or give both relay= and no address"
        return [Finding("error", start + ", ".join(words), remedy)]
    without = [str(n) for n in pair["replicas"] if not replicas[n]["relay"]]
    remedy = 'let one of them listen at an open port, or give both relay="tcp://host:port"'
    what = f"{start}neither has an address, and there is no relay= on replica {', '.join(without)}"
    return [Finding("error", what, remedy)]


def _port(place: str) -> int:
    return parse_address("address", place)[1]


def _judge_link(pair: dict[str, Any]) -> Finding:
    why = pair["link"]
    remedy = "a firewall between them may end connections that it does not understand"
    if "allowed keys" in why:
        remedy = "each replica lets in the keys of all others, under their numbers"
    return Finding("error", f"the link of replicas {_both(pair)} does not connect: {why}", remedy)


def _judge_lanes(pair: dict[str, Any]) -> list[Finding]:
    if len(pair["rates"]) < 2:
        return []
    one, many = pair["rates"][0], pair["rates"][-1]
    gains = [b / max(a, 1e-9) for a, b in zip(one["gbps"], many["gbps"], strict=True)]
    i = gains.index(max(gains))
    if gains[i] < LANES_GAIN:
        return []
    start, end = pair["replicas"] if i == 0 else pair["replicas"][::-1]
    what = (
        f"one connection carries {_rate(one['gbps'][i])} from replica {start} to replica {end}, "
        f"{many['lanes']} carry {_rate(many['gbps'][i])}"
    )
    return [Finding("warning", what, f"use Link(lanes={many['lanes']}) on all replicas")]


def _judge_loss(pair: dict[str, Any], replicas: dict[int, Any]) -> list[Finding]:
    found = []
    for i, replica in enumerate(pair["replicas"]):
        share, control = _sent_again(pair, i) or 0.0, pair["congestion"][i]
        if share < LOSS or control == "bbr":
            continue
        to = f"replica {pair['replicas'][1 - i]}" if pair["way"] == "direct" else "the relay"
        what = (
            f"{100 * share:.1f} % of the packets from replica {replica} to {to} are sent "
            f"again, and {control} slows down at each loss"
        )
        command = f"`sysctl net.ipv4.tcp_congestion_control=bbr` on replica {replica}"
        if "bbr" in replicas[replica]["available"]:
            remedy = f"run {command}"
        else:
            remedy = (
                f"run `modprobe tcp_bbr` and {command}; a kernel without bbr needs Link(lanes=4) "
                "or more"
            )
        found.append(Finding("warning", what, remedy))
    return found


def _sent_again(pair: dict[str, Any], i: int) -> float | None:
    """Return the mean over the measurements: a slow connection sends some hundred packets only."""
    shares = [rate["retransmitted"][i] for rate in pair["rates"]]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _advise(pairs: Sequence[dict[str, Any]]) -> list[Finding]:
    """Name the settings for the slowest pair, if the defaults may not do."""
    measured = [pair for pair in pairs if pair["rates"]]
    if not measured:
        return []
    gbps = min(min(pair["rates"][-1]["gbps"]) for pair in measured)
    trip_ms = max(pair["round_trip_ms"] for pair in measured)
    if trip_ms < LONG_TRIP_MS and gbps >= SLOW_GBPS:
        return []
    what = f"the longest round trip is {_trip(trip_ms)}, and the slowest pair has {_rate(gbps)}"
    replicas = len({n for pair in pairs for n in pair["replicas"]})
    remedy = (
        "`diloco-comm plan --params PARAMETERS --layers LAYERS --step-time SECONDS "
        f"--replicas {replicas} --rtt-ms {trip_ms:.3g} --gbps {max(gbps, 1e-6):.3g} --choose` "
        "chooses H, the wire and the overlap"
    )
    return [Finding("advice", what, remedy)]


# -------------------------------------------------------------------------------- the report


def print_links(console: Console, report: dict[str, Any]) -> None:
    """Print how each replica is reached, and one line for each pair."""
    table = Table("replica", "reached", "keys", box=box.SIMPLE)
    for one in report["replicas"]:
        way = f"at {one['address']}" if one["address"] else "by nobody: dials the others"
        if one["relay"]:
            way = f"by the relay at {one['relay']}"
        table.add_row(str(one["replica"]), way, "yes" if one["keys"] else "no")
    print_whole(console, table)
    table = Table("replicas", "way", "round trip", box=box.SIMPLE)
    lanes = [rate["lanes"] for rate in max((p["rates"] for p in report["pairs"]), key=len)]
    for number in lanes:
        table.add_column(f"{number} connection{'s' * (number > 1)}")
    for name in ("sent again", "congestion", "link"):
        table.add_column(name)
    for pair in report["pairs"]:
        table.add_row(*_row(pair, len(lanes)))
    print_whole(console, table)


def _row(pair: dict[str, Any], num_rates: int) -> list[str]:
    start, end = pair["replicas"]
    row = [f"{start} - {end}", "none"]
    if pair["way"] is not None:
        target = end if pair["dialled_by"] == start else start
        by = " by the relay" if pair["way"] == "relay" else ""
        row[1] = f"{pair['dialled_by']} dials {target}{by}"
    row.append("" if pair["round_trip_ms"] is None else _trip(pair["round_trip_ms"]))
    rates = [_rates(rate["gbps"]) for rate in pair["rates"]]
    row += [*rates, *[""] * (num_rates - len(rates))]
    shares = [_sent_again(pair, i) for i in (0, 1)] if pair["rates"] else []
    row.append(" / ".join("?" if share is None else f"{100 * share:.2g} %" for share in shares))
    row.append(" / ".join(name or "?" for name in pair["congestion"]) if pair["way"] else "")
    row.append({None: "", "": "connects"}.get(pair["link"], "does not connect"))
    return row


def _trip(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds >= 1 else f"{1e3 * milliseconds:.0f} us"


def _rates(gbps: Sequence[float]) -> str:
    """Return the rates to the second replica of a pair, and back."""
    factor, unit = (1, "Gbit/s") if min(gbps) >= 1 else (1e3, "Mbit/s")
    return f"{' / '.join(f'{factor * rate:.3g}' for rate in gbps)} {unit}"


def _rate(gbps: float) -> str:
    return f"{gbps:.3g} Gbit/s" if gbps >= 1 else f"{1e3 * gbps:.3g} Mbit/s"
