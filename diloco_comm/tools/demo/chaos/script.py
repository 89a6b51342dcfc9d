"""The script of the chaos demo: what happens to whom, and what must come of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ...common.ranks import WITH_OPTIMIZER
from ..run import ReplicaError
from .crew import Crew
from .messages import DONE, FAILED, LEFT_BEHIND, Ended
from .record import Happened, Record, Track, View
from .replica import train
from .settings import FOUNDERS, KILLED, NEWCOMER, STOPPED, ChaosSettings

_POLL_S = 0.05


class Display(Protocol):
    """Shows the demo while it runs."""

    def start(self) -> None: ...

    def update(self, record: Record) -> None:
        """Show the record as it is now; called often."""

    def tell(self, event: Happened) -> None: ...

    def finish(self) -> None: ...


def run_script(settings: ChaosSettings, display: Display) -> Record:
    """Train, let everything happen, and return what was seen.

    Raises:
        ReplicaError: If a replica failed, or an event did not have its effect. All processes have
            ended then, as after an interrupt.
    """
    display.start()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="diloco-chaos-") as folder,
            Crew(train, settings, Path(folder), [train.__module__, *WITH_OPTIMIZER]) as crew,
        ):
            script = Script(settings, crew, display)
            script.run()
            return script.record
    finally:
        display.finish()


class Script:
    """One run of the script."""

    def __init__(self, settings: ChaosSettings, crew: Crew, display: Display) -> None:
        self._settings, self._crew, self._display = settings, crew, display
        self.record = Record(time.monotonic(), settings.step_s)
        self._kills: set[int] = set()

    def run(self) -> None:
        everyone = set(range(FOUNDERS))
        for number in everyone:
            self._start(number)
        view = self._until_members(everyone, "replicas 0 to 3 begin")
        self.record.began(self.record.begin + view.at)
        self._note("begin", -1, "replicas 0 to 3 begin")
        self._train()

        self._kills.add(KILLED)
        self._note("kill", KILLED, f"replica {KILLED} is killed")
        self._crew.kill(KILLED)
        self._until_members(everyone - {KILLED}, f"the others go on without replica {KILLED}")
        self._train()

        self._note("registry down", -1, "the registry is killed")
        self._crew.kill_registry()
        self._wait(self._settings.outage_s)
        self._crew.start_registry()
        self._note("registry up", -1, "the registry is back with its journal")
        self._train()

        everyone = everyone - {KILLED} | {NEWCOMER}
        self._note("join", NEWCOMER, f"replica {NEWCOMER} is started")
        self._start(NEWCOMER)
        self._until_members(everyone, f"replica {NEWCOMER} joins")
        self._train()

        self._note("stop", STOPPED, f"replica {STOPPED} is stopped")
        self._crew.stop(STOPPED)
        self._track(STOPPED).stopped = self._now()
        self._until_members(everyone - {STOPPED}, f"the others go on without replica {STOPPED}")
        self._train()

        self._note("resume", STOPPED, f"replica {STOPPED} wakes up: left behind, it starts again")
        self._track(STOPPED).resumed = self._now()
        self._crew.resume(STOPPED)
        self._until_members(everyone, f"replica {STOPPED} comes again")
        self._train()
        self._end()

    def _end(self) -> None:
        """Let all replicas end at one inner step, which none of them has reached."""
        steps = [track.steps[-1][1] for track in self.record.tracks if track.steps]
        every = self._settings.sync_every
        last_step = (max(steps) // every + 3) * every
        self._note("end", -1, f"all replicas end at inner step {last_step}")
        for number in self._crew.replicas:
            self._crew.tell(number, last_step)
        members = self._members()
        self._until(
            lambda: all(self._crew.replicas[number].has_ended for number in members),
            "the replicas end",
        )

    # ------------------------------------------------------------------------------- waiting

    def _train(self) -> None:
        self._wait(self._settings.pause_s)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._pump()

    def _until_members(self, members: set[int], what: str) -> View:
        """Wait for a view of these members in which each of them has taken a step."""

        def is_so() -> bool:
            view = self.record.newest_view
            return (
                view is not None
                and set(view.members) == members
                and all(self._has_stepped_since(number, view.at) for number in members)
            )

        self._until(is_so, what)
        view = self.record.newest_view
        assert view is not None
        return view

    def _has_stepped_since(self, number: int, at: float) -> bool:
        steps = self._track(number).steps
        return bool(steps) and steps[-1][0] > at

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self._settings.timeout_s
        while not is_so():
            if time.monotonic() > end:
                view = self.record.newest_view
                seen = "there is no view" if view is None else f"the members are {view.members}"
                raise ReplicaError(
                    f"waited {self._settings.timeout_s:g} s in vain, until {what}: {seen}"
                )
            self._pump()

    def _pump(self) -> None:
        for replica, message in self._crew.messages(_POLL_S):
            self.record.add(replica, message)
            if isinstance(message, Ended):
                self._ended(replica.number, message)
        self._display.update(self.record)

    def _ended(self, number: int, ended: Ended) -> None:
        if ended.how == LEFT_BEHIND:
            self._start(number)
        elif ended.how != DONE and number not in self._kills:
            how = "failed" if ended.how == FAILED else "died"
            raise ReplicaError(f"replica {number} {how}:\n{ended.detail}")

    # ------------------------------------------------------------------------------- helpers

    def _start(self, number: int) -> None:
        self.record.started(self._crew.start(number))

    def _track(self, number: int) -> Track:
        return self.record.track_of(self._crew.replicas[number])

    def _members(self) -> tuple[int, ...]:
        view = self.record.newest_view
        return () if view is None else view.members

    def _now(self) -> float:
        return time.monotonic() - self.record.begin

    def _note(self, kind: str, replica: int, text: str) -> None:
        self._display.tell(self.record.note(time.monotonic(), kind, replica, text))
