"""Records of a snapshot: what a pool saves of what it holds, one by one, and takes back, here or elsewhere.

    pool.records() ──▶ (body, payload), ... ──▶ a file ──▶ SavedRecord(body, payload, heading) ──▶ pool.put_record

A kind's own records stand beside its pool; what every one of them can say is here. Bodies are msgpack.
"""

from __future__ import annotations

import enum
import math
from typing import Annotated, ClassVar, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from memoire.limits import Limits

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
