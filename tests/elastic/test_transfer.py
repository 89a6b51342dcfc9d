"""A newcomer copies the outer state of replicas that train, bit for bit, whatever donors do."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from diloco_comm import _C, WireFormat
from diloco_comm.elastic.transfer import donors
from diloco_comm.elastic.transfer.donors import Donor
from diloco_comm.elastic.transfer.messages import Answer, Kind, Wanted
from diloco_comm.elastic.transfer.newcomer import Newcomer, values_of
from diloco_comm.exchange.round import Header, Mean
from diloco_comm.group.beats import Way
from diloco_comm.methods.outer import SGD, Adam, Nesterov, OuterOptimizer, Update
from diloco_comm.ops.digests import digest_of
from diloco_comm.ops.wire import Layout
from diloco_comm.replica.fragments import make_fragments, trainable_parameters
from diloco_comm.rounds import history
from diloco_comm.rounds.part import SyncedFragment
from diloco_comm.rounds.round_log import RoundLog, Standing, state_tensors

# -------- Replicas with outer states and donors, in one process with real sockets, and their rounds


# Two fragments of three pieces each, with the momentum of Nesterov.
WIDTH = 1100
WIRE = WireFormat("fp32")
SERVICE = "transfer group"


def place_of(link: _C.Link) -> Way:
    return Way(link.nonce, link.address, "", "")


class Replica:
    """The outer state of one replica, its log, and the link at which it serves."""

    def __init__(
        self,
        outer: OuterOptimizer,
        seed: int,
        log_bytes: int,
        width: int,
        address: str = "127.0.0.1:0",
    ) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fragments = make_fragments(model, trainable_parameters(model, [optimizer]), 2)
        self.parts = [SyncedFragment(one, outer, WIRE, False, carries=False) for one in fragments]
        for part in self.parts:
            part.read_local()
            history.begin(part, is_shared=True)
        self.link = _C.Link(address, address)
        self.source = _C.StateSource([state_tensors(part) for part in self.parts])
        self.log = RoundLog(log_bytes, self.source)

    def serve(self) -> None:
        self.link.serve(SERVICE, self.source)

    def open(self) -> None:
        self.source.open([Standing.of(part).numbers() for part in self.parts])

    def close(self) -> None:
        self.link.close()
        self.source.close()

    def take_round(self, fragment: int) -> None:
        """Take an outer step on a gradient that follows from fragment and round."""
        part = self.parts[fragment]
        number = part.round
        generator = torch.Generator().manual_seed(1000 * fragment + number)
        layout = Layout.plan(part.num_elements, 1, 1, WIRE)
        payload = torch.zeros(layout.payload_bytes, dtype=torch.uint8)
        gradient = torch.randn(part.num_elements, generator=generator)
        payload[: 4 * part.num_elements] = gradient.view(torch.uint8)
        header, digest = Header(outer_lr=0.7), digest_of([payload])
        mean = Mean([(payload, 1.0)], layout, [header], [1.0], {}, 0, 0, digest=digest)
        with self.log.writing(part):
            part.state.step(Update(mean.terms, part.tensors(), layout, 0.7))
            before = part.history
            part.applied(number, mean)
            self.log.add(part, number, before, mean)

    def shown(self) -> Any:
        """Return all that replicas compare."""
        return [
            (part.round, part.history, part.state.num_steps, digest_of(state_tensors(part)))
            for part in self.parts
        ]


class Group:
    """Replicas that train together, and one that wants to join.

    Args:
        bytes_per_s, seed: The newcomer has them; the others have the seed 1.
        donor_address: The donors listen there; "": nobody can dial them.
    """

    def __init__(
        self,
        outer: Callable[[], OuterOptimizer],
        size: int,
        *,
        log_bytes: int = 1 << 27,
        width: int = WIDTH,
        bytes_per_s: float | None = None,
        seed: int = 2,
        donor_address: str = "127.0.0.1:0",
    ) -> None:
        more = log_bytes, width, donor_address
        self.replicas = [Replica(outer(), 1, *more) for _ in range(size)]
        for replica in self.replicas:
            replica.serve()
            replica.open()
        self.places = {f"{i}": place_of(one.link) for i, one in enumerate(self.replicas)}
        self.fresh = Replica(outer(), seed, log_bytes, width)
        link, parts = self.fresh.link, self.fresh.parts
        self.newcomer = Newcomer(link, SERVICE, parts, self.donors, bytes_per_s)

    def donors(self) -> dict[str, Way]:
        return self.places

    def train(self, num_rounds: int = 1) -> None:
        for _ in range(num_rounds):
            for replica in self.replicas:
                for fragment in range(2):
                    replica.take_round(fragment)

    def train_newcomer(self, num_rounds: int) -> None:
        """Let the newcomer hold a state like that of a checkpoint."""
        for _ in range(num_rounds):
            for fragment in range(2):
                self.fresh.take_round(fragment)
        self.newcomer.use_saved()

    def turn_until(self, is_done: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_done():
            self.newcomer.turn(0.02)
            assert time.monotonic() < deadline, self.newcomer.received_bytes

    def is_ready(self) -> bool:
        """Whether the newcomer is ready, and has heard of the rounds that were taken last."""
        status = self.newcomer._newest()
        rounds = [part.round for part in self.replicas[0].parts]
        has_heard = status is not None and [at.round for at in status.standings] == rounds
        return has_heard and self.newcomer.is_ready

    def kill(self, number: int) -> None:
        """End a donor; its replica goes on training."""
        self.replicas[number].close()

    def check(self) -> None:
        """Let the newcomer take the last rounds; it must then equal the others."""
        truth = self.replicas[0].shown()
        self.newcomer.catch_up({index: one[0] for index, one in enumerate(truth)})
        assert self.fresh.shown() == truth


@contextmanager
def training(*arguments: Any, **options: Any) -> Iterator[Group]:
    group = Group(*arguments, **options)
    with ExitStack() as stack:
        for replica in [group.fresh, *group.replicas]:
            stack.callback(replica.close)
        stack.callback(group.newcomer.close)
        yield group


# -------------------------------------------------------------------------- what the copies must do


def received_some(group: Group) -> bool:
    return any(piece.standing for copy in group.newcomer.copies for piece in copy.pieces)


@pytest.mark.nightly("up to 3 s each; they differ in the outer optimizer", but=["Nesterov"])
@pytest.mark.parametrize("outer", [SGD, Nesterov, Adam])
def test_pieces_of_different_rounds_are_brought_to_one(outer: type) -> None:
    with training(outer, 2) as group:
        group.train()
        group.turn_until(lambda: received_some(group))
        group.train(2)
        group.turn_until(group.is_ready)
        group.train()
        assert group.newcomer.rounds_behind == 0 or not group.newcomer.is_ready
        group.check()
        pieces = [piece for copy in group.newcomer.copies for piece in copy.pieces]
        assert all(piece.is_confirmed for piece in pieces)
        assert {piece.source for piece in pieces} <= {"0", "1"}


def test_a_suffix_of_rounds_is_all_that_travels_at_the_end() -> None:
    with training(Nesterov, 1) as group:
        group.turn_until(group.is_ready)
        before = group.newcomer.received_bytes
        assert before == group.newcomer.total_bytes
        group.train()
        group.check()
        # One round of fp32 payloads, and no momentum.
        rounds = sum(entry.num_bytes for entry in group.replicas[0].log.rounds())
        assert group.newcomer.received_bytes - before == rounds


def test_rounds_that_the_log_has_lost_cost_pieces_not_the_join() -> None:
    with training(Nesterov, 1, log_bytes=6 << 20) as group:
        group.turn_until(lambda: received_some(group))
        group.train(4)
        group.turn_until(group.is_ready)
        assert sum(copy.num_dropped for copy in group.newcomer.copies) > 0
        group.check()


def test_a_copy_keeps_no_payload_of_a_round_that_pieces_have_overtaken() -> None:
    with training(Nesterov, 1, log_bytes=12 << 20) as group:
        group.train(2)
        group.turn_until(group.is_ready)
        group.train()
        group.turn_until(group.is_ready)
        before = sum(copy.num_dropped for copy in group.newcomer.copies)
        group.train(5)
        group.turn_until(group.is_ready)
        assert sum(copy.num_dropped for copy in group.newcomer.copies) > before
        group.check()
        # Without the payload the newcomer says that it lacks the mean of the last round.
        assert all(part.state.last_update is None for part in group.fresh.parts)


def test_a_round_that_all_logs_lose_while_bandwidth_lacks_is_given_up() -> None:
    with training(Nesterov, 2, log_bytes=12 << 20) as group:
        group.train()
        group.turn_until(group.is_ready)
        newcomer = group.newcomer
        # From now on nothing may be asked for until more bytes are earned.
        newcomer._bytes_per_s, newcomer._allowed_bytes = 1.0, -1000.0
        group.train()
        group.turn_until(lambda: bool(newcomer._downloads))
        group.train(5)
        group.turn_until(lambda: not newcomer._downloads and newcomer.rounds_behind == -1)
        newcomer._bytes_per_s = None
        group.turn_until(group.is_ready)
        group.check()


def test_rounds_that_come_too_fast_end_the_copy() -> None:
    with training(Nesterov, 1, log_bytes=0, width=64) as group:

        def is_over() -> bool:
            group.train()
            return bool(group.newcomer.gave_up)

        group.turn_until(is_over)
        assert "round_log_bytes" in group.newcomer.gave_up
        assert not group.newcomer.is_ready


def test_a_donor_that_dies_costs_pieces_not_the_join() -> None:
    with training(Nesterov, 2) as group:
        group.turn_until(lambda: received_some(group))
        group.kill(0)
        del group.places["0"]
        group.train()
        group.turn_until(group.is_ready)
        group.check()


@pytest.mark.nightly("3 s; the first tier has a donor that dies")
def test_a_donor_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donors, "_STALL_S", 1.0)
    with training(Nesterov, 2) as group:
        group.turn_until(lambda: received_some(group))
        group.kill(0)
        group.turn_until(group.is_ready)
        group.check()


def test_a_donor_whose_bytes_do_not_fit_the_digest_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with training(Nesterov, 2) as group:
        take = Donor.take

        def garbled(donor: Donor, number: int, head: bytes, body: Any) -> bool:
            if donor.name == "0" and number in donor._open and body.numel() > 10_000:
                body[7] ^= 1
            return take(donor, number, head, body)

        monkeypatch.setattr(Donor, "take", garbled)
        group.train()
        group.turn_until(group.is_ready)
        group.check()
        assert all(piece.source == "1" for copy in group.newcomer.copies for piece in copy.pieces)


@pytest.mark.nightly("2 s each; they differ in the donor", but=["1"])
@pytest.mark.parametrize("liar", [0, 1])
def test_a_donor_with_another_state_is_outvoted(liar: int) -> None:
    with training(Nesterov, 3) as group:
        state_tensors(group.replicas[liar].parts[0])[1][17] = 3.0
        truth = group.replicas[2]
        group.train()
        group.turn_until(group.is_ready)
        group.replicas[0] = truth
        group.check()


@pytest.mark.nightly("3 s; the first tier has a donor that is outvoted")
def test_of_two_donors_that_differ_neither_ends_the_copy() -> None:
    """The members compare the digests before they let the copy count."""
    with training(Nesterov, 2) as group:
        state_tensors(group.replicas[1].parts[0])[1][17] = 3.0
        group.turn_until(group.is_ready)
        pieces = [piece for copy in group.newcomer.copies for piece in copy.pieces]
        assert sum(not piece.is_confirmed for piece in pieces) == 1


def test_a_limit_of_bytes_is_kept() -> None:
    with training(Nesterov, 2, bytes_per_s=1.0) as group:
        group.turn_until(lambda: received_some(group))
        for _ in range(20):
            group.newcomer.turn(0.01)
        # One message, and the next when its bytes are earned.
        assert group.newcomer.received_bytes <= 4 << 20


def test_bytes_that_were_asked_for_in_vain_are_given_back() -> None:
    with training(Nesterov, 2, bytes_per_s=1000.0) as group:
        group.turn_until(lambda: received_some(group))
        newcomer = group.newcomer
        copy = newcomer.copies[0]
        piece = next(piece for piece in copy.pieces if piece.standing is None)
        allowed = newcomer._allowed_bytes
        newcomer._spend(copy.bytes_of(piece))
        piece.is_asked = True
        newcomer._take_piece(copy, piece, newcomer._usable()[0], None)
        assert not piece.is_asked and newcomer._allowed_bytes == pytest.approx(allowed)


# ------------------------------------------------------------------------- from a checkpoint


@pytest.mark.nightly("6 s; the first tier has a suffix of rounds")
def test_from_a_checkpoint_only_the_rounds_since_travel() -> None:
    with training(Nesterov, 2, seed=1) as group:
        group.train_newcomer(2)
        group.train(4)
        group.turn_until(group.is_ready)
        group.check()
        entries = group.replicas[0].log.rounds()
        suffix = sum(entry.num_bytes for entry in entries if entry.number >= 2)
        assert group.newcomer.received_bytes == suffix


@pytest.mark.nightly("2 s; they differ in the size", but=["1-6291456"])
@pytest.mark.parametrize(("seed", "log_bytes"), [(2, 1 << 27), (1, 6 << 20)])
def test_a_checkpoint_that_does_not_fit_is_copied_anew(seed: int, log_bytes: int) -> None:
    """It is of another training, or older than the logs."""
    with training(Nesterov, 2, seed=seed, log_bytes=log_bytes) as group:
        group.train_newcomer(2)
        group.train(4)
        group.turn_until(group.is_ready)
        group.check()
        assert group.newcomer.received_bytes >= group.newcomer.total_bytes
        assert not group.newcomer.refusal


def test_a_checkpoint_may_hold_a_round_that_the_group_is_about_to_apply() -> None:
    with training(Nesterov, 2, seed=1, width=64) as group:
        group.train_newcomer(3)
        group.train(2)
        group.turn_until(lambda: any(copy.was_ahead for copy in group.newcomer.copies))
        assert not group.newcomer.is_ready
        group.train()
        group.turn_until(group.is_ready)
        group.check()
        assert group.newcomer.received_bytes == 0


def test_a_checkpoint_ahead_of_the_group_is_refused() -> None:
    with training(Nesterov, 2, seed=1, width=64) as group:
        group.train_newcomer(4)
        group.train(2)
        group.turn_until(lambda: any(copy.was_ahead for copy in group.newcomer.copies))
        group.newcomer.refuse_if_behind()
        assert "outer steps of fragment" in group.newcomer.refusal
        assert group.newcomer.received_bytes == 0


def test_a_group_that_goes_another_way_than_the_checkpoint_is_not_joined() -> None:
    with training(Nesterov, 2, seed=1, width=64) as group:
        group.train_newcomer(3)
        group.train(2)
        for replica in group.replicas:
            state_tensors(replica.parts[0])[1][3] += 1.0
        group.turn_until(lambda: any(copy.was_ahead for copy in group.newcomer.copies))
        group.train(2)
        group.turn_until(lambda: bool(group.newcomer.refusal))


# -------------------------------------------------------------------------- what is no request


def ask_raw(group: Group, content: bytes) -> None:
    host, _, port = group.replicas[0].link.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(content)


@pytest.mark.parametrize("content", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 5000])
def test_garbage_on_the_port_harms_nobody(content: bytes) -> None:
    with training(SGD, 1, width=32) as group:
        ask_raw(group, content)
        group.turn_until(group.is_ready)
        group.check()


def asked(group: Group, content: bytes, service: str = SERVICE) -> tuple[bytes, bytes]:
    """Ask the first donor for anything, over the connection that is there; return the answer."""
    link, way = group.fresh.link, group.places["0"].words
    group.turn_until(lambda: any(donor.status for donor in group.newcomer._usable()))
    number = link.request(way, service, content, 1 << 20)
    assert number > 0
    for _ in range(200):
        for found, head, body in link.replies(service, 0.1):
            if found == number:
                return head, bytes(body.numpy())
            # An answer to the newcomer itself.
            assert any(one.take(found, head, body) for one in group.newcomer._donors.values())
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"x", "no request"),
        (bytes(32), "kind 0"),
        (Wanted(Kind.STATE, 7, 0, 0, 1).to_bytes(), "there are 2 fragments"),
        (Wanted(Kind.STATE, 0, 0, 5, 5).to_bytes(), "elements"),
        (Wanted(Kind.STATE, 0, 0, 0, 1 << 40).to_bytes(), "elements"),
        (Wanted(Kind.STATE, 0, 0, (1 << 64) - 1, 1).to_bytes(), "elements"),
        (Wanted(Kind.ROUND, 0, 9, 5, 1).to_bytes(), "bytes of a round"),
        (Wanted(Kind.ROUND, 0, 9, 0, 1 << 40).to_bytes(), "bytes of a round"),
        (struct.pack("<IIQQQ", 33, 0, 0, 0, 1), "kind 33"),
    ],
)
def test_requests_that_are_none_get_a_sentence(content: bytes, sentence: str) -> None:
    with training(SGD, 1, width=32) as group:
        head, body = asked(group, content)
        assert struct.unpack_from("<I", head) == (Kind.REFUSED,)
        assert sentence in body.decode()
        group.turn_until(group.is_ready)
        group.check()


def test_a_service_that_nobody_has_answers_with_nothing() -> None:
    with training(SGD, 1, width=32) as group:
        assert asked(group, Wanted(Kind.STATUS).to_bytes(), "another") == (b"", b"")


def test_a_request_is_no_longer_than_the_frame() -> None:
    with training(SGD, 1, width=32) as group, pytest.raises(ValueError, match="64 bytes"):
        asked(group, bytes(65))


def test_a_donor_that_has_a_round_no_longer_is_asked_on() -> None:
    """Such an answer has no body, and is no wrong one, for which the donor would be lost."""
    with training(SGD, 1, width=32) as group:
        group.turn_until(lambda: any(donor.status for donor in group.newcomer._usable()))
        (donor,) = group.newcomer._usable()
        kinds: list[Kind] = []

        def take(donor: Donor, answer: Answer | None) -> None:
            assert answer is not None and values_of(donor, answer, Kind.PAYLOADS, 8) is None
            kinds.append(answer.kind)

        missing = Wanted(Kind.ROUND, 0, 999, 0, 8)
        group.turn_until(lambda: donor.ask(missing, 8, take))
        group.turn_until(lambda: bool(kinds))
        assert kinds == [Kind.GONE] and not donor.is_lost
        group.turn_until(group.is_ready)
        group.check()


def test_a_replica_without_state_serves_nothing() -> None:
    with training(SGD, 1, width=32) as group:
        fresh = _C.StateSource([state_tensors(part) for part in group.replicas[0].parts])
        group.replicas[0].link.serve(SERVICE, fresh)
        for _ in range(20):
            group.newcomer.turn(0.01)
        assert group.newcomer.received_bytes == 0
        assert not group.newcomer.is_ready
        fresh.close()


def test_a_connection_that_ends_is_made_anew() -> None:
    """Requests over the former one are asked again, also of the same donor."""
    with training(Nesterov, 1, bytes_per_s=30e6) as group:
        group.turn_until(lambda: received_some(group))
        (donor,) = group.newcomer._usable()
        assert not group.newcomer.is_ready
        address, nonce = group.replicas[0].link.address, group.replicas[0].link.nonce
        # A stranger who says that it is the newcomer takes the newcomer's place for a moment.
        host, _, port = address.rpartition(":")
        hello = struct.pack(
            "<8sII16s16s",
            b"DILOLINK",
            3,
            0,
            bytes.fromhex(group.fresh.link.nonce),
            bytes.fromhex(nonce),
        )
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(hello)
            group.turn_until(lambda: group.fresh.link.counters()["connects"] > 1)
        group.turn_until(group.is_ready)
        group.check()
        assert group.newcomer._usable() == [donor]


def test_a_source_that_ends_answers_what_waits() -> None:
    """No request stays open, and a connection outlives many sources."""
    with training(SGD, 1, width=32) as group:
        donor, fresh, way = group.replicas[0].link, group.fresh.link, group.places["0"].words
        group.turn_until(lambda: any(one.status for one in group.newcomer._usable()))
        for _ in range(20):
            source = _C.StateSource([state_tensors(part) for part in group.replicas[0].parts])
            donor.serve("another", source)
            wanted = Wanted(Kind.STATUS).to_bytes()
            open_requests = {fresh.request(way, "another", wanted, 1 << 20) for _ in range(4)}
            source.close()
            while open_requests:
                found = fresh.replies("another", 10.0)
                assert found
                open_requests -= {number for number, _, _ in found}
        assert fresh.counters()["connects"] == 1


def test_requests_of_connections_that_have_ended_cost_no_answer() -> None:
    with training(Nesterov, 1) as group:
        way, wanted = group.places["0"].words, Wanted(Kind.STATE, 0, 0, 0, 1).to_bytes()
        before = len(group.replicas[0].log.rounds())
        for _ in range(20):
            stranger = _C.Link("", "")
            group.turn_until(lambda link=stranger: link.reach("s", [way])[0] == "")  # type: ignore[misc]
            for _ in range(8):
                stranger.request(way, SERVICE, wanted, 1 << 20)
            stranger.close()
        group.turn_until(group.is_ready)
        status = group.newcomer._newest()
        assert status is not None and status.num_newcomers <= 2 and before == 0


def test_a_forked_child_ends_with_a_source() -> None:
    with training(SGD, 1, width=32) as group:
        child = os.fork()
        if child == 0:
            group.replicas[0].source.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        group.turn_until(group.is_ready)


def test_wrong_places_are_a_trouble_of_their_own_peer() -> None:
    with training(SGD, 1, width=32) as group:
        fresh, good = group.fresh.link, group.places["0"].words
        nonce = "ab" * 16
        wrong = [("x", "", "", ""), (nonce, "h:1", "ab" * 32, ""), (nonce, "", "", "")]
        wrong.append((nonce, "no-such-host.invalid:5", "", ""))
        group.turn_until(lambda: fresh.reach("another", [good])[0] == "")
        troubles = fresh.reach("another", [good, *wrong])
        assert troubles[0] == "" and all(troubles[1:])
        assert "hexadecimal" in troubles[1] and "no key" in troubles[2]
        assert "no address" in troubles[3] and "not known" in troubles[4]


@pytest.mark.parametrize(
    "text",
    ["", "x", "tcp://h:1 key", f"{'ab' * 16} h:1 - - -", f"{'AB' * 16} h:1 - -",
     f"{'ab' * 16} h:1 abcd -", f"{'ab' * 16} h\ud800:1 - -"],
)  # fmt: skip
def test_a_beat_without_a_place_names_no_donor(text: str) -> None:
    assert Way.from_text(text) is None


def test_a_place_is_its_text() -> None:
    for address, key, relay in [("h:1", "", ""), ("", "ab" * 32, "r:2"), ("", "", "")]:
        place = Way("ab" * 16, address, key, relay)
        assert Way.from_text(place.to_text()) == place


def test_a_donor_that_nobody_can_dial_dials() -> None:
    with training(Nesterov, 1, donor_address="") as group:
        donor = group.replicas[0].link
        place = group.fresh.link
        way = (place.nonce, place.address, "", "")

        def is_ready() -> bool:
            donor.reach(SERVICE, [way])
            return group.is_ready()

        group.turn_until(is_ready)
        group.check()


def test_the_log_keeps_the_latest_rounds_within_its_limit() -> None:
    with training(SGD, 1, width=32, log_bytes=4 * (32 * 33) * 5) as group:
        group.train(4)
        log = group.replicas[0].log
        entries = [(entry.number, entry.fragment) for entry in log.rounds()]
        size = log.rounds()[0].num_bytes
        assert entries == sorted(entries) and entries[-1] == (3, 1)
        assert len(entries) == log.max_bytes // size < 8
        assert log.num_bytes <= log.max_bytes
        oldest = log.rounds()[0]
        gone = Wanted(Kind.ROUND, oldest.fragment, oldest.number - 1, 0, 4).to_bytes()
        assert struct.unpack_from("<I", asked(group, gone)[0]) == (Kind.GONE,)
        kept = Wanted(Kind.ROUND, oldest.fragment, oldest.number, 0, 4).to_bytes()
        payload = log.payloads(oldest.fragment, oldest.number)[0]
        assert asked(group, kept)[1] == bytes(payload[:4].numpy())
