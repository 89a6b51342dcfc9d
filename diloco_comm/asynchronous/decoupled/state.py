"""A syncer's state: the model, the learners, the commits on their way out, the status."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor

from ...base.checks import logger_of
from ...methods.outer import OuterOptimizer
from ..keeper import Keeper
from ..messages import MAX_JSON, MAX_NUMBER, Kind, Message, ProtocolError
from ..payloads import PayloadMemory
from ..sessions import MAX_WORKERS, Host, Session
from .model import KEPT_MODELS, MAX_OLDER, Published, ServedModel, pieces_from
from .settings import MAX_FRAGMENTS, DecoupledSettings
from .syncer import Call, Commit, Report
from .tape import FORMAT, restore, write

logger = logger_of(__name__)

# Least memory for reports on their way, beside those that make the quorum.
SMALL_BYTES = 8 * 2**20


@dataclass
class Told:
    """What a connection was told, by fragment.

    Attributes:
        commits, calls: The newest version that was told, and called; -1 for none.
        at: When the newest version was told, in seconds.
        news: The fragments that may have something new, in the order of the telling.
        on_way: When a message about a fragment left that the learner has not answered, in seconds.
        reading: The version that the learner fetches.
        sync_s: Seconds that the newest commit took to the learner.
    """

    commits: list[int]
    calls: list[int]
    at: list[float]
    news: dict[int, None] = field(default_factory=dict)
    on_way: dict[int, float] = field(default_factory=dict)
    reading: dict[int, Published] = field(default_factory=dict)
    sync_s: float = 0.0

    @classmethod
    def nothing(cls, num_fragments: int) -> Told:
        """Return what a new connection knows."""
        return cls([-1] * num_fragments, [-1] * num_fragments, [0.0] * num_fragments)


class SyncerState(Host):
    """A syncer without its socket.

    Args:
        settings: The settings of the run.
        outer: The outer optimizer.
        open_files: See ``Host``; every commit is on the disk before learners get it.
        drops_tape: See ``restore``.
        model_sizes: Memory in fp32 models, for the shared model and for reports on their way.
        impl: Force an implementation of the operators.

    Attributes:
        model: None until there are parameters.
        run: A random number of the shared model, kept in the snapshot.
        told: What each connection was told.
        with_news: The connections to which there may be something to tell.
        held: The payloads of reports that wait for their merge, by fragment, learner and number.
        merged: Reports merged since the process started, by learner.
        seqs: Highest number of the reports of a learner on a fragment.
    """

    def __init__(
        self,
        settings: DecoupledSettings,
        outer: OuterOptimizer,
        *,
        open_files: Callable[[], Keeper] | None,
        drops_tape: bool = False,
        model_sizes: float,
        impl: str,
    ) -> None:
        self.settings, self.outer, self.impl = settings, outer, impl
        self._model_sizes, self._drops_tape = model_sizes, drops_tape
        super().__init__(PayloadMemory(SMALL_BYTES), open_files)
        self.model: ServedModel | None = None
        self.layout, self.run = 0, 0
        self.told: dict[bytes, Told] = {}
        self.held: dict[tuple[int, str, int], list[Tensor]] = {}
        self.merged: Counter[str] = Counter()
        self.seqs: dict[tuple[str, int], int] = {}
        self.with_news: set[bytes] = set()
        # By learner and fragment: the inner step at which a refused report is called for again.
        self._again: dict[tuple[str, int], int] = {}
        self._instances: dict[str, int] = {}
        self._shapes: dict[bytes, tuple[list[int], list[int], int]] = {}
        self._unsaved: deque[Commit] = deque()

    # ------------------------------------------------------------------------------- the model

    @property
    def version(self) -> int:
        return 0 if self.model is None else self.model.num_commits

    def _restore(self, keeper: Keeper) -> None:
        model, header = restore(
            keeper, self.settings, self.outer, self.impl, drops_tape=self._drops_tape
        )
        self.layout, self.run = header["layout"], header["run"]
        self.unexchanged = header["unexchanged"]
        self._take_model(model)
        logger.info("restored %d commits", model.num_commits)

    def start(self, session: Session, flats: Sequence[Tensor]) -> None:
        """Take a learner's parameters, fp32 [num_elements] for each piece, as version 0."""
        counts, alone, total = self._shapes[session.peer]
        try:
            pieces = pieces_from(session.sizes, counts, alone)
        except ValueError as error:  # The learner has joined twice, with two models.
            raise ProtocolError(str(error)) from None
        rest = iter(flats)
        model = ServedModel(
            pieces, [[next(rest) for _ in each] for each in pieces],
            self.settings, self.outer, total, self.impl,
        )  # fmt: skip
        self.layout, self.run = session.layout, secrets.randbelow(MAX_NUMBER)
        self.unexchanged = session.unexchanged
        self._take_model(model)
        self.save()
        # All learners join anew: those of another model are then refused.
        for other in self.sessions.all():
            self.sessions.drop(other.peer)
            self.release(other)

    def _take_model(self, model: ServedModel) -> None:
        self.model = model
        spare = int((self._model_sizes - KEPT_MODELS) * 4 * model.num_elements)
        self.memory.budget_bytes = max(SMALL_BYTES, spare)

    # ----------------------------------------------------------------------------- the learners

    def check_model(self, meta: dict[str, Any]) -> None:
        """Raise ProtocolError if a learner's model is not the shared one, see ``Host``."""
        sizes, counts, alone = meta["sizes"], meta["pieces"], meta["alone"]
        if len(counts) > MAX_FRAGMENTS:
            raise ProtocolError(f"a model has at most {MAX_FRAGMENTS} fragments, got {len(counts)}")
        try:
            pieces = pieces_from(sizes, counts, alone)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        index, count = self.settings.place
        if len(range(index, meta["total"], count)) != len(counts):
            raise ProtocolError(
                f"shard {index}/{count} of {meta['total']} fragments does not have {len(counts)}"
            )
        if meta["settings"] != self.settings.of_learners:
            self.status.count_refusal("settings")
            raise ProtocolError(
                "the server was started again with other settings (wire, wire_down, receipt, "
                "alpha, error_feedback, fragments, merge or shard): attach anew"
            )
        if self.model is None:
            return
        mine = [[(p.num_elements, p.merge) for p in each] for each in self.model.pieces]
        theirs = [[(p.num_elements, p.merge) for p in each] for each in pieces]
        if mine != theirs:
            self.refuse_layout(
                f"the model has {sum(sizes)} parameters in {len(sizes)} pieces of {len(counts)} "
                f"fragments, the server's has {self.model.num_elements} in "
                f"{len(self.model.sizes)} pieces of {len(mine)} fragments"
                + (", of other sizes" if len(sizes) == len(self.model.sizes) else "")
            )
        self.check_layout(meta["layout"])

    def welcome(self, session: Session, message: Message) -> Message:
        """Let a learner take part, and return the answer to its JOIN."""
        meta: dict[str, Any] = {"history": self.history, "run": self.run, "seqs": []}
        shape = message.meta
        self._shapes[session.peer] = (shape["pieces"], shape["alone"], shape["total"])
        told = self.told[session.peer] = Told.nothing(len(shape["pieces"]))
        if self.model is not None:
            name, syncer = session.worker, self.model.syncer
            if self.unexchanged is None:
                self.unexchanged = session.unexchanged
            is_same = self._instances.get(name) == message.number and name in syncer.learners
            if not is_same:
                if name in syncer.learners:
                    syncer.leave(name, time.monotonic())
                syncer.join(name, message.version)
                self._instances[name] = message.number
            meta["seqs"] = [self._last_seq(name, p) for p in range(len(self.model.pieces))]
            told.news = dict.fromkeys(range(len(self.model.published)))
            self.with_news.add(session.peer)
        meta["needs_start"] = self.model is None
        return Message(Kind.ADMITTED, 0, 0, 0, message.run, meta=meta)

    def _last_seq(self, name: str, fragment: int) -> int:
        """Return the highest number of a learner's reports on a fragment."""
        assert self.model is not None
        merged = self.model.published[fragment].merged.get(name, 0)
        return max(merged, self.seqs.get((name, fragment), 0))

    def release(self, session: Session) -> None:
        """Keep nothing for a connection any more."""
        self.told.pop(session.peer, None)
        self.with_news.discard(session.peer)
        self._shapes.pop(session.peer, None)

    def leave(self, worker: str) -> None:
        """Do without a learner that has no connection."""
        self._instances.pop(worker, None)
        for key in [key for key in self._again if key[0] == worker]:
            del self._again[key]
        if self.model is not None:
            self.model.syncer.leave(worker, time.monotonic())

    # ------------------------------------------------------------------------------ the merges

    def take_report(self, fragment: int, report: Report, payloads: list[Tensor], now: float) -> str:
        """Take a complete report; return why it is refused, or ""."""
        assert self.model is not None
        refusal = self.model.syncer.report(fragment, report, payloads, now)
        if not refusal:
            self.held[fragment, report.learner, report.seq] = payloads
        return refusal

    def refused(self, fragment: int, report: Report) -> None:
        """Call a learner again after H more steps if its report was refused in an open round.

        Without this call a round could wait for the learner for ever.
        """
        assert self.model is not None
        here, syncer = self.model.syncer.rounds[fragment], self.model.syncer
        if here.is_open and here.version == report.base and report.learner in syncer.learners:
            at = syncer.steps_of(report.learner) + syncer.sync_every
            self._again[report.learner, fragment] = at

    def stepped(self, session: Session, steps: int, seconds: float) -> None:
        """Note the inner steps of a learner, and the seconds of the last one."""
        assert self.model is not None
        self.model.syncer.stepped(session.worker, steps, seconds)
        told = self.told.get(session.peer)
        for key in [key for key, at in self._again.items() if key[0] == session.worker]:
            if steps >= self._again[key]:
                del self._again[key]
                if told is not None:
                    told.calls[key[1]] = -1
                    self._note(key[1], session.peer)

    def rest(self, session: Session, progress: Sequence[int]) -> None:
        """Note that a learner rests, and what it has to report, see ``Syncer.rest``."""
        assert self.model is not None
        rounds, told = self.model.syncer.rounds, self.told.get(session.peer)
        if len(progress) != len(rounds):
            raise ProtocolError(f"there are {len(rounds)} fragments, REST has {len(progress)}")
        self.model.syncer.rest(session.worker, progress, time.monotonic())
        for p, (version, here) in enumerate(zip(progress, rounds, strict=True)):
            is_missing = here.is_open and session.worker not in here.reported
            # The open round may have refused a report of this learner, which can send another one.
            if told is not None and is_missing and version == here.version:
                told.calls[p] = -1
                self._note(p, session.peer)

    def _note(self, fragment: int, peer: bytes) -> None:
        """Let a connection be told what is new of a fragment."""
        self.told[peer].news[fragment] = None
        self.with_news.add(peer)

    @property
    def due_at(self) -> float | None:
        """When ``advance`` has something to do, on the monotonic clock."""
        return None if self.model is None or self._unsaved else self.model.syncer.deadline

    def advance(self, now: float) -> None:
        """Merge and call what is due. A commit is published once it is on the disk."""
        if self.model is None or not self._write_out():
            return
        begin = time.perf_counter()
        for message in self.model.syncer.messages(now):
            self.status.apply_s += time.perf_counter() - begin
            if not self._take(message):
                break
            begin = time.perf_counter()
        # While the disk takes no merge, fragments are called all the same.
        for message in self.model.syncer.messages(now, most_merges=0) if self._unsaved else ():
            self._take(message)

    def _take(self, message: Call | Commit) -> bool:
        """Let learners be told of a call, or publish a commit; False while the disk takes none."""
        if isinstance(message, Commit):
            self._unsaved.append(message)
            return self._write_out()
        for peer in self.told:
            self._note(message.fragment, peer)
        return True

    def _write_out(self) -> bool:
        """Write merges to the journal and publish them; False while the disk takes none."""
        assert self.model is not None
        if self.keeper is not None and self.keeper.saved_version < 0:
            return False  # Without a snapshot a journal is of no use.
        while self._unsaved:
            commit = self._unsaved[0]
            keys = [(commit.fragment, r.learner, r.seq) for r in commit.merge.reports]
            payloads = [self.held[key] for key in keys]
            if self.keeper is not None and not write(self.keeper, commit, payloads, self.model):
                return False
            self.model.publish(commit)
            self._unsaved.popleft()
            self.merged.update(report.learner for report in commit.merge.reports)
            self._drop_old_readers(commit.fragment)
            for peer in self.told:
                self._note(commit.fragment, peer)
            for key in keys:
                self.memory.give_back(self.held.pop(key))
        return True

    def _drop_old_readers(self, fragment: int) -> None:
        """Keep the newest ``MAX_OLDER`` of the versions that are read; other readers ask anew."""
        readers = [told.reading for told in self.told.values() if fragment in told.reading]
        versions = sorted({reading[fragment].version for reading in readers})
        for reading in readers:
            if reading[fragment].version in versions[:-MAX_OLDER]:
                del reading[fragment]

    # ------------------------------------------------------------------------------- the files

    def save(self) -> None:
        """Write a snapshot, unless a merge has not been published."""
        model = self.model
        if self.keeper is None or model is None or not self._is_published(model):
            return
        header = {
            "format": FORMAT,
            "settings": self.settings.to_json(),
            "outer": self.outer.config(),
            "layout": self.layout,
            "run": self.run,
            "unexchanged": self.unexchanged,
            **model.header(),
        }
        self.keeper.save(model.num_commits, header, model.tensors())

    def _is_published(self, model: ServedModel) -> bool:
        """Return whether the parameters are those of the published versions.

        If not, a merge waits for the disk, or an error has broken the merge off. A snapshot would
        then hold merged parameters under the version before, and the reports would count again.
        """
        pairs = zip(model.published, model.syncer.fragments, strict=True)
        is_same = all(published.version == f.num_merges for published, f in pairs)
        return is_same and not self._unsaved and not model.syncer.has_unsent

    def end(self) -> None:
        """Write the last snapshot."""
        if self.keeper is not None:
            try:
                self.save()
            finally:
                self.keeper.close(self.version)

    def report(self) -> dict[str, Any]:
        """Return the status as JSON types, small enough for one message; any thread may ask."""
        return report_of(self)


