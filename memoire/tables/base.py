"""Interfaces of table pools: what every pool implements, optional capabilities, statistics and snapshot records.

    TablePool        room, parameters, clients, figures, snapshots: of every kind
    TakesPushes      accepts pushed caches or episodes            DrawsBatches     draws samples in batches
    HasRoom          has a capacity in entries                    DrawsEpisodes    draws whole episodes
    ReceivesSums        receives the sums of its clients             TakesPriorities  sets priorities from TD errors
    BelongsToRun     is emptied when another run begins           DeliversOnce     hands each entry out once, in order
    DrawsAtRandom    draws by a generator that has a seed         SavesRows        saves each change as it happens
    ShowsSamples     shows copies of samples                      HasCalls         is used by calls of its own
    KeepsLayout      restores entries to their former places

A pool derives from the classes of its capabilities and from nothing else. `tables.OpenTable` looks the capabilities up
once, so that no message and no draw repeats the lookup.

A snapshot consists of records. A pool writes its content record by record, and a pool here or elsewhere reads them
back. Records of one kind of table are defined beside its pool; the common interface is defined here. Bodies are
msgpack.

    pool.records() ──▶ (body, payload), ... ──▶ a file ──▶ SavedRecord(body, payload, heading) ──▶ pool.put_record
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from memoire.arguments import one_of, whole
from memoire.errors import ParameterError
from memoire.limits import Limits
from memoire.replay.parameters import Parameters

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from memoire.replay.episodes import EpisodeBatch
    from memoire.replay.memory import Memory
    from memoire.replay.rollouts import Rollouts
    from memoire.replay.writing import Changes
    from memoire.wire import messages
    from memoire.wire.byte_budget import ByteBudget
    from memoire.wire.parts import Payload
    from memoire.wire.receivers import ReplyPage

    from .calls import Transport
    from .draws import PooledBatch
    from .inspection import Distribution, PeekedSample


@dataclass(slots=True)
class PoolCounts:
    """Mutable counters of a pool since its creation, guarded by the pool's lock. `PoolStats` explains each counter."""

    added: int = 0
    drawn: int = 0
    overwritten: int = 0
    overwritten_samples: int = 0
    left: int = 0
    misses: int = 0
    passed_over: int = 0
    applied: int = 0
    stale: int = 0

    def add(self, overwritten: int, samples: int) -> None:
        """Count one more stored cache or episode, and the overwritten ones with their unused samples."""
        self.added += 1
        self.overwritten += overwritten
        self.overwritten_samples += samples


@dataclass(frozen=True)
class PoolStats:
    """Frozen figures of a pool: current content, and counts since the pool's creation."""

    clients: int
    caches: int
    bytes: int
    unused: int
    """Held samples that were never drawn."""
    held: int
    """Samples of all held caches, including drawn samples."""
    added: int
    drawn: int
    """Samples drawn since the pool's creation."""
    overwritten: int
    """Caches evicted to make room before all their samples were used."""
    overwritten_samples: int
    """Unused samples in the evicted caches."""
    left: int
    """Clients that expired after a silence."""
    misses: int
    """Draws that failed because too few samples were available."""
    passed_over: int = 0
    """Samples discarded because their entries had become too old (`max_age`, `max_model_lag`)."""
    applied: int = 0
    """Priorities that learners have set in this pool. For held caches, the owning clients set the priorities."""
    stale: int = 0
    """Priorities received for entries that the pool no longer holds."""
    split: int = 0
    """Fragments of rollouts that a take has split in two."""
    own: Any = None
    """Figures that only this kind of table has: a dataclass whose fields are declared as those of `memoire.figures`."""


# A snapshot file is untrusted: the decoder rejects values that would overflow or corrupt a server's sums.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Word: TypeAlias = Annotated[int, Meta(ge=0)]  # msgpack integers have at most 64 bits
Moment: TypeAlias = Annotated[float, Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]
Weight: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.7976931348623157e308)]
Identity: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Topic: TypeAlias = Annotated[str, Meta(max_length=256)]

