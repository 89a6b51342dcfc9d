"""The options of ``diloco-comm doctor``."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.commands import FAILED, fail, given_options, in_options, misuse, note

if TYPE_CHECKING:
    from rich.console import Console

    from .facts import Finding
    from .links import Request

# The paragraphs behind \b keep their line breaks.
EXAMPLES = """Examples:

\b
diloco-comm doctor
diloco-comm doctor --no-self-test --json
torchrun --nproc-per-node 2 -m diloco_comm_tools.cli doctor --replicas 2
diloco-comm doctor --links --store tcp://192.0.2.1:29400 --replica 0 --of 2 --listen 0.0.0.0:29700
"""
# The options that go with --links alone, and those that do not go with --links.
_OF_LINKS = ("store", "replica", "of", "listen", "advertise", "keys", "relay", "proxy", "lanes")
_NOT_OF_LINKS = ("self_test", "replicas", "megabytes")
# More connections than a link of any training has.
_MOST_LANES = 64


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
        typer.Option(
            help="Seconds the self-test may take; in a job or with --links, to wait for others."
        ),
    ] = 120.0,
    links: Annotated[
        bool,
        typer.Option("--links", help="Measure the links of a run; start it on each replica."),
    ] = False,
    store: Annotated[
        str | None, typer.Option(help="With --links: the run's store, tcp://host:port.")
    ] = None,
    replica: Annotated[
        int | None, typer.Option(min=0, help="With --links: the number of this replica.")
    ] = None,
    of: Annotated[int | None, typer.Option(min=2, help="With --links: number of replicas.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="With --links: host:port, as Link(listen=...).")
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(help='With --links: tcp://host:port or "", as Link(advertise=...).'),
    ] = None,
    keys: Annotated[
        str | None, typer.Option(help="With --links: folder or file, as Link(keys=...).")
    ] = None,
    relay: Annotated[
        str | None, typer.Option(help="With --links: tcp://host:port, as Link(relay=...).")
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option(
            help="With --links: http://host:port or socks5://..., as Link(proxy=...). The password "
            "is in DILOCO_COMM_PROXY_PASSWORD."
        ),
    ] = None,
    lanes: Annotated[
        int,
        typer.Option(
            min=1, max=_MOST_LANES, help="With --links: connections to compare with a single one."
        ),
    ] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show the installation and the machine, run a self-test, and warn of common mistakes.

    Under torchrun or srun the ranks compare their facts and measure their links. With --links,
    started on every replica of a run, doctor says who reaches whom, how fast, and what to change.
    The exit status is 1 if there is an error; warnings do not change the status.
    """
    for name, value in (("megabytes", megabytes), ("timeout", timeout)):
        if not 0 < value < math.inf:
            misuse(f"--{name} must be a positive number, got {value:g}")
    given = given_options(context)
    if links:
        given_here = {name: context.params[name] for name in _OF_LINKS}
        return _links(given, given_here, timeout, as_json)
    for name in _OF_LINKS:
        if name in given:
            misuse(f"--{name} is for --links")
    from . import facts as machine
    from .job import launch

    job = launch()
    for name in ("replicas", "megabytes"):
        if job is None and name in given:
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


def _links(given: dict[str, str], options: dict[str, Any], timeout_s: float, as_json: bool) -> None:
    """Measure the links of all replicas, and print the report."""
    for name in _NOT_OF_LINKS:
        if name in given:
            misuse(f"{given[name]} does not go with --links")
    for name in ("store", "replica", "of"):
        if options[name] is None:
            misuse(f"--links needs --{name}, as the training has the value")
    from .facts import as_json as findings_as_json
    from .links import examine_links
    from .report import judge_links, print_findings, print_links

    request = _request(options, timeout_s)
    try:
        report = examine_links(request, note)
    except RuntimeError as error:
        fail(" ".join(str(error).split()))
    findings = judge_links(report)
    report["findings"] = findings_as_json(findings)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        console = _console()
        print_links(console, report)
        print_findings(console, report["findings"])
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(FAILED)


def _request(options: dict[str, Any], timeout_s: float) -> Request:
    """Check the options of --links, and connect to the store."""
    from diloco_comm.base.service.addresses import (
        check_link,
        check_no_password,
        proxy_of,
        with_scheme,
    )
    from diloco_comm.base.service.keys import link_keys
    from diloco_comm.rounds.handshake import connected_store

    from .links import Request

    if not 0 <= options["replica"] < options["of"]:
        misuse(f"--replica must be from 0 to {options['of'] - 1}, got {options['replica']}")
    places = [options[name] for name in ("listen", "advertise", "keys", "relay", "proxy")]
    try:
        check_no_password(options["proxy"])
        check_link("tcp", *places)
        keys, proxy = link_keys(options["keys"]), proxy_of(options["proxy"])
        if keys is not None:
            keys.check_own(options["replica"])
        store = connected_store(options["store"], timeout_s, keys, proxy)
    except ValueError as error:
        misuse(in_options(str(error), _OF_LINKS))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        fail(
            f"the store at {with_scheme(options['store'])} does not answer "
            f"(--timeout {timeout_s:g} s): {reason}"
        )
    assert store is not None
    relay = options["relay"] and with_scheme(options["relay"])
    options = {**options, "keys": keys, "proxy": proxy, "store": store, "relay": relay}
    return Request(**options, timeout_s=timeout_s)


def self_test_of(findings: list[Finding], timeout_s: float) -> dict[str, Any]:
    """Run the self-test, and add a finding if it fails."""
    from .facts import Finding
    from .job import run_self_test

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

    from diloco_comm.base.interrupts import end_at_once

    from .job import examine_job, gather_findings, join, judge_job

    end_at_once()
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
    from .report import print_report

    print_report(_console(), report)


def _console() -> Console:
    from rich.console import Console

    # The output of a job is no terminal: rich would cut lines at 80 columns.
    return Console(width=None if os.isatty(1) else 120)
