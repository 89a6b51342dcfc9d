"""A worker's connection to its server, its name, and the number of its next update.

The connection is one DEALER socket; requests are repeated until they are answered.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import zmq
from torch import Tensor

from ..base import launch
from ..base.checks import logger_of
from ..base.errors import SyncError
from ..base.service.addresses import parse_address, tcp_address
from ..base.service.keys import WORKER, protect_worker
from ..base.service.sockets import NOBLOCK, POLLIN, beat, receive
from ..ops.wire import Layout
from .downloads import Download
from .messages import (
    MAX_BODY,
    MAX_JSON,
    MAX_NAME,
    MAX_NUMBER,
    NAME_TAKEN,
    UNCOUNTED,
    Kind,
    Message,
    ProtocolError,
    pack,
    parse,
)
from .window import bodies, is_within, view_of_runs

logger = logger_of(__name__)

# A default name has so many letters of the host, and room for a rank or process, and a number.
_MAX_HOST = MAX_NAME - 24
_MAX_ALIKE = 10_000


def check_name(name: str) -> str:
    """Return a name.

    Raises:
        ValueError: If the name is too long, empty, or not printable.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise ValueError(f"name must have 1 to {MAX_NAME} printable characters, got {name!r}")
    return name


def default_name() -> str:
    """Name this worker after host and rank (node7-rank3), or host and process (node7-pid4242)."""
    host = socket.gethostname().split(".")[0]
    host = "".join(letter for letter in host if letter.isprintable())[:_MAX_HOST] or "host"
    rank = _rank()
    return f"{host}-pid{os.getpid()}" if rank is None else f"{host}-rank{rank}"


def _rank() -> int | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    try:
        found = launch.find()
    except ValueError:
        return None
    return None if found is None else found.rank


def alternatives(name: str) -> Iterator[str]:
    """Yield the name, then names to use if another worker has it: node7-rank0-2, -3, ..."""
    yield name
    for number in range(2, _MAX_ALIKE):
        yield f"{name}-{number}"


class Identity:
    """A worker's identity for its server: its name, and the number of its next update.

    Args:
        name: The worker's name, or None for a name made from the host.
        sizes, layout: Elements of the fragments and hash of the model.

    Attributes:
        greeting, model: Kind of the first message, and its JSON fields besides the name.
        steps: Inner steps taken; only for a learner of decoupled training.
        next_seq: Number of the update that comes next, or is on its way.
        newest: Newest version that the server has told this worker of; -1 if none.
        begun: Name and number under which runs of the present update have been sent; None while no
            run has been sent.
    """

    def __init__(self, name: str | None, sizes: list[int], layout: int) -> None:
        own = alternatives(default_name()) if name is None else iter([check_name(name)])
        self.name, self._others, self._may_change = next(own), own, name is None
        # A random number, so that the server can tell this process from others of the same name.
        self._instance = secrets.randbelow(MAX_NUMBER - 1) + 1
        self.greeting, self.model = Kind.HELLO, {"sizes": sizes, "layout": layout}
        self.steps = 0
        self.next_seq, self.newest = 1, -1
        self._history: int | None = None
        self.begun: tuple[str, int] | None = None
        self._num_changes, self._is_new = 0, True

    def hello(self) -> Message:
        """Return the worker's first message."""
        place = (self._instance, self.steps, int(self._may_change), self._num_changes)
        return Message(self.greeting, *place, meta={"worker": self.name, **self.model})

    def is_answer(self, message: Message) -> bool:
        """Whether a message answers a HELLO with the present name, not with an earlier one."""
        return message.run == self._num_changes

    @property
    def is_in_doubt(self) -> bool:
        """Whether runs of an update were sent under another name or number than the present one.

        That update may have been applied, and must not be sent again.
        """
        return self.begun not in (None, (self.name, self.next_seq))

    def begin(self) -> None:
        """Note that runs of the update are sent, under the present name and number."""
        self.begun = (self.name, self.next_seq)

    def take_another_name(self) -> bool:
        """Take the next name; False if the user has given the present name."""
        name = next(self._others, None)
        if name is None:
            return False
        logger.info("another worker is called %s: this one is %s", self.name, name)
        self.name, self._is_new = name, True
        self._num_changes += 1
        return True

    def count_on(self, welcome: Message) -> bool:
        """Set ``next_seq`` to follow the newest update that the server knows.

        Returns:
            False if the server knows less than it has told this worker, as it was restarted from an
            older state. The worker then goes on from the server's number. The server takes the next
            update as new, and has applied no part of it: otherwise it would know the number.
        """
        last, history = welcome.number, welcome.meta["history"]
        is_older = self._history not in (None, history) and welcome.meta["began"] < self.newest
        # The newest update may be this worker's own, whose outcome never arrived here.
        own = self.next_seq if self.begun == (self.name, self.next_seq) else self.next_seq - 1
        if self._is_new or welcome.fragment or last > own:
            # The other updates came from a predecessor, or from another worker of this name.
            self.next_seq = last + 1
        elif last < self.next_seq - 1:
            is_older = True
            if not self.is_in_doubt:
                self.begun = None
            self.next_seq = last + 1
        self._is_new, self._history = False, history
        if is_older:
            self.newest = welcome.version
        return not is_older