SavedRow: TypeAlias = tuple[int, bytes, bytes | None]
"""Change that a table saves as it happens (`SavesRows`): number of the row's kind, key, and body. None as body deletes
the row; in `restore` None means that the row's file is missing or damaged.
"""
SMALL_ROWS, LARGE_ROWS, LOSABLE_ROWS = range(8), range(8, 12), range(12, 16)
"""Numbers of kinds of rows, chosen by the tables. Bodies of large and losable rows are files beside the database.
Without a large one's file the server does not start; a table can recover losable rows in another way.
"""


class RecordKind(enum.IntEnum):
    """Kinds of snapshot records. A number never changes its meaning. 7, 10 and 11 belong to memoire's extensions."""

    ABOUT = 1
    CLIENT = 2
    CACHE = 3
    EPISODE = 4
    ACCOUNTS = 5
    END = 6
    TABLE = 8
    TABLE_END = 9


class RecordBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of a snapshot record: msgpack map of the fields that differ from their defaults. Ignores unknown fields."""

    kind: ClassVar[int]
    """Number of the record's kind: a `RecordKind`, or 128 to 254 for a kind of table from outside of memoire."""
    has_payload: ClassVar[bool] = False
    is_heading: ClassVar[bool] = False
    """True if the records that follow belong to this record."""

    @property
    def is_alone(self) -> bool:
        """True if the record is restored by itself, False for a heading that is restored together with its records."""
        return True

    @property
    def time(self) -> float:
        """Sort key, by which records of several files are merged into one order."""
        return -math.inf

    def count_contribution(self, payload_bytes: int) -> dict[str, int]:
        """Return the record's contribution to its table's counts in the file, by the counts' names."""
        return {}

    def older(self, seconds: float) -> RecordBody:
        """Return the same body with its ages increased by this many seconds, the time since the snapshot."""
        return self

    def routing_key(self, heading: RecordBody | None) -> bytes | None:
        """Return the key that assigns the record to one of several servers, or None if every server gets the record."""
        return None

    def description(self, heading: RecordBody | None) -> str:
        """Return the description of the record for error messages."""
        return f"a record of kind {getattr(self.kind, 'name', self.kind)}"


class SavedRecord(NamedTuple):
    """Snapshot record that is being restored into a pool."""

    body: RecordBody
    payload: bytes
    heading: RecordBody | None
    """The newest heading before the record in its file."""
    stays: bool
    """True if clients that are known only from the snapshot remain until their first message."""
    is_remade: bool
    """True if priorities are computed again, except for the priorities that learners reported."""
    limits: Limits


class RestoreOutcome(NamedTuple):
    """Outcome of restoring one record."""

    is_new: bool
    """True if the pool did not hold the record's content before."""
    overwritten: int = 0
    """Number of caches or episodes that were evicted to make room."""
    counts: dict[str, int] = {}
    """Numbers of restored items, by the field names of `RestoreCounts`."""
    client: bytes = b""
    """Id of the client that the record belongs to; b"" if the record belongs to no single client."""


DEFAULTS: Final = Limits()
MAX_INSPECTED: Final = 65_536
"""Maximum number of samples that are examined for a histogram."""


