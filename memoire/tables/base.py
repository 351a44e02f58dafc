"""What a table's pool is to those who use it: what every kind of table does, and what only some kinds do.

    TablePool        room, parameters, clients, figures, snapshots: of every kind
    TakesPushes      caches or episodes come by messages          DrawsBatches     hands out samples in batches
    HasRoom          has room for so many entries                 DrawsEpisodes    hands out whole episodes
    HearsSums        hears of what its clients hold               TakesPriorities  learners set priorities here
    BelongsToRun     is emptied where another run begins          HandsOutOnce     hands each entry out once, in order
    DrawsAtRandom    draws by a generator that has a seed         SavesRows        saves each change, as it happens
    ShowsSamples     shows copies of samples                      HasCalls         is used by calls of its own
    KeepsLayout      entries come back to where they lay

A pool derives from what it does, and from nothing else. Who opens a table looks up what its pool can do, once:
`tables.OpenTable` has it, so that no message and no draw asks again.

Figures of a pool: what it counts, and the frozen picture that it gives.

Records of a snapshot: what a pool saves of what it holds, one by one, and takes back, here or elsewhere. A kind's own
records stand beside its pool; what every one of them can say is here. Bodies are msgpack.

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
    from memoire.wire.receivers import Page

    from .calls import Transport
    from .draws import PooledBatch
    from .inspection import Distribution, PeekedSample


@dataclass(slots=True)
class PoolCounts:
    """What a pool has done since it was made. Belongs to the pool's lock; `PoolStats` explains each."""

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
        """One more was stored; so many, with so many samples, made room for it."""
        self.added += 1
        self.overwritten += overwritten
        self.overwritten_samples += samples


@dataclass(frozen=True)
class PoolStats:
    """What a pool holds and has done; counts are since it was made."""

    clients: int
    caches: int
    bytes: int
    unused: int
    """Samples never drawn."""
    held: int
    """Samples of all held caches, drawn ones included."""
    added: int
    drawn: int
    """Samples."""
    overwritten: int
    """Caches taken out for want of room, before all their samples were used."""
    overwritten_samples: int
    """The unused samples in them."""
    left: int
    """Clients that left after being silent."""
    misses: int
    """Draws that found too few samples."""
    passed_over: int = 0
    """Samples that were let go because their entries had become too old (`max_age`, `max_model_lag`)."""
    applied: int = 0
    """Priorities that learners have set here; in held caches, their owners set them."""
    stale: int = 0
    """Priorities for entries that had left."""
    split: int = 0
    """Fragments of rollouts that a take has split."""
    own: Any = None
    """Figures that only this kind has: a dataclass whose fields are declared as those of `memoire.figures`."""


# A file may be anybody's: what could spoil a server's sums or numbers is refused where it is read.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
Word: TypeAlias = Annotated[int, Meta(ge=0)]  # msgpack has none beyond 64 bits
Moment: TypeAlias = Annotated[float, Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]
Weight: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.7976931348623157e308)]
Identity: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Topic: TypeAlias = Annotated[str, Meta(max_length=256)]

SavedRow: TypeAlias = tuple[int, bytes, bytes | None]
"""A change that a table has saved as it happens (`SavesRows`): number of a kind of rows, key, and body; None takes the
row out, or says that its file is missing or damaged.
"""
SMALL_ROWS, LARGE_ROWS, LOSABLE_ROWS = range(8), range(8, 12), range(12, 16)
"""Numbers of kinds of rows, as tables choose them. Bodies of large and losable ones are in files beside the database.
If a large one is missing, the server does not start; losable ones the table can get in another way.
"""


class RecordKind(enum.IntEnum):
    """What a record is: numbers that never change their meaning. 7, 10 and 11 are of kinds of memoire's extensions."""

    ABOUT = 1
    CLIENT = 2
    CACHE = 3
    EPISODE = 4
    ACCOUNTS = 5
    END = 6
    TABLE = 8
    TABLE_END = 9


class RecordBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A msgpack map of the fields that differ from their defaults; unknown ones are ignored."""

    kind: ClassVar[int]
    """A `RecordKind`; 128 to 254 are for kinds of tables from outside, each of which has its own."""
    has_payload: ClassVar[bool] = False
    is_heading: ClassVar[bool] = False
    """Whether those behind it belong to it."""

    @property
    def is_alone(self) -> bool:
        """Whether it is put back: not a heading that those behind it bring along."""
        return True

    @property
    def time(self) -> float:
        """What brings records of several files into one order."""
        return -math.inf

    def counted(self, payload_bytes: int) -> dict[str, int]:
        """What the counts of its table in a file have of it, by name."""
        return {}

    def older(self, seconds: float) -> RecordBody:
        """The same, so long after it was saved."""
        return self

    def belongs_to(self, heading: RecordBody | None) -> bytes | None:
        """What decides to which of several servers it belongs; None: to each of them."""
        return None

    def called(self, heading: RecordBody | None) -> str:
        """What a refusal calls it."""
        return f"a record of kind {getattr(self.kind, 'name', self.kind)}"


class SavedRecord(NamedTuple):
    """A record on its way back into a pool."""

    body: RecordBody
    payload: bytes
    heading: RecordBody | None
    """The newest one before it, of its file."""
    stays: bool
    """Whether clients that are known by this alone stay until they are heard of."""
    is_remade: bool
    """Whether priorities are computed again, but for those that learners reported."""
    limits: Limits


class PutBack(NamedTuple):
    """What became of a record."""

    is_new: bool
    """Whether what it holds was not here already."""
    overwritten: int = 0
    """What had to make room for it."""
    counts: dict[str, int] = {}
    """What came back by it, by the names of `RestoreCounts`."""
    client: bytes = b""
    """To which client it belongs, if to one."""


DEFAULTS: Final = Limits()
MAX_INSPECTED: Final = 65_536
"""Samples that are looked at for a histogram at most."""


class TablePool(ABC):
    """Where what a table holds is. Thread-safe; it waits, but does no I/O."""

    if TYPE_CHECKING:  # attributes of some pools, properties of others

        @property
        def parameters(self) -> Parameters:
            """Those that it follows now."""

        @property
        def byte_limit(self) -> int:
            """Bytes that it may hold."""

        @property
        def least_bytes(self) -> int:
            """Bytes that it can be limited to at least."""

    @abstractmethod
    def join(self, budget: ByteBudget, name: str) -> None:
        """Be a holder of that name from now on, which has no more than the others leave; before anything comes in."""

    @abstractmethod
    def limit(self, byte_limit: int) -> int:
        """Hold at most this many bytes from now on; returns how many caches or episodes had to go."""

    @abstractmethod
    def check_parameters(self, parameters: Parameters) -> None:
        """Raise ParameterError if something is held that was made with other values than these."""

    @abstractmethod
    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Follow new parameters; returns how many caches or episodes had to go.

        Args:
            discard_mismatched: Let go what was made with other values, and is a reason to refuse them else.

        Raises:
            ParameterError: nothing was changed.
        """

    @abstractmethod
    def heard(self, client_id: bytes) -> None:
        """A sign of life of a client, without news."""

    @abstractmethod
    def goodbye(self, client_id: bytes) -> None:
        """A client has ended."""

    @abstractmethod
    def expire(self) -> int:
        """Let silent clients and readers go now; returns how many clients left."""

    @abstractmethod
    def saw_model(self, version: int) -> None:
        """There is a model of this version, from which `Parameters.max_model_lag` counts."""

    @abstractmethod
    def entries(self) -> int:
        """Entries that can be handed out, or whose samples can come."""

    @property
    def unfinished(self) -> int:
        """What somebody has yet to answer, to draw or to commit before the table is done with it."""
        return 0

    @abstractmethod
    def stats(self) -> PoolStats:
        """A frozen picture."""

    @abstractmethod
    def distribution(self, most: int = MAX_INSPECTED) -> Distribution:
        """How what is held is spread; `most` samples of it are looked at, and nothing is changed."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state of drawing beside the held data: fields of a snapshot's `TableRecord`."""

    @abstractmethod
    def go_on_from(self, state: Any, *, is_same: bool) -> None:
        """Take up what `state` said, before anything is put back.

        Args:
            is_same: Whether this is the pool that it was, in its next life: then its generator, if `state` has one, and
                the counts of one life go on, too.
        """

    @property
    @abstractmethod
    def is_untouched(self) -> bool:
        """Whether nothing ever came in or was drawn: then it can go on as another pool that was saved."""

    @abstractmethod
    def records(self) -> Iterator[tuple[RecordBody, Any]]:
        """All that is held, one by one, for a snapshot: body and payload of each record."""

    @abstractmethod
    def put_record(self, record: SavedRecord) -> PutBack:
        """Hold again what was saved of a pool of this kind, here or elsewhere.

        Raises:
            ProtocolError, MemoireError: it cannot be, or does not fit.
            Closed: `close` was called.
        """

    @abstractmethod
    def close(self) -> None:
        """Wake everyone who waits (they raise Closed) and let everything go."""


