"""The options of ``diloco-comm plan``."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_comm.base.files import whole_file

from ..common.console import new_console, print_report, save_plot
from ..common.exits import fail, given_options, in_sentences, misuse, note
from ..common.outputs import check_file, checked_plot
from ..common.sizes import parse_count

# The paragraphs behind \b keep their line breaks.
EXAMPLES = """Examples:

\b
diloco-comm plan --params 1B --layers 24 --step-time 0.1
diloco-comm plan --params 100e9 --layers 108 --step-time 4.9 --method streaming --bits 13.4 --json
diloco-comm plan --params 7B --layers 32 --step-time 2 --gbps 1 --rtt-ms 50 --plot plan.png
diloco-comm plan --params 350M --layers 24 --step-time 0.5 --gbps 1 --write diloco.json
diloco-comm plan --params 1B --layers 24 --step-time 0.5 --gbps 0.1 --wire auto --wires
diloco-comm plan --params 1B --layers 24 --step-time 0.5 --gbps 1 --rtt-ms 50 --choose
diloco-comm plan --published
diloco-comm plan --failures --chips 20000 --replicas 4
diloco-comm plan --failures --chips 64 --replicas 4 --params 7B --layers 32 --step-time 2 --gbps 1
diloco-comm plan --decoupled --params 7B --step-time 2 --replicas 8 --sync-every 24 --gbps 20
"""
# The options of each mode beside --json.
_TAKEN_BY = {
    "--published": (),
    "--failures": (
        *("chips", "replicas", "workers", "lost_seconds", "failures_per_year"),
        *("params", "layers", "model_config", "safetensors", "step_time"),
        *("wire", "rtt_ms", "gbps", "target", "efficiency"),
    ),
    "--decoupled": (
        *("params", "model_config", "safetensors", "step_time", "replicas", "workers"),
        *("sync_every", "wire", "rtt_ms", "gbps", "syncer_gbps", "tokens_per_step"),
        *("fragments", "wire_down", "quorum", "gamma", "delay"),
    ),
}
_OF_MODE_ALONE = {
    "--failures": ("chips", "lost_seconds", "failures_per_year"),
    "--decoupled": ("fragments", "wire_down", "quorum", "gamma", "syncer_gbps"),
}
# Options of --failures that only settings for a link need.
_OF_MODEL_AND_LINK = (
    *("params", "layers", "model_config", "safetensors", "step_time"),
    *("wire", "rtt_ms", "gbps", "target", "efficiency"),
)


# An option, another one that it needs, and what that is.
_NEEDS = (
    ("target", "gbps", "the bandwidth of the link that must reach it"),
    *(
        (name, "gbps", "the bandwidth of the link to choose settings for")
        for name in ("egress_usd_per_gb", "gpu_usd_per_hour", "choose")
    ),
    ("write", "gbps", "the bandwidth of the link that the settings are for"),
    ("gpus_per_replica", "gpu_usd_per_hour", "the price of a GPU"),
)
# Options that a request takes as they are.
_OF_REQUEST = (
    *("step_time", "method", "sync_every", "rounds", "block_size", "bits", "rtt_ms", "efficiency"),
)


def plan(
    context: typer.Context,
    params: Annotated[str | None, typer.Option(help="Parameters, such as 7B or 100e9.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model.")] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="Hugging Face config.json to count them in.")
    ] = None,
    safetensors: Annotated[
        Path | None, typer.Option(help="Weights, or their .index.json, to count them in.")
    ] = None,
    step_time: Annotated[
        float | None, typer.Option(help="Seconds of an inner step without communication.")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Replicas.")] = 2,
    workers: Annotated[
        int | None, typer.Option(hidden=True, help="Deprecated name of --replicas.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="dp, diloco, streaming, delayed, eager or co2.")
    ] = "diloco",
    sync_every: Annotated[int, typer.Option(help="Inner steps between two sends (H).")] = 100,
    fragment_layers: Annotated[
        int | None,
        typer.Option(
            help="Layers of a fragment, 0 for one fragment; 3 by default for streaming. "
            "dp and diloco send all at once."
        ),
    ] = None,
    delay: Annotated[
        int | None,
        typer.Option(help="Steps from send to apply: of streaming (1), of --decoupled (tau, 2)."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Sends to apply, of delayed, eager, co2.")] = 1,
    wire: Annotated[
        str | None,
        typer.Option(
            help="Wire format (int8, or fp32 for dp); a named one is that of the settings chosen "
            "for --gbps, too. auto chooses among int4 and the rotated wires."
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Elements that share a scale.")] = 256,
    bits: Annotated[
        float | None, typer.Option(help="Bits sent for each parameter, instead of the wire's.")
    ] = None,
    rtt_ms: Annotated[float, typer.Option(help="Round trip of the link, ms.")] = 0.0,
    gbps: Annotated[float | None, typer.Option(help="A link to look at, Gbit/s.")] = None,
    target: Annotated[
        float, typer.Option(help="Utilisation that settings for the link must reach.")
    ] = 0.95,
    efficiency: Annotated[
        float | None,
        typer.Option(
            help="Share of the link's rate that payloads get; by default as measured at that rate."
        ),
    ] = None,
    choose: Annotated[
        bool,
        typer.Option(
            "--choose",
            help="Print only the settings chosen for --gbps, with an outer learning rate and the "
            "loss to expect.",
        ),
    ] = False,
    egress_usd_per_gb: Annotated[
        float | None, typer.Option(help="Price of 1e9 bytes that a replica sends.")
    ] = None,
    gpu_usd_per_hour: Annotated[float | None, typer.Option(help="Price of a GPU.")] = None,
    gpus_per_replica: Annotated[
        int, typer.Option(help="GPUs of a replica, for --gpu-usd-per-hour.")
    ] = 1,
    tokens_per_step: Annotated[
        int | None,
        typer.Option(help="Tokens of one replica's inner step, for the prices and --decoupled."),
    ] = None,
    all_wires: Annotated[
        bool, typer.Option("--wires", help="Print bytes, memory and loss of all wires, too.")
    ] = False,
    published: Annotated[
        bool, typer.Option("--published", help="Compare with the papers' tables instead.")
    ] = False,
    failures: Annotated[
        bool,
        typer.Option("--failures", help="Predict goodput under failures; see --chips."),
    ] = False,
    chips: Annotated[
        str | None,
        typer.Option(help="Chips of all replicas, for --failures; the papers' table without."),
    ] = None,
    lost_seconds: Annotated[
        float, typer.Option(help="Seconds a replica loses at a failure, for --failures.")
    ] = 22.0,
    failures_per_year: Annotated[
        float, typer.Option(help="Failures of one chip a year, for --failures.")
    ] = 1.0,
    decoupled: Annotated[
        bool,
        typer.Option("--decoupled", help="Plan decoupled training: traffic and grace window."),
    ] = False,
    fragments: Annotated[int, typer.Option(help="Fragments, for --decoupled.")] = 24,
    wire_down: Annotated[
        str, typer.Option(help="Wire format of the commits, for --decoupled.")
    ] = "fp32",
    syncer_gbps: Annotated[
        float | None,
        typer.Option(help="The syncer's link, for --decoupled; by default as wide as --gbps."),
    ] = None,
    quorum: Annotated[int, typer.Option(help="Learners of a quorum, for --decoupled.")] = 1,
    gamma: Annotated[
        float, typer.Option(help="Share of the slack that the window takes, for --decoupled.")
    ] = 0.5,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the settings chosen for --gbps into this JSON file."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw utilisation into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Predict compute utilisation, bandwidth, traffic and memory of a run before it is started."""
    given = given_options(context)
    _check_given(given)
    if workers is not None:
        note("--workers is deprecated: its name is --replicas")
        replicas = workers
    if published:
        _print_published(as_json)
        return
    if decoupled:
        if step_time is None or not {"params", "model_config", "safetensors"} & set(given):
            misuse("--decoupled needs --params and --step-time")
        count, _ = _size(params, 1, model_config, safetensors)
        _print_decoupled({**context.params, "params": count, "learners": replicas})
        return
    has_model = any(name in given for name in _OF_MODEL_AND_LINK)
    if failures and not has_model:
        _print_failures(chips, replicas, lost_seconds, failures_per_year, None, as_json)
        return
    size = _size(params, layers, model_config, safetensors)
    if step_time is None:
        misuse("--step-time is missing: the seconds of an inner step without communication")
    if failures and gbps is None:
        misuse("--failures with a model needs --gbps: the bandwidth of the link of a replica")
    if fragment_layers is None:
        fragment_layers = min(3, size[1]) if method == "streaming" else 0
    from .estimate import AUTO, Prices, Request, make_plan

    with in_sentences(("block_size",)):
        plot = checked_plot("--plot", plot)
        check_file("--write", write)
        request = Request(
            *size,
            workers=replicas,
            fragment_layers=fragment_layers,
            delay=1 if delay is None else delay,
            wire=wire or ("fp32" if method == "dp" else "int8"),
            **{name: context.params[name] for name in _OF_REQUEST},
        )
        named = {} if wire in (None, AUTO) else {"chosen_wires": (request.wire,)}
        prices = None
        if tokens_per_step is not None:
            usd = (egress_usd_per_gb or 0.0, gpu_usd_per_hour or 0.0)
            prices = Prices(tokens_per_step, *usd, gpus_per_replica)
        made = make_plan(request, gbps, target, prices=prices, with_outer=choose, **named)
    if failures:
        _print_failures(chips, replicas, lost_seconds, failures_per_year, made, as_json)
        return
    _show(made, plot, as_json, all_wires=all_wires, only_chosen=choose)
    if write is not None:
        _write(made["link"], write, as_json)


