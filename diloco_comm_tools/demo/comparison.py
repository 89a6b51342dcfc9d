"""The comparison of ``diloco-comm demo``: a row for each method, trained on the same replicas."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from diloco_comm.base.store_host import open_store
from diloco_comm.ops.wire import WireFormat

from ..common import plots
from ..common.console import Claim, plain_table, print_whole, progress_bar
from ..common.ranks import WITH_OPTIMIZER
from .crew import Crew, Replica
from .data import load_corpus
from .replica import Event, Finished, Progress, Validation, compare
from .settings import (
    BASELINE,
    EAGER,
    FEDAVG,
    REFERENCE,
    ROWS,
    SMALL,
    STREAMING,
    TINY,
    Comparison,
    Row,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAPTION = """\
Loss: nats a byte on held-out text, with the outer parameters, which all
replicas share. Under Eager the replicas differ, and the loss belongs to their
mean; computing the mean is not counted as sent.
DDP: torch's DistributedDataParallel averages the gradients at every step,
through a communication hook over this library's fp32 wire, because the link
emulator throttles only this library's engine.
Exposed: time for which training waited for communication and slower replicas."""


# The colour, line style and marker of each row in the figure; the last two tell rows apart in
# black and white.
STYLES = {
    BASELINE: (plots.BLACK, "-", "o"),
    FEDAVG: (plots.ORANGE, "-", "s"),
    REFERENCE: (plots.BLUE, "-", "^"),
    SMALL: (plots.VERMILION, "--", "v"),
    TINY: (plots.GREEN, ":", "D"),
    STREAMING: (plots.PURPLE, "-.", "P"),
    EAGER: (plots.SKY, "--", "X"),
}


@dataclass(frozen=True)
class Point:
    """Mean loss over the replicas after ``step`` steps and ``seconds`` of training."""

    step: int
    seconds: float
    loss: float


@dataclass
class RowResult:
    """Events of all replicas about one row."""

    row: Row
    num_replicas: int
    training: list[Point] = field(default_factory=list)
    validation: list[Point] = field(default_factory=list)
    finished: dict[int, Finished] = field(default_factory=dict)
    _pending: dict[tuple[bool, int], list[Progress | Validation]] = field(default_factory=dict)

    def add(self, replica: int, event: Event) -> None:
        """Record an event; a step becomes a point when every replica has reported the step."""
        if isinstance(event, Finished):
            self.finished[replica] = event
            return
        is_training = isinstance(event, Progress)
        reports = self._pending.setdefault((is_training, event.step), [])
        reports.append(event)
        if len(reports) == self.num_replicas:
            weight = sum(report.weight for report in reports)
            loss = sum(report.weight * report.loss for report in reports) / weight
            seconds = max(report.seconds for report in reports)
            curve = self.training if is_training else self.validation
            curve.append(Point(event.step, seconds, loss))
            del self._pending[is_training, event.step]

    @property
    def is_finished(self) -> bool:
        return len(self.finished) == self.num_replicas

    @property
    def step(self) -> int:
        ends = [*self.training[-1:], *self.validation[-1:]]
        return max((point.step for point in ends), default=0)

    @property
    def initial_loss(self) -> float:
        return self.validation[0].loss

    @property
    def final_loss(self) -> float:
        return self.validation[-1].loss

    @property
    def seconds(self) -> float:
        """Training seconds of the slowest replica."""
        return max((one.seconds for one in self.finished.values()), default=0.0)

    @property
    def sent_bytes(self) -> float:
        """Bytes sent by a replica, mean over the replicas."""
        return _mean([one.sent_bytes for one in self.finished.values()])

    @property
    def exposed_s(self) -> float:
        """Seconds for which a replica's training loop waited, mean over the replicas."""
        return _mean([one.exposed_s for one in self.finished.values()])

    @property
    def hashes(self) -> list[str]:
        return [self.finished[replica].outer_hash for replica in sorted(self.finished)]

    @property
    def is_identical(self) -> bool:
        return self.is_finished and len(set(self.hashes)) == 1