class TakesPushes(ABC):
    """Takes in what clients push."""

    @abstractmethod
    def check(
        self, body: messages.Body, payload: Any, *, limits: Limits = DEFAULTS, checksum: int | None = None
    ) -> Any:
        """What was pushed, completely checked, ready for `add`; its `samples` says how many.

        Args:
            body: The message, of the type that is stored here.
            checksum: The header's, where `messages.parse` was told not to compare it.

        Raises:
            ProtocolError: and nothing else, whatever the bytes.
        """

    @abstractmethod
    def add(self, client_id: bytes, sequence: int, held: Any) -> int:
        """Hold what `check` returned; returns how much had to make room. Raises ProtocolError."""


class HasRoom:
    """Has room for a number of entries."""

    if TYPE_CHECKING:

        @property
        def capacity(self) -> int:
            """That number; 0: only bytes limit them."""


class HearsSums(ABC):
    """Hears of what its clients hold themselves, and says how much they are to bring."""

    @abstractmethod
    def sums(self, client_id: bytes, sequence: int, total_weight: float, positives: int, minimum: float) -> bool:
        """A client's newest sums; returns whether they were newer than those known."""

    @abstractmethod
    def room(self, client_id: bytes, stock_bytes: int) -> int | None:
        """Samples that a client is to bring now; None where nothing holds it back.

        Args:
            stock_bytes: That it may hold undrawn while learners draw.
        """


class BelongsToRun(ABC):
    """Holds what was made in a run."""

    @abstractmethod
    def clear(self) -> int:
        """Let everything go that is held; clients, readers and those who wait stay. Returns how much went."""


class DrawsAtRandom(ABC):
    """Draws by a generator of its own."""

    @abstractmethod
    def reseed(self, seed: int) -> None:
        """Draw as a pool that was made with this seed; before the first draw."""