MAX_SHOWN = 64
# Bytes of the message that are left for its envelope.
_MARGIN = 256
# A status is given out again for 20 times as long as it took to make, and for a second at most.
_KEPT_FOR, _MOST_KEPT_S = 20, 1.0


class KeptStatus:
    """The status for peers; a kept one is given out again, so many requests take little time."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make
        self._status: dict[str, Any] = {}
        self._until = -1.0

    def get(self) -> dict[str, Any]:
        """Return the status, made now or at most a second ago."""
        begin = time.monotonic()
        if begin >= self._until:
            self._status = self._make()
            end = time.monotonic()
            self._until = end + min(_KEPT_FOR * (end - begin), _MOST_KEPT_S)
        return self._status


def report_of(state: SyncerState) -> dict[str, Any]:
    """Return the status as JSON types, small enough for one message; any thread may ask.

    Names are left out where all of them would be too many: first those that have reported on a
    fragment, then those of learners. The numbers stay.
    """
    model = state.model
    report = _without_names(state, model)
    if model is None:
        return report
    # One copy: a learner may leave while another thread asks.
    steps = model.syncer.steps()
    report["num_learners"] = len(steps)
    room = MAX_JSON - _MARGIN - _size(report)
    for name in sorted(steps)[:MAX_WORKERS]:
        row = {
            "steps": steps[name],
            "step_s": model.syncer.step_s_of(name),
            "merged": state.merged[name],
        }
        room -= _size({name: row})
        if room < 0:
            break
        report["learners"][name] = row
    rows = report["fragments"]
    for row, here in zip(rows, model.syncer.rounds[:MAX_SHOWN], strict=True):
        row["reported"] = _that_fit(sorted(here.reported)[:MAX_WORKERS], room // len(rows))
    return report


def _size(value: Any) -> int:
    """Return the bytes of a value as JSON."""
    return len(json.dumps(value, separators=(",", ":")))


def _that_fit(names: Iterable[str], room: int) -> list[str]:
    """Return the first names, as many as fit into so many bytes of JSON."""
    found = []
    for name in names:
        room -= _size(name) + 1
        if room < 0:
            break
        found.append(name)
    return found


def _without_names(state: SyncerState, model: ServedModel | None) -> dict[str, Any]:
    """Return the status without the names of learners."""
    report = state.status.report(state.sessions, state.memory) | {
        "mode": "decoupled",
        "settings": state.settings.to_json(),
        "outer": state.outer.config(),
        "commits": 0,
        "num_fragments": 0,
        "fragments": [],
        "num_learners": 0,
        "learners": {},
        "storage": None,
    }
    if model is not None:
        report["parameters"], report["commits"] = model.num_elements, model.num_commits
        report["num_fragments"] = len(model.published)
        pairs = zip(model.published, model.syncer.rounds, strict=True)
        report["fragments"] = [
            {
                "version": published.version,
                "phase": here.phase.value,
                "num_reported": len(here.reported),
                "reported": [],
            }
            for published, here in islice(pairs, MAX_SHOWN)
        ]
    if state.keeper is not None:
        report["storage"] = state.keeper.report(state.version)
    return report
