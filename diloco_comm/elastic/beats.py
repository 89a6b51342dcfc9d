"""Beats: what a process says of itself, again and again, while it lives."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields
from typing import Any

from ..base.extension import VIEW as VERSION
from ..base.extension import RefusedVersions, refusal
from .views import NO_VIEW, Member

MAX_BEAT_BYTES = 2048
_refused = RefusedVersions(logging.getLogger(__name__), "the beat of another replica")

# A newcomer, or one whose change has failed before it had the state: waits to be let in.
READY = "ready"
# A newcomer that copies the outer state from the members, who do not let it in yet.
PULLING = "pulling"
# In an open view, from the moment that it may enter.
TRAINING = "training"
# Has stopped at the boundary of its open view, as all its members do.
STOPPED = "stopped"
# Has stopped in its open view because a round or a change failed.
BROKEN = "broken"
# Meets the members of a forming view.
FORMING = "forming"
# Has met them, and waits for the view to be open.
FORMED = "formed"
# Takes part in nothing any more; FINISHED: because all steps are taken.
GONE = "gone"
FINISHED = "finished"

STAGES = (READY, PULLING, TRAINING, STOPPED, BROKEN, FORMING, FORMED, GONE, FINISHED)


@dataclass(frozen=True)
class Beat:
    """One beat.

    Attributes:
        counter: Higher with every beat of this process.
        stage: One of STAGES.
        view: Number of the open view that it belongs to, NO_VIEW for none.
        attempt: Number of the last forming view that it has taken part in, NO_VIEW for none.
        voted: The same if it may have voted there and does not know whether that view is open.
        has_state: It holds the state of a view that it was in.
        is_leaving: It leaves at the next boundary.
        inner_step: Of the state that it holds, or of its checkpoint.
        positions: The last applied rounds of the fragments of its checkpoint, each number once; ()
            without a checkpoint.
        unreachable: Nonces of processes that it could not reach.
        link: Where its link is found, see ``Place``; "" for nowhere.
        serves: Other processes can copy its outer state there.
        phase: The work of its training loop, see ``DiLoCo.doing``.
    """

    member: Member
    counter: int
    stage: str
    view: int = NO_VIEW
    attempt: int = NO_VIEW
    voted: int = NO_VIEW
    has_state: bool = False
    is_leaving: bool = False
    inner_step: int = 0
    positions: tuple[int, ...] = ()
    unreachable: tuple[str, ...] = ()
    link: str = ""
    serves: bool = False
    phase: str = ""

    def to_bytes(self) -> bytes:
        """Return the text of this beat.

        Raises:
            ValueError: If it is too long.
        """
        values = {one.name: getattr(self, one.name) for one in fields(Beat)}
        values["member"] = [getattr(self.member, one.name) for one in fields(Member)]
        text = json.dumps({"version": VERSION, **values}, sort_keys=True).encode()
        if len(text) > MAX_BEAT_BYTES:
            raise ValueError(
                f"the beat of replica {self.member.id} has {len(text)} bytes, at most "
                f"{MAX_BEAT_BYTES} are allowed: it has {len(self.positions)} fragments and "
                f"{len(self.unreachable)} peers out of reach"
            )
        return text

    @classmethod
    def from_bytes(cls, text: bytes) -> Beat | None:
        """Return the beat that the text holds; None for any other text.

        A beat of another version is logged, once.
        """
        try:
            values = json.loads(text)
            version = values.pop("version")
            if version != VERSION:
                _refused.log(version, ValueError(refusal(version, VERSION)))
                return None
            values["member"] = Member(*values["member"])
            values["positions"] = tuple(values["positions"])
            values["unreachable"] = tuple(values["unreachable"])
            beat = cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return beat if _is_sound(beat) else None


def _is_sound(beat: Beat) -> bool:
    member = beat.member
    numbers = (member.id, member.workers, beat.counter, beat.view, beat.attempt, beat.voted)
    names = (member.nonce, member.address, member.settings, beat.link, beat.phase)
    texts: tuple[Any, ...] = (*names, *beat.unreachable)
    flags = (beat.has_state, beat.is_leaving, beat.serves)
    return (
        all(type(one) is int for one in (*numbers, beat.inner_step, *beat.positions))
        and all(type(one) is str for one in texts)
        and all(type(one) is bool for one in flags)
        and beat.stage in STAGES
    )
