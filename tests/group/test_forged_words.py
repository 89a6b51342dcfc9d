"""Words of a process that is no member, and a record that cannot be read, end no training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
from agreement_walks import is_settled
from agreement_world import Node, nonce_of
from driver_world import Clock, DriverWorld, virtual_time

from diloco_comm.group import driver as driver_module
from diloco_comm.group import messages as ms
from diloco_comm.group.beats import Beat, Way, name_of
from diloco_comm.group.records import Attempt, Key, Record
from diloco_comm.group.state import Place, Stage

STRANGER = nonce_of(9)
DAMAGED = b"no record of a group"


class Scene(DriverWorld):
    """Three replicas that train together, and a process without a driver."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(1, clock)
        for number in range(3):
            self.add(number)
        self.pass_time(10.0)
        assert is_settled(self) and self.newest.numbers == (0, 1, 2)
        self.num_beats, self.num_records = 1000, len(self.chain)

    @property
    def newest(self) -> Record:
        return Record.from_bytes(self.record)

    def beat_as(self, key: Key) -> None:
        """Let the stranger beat under a name of its own, for any process, with its own link."""
        self.num_beats += 1
        settings = self.settings.digest
        way = Way(STRANGER.hex(), "host:9", "", "").to_text()
        beat = Beat(Place(key, settings), self.num_beats, ways=(way,))
        name = name_of(Key(9, STRANGER))
        self.beats[name] = beat.to_bytes(), self.clock.now

    def say(self, sender: bytes, kind: int, content: bytes) -> None:
        """Let a frame come from the stranger's link to all replicas."""
        frame = driver_module._Frame(STRANGER.hex(), sender + bytes([kind]) + content)
        for node in self.living:
            self.processes[node.key.nonce].driver._events.put(frame)
        self.pass_time(0.5)

    def forged_open(self, proposer: bytes) -> bytes:
        """Return an OPEN of a record that follows the present one, without replica 0."""
        old = self.newest
        new = replace(
            old,
            number=old.number + 1,
            parent=old.hash,
            founding=old.run_id,
            attempt=Attempt(proposer, 999),
            members=old.members[1:],
            joined=(),
            source=None,
            left_out=(0,),
        )
        return ms.encode(ms.Open(new.to_bytes()))

    def check_that_all_train(self) -> None:
        rounds = self.rounds()
        self.pass_time(5.0)
        assert len(self.living) == 3 and len(self.chain) == self.num_records
        assert {node.state.entered for node in self.living} == {self.chain[-1]}
        assert self.rounds() > rounds

    def rounds(self) -> int:
        return min(sum(node.thread.done) for node in self.living)

    def driver_of(self, node: Node) -> driver_module.Driver:
        return self.processes[node.key.nonce].driver


@pytest.fixture
def scene() -> Iterator[Scene]:
    clock = Clock()
    with virtual_time(clock):
        yield Scene(clock)


def test_a_process_that_is_no_member_opens_no_record(scene: Scene) -> None:
    scene.beat_as(Key(9, STRANGER))
    scene.pass_time(1.0)
    scene.say(STRANGER, driver_module._MESSAGE, scene.forged_open(STRANGER))
    scene.check_that_all_train()


def test_the_beat_of_another_name_gives_no_process_another_link(scene: Scene) -> None:
    victim = scene.newest.members[0]
    for _ in range(20):
        scene.beat_as(victim)
        scene.say(victim.nonce, driver_module._MESSAGE, scene.forged_open(victim.nonce))
        scene.say(victim.nonce, driver_module._LEFT, bytes(8))
    scene.check_that_all_train()


def test_replicas_train_on_while_their_record_cannot_be_read(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    sound = scene.record
    scene.record = DAMAGED
    with caplog.at_level(logging.WARNING, "diloco_comm"):
        scene.check_that_all_train()
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == 3 and len(set(said)) == 1, said
    assert said[0] == (
        "rounds go on, but nobody can come or go: the record of run 'run' in the table "
        f"{scene.table.hex()} cannot be read, and is looked at again: the table holds no record "
        f"of a group: {DAMAGED!r}"
    )
    # A member dies, and somebody puts the record back.
    scene.kill(scene.node(2).key.nonce)
    scene.pass_time(10.0)
    assert all(node.state.stage is Stage.SEALED for node in scene.living)
    scene.record = sound
    scene.pass_time(10.0)
    assert scene.newest.numbers == (0, 1) and is_settled(scene)


def test_a_replica_that_was_left_behind_says_once_who_is_silent(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    node = scene.node(0)
    driver = scene.driver_of(node)
    said: list[tuple[int, ...]] = []
    driver._say_suspected = said.append  # type: ignore[method-assign]
    driver.state = replace(driver.state, stage=Stage.GONE)
    scene.kill(scene.node(2).key.nonce)
    for _ in range(20):
        scene.clock.now += 0.5
        driver._look_after_others()
    assert len(said) <= 1
