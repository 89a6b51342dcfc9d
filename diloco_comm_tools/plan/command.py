"""``diloco-comm plan`` and its sub-commands."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_comm.base.files import whole_file

from ..common.console import new_console, print_report, save_plot
from ..common.exits import fail, given_options, in_sentences, misuse
from ..common.options import is_for_below, option, rare, with_dataclasses
from ..common.outputs import check_file, checked_plot
from ..common.sizes import parse_count
from .options import (
    AsJson,
    Efficiency,
    Gbps,
    Layers,
    Model,
    Prices,
    Quorum,
    Replicas,
    RttMs,
    Run,
    Target,
    Wire,
)

# The paragraphs behind \b keep their line breaks.
EXAMPLES = """Examples:

\b
diloco-comm plan --params 1B --layers 24 --step-time 0.1
diloco-comm plan --params 100e9 --layers 108 --step-time 4.9 --method streaming --bits 13.4 --json
diloco-comm plan --params 7B --layers 32 --step-time 2 --gbps 1 --rtt-ms 50 --plot plan.png
diloco-comm plan --params 350M --layers 24 --step-time 0.5 --gbps 1 --write diloco.json
diloco-comm plan --params 1B --layers 24 --step-time 0.5 --gbps 0.1 --wire auto --wires
diloco-comm plan --params 1B --layers 24 --step-time 0.5 --gbps 1 --rtt-ms 50 --choose
"""
FAILURES_EXAMPLES = """Examples:

\b
diloco-comm plan failures
diloco-comm plan failures --chips 20000 --replicas 4
diloco-comm plan failures --chips 64 --replicas 4 --params 7B --layers 32 --step-time 2 --gbps 1
"""
DECOUPLED_EXAMPLES = """Examples:

\b
diloco-comm plan decoupled --params 7B --step-time 2 --replicas 8 --sync-every 24 --gbps 20
"""
PUBLISHED_EXAMPLES = """Examples:

\b
diloco-comm plan published
"""
# An option, another one that it needs, and what that is.
_NEEDS = (
    ("target", "gbps", "the bandwidth of the link that must reach it"),
    *(
        (name, "gbps", "the bandwidth of the link to choose settings for")
        for name in ("egress_usd_per_gb", "gpu_usd_per_hour", "choose")
    ),
    ("write", "gbps", "the bandwidth of the link that the settings are for"),
    ("gpus", "gpu_usd_per_hour", "the price of a GPU"),
)

plan_app = typer.Typer(epilog=EXAMPLES)


@plan_app.callback(invoke_without_command=True)
@with_dataclasses
def plan(
    context: typer.Context,
    *,
    model: Model,
    layers: Layers = None,
    run: Run,
    prices: Prices,
    gbps: Gbps = None,
    target: Target = 0.95,
    choose: Annotated[
        bool,
        typer.Option(
            "--choose",
            help="Print only the settings chosen for --gbps, with an outer learning rate and the "
            "loss to expect.",
        ),
    ] = False,
    all_wires: Annotated[
        bool, rare("Print bytes, memory and loss of all wires, too.", "--wires")
    ] = False,
    write: Annotated[
        Path | None, option("Write the settings chosen for --gbps into this JSON file.")
    ] = None,
    plot: Annotated[Path | None, option("Draw utilisation into this PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict compute utilisation, bandwidth, traffic and memory of a run before it is started."""
    given = given_options(context)
    if is_for_below(context, given):
        return
    _check_given(given)
    size = model.size(layers)
    step_time = model.seconds()
    from .estimate import make_plan
    from .report import plot_plan, print_plan
    from .request import AUTO, WIRES_CHOSEN, Request

    with in_sentences(("block_size",)):
        plot = checked_plot("--plot", plot)
        check_file("--write", write)
        request = Request(*size, step_time, **run.arguments(size[1]))
        named = WIRES_CHOSEN if run.wire in (None, AUTO) else (request.wire,)
        paid = None if prices.tokens_per_step is None else prices
        made = make_plan(request, gbps, target, chosen_wires=named, prices=paid, with_outer=choose)
    show = functools.partial(print_plan, all_wires=all_wires, only_chosen=choose)
    print_report(made, as_json, show)
    if plot is not None:
        save_plot(plot, functools.partial(plot_plan, made), as_json=as_json)
    if write is not None:
        _write(made["link"], write, as_json)


def _check_given(given: Mapping[str, str]) -> None:
    """Refuse options that lack another one, or exclude each other."""
    for name, needed, why in _NEEDS:
        if name in given and needed not in given:
            misuse(f"{given[name]} needs --{needed.replace('_', '-')}: {why}")
    prices = [given[name] for name in ("egress_usd_per_gb", "gpu_usd_per_hour") if name in given]
    if "choose" in given and "all_wires" in given:
        misuse("--choose prints the chosen settings alone: leave out --wires")
    if prices and "tokens_per_step" not in given:
        misuse(f"{prices[0]} needs --tokens-per-step: the tokens of one replica's inner step")
    if "tokens_per_step" in given and not prices:
        misuse("--tokens-per-step needs --egress-usd-per-gb or --gpu-usd-per-hour")


