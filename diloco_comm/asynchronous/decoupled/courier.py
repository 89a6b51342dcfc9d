"""The courier: a thread that owns a learner's connection, so that training never waits.

The training thread leaves steps and reports with the courier, and takes what has arrived. The
courier touches no parameter of the model.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from ...base.background import batch_threads
from ...base.checks import logger_of
from ...base.memory import empty_pages
from ...ops.wire import Layout
from ..link import RETRY_S, Link, ServerLost, Silence
from ..messages import NAME_TAKEN, Kind, Message
from ..model import decode, layout_of
from ..window import WINDOW_FRAGMENTS, Fetcher, Position, Window, view_of_runs
from .merges import Piece
from .settings import FP32, DecoupledSettings
from .syncer import Report

logger = logger_of(__name__)

# Seconds of silence after which the courier asks whether the server is there.
_ASK_S = 5.0
# Messages handled before the courier looks at what the training thread has left.
_BATCH = 64
# ``run`` of a STEP whose answer says no more than that the server is there.
_NO_TOKEN = (1 << 32) - 1


@dataclass(frozen=True)
class Arrival:
    """A version of a fragment that has arrived.

    Attributes:
        merged: Number of this learner's last report that was merged; 0 if none.
        values: fp32 [num_elements] for each piece: the values, or what to add to the version
            before.
        is_difference: ``values`` are to be added.
        is_reset: The learner begins anew from this version: it is the first one, or the server has
            lost the learner's version, or has another run.
        seq: With a reset, the highest number of this learner's reports that the server has seen.
    """

    fragment: int
    version: int
    merged: int
    values: list[Tensor] = field(repr=False)
    is_difference: bool
    is_reset: bool
    seq: int


@dataclass
class Outgoing:
    """A report until its merge.

    Attributes:
        is_taken: The server has all of it.
        asked_at: When the server was last told of the report, or asked for runs of it.
    """

    report: Report
    payloads: list[Tensor] = field(repr=False)
    is_taken: bool = False
    asked_at: float = 0.0


@dataclass
class PartBox:
    """What the courier knows of a fragment.

    Attributes:
        layouts: Of a report.
        told: The newest version, this learner's last merged report, and whether the coded
            difference to the version before can be fetched.
        have: Version that the training thread has or can take; -1 for none.
        arrival: What the training thread can take.
        called: Version from which the syncer wants a report; -1 for none.
    """

    first: int
    layouts: list[Layout]
    whole: list[Layout]
    down: list[Layout]
    told: tuple[int, int, bool] | None = None
    have: int = -1
    arrival: Arrival | None = None
    called: int = -1
    seq: int = 0
    outgoing: Outgoing | None = None


class Fetch(Fetcher):
    """Fetch the values of a version, or the coded difference to the version before.

    Args:
        fragment: Number of the fragment.
        version: Version of the fragment.
        merged: The learner's last report that was merged.
        is_coded: Fetch the difference.
    """

    def __init__(
        self,
        send: Callable[[Message], bool],
        layouts: list[Layout],
        first: int,
        *,
        fragment: int,
        version: int,
        merged: int,
        is_coded: bool,
    ) -> None:
        super().__init__(send, layouts, first)
        self.fragment, self.version, self.merged = fragment, version, merged
        self.is_coded = is_coded
        if is_coded:
            self._buffers = [empty_pages((lay.payload_bytes,), torch.uint8) for lay in layouts]
        else:
            self._buffers = [empty_pages((lay.num_elements,), torch.float32) for lay in layouts]
        self._window = Window(self._all_runs([int(is_coded)]), self._size_of)

    @property
    def is_complete(self) -> bool:
        """All runs have arrived."""
        return self._window.is_empty

    def ask(self, *, again: bool = False) -> None:
        """Ask for runs, or again for those that have not arrived."""
        self._get(self._window.ask_again() if again else self._window.ask())

    def take(self, message: Message) -> None:
        """Take runs that belong to this version and were asked for."""
        if message.version == self.version and self._store(message):
            self.ask()

    def _view(self, position: Position) -> memoryview:
        return view_of_runs(
            self._buffers[position.fragment], self.layouts[position.fragment], position.run
        )

    def values(self, impl: str = "") -> list[Tensor]:
        """Return what has arrived in fp32, [num_elements] for each piece."""
        if not self.is_coded:
            return self._buffers
        pairs = zip(self._buffers, self.layouts, strict=True)
        return [decode(payload, layout, impl=impl) for payload, layout in pairs]


class Courier:
    """Carry messages between a learner and a syncer.

    Args:
        link: The connection, whose identity has the learner's first message.
        settings: The settings of the run.
        pieces: The pieces of the syncer's fragments.
        start: Returns the parameters in fp32 and their layouts, one for each piece; called in the
            courier's thread if the syncer has no parameters yet. None: another learner gives them.
        impl: Force an implementation of the operators.

    Attributes:
        has_given: The syncer has asked this learner for parameters.
        warning: The syncer has admitted this learner with this sentence; "" for none.
    """

    def __init__(
        self,
        link: Link,
        settings: DecoupledSettings,
        pieces: list[list[Piece]],
        start: Callable[[], tuple[list[Tensor], list[Layout]]] | None,
        impl: str = "",
    ) -> None:
        firsts = accumulate(map(len, pieces), initial=0)
        self._parts = [
            PartBox(
                first,
                [layout_of(piece.num_elements, settings.up) for piece in each],
                [layout_of(piece.num_elements, FP32) for piece in each],
                [layout_of(piece.num_elements, settings.down) for piece in each],
            )
            for first, each in zip(firsts, pieces, strict=False)
        ]
        # Fragments with a report that the server may not have, and those to fetch, in order.
        self._offered: dict[int, None] = {}
        self._fetchable: dict[int, None] = {}
        self._lock = threading.Condition()
        self._refused: list[tuple[int, int, str]] = []
        self._steps, self._step_s = 0, 0.0
        # While training rests: by fragment, the version from which there is progress, or -1.
        self._rest: list[int] | None = None
        self._token = self._noted = 0
        self._error: BaseException | None = None
        self._is_over = False
        self._bell, self._ringer = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ringer, False)
        self._link, self._start, self._impl = link, start, impl
        self._of_piece = [p for p, each in enumerate(pieces) for _ in each]
        self._told_steps, self._asked_token = -1, 0
        self._is_admitted = self._needs_start = False
        self.warning = ""
        self._run_number = -1
        self._fetch: Fetch | None = None
        self._parameters: tuple[list[Tensor], list[Layout]] | None = None
        now = time.monotonic()
        self._silence = Silence()
        self._asked_at = self._fetched_at = now
        self._joined_at, self._began_at, self.has_given = 0.0, now, False
        with batch_threads():
            self._thread = threading.Thread(target=self._run, name="diloco-courier", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------------ in the training thread

    def stepped(self, steps: int, seconds: float) -> None:
        """Note the inner steps taken, and the seconds of the last one."""
        with self._lock:
            self._steps, self._step_s, self._rest = steps, seconds, None
        self.ring()

    def report(self, fragment: int, report: Report, payloads: list[Tensor]) -> None:
        """Leave a report with the courier; the caller calls ``ring`` afterwards."""
        with self._lock:
            self._parts[fragment].outgoing = Outgoing(report, payloads)
            self._offered[fragment] = None

    def arrivals(self) -> list[Arrival]:
        """Return the versions that have arrived; at most one for each fragment."""
        with self._lock:
            return [part.arrival for part in self._parts if part.arrival is not None]

    def taken(self, arrival: Arrival) -> None:
        """Note that the training thread has a version, so that the next one may be fetched.

        The caller calls ``ring`` afterwards.
        """
        with self._lock:
            part = self._parts[arrival.fragment]
            # The courier may have brought another version since, of another run.
            if part.arrival is arrival:
                part.arrival = None
                self._fetchable[arrival.fragment] = None

    def refusals(self) -> list[tuple[int, int, str]]:
        """Return and forget the refused reports: fragment, number, reason."""
        with self._lock:
            refused, self._refused = self._refused, []
            return refused

    def calls(self) -> list[tuple[int, int]]:
        """Return the calls: fragment and version."""
        with self._lock:
            return [(p, part.called) for p, part in enumerate(self._parts) if part.called >= 0]

    def answered(self, fragment: int, version: int) -> None:
        """Forget a call."""
        with self._lock:
            if self._parts[fragment].called == version:
                self._parts[fragment].called = -1

    def note(self) -> int:
        """Ask the server to confirm that it counts all steps; return the number to look for."""
        with self._lock:
            self._token += 1
            token = self._token
        self.ring()
        return token

    def rest(self, progress: list[int]) -> int:
        """Tell the server that training rests, as ``note`` does; the next step ends the rest.

        Args:
            progress: As in ``Syncer.rest``.
        """
        with self._lock:
            self._rest = progress
        return self.note()

    @property
    def is_complete(self) -> bool:
        """Every fragment has a version here."""
        with self._lock:
            return all(part.have >= 0 for part in self._parts)

    def is_settled_after(self, token: int) -> bool:
        """Whether the server has answered ``note``, and no version is on its way from it."""
        with self._lock:
            return self._noted >= token and all(
                part.arrival is None and part.told is not None and part.told[0] == part.have
                for part in self._parts
            )

    def wait(self, seconds: float) -> None:
        """Wait until something arrives, for ``seconds`` at most."""
        with self._lock:
            self._lock.wait(seconds)

    def raise_error(self) -> None:
        """Raise what went wrong in the courier's thread; a lost server is raised once."""
        with self._lock:
            error = self._error
            if isinstance(error, ServerLost):
                self._error = None
        if error is not None:
            raise error

    def ring(self) -> None:
        """Wake the courier, which then looks at all that was left.

        The courier's thread gets the GIL with this call, and may keep the GIL for 5 ms: so one call
        comes after all reports and versions of an inner step.
        """
        if not self._is_over:
            with suppress(BlockingIOError):
                os.write(self._ringer, b"!")

    def _fail(self, error: BaseException) -> None:
        """Leave an error for the training thread."""
        with self._lock:
            self._error = error
            self._lock.notify_all()

    def close(self) -> None:
        """Leave the server and end the thread; idempotent."""
        if self._is_over:
            return
        self.ring()
        self._is_over = True
        if self._thread is threading.current_thread():
            return  # The garbage collector runs in any thread; this one ends by itself.
        self._thread.join()
        os.close(self._bell)
        os.close(self._ringer)

    # ------------------------------------------------------------------- in the courier's thread

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._turn()
            self._link.leave()
        except BaseException as error:
            logger.error("%s", error)
            self._fail(error)
        finally:
            self._link.close()

    def _turn(self) -> None:
        wait_s = 0.02 if self._link.is_blocked else RETRY_S / 4
        self._link.wait(wait_s, self._bell)
        with suppress(BlockingIOError):
            os.read(self._bell, 4096)
        self._silence.look(wait_s)
        for _ in range(_BATCH):
            message = self._link.next_message(0)
            if message is None:
                break
            self._silence.end()
            self._receive(message)
        self._act(time.monotonic())

    def _act(self, now: float) -> None:
        """Send what is due."""
        silent_s = now - self._silence.heard_at
        if silent_s > self._link.timeout:
            self._fail(self._link.silence(silent_s, "decoupled", 0.0))
            self._silence.end()
        if not self._is_admitted or self._needs_start:
            if now - self._joined_at >= RETRY_S or self._link.is_blocked:
                self._joined_at = now
                if self._is_admitted and self._start is not None:
                    self._link.send(Message(Kind.START))
                else:
                    self._link.identity.steps = self._steps
                    self._link.say_hello()
            return
        self._send_steps(now)
        with self._lock:
            offers = self._next_offers()
        for p, outgoing in offers:
            if now - outgoing.asked_at >= RETRY_S:
                self._offer(p, outgoing, now)
        self._fetch_next(now)

    def _next_offers(self) -> list[tuple[int, Outgoing]]:
        """Return the first reports, up to a window of pieces: only their runs are on their way."""
        offers, num_pieces, over = [], 0, []
        for p in self._offered:
            outgoing = self._parts[p].outgoing
            if outgoing is None or outgoing.is_taken:
                over.append(p)
                continue
            if num_pieces >= WINDOW_FRAGMENTS:
                break
            num_pieces += len(self._parts[p].layouts)
            offers.append((p, outgoing))
        for p in over:
            del self._offered[p]
        return offers

    def _send_steps(self, now: float) -> None:
        with self._lock:
            steps, seconds, token, rest = self._steps, self._step_s, self._token, self._rest
        is_silent = now - max(self._silence.heard_at, self._asked_at) > _ASK_S
        is_wanted = token > self._noted and (
            token > self._asked_token or now - self._asked_at >= RETRY_S
        )
        if steps != self._told_steps or is_wanted or is_silent:
            run = token % _NO_TOKEN if is_wanted else _NO_TOKEN if is_silent else 0
            micros = min(int(1e6 * seconds), 1 << 62)
            message = Message(Kind.STEP, steps, micros, run=run)
            if rest is not None:
                message = Message(Kind.REST, steps, micros, run=run, meta={"progress": rest})
            if self._link.send(message):
                self._told_steps = steps
                if run:
                    self._asked_at, self._asked_token = now, token

    def _offer(self, p: int, outgoing: Outgoing, now: float) -> None:
        report = outgoing.report
        meta = {"steps": report.steps, "tokens": report.tokens}
        if self._link.send(Message(Kind.OFFER, report.seq, report.base, p, meta=meta)):
            outgoing.asked_at = now

    def _fetch_next(self, now: float) -> None:
        if self._fetch is not None:
            if now - self._fetched_at >= RETRY_S:
                self._fetched_at = now
                self._fetch.ask(again=True)
            return
        while self._fetchable:
            with self._lock:
                p = next(iter(self._fetchable))
                del self._fetchable[p]
            part = self._parts[p]
            if part.told is None or part.told[0] == part.have or part.arrival is not None:
                continue
            version, merged, is_coded = part.told
            is_coded &= version == part.have + 1 and part.have >= 0
            self._fetch = Fetch(
                self._link.send,
                part.down if is_coded else part.whole,
                part.first,
                fragment=p,
                version=version,
                merged=merged,
                is_coded=is_coded,
            )
            self._fetched_at = now
            self._fetch.ask()
            return

    # ------------------------------------------------------------------------------- messages

    def _receive(self, message: Message) -> None:
        kind = message.kind
        if kind == Kind.REFUSED:
            is_named = message.number == NAME_TAKEN
            if not (is_named and self._link.goes_by_another_name(message)):
                raise self._link.refusal(message, "decoupled", 0.0)
            # Reports under the former name may be merged, and nobody tells this learner which.
            self._begin_anew()
        elif kind == Kind.UNKNOWN and self._is_admitted:
            # Further messages that were on their way get the same answer: join once.
            self._is_admitted, self._joined_at = False, 0.0
        elif kind == Kind.ADMITTED and self._link.identity.is_answer(message):
            self._admitted(message)
        elif kind == Kind.WANT:
            self._send_runs(message)
        elif kind == Kind.DATA:
            self._take_run(message)
        elif kind == Kind.GONE:
            fetch = self._fetch
            if fetch is not None and (fetch.fragment, fetch.version) == (
                message.fragment,
                message.version,
            ):
                self._fetch = None
                with self._lock:
                    self._fetchable[message.fragment] = None
        elif kind == Kind.NOTED:
            with self._lock:
                if message.run != _NO_TOKEN:
                    self._noted = max(self._noted, message.run)
                self._lock.notify_all()
        elif message.fragment < len(self._parts):
            self._receive_of(self._parts[message.fragment], message)

    def _receive_of(self, part: PartBox, message: Message) -> None:
        """Handle a message about a fragment."""
        with self._lock:
            if message.kind == Kind.COMMIT:
                if message.version < part.have:
                    logger.warning(
                        "the server came back with version %d of fragment %d, and this learner has "
                        "%d: it goes on with what the server has",
                        message.version,
                        message.fragment,
                        part.have,
                    )
                    part.have, part.arrival = -1, None
                part.told = (message.version, message.number, bool(message.count))
                self._fetchable[message.fragment] = None
            elif message.kind == Kind.CALL:
                part.called = message.version
            elif message.kind == Kind.VERDICT and part.outgoing is not None:
                if part.outgoing.report.seq == message.number:
                    part.outgoing.is_taken = True
                    if message.meta["refusal"]:
                        reason = message.meta["refusal"]
                        self._refused.append((message.fragment, message.number, reason))
                        part.outgoing = None
            self._lock.notify_all()

    def _admitted(self, message: Message) -> None:
        meta = message.meta
        self._is_admitted, self._needs_start = True, meta["needs_start"]
        self.warning = meta.get("warning", "")
        if meta["needs_start"]:
            if self._run_number >= 0:
                sentence = (
                    f"the server {self._link.address} was restarted without its snapshot and has "
                    "no parameters: a learner that attaches anew gives it some"
                )
                self._fail(ServerLost(sentence, stage="decoupled"))
                self._is_admitted = False
            elif self._start is not None:
                self._joined_at = 0.0
            elif time.monotonic() - self._began_at > self._link.timeout:
                raise ServerLost(
                    f"the server {self._link.address} has no parameters, and another server of the "
                    "run has some: start all servers with their snapshots, or all without",
                    stage="decoupled",
                )
            return
        with self._lock:
            if self._run_number not in (-1, meta["run"]):
                logger.warning("the server %s has another run now", self._link.address)
                self._begin_anew()
            self._run_number = meta["run"]
            for part, seq in zip(self._parts, meta["seqs"], strict=True):
                part.seq, part.told, part.called = max(part.seq, seq), None, -1
                if part.outgoing is not None:
                    # The server may have lost the report: offer it once more.
                    part.outgoing.is_taken, part.outgoing.asked_at = False, 0.0
            self._offered = {p: None for p, part in enumerate(self._parts) if part.outgoing}
        self._fetch, self._told_steps, self._parameters = None, -1, None

    def _begin_anew(self) -> None:
        """Forget what was fetched and what is to be reported: take the shared model as it is."""
        with self._lock:
            for p, part in enumerate(self._parts):
                part.have, part.arrival, part.outgoing = -1, None, None
                self._fetchable[p] = None

    def _send_runs(self, want: Message) -> None:
        if not want.number:
            # The server asks for these runs: a START now would let it ask for them twice.
            self._joined_at = time.monotonic()
            if self._parameters is None:
                if self._start is None:
                    return
                self._parameters, self.has_given = self._start(), True
            self._link.send_runs(want, *self._parameters)
            return
        if want.fragment >= len(self._of_piece):
            return
        part = self._parts[self._of_piece[want.fragment]]
        with self._lock:
            outgoing = part.outgoing
        if outgoing is not None and outgoing.report.seq == want.number:
            outgoing.asked_at = time.monotonic()
            self._link.send_runs(want, outgoing.payloads, part.layouts, part.first)

    def _take_run(self, message: Message) -> None:
        fetch = self._fetch
        if fetch is None or fetch.version is None:
            return
        fetch.take(message)
        self._fetched_at = time.monotonic()
        if not fetch.is_complete:
            return
        self._fetch = None
        self._link.send(Message(Kind.DONE, 0, fetch.version, fetch.fragment))
        values, part = fetch.values(self._impl), self._parts[fetch.fragment]
        with self._lock:
            part.arrival = Arrival(
                fetch.fragment,
                fetch.version,
                fetch.merged,
                values,
                is_difference=fetch.is_coded,
                is_reset=part.have < 0,
                seq=part.seq,
            )
            part.have = fetch.version
            if part.outgoing is not None and part.outgoing.report.base < fetch.version:
                part.outgoing = None
            self._lock.notify_all()
