"""All that can happen under the rules of one agreement, by the explorer ``tests/cpp/agreement``.

The explorer goes through every state of a model of the rules: any process may propose any set at
any moment and any number of times, every message may come late, out of order or never, and two
proposers work at a time. ``explore_agreement --list`` says what each feature and each mutant is.

All searches here are exhaustive, and all but those with "repeat" also look for states from which
no common record can be reached. Where no bounds are named, there are three records, one round a
stream under way in the first of them, one fault of each kind that the features name, one newcomer.

With two members each feature has 459 to 7,085 states. All pairs of features have 3.1 million states
together; the largest pair is "join,found" with 349,326. ``DEEP`` lists the larger searches.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import run_command

ROOT = Path(__file__).resolve().parents[2]
REASON = "explore_agreement is not built: make test builds it"

# For each feature the events without which the feature would not be there.
FEATURES = {
    "crash": {"dies", "is-fenced"},
    "restart": {"dies", "starts", "follows", "plans"},
    "zombie": {"starts", "follows", "plans"},
    "loss": {"loses"},
    "repeat": {"seals"},
    "cut": {"is-cut", "is-ready"},
    "streams": {"votes", "applies"},
    "rounds": {"votes", "applies"},
    "planned": {"plans"},
    "join": {"starts", "follows", "plans"},
    "found": {"founds", "copies"},
    "revive": {"revives", "copies"},
    "rollback": {"revives", "copies"},
    "forget": {"forgets", "hears-open"},
    "answers": {"swaps", "learns"},
    "demand": {"is-told", "copies"},
    "leave": {"wants-to-leave", "plans", "ends"},
    "move": {"moves", "says-no"},
    "finish": {"plans"},
}
# Newcomers for whom callers name two stores, where no group lives, are two runs.
# A member waits for ever that hears of another store before the change of the last leaver.
# Where two processes have one number, a caller that names its own number vouches for both. At a
# table that knows of no record, callers that vouch wrongly make two groups. There a caller also
# waits, until its time is over, for the SEALED of a member that it leaves out and cannot reach, or
# for a member whose caller has named another store.
EXCLUDED = [
    *({"found", "move"}, {"revive", "move"}, {"rollback", "move"}, {"leave", "move"}),
    *({"zombie", "demand", "forget"}, {"zombie", "demand", "move"}),
    *({"cut", "demand", "forget"}, {"cut", "demand", "move"}),
    {"forget", "demand", "move"},
]

MUTANTS = [
    "no-promise",
    "applied-only",
    "open-without-one",
    "blind-swap",
    "no-nonce",
    "planned-own-position",
    "planned-round-k",
    "planned-first-votes",
    "one-meet",
    "found-with-state",
    "stale-follower",
    "newcomer-votes",
    "empty-decides",
    "no-ready",
    "leaver-leaves",
    "revive-living",
    "revive-behind",
    "after-finish",
    "stateless-proposes",
    "other-demand",
    "any-record-answers",
    "old-attempt",
    "old-votes",
    "newcomer-hears-open",
    "requests-survive",
    "two-of-one-number",
    "new-table-majority",
    "new-table-living",
    "late-answer",
    "newcomer-first",
    "planned-unsealed",
]
SCENARIOS = [
    "no-way",
    "opened-unheard",
    "sealed-died-restarted",
    "late-vote-to-a-zombie",
    "repeated-frame",
    "devices-of-two",
    "two-demands",
    "two-stores",
    "out-in-out",
    "beats-without-bulk",
    "a-way-goes",
    "decides-otherwise",
    "opposite-views",
]

# Members, features, bounds; see the table above.
DEEP = [
    (2, "crash,restart,streams,rounds", "crashes=3,newcomers=3,last=4,rounds=4"),
    (2, "forget,restart,streams", "forgets=2,crashes=2,newcomers=2,last=3,rounds=3"),
    (3, "crash,streams", "crashes=2,last=3"),
    (3, "crash,answers", "crashes=2,last=3"),
    (3, "loss,streams", "losses=2"),
    (3, "crash,join", "crashes=2"),
    (3, "crash,move", ""),
    (3, "crash,forget", ""),
    (3, "crash,forget,answers", ""),
    (3, "forget", "forgets=2"),
    (3, "forget,planned,join", ""),
    (4, "crash", "last=1"),
    (4, "forget", "last=1"),
]


@dataclass
class Run:
    """The outcome of an explorer.

    Attributes:
        status: 0 if what was expected is so.
        seen: The kinds of events that could happen.
        text: The whole output.
    """

    status: int
    seen: set[str]
    text: str


def explore(*arguments: str) -> Run:
    programs = sorted(ROOT.glob("build/editable-*/explore_agreement"))
    if not programs:
        pytest.skip(REASON)
    done = run_command([programs[0], *arguments], timeout=600)
    text = done.stdout + done.stderr
    events = re.search(r"^seen:(.*)$", text, re.MULTILINE)
    words = events[1].split() if events else []
    return Run(done.returncode, set(words[::2]), text)


def combinations(size: int) -> list[str]:
    """Return sets of features with commas between them."""
    sets = itertools.combinations(FEATURES, size)
    return [",".join(one) for one in sets if not any(two <= set(one) for two in EXCLUDED)]


def names(what: str) -> list[str]:
    """Return the names of the features or the mutants that the explorer has."""
    part = explore("--list").text.partition(f"{what}:\n")[2].partition(":\n")[0]
    return re.findall(r"^  (\S+)", part, re.MULTILINE)


def check(members: int, features: str, bounds: str = "") -> Run:
    """Explore all states, with liveness; a relay that repeats has a bound on proposals instead."""
    arguments = ["--members", str(members), "--features", features, "--bounds", bounds]
    live = [] if "repeat" in features else ["--live"]
    run = explore(*arguments, *live)
    assert run.status == 0, run.text
    assert "exhaustive" in run.text and "nothing is broken" in run.text
    return run


def test_each_name_of_the_explorer_is_tested() -> None:
    assert names("features") == list(FEATURES)
    assert names("mutants") == MUTANTS
    assert names("scenarios") == SCENARIOS


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_shows_its_events_and_breaks_nothing(feature: str) -> None:
    assert check(2, feature).seen >= FEATURES[feature]


def test_pairs_of_features_with_two_members_break_nothing() -> None:
    for pair in combinations(2):
        check(2, pair)


@pytest.mark.nightly("minutes; the first tier has all pairs")
@pytest.mark.timeout(3600)
def test_triples_of_features_with_two_members_break_nothing() -> None:
    for triple in combinations(3):
        check(2, triple)


def has_same_outcomes(features: str) -> bool:
    """Compare what the states mean to the rounds with a search that takes no states for one."""
    arguments = ["--features", features, "--bounds", "proposals=1,attempts=3", "--outcomes"]
    found = [explore(*arguments, *whole) for whole in ([], ["--whole"])]
    texts = [re.search(r"^\d+ outcomes with the sum \w+$", one.text, re.MULTILINE) for one in found]
    assert found[0].status == found[1].status == 0 and texts[0] and texts[1]
    assert found[0].text != found[1].text
    return texts[0][0] == texts[1][0]


@pytest.mark.parametrize("feature", FEATURES)
def test_states_that_are_taken_for_one_have_the_same_outcomes(feature: str) -> None:
    assert has_same_outcomes(feature)


@pytest.mark.nightly("fifteen seconds; the first tier has each feature")
def test_states_with_two_features_that_are_taken_for_one_have_the_same_outcomes() -> None:
    different = [pair for pair in combinations(2) if not has_same_outcomes(pair)]
    assert not different


def test_a_swap_that_is_refused_is_seen_where_the_table_forgets() -> None:
    assert "refuses" in check(2, "answers,forget").seen


@pytest.mark.nightly("twenty seconds; the first tier has two members")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_with_three_members_breaks_nothing(feature: str) -> None:
    check(3, feature)


@pytest.mark.nightly("minutes; the first tier has fewer members or lower bounds")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("members", "features", "bounds"), DEEP)
def test_larger_bounds_break_nothing(members: int, features: str, bounds: str) -> None:
    check(members, features, bounds)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_breaks_the_invariant_that_it_should(mutant: str) -> None:
    run = explore("--mutant", mutant)
    assert run.status == 0, run.text
    assert re.search(r" break [ILi]\d: ", run.text), run.text


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_named_sequence_ends_as_it_must(scenario: str) -> None:
    run = explore("--scenario", scenario)
    assert run.status == 0, run.text
    assert "the end is reached" in run.text and "is noticed" in run.text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--features", "crashes"], "there is no feature crashes"),
        (["--bounds", "crash=1"], "there is no bound crash=1"),
        (["--members", "9"], "the bounds are too large"),
        (["--mutant", "none"], "there is no mutant none"),
        (["--most"], "--most needs a value"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], sentence: str) -> None:
    run = explore(*arguments)
    assert run.status == 2 and sentence in run.text


def test_a_search_that_is_cut_short_fails() -> None:
    run = explore("--members", "3", "--most", "1000")
    assert run.status == 1 and "not exhausted" in run.text
