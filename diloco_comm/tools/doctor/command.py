"""The options of ``diloco-comm doctor``."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.exits import FAILED, fail, given_options, misuse

if TYPE_CHECKING:
    from .facts import Finding

# The paragraphs behind \b keep their line breaks.
EXAMPLES = """Examples:

\b
diloco-comm doctor
diloco-comm doctor --no-self-test --json
torchrun --nproc-per-node 2 -m diloco_comm.tools.cli doctor --replicas 2
"""


def doctor(
    context: typer.Context,
    self_test: Annotated[
        bool, typer.Option(help="Let two processes on this machine exchange and compare.")
    ] = True,
    replicas: Annotated[
        int | None, typer.Option(help="In a job: number of replicas that the ranks form.")
    ] = None,
    megabytes: Annotated[
        float, typer.Option(help="In a job: size of the messages that measure a link.")
    ] = 4.0,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds the self-test may take; in a job, to wait for the other ranks."),
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show the installation and the machine, run a self-test, and warn of common mistakes.

    Under torchrun or srun the ranks compare their facts and measure their links. The exit status is
    1 if there is an error; warnings do not change the status.
    """
    for name, value in (("megabytes", megabytes), ("timeout", timeout)):
        if not 0 < value < math.inf:
            misuse(f"--{name} must be a positive number, got {value:g}")
    from . import facts as machine
    from .job import launch

    job = launch()
    for name in ("replicas", "megabytes"):
        if job is None and name in given_options(context):
            misuse(f"--{name} is for a launched job: start doctor by torchrun or srun")
    facts = machine.examine()
    findings = machine.judge(facts)
    report: dict[str, Any] = {"schema": 1, **facts, "self_test": None, "job": None}
    if job is not None:
        report["job"] = _in_job(job, facts, findings, replicas, int(megabytes * 1e6), timeout)
    elif self_test and facts["extension"]["error"] is None:
        report["self_test"] = self_test_of(findings, timeout)
    report["findings"] = machine.as_json(findings)
    if job is None or job["rank"] == 0:
        _show(report, as_json)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(FAILED)


def self_test_of(findings: list[Finding], timeout_s: float) -> dict[str, Any]:
    """Run the self-test, and add a finding if it fails."""
    from .facts import Finding
    from .selftest import run_self_test

    result = run_self_test(timeout_s)
    if not result["ok"]:
        remedy = "the installation does not work on this machine"
        if not result["in_time"]:
            remedy = "the machine may be busy: --timeout raises the limit"
        findings.append(Finding("error", f"the self-test failed: {result['error']}", remedy))
    return result


def _in_job(
    job: dict[str, int],
    facts: dict[str, Any],
    findings: list[Finding],
    replicas: int | None,
    num_bytes: int,
    timeout_s: float,
) -> dict[str, Any]:
    """Compare all ranks, and collect the findings of every rank on every rank."""
    import torch.distributed as dist

    from .job import examine_job, gather_findings, join, judge_job

    try:
        join(job, timeout_s)
        examined = examine_job(facts, replicas, num_bytes)
        findings[:] = [*gather_findings(findings), *judge_job(examined)]
        dist.barrier()
        dist.destroy_process_group()
    except ValueError as error:
        misuse(str(error))
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        fail(
            f"rank {job['rank']} of {job['world']} did not get through to the others (--timeout "
            f"{timeout_s:g} s): {reason}"
        )
    return examined


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=1))
        return
    from rich.console import Console

    from .report import print_report

    # The output of a job is no terminal: rich would cut lines at 80 columns.
    width = None if os.isatty(1) else 120
    print_report(Console(width=width), report)