@dataclass
class Results:
    """All rows of one demo."""

    settings: Comparison
    source: str
    unigram_entropy: float
    rows: dict[Row, RowResult] = field(default_factory=dict)
    name = "demo"

    @property
    def bytes_ratio(self) -> float:
        """Bytes sent by data parallel over bytes sent by DiLoCo int8."""
        return self.rows[BASELINE].sent_bytes / max(1.0, self.rows[SMALL].sent_bytes)

    def claims(self) -> list[Claim]:
        """Return the claims of low-communication training, and whether the rows confirm them."""
        fp32, int8, int4 = (self.rows[row] for row in (REFERENCE, SMALL, TINY))
        share = fp32.final_loss / fp32.initial_loss
        settings = self.settings
        # 32 bits an element at every step, against the wire's bits with scales every H steps.
        ideal = settings.sync_every * 32 / WireFormat(SMALL.wire).bits_per_element
        least = 3 * settings.sync_every
        return [
            Claim(
                f"{REFERENCE.name} ends at {share:.0%} of its initial loss (below 60%)",
                share < 0.6,
            ),
            Claim(
                f"{REFERENCE.name} ends at {fp32.final_loss:.3f} nats a byte, below the unigram "
                f"entropy of the text, {self.unigram_entropy:.3f}",
                fp32.final_loss < self.unigram_entropy,
            ),
            _close_to(int8, fp32, limit=0.01),
            _close_to(int4, fp32, limit=0.03),
            Claim(
                f"{SMALL.name} sends {self.bytes_ratio:.0f}x fewer bytes than {BASELINE.name} "
                f"(at least {least}x; {ideal:.0f}x without headers)",
                self.bytes_ratio >= least,
            ),
            Claim(
                f"after every run the {settings.num_replicas} replicas are bit-identical",
                all(result.is_identical for result in self.rows.values()),
            ),
        ]

    def content(self) -> dict[str, Any]:
        """Return what ``demo.json`` has beside the head and the claims."""
        return {
            "link": self.settings.link,
            "text": self.source,
            "unigram_entropy_nats": self.unigram_entropy,
            "bytes_ratio": self.bytes_ratio,
            "rows": [_row_as_dict(result) for result in self.rows.values()],
        }

    def show(self, console: Console) -> None:
        """Print the table and the hashes of all replicas."""
        print_whole(console, _results_table(self))
        console.print(CAPTION, style="dim")
        console.print()
        print_whole(console, _hash_table(self))

    def draw(self, path: Path) -> None:
        """Draw loss over tokens and over wall time."""
        figure, panels = plots.new_panels(1, 2, 5.75, 5, sharey=True)
        over_tokens, over_time = panels[0]
        settings = self.settings
        scale = settings.num_replicas * settings.tokens_per_step / 1e6
        for result in self.rows.values():
            _draw(over_tokens, result, lambda point: point.step * scale, result.row.name)
            sent = f"{result.row.name}, {megabytes(result.sent_bytes)}"
            _draw(over_time, result, lambda point: point.seconds, sent)
        _label(over_tokens, self, "tokens seen by all replicas together (millions)", None)
        _label(over_time, self, "training time (s)", "sent by each replica")
        over_tokens.set_ylabel("loss (nats a byte)")
        over_tokens.set_title("the same tokens; lines: training, markers: validation")
        over_time.set_title(f"the same clock (link {settings.link})", fontsize="medium")
        figure.suptitle(
            f"{settings.num_replicas} replicas, {settings.num_steps} steps each. DDP communicates "
            f"at every step, the others every {settings.sync_every} steps."
        )
        plots.save(figure, path)


def _row_as_dict(result: RowResult) -> dict[str, Any]:
    return {
        "name": result.row.name,
        "method": result.row.method,
        "wire": result.row.wire,
        "initial_loss": result.initial_loss,
        "final_loss": result.final_loss,
        "sent_bytes": result.sent_bytes,
        "seconds": result.seconds,
        "exposed_s": result.exposed_s,
        "is_identical": result.is_identical,
        "replicas": [dataclasses.asdict(result.finished[r]) for r in sorted(result.finished)],
        "training": [dataclasses.asdict(point) for point in result.training],
        "validation": [dataclasses.asdict(point) for point in result.validation],
    }


def _close_to(result: RowResult, reference: RowResult, limit: float) -> Claim:
    difference = result.final_loss / reference.final_loss - 1.0
    return Claim(
        f"{result.row.name} ends {difference:+.2%} from {reference.row.name} (within {limit:.0%})",
        abs(difference) < limit,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.{0 if num_bytes >= 1e8 else 1}f} MB"


