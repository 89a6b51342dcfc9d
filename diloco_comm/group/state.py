"""The knowledge of one process about its group; the events that change it, and the actions.

The driver of a process turns messages, contents of the table and reports of the training thread
into events. ``agreement.step`` answers each event with actions, and the driver carries these out
before the next event. Time is counted in polls of the process: this module reads no clock.
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
    """Where one process stands in the agreement; each of its beats brings its place to the table.

    Attributes:
        settings: Hash of the settings that must be equal on all members.
        entered: Number of the record that the process entered last; NO_RECORD for none.
        has_state: Whether the process holds the outer state of that record.
        follows: Only for a newcomer: the number of the record whose rounds it applies since it
            has copied the outer state. NO_RECORD: ready, but there is no record yet. None: the
            newcomer is not ready.
        inner_step: The inner step that the process, or else its checkpoint, has reached.
        has_checkpoint: Whether the process has a checkpoint of this run.
        cut: Nonces of processes that this process cannot reach.
        is_fresh: Whether the process has beaten lately. The reader of the table sets this flag.
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
    """How a swap ended. UNKNOWN: without an answer; the table may have made it, or may yet."""

    DONE = auto()
    REFUSED = auto()
    UNKNOWN = auto()


@dataclass(frozen=True)
class Heard:
    """The process named ``nonce`` has sent this message over the link."""

    nonce: bytes
    message: Message


@dataclass(frozen=True)
class Looked:
    """The contents of the table, in answer to a ``Read``.

    Attributes:
        record: The bytes of the newest record; b"" if the table has none.
        table: Id of the table, 16 bytes. A table draws its id when it begins empty, so a table
            that has lost its memory has another id.
        places: The places of all processes that beat.
        evict: Numbers of replicas whose eviction somebody has asked for.
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
    """One poll period has passed, and this process was not suspended meanwhile."""


@dataclass(frozen=True)
class Life:
    """Which other processes live, as ``Signs`` judges; each event replaces the one before.

    Attributes:
        suspected: Nonces of processes that were silent for ``suspect_after``; they may live.
        dead: Nonces of processes that have certainly ended: they refuse connections or have said
            that they end.
        cut: Nonces of processes that beat, but to which this process has no connection.
    """

    suspected: frozenset[bytes] = frozenset()
    dead: frozenset[bytes] = frozenset()
    cut: frozenset[bytes] = frozenset()


@dataclass(frozen=True)
class Sealed:
    """The training thread has stopped: it votes and applies nothing more in record ``number``.

    Attributes:
        positions, inner_step: How far each stream and the training thread had come.
    """

    number: int
    positions: Positions
    inner_step: int


@dataclass(frozen=True)
class Connected:
    """The result of ``Connect``; without ``cut`` and ``error``, this process reaches all members.

    Attributes:
        cut: Nonces of members that could not be reached.
        error: Why this process did not connect, for people; "" if it did.
        refusal: Why this process does not let in the keys of the members in ``cut``, for people;
            "" where keys are not the reason.
    """

    attempt: Attempt
    cut: tuple[bytes, ...] = ()
    error: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class Broke:
    """A round in record ``number`` has failed.

    Attributes:
        cut: Nonces of members that this process cannot reach.
    """

    number: int
    cut: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Boundary:
    """The training thread has stopped at a boundary, which a header of the last round asked for.

    Attributes:
        has_all_votes: All workers of this replica have all votes of every round sent before the
            boundary, and every vote is yes.
    """

    number: int
    positions: Positions
    inner_step: int
    has_all_votes: bool


@dataclass(frozen=True)
class Started:
    """The training thread holds the outer state of record ``number``, and begins to train."""

    number: int


@dataclass(frozen=True)
class Demanded:
    """``change_group`` was called, or a fixed group is to be founded.

    Attributes:
        members: Numbers of the replicas that are to go on; () for all members that live.
        may_found: A newcomer may found the group; else it waits for members that let it in.
    """

    members: tuple[int, ...] = ()
    may_found: bool = True


@dataclass(frozen=True)
class GivenUp:
    """The caller of ``change_group`` waits no longer."""


@dataclass(frozen=True)
class JoinerReady:
    """This newcomer has what it needs to enter a record; ``follows`` as in ``Place``."""

    follows: int = NO_RECORD


@dataclass(frozen=True)
class Leave:
    """This process is to leave at the next boundary."""


@dataclass(frozen=True)
class Finished:
    """This process takes no more steps.

    Attributes:
        has_all_steps: The run has taken and shared all its steps, and the record is to say so.
        positions, inner_step: How far each stream and the training thread have come.
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
    """Replace the table's record by ``new`` if it is exactly ``old``; ``Swapped`` follows.

    ``old`` is b"" where the table shall have no record. The request is for the table that was
    read last, and is lost if that table's process ends.
    """

    old: bytes
    new: bytes