def _check_given(given: Mapping[str, str]) -> None:
    """Refuse options that the chosen mode does not read."""
    modes = [mode for mode in _TAKEN_BY if mode in given.values()]
    if len(modes) > 1:
        misuse(f"{' and '.join(modes)} exclude each other")
    if modes:
        mode, own = modes[0], {name: given[name] for name in _TAKEN_BY[modes[0]] if name in given}
        free = {*own.values(), mode, "--json"}
        if others := [option for option in given.values() if option not in free]:
            which = "that option" if len(others) == 1 else "those options"
            misuse(f"{mode} does not take {', '.join(others)}: leave out {which}")
        if mode == "--failures" and own and "chips" not in own:
            misuse(
                f"{', '.join(own.values())} needs --chips: without it the paper's table is shown"
            )
        return
    for mode, names in _OF_MODE_ALONE.items():
        if found := [given[name] for name in names if name in given]:
            misuse(f"{found[0]} needs {mode}")
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


def _show(
    made: dict[str, Any],
    plot: Path | None,
    as_json: bool,
    *,
    all_wires: bool,
    only_chosen: bool,
) -> None:
    from .report import plot_plan, print_plan

    show = functools.partial(print_plan, all_wires=all_wires, only_chosen=only_chosen)
    print_report(made, as_json, show)
    if plot is not None:
        save_plot(plot, functools.partial(plot_plan, made), as_json=as_json)