def run(settings: Comparison, console: Console) -> Results:
    """Train every row on the same replica processes.

    Raises:
        ValueError: If the text is missing or too short.
        ReplicaError: If a replica failed. All processes have ended then, as after an interrupt.
    """
    corpus = load_corpus(settings.data, settings.num_replicas)
    results = Results(settings, corpus.source, corpus.unigram_entropy)
    console.print(
        f"[bold]{settings.num_replicas} replicas[/] train a byte-level transformer, "
        f"{settings.num_steps} steps each, on {results.source}"
    )
    console.print(
        f"link: {settings.link}   validation text: {results.unigram_entropy:.3f} nats a byte "
        "without context (unigram entropy)",
        style="dim",
    )
    store = open_store("127.0.0.1", 0)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diloco-demo-")))
        modules = [compare.__module__, *WITH_OPTIMIZER]
        crew = Crew(compare, (settings, store.port), folder, modules)
        stack.callback(crew.close)
        for number in range(settings.num_replicas):
            crew.start(number)
        for row in ROWS:
            result = results.rows[row] = RowResult(row, settings.num_replicas)
            with progress_bar(row.name, settings.num_steps, is_kept=True) as advance:
                _train_row(result, crew, advance)
    return results


def _train_row(result: RowResult, crew: Crew, advance: Callable[..., None]) -> None:
    def note(replica: Replica, event: Event) -> None:
        before = result.step
        result.add(replica.number, event)
        loss = f"loss {result.final_loss:.3f}" if result.validation else ""
        advance(result.step - before, loss)

    for number in crew.replicas:
        crew.tell(number, result.row)
    crew.hear(note, math.inf, lambda: result.is_finished)


def _results_table(results: Results) -> Table:
    settings = results.settings
    heads = (
        "run\n", "sync\nevery", "initial\nloss", "final\nloss", "sent per\nreplica", "fewer\nbytes",
        "wall\n(s)", "exposed\n(s)", "1000\ntok/s",
    )  # fmt: skip
    title = f"{settings.num_replicas} replicas, {settings.num_steps} steps; link {settings.link}"
    table = plain_table(heads, title, padding=(0, 1, 0, 0))
    baseline = results.rows[BASELINE]
    for result in results.rows.values():
        is_baseline = result is baseline
        ratio = baseline.sent_bytes / max(1.0, result.sent_bytes)
        tokens = result.step * settings.num_replicas * settings.tokens_per_step
        rate = tokens / result.seconds if result.seconds else 0.0
        table.add_row(
            result.row.name,
            "1" if is_baseline else f"{settings.sync_every}",
            f"{result.initial_loss:.3f}",
            f"{result.final_loss:.3f}",
            megabytes(result.sent_bytes),
            "" if is_baseline else f"{ratio:,.0f}x",
            f"{result.seconds:.1f}",
            f"{result.exposed_s:.1f}",
            f"{rate / 1e3:,.1f}",
        )
    return table


def _hash_table(results: Results) -> Table:
    title = "hash of the shared parameters (SHA-256, first digits)"
    replicas = [f"replica {replica}" for replica in range(results.settings.num_replicas)]
    table = plain_table(["run", *replicas, ""], title, [*replicas, ""], pad_edge=False)
    for result in results.rows.values():
        verdict = "identical" if result.is_identical else "[red]DIFFERENT[/]"
        table.add_row(result.row.name, *(digest[:10] for digest in result.hashes), verdict)
    return table


def _draw(axes: Axes, result: RowResult, x_of: Callable[[Point], float], label: str) -> None:
    """Draw the training loss as a line, and the validation loss of the shared model as markers.

    There is one validation a round, which is too few for a curve where a run has few rounds.
    """
    colour, line, marker = STYLES[result.row]
    training, validation = result.training, result.validation[1:]
    x = [x_of(point) for point in training]
    axes.plot(x, [point.loss for point in training], line, color=colour, linewidth=1.2)
    x = [x_of(point) for point in validation]
    losses = [point.loss for point in validation]
    axes.plot(x, losses, color=colour, linestyle="none", marker=marker, markersize=6)
    axes.plot([], [], line, color=colour, marker=marker, markersize=6, label=label)


def _label(axes: Axes, results: Results, x_label: str, legend_title: str | None) -> None:
    entropy = results.unigram_entropy
    plots.show_range(axes, [entropy, *_shown_losses(results)])
    plots.level(axes, entropy, "unigram entropy of the text")
    axes.set_xlabel(x_label)
    plots.legend(axes, title=legend_title, loc="upper right")


def _shown_losses(results: Results) -> Iterator[float]:
    """Yield the losses that the axis must show: all but the losses of the steep first steps.

    The first steps fall alike under every method; the methods differ afterwards.
    """
    first = min(results.settings.num_steps // 4, results.settings.sync_every)
    for result in results.rows.values():
        for point in (*result.training, *result.validation):
            if point.step >= first:
                yield point.loss
