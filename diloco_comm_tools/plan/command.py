"""``diloco-comm plan`` and its sub-commands."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco_comm.base.files import whole_file

from ..common.commands import (
    fail,
    given_options,
    in_sentences,
    is_for_below,
    misuse,
    option,
    rare,
    with_dataclasses,
)
from ..common.console import new_console, print_report, save_plot
from ..common.outputs import check_file, checked_plot
from ..common.sizes import at_least, not_negative, parse_count

if TYPE_CHECKING:
    from .request import Request

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
# An option, another option that it needs, and what the other one means.
_NEEDS = (
    ("target", "gbps", "the bandwidth of the link that must reach it"),
    *(
        (name, "gbps", "the bandwidth of the link to choose settings for")
        for name in ("egress_usd_per_gb", "gpu_usd_per_hour", "choose")
    ),
    ("write", "gbps", "the bandwidth of the link that the settings are for"),
    ("gpus", "gpu_usd_per_hour", "the price of a GPU"),
)

# ---------------------------------------------------------------------- groups of options

Layers = Annotated[int | None, option("Layers of the model.")]
Replicas = Annotated[int, option("Replicas.", "--replicas")]
Wire = Annotated[
    str | None,
    option(
        "Wire format (int8, or fp32 for dp); a named one is that of the settings chosen for "
        "--gbps, too. auto chooses among int4 and the rotated wires."
    ),
]
RttMs = Annotated[float, option("Round trip of the link, ms.")]
Gbps = Annotated[float | None, option("A link to look at, Gbit/s.")]
Target = Annotated[float, rare("Utilisation that settings for the link must reach.")]
Efficiency = Annotated[
    float | None,
    rare("Share of the link's rate that payloads get; by default as measured at that rate."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@dataclass(frozen=True)
class Model:
    """The size of a model, as a number or in a file, and the time of its step."""

    params: Annotated[str | None, option("Parameters, such as 7B or 100e9.")] = None
    model_config: Annotated[
        Path | None, option("Hugging Face config.json to count parameters and layers in.")
    ] = None
    safetensors: Annotated[
        Path | None, option("Weights, or their .index.json, to count them in.")
    ] = None
    step_time: Annotated[
        float | None, option("Seconds of an inner step without communication.")
    ] = None

    def size(self, layers: int | None) -> tuple[float, int]:
        """Return the numbers of parameters and layers; numbers that are given win over files."""
        from .request import Size, from_config, from_safetensors

        if self.model_config is not None and self.safetensors is not None:
            misuse("--model-config and --safetensors exclude each other")
        counted, num_params = Size(0.0, 0), None
        try:
            if self.params is not None:
                num_params = parse_count("--params", self.params)
            if self.model_config is not None:
                counted = from_config(self.model_config)
            elif self.safetensors is not None:
                counted = from_safetensors(self.safetensors)
            elif num_params is None or layers is None:
                absent = ["--params"] * (num_params is None) + ["--layers"] * (layers is None)
                misuse(
                    f"{' and '.join(absent)} missing: the model's size is --params and --layers, "
                    "--model-config or --safetensors"
                )
        except UnicodeDecodeError:
            misuse(f"{self.model_config or self.safetensors} is not a text file")
        except ValueError as error:
            misuse(str(error))
        except OSError as error:
            misuse(f"cannot read {error.filename}: {error.strerror}")
        return (
            counted.num_params if num_params is None else num_params,
            counted.num_layers if layers is None else layers,
        )

    def seconds(self) -> float:
        """Return the time of a step."""
        if self.step_time is None:
            misuse("--step-time is missing: the seconds of an inner step without communication")
        return self.step_time


@dataclass(frozen=True)
class Run:
    """How replicas train and what they send."""

    replicas: Replicas = 2
    method: Annotated[str, option("dp, diloco, streaming, delayed, eager or co2.")] = "diloco"
    sync_every: Annotated[int, option("Inner steps between two sends (H).")] = 100
    wire: Wire = None
    rtt_ms: RttMs = 0.0
    fragment_layers: Annotated[
        int | None,
        rare(
            "Layers of a fragment, 0 for one fragment; 3 by default for streaming. dp and diloco "
            "send all at once."
        ),
    ] = None
    delay: Annotated[int, rare("Steps from send to apply, of streaming.")] = 1
    rounds: Annotated[int, rare("Sends to apply, of delayed, eager, co2.")] = 1
    block_size: Annotated[int, rare("Elements that share a scale.")] = 256
    bits: Annotated[float | None, rare("Bits sent for each parameter, instead of the wire's.")] = (
        None
    )
    efficiency: Efficiency = None

    def arguments(self, layers: int) -> dict[str, Any]:
        """Return the arguments of a ``Request`` for a model of so many layers."""
        of_fragment, wire = self.fragment_layers, self.wire
        if of_fragment is None:
            of_fragment = min(3, layers) if self.method == "streaming" else 0
        wire = wire or ("fp32" if self.method == "dp" else "int8")
        given = asdict(self) | {"fragment_layers": of_fragment, "wire": wire}
        return {"workers": given.pop("replicas"), **given}


@dataclass(frozen=True)
class Prices:
    """The price of traffic and machines, and the tokens of an inner step."""

    tokens_per_step: Annotated[
        int | None, rare("Tokens of one replica's inner step, for the prices.")
    ] = None
    egress_usd_per_gb: Annotated[float, rare("Price of 1e9 bytes that a replica sends.")] = 0.0
    gpu_usd_per_hour: Annotated[float, rare("Price of a GPU.")] = 0.0
    gpus: Annotated[
        int, rare("GPUs of a replica, for --gpu-usd-per-hour.", "--gpus-per-replica")
    ] = 1

    def __post_init__(self) -> None:
        tokens = 1 if self.tokens_per_step is None else self.tokens_per_step
        at_least(1, tokens_per_step=tokens, gpus_per_replica=self.gpus)
        not_negative(egress_usd_per_gb=self.egress_usd_per_gb)
        not_negative(gpu_usd_per_hour=self.gpu_usd_per_hour)

    def per_billion_tokens(self, request: Request, share: float) -> dict[str, float]:
        """Return the dollars that 1e9 tokens cost at a compute utilisation, in all and by part."""
        assert self.tokens_per_step is not None
        steps = 1e9 / self.tokens_per_step
        gpu_hours = steps * request.step_time / share * self.gpus / 3600
        sent_gb = steps / request.steps_a_round * request.bytes_per_round / 1e9
        parts = {
            "gpus": gpu_hours * self.gpu_usd_per_hour,
            "egress": sent_gb * self.egress_usd_per_gb,
        }
        return {**parts, "total": sum(parts.values())}


@dataclass(frozen=True)
class Quorum:
    """When the syncer of decoupled training merges."""

    quorum: Annotated[int, option("Learners of a quorum (K).")] = 1
    delay: Annotated[int, option("Steps in which a merge should be back (tau).")] = 2
    gamma: Annotated[float, rare("Share of the slack that the grace window takes.")] = 0.5


# ------------------------------------------------------------------------------- commands

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
        paid = None if prices.tokens_per_step is None else prices.per_billion_tokens
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
    from diloco_comm.asynchronous.decoupled.syncer import QuorumRule

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
