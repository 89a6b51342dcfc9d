"""Measure an outer step against torchft's DiLoCo: time blocked, CPU, memory, loss.

    PYTHONPATH=DIR python -m benchmarks.against_torchft.compare -g 2
    PYTHONPATH=DIR python -m benchmarks.against_torchft.compare -g 2 --fragments 4 --delay 1 \
        --sync-every 8

DIR holds torchft-nightly 2026.10.26 (the script says how to install it when it is not there). Equal
transformers of 25 million parameters train in the same processes on the same text, one under
torchft, one without any exchange, one with only the plain traffic of ours (plain_traffic.py), and
the others under ours; their rounds of H inner steps alternate. Memory is measured afterwards, in
processes of its own for each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.against_torchft import peer as torchft_peer
from benchmarks.against_torchft.plain_traffic import Alone, Traffic
from benchmarks.support import common
from benchmarks.training.outer_step import Transformer, memory_growth
from diloco_comm_tools.demo.data import Batches, load_corpus, validation_windows

SKIPPED = 77
LR, MOMENTUM = 0.7, 0.9
_CONTEXT = 32


PEERS = ("torchft", "torchft_buckets")
OURS = ("diloco_fp32", "diloco_int8")
PLAIN = "plain"
VARIANTS = (*PEERS, "alone", PLAIN, *OURS)


def add_ratios(results: dict[str, Any]) -> None:
    """Summaries, CPU beyond training alone, and ratios taken round by round."""
    for name, result in results.items():
        samples = result["samples"]
        if "alone" in results and name != "alone":
            alone = results["alone"]["samples"]["cpu"]
            samples["cpu_extra"] = [a - b for a, b in zip(samples["cpu"], alone, strict=True)]
        result.update({key: common.summary(values) for key, values in samples.items()})
        for peer in (p for p in PEERS if p in results and name in OURS):
            theirs = results[peer]["samples"]
            uncoordinated = [
                b - c for b, c in zip(theirs["blocked"], theirs["coordination"], strict=True)
            ]
            ratios = {
                "blocked": common.median_ratio(theirs["blocked"], samples["blocked"]),
                "blocked_without_coordination": common.median_ratio(
                    uncoordinated, samples["blocked"]
                ),
            }
            result[f"against_{peer}"] = ratios
    if PLAIN in results and "diloco_int8" in results:
        ours, floor = (results[name]["samples"]["blocked"] for name in ("diloco_int8", PLAIN))
        results["diloco_int8"]["over_plain"] = common.median_ratio(ours, floor)


def print_table(report: common.Report, results: dict[str, Any]) -> None:
    columns = ("blocked", "quorum+", "CPU", "round", "memory", "loss", "distance", "x torchft")
    report.print("#")
    report.print(f"#{'':>16}" + "".join(f"{c:>10}" for c in columns) + f"{'x buckets':>10}")
    units = ("ms", "commit ms", "ms extra", "ms", "models", "nats", "", "blocked", "blocked")
    report.print(f"#{'':>16}" + "".join(f"{u:>10}" for u in units))
    for name, result in results.items():
        names = ("blocked", "coordination")
        cells = [result.get(key, {"median": 0.0})["median"] * 1e3 for key in names]
        cells += [result.get("cpu_extra", {"median": 0.0})["median"] * 1e3]
        cells += [result["round"]["median"] * 1e3]
        row = "".join(f"{cell:10.1f}" for cell in cells)
        memory = result.get("memory", {}).get("peak_sizes")
        row += f"{'-':>10}" if memory is None else f"{memory:10.2f}"
        row += f"{result['loss']:10.4f}"
        row += f"{result['distance']:10.2g}" if "distance" in result else f"{'-':>10}"
        for peer in PEERS:
            ratio = result.get(f"against_{peer}")
            row += f"{'-':>10}" if ratio is None else f"{ratio['blocked']:10.2f}"
        report.print(f" {name:>16}{row}")
    for name, result in results.items():
        if "encode" in result:
            parts = [result[key]["median"] * 1e3 for key in ("encode", "exposed", "outer_step")]
            text = "encode {:.1f}, waiting {:.1f}, outer step {:.1f} ms".format(*parts)
            report.print(f"# {name} blocks by {text}")
        if "over_plain" in result:
            ratio = f"{result['over_plain']:.2f} x as long as the plain traffic of its passes"
            report.print(f"# {name} blocks {ratio}")
    report.print("# blocked: in a round of H inner steps, slowest replica, median of the rounds;")
    report.print("#   'quorum+commit' is the part of it that is torchft's coordination.")
    report.print("# CPU ms extra: CPU of all threads in a round, beyond training alone.")
    report.print("# memory: growth of the resident set at its peak, in sizes of the fp32 model.")
    report.print(
        "# loss: outer parameters on held-out text; distance: of the outer parameters from"
    )
    report.print("#   torchft's, over the way that those went from the start.")
    report.print("# torchft's should_quantize needs a GPU, and is off: torchft sends fp32.")


class Backend(Protocol):
    """What synchronises one model."""

    num_syncs: int

    def step(self) -> None: ...

    def parts(self) -> dict[str, float]: ...

    def outer_parameters(self) -> AbstractContextManager[None]: ...

    def close(self) -> None: ...


class Ours:
    """Our DiLoCo on torchft's schedule: the same fragments, sent and applied at the same steps."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace
    ) -> None:
        from diloco_comm import Blocking, DiLoCo, Nesterov, Streaming

        self._diloco = DiLoCo(
            model,
            optimizer,
            sync_every=args.sync_every,
            fragments=fragment_patterns(args.fragments),
            offsets=first_sends(args),
            overlap=Streaming(args.delay, alpha=0.0) if args.delay else Blocking(),
            outer=Nesterov(LR, MOMENTUM),
            wire=args.variant.removeprefix("diloco_"),
            impl=args.impl,
            init="check",
            attach=False,
        )
        self.step, self.close = self._diloco.step, self._diloco.close
        self.outer_parameters = self._diloco.outer_parameters

    @property
    def num_syncs(self) -> int:
        return self._diloco.totals().num_syncs

    def parts(self) -> dict[str, float]:
        """Seconds of the training thread so far: what its blocked time is made of."""
        totals = self._diloco.totals()
        return {name: getattr(totals, f"{name}_s") for name in ("encode", "exposed", "outer_step")}