class TablePool(ABC):
    """Interface of the storage of one table. Thread-safe; a pool may block, but does no I/O."""

    if TYPE_CHECKING:  # attributes of some pools, properties of other pools

        @property
        def parameters(self) -> Parameters:
            """The parameters that are in force now."""

        @property
        def byte_limit(self) -> int:
            """Maximum number of bytes that the pool may hold."""

        @property
        def least_bytes(self) -> int:
            """Smallest value that `byte_limit` can be set to."""

    @abstractmethod
    def join_budget(self, budget: ByteBudget, name: str) -> None:
        """Join a byte budget as the holder of this name, before the pool receives data. All holders share the bytes."""

    @abstractmethod
    def limit_bytes(self, byte_limit: int) -> int:
        """Set the byte limit; return the number of caches or episodes that were evicted."""

    @abstractmethod
    def check_parameters(self, parameters: Parameters) -> None:
        """Raise ParameterError if the pool holds content that was made with other values than these."""

    @abstractmethod
    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Apply new parameters; return the number of caches or episodes that were evicted.

        Args:
            discard_mismatched: Evict content made with other values. If False, such content makes the call fail.

        Raises:
            ParameterError: nothing was changed.
        """

    @abstractmethod
    def record_contact(self, client_id: bytes) -> None:
        """Record a sign of life of a client that sent no other data."""

    @abstractmethod
    def unregister(self, client_id: bytes) -> None:
        """Unregister a client that has ended."""

    @abstractmethod
    def expire(self) -> int:
        """Expire silent clients and readers now; return the number of clients that expired."""

    @abstractmethod
    def saw_model(self, version: int) -> None:
        """Record the newest model version, from which `Parameters.max_model_lag` counts."""

    @abstractmethod
    def entries(self) -> int:
        """Return the number of entries that can be handed out, or whose samples can still arrive."""

    @property
    def unfinished(self) -> int:
        """Number of items that actors or learners have yet to answer, draw or commit before the table is finished."""
        return 0

    @abstractmethod
    def stats(self) -> PoolStats:
        """Return frozen figures of the pool."""

    @abstractmethod
    def distribution(self, most: int = MAX_INSPECTED) -> Distribution:
        """Return the distribution of weights and ages from at most `most` held samples; the pool is not changed."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state of drawing beside the held data: fields of a snapshot's `TableRecord`."""

    @abstractmethod
    def restore_state(self, state: Any, *, is_same: bool) -> None:
        """Continue from a value of `state`, before any record is restored.

        Args:
            is_same: True if this pool continues the saved pool after a restart: the counts and the generator's state,
                if `state` has one, continue, too.
        """

    @property
    @abstractmethod
    def is_untouched(self) -> bool:
        """True if the pool never received or handed out anything, so that the pool can continue as a saved one."""

    @abstractmethod
    def records(self) -> Iterator[tuple[RecordBody, Any]]:
        """Yield the pool's content for a snapshot: body and payload of each record."""

    @abstractmethod
    def put_record(self, record: SavedRecord) -> RestoreOutcome:
        """Restore a record that a pool of this kind saved, here or elsewhere.

        Raises:
            ProtocolError, MemoireError: the record is invalid or does not fit.
            Closed: `close` was called.
        """

    @abstractmethod
    def close(self) -> None:
        """Wake all waiting threads, which raise Closed, and release the content."""


class TakesPushes(ABC):
    """Capability: accept the caches or episodes that clients push."""

    @abstractmethod
    def check(
        self, body: messages.Body, payload: Any, *, limits: Limits = DEFAULTS, checksum: int | None = None
    ) -> Any:
        """Check a push completely and return an object for `add`, whose `samples` is the number of samples.

        Args:
            body: Message of the type that this pool stores.
            checksum: Checksum of the header, if `messages.parse` was told to skip the comparison.

        Raises:
            ProtocolError: the push is invalid. No other error is raised, whatever the bytes.
        """

    @abstractmethod
    def add(self, client_id: bytes, sequence: int, held: Any) -> int:
        """Store the result of `check`; return the number of evicted caches or episodes. Raises ProtocolError."""


class HasRoom:
    """Capability: room for a limited number of entries."""

    if TYPE_CHECKING:

        @property
        def capacity(self) -> int:
            """Maximum number of entries; 0 if only bytes limit the entries."""