@dataclass(frozen=True)
class Seal:
    """Stop for good in the record; ``state.Sealed`` follows.

    Attributes:
        is_patient: First let the rounds under way end; they fail by themselves if a member dies.
    """

    number: int
    is_patient: bool = False


@dataclass(frozen=True)
class Connect:
    """Connect to the members of this attempt, and drop any former one; ``Connected`` follows."""

    attempt: Attempt
    members: tuple[Key, ...]


@dataclass(frozen=True)
class Enter:
    """Apply the rounds that a record decides, copy the outer state if it is missing, and train."""

    record: Record


@dataclass(frozen=True)
class Pend:
    """Ask for a boundary in the headers of all rounds of this record from now on."""


@dataclass(frozen=True)
class PutOff:
    """A newcomer is not let in for a while after a failed attempt to connect; for the log.

    Attributes:
        number: The newcomer's replica number.
        failure: Why the group could not connect, in words.
        num_polls: Polls for which this process does not let the newcomer in.
    """

    number: int
    failure: str
    num_polls: int


@dataclass(frozen=True)
class Fail:
    """A call of ``change_group`` in this process fails; the caller may call again.

    Attributes:
        other: A process with other settings, see ``Refuse``; None where the callers of two
            processes demand different members.
    """

    reason: str
    other: Key | None = None


@dataclass(frozen=True)
class End:
    """This process leaves the agreement for good; ``reason`` says why."""

    reason: str


class Fence(End):
    """The others go on without this process: come again with a new nonce."""


@dataclass(frozen=True)
class Refuse(End):
    """This process cannot take part as it is, now or later.

    Attributes:
        other: A member with other settings. The driver may ask it for these, so that
            ``messages.other_settings`` can name the first difference.
    """

    other: Key | None = None


class Over(End):
    """The run had ended before this process came."""


class Drained(End):
    """This process has left; a swap that it asked for before is still repeated for a while."""


@dataclass(frozen=True)
class Wait:
    """This process waits for what ``reason`` says; "" when it waits no longer."""

    reason: str


Action = (
    Send | Read | Swap | Seal | Connect | Enter | Pend | PutOff | Fail | End | Wait
)  # fmt: skip

# -------------------------------------------------------------------------------------- state


@dataclass(frozen=True)
class Settings:
    """The options of a group, fixed before start. Members compare ``digest`` alone.

    Attributes:
        run: Name of the training run.
        digest: Hash of the settings that must be equal on all members, 16 bytes.
        min_replicas: Fewer replicas than this do not train.
        suspect_after: Polls of silence after which a process is suspected. Other waits of the
            agreement are multiples of this time.
        founding_wait: Polls for which founders wait for more replicas. For a table that may lose
            its memory, choose at least ``suspect_after``, so that living members are heard first.
        is_fixed: Only calls of ``change_group`` change the members.
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
        """The word for a record in messages to users."""
        return "epoch" if self.is_fixed else "view"

    @property
    def table_name(self) -> str:
        """The word for the table in messages to users."""
        return "store" if self.is_fixed else "registry"


class Stage(Enum):
    """The part that a process has in its record.

    NEWCOMER: it has entered no record yet. TRAINING: it trains. STOPPED: it waits at a boundary.
    SEALING: its training thread was told to stop for good in this record. SEALED: that thread has
    stopped. GONE: the process has left the agreement.
    """

    NEWCOMER = auto()
    TRAINING = auto()
    STOPPED = auto()
    SEALING = auto()
    SEALED = auto()
    GONE = auto()


@dataclass(frozen=True)
class Joint:
    """The attempt that a process takes part in: the last PREPARE that it accepted, or its own."""

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
        draft: The next record, without the decision, which the answers give.
        asked: The PREPARE that was sent.
        base: Members of the present record, which must answer SEALED.
        answers: The SEALED of these members so far, by nonce.
        ready: Nonces of the members of the next record that have answered READY.
        is_swapping: All have answered, and the table was asked for the swap.
    """

    draft: Record
    asked: Prepare
    base: tuple[Key, ...]
    answers: tuple[tuple[bytes, SealedMessage], ...] = ()
    ready: frozenset[bytes] = frozenset()
    is_swapping: bool = False