class Replica:
    """One model, its inner optimizer, its data and what synchronises it."""

    def __init__(self, variant: str, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.model = Transformer(args.width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        corpus = load_corpus(None, dist.get_world_size())
        rank = dist.get_rank()
        seed = args.seed * dist.get_world_size() + rank
        self._batches = Batches(corpus.shards[rank], args.batch, _CONTEXT, seed)
        self._windows = validation_windows(corpus.validation, 64, _CONTEXT)
        self.backend = self._open(argparse.Namespace(**{**vars(args), "variant": variant}))

    def _open(self, args: argparse.Namespace) -> Backend:
        if args.variant == "alone":
            return Alone()
        if args.variant in OURS:
            return Ours(self.model, self.optimizer, args)
        if args.variant == PLAIN:
            modules = fragment_modules(self.model, args.fragments)
            return Traffic(
                [sum(p.numel() for p in module.parameters()) for module in modules],
                sync_every=args.sync_every,
                first_sends=first_sends(args),
                delay=args.delay,
            )
        return torchft_peer.Peer(
            fragment_modules(self.model, args.fragments),
            self.optimizer,
            sync_every=args.sync_every,
            delay=args.delay,
            lr=LR,
            momentum=MOMENTUM,
            use_buckets=args.variant.endswith("_buckets"),
        )

    def inner_step(self) -> None:
        tokens, targets = self._batches.next()
        self.optimizer.zero_grad(set_to_none=False)
        logits = self.model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        self.optimizer.step()

    @torch.no_grad()
    def validate(self) -> float:
        """Loss of the parameters that are in the model now, nats a byte."""
        return float(self.model.loss(self._windows))


def first_sends(args: argparse.Namespace) -> list[int]:
    """The inner step at which each fragment is sent first, counted from 1."""
    period = args.sync_every // args.fragments
    return [period * (i + 1) - args.delay for i in range(args.fragments)]


def fragment_modules(model: Transformer, num_fragments: int) -> list[nn.Module]:
    """Cut the model: the embedding, then equal runs of layers."""
    if num_fragments == 1:
        return [model]
    layers = list(model.layers)
    size = -(-len(layers) // (num_fragments - 1))
    runs = [layers[i : i + size] for i in range(0, len(layers), size)]
    return [model.embedding, *(nn.ModuleList(run) for run in runs)]


def fragment_patterns(num_fragments: int) -> int | list[list[str]]:
    """The same cut, by the names of the parameters."""
    if num_fragments == 1:
        return 1
    with torch.device("meta"):
        layers = len(Transformer(8).layers)
    size = -(-layers // (num_fragments - 1))
    runs = [range(i, min(i + size, layers)) for i in range(0, layers, size)]
    return [["embedding.*"], *([f"layers.{i}.*" for i in run] for run in runs)]


# ------------------------------------------------------------------------------------ time


def run_round(replica: Replica, args: argparse.Namespace) -> dict[str, float]:
    """One round of H inner steps: seconds blocked and its parts, CPU seconds, and seconds in all.

    Replicas in lockstep meet before every call: waiting for a peer's inner steps is in no figure.
    Plain traffic is always moved by all replicas at once.
    """
    dist.barrier()
    backend = replica.backend
    meets = args.lockstep or isinstance(backend, Traffic)
    blocked, before = 0.0, backend.parts()
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(args.sync_every):
        replica.inner_step()
        if meets:
            dist.barrier()
        step_begin = time.perf_counter()
        backend.step()
        blocked += time.perf_counter() - step_begin
    return {
        "blocked": blocked,
        **{name: seconds - before[name] for name, seconds in backend.parts().items()},
        "cpu": time.process_time() - cpu,
        "round": time.perf_counter() - begin,
    }


def measure_time(args: argparse.Namespace) -> dict[str, Any]:
    """Train all variants in turn, round by round; figures of the slowest rank, and the losses."""
    replicas = {name: Replica(name, args) for name in args.variants}
    initial = flat_parameters(next(iter(replicas.values())).model)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in replicas}
    for i in range(args.warmup_iters + args.iters):
        for name, replica in replicas.items():
            times = run_round(replica, args)
            for key, seconds in times.items() if i >= args.warmup_iters else ():
                samples[name].setdefault(key, []).append(seconds)
    results: dict[str, Any] = {}
    final: dict[str, Tensor] = {}
    for name, replica in replicas.items():
        slowest = {k: common.slowest_of_ranks(v) for k, v in samples[name].items()}
        with replica.backend.outer_parameters():
            results[name] = {"samples": slowest, "loss": replica.validate()}
            final[name] = flat_parameters(replica.model)
        results[name]["num_syncs"] = replica.backend.num_syncs
    if "torchft" in final:
        way = (final["torchft"] - initial).norm()
        for name, parameters in final.items():
            results[name]["distance"] = float((parameters - final["torchft"]).norm() / way)
    for replica in replicas.values():
        replica.backend.close()
    return results


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ---------------------------------------------------------------------------------- memory


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Growth of the resident set by one variant; see ``outer_step.memory_growth``."""
    (variant,) = args.variants
    if variant in PEERS:
        # The imports are not torchft's way of doing an outer step.
        import torchft.local_sgd
        import torchft.manager  # noqa: F401
    replica = Replica("alone", args)
    chosen = argparse.Namespace(**{**vars(args), "variant": variant})
    steps = args.sync_every * (args.warmup_iters + args.iters)
    return memory_growth(replica.model, lambda: replica._open(chosen), steps)


# ---------------------------------------------------------------------------------- launch


def launch(args: argparse.Namespace) -> dict[str, Any]:
    """Run the time part, then the memory part of each variant, each in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:

        def part(name: str, variants: str) -> Any:
            path = Path(folder) / "part.json"
            words = [*common.same_command(), "--variants", variants]
            words += ["--part", name, "--part-json", str(path)]
            # torchft's servers tell of every quorum.
            common.run_workers(words, args.nprocs, env={"RUST_LOG": "error"})
            return json.loads(path.read_text())

        results = part("time", ",".join(args.variants)) if not args.memory_only else {}
        for variant in args.variants:
            if variant not in ("alone", PLAIN) and not args.time_only:
                results.setdefault(variant, {})["memory"] = part("memory", variant)
    return results


def parse_variants(text: str) -> list[str]:
    variants = text.split(",")
    if unknown := [name for name in variants if name not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"among {', '.join(VARIANTS)}, not {unknown}")
    return variants


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-g", "--nprocs", type=int, default=2, help="replicas, one process each")
    common.add_rounds(parser)
    add("--fragments", type=int, default=1, help="1, or the embedding and N-1 runs of layers")
    add("--delay", type=int, default=0, help="inner steps from send to apply; 0 blocks")
    add("--lockstep", action="store_true", help="meet before every call; always so without delay")
    add("--batch", type=int, default=2, help=f"windows of {_CONTEXT} bytes in an inner step")
    add("--seed", type=int, default=0, help="of weights and data")
    add("--variants", type=parse_variants, default=list(VARIANTS), help="a comma list")
    add("--memory-only", action="store_true", help="leave time out")
    add("--time-only", action="store_true", help="leave memory out")
    add("--impl", default="", help="force an implementation of ours")
    common.add_output(parser)
    add("--part", choices=("time", "memory"), default="time", help=argparse.SUPPRESS)
    add("--part-json", default="", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    args = make_parser().parse_args()
    args.lockstep |= args.delay == 0
    if common.is_worker():
        rank, _ = common.init_workers()
        measured = {"time": measure_time, "memory": measure_memory}[args.part](args)
        if rank == 0:
            Path(args.part_json).write_text(json.dumps(measured))
        common.leave_workers()
        return 0
    reason = torchft_peer.missing()
    if reason and set(args.variants) & set(PEERS):
        print(f"# skipped: {reason}")
        return SKIPPED
    schedule = {"H": args.sync_every, "fragments": args.fragments, "delay": args.delay}
    schedule["lockstep"] = args.lockstep
    if set(args.variants) & set(PEERS):
        schedule["torchft"] = torchft_peer.VERSION
    report = common.Report("against_torchft", workers=args.nprocs, link="loopback", **schedule)
    with common.stoppable():
        results = launch(args)
    if args.memory_only:
        for name, result in results.items():
            memory = result["memory"]
            report.print(f" {name:>16} {memory['peak_sizes']:.2f} model sizes at peak")
    else:
        add_ratios(results)
        print_table(report, results)
    common.save(report, args.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
