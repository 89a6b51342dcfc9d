"""What becomes of rounds that were broken off: the rule, and all that can happen under it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
from termination_explorer import explore
from termination_model import Model
from termination_mutants import MUTANTS, Mutant, with_change
from termination_record import Code

from diloco_comm.exchange.membership import termination
from diloco_comm.exchange.membership.sealing import from_json, to_json
from diloco_comm.exchange.membership.termination import (
    Ack,
    Commit,
    Decision,
    Progress,
    Refusal,
    decide,
)
from diloco_comm.exchange.round import Standing, State


def ack(
    last: int,
    rounds: Mapping[int, State | None] | None = None,
    *,
    epoch: int = 1,
    members: tuple[int, ...] = (0, 1, 2, 3),
    sent_in: int = 1,
) -> Ack:
    """What a replica says that has applied round ``last`` of fragment 0, all of one epoch."""
    given = {n: Standing(state, sent_in) for n, state in (rounds or {}).items() if state}
    applied = sent_in if last >= 0 else 0
    return Ack(epoch, members, applied, {0: Progress(last, given)})


# ------------------------------------------------------------------------------ single decisions


@pytest.mark.parametrize(
    ("first", "second", "lacking"),
    [
        ("voted", "voted", (1, 2)),  # the only one that applied it may be dead
        ("applied", "voted", (2,)),
        ("agreed", "voted", (1, 2)),
        ("agreed", "agreed", (1, 2)),
        ("agreed", "applied", (1,)),
        ("voted", None, None),
        ("voted", "rejected", None),
    ],
)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_round_counts_if_all_survivors_have_voted(
    first: State, second: State | None, lacking: tuple[int, ...] | None, is_swapped: bool
) -> None:
    states = {1: first, 2: second}
    if is_swapped:
        states = {1: second, 2: first}
        lacking = None if lacking is None else tuple(sorted(3 - replica for replica in lacking))
    acks = {r: ack(5 + (s == "applied"), {6: s}) for r, s in states.items()}
    decision = decide(acks)
    assert decision.refusal is None and decision.lineage == 1
    if lacking is None:
        assert decision.commits == () and decision.discards == ((0, 6),)
        assert decision.last == {0: 5}
    else:
        assert decision.commits == (Commit(0, 6, lacking),) and decision.discards == ()
        assert decision.last == {0: 6}


@pytest.mark.parametrize("done", ["agreed", "applied"])
@pytest.mark.parametrize("other", [None, "rejected"])
def test_who_has_not_voted_for_a_round_of_the_others_is_named(
    done: State, other: State | None
) -> None:
    acks = {1: ack(5 + (done == "applied"), {6: done}), 2: ack(5, {6: other})}
    refusal = decide(acks).refusal
    assert refusal is not None and refusal.missing == (2,)
    assert (refusal.fragment, refusal.round, refusal.stage) == (0, 6, "repair")
    assert "replica 2 lacks round 6 of fragment 0" in refusal.message


def test_two_rounds_under_way_count_in_their_order() -> None:
    """Replica 1 has applied one and agreed on the next; replica 2 was told of less."""
    acks = {1: ack(6, {6: "applied", 7: "agreed"}), 2: ack(5, {6: "agreed", 7: "voted"})}
    decision = decide(acks, most=2)
    assert decision.commits == (Commit(0, 6, (2,)), Commit(0, 7, (1, 2)))
    acks[2] = ack(5, {6: "agreed"})
    acks[1] = ack(6, {6: "applied", 7: "voted"})
    decision = decide(acks, most=2)
    assert decision.commits == (Commit(0, 6, (2,)),) and decision.discards == ((0, 7),)


def test_no_round_counts_after_one_that_does_not() -> None:
    """An engine takes rounds in order, so this cannot be: but then there is nothing to go on."""
    acks = {1: ack(5, {6: "voted", 7: "voted"}), 2: ack(5, {7: "voted"})}
    decision = decide(acks, most=2)
    assert decision.commits == () and decision.discards == ((0, 6), (0, 7))


def test_a_round_that_was_voted_down_is_no_gap() -> None:
    """Round 6 was voted down everywhere; round 7 is applied by one and held by the other."""
    acks = {1: ack(7, {6: "rejected", 7: "applied"}), 2: ack(5, {6: "rejected", 7: "voted"})}
    decision = decide(acks, most=2)
    assert decision.commits == (Commit(0, 7, (2,)),) and decision.last == {0: 7}
    # However many there were.
    acks = {1: ack(90, {89: "rejected", 90: "applied"}), 2: ack(5, {89: "rejected", 90: "voted"})}
    assert decide(acks, most=2).commits == (Commit(0, 90, (2,)),)


def test_who_is_too_far_behind_is_named() -> None:
    refusal = decide({0: ack(3), 1: ack(6)}).refusal
    assert refusal is not None and refusal.missing == (0,)
    assert "the group is at round 6, but replica 0 at 3; at most 1 missing" in refusal.message


def test_all_who_are_too_far_behind_are_named_at_once() -> None:
    refusal = decide({0: ack(2), 1: ack(3), 2: ack(6)}).refusal
    assert refusal is not None and refusal.missing == (0, 1)
    assert "the group is at round 6, but replica 0 at 2, replica 1 at 3" in refusal.message


def test_a_round_of_another_epoch_is_another_round() -> None:
    """Replica 2 was left out of epoch 2, where round 6 was sent anew; it holds the old one."""
    new = ack(5, {6: "voted"}, epoch=2, members=(0, 1), sent_in=2)
    old = ack(5, {6: "voted"})
    refusal = decide({0: new, 1: new, 2: old}).refusal
    assert refusal is not None and refusal.missing == (2,)
    assert decide({0: new, 1: new}).commits == (Commit(0, 6, (0, 1)),)
    # Discarded and not yet sent anew: the old one has no say, and never was.
    new = ack(5, epoch=2, members=(0, 1))
    decision = decide({0: new, 1: new, 2: old})
    assert decision.refusal is None and decision.discards == ((0, 6),)


@pytest.mark.parametrize("sent_in", [2, 4])
def test_who_went_on_alone_is_refused_though_it_is_as_far(sent_in: int) -> None:
    """Epoch 3 went on from epoch 1; no ack names the rounds that differ."""
    acks = {0: ack(6, epoch=3, members=(0, 1), sent_in=3), 1: ack(6, epoch=3, sent_in=3)}
    acks[2] = ack(6, epoch=2, members=(2,), sent_in=sent_in)
    refusal = decide(acks).refusal
    assert refusal is not None and refusal.missing == (2,)
    assert "replica 2 went on apart from the others" in refusal.message


def test_newcomers_have_no_say() -> None:
    assert decide({}) == Decision()


def test_an_ack_travels_as_text() -> None:
    one = Ack(3, (0, 2), 2, {0: Progress(4, {5: Standing("voted", 3)}), 7: Progress(-1)})
    assert from_json(json.loads(json.dumps(to_json(one)))) == one


# ------------------------------------------------------------------------- all that can happen


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    """A million states stay until the end, and hold no circles: to look for some takes long."""
    gc.disable()
    yield
    gc.enable()


EVENTS = {"votes", "hears all", "applies", "calls for", "seals for", "agrees to enter", "enters"}

MODELS = {
    "two": Model(2),
    # More rounds than an ack names.
    "two-three-rounds": Model(2, num_rounds=3, num_deaths=1),
    "two-bad-votes": Model(2, num_deaths=0, votes_bad=True),
    "two-three-bad-votes": Model(2, num_rounds=3, num_deaths=0, num_attempts=1, votes_bad=True),
    "two-three-changes": Model(2, num_rounds=1, num_deaths=1, num_attempts=3),
    "two-apart": Model(
        2, num_rounds=1, num_deaths=0, num_attempts=3, has_one_line=False, may_refuse=True
    ),
    "three": Model(3, num_attempts=1),
    "three-three-rounds": Model(3, num_rounds=3, num_deaths=0, num_attempts=1),
    "three-two-changes": Model(3, num_rounds=1, num_deaths=1),
    "three-with-newcomer": Model(3, num_rounds=1, num_deaths=1, num_newcomers=1),
}
# Deaths make nothing possible: it may be that a process does nothing more.
LARGE_MODELS = {
    "two-under-way": Model(2, num_rounds=3, num_under_way=2, num_deaths=1),
    "two-apart-two-rounds": Model(
        2, num_deaths=0, num_attempts=3, has_one_line=False, may_refuse=True
    ),
    "three-two-deaths": Model(3, num_rounds=1),
    "three-bad-votes": Model(3, num_deaths=0, num_attempts=1, votes_bad=True),
    "three-two-rounds-two-changes": Model(3, num_deaths=0),
    "four-with-newcomer": Model(4, num_rounds=1, num_deaths=0, num_newcomers=1),
}


@pytest.mark.nightly(
    "up to 30 s each; smaller models of each kind stay",
    but=["two-three-bad-votes", "two-three-changes", "two-apart"],
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.timeout(600)
def test_nothing_that_was_applied_is_lost(name: str) -> None:
    check(MODELS[name])


@pytest.mark.nightly("up to a minute each; the small models of the same kinds are explored")
@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE_MODELS)
@pytest.mark.timeout(1800)
def test_nothing_that_was_applied_is_lost_in_a_large_model(name: str) -> None:
    check(LARGE_MODELS[name])


def check(model: Model) -> None:
    found = explore(model)
    print(f"{found.num_states} states")
    assert not found.violation, f"after {found.num_states} states\n{found.violation}"
    expected = EVENTS | ({"dies"} if model.num_deaths else set())
    expected |= {"votes bad", "hears bad"} if model.votes_bad and model.size > 1 else set()
    assert expected <= found.seen.keys(), found.seen


@pytest.mark.nightly("17 s together; they prove the explorer and not the code", but=["three"])
@pytest.mark.parametrize(
    "model",
    [
        Model(2, num_deaths=1),
        Model(3, num_rounds=1, num_deaths=0, num_attempts=1),
        Model(3, num_rounds=1, num_deaths=0, num_newcomers=1),
    ],
    ids=["two", "three", "three-with-newcomer"],
)
@pytest.mark.timeout(300)
def test_states_that_are_taken_for_one_come_to_the_same(model: Model) -> None:
    all_of_them, some = explore(model, is_reduced=False), explore(model)
    assert all_of_them.ends == some.ends and not all_of_them.violation
    assert all_of_them.num_states > some.num_states


# ------------------------------------------------------------------------ rules that are wrong


def compare_applied_rounds_alone(acks: Mapping[int, Ack], most: int) -> Decision:
    """Bring all to the last round that any survivor has applied, and lose the others."""
    views = {replica: one.fragments[0] for replica, one in acks.items()}
    commits = []
    for number in range(max(view.last for view in views.values()) + 1):
        lacking = tuple(replica for replica, view in views.items() if view.last < number)
        for replica in lacking:
            standing = views[replica].standing(number)
            if standing is None or standing.state not in ("voted", "agreed"):
                return Decision(refusal=Refusal(f"replica {replica} lacks round {number}"))
        if lacking:
            commits.append(Commit(0, number, lacking))
    return Decision(tuple(commits))


def let_all_decide(acks: Mapping[int, Ack], most: int) -> Decision:
    """As the rule, but who was left out of the newest group has a say, too."""
    return decide({r: replace(one, members=tuple(acks)) for r, one in acks.items()}, most)


Rule = Callable[[Mapping[int, Ack], int], Decision]
WRONG: list[tuple[str, int, Rule, dict[str, int]]] = [
    ("applied-rounds-alone", 2, compare_applied_rounds_alone, {}),
    ("applied-rounds-alone", 3, compare_applied_rounds_alone, {}),
    ("no-promise", 2, decide, {"keeps_promise": False}),
    ("no-promise", 3, decide, {"keeps_promise": False}),
    # It takes a third process, which was left out and comes back.
    ("all-decide", 3, let_all_decide, {"num_rounds": 1}),
]


@pytest.mark.nightly(
    "12 s together; the rules prove the explorer and not the code",
    but=["applied-rounds-alone-2", "no-promise-2"],
)
@pytest.mark.parametrize(
    ("size", "rule", "options"), [one[1:] for one in WRONG], ids=[f"{n}-{w}" for n, w, *_ in WRONG]
)
@pytest.mark.timeout(600)
def test_a_wrong_rule_is_found_out(size: int, rule: Rule, options: dict[str, int]) -> None:
    found = explore(Model(size, code=Code(decide=rule), may_refuse=True, **options))
    print(f"{found.num_states} states\n{found.violation}")
    assert found.violation, f"{found.num_states} states, and nothing was found"
    *way, why = found.violation.splitlines()
    # A step is lost or diverges: not merely that the rule has no answer.
    assert why.startswith(("I1", "I2", "I3")) and way[0] == "  1. process 0 votes round 0"


@pytest.mark.nightly(
    "5 s; the first tier has the mistakes that are found in a second",
    but=["rounds-voted-for-are-untold"],
)
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.timeout(300)
def test_a_mistake_in_the_code_is_found_out(name: str) -> None:
    mutant: Mutant = MUTANTS[name]
    found = explore(replace(mutant.model, code=mutant.code))
    print(f"{found.num_states} states\n{found.violation}")
    assert found.violation, f"{found.num_states} states, and nothing was found"
    *way, why = found.violation.splitlines()
    assert why.startswith(mutant.breaks) and way


@pytest.mark.nightly("4 s; about a rule that was left out")
def test_who_is_too_far_behind_would_be_refused_one_by_one() -> None:
    """``_refuse_far`` is there to name all of them: without it nothing else is decided."""
    decides_without = with_change(termination, "        self._refuse_far()\n", "")["decide"]
    num_refused = 0

    def decide_with_and_without(acks: Mapping[int, Ack], most: int) -> Decision:
        nonlocal num_refused
        decision, other = decide(acks, most), decides_without(acks, most)
        is_refused = decision.refusal is not None
        num_refused += is_refused and "at most" in decision.refusal.message
        assert is_refused == (other.refusal is not None)
        return decision

    model = Model(2, num_rounds=3, num_deaths=0, code=Code(decide=decide_with_and_without))
    assert not explore(model).violation and num_refused
