"""The reports of ``diloco-comm doctor`` and ``doctor --links``, and the findings about links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from diloco_comm.base.service.addresses import parse_address

from ..common.console import plain_table, print_whole
from .facts import Finding

# Several lanes are advised if they are faster by this factor: a smaller gain may be the noise of
# two short measurements, and would not pay for the lanes' process groups.
LANES_GAIN = 1.5
# A larger share of segments sent again is reported as loss. A connection that merely fills a queue
# loses less: cubic loses some packets once in many round trips. For comparison, at 1 % and 80 ms
# the equation of TCP's throughput leaves a connection 1.8 Mbit/s.
LOSS = 0.005
# Settings for distance are advised from this round trip on. It is shorter within a region, where
# the defaults suffice.
LONG_TRIP_MS = 20.0
# Settings that send less are advised below this rate, at which a model of 100 million parameters
# takes 0.8 s a round at int8.
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


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print the facts, the self-test, the job and the findings."""
    console.print(_facts(report))
    if (test := report["self_test"]) is not None:
        words = "passed" if test["ok"] else f"failed: {test['error']}"
        console.print(f"self-test of two processes: {words}, {test['seconds']:.1f} s", markup=False)
    if (job := report["job"]) is not None:
        _print_job(console, job)
    print_findings(console, report["findings"])


def print_findings(console: Console, findings: list[dict[str, str]]) -> None:
    """Print each finding with its remedy."""
    for finding in findings:
        console.print(
            f"{finding['level']}: {finding['what']}; {finding['remedy']}",
            style="red" if finding["level"] == "error" else "yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if not findings:
        console.print("nothing to complain about")


def _facts(report: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in (
        ("versions", _versions(report["versions"])),
        ("extension", _extension(report["extension"])),
        ("processor", _processor(report["processor"])),
        ("GPU", _gpu(report["gpu"])),
        ("network", _network(report["network"])),
        ("settings", _settings(report["settings"])),
    ):
        table.add_row(name, value)
    return table


def _versions(versions: dict[str, str | None]) -> str:
    present = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    absent = ", ".join(name for name, version in versions.items() if not version)
    return present + (f"; not installed: {absent}" if absent else "")


def _extension(extension: dict[str, Any]) -> str:
    if extension["error"] is not None:
        return extension["error"]
    others = ", ".join(extension["implementations"])
    return f"{extension['path']}\nruns {others}; chosen: {extension['default']}"


def _processor(processor: dict[str, Any]) -> str:
    return (
        f"{processor['model']}, {processor['architecture']}, {processor['features']}, "
        f"{processor['cores']} cores, {processor['threads']} threads, "
        f"{processor['memory_gib']:g} GiB"
    )


def _gpu(gpu: dict[str, Any]) -> str:
    built = [f"CUDA {gpu['cuda']}"] if gpu["cuda"] else []
    built += [f"ROCm {gpu['rocm']}"] if gpu["rocm"] else []
    built += [f"NCCL {gpu['nccl']}"] if gpu["nccl"] else []
    devices = zip(gpu["devices"], gpu["operators"], strict=True)
    names = "\n".join(f"{name}, {operators}" for name, operators in devices) or "none"
    return f"{names}; torch has {', '.join(built) or 'no GPU parts'}"


def _network(network: dict[str, Any]) -> str:
    gloo = (
        network["gloo_interface"] or f"chosen by the host's name: {network['hostname_resolves_to']}"
    )
    return f"interfaces {', '.join(network['interfaces'])}; gloo's: {gloo}"


def _settings(settings: dict[str, Any]) -> str:
    timeout_s = settings["timeout_s"]
    words = "invalid" if timeout_s is None else f"{timeout_s:g} s"
    names = [f"{name}={value}" for name, value in settings["environment"].items()]
    return "\n".join([f"an exchange may take {words}", *names])


def _print_job(console: Console, job: dict[str, Any]) -> None:
    hosts = len(set(job["host_of_rank"]))
    replicas = "" if job["replicas"] is None else f", {job['replicas']} replicas"
    console.print(f"job of {job['world']} ranks on {hosts} host{'s'[: hosts > 1]}{replicas}")
    table = plain_table(("ranks", "hosts", "latency", "bandwidth"))
    for link in job["links"]:
        a, b = link["ranks"]
        at = job["host_of_rank"]
        latency, gbps = f"{link['latency_us']:.0f} us", f"{link['gbps']:.3g} Gbit/s"
        table.add_row(f"{a} - {b}", f"{at[a]} - {at[b]}", latency, gbps)
    print_whole(console, table)
