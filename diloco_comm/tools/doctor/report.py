"""The report of ``diloco-comm doctor``."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..common.printing import plain_table, print_whole


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