def _size(
    params: str | None, layers: int | None, config: Path | None, safetensors: Path | None
) -> tuple[float, int]:
    """Take the model's size from what was given; numbers win over files."""
    from .request import Size, from_config, from_safetensors

    if config is not None and safetensors is not None:
        misuse("--model-config and --safetensors exclude each other")
    counted = Size(0.0, 0)
    try:
        num_params = None if params is None else parse_count("--params", params)
        if config is not None:
            counted = from_config(config)
        elif safetensors is not None:
            counted = from_safetensors(safetensors)
        elif num_params is None or layers is None:
            absent = ["--params"] * (num_params is None) + ["--layers"] * (layers is None)
            misuse(
                f"{' and '.join(absent)} missing: the model's size is --params and --layers, "
                "--model-config or --safetensors"
            )
    except UnicodeDecodeError:
        misuse(f"{config or safetensors} is not a text file")
    except ValueError as error:
        misuse(str(error))
    except OSError as error:
        misuse(f"cannot read {error.filename}: {error.strerror}")
    return (
        counted.num_params if num_params is None else num_params,
        counted.num_layers if layers is None else layers,
    )


def _print_failures(
    chips: str | None,
    replicas: int,
    lost_s: float,
    failures_a_year: float,
    made: dict[str, Any] | None,
    as_json: bool,
) -> None:
    from .failures import make_report, print_failures

    with in_sentences():
        count = None if chips is None else parse_count("--chips", chips)
        report = make_report(count, replicas, lost_s, failures_a_year, made)
    print_report(report, as_json, print_failures)


def _print_decoupled(options: dict[str, Any]) -> None:
    from diloco_comm.asynchronous.decoupled.fragment_round import QuorumRule

    from .decoupled import DecoupledRequest, make_report, print_decoupled

    names = ("params", "step_time", "learners", "sync_every", "fragments", "wire_down", "rtt_ms")
    delay = 2 if options["delay"] is None else options["delay"]
    with in_sentences(("quorum", "gamma", "delay", "wire")):
        request = DecoupledRequest(
            **{name: options[name] for name in names},
            wire=options["wire"] or "int4",
            rule=QuorumRule(quorum=options["quorum"], gamma=options["gamma"], delay=delay),
        )
        links = (options["gbps"], options["syncer_gbps"])
        report = make_report(request, *links, options["tokens_per_step"])
    print_report(report, options["as_json"], print_decoupled)


def _print_published(as_json: bool) -> None:
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
