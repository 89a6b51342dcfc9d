"""The knowledge of one process about its group; the events that change it, and the actions.

The driver of a process turns all that it sees into events, one at a time, and carries out the
actions of each before the next. Time is counted in the process's own polls: no clock is here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from .messages import Message, Prepare
from .messages import Sealed as SealedMessage
from .records import NO_HASH, NO_RECORD, Attempt, Key, Record, record_hash
from .streams import Positions

# ------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Place:
    """The words of a process about itself, which it writes into the table again and again.

    Attributes:
        settings: Hash of what must be equal on all members.
        entered: Number of the record that it has entered; NO_RECORD for none.
        has_state: It holds the state of that record.
        follows: The number of the record whose members a newcomer hears, and whose rounds it
            applies, after it has copied the state; NO_RECORD before any is there. None: not ready.
        inner_step: That it has reached, or that its checkpoint has.
        has_checkpoint: It has a checkpoint of this run.
        cut: Nonces of processes that it cannot reach.
        is_fresh: Not written, but found by the reader: the place was renewed lately.
    """

    key: Key
    settings: bytes
    entered: int = NO_RECORD
    has_state: bool = False
    follows: int | None = None
    is_leaving: bool = False
    is_finished: bool = False
    inner_step: int = 0
    has_checkpoint: bool = False
    cut: tuple[bytes, ...] = ()
    is_fresh: bool = True


class Outcome(Enum):
    """The end of a swap. UNKNOWN: no answer; it may have been done, and may be done later."""

    DONE = auto()
    REFUSED = auto()
    UNKNOWN = auto()


@dataclass(frozen=True)
class Heard:
    """A message has come on the link to a process."""

    nonce: bytes
    message: Message


@dataclass(frozen=True)
class Looked:
    """The table was read, after the last ``Read``.

    Attributes:
        record: b"" if there is none.
        table: Id of the table, 16 bytes, which a table gets when it begins empty: so a table that
            has lost its memory has another one.
        evict: Numbers of replicas that somebody has asked to leave out.
    """

    record: bytes
    table: bytes
    places: tuple[Place, ...] = ()
    evict: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Swapped:
    """The outcome of the swap to ``new``."""

    new: bytes
    outcome: Outcome


@dataclass(frozen=True)
class Passed:
    """One poll of this process has passed, and the process did not stand still meanwhile."""


@dataclass(frozen=True)
class Life:
    """The detector's judgement of other processes, by nonce; each event replaces the one before.

    Attributes:
        suspected: Silent for ``suspect_after``; this may be wrong.
        dead: Ended for certain: refused connections, or another process has taken the place.
        cut: Alive, but there is no way to them.
    """

    suspected: frozenset[bytes] = frozenset()
    dead: frozenset[bytes] = frozenset()
    cut: frozenset[bytes] = frozenset()


@dataclass(frozen=True)
class Sealed:
    """The training thread votes and applies nothing any more; how far it is in that record."""

    number: int
    positions: Positions
    inner_step: int


@dataclass(frozen=True)
class Connected:
    """Every member of an attempt is heard on a link, and devices are connected.

    Attributes:
        cut: Nonces of members that could not be reached: then nothing is connected.
        error: Why nothing is connected; for people.
        refusal: Why this process does not let in the keys of the members in ``cut``, for people;
            "" where keys are not the reason.
    """

    attempt: Attempt
    cut: tuple[bytes, ...] = ()
    error: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class Broke:
    """A round of the record has failed.

    Attributes:
        cut: Nonces of members to which there is no way.
    """

    number: int
    cut: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Boundary:
    """The training thread has stopped after a round in whose headers somebody had asked for it.

    Attributes:
        has_all_votes: All workers have all votes of every round sent before, and all are good.
    """

    number: int
    positions: Positions
    inner_step: int
    has_all_votes: bool


@dataclass(frozen=True)
class Started:
    """The training thread holds the state of the record."""

    number: int


@dataclass(frozen=True)
class Demanded:
    """``change_group`` was called, or a fixed group is to be founded.

    Attributes:
        members: Numbers; () for all members that live.
        may_found: A newcomer may found the group; else it waits for members that let it in.
    """

    members: tuple[int, ...] = ()
    may_found: bool = True


@dataclass(frozen=True)
class GivenUp:
    """The caller of ``change_group`` waits no longer."""


@dataclass(frozen=True)
class JoinerReady:
    """This process, a newcomer, is ready; ``follows`` as in ``Place``."""

    follows: int = NO_RECORD


@dataclass(frozen=True)
class Leave:
    """This process is to leave at the next boundary."""


@dataclass(frozen=True)
class Finished:
    """This process takes no more steps.

    Attributes:
        has_all_steps: All steps of the run are taken and shared, and the record is to say so.
        positions, inner_step: How far it is.
    """

    has_all_steps: bool = False
    positions: Positions = ()
    inner_step: int = 0


Event = (
    Heard | Looked | Swapped | Passed | Life | Sealed | Connected | Broke | Boundary | Started
    | Demanded | GivenUp | JoinerReady | Leave | Finished
)  # fmt: skip

# ------------------------------------------------------------------------------------ actions


@dataclass(frozen=True)
class Send:
    nonce: bytes
    message: Message


@dataclass(frozen=True)
class Read:
    """Read the table; ``Looked`` follows."""


@dataclass(frozen=True)
class Swap:
    """Put ``new`` where exactly ``old`` is, b"" for no record; ``Swapped`` follows.

    The request is for the table that was read last: it ends with the table's process.
    """

    old: bytes
    new: bytes


@dataclass(frozen=True)
class Seal:
    """Stop for good in the record; ``state.Sealed`` follows.

    Attributes:
        is_patient: Let the rounds under way end before; they fail in time if a member dies.
    """

    number: int
    is_patient: bool = False


@dataclass(frozen=True)
class Connect:
    """Connect to the members of an attempt; ``Connected`` follows. It replaces other attempts."""

    attempt: Attempt
    members: tuple[Key, ...]


@dataclass(frozen=True)
class Enter:
    """Apply the decision of a record, take the state if this process brings none, and train."""

    record: Record


@dataclass(frozen=True)
class Pend:
    """Ask for a boundary in the headers of all rounds of this record from now on."""


@dataclass(frozen=True)
class PutOff:
    """A replica without state is not let in for a while, as a group with it could not connect.

    Attributes:
        failure: Why, in words.
        num_polls: For so many polls of this process.
    """

    number: int
    failure: str
    num_polls: int


@dataclass(frozen=True)
class Fail:
    """The demand of this process's caller comes to nothing; the caller may demand again.

    Attributes:
        other: A process with other settings, see ``Refuse``; None where callers contradict.
    """

    reason: str
    other: Key | None = None


@dataclass(frozen=True)
class End:
    """This process takes part in nothing any more, for a reason."""

    reason: str


class Fence(End):
    """The others go on without this process: come again with a new nonce."""


@dataclass(frozen=True)
class Refuse(End):
    """This process cannot take part as it is, now or later.

    Attributes:
        other: A member with other settings, which its driver may ask for them: with both, the
            function ``other_settings`` names the difference.
    """

    other: Key | None = None


class Over(End):
    """The run had ended before this process came."""


class Drained(End):
    """This process has left. A swap that it has asked for before is repeated for a while."""


@dataclass(frozen=True)
class Wait:
    """The thing for which this process waits, in words; "" when it waits no longer."""

    reason: str


Action = (
    Send | Read | Swap | Seal | Connect | Enter | Pend | PutOff | Fail | End | Wait
)  # fmt: skip

# -------------------------------------------------------------------------------------- state


@dataclass(frozen=True)
class Settings:
    """The choices before a process begins; equal on all members but for ``allows_rollback``.

    Attributes:
        run: Name of the training run.
        digest: Hash of what must be equal on all members, 16 bytes.
        min_replicas: Fewer do not train.
        suspect_after: Polls after which a silent process is suspected; the unit of all patience.
        founding_wait: Polls for which founders wait for more to come; on a table that may forget at
            least ``suspect_after``, so that members are heard of again.
        is_fixed: Members change by demands of their callers alone.
        allows_rollback: This process may found the run anew where all members have died.
    """

    run: str
    digest: bytes
    min_replicas: int = 1
    suspect_after: int = 20
    founding_wait: int = 0
    is_fixed: bool = False
    allows_rollback: bool = False

    def __post_init__(self) -> None:
        for name, least in (("min_replicas", 1), ("suspect_after", 1), ("founding_wait", 0)):
            given = getattr(self, name)
            if given < least:
                raise ValueError(f"{name} must be at least {least}, got {given}")

    @property
    def record_name(self) -> str:
        """The word for a record in sentences for people."""
        return "epoch" if self.is_fixed else "view"

    @property
    def table_name(self) -> str:
        """The word for the table."""
        return "store" if self.is_fixed else "registry"


class Stage(Enum):
    """Where a process is.

    NEWCOMER: it has entered no record. TRAINING: in a record. STOPPED: at a boundary of its record.
    SEALING, SEALED: it stops, or has stopped, for good in its record. GONE: it has ended.
    """

    NEWCOMER = auto()
    TRAINING = auto()
    STOPPED = auto()
    SEALING = auto()
    SEALED = auto()
    GONE = auto()


@dataclass(frozen=True)
class Joint:
    """The attempt for which a process connects: the last that it was asked for, or its own."""

    attempt: Attempt
    members: tuple[Key, ...]
    is_connected: bool = False

    @property
    def proposer(self) -> Key:
        return next(key for key in self.members if key.nonce == self.attempt.proposer)


@dataclass(frozen=True)
class Proposal:
    """The attempt that a process leads.

    Attributes:
        draft: The next record, as far as it is known before the answers.
        asked: The PREPARE that was sent.
        base: Members that must seal.
        answers: Their SEALED, by nonce.
        ready: Nonces of the members that have given READY.
        is_swapping: All have answered, and the table is asked.
    """

    draft: Record
    asked: Prepare
    base: tuple[Key, ...]
    answers: tuple[tuple[bytes, SealedMessage], ...] = ()
    ready: frozenset[bytes] = frozenset()
    is_swapping: bool = False


@dataclass(frozen=True)
class State:
    """The state of one process.

    Attributes:
        entered: The bytes of the record that it has entered last; b"" for none.
        has_state: It holds the state of a record that it has entered.
        follows: See ``Place``.
        inner_step: Where it was when it stopped; at first, the step of its checkpoint.
        has_checkpoint: It brings one.
        positions: How far it was when it stopped.
        has_all_votes: See ``Boundary``.
        counter: The counter of its last attempt.
        recorded: The bytes that the table held last.
        table: Id of the table that was read last.
        is_blind: It must read the table before it leads another attempt.
        here: Demands of other processes by nonce, as their HERE in this base says.
        cuts: Pairs of nonces that cannot reach each other, as messages have said.
        demand: Numbers that the caller demands; () for all that live, None for no demand.
        may_found: See ``Demanded``.
        told: The process that was told HERE last.
        opened: The last record with this newcomer as a member, as an OPEN said.
        bound: Members of the attempt for a new table to which this process has given SEALED.
        failure: Why the last attempt could not connect; "" if no attempt has failed since.
        num_failures: Attempts that failed so, one after the other; 10 for more.
        put_off: Processes without state with which a group could not connect: the nonce of each,
            how often its wait was doubled, and the polls for which it is still not let in.
        num_waits: Polls for which it has waited with its present reason; below 0: it pauses.
        num_silent: Polls since the proposer of ``joint`` was heard.
        num_cut_polls: Polls since the last cut was noted.
    """

    settings: Settings
    key: Key
    stage: Stage = Stage.NEWCOMER
    entered: bytes = b""
    has_state: bool = False
    follows: int | None = None
    inner_step: int = 0
    has_checkpoint: bool = False
    positions: Positions = ()
    has_all_votes: bool = False
    is_leaving: bool = False
    is_finished: bool = False
    is_pending: bool = False
    joint: Joint | None = None
    proposal: Proposal | None = None
    counter: int = 0
    recorded: bytes = b""
    table: bytes = b""
    is_blind: bool = True
    places: tuple[Place, ...] = ()
    evict: frozenset[int] = frozenset()
    life: Life = field(default_factory=Life)
    here: tuple[tuple[bytes, tuple[int, ...]], ...] = ()
    cuts: frozenset[tuple[bytes, bytes]] = frozenset()
    demand: tuple[int, ...] | None = None
    may_found: bool = True
    told: bytes = b""
    opened: bytes = b""
    bound: tuple[Key, ...] = ()
    failure: str = ""
    num_failures: int = 0
    put_off: tuple[tuple[bytes, int, int], ...] = ()
    num_waits: int = 0
    num_silent: int = 0
    num_cut_polls: int = 0
    waits_for: str = ""

    @property
    def nonce(self) -> bytes:
        return self.key.nonce

    @property
    def record(self) -> Record | None:
        """The record that this process has entered."""
        return Record.from_bytes(self.entered) if self.entered else None

    @property
    def number(self) -> int:
        return NO_RECORD if self.record is None else self.record.number

    @property
    def entered_hash(self) -> bytes:
        return record_hash(self.entered) if self.entered else NO_HASH

    @property
    def base_hash(self) -> bytes:
        """Hash of the record from which this process would go on: a newcomer from the table's."""
        base = self.entered or self.recorded
        return record_hash(base) if base else NO_HASH

    @property
    def in_table(self) -> Record | None:
        """The record that the table held last."""
        return Record.from_bytes(self.recorded) if self.recorded else None

    @property
    def has_lost_record(self) -> bool:
        """Whether the table of the record has another record, and can only get that one back."""
        if self.record is None or self.recorded == self.entered:
            return False
        return self.in_table is not None or not self.has_moved

    @property
    def has_moved(self) -> bool:
        """Whether the table is not the one of the record: it has lost its memory, or is new."""
        return self.record is not None and self.table != self.record.table


# Fields that begin anew with each record that a process enters.
OF_ONE_RECORD = (
    *("positions", "has_all_votes", "is_pending", "joint", "proposal", "follows", "here", "cuts"),
    *("told", "opened", "bound", "failure", "num_failures", "num_waits"),
)


def place_of(state: State, inner_step: int) -> Place:
    """Return what a process is to write of itself now.

    Args:
        inner_step: That it has reached, or that its checkpoint has.
    """
    cut = {other for nonce, other in state.cuts if nonce == state.nonce} | state.life.cut
    return Place(
        state.key,
        state.settings.digest,
        entered=state.number,
        has_state=state.has_state,
        follows=state.follows,
        is_leaving=state.is_leaving,
        is_finished=state.is_finished,
        inner_step=inner_step,
        has_checkpoint=state.has_checkpoint,
        cut=tuple(sorted(cut)),
    )