class ReceivesSums(ABC):
    """Capability: receive the sums of the clients' own memories, and grant each client a number of samples to push."""

    @abstractmethod
    def sums(self, client_id: bytes, sequence: int, total_weight: float, positives: int, minimum: float) -> bool:
        """Record a client's sums; return True if the sums are newer than the recorded ones."""

    @abstractmethod
    def room(self, client_id: bytes, stock_bytes: int) -> int | None:
        """Return the number of samples that a client may push now, or None if the number is not limited.

        Args:
            stock_bytes: Bytes of undrawn samples that the pool may hold of a client while learners draw.
        """


class BelongsToRun(ABC):
    """Capability: content that belongs to one run."""

    @abstractmethod
    def clear(self) -> int:
        """Discard the whole content and return its size. Clients, readers and waiting calls stay registered."""


class DrawsAtRandom(ABC):
    """Capability: draws by a random generator of the pool."""

    @abstractmethod
    def reseed(self, seed: int) -> None:
        """Seed the generator as at the pool's creation. Call before the first draw."""


class DrawsBatches(ABC):
    """Capability: draw samples, for a local learner and for readers that draw from several pools."""

    WANTED: ClassVar = "to draw batches; for this table call {instead}"

    @abstractmethod
    def get(
        self,
        samples: int,
        *,
        timeout: float | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> PooledBatch:
        """Draw a complete batch or nothing; the batch's ids are [B] of dtype `batch.ID`. Raises as `Pool.get`."""

    @abstractmethod
    def reserve(
        self, reader: bytes, samples: int, elsewhere: int = 0, part: tuple[int, int] = (0, 1), wanted: int | None = None
    ) -> NDArray[np.void]:
        """Reserve samples for a reader; return one row of sums for each client, [C] of `rows.CLIENT_SUMS`."""

    @abstractmethod
    def draw_counts(
        self,
        reader: bytes,
        counts: NDArray[np.void],
        *,
        now: float = 0.0,
        compression: str = "none",
        page: ReplyPage | None = None,
    ) -> Payload | None:
        """Draw samples by rows [C] of `rows.CLIENT_COUNTS`; return the DRAWN payload, or None if nothing was drawn.
        Raise ProtocolError, and draw nothing, if the page of the reply has too little room.
        """


class DrawsEpisodes(ABC):
    """Capability: draw whole episodes or groups of episodes."""

    WANTED: ClassVar = "to draw whole episodes"

    @abstractmethod
    def sample_episodes(
        self,
        count: int,
        update: Callable[[NDArray[Any], Any], Any],
        *,
        group: str | None = None,
        group_size: int | None = None,
        timeout: float | None = None,
    ) -> EpisodeBatch:
        """Draw whole episodes or groups: see `EpisodePool`. `update` gets ids and TD errors of N entries, [N]."""


class TakesPriorities(ABC):
    """Capability: set the priorities of held entries from learners' TD errors."""

    if TYPE_CHECKING:

        @property
        def owner(self) -> bytes:
            """The 16-byte owner part of the entries' ids."""

    @abstractmethod
    def apply(self, owner: bytes, numbers: NDArray[np.int64], td_errors: NDArray[np.float32]) -> tuple[int, int] | None:
        """Set priorities from a learner's TD errors, both [N]; return (applied, stale), or None for another pool's
        `owner`.
        """


Release = Literal["now", "publish"]
RELEASES: Final = ("now", "publish")


@dataclass(frozen=True, slots=True)
class TakeRequest:
    """Request of a learner for entries of rollouts.

    Args:
        steps: Entries to take, at least 1.
        exact: True: split the last fragment if it has more entries than are missing. False: take the last fragment
            whole.
        min_clients: Minimum number of clients with held entries.
        release: When the room of the taken entries is given back.

    Raises:
        ParameterError: an argument is out of its range.
    """

    steps: int
    exact: bool = True
    min_clients: int = 0
    release: Release = "now"

    def __post_init__(self) -> None:
        if self.release not in RELEASES:
            raise ParameterError("release", self.release, one_of(self.release, RELEASES))
        whole("steps", self.steps, 1)
        whole("min_clients", self.min_clients, 0)


class DeliversOnce(HasRoom, ABC):
    """Capability: hand each entry out once, in order of arrival."""

    WANTED: ClassVar = "to take entries"
    on_room: Callable[[int, Changes], None]
    """Callback: gets the number of entries whose room is given back, and changes to save with that number."""

    @abstractmethod
    def held(self) -> tuple[int, int]:
        """Return the number of held entries, and the number of clients that recorded them."""

    @abstractmethod
    def take(self, wanted: TakeRequest, timeout: float = 0.0) -> Rollouts:
        """Take the oldest entries, all that were requested or nothing: see `RolloutPool`."""

    @abstractmethod
    def pack_for_learner(
        self, wanted: TakeRequest, least: int, page: ReplyPage, *, wall: float
    ) -> tuple[list[messages.FragmentRow], Payload | None]:
        """Return the rows and payload of a ROLLOUTS message for a remote learner, without waiting."""


class HasCalls(ABC):
    """Capability: calls of the table's own kind, in the server's process and from remote clients."""

    WANTED: ClassVar = "to use a table's own calls; for this table call {instead}"

    @abstractmethod
    def calls(self, transport: Transport, *args: Any, **options: Any) -> Any:
        """Return the kind's call interface, which reaches the servers by this transport."""


class ShowsSamples(ABC):
    """Capability: show copies of held samples."""

    @abstractmethod
    def peek(self, of: tuple[bytes, int] | None = None) -> PeekedSample | None:
        """Return a copy of a random sample, by the chances of a draw, or of the entry of this owner and number. The
        sample stays in the pool. Return None if the pool is empty or no longer holds the entry.
        """


class HasLayout(Protocol):
    """Fields of a file's `TableRecord` that describe the places of entries."""

    @property
    def memory(self) -> str:
        """Numbers of the memory's state, as JSON."""

    @property
    def arrays(self) -> dict[str, int]:
        """Bytes of each array of the memory's state, in the order of the payload."""


class RestoredMemory(Protocol):
    """Memory that is being restored from a snapshot: each record returns to its former place."""

    memory: Memory | None
    """The restored memory; None if the saved layout does not fit the pool."""
    names: dict[int, tuple[bytes, int]]
    """Former owner and number of each episode, by the number of the episode's first entry."""
    entries: int

    def put(self, body: RecordBody, payload: bytes) -> None:
        """Restore the next record in its place. If that fails, raise `wrong` as `KeepsLayout.empty_copy` does."""

    def finish(self) -> bool:
        """Make the entries drawable; return False if entries are missing."""


class KeepsLayout(ABC):
    """Capability: restore entries to their former places, because draws depend on the places."""

    @abstractmethod
    def saved_layout(self) -> tuple[dict[str, Any], bytes, int]:
        """Return places of entries: fields of a `TableRecord`, its payload, and a number that each change alters."""

    @abstractmethod
    def empty_copy(
        self,
        body: HasLayout,
        payload: bytes,
        parameters: Parameters,
        *,
        keeps_generator: bool,
        wrong: Callable[[str], Exception],
    ) -> RestoredMemory:
        """Return an empty memory of the saved layout and these parameters. The episodes' records fill the memory."""

    @abstractmethod
    def replace_memory(self, memory: Memory, names: Mapping[int, tuple[bytes, int]]) -> bool:
        """Replace the pool's memory by the heir's. Return False, changing nothing, if data arrived meanwhile."""


class SavesRows(ABC):
    """Capability: save each change by the server's store before the change is acknowledged."""

    @abstractmethod
    def keep_changes(self) -> None:
        """Start to collect the changes that must be saved."""

    @abstractmethod
    def take_changes(self) -> list[SavedRow]:
        """Return the changes since the last call."""

    @abstractmethod
    def restore(self, saved: Iterable[SavedRow]) -> str:
        """Restore saved rows; return a text about missing rows and the consequences, "" if none is missing.

        Raises:
            msgspec.MsgspecError, ValueError: the rows were saved by a table with other settings.
        """