# Seconds for which a worker waits for a message before it looks whether to ask again; the second
# number while its last message could not be sent.
RETRY_S, BLOCKED_S = 1.0, 0.02
# Seconds after which a worker logs, once, that the server has no room for its update.
PATIENCE_S = 30.0
# The most seconds without an answer to heartbeats, until ZeroMQ makes the connection again.
LOST_AFTER_S = 40.0


def _close(socket: zmq.Socket, context: zmq.Context) -> None:
    socket.close()
    context.term()


class ServerLost(SyncError):
    """The server did not answer in time, or was restarted from an older state.

    An older state lacks updates or versions that the server had told this worker of. The worker's
    parameters are as training left them.

    Attributes:
        went_back_to: Version that the server restored; None if the server did not answer.
    """

    went_back_to: int | None = None


class ServerRefused(SyncError):
    """The server refused a worker; the message has the server's reason."""


class Silence:
    """Measures for how long a server is silent, without times in which this process was suspended.

    Attributes:
        heard_at: Time of the server's last message, plus the times that do not count.
    """

    def __init__(self) -> None:
        self.heard_at = self._looked_at = time.monotonic()

    def look(self, wait_s: float) -> float:
        """Return the time now; exclude a time in which this process was suspended.

        Args:
            wait_s: The most seconds that this process has waited for a message since the last call.
                If more than a second longer has passed, the process was suspended meanwhile.
        """
        now = time.monotonic()
        absence_s = now - self._looked_at - wait_s
        self._looked_at = now
        if absence_s > RETRY_S:
            self.heard_at += absence_s
        return now

    def end(self) -> None:
        """Note that the server has said something."""
        self.heard_at = time.monotonic()


