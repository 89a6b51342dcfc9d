"""``diloco-comm bench``: measure the exchange and the outer step; tune for a link.

Each command runs under torchrun or srun, or starts local processes itself (``-g N``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_comm.base.files import whole_file

from ..common.commands import FAILED, fail, in_options, misuse
from ..common.sizes import parse_count, parse_size

app = typer.Typer(
    help="Measure the exchange and the outer step; tune for a link.",
    no_args_is_help=True,
    add_completion=False,
)

Processes = Annotated[int, typer.Option("-g", "--nprocs", help="Start this many local processes.")]
Size = str
Wires = Annotated[str, typer.Option("--wire", help="Wire formats, separated by commas.")]
BlockSize = Annotated[int, typer.Option("--block-size", help="Elements that share a scale.")]
Lanes = Annotated[int, typer.Option("--lanes", help="Connections to each peer.")]
Chunk = Annotated[str, typer.Option("--chunk", help="Bytes of a chunk; default: by size.")]
Impl = Annotated[str, typer.Option("--impl", help="Force an implementation of the operators.")]
Collectives = Annotated[
    str, typer.Option("--link", help="gloo, or tcp: all messages of the library over one port.")
]
EmulatedLink = Annotated[
    str, typer.Option("--emulate-link", metavar="GBPS[,RTT_MS]", help="Throttle in the engine.")
]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="PATH", help="Write figures and output there.")
]

Command = Callable[..., None]


def one_sentence(command: Command) -> Command:
    """Turn an error of the arguments or of the group into one sentence."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        from diloco_comm.base.errors import SyncError

        from ..common.workers import WorkerError

        try:
            command(*args, **kwargs)
        except ValueError as error:
            misuse(in_options(str(error), ("block_size",)))
        except WorkerError as error:
            # A worker with these statuses has printed its error.
            if error.status in (FAILED, 2):
                raise typer.Exit(error.status) from None
            fail(str(error))
        except (SyncError, NotImplementedError, OSError) as error:
            fail(str(error))

    return wrapped