@dataclass(frozen=True)
class State:
    """All that one process knows of the agreement; ``step`` returns a changed copy.

    Attributes:
        entered: The bytes of the record that this process entered last; b"" for none.
        has_state: Whether this process holds the outer state of that record.
        follows: See ``Place``.
        inner_step: The inner step at which this process stopped; at first, of its checkpoint.
        has_checkpoint: Whether this process has a checkpoint of this run.
        positions: How far each stream was when this process stopped.
        has_all_votes: See ``Boundary``.
        is_pending: This process has asked for a boundary in this record.
        joint: The attempt in which this process takes part, led by itself or by another.
        proposal: The attempt that this process leads.
        counter: The counter of the last attempt that this process has led.
        recorded: The bytes of the record that the table had when it was read last.
        table: Id of the table that was read last.
        is_blind: This process must read the table before it leads another attempt.
        places: The places of all processes, as the table had them last.
        evict: See ``Looked``.
        here: The members that other callers demand, by nonce of their process, from HERE messages.
        cuts: Pairs of processes that cannot reach each other, from messages and failed connects.
        demand: Numbers that this caller demands; () for all that live, None for no demand.
        may_found: See ``Demanded``.
        told: Nonce of the process to which this process has sent HERE last.
        opened: The last record with this newcomer as a member that an OPEN has brought.
        bound: Members of the attempt to which this process has answered SEALED after the table
            lost its memory.
        failure: Why the last attempt could not connect; "" after success.
        num_failures: How many attempts in a row could not connect; counted up to 10.
        put_off: Newcomers of failed attempts to connect: the nonce of each, how often its wait was
            doubled, and the polls for which it is still not let in.
        num_waits: Polls for which this process has waited for ``waits_for``; below 0, polls of a
            pause before its next attempt.
        num_silent: Polls since the proposer of ``joint`` was heard.
        num_cut_polls: Polls since ``cuts`` has grown.
        waits_for: The reason why this process waits; "" for none.
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
        """Hash of the record that the next one follows: the own one, or the newest in the table."""
        base = self.entered or self.recorded
        return record_hash(base) if base else NO_HASH

    @property
    def in_table(self) -> Record | None:
        """The record that the table held last."""
        return Record.from_bytes(self.recorded) if self.recorded else None

    @property
    def has_lost_record(self) -> bool:
        """Whether the table does not hold the record that this process has entered.

        A table with a new id that is still empty is no loss: members can agree to fill it.
        """
        if self.record is None or self.recorded == self.entered:
            return False
        return self.in_table is not None or not self.has_moved

    @property
    def has_moved(self) -> bool:
        """Whether the entered record is of another table than the last one that was read.

        The latter is new, or has lost its memory.
        """
        return self.record is not None and self.table != self.record.table


# Fields of ``State`` that get their defaults again when a process enters a record.
OF_ONE_RECORD = (
    *("positions", "has_all_votes", "is_pending", "joint", "proposal", "follows", "here", "cuts"),
    *("told", "opened", "bound", "failure", "num_failures", "num_waits"),
)


def place_of(state: State, inner_step: int) -> Place:
    """Return the place that a process is to publish now.

    Args:
        inner_step: The inner step that the process, or else its checkpoint, has reached.
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
