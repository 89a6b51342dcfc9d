"""Measure how much of the exchange hides behind training: tokens/s against training alone and DDP.

    python -m benchmarks.training.overlap -g 2 --sync-every 30 --variants ddp,eager:int4
    python -m benchmarks.training.overlap --sweep --plot docs/overlap.png
    sudo python -m benchmarks.training.overlap -g 2 --namespaces 100mbit

Replicas train a byte-level transformer of 10.7 million parameters on real text, over an emulated
link or between network namespaces. The variants take turns, one segment of whole rounds each.
docs/measurements/overlap-results.md explains the figures.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.exchange import netns
from benchmarks.support import common
from benchmarks.support.run_file import RunFile
from diloco_comm import DiLoCo, Link, Nesterov
from diloco_comm.methods.overlap import CO2, Blocking, Delayed, Eager, Overlap, Streaming
from diloco_comm_tools.common import plots, ranks
from diloco_comm_tools.demo.data import Batches, load_corpus
from diloco_comm_tools.demo.model import ByteTransformer, ModelConfig, byte_loss
from diloco_comm_tools.demo.replica import BucketExchange

POLICIES: dict[str, Callable[[int], Overlap]] = {
    "blocking": lambda delay: Blocking(),
    "streaming": lambda delay: Streaming(delay, alpha=0.5),
    "delayed": lambda delay: Delayed(),
    "eager": lambda delay: Eager(),
    "co2": lambda delay: CO2(),
}
NAMED = ("alone", "ddp")


@dataclass(frozen=True)
class Variant:
    """The training of one model: ``alone``, ``ddp`` or ``policy:wire[:delay[:fragments]]``."""

    name: str
    policy: str
    wire: str = "fp32"
    delay: int = 1
    fragments: int = 1

    @classmethod
    def parse(cls, text: str) -> Variant:
        policy, *rest = text.split(":")
        if policy not in (*NAMED, *POLICIES) or (policy in POLICIES and not rest):
            raise argparse.ArgumentTypeError(
                f"alone, ddp, or POLICY:WIRE[:DELAY[:FRAGMENTS]] with a policy among "
                f"{', '.join(POLICIES)}, not {text!r}"
            )
        return cls(text, policy, *rest[:1], *map(int, rest[1:]))


class Loop(Protocol):
    """A training loop that `run_segment` times."""

    def step(self) -> None:
        """Do one inner step, and what communication belongs to it."""

    def settle(self) -> float:
        """Wait until nothing travels any more; seconds waited."""

    def counters(self) -> dict[str, float]:
        """Sums since the start."""

    def close(self) -> None: ...


class Alone:
    """Training without any communication; the others add to it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = ByteTransformer(model_config(args), args.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        corpus = load_corpus(None, dist.get_world_size())
        shard = corpus.shards[dist.get_rank()]
        self._batches = Batches(shard, args.batch, args.context, args.seed)
        self._forward: torch.nn.Module = self.model

    def step(self) -> None:
        loss = byte_loss(self._forward, *self._batches.next())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> float:
        return 0.0

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class DataParallel(Alone):
    """DistributedDataParallel: over the emulated link through our engine, else gloo's own."""

    def __init__(self, args: argparse.Namespace, variant: Variant) -> None:
        super().__init__(args)
        options = {"gradient_as_bucket_view": True, "init_sync": False}
        ddp = DistributedDataParallel(self.model, **options)
        self._exchange = None
        if args.gbps:
            self._exchange = BucketExchange(variant.wire, args.gbps, args.rtt_ms)
            ddp.register_comm_hook(self._exchange, BucketExchange.hook)
        self._forward = ddp

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()


class LowCommunication(Alone):
    """DiLoCo with one of the overlap policies."""

    def __init__(self, args: argparse.Namespace, variant: Variant) -> None:
        super().__init__(args)
        self.diloco = DiLoCo(
            self.model,
            self.optimizer,
            sync_every=args.sync_every,
            fragments=variant.fragments,
            overlap=POLICIES[variant.policy](variant.delay),
            outer=Nesterov(0.4, 0.9),
            wire=variant.wire,
            link=Link(lanes=args.lanes),
            init="check",
            # All variants of a run are open at once, some with one layout.
            name=variant.name,
        )
        if args.gbps:
            self.diloco.emulate_link(args.gbps, args.rtt_ms)

    def settle(self) -> float:
        begin = time.perf_counter()
        for part in self.diloco.parts:
            for flight in part.in_flight:
                flight.wait()
        return time.perf_counter() - begin

    def counters(self) -> dict[str, float]:
        totals = self.diloco.totals()
        names = ("num_syncs", "sent_bytes", "encode_s", "exchange_s", "exposed_s", "outer_step_s")
        return {name: float(getattr(totals, name)) for name in names}

    def close(self) -> None:
        self.diloco.close()


def model_config(args: argparse.Namespace) -> ModelConfig:
    return ModelConfig(args.context, args.width, args.layers, num_heads=max(1, args.width // 64))


def open_loop(variant: Variant, args: argparse.Namespace) -> Loop:
    if variant.policy == "alone":
        return Alone(args)
    return (DataParallel if variant.policy == "ddp" else LowCommunication)(args, variant)


# ------------------------------------------------------------------------------- measuring


def other_threads_cpu_s() -> float:
    """CPU seconds so far of all threads but this one: the engine's and gloo's."""
    own, total = threading.get_native_id(), 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != own:
            try:
                total += int((task / "schedstat").read_text().split()[0])
            except (FileNotFoundError, ProcessLookupError):
                # The thread ended meanwhile.
                continue
    return total / 1e9


def run_segment(loop: Loop, num_steps: int) -> dict[str, float]:
    """Train `num_steps` steps; seconds, CPU seconds and what the counters grew by.

    Nothing travels when a segment begins, and it ends only when nothing travels, so that an
    exchange never hides behind another variant's segment. Segments begin with the step that sends:
    the last exchange has the rest of its round before it is waited for.
    """
    dist.barrier()
    before, threads = loop.counters(), other_threads_cpu_s()
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        loop.step()
    settled = loop.settle()
    seconds = time.perf_counter() - begin
    grown = {key: value - before[key] for key, value in loop.counters().items()}
    return {
        "seconds": seconds,
        "cpu_s": time.process_time() - cpu,
        "other_threads_cpu_s": other_threads_cpu_s() - threads,
        "settle_s": settled,
        "steps": float(num_steps),
        **grown,
    }


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Segments of every variant, interleaved: the slowest rank's seconds, means of the rest."""
    loops = {v.name: open_loop(v, args) for v in args.variants}
    for loop in loops.values():
        # One step for torch's and DDP's first-time work, then up to the step that sends.
        steps = 2 if isinstance(loop, DataParallel) else args.sync_every - 1
        for _ in range(steps):
            loop.step()
    segments: dict[str, list[dict[str, Any]]] = {name: [] for name in loops}
    for i in range(args.warmup_iters + args.iters):
        for name, loop in loops.items():
            steps = args.ddp_steps if isinstance(loop, DataParallel) else args.sync_every
            rounds = 1 if i < args.warmup_iters else args.rounds
            segment = run_segment(loop, steps * rounds)
            if i >= args.warmup_iters:
                segments[name].append(_over_ranks(segment))
    for loop in loops.values():
        loop.settle()
        loop.close()
    return segments


def _over_ranks(segment: dict[str, float]) -> dict[str, Any]:
    values = torch.tensor(list(segment.values()), dtype=torch.float64)
    (slowest,) = common.slowest_of_ranks([segment["seconds"]])
    dist.all_reduce(values)
    mean = (values / dist.get_world_size()).tolist()
    return {**dict(zip(segment, mean, strict=True)), "seconds": slowest}


# ------------------------------------------------------------------- figures, table and plot


def summarize(
    segments: dict[str, list[dict[str, Any]]], tokens_per_step: int, crowding: float
) -> list[dict[str, Any]]:
    """One row a variant.

    Args:
        segments: By variant, "alone" among them, as `measure` returns them.
        tokens_per_step: Tokens of all replicas together.
        crowding: Replicas a core.
    """
    alone = [s["seconds"] / s["steps"] for s in segments["alone"]]
    rows = []
    for name, own in segments.items():
        step_s = [s["seconds"] / s["steps"] for s in own]
        row: dict[str, Any] = {
            "variant": name,
            "tokens_per_s": common.summary([tokens_per_step / s for s in step_s]),
            "step_ms": common.summary([1e3 * s for s in step_s]),
            "of_alone": common.median_ratio(alone, step_s),
        }
        syncs = sum(s.get("num_syncs", 0.0) for s in own)
        if syncs:
            row.update(_exchange_figures(own, syncs, crowding))
            row["unexplained"] = 1.0 - row["of_alone"] - row["codec_and_wire"] - row["exposed"]
        rows.append(row)
    return rows


def _exchange_figures(own: list[dict[str, Any]], syncs: float, crowding: float) -> dict[str, float]:
    """Figures of the syncs in these segments; see docs/measurements/overlap-results.md."""

    def total(*keys: str) -> float:
        return sum(s[key] for s in own for key in keys)

    # The first sync that a segment finishes was waited for in the `settle` of the one before.
    exposed = total("exposed_s", "settle_s")
    cpu = total("encode_s", "outer_step_s", "other_threads_cpu_s")
    seconds = total("seconds")
    return {
        "overlap_fraction": max(0.0, 1.0 - exposed / total("exchange_s")),
        "exchange_ms": 1e3 * total("exchange_s") / syncs,
        "exposed_ms": 1e3 * exposed / syncs,
        "training_thread_ms": 1e3 * total("encode_s", "outer_step_s") / syncs,
        "codec_and_wire_cpu_ms": 1e3 * cpu / syncs,
        "sent_mb": total("sent_bytes") / syncs / 1e6,
        # Replicas that share cores slow each other down by what each of them computes.
        "codec_and_wire": cpu * max(1.0, crowding) / seconds,
        "exposed": exposed / seconds,
    }


COLUMNS = (
    ("tokens/s", lambda r: f"{r['tokens_per_s']['median']:.0f}"),
    ("of alone", lambda r: f"{100 * r['of_alone']:.1f} %"),
    ("overlap", lambda r: f"{r['overlap_fraction']:.3f}" if "exposed" in r else "-"),
    ("exchange", lambda r: f"{r['exchange_ms']:.0f} ms" if "exposed" in r else "-"),
    ("exposed", lambda r: f"{r['exposed_ms']:.1f} ms" if "exposed" in r else "-"),
    ("CPU", lambda r: f"{r['codec_and_wire_cpu_ms']:.1f} ms" if "exposed" in r else "-"),
    ("CPU share", lambda r: f"{100 * r['codec_and_wire']:.2f} %" if "exposed" in r else "-"),
    ("rest", lambda r: f"{100 * r['unexplained']:.2f} %" if "exposed" in r else "-"),
    ("sent", lambda r: f"{r['sent_mb']:.2f} MB" if "exposed" in r else "-"),
)


def print_rows(report: common.Report, rows: list[dict[str, Any]]) -> None:
    report.print(f"#{'variant':>20}" + "".join(f"{name:>11}" for name, _ in COLUMNS))
    for row in rows:
        cells = "".join(f"{show(row):>11}" for _, show in COLUMNS)
        report.print(f" {row['variant']:>20}{cells}")


def draw(done: list[dict[str, Any]], path: Path) -> None:
    """Draw tokens/s as a share of training alone, one panel a set of workers and link."""
    panels: dict[tuple[int, str], dict[str, float]] = {}
    for entry in done:
        cell = entry["cell"]
        bars = panels.setdefault((cell["workers"], cell["link"]), {})
        for row in entry["rows"]:
            if row["variant"] != "alone":
                bars[f"{row['variant']}, H={cell['H']}"] = 100 * row["of_alone"]
    height = 1.2 + 0.28 * max(map(len, panels.values()))
    figure, axes = plots.new_panels(1, len(panels), 6, height)
    for panel, ((workers, link), bars) in zip(axes[0], panels.items(), strict=True):
        names = sorted(bars, key=lambda name: bars[name])
        panel.barh(names, [bars[name] for name in names], color=plots.BLUE)
        panel.axvline(97, color="0.4", linestyle=":", label="97 %")
        panel.set_xlim(0, max(105, *bars.values()))
        panel.set_xlabel("tokens/s, % of training without communication")
        panel.set_title(f"{workers} replicas\n" + link.replace(", ", ",\n", 1), fontsize=9)
        panel.tick_params(axis="y", labelsize=8)
        plots.legend(panel, fontsize=8, loc="lower center")
    plots.save(figure, path)


# ------------------------------------------------------------------------------------ cells


def run_cell(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one set of variants in fresh processes, on the link that `args` ask for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "segments.json"
        names = ",".join(v.name for v in args.variants)
        # Later options win over those of the command line.
        options = ["-g", args.nprocs, "--sync-every", args.sync_every, "--variants", names]
        options += ["--gbps", args.gbps, "--rtt-ms", args.rtt_ms, "--segments", path]
        command = [*common.same_command(), *map(str, options)]
        if args.namespaces:
            with netns.Network(args.nprocs, netns.parse_rate(args.namespaces)) as network:
                network.run(command)
        else:
            common.run_workers(command, args.nprocs, preload=ranks.WITH_OPTIMIZER)
        document = json.loads(path.read_text())
    tokens_per_step = args.nprocs * args.batch * args.context
    return summarize(document["segments"], tokens_per_step, args.nprocs / document["cores"])


def link_name(args: argparse.Namespace) -> str:
    if args.namespaces:
        return netns.Network(args.nprocs, netns.parse_rate(args.namespaces)).description
    if args.gbps:
        return f"simulated: {args.gbps:g} Gbit/s, {args.rtt_ms:g} ms round trip, in the engine"
    return "loopback"


def parse_variants(text: str) -> list[Variant]:
    variants = [Variant.parse(word) for word in text.split(",")]
    if all(v.policy != "alone" for v in variants):
        variants.insert(0, Variant.parse("alone"))
    return variants


# ------------------------------------------------------------------------------------ sweep

# Delay and wire at H=30; then H. The delays give the exchange from one step to a whole round.
_STREAMING = "streaming:int4:1,streaming:int4:3,streaming:int4:10,streaming:int8:10"
_CELLS = (
    (30, "ddp,blocking:fp32,blocking:int4,eager:int4"),
    (30, _STREAMING),
    (30, "eager:int8,eager:e3m0,eager:fp32,co2:int4"),
    (10, "blocking:int4,streaming:int4:3,eager:int4,eager:int8"),
)


def cells(args: argparse.Namespace) -> list[argparse.Namespace]:
    """All cells, on the emulated link, and on the shaped one where there is one."""
    links = [(args.gbps, args.rtt_ms, "")]
    if netns.missing() is None:
        links.append((0.0, 0.0, "100mbit"))
    found = []
    for gbps, rtt_ms, namespaces in links:
        for world in (2, 4):
            for sync_every, variants in _CELLS if not namespaces else _CELLS[:1]:
                cell = copy.copy(args)
                cell.gbps, cell.rtt_ms, cell.namespaces = gbps, rtt_ms, namespaces
                cell.nprocs, cell.sync_every = world, sync_every
                cell.variants = parse_variants(variants)
                found.append(cell)
    return found


def key_of(cell: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a cell that differ from cell to cell."""
    names = [variant.name for variant in cell.variants]
    numbers = ("batch", "context", "width", "layers", "lanes", "rounds")
    return {
        "workers": cell.nprocs,
        "link": link_name(cell),
        "H": cell.sync_every,
        "variants": names,
        **{name: getattr(cell, name) for name in numbers},
    }


def sweep(args: argparse.Namespace) -> int:
    """Measure the cells that the file of the runs lacks; each is on disk after it is measured."""
    runs = RunFile(args.runs, "python -m benchmarks.training.overlap --sweep")
    report = common.Report("overlap", link="in each cell", variants="in each cell")
    done = []
    with common.stoppable():
        for cell in cells(args):
            key = key_of(cell)
            if not runs.find({"cell": key}):
                runs.add({"cell": key, "commit": common.commit(), "rows": run_cell(cell)})
            done += runs.find({"cell": key})[:1]
            report.print(f"# {key['workers']} workers, H {key['H']}, {key['link']}")
            print_rows(report, done[-1]["rows"])
    common.save(report, args.json, done)
    common.save_plot(args.plot, functools.partial(draw, done))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    default = "alone,ddp,blocking:int4,streaming:int4:5,eager:int4"
    add("-g", "--nprocs", type=int, default=2, help="replicas, one process of one thread each")
    add("-n", "--iters", type=int, default=3, help="segments measured of each variant")
    add("-w", "--warmup_iters", type=int, default=1, help="segments of one round before them")
    add("--rounds", type=int, default=1, help="rounds in a segment")
    add("--sync-every", type=int, default=30, help="inner steps a round (H)")
    add("--variants", type=parse_variants, default=default, help="POLICY:WIRE:DELAY:FRAGMENTS, ...")
    add("--gbps", type=float, default=0.1, help="emulated link, Gbit/s; 0: the loopback as it is")
    add("--rtt-ms", type=float, default=100.0, help="emulated round trip")
    add(
        "--namespaces", default="", metavar="RATE", help="100mbit, ...: shaped links instead (root)"
    )
    add("--batch", type=int, default=2, help="sequences of a replica's inner step")
    add("--context", type=int, default=64, help="bytes in a sequence")
    add("--width", type=int, default=384, help="width of the model")
    add("--layers", type=int, default=6, help="layers of the model")
    add("--ddp-steps", type=int, default=2, help="steps of DDP in place of a round")
    add("--lanes", type=int, default=1, help="connections to each peer")
    add("--seed", type=int, default=0, help="of weights and data")
    add("--sweep", action="store_true", help="all cells, resumed from --runs")
    runs = common.RUNS / "overlap.jsonl"
    common.add_output(parser, "--runs", default=runs, help="file of the cells, none made twice")
    common.add_plot(parser, "draw the sweep")
    common.add_output(parser)
    add("--segments", default="", help=argparse.SUPPRESS)
    # netns.py tells every benchmark these.
    add("--link", default="", help=argparse.SUPPRESS)
    add("--drain", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def work(args: argparse.Namespace) -> None:
    rank, _ = common.init_workers()
    segments = measure(args)
    if rank == 0:
        cores = common.machine()["cores"]
        Path(args.segments).write_text(json.dumps({"segments": segments, "cores": cores}))
    common.leave_workers()


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if args.namespaces:
        args.gbps = args.rtt_ms = 0.0
    if common.is_worker():
        work(args)
        return 0
    if args.namespaces and (reason := netns.missing()):
        print(f"# skipped: {reason}")
        return 0
    if args.sweep:
        args.json = args.json or common.RESULTS / "training" / "overlap.json"
        common.check_default(parser, "--json", args.json)
        return sweep(args)
    count = sum(p.numel() for p in ByteTransformer(model_config(args), 0).parameters())
    header = {"workers": args.nprocs, "link": link_name(args), "H": args.sync_every}
    report = common.Report("overlap", **header, parameters=count)
    with common.stoppable():
        rows = run_cell(args)
    print_rows(report, rows)
    common.save(report, args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
