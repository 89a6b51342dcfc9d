"""Goodput under failures: the share of the time that a run trains, and the published table.

A learner stops for L seconds at each failure of one of its chips. With N chips in M learners that
do not wait for each other, and f failures of a chip a year,

    goodput = 1 / (1 + L * f * N / (M * seconds of a year))

Two values of L reproduce the table of arXiv 2604.21428 within five points: 22 s where training
goes on with the chips that are left, 76 s where data-parallel training restarts as a whole. Where
model and link are known, L grows by the time in which the state of a learner crosses the link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ..common.console import plain_table, print_whole
from ..common.sizes import not_negative
from .report import format_bytes, print_program
from .request import Setting, as_arguments

YEAR_S = 365.25 * 86400
ELASTIC_S, RIGID_S = 22.0, 76.0
# A learner that comes back copies outer parameters and momentum in fp32.
STATE_BYTES = 8
# The registry is a placeholder: the user knows where it runs.
_PEERS = 'Elastic("tcp://HOST:29400", run="RUN")'
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)


@dataclass(frozen=True)
class Row:
    """One row of the published table: goodput in % for each of ``CHIPS``."""

    name: str
    learners: int
    lost_s: float
    percent: tuple[int, ...]


PUBLISHED = (
    Row("data parallel, rigid", 1, RIGID_S, (72, 57, 38, 27, 18)),
    Row("data parallel, elastic", 1, ELASTIC_S, (88, 80, 69, 58, 40)),
    Row("2 learners", 2, ELASTIC_S, (94, 88, 80, 70, 54)),
    Row("4 learners", 4, ELASTIC_S, (96, 93, 89, 82, 73)),
    Row("8 learners", 8, ELASTIC_S, (98, 96, 94, 88, 80)),
    Row("16 learners", 16, ELASTIC_S, (99, 98, 96, 93, 86)),
)


def goodput(chips: float, learners: int, lost_s: float, failures_a_year: float = 1.0) -> float:
    """Return the share of the time in which a learner trains, in (0, 1].

    Args:
        chips: Chips of all learners together (N).
        learners: Learners that do not wait for each other (M); 1 is data parallel.
        lost_s: Seconds that a learner loses at a failure (L).
        failures_a_year: Failures of one chip a year (f).

    Raises:
        ValueError: If a number is out of its range.
    """
    if not chips >= learners >= 1:
        raise ValueError(
            f"there must be at least one learner and one chip for each, got {learners} learners "
            f"and {chips:g} chips"
        )
    not_negative(lost_seconds=lost_s, failures_per_year=failures_a_year)
    return 1.0 / (1.0 + lost_s * failures_a_year * chips / (learners * YEAR_S))


def compare() -> list[dict[str, Any]]:
    """Put published and predicted goodput side by side, one entry a row and number of chips."""
    return [
        {
            "row": row.name,
            "chips": chips,
            "published_percent": published,
            "percent": round(100 * goodput(chips, row.learners, row.lost_s), 1),
        }
        for row in PUBLISHED
        for chips, published in zip(CHIPS, row.percent, strict=True)
    ]


def make_report(
    chips: float | None,
    learners: int,
    lost_s: float,
    failures_a_year: float,
    plan: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what ``plan failures`` prints: the published table, or the user's own run.

    Args:
        chips: Chips of the user's run; None for the table.
        learners, lost_s, failures_a_year: As in ``goodput``.
        plan: The plan of the model and a link (``make_plan``), or None.

    Raises:
        ValueError: As ``goodput``.
    """
    if chips is None:
        return {"schema": 1, "published_failures": compare()}
    counts = sorted({1, 2, 4, 8, 16, learners})
    link = None
    if plan is not None:
        link = _on_link(plan)
        lost_s += link["copy_s"]
    own = {
        "chips": chips,
        "failures_a_year": failures_a_year,
        "lost_s": lost_s,
        "learners": learners,
        "goodput": goodput(chips, learners, lost_s, failures_a_year),
        "by_learners": [
            {"learners": m, "goodput": goodput(chips, m, lost_s, failures_a_year)}
            for m in counts
            if m <= chips
        ],
    }
    if link is not None:
        share = link["utilisation"]
        link["trained"] = None if share is None else share * own["goodput"]
    return {"schema": 1, "failures": {**own, "link": link}}


def _on_link(plan: dict[str, Any]) -> dict[str, Any]:
    """Return how long the state crosses the link, and the settings chosen for the link."""
    request, link = plan["request"], plan["link"]
    state_bytes = STATE_BYTES * request["params"]
    found = {
        "gbps": link["gbps"],
        "state_bytes": state_bytes,
        "copy_s": state_bytes * 8 / (link["gbps"] * link["efficiency"] * 1e9),
        "utilisation": None,
        "program": None,
    }
    if link["chosen"] is not None:
        setting = Setting(**link["chosen"]["setting"])
        made = as_arguments(setting, request["block_size"], peers=_PEERS)
        found |= {"utilisation": setting.utilisation, "program": [made["imports"], made["line"]]}
    return found


def print_failures(console: Console, report: dict[str, Any]) -> None:
    """Print the report of ``make_report``."""
    if "failures" in report:
        _print_own(console, report["failures"])
        return
    title = "Goodput in %, one failure of a chip a year (arXiv 2604.21428)"
    table = plain_table(["chips", *(f"{chips:,}" for chips in CHIPS)], title)
    entries = report["published_failures"]
    for row in PUBLISHED:
        # One rounding, to whole points: 73.46 rounded first to 73.5 would become 74.
        ours = (100 * goodput(chips, row.learners, row.lost_s) for chips in CHIPS)
        pairs = zip(row.percent, ours, strict=True)
        table.add_row(row.name, *(f"{published}/{own:.0f}" for published, own in pairs))
    print_whole(console, table)
    worst = max(abs(e["percent"] - e["published_percent"]) for e in entries)
    console.print(
        f"published/ours. {len(entries)} numbers, the largest difference is {worst:.1f} points. "
        f"{ELASTIC_S:g} s lost at a failure; {RIGID_S:g} s where data parallel is rigid: where it "
        "restarts as a whole."
    )


def _print_own(console: Console, own: dict[str, Any]) -> None:
    title = (
        f"{own['chips']:,.0f} chips, {own['failures_a_year']:g} failures of a chip a year, "
        f"{own['lost_s']:.4g} s lost at a failure"
    )
    table = plain_table(("learners", "goodput"), title)
    for entry in own["by_learners"]:
        table.add_row(str(entry["learners"]), f"{entry['goodput']:.1%}")
    print_whole(console, table)
    if own["link"] is not None:
        _print_link(console, own["link"])


def _print_link(console: Console, link: dict[str, Any]) -> None:
    console.print(
        f"{link['copy_s']:.3g} s of these are the {format_bytes(link['state_bytes'])} of outer "
        f"parameters and momentum on {link['gbps']:g} Gbit/s."
    )
    if link["program"] is None:
        console.print("No setting that was tried reaches --target on this link.")
        return
    console.print(
        f"Settings chosen for the link train {link['utilisation']:.2%} of the time without "
        f"failures, {link['trained']:.2%} with them:"
    )
    print_program(console, link["program"])