@app.command()
@one_sentence
def exchange(
    context: typer.Context,
    min_bytes: Annotated[Size, typer.Option("-b", "--minbytes", help="Smallest size.")] = "1M",
    max_bytes: Annotated[Size, typer.Option("-e", "--maxbytes", help="Largest size.")] = "64M",
    step_factor: Annotated[int, typer.Option("-f", "--stepfactor", help="Between sizes.")] = 2,
    iters: Annotated[int, typer.Option("-n", "--iters", help="Samples a size.")] = 20,
    warmup_iters: Annotated[int, typer.Option("-w", "--warmup_iters", help="Before them.")] = 3,
    check: Annotated[int, typer.Option("-c", "--check", help="1: compare with fp64.")] = 0,
    datatype: Annotated[str, typer.Option("-d", "--datatype", help="float, bfloat16, half")] = (
        "float"
    ),
    nprocs: Processes = 0,
    wire: Wires = "int8",
    block_size: BlockSize = 256,
    lanes: Lanes = 1,
    chunk: Chunk = "",
    impl: Impl = "",
    backend: Annotated[str, typer.Option(help="gloo, nccl or diloco.")] = "gloo",
    link: Collectives = "gloo",
    emulate_link: EmulatedLink = "",
    min_gb_per_s: Annotated[
        float | None, typer.Option(help="Status 1 unless each wire's best busbw has these GB/s.")
    ] = None,
    min_gbps: Annotated[
        float | None, typer.Option(hidden=True, help="Deprecated name of --min-gb-per-s.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Time all-reduces against the backend's own; the flags are those of nccl-tests.

    Sizes are of the tensor as fp32: 4096, 64K, 1M, 1G.

        diloco-comm bench exchange -g 2 -b 1M -e 64M -c 1 --wire int8,int4

        torchrun --nproc-per-node 2 -m diloco_comm_tools.cli bench exchange -b 64M -e 64M
    """
    from ..common import reports
    from . import exchange as bench

    reports.check_output("--json", json_path)
    settings = exchange_settings(context)
    if not _in_group(nprocs, backend):
        return
    chosen = bench.make_methods(settings)
    report = _report("exchange", wire=_described(wire, block_size), settings=settings)
    if min_gbps is not None:
        _complain(report, "--min-gbps is deprecated: its name is --min-gb-per-s, as its unit")
        min_gb_per_s = min_gbps
    rows = bench.run(report, settings, chosen)
    average = sum(row["in_place"]["bus_bw"] for row in rows) / len(rows)
    report.print(f"# avg bus bandwidth: {average:.3f}")
    more = {"over": bench.collectives_of(chosen), "average_bus_bandwidth": average}
    is_saved = _save(report, json_path, rows, **more)
    bench.close(chosen)
    slow = [] if min_gb_per_s is None else _slower_than(min_gb_per_s, rows[0], rows)
    wrong = bench.count_wrong(rows)
    if wrong:
        _complain(report, f"{wrong} elements are out of the bounds of their wire format")
    if slow:
        _complain(report, f"below --min-gb-per-s {min_gb_per_s:g}: {', '.join(slow)}")
    # Exit only after printing: the launcher kills the remaining ranks.
    _leave()
    if wrong or slow or not is_saved:
        raise typer.Exit(FAILED)


@app.command(hidden=True, context_settings={"ignore_unknown_options": True})
def ops(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Say where the measurement of the operators is."""
    misuse("bench ops is python -m benchmarks.operators.roofline, in a checkout of the sources")


@app.command("outer-step")
@one_sentence
def outer_step(
    context: typer.Context,
    params: Annotated[str, typer.Option(help="Parameters of the model, such as 25M.")] = "25M",
    layers: Annotated[int, typer.Option(help="Equal tensors that hold the parameters.")] = 12,
    step_time: Annotated[float, typer.Option(help="Seconds of an inner step (a sleep).")] = 0.05,
    sync_every: Annotated[int, typer.Option(help="Inner steps a round.")] = 10,
    fragments: Annotated[int, typer.Option(help="Parts that are sent apart.")] = 1,
    policy: Annotated[
        str, typer.Option(help="blocking, streaming, delayed, eager or co2.")
    ] = "blocking",
    delay: Annotated[int, typer.Option(help="Inner steps of delay, for the policy streaming.")] = 1,
    wire: Annotated[str, typer.Option(help="Wire format.")] = "int8",
    block_size: BlockSize = 256,
    lanes: Lanes = 1,
    chunk: Chunk = "",
    rounds: Annotated[int, typer.Option("-n", "--rounds", help="Rounds measured.")] = 7,
    nprocs: Processes = 0,
    link: Collectives = "gloo",
    emulate_link: EmulatedLink = "",
    json_path: Json = None,
) -> None:
    """Measure how long the training loop waits in a round, for a model's size and a policy.

    diloco-comm bench outer-step -g 2 --params 25e6 --policy eager --emulate-link 1,10
    """
    from ..common import ranks, reports
    from . import outer_step as bench

    reports.check_output("--json", json_path)
    settings = _settings(
        bench.Settings,
        context,
        num_params=int(parse_count("--params", params)),
        num_layers=layers,
        step_s=step_time,
        chunk_bytes=parse_size(chunk) if chunk else None,
    )
    if not _in_group(nprocs, "gloo", ranks.WITH_OPTIMIZER):
        return
    how = f"{policy}, {sync_every} inner steps of {step_time:g} s (sleeps) a round"
    report = _report("outer-step", policy=how, wire=wire, settings=settings)
    result = bench.measure(settings)
    bench.print_table(report, result)
    is_saved = _save(report, json_path, result)
    _leave()
    if not is_saved:
        raise typer.Exit(FAILED)


@app.command()
@one_sentence
def tune(
    context: typer.Context,
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the config goes.")] = Path(
        "diloco-config.json"
    ),
    size: Annotated[Size, typer.Option("-b", "--size", help="Bytes of a fragment, fp32.")] = "64M",
    wire: Wires = "int8",
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds an exchange may take: choose the most precise wire that fits."),
    ] = None,
    block_size: BlockSize = 256,
    lanes: Annotated[str, typer.Option(help="Numbers of lanes to try.")] = "1,2,4",
    iters: Annotated[int, typer.Option("-n", "--iters", help="Samples of the finalists.")] = 9,
    nprocs: Processes = 0,
    link: Collectives = "gloo",
    emulate_link: EmulatedLink = "",
    json_path: Json = None,
) -> None:
    """Find chunk size, lanes and wire for this link, and write them for DiLoCo(config=...).

    diloco-comm bench tune -g 2 --emulate-link 1,20 --out tuned.json

    DILOCO_COMM_CONFIG=tuned.json python train.py
    """
    from ..common import reports
    from . import methods as bench_methods
    from . import tune as bench

    if not lanes.replace(",", "").isdigit():
        raise ValueError(f"--lanes must be numbers with commas between them, got {lanes!r}")
    settings = _settings(
        bench.Settings,
        context,
        size_bytes=parse_size(size),
        wires=tuple(wire.split(",")),
        lanes=tuple(int(number) for number in lanes.split(",") if number),
        budget_s=budget,
    )
    if not out.parent.is_dir():
        raise ValueError(f"--out must be in a folder that exists, got {out}")
    for option, path in (("--out", out), ("--json", json_path)):
        reports.check_output(option, path)
    if not _in_group(nprocs, "gloo"):
        return
    report = _report("tune", wire=_described(wire, block_size), size=size, settings=settings)
    found = bench.run(report, settings)
    chosen = found["config"]
    config = {
        **chosen,
        "block_size": bench_methods.format_of(chosen["wire"], block_size).block_size,
    }
    are_saved = [_write_config(report, out, config)]
    rows = found["results"]
    more = {name: found[name] for name in ("over", "config", "speedup")}
    are_saved.append(_save(report, json_path, rows, **more))
    _leave()
    if not all(are_saved):
        raise typer.Exit(FAILED)


# --------------------------------------------------------------------------------------- helpers


def exchange_settings(context: typer.Context) -> Any:
    """Return the settings of ``bench exchange`` from its options."""
    from . import exchange as bench

    options = context.params
    return _settings(
        bench.Settings,
        context,
        min_bytes=parse_size(options["min_bytes"]),
        max_bytes=parse_size(options["max_bytes"]),
        check=bool(options["check"]),
        wires=tuple(options["wire"].split(",")),
        chunk_bytes=parse_size(options["chunk"]) if options["chunk"] else None,
    )


def _in_group(nprocs: int, backend: str, preload: Sequence[str] = ()) -> bool:
    """Join the group and return True in a worker; in a launcher run the workers, return False."""
    from diloco_comm.base.interrupts import end_at_once

    from ..common import workers

    if workers.is_worker():
        end_at_once()
        workers.init_workers(backend=_registered(backend))
        return True
    if nprocs < 1:
        raise ValueError(
            "the measurement needs several processes: run it under torchrun or srun, or give -g N"
        )
    words = [sys.executable, "-m", "diloco_comm_tools.cli", *sys.argv[1:]]
    # NCCL is not tested in forked ranks, so its ranks are fresh processes.
    workers.run_workers(words, nprocs, preload=None if backend == "nccl" else preload)
    return False


def _settings(kind: Any, context: typer.Context, **read: Any) -> Any:
    """Return settings: options as they were read, and all others by the names of their fields."""
    from .exchange import parse_link

    options = context.params
    link, backend = options["link"], options.get("backend", "gloo")
    if link not in ("gloo", "tcp"):
        raise ValueError(f"--link must be gloo or tcp, got {link!r}")
    if link == "tcp" and backend != "gloo":
        raise ValueError(f"--link tcp needs --backend gloo, got --backend {backend}")
    read |= {"collectives": link, "link": parse_link(options["emulate_link"])}
    names = {field.name for field in dataclasses.fields(kind)} & options.keys()
    return kind(**{name: options[name] for name in names} | read)


def _registered(backend: str) -> str:
    if backend == "diloco":
        from diloco_comm import backend as _  # noqa: F401
    return backend


def _report(title: str, *, settings: Any, **header: object) -> Any:
    import torch.distributed as dist

    from ..common import reports
    from . import exchange as bench_exchange

    link = bench_exchange.describe_link(settings.link)
    world = dist.get_world_size()
    return reports.Report(title, quiet=dist.get_rank() != 0, workers=world, link=link, **header)


def _save(report: Any, path: Path | None, results: Any, **more: object) -> bool:
    """Write the measurement to a file if one is given; print an error and return False on failure.

    The caller leaves the group with the other ranks before it ends.
    """
    if path is not None and not report.quiet:
        report.header.update(more)
        try:
            report.save(path, results)
        except OSError as error:
            _complain(report, str(error))
            return False
    return True


def _write_config(report: Any, out: Path, config: dict[str, Any]) -> bool:
    """Write the chosen arguments, as ``_save`` does."""
    if report.quiet:
        return True
    try:
        with whole_file("--out", out) as file:
            file.write_text(json.dumps(config, indent=1) + "\n")
    except OSError as error:
        _complain(report, str(error))
        return False
    report.print(f"# written to {out}")
    return True


def _leave() -> None:
    from ..common import workers

    workers.leave_workers()


def _slower_than(
    min_gb_per_s: float, reference: dict[str, Any], rows: list[dict[str, Any]]
) -> list[str]:
    """List the wires whose best row is below a bus bandwidth, without the reference."""
    best: dict[str, float] = {}
    for row in rows:
        if (row["wire"], row["impl"]) != (reference["wire"], reference["impl"]):
            best[row["wire"]] = max(best.get(row["wire"], 0.0), row["in_place"]["bus_bw"])
    return [f"{wire} has {bw:.3f} GB/s" for wire, bw in best.items() if not bw >= min_gb_per_s]


def _complain(report: Any, message: str) -> None:
    if not report.quiet:
        print(f"diloco-comm: {message}", file=sys.stderr, flush=True)


def _described(wires: str, block_size: int) -> str:
    """Name wires and the sizes of their blocks."""
    from diloco_comm.ops.wire import WIRES

    from . import methods as bench_methods

    names = wires.split(",")
    # "gloo_bf16" is a reference of the table, and no wire.
    sizes = {n: bench_methods.format_of(n, block_size).block_size for n in names if n in WIRES}
    if len(set(sizes.values())) == 1:
        return f"{wires}, block {next(iter(sizes.values()))}"
    return ", ".join(f"{n} block {sizes[n]}" if n in sizes else n for n in names)