def _write(link: dict[str, Any], path: Path, as_json: bool) -> None:
    """Write the arguments that were chosen for a link as a file for ``DiLoCo(config=...)``."""
    if link["chosen"] is None:
        fail(f"nothing is written to {path}: no setting that was tried reaches --target")
    try:
        with whole_file("--write", path) as file:
            file.write_text(json.dumps(link["chosen"]["config"], indent=1) + "\n")
    except OSError as error:
        fail(str(error))
    if not as_json:
        print(f"\n{path} holds the same: DiLoCo(model, optimizer, config={str(path)!r})")


@plan_app.command(epilog=FAILURES_EXAMPLES)
@with_dataclasses
def failures(
    context: typer.Context,
    model: Model,
    chips: Annotated[
        str | None, option("Chips of all replicas; the papers' table without this option.")
    ] = None,
    replicas: Replicas = 2,
    lost_seconds: Annotated[float, option("Seconds a replica loses at a failure.")] = 22.0,
    failures_per_year: Annotated[float, option("Failures of one chip a year.")] = 1.0,
    layers: Layers = None,
    wire: Wire = None,
    rtt_ms: RttMs = 0.0,
    gbps: Gbps = None,
    target: Target = 0.95,
    efficiency: Efficiency = None,
    as_json: AsJson = False,
) -> None:
    """Predict goodput under failures; with a model and a link, the settings for that link, too."""
    given = given_options(context)
    given.pop("as_json", None)
    if given and chips is None:
        options = ", ".join(given.values())
        misuse(f"{options} needs --chips: without it the paper's table is shown")
    made = None
    if given.keys() - {"chips", "replicas", "lost_seconds", "failures_per_year"}:
        size = model.size(layers)
        step_time = model.seconds()
        if gbps is None:
            misuse("failures of a model need --gbps: the bandwidth of the link of a replica")
        from .estimate import make_plan
        from .request import AUTO, WIRES_CHOSEN, Request

        with in_sentences():
            run = Run(replicas=replicas, wire=wire, rtt_ms=rtt_ms, efficiency=efficiency)
            request = Request(*size, step_time, **run.arguments(size[1]))
            named = WIRES_CHOSEN if wire in (None, AUTO) else (request.wire,)
            made = make_plan(request, gbps, target, chosen_wires=named)
    from .failures import make_report, print_failures

    with in_sentences():
        count = None if chips is None else parse_count("--chips", chips)
        report = make_report(count, replicas, lost_seconds, failures_per_year, made)
    print_report(report, as_json, print_failures)


@plan_app.command(epilog=DECOUPLED_EXAMPLES)
@with_dataclasses
def decoupled(
    model: Model,
    rule: Quorum,
    learners: Replicas = 2,
    sync_every: Annotated[int, option("Inner steps between two calls of a fragment (H).")] = 100,
    fragments: Annotated[int, option("Fragments of equal size.")] = 24,
    wire: Annotated[str, option("Wire format of the reports.")] = "int4",
    wire_down: Annotated[str, option("Wire format of the commits.")] = "fp32",
    rtt_ms: RttMs = 0.0,
    gbps: Gbps = None,
    syncer_gbps: Annotated[
        float | None, rare("The syncer's link; by default as wide as --gbps.")
    ] = None,
    tokens_per_step: Annotated[
        int | None, rare("Tokens of an inner step, for the learner's line.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan decoupled training: traffic and grace window."""
    if model.step_time is None or not (model.params or model.model_config or model.safetensors):
        misuse("decoupled training needs --params and --step-time")
    num_params, _ = model.size(1)
    from diloco_comm.asynchronous.decoupled.fragment_round import QuorumRule

    from .decoupled import DecoupledRequest, make_report, print_decoupled

    with in_sentences(("quorum", "gamma", "delay", "wire")):
        request = DecoupledRequest(
            num_params,
            model.step_time,
            learners,
            sync_every,
            fragments,
            wire,
            wire_down,
            QuorumRule(**vars(rule)),
            rtt_ms,
        )
        report = make_report(request, gbps, syncer_gbps, tokens_per_step)
    print_report(report, as_json, print_decoupled)


@plan_app.command(epilog=PUBLISHED_EXAMPLES)
def published(as_json: AsJson = False) -> None:
    """Compare with the papers' tables."""
    from .published import GRID, INTELLECT_1, TABLE_4, TABLE_5, compare, compare_measured
    from .report import print_measured, print_published

    tables = {"streaming_table_4": compare(TABLE_4), "eager_table_5": compare(TABLE_5)}
    tables["measured_grid"] = compare_measured(GRID)
    tables["intellect_1"] = compare_measured(INTELLECT_1)
    if as_json:
        print(json.dumps({"schema": 1, "published": tables}, indent=1))
        return
    console = new_console(width=160)
    print_published(
        console, "Streaming DiLoCo, Table 4 (Gbit/s, H=100)", tables["streaming_table_4"]
    )
    console.print()
    print_published(console, "Eager Updates, Table 5: not reproduced", tables["eager_table_5"])
    console.print()
    title = "Measured: DiLoCo in fp32, 30.8 million parameters, four GPUs on shaped links"
    print_measured(console, title, tables["measured_grid"])
    console.print()
    print_measured(console, "Measured: INTELLECT-1", tables["intellect_1"])
