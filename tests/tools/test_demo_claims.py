"""Each claim of the demo holds for good rows and fails for bad rows."""

from __future__ import annotations

import pytest

from diloco_comm_tools.demo.comparison import Point, Results, RowResult
from diloco_comm_tools.demo.replica import Finished
from diloco_comm_tools.demo.settings import BASELINE, REFERENCE, ROWS, SMALL, TINY, Comparison, Row

SETTINGS = Comparison(num_replicas=2, sync_every=50)
# Nats a byte before and after, and bytes sent, of rows for which every claim holds.
INITIAL, FINAL, ENTROPY = 5.5, 2.0, 3.2
SENT = {BASELINE: 198_000_000, SMALL: 1_000_000, TINY: 500_000}


def results(
    final: dict[Row, float] | None = None,
    sent: dict[Row, int] | None = None,
    odd_one: Row | None = None,
    entropy: float = ENTROPY,
) -> Results:
    """Make up the rows of two replicas, with some numbers replaced."""
    made = Results(SETTINGS, "made up", entropy)
    for row in ROWS:
        result = RowResult(row, SETTINGS.num_replicas)
        loss = (final or {}).get(row, FINAL)
        result.validation = [Point(0, 0.0, INITIAL), Point(500, 9.0, loss)]
        sent_bytes = (sent or {}).get(row, SENT.get(row, 4_000_000))
        for replica in range(SETTINGS.num_replicas):
            outer_hash = f"hash{replica}" if row == odd_one else "hash"
            result.finished[replica] = Finished(outer_hash, 1000, sent_bytes, sent_bytes, 0.1, 9.0)
        made.rows[row] = result
    return made


def failed(made: Results) -> list[int]:
    return [index for index, claim in enumerate(made.claims()) if not claim.holds]


def test_all_claims_hold_for_good_rows() -> None:
    assert len(results().claims()) == 6
    assert failed(results()) == []


@pytest.mark.parametrize(
    ("made", "number", "text"),
    [
        # All end alike, at 60% of the start and so above the entropy too unless that is raised.
        (results({row: 0.6 * INITIAL for row in ROWS}, entropy=4.0), 0, "ends at 60% of its init"),
        (results(entropy=1.99), 1, "2.000 nats a byte, below the unigram entropy of the text, 1.9"),
        (results({SMALL: FINAL * 1.011}), 2, "int8 ends +1.10% from DiLoCo fp32 (within 1%)"),
        (results({SMALL: FINAL * 0.989}), 2, "int8 ends -1.10% from DiLoCo fp32 (within 1%)"),
        (results({TINY: FINAL * 1.031}), 3, "int4 ends +3.10% from DiLoCo fp32 (within 3%)"),
        (results(sent={BASELINE: 149_000_000}), 4, "149x fewer bytes than DDP fp32 (at least 150x"),
        (results(odd_one=TINY), 5, "the 2 replicas are bit-identical"),
    ],
    ids=["share", "entropy", "int8 above", "int8 below", "int4", "bytes", "identical"],
)
def test_each_claim_fails_alone(made: Results, number: int, text: str) -> None:
    assert failed(made) == [number]
    assert text in made.claims()[number].text


@pytest.mark.parametrize(
    "made",
    [
        results({row: 0.59 * INITIAL for row in ROWS}, entropy=4.0),
        results(entropy=2.01),
        results({SMALL: FINAL * 1.009}),
        results({TINY: FINAL * 0.971}),
        results(sent={BASELINE: 150_000_000}),
    ],
    ids=["share", "entropy", "int8", "int4", "bytes"],
)
def test_each_claim_holds_right_at_its_limit(made: Results) -> None:
    assert failed(made) == []


def test_an_unfinished_row_is_not_identical() -> None:
    made = results()
    del made.rows[REFERENCE].finished[1]
    assert failed(made) == [5]
