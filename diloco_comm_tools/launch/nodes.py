"""The launchers of one replica, one on each node, which start and end its workers together.

Each launcher beats at a store that the launcher of node 0 hosts: a beat says whose it is, and how
the launcher's workers have ended. Node 0 alone decides, and writes each decision into the store's
record. A replica of one node has no store, and is a group of one launcher.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from diloco_comm import _C
from diloco_comm.base import env
from diloco_comm.base.service.addresses import is_wildcard, name_of_place, parse_address
from diloco_comm.base.store_host import (
    HostedStore,
    dial_store,
    listen_at,
    resolve,
    serve_store,
)
from diloco_comm.elastic import exits

from ..common.commands import FAILED, note

# Seconds between two beats, and seconds in which the store must answer.
_BEAT_S, _ANSWER_S = 0.5, 2.0
# A second launcher of a node is refused if the first one still beats after so many seconds.
_TWICE_S = 3.0
# Seconds for which node 0 waits for the others to hear that the replica ends now.
_FAREWELL_S = 3.0
# Seconds between two looks at the others while nothing is to do, and of waiting until a message
# names the launchers that are missing.
_LOOK_S, _SAY_S = 0.1, 10.0
_RUN = "launch"

T = TypeVar("T")


@dataclass(frozen=True)
class Beat:
    """A launcher's message about itself, in the store.

    Attributes:
        node: Number of the launcher's node.
        settings: The settings that must be equal on all nodes, by option.
        signals: Names of the first signals that have come: one asks the replica to leave, two ask
            it to end now.
        attempt: The last attempt in which the launcher's workers took part; "" before the first. An
            attempt is one start of all workers of the replica.
        failed: Exit statuses of the workers that failed in that attempt; None while workers run.
        lived_s: Seconds for which the workers ran.
    """

    node: int
    settings: dict[str, Any]
    signals: list[str] = field(default_factory=list)
    attempt: str = ""
    failed: list[int] | None = None
    lived_s: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.attempt or self.failed is not None


@dataclass(frozen=True)
class Decision:
    """The decisions of node 0, in the store.

    Attributes:
        attempt: Random name of the present attempt; "" before the first.
        launchers: Names of the launchers that take part in the attempt, by node.
        port: Port of the store at which the workers meet.
        stops: Whether workers that still run are to end.
        leaving: The signal and the node that ask the replica to leave; "" for none.
        ends_now: Whether workers are to be killed, because a second signal has come.
        refused: Why a launcher takes no part, by the launcher's name.
        status: Exit status with which all launchers end; None while they go on.
        why: A sentence on why the launchers end.
    """

    attempt: str = ""
    launchers: list[str] = field(default_factory=list)
    port: int = 0
    stops: bool = False
    leaving: str = ""
    ends_now: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    status: int | None = None
    why: str = ""


class Nodes:
    """This node's launcher among the launchers of its replica.

    Args:
        node, num_nodes: Number of this node, and of all nodes.
        endpoint: ``host:port`` of node 0's store; not needed for one node.
        settings: The settings that must be equal on all nodes, by option.
        signals: Names of the signals that have come; the first one lets the replica leave.

    Raises:
        ValueError: If the endpoint is not an address of node 0, or node 0 cannot listen there.
    """

    def __init__(
        self,
        node: int,
        num_nodes: int,
        endpoint: str,
        settings: dict[str, Any],
        signals: list[str],
    ) -> None:
        self._beat, self._signals = Beat(node, settings), signals
        self._name = f"{node}.{uuid.uuid4().hex}"
        self._num_nodes = num_nodes
        self._patience_s, self._limit_s = env.suspect_after_s(), env.timeout_s()
        self._decision = self._wanted = Decision()
        self._beats: dict[str, tuple[Beat, float]] = {}
        # On node 0: the name of each node's launcher, and when each launcher was first seen, also
        # one that is not its node's.
        self._came: dict[int, str] = {}
        self._first_seen: dict[str, float] = {}
        self._next, self._told = 0.0, self._beat
        # The time of node 0's last beat, as far as this launcher knows.
        self._heard = time.monotonic()
        self._store: _C.StoreClient | None = None
        self._reason = ""
        self._host: HostedStore | None = None
        self._meeting: dist.TCPStore | None = None
        self._place = _place(endpoint, num_nodes) if endpoint else ("", 0)
        if num_nodes > 1 and self.is_first:
            self._host = _listen(*self._place, self._patience_s)

    @property
    def is_first(self) -> bool:
        """Whether this launcher decides."""
        return self._beat.node == 0

    @property
    def leaving(self) -> str:
        """The signal that asks the replica to leave, with its node; "" for none."""
        return self._signals[0] if self._signals else self._decision.leaving

    @property
    def ends_now(self) -> bool:
        """Whether workers are killed, as a launcher has got a second signal."""
        return len(self._signals) > 1 or self._decision.ends_now

    @property
    def must_stop(self) -> bool:
        """Whether workers that run here are to end."""
        said = self._decision
        is_over = said.attempt != self._beat.attempt or said.stops or said.status is not None
        return is_over or self.ends_now or self._is_cut_off

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the workers that are not torchrun's on this node."""
        if self._num_nodes == 1:
            return {}
        return {
            "GROUP_RANK": str(self._beat.node),
            "GROUP_WORLD_SIZE": str(self._num_nodes),
            "MASTER_ADDR": self._place[0],
            "MASTER_PORT": str(self._decision.port),
            "TORCHELASTIC_RUN_ID": self._decision.attempt,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def begin(self, pause_s: float = 0.0) -> int | None:
        """Wait until all nodes start their workers; return the status if the launcher ends instead.

        Args:
            pause_s: Seconds before node 0 lets the workers start.
        """
        began, said_at = time.monotonic(), time.monotonic() + _SAY_S
        while True:
            self.look()
            now = time.monotonic()
            status = self._end(now - began - pause_s)
            if status is not None:
                return status
            if self.is_first and now - began >= pause_s and not self._missing():
                self._start()
            said = self._decision
            if said.attempt != self._beat.attempt and self._name in said.launchers:
                self._beat = replace(self._beat, attempt=said.attempt, failed=None)
                return None
            if now > said_at and (awaited := self._awaited()):
                said_at = now + 6 * _SAY_S
                note(f"waiting for {awaited}")
            if self._num_nodes > 1 or pause_s:
                time.sleep(_LOOK_S)

    def note_end(self, failed: list[int], lived_s: float) -> None:
        """Say how this node's workers have ended."""
        self._beat = replace(self._beat, failed=failed, lived_s=lived_s)
        self.look()

    def ends(self) -> tuple[list[int], float] | None:
        """Return the statuses of all workers that failed, and the shortest life of these.

        None while workers of a node run. A node that is lost counts as a worker that is lost, and
        workers that still run count as killed once the replica ends now.
        """
        ends = [self._end_of(name) for name in self._wanted.launchers]
        if any(end is None for end in ends):
            return None
        failed = [end for end in ends if end is not None and end[0]]
        lives = [lived_s for statuses, lived_s in failed if any(one > 0 for one in statuses)]
        return [one for statuses, _ in failed for one in statuses], min(lives, default=math.inf)

    def give_up(self, status: int, sentence: str) -> int:
        """Print why the launchers end, on this node or through node 0 on all; return ``status``."""
        note(sentence)
        self._wanted = replace(self._wanted, why=sentence)
        return status

    def close(self, status: int) -> None:
        """Let the other launchers end with this status, if this one decides; idempotent."""
        if self.is_first:
            self._wanted = replace(self._wanted, status=status)
            began = time.monotonic()
            self.look()
            # A launcher that no longer beats has read the status and ended, or is lost.
            while self._others():
                waited_s = time.monotonic() - began
                if waited_s > (_FAREWELL_S if self.ends_now else self._patience_s):
                    break
                time.sleep(_LOOK_S)
                self.look()
        elif self._store is not None:
            try:
                self._store.look(_RUN, self._name, b"", 0, 0, _ANSWER_S)
            except dist.DistError:
                # The others notice by themselves that this launcher no longer beats.
                pass
        self._store = self._host = self._meeting = None

    # -------------------------------------------------------------------------------- the store

    def look(self) -> None:
        """Beat, and hear the others, if it is time or there is news."""
        now = time.monotonic()
        if len(self._beat.signals) < len(self._signals[:2]):
            self._beat = replace(self._beat, signals=self._signals[:2])
        if self._num_nodes == 1:
            self._hear({self._name: (self._beat, 0.0)})
            self._decision = self._wanted
            return
        is_news = self._beat != self._told or (self.is_first and self._wanted != self._decision)
        if now < self._next and not is_news:
            return
        self._next = now + _BEAT_S
        try:
            if self._store is None:
                store = dial_store(*self._place, _ANSWER_S)
                assert isinstance(store, _C.StoreClient)
                self._store = store
            beat = _text(self._beat)
            _, _, text, _, _, lasts = self._store.look(_RUN, self._name, beat, 0, 0, _ANSWER_S)
            self._told = self._beat
            decision = _read(Decision, text)
            beats = {name: (_read(Beat, one), age_s) for name, one, age_s in lasts}
            self._hear({name: (one, age_s) for name, (one, age_s) in beats.items() if one})
            if self.is_first and self._wanted != decision:
                self._store.swap_record(_RUN, text, _text(self._wanted), _ANSWER_S)
                decision = self._wanted
            self._decision, self._reason = decision or Decision(), ""
        except dist.DistError as error:
            reason = str(error).splitlines()[0]
            if self.is_first and reason != self._reason:
                note(f"node 0 cannot tell the other launchers what it has decided: {reason}")
            self._store, self._reason = None, reason

    @property
    def _silence_s(self) -> float:
        """Seconds since node 0 has beaten last, as far as this launcher has heard."""
        return 0.0 if self._num_nodes == 1 else time.monotonic() - self._heard

    @property
    def _is_cut_off(self) -> bool:
        """Whether node 0 is lost for this launcher."""
        return self._silence_s > self._patience_s

    def _awaited(self) -> str:
        """Return the launchers that are missed here, for a sentence; "" for none."""
        place = name_of_place(*self._place)
        if self.is_first:
            nodes = ", ".join(map(str, self._missing()))
            return f"node {nodes} to come to {place}" if nodes else ""
        if self._silence_s <= min(2 * _ANSWER_S, self._patience_s, self._limit_s):
            return ""
        return f"the launcher of node 0 at {place}: {self._reason or 'only a store is there'}"

    def _end(self, waited_s: float) -> int | None:
        """Return the status with which a launcher that waits ends; None to wait on."""
        said = self._decision
        if self._name in said.refused:
            return self.give_up(exits.MISFIT, said.refused[self._name])
        if said.status is not None:
            if said.status != exits.DONE:
                note(said.why or f"the replica has ended with status {said.status}")
            return said.status
        if self.is_first and self.leaving:
            sentence = f"{self.leaving}: the replica ends before its workers have started"
            return self.give_up(exits.LEFT, sentence)
        if self._signals and self._name not in said.launchers:
            return exits.LEFT
        awaited = self._awaited()
        if self.leaving and self._is_cut_off:
            note(f"{self.leaving}: this node ends without {awaited}")
            return exits.LEFT if exits.LEFT in (self._beat.failed or []) else FAILED
        for name in self._others() if self.is_first else []:
            # Before the first start a difference ends all; later, _refusal() refuses one launcher.
            if name not in said.refused and (sentence := self._misfit(self._beats[name][0])):
                return self.give_up(exits.MISFIT, sentence)
        silence_s = waited_s if self.is_first else self._silence_s
        if silence_s <= self._limit_s or not awaited:
            return None
        return self.give_up(exits.UNAVAILABLE, f"waited {self._limit_s:g} s for {awaited}")

    # ---------------------------------------------------------------------------- node 0 alone

    def _hear(self, beats: dict[str, tuple[Beat, float]]) -> None:
        now = time.monotonic()
        ages = [age_s for beat, age_s in beats.values() if beat.node == 0]
        self._heard = max(self._heard, now - min(ages, default=math.inf))
        # Keep the last beat of a launcher whose workers have ended, even if it beats no more: the
        # statuses of its workers count.
        ended = [name for name in self._wanted.launchers if self._has_ended(name)]
        self._beats = {name: (self._beats[name][0], math.inf) for name in ended} | beats
        if self.is_first:
            self._wanted = self._judge(self._wanted, now)

    def _judge(self, wanted: Decision, now: float) -> Decision:
        """Return what node 0 wants after it has heard the others."""
        fresh = {
            name: beat for name, (beat, age_s) in self._beats.items() if age_s <= self._patience_s
        }
        refused = {name: why for name, why in wanted.refused.items() if name in fresh}
        for name, beat in fresh.items():
            if name not in refused and (why := self._refusal(name, beat, now)):
                refused[name] = why
        wanted = replace(wanted, refused=refused)
        for beat in (self._beats[name][0] for name in wanted.launchers if name in self._beats):
            said = [f"{one} on node {beat.node}" for one in beat.signals]
            if said and not wanted.leaving:
                wanted = replace(wanted, leaving=said[0])
            if len(said) > 1 and not wanted.ends_now:
                why = f"{said[1]}: this second signal has ended the replica"
                wanted = replace(wanted, ends_now=True, why=why)
        ends = [self._end_of(name) for name in wanted.launchers]
        if any(end is not None and end[0] for end in ends):
            wanted = replace(wanted, stops=True)
        return wanted

    def _refusal(self, name: str, beat: Beat, now: float) -> str:
        """Return why a launcher that beats takes no part in the replica; "" if it does."""
        # Before the first start nobody knows which of two launchers is the wrong one.
        if self._wanted.attempt and (sentence := self._misfit(beat)):
            return sentence
        since = self._first_seen.setdefault(name, now)
        first = self._came.setdefault(beat.node, name)
        if first != name and self._age_of(first) > self._patience_s:
            self._came[beat.node] = name
        elif first != name and now - since > _TWICE_S and self._age_of(first) < _TWICE_S / 2:
            return f"another launcher with --node-rank {beat.node} runs already"
        return ""

    def _start(self) -> None:
        port = 0
        if self._num_nodes > 1:
            # The workers meet here, as they do at torchrun's own store.
            host, wait = self._place[0], timedelta(seconds=self._limit_s)
            listener = listen_at(host, 0)
            port = listener.getsockname()[1]
            self._meeting = dist.TCPStore(
                host,
                port,
                is_master=True,
                timeout=wait,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        launchers = [self._came[node] for node in range(self._num_nodes)]
        attempt = uuid.uuid4().hex
        self._wanted = replace(
            self._wanted, attempt=attempt, launchers=launchers, port=port, stops=False
        )
        self._next = 0.0
        self.look()

    def _missing(self) -> list[int]:
        """Return the nodes whose launchers have not come, or still end their workers."""
        return [
            node
            for node in range(self._num_nodes)
            if self._age_of(self._came.get(node, "")) > self._patience_s
            or not self._beats[self._came[node]][0].is_idle
        ]

    def _age_of(self, name: str) -> float:
        return self._beats[name][1] if name in self._beats else math.inf

    def _has_ended(self, name: str) -> bool:
        beat = self._beats[name][0] if name in self._beats else None
        return beat is not None and beat.attempt == self._wanted.attempt and beat.is_idle

    def _end_of(self, name: str) -> tuple[list[int], float] | None:
        if self._has_ended(name):
            beat = self._beats[name][0]
            return beat.failed or [], beat.lived_s
        if self._age_of(name) > self._patience_s:
            return [exits.RESTART], math.inf
        return ([-signal.SIGKILL], math.inf) if self.ends_now else None

    def _others(self) -> list[str]:
        return [
            name
            for name in self._beats
            if name != self._name and self._age_of(name) <= self._patience_s
        ]

    def _misfit(self, beat: Beat) -> str:
        """Return a sentence about settings that differ between nodes; "" if there are none."""
        for option, value in self._beat.settings.items():
            other = beat.settings.get(option)
            if other != value:
                return (
                    f"{option} is {value} on node 0 and {other} on node {beat.node}: all "
                    "nodes of a replica need the same"
                )
        return ""


def _place(endpoint: str, num_nodes: int) -> tuple[str, int]:
    host, port = parse_address("rdzv_endpoint", endpoint)
    if num_nodes > 1 and is_wildcard(host):
        raise ValueError(
            f"rdzv_endpoint must name node 0 as the other nodes reach it, got {endpoint!r}"
        )
    return host, port


def _listen(host: str, port: int, seconds: float) -> HostedStore:
    """Host the launchers' store; wait for a host name that cannot be resolved yet."""
    try:
        resolve(host, port, "node 0", seconds=seconds)
        # The store keeps beats for long enough to see that they have become old.
        with listen_at(host, port) as listener:
            return serve_store(listener, host, None, drop_after_s=max(600.0, 2 * seconds))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ValueError(
            f"node 0 cannot listen at --rdzv-endpoint {name_of_place(host, port)}: {reason}"
        ) from None


def _text(words: Beat | Decision) -> bytes:
    return json.dumps(asdict(words)).encode()


def _read(kind: type[T], text: bytes) -> T | None:
    """Read a beat or a decision; None for another text."""
    try:
        values: Mapping[str, Any] = json.loads(text)
        return kind(**values)
    except (ValueError, TypeError):
        return None