class Link:
    """A worker's connection to one server. Calls block; only one thread may use a link.

    Args:
        address: ``tcp://host:port``.
        worker: The worker's name; None for a name made from host and rank.
        sizes, layout: Elements of the fragments and hash of the model.
        timeout: Seconds without any answer after which ``ServerLost`` is raised.
        keys, key_name: Folder of CURVE keys and name of the worker's pair in it.

    Attributes:
        sent_bytes, received_bytes: Bytes of payloads and headers, with repetitions.
        identity: The worker's name and sequence numbers.
        needs_start: Whether the server has no parameters yet.
        is_blocked: Whether the last message could not be sent.
        warning: A warning with which the server has admitted this worker; "" for none.
    """

    def __init__(
        self,
        address: str,
        worker: str | None,
        sizes: list[int],
        layout: int,
        *,
        timeout: float,
        keys: str | Path | None = None,
        key_name: str = WORKER,
    ) -> None:
        self.address, self.timeout = tcp_address(*parse_address("server", address)), timeout
        self.identity = Identity(worker, sizes, layout)
        self.sent_bytes = self.received_bytes = 0
        self.needs_start = False
        self.is_blocked = False
        self.warning = ""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # Without this the garbage collector would wait for an open socket for ever.
        self._end = weakref.finalize(self, _close, self._socket, self._context)
        self._end.atexit = False
        # Milliseconds for which ``close`` lets a last LEAVE go out, if there is a connection.
        self._socket.linger = 3_000
        self._socket.maxmsgsize = max(MAX_BODY, MAX_JSON)
        # Queue no message without a connection: a restarted server would get old messages.
        self._socket.immediate = True
        beat(self._socket, max(0.1, min(LOST_AFTER_S, timeout / 3)))
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 50, 1_000
        try:
            if keys is not None:
                protect_worker(self._socket, Path(keys), key_name)
            self._socket.connect(self.address)
        except (ValueError, zmq.ZMQError):
            self.close()
            raise

    @property
    def worker(self) -> str:
        """The worker's name."""
        return self.identity.name

    def close(self) -> None:
        """Close the connection without a LEAVE; idempotent."""
        self._end()

    # --------------------------------------------------------------------------------- messages

    def send(self, message: Message) -> bool:
        """Send a message if the server is connected and reads; callers repeat their requests."""
        frames = pack(message)
        try:
            self._socket.send_multipart(frames, NOBLOCK, copy=len(frames) < 2)
        except zmq.Again:
            self.is_blocked = True
            return False
        self.is_blocked = False
        self.sent_bytes += sum(len(frame) for frame in frames)
        return True

    def wait(self, seconds: float, bell: int) -> None:
        """Wait for a message, or for a byte in the pipe ``bell``."""
        zmq.zmq_poll([(self._socket, POLLIN), (bell, POLLIN)], max(0, int(1000 * seconds)))

    def next_message(self, seconds: float) -> Message | None:
        """Return the next message, or None if none arrives within this time."""
        frames = receive(self._socket, max(0, int(1000 * seconds)))
        if frames is None:
            return None
        self.received_bytes += sum(len(frame) for frame in frames)
        try:
            return parse([frame.buffer for frame in frames])
        except ProtocolError as error:
            # A server of another version never understands this worker.
            is_other = error.protocol is not None
            return Message(Kind.REFUSED, meta={"reason": str(error)}) if is_other else None

    def converse(self, ask: Callable[[], object], stage: str) -> Iterator[Message]:
        """Yield the messages of the server, and repeat the request while it is unanswered.

        Args:
            ask: Sends the request.
            stage: Name of the conversation, for errors.

        Raises:
            ServerLost: If the server is silent for ``timeout``, or was restarted from an older
                state.
            ServerRefused: If the server refuses this worker.
        """
        silence = Silence()
        began = asked_at = silence.heard_at
        again_s = RETRY_S
        ask()
        while True:
            wait_s = BLOCKED_S if self.is_blocked else RETRY_S
            message = self.next_message(wait_s)
            now = silence.look(wait_s)
            silent_s = now - silence.heard_at
            if message is not None:
                silence.end()
                if message.kind == Kind.REFUSED:
                    if message.number == NAME_TAKEN and self.goes_by_another_name(message):
                        continue
                    raise self.refusal(message, stage, now - began)
                if message.kind == Kind.UNKNOWN:
                    self.say_hello()
                elif message.kind == Kind.WELCOME:
                    if not self.identity.is_answer(message):
                        continue
                    self._welcomed(message, stage)
                    if stage != "hello":
                        ask()
                        asked_at = now
                    yield message
                else:
                    yield message
                # The caller answers these kinds with its next request: do not ask again soon.
                if message.kind in (Kind.DATA, Kind.WANT):
                    asked_at = now
                    # On a slow link repeat questions rarely, as each delays all later answers.
                    again_s = max(again_s, min(2 * silent_s, self.timeout / 4))
            elif silent_s > self.timeout:
                raise self.silence(silent_s, stage, now - began)
            if now - asked_at < again_s and not self.is_blocked:
                continue
            ask()
            asked_at = now

    def refusal(self, message: Message, stage: str, seconds: float) -> ServerRefused:
        """Return the error to raise for a REFUSED of the server."""
        reason = message.meta["reason"]
        sentence = f"the server {self.address} refused worker {self.worker}: {reason}"
        return ServerRefused(sentence, stage=stage, seconds=seconds)

    def silence(self, silent_s: float, stage: str, seconds: float) -> ServerLost:
        """Return the error to raise for a server that has not answered for ``silent_s``."""
        sentence = (
            f"the server {self.address} has not answered for {silent_s:.1f} s "
            f"({stage}); the parameters are as training left them"
        )
        return ServerLost(sentence, stage=stage, seconds=seconds)

    def goes_by_another_name(self, refusal: Message) -> bool:
        """Say hello under another name if a refusal asks for one and the name may change."""
        if not self.identity.is_answer(refusal):
            return True
        is_other = self.identity.take_another_name()
        if is_other:
            self.say_hello()
        return is_other

    def _welcomed(self, message: Message, stage: str) -> None:
        """Take the numbers of a WELCOME; raise if the server has lost updates or versions."""
        identity, began = self.identity, max(0, message.meta["began"])
        told = f"was told of {identity.next_seq - 1} and of version {identity.newest}"
        is_older = not identity.count_on(message)
        self.needs_start = message.meta["needs_start"]
        self.warning = message.meta.get("warning", "")
        if self.needs_start and stage in ("push", "pull"):
            sentence = (
                f"the server {self.address} was restarted without its snapshot and has no "
                "parameters: a worker that attaches anew gives it some"
            )
        elif is_older:
            sentence = (
                f"the server {self.address} came back with {message.number} updates of worker "
                f"{self.worker} and version {began} of the model, and the worker {told}: it was "
                "restarted without its snapshot, or with one that was older; the next step goes on "
                "with what the server has"
            )
        else:
            return
        error = ServerLost(sentence, stage=stage)
        error.went_back_to = began
        raise error

    # ------------------------------------------------------------------------------ conversations

    def hello(self) -> Message:
        """Introduce this worker and return the server's WELCOME."""
        is_waiting = False
        for message in self.converse(self.say_hello, "hello"):
            if message.kind == Kind.WELCOME:
                return message
            if message.kind == Kind.WAIT and not is_waiting:
                is_waiting = True
                logger.warning(
                    "the server %s still has a connection of a worker named %s, and waits until "
                    "it knows whether that lives",
                    self.address,
                    self.worker,
                )
        raise AssertionError

    def ask(self, question: Message, answer: Kind, stage: str) -> Message:
        """Return the server's answer, of kind ``answer``, to a question that needs no session."""
        for message in self.converse(lambda: self.send(question), stage):
            if message.kind == answer:
                return message
        raise AssertionError

    def say_hello(self) -> None:
        """Introduce this worker."""
        self.send(self.identity.hello())

    def push(
        self,
        version: int,
        payloads: list[Tensor],
        layouts: list[Layout],
        *,
        steps: int,
        seconds: float,
        is_start: bool = False,
        follows: bool = False,
    ) -> Message:
        """Send an update, or the parameters to start from, and return the server's OUTCOME."""
        wire = layouts[0].wire
        meta: dict[str, Any] = {
            "wire": wire.name,
            "block_size": wire.block_size,
            "steps": steps,
            "seconds": seconds,
            "is_start": is_start,
        }
        identity = self.identity

        def ask() -> None:
            if identity.is_in_doubt:
                return
            push = Message(Kind.PUSH, identity.next_seq, version, int(follows), meta=meta)
            self.send(push)

        says_at: float | None = time.monotonic() + PATIENCE_S
        for message in self.converse(ask, "start" if is_start else "push"):
            seq = identity.next_seq
            if identity.is_in_doubt:
                return self._give_up(message)
            if message.kind == Kind.OUTCOME and message.number == seq:
                identity.begun = None
                identity.newest = max(identity.newest, message.version)
                if not is_start and message.meta["refusal"] not in UNCOUNTED:
                    identity.next_seq += 1
                return message
            if message.kind == Kind.WANT and message.number == seq:
                identity.begin()
                self.send_runs(message, payloads, layouts)
            if message.kind == Kind.WAIT and says_at is not None and time.monotonic() > says_at:
                says_at = None
                logger.warning(
                    "the server %s has had no room for update %d of worker %s for %.0f s, and "
                    "takes it when there is: its status says more",
                    self.address,
                    seq,
                    self.worker,
                    PATIENCE_S,
                )
        raise AssertionError

    def _give_up(self, message: Message) -> Message:
        """Return an outcome "in doubt" for an update that may have been applied; it is given up."""
        assert self.identity.begun is not None
        (name, seq), self.identity.begun = self.identity.begun, None
        reason = (
            f"update {seq} of worker {name} was on its way when the connection ended, and another "
            "worker came under that name: it is not sent again, since it may have been applied"
        )
        meta = {"staleness": -1, "refusal": "in doubt", "reason": reason}
        return Message(Kind.OUTCOME, self.identity.next_seq - 1, message.version, meta=meta)

    def send_runs(
        self, want: Message, payloads: list[Tensor], layouts: list[Layout], first: int = 0
    ) -> None:
        """Send the runs that a WANT asks for.

        Args:
            first: Number of the first payload in messages.
        """
        place, run, count = want.fragment - first, want.run, want.count
        if not 0 <= place < len(layouts) or not is_within(layouts[place], run, count):
            return
        for begin, number in bodies(layouts[place], run, count):
            body = view_of_runs(payloads[place], layouts[place], begin, number)
            self.send(Message(Kind.RUN, want.number, 0, want.fragment, begin, body=body))

    def fetch(self, download: Download) -> tuple[int, int]:
        """Complete a download; return its version and the inner steps of the round."""
        for message in self.converse(download.ask, "pull"):
            download.receive(message)
            if download.is_complete:
                assert download.version is not None
                self.identity.newest = max(self.identity.newest, download.version)
                return download.version, download.steps
        raise AssertionError

    def leave(self) -> None:
        """Tell the server not to wait for this worker."""
        self.send(Message(Kind.LEAVE))


def read_status(
    address: str, *, timeout: float = 5.0, keys: str | Path | None = None, key_name: str = "worker"
) -> dict[str, Any]:
    """Return the status of a server.

    Raises:
        ServerLost: If the server does not answer in time.
    """
    link = Link(address, "status", [1], 0, timeout=timeout, keys=keys, key_name=key_name)
    try:
        return link.ask(Message(Kind.STATUS), Kind.REPORT, "status").meta["status"]
    finally:
        link.close()