class DrawsBatches(ABC):
    """Hands samples out, here and to readers, who may draw from several pools."""

    WANTED: ClassVar = "for a batch; here use {instead}"

    @abstractmethod
    def get(
        self,
        samples: int,
        *,
        timeout: float | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> PooledBatch:
        """Draw a batch, all of it or nothing; its ids are [B] of dtype `batch.ID`. Raises as `Pool.get`."""

    @abstractmethod
    def reserve(
        self, reader: bytes, samples: int, elsewhere: int = 0, part: tuple[int, int] = (0, 1), wanted: int | None = None
    ) -> NDArray[np.void]:
        """What a reader may draw: rows [C] of `rows.CLIENT_SUMS`, one for each client."""

    @abstractmethod
    def draw_counts(
        self,
        reader: bytes,
        counts: NDArray[np.void],
        *,
        now: float = 0.0,
        compression: str = "none",
        page: Page | None = None,
    ) -> Payload | None:
        """The payload of a DRAWN message, for rows [C] of `rows.CLIENT_COUNTS`; None where nothing was there.
        Raises ProtocolError, and takes nothing, where the page of the reply has no room.
        """


class DrawsEpisodes(ABC):
    """Hands whole episodes out."""

    WANTED: ClassVar = "where whole ones are to be drawn"

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
        """Draw whole episodes, or groups of them: see `EpisodePool`. `update` gets ids and errors of N entries, [N]."""


class TakesPriorities(ABC):
    """Learners set priorities of entries here."""

    if TYPE_CHECKING:

        @property
        def owner(self) -> bytes:
            """The id under which ids name its entries."""

    @abstractmethod
    def apply(self, owner: bytes, numbers: NDArray[np.int64], td_errors: NDArray[np.float32]) -> tuple[int, int] | None:
        """Set priorities of entries by a learner's TD errors, both [N]: (applied, stale); None where `owner` is not
        this pool's.
        """


Release = Literal["now", "publish"]
RELEASES: Final = ("now", "publish")


@dataclass(frozen=True, slots=True)
class TakeRequest:
    """What a learner asks for.

    Args:
        steps: Entries, at least 1.
        exact: Split the last fragment, if it has more entries than are missing; else it is taken whole.
        min_clients: Clients of which entries have to be held.
        release: When the room of what is taken is given back.

    Raises:
        ParameterError: one of them is out of its range.
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


class HandsOutOnce(HasRoom, ABC):
    """Hands each entry out once, in order of arrival."""

    WANTED: ClassVar = "where entries are to be taken"
    on_room: Callable[[int, Changes], None]
    """Told how many entries' room is given back, with the changes to make as one with that."""

    @abstractmethod
    def held(self) -> tuple[int, int]:
        """Entries that are held, and the clients that recorded them."""

    @abstractmethod
    def take(self, wanted: TakeRequest, timeout: float = 0.0) -> Rollouts:
        """The oldest entries, all of them or none: see `RolloutPool`."""

    @abstractmethod
    def give(
        self, wanted: TakeRequest, least: int, page: Page, *, wall: float
    ) -> tuple[list[messages.FragmentRow], Payload | None]:
        """What a learner far away gets at once: rows and payload of a ROLLOUTS message."""


class HasCalls(ABC):
    """Is used by calls of its own, in the server's process and far away."""

    WANTED: ClassVar = "for calls of a table's own; here use {instead}"

    @abstractmethod
    def calls(self, transport: Transport, *args: Any, **options: Any) -> Any:
        """These calls, by this way to the servers."""


class ShowsSamples(ABC):
    """Shows copies of held samples."""

    @abstractmethod
    def peek(self, of: tuple[bytes, int] | None = None) -> PeekedSample | None:
        """A copy of a random sample, as likely as in a draw, or of the entry that owner and number name. It is not
        taken by that; None where nothing is held, or that entry is not.
        """


class HasLayout(Protocol):
    """What a file says of where entries lie: its `TableRecord`."""

    @property
    def memory(self) -> str:
        """Numbers of the memory's state, in JSON."""

    @property
    def arrays(self) -> dict[str, int]:
        """Bytes of each array of that state, in the order of the payload."""


class Heir(Protocol):
    """What was saved, on its way into a pool: each record comes where it lay."""

    memory: Memory | None
    """None: it does not fit the pool."""
    names: dict[int, tuple[bytes, int]]
    """The former name of each episode, owner and number, by the number of its first entry."""
    entries: int

    def put(self, body: RecordBody, payload: bytes) -> None:
        """Put the next record into its place. Raises what `wrong` of `KeepsLayout.heir` makes: also if it cannot be."""

    def finish(self) -> bool:
        """Let the entries be drawn; False if some are missing."""


class KeepsLayout(ABC):
    """Draws depend on where entries lie, and a snapshot can bring them back there."""

    @abstractmethod
    def saved_layout(self) -> tuple[dict[str, Any], bytes, int]:
        """Where entries lie: fields of a `TableRecord`, and its payload; and a number that is another one after any
        change of an entry.
        """

    @abstractmethod
    def heir(
        self,
        body: HasLayout,
        payload: bytes,
        parameters: Parameters,
        *,
        keeps_generator: bool,
        wrong: Callable[[str], Exception],
    ) -> Heir:
        """What is to become of this pool what was saved, with these parameters: the episodes' records make it whole."""

    @abstractmethod
    def take_over(self, memory: Memory, names: Mapping[int, tuple[bytes, int]]) -> bool:
        """Go on with what an heir has. False if something came in meanwhile: then nothing was changed."""


class SavesRows(ABC):
    """Has each change saved by the server's store before it is acknowledged."""

    @abstractmethod
    def keep_changes(self) -> None:
        """Remember from now on what is to be saved."""

    @abstractmethod
    def take_changes(self) -> list[SavedRow]:
        """All that changed since the last call."""

    @abstractmethod
    def restore(self, saved: Iterable[SavedRow]) -> str:
        """Go on from what was saved; what is missing of it, and what becomes of that, in words.

        Raises:
            msgspec.MsgspecError, ValueError: it was saved by a table with other settings.
        """
