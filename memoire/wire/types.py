"""Message types: one list of numbers, which are never reused.

A type holds the facts that a node needs to forward a message: whether the message has a payload, how large the payload
may be, and which keys may send it. A body class (`messages.body`) describes the tail; a proxy does not load it.

    1 to 127      types of memoire
    128 to 4095   types of table kinds that other packages add
"""

from __future__ import annotations

import enum
import functools
import importlib.metadata
import logging
from dataclasses import dataclass
from typing import Final

from memoire.errors import ParameterError


class PayloadRule(enum.Enum):
    """Rule for the payload of a message type: whether frame 1 is forbidden, optional or required."""

    NEVER = 0
    MAYBE = 1
    ALWAYS = 2


NEVER, MAYBE, ALWAYS = PayloadRule.NEVER, PayloadRule.MAYBE, PayloadRule.ALWAYS

LEARNERS: Final = frozenset({"learner", "server"})
READERS: Final = LEARNERS | {"reader"}
ACTORS: Final = LEARNERS | {"actor"}
USERS: Final = READERS | ACTORS
EVERYBODY: Final = USERS | {"proxy", "inference"}
"""Sets of key roles that may send a type of message. A server's key may send everything that a learner's key may."""

TYPES: Final[dict[int, Type]] = {}
"""Message types that this process knows, by number."""


@dataclass(frozen=True, slots=True, eq=False)
class Type:
    """Type of message. A process has one object for each type, so that `is` compares types.

    Args:
        number: Number of the type in headers.
        sent_by: Roles of keys that may send it to a server, proxy or inference node; empty for replies and notices.
        large: True if the payload may have `message_bytes`; False if it may have `request_bytes`.
        kept: Number of newest replies that a server keeps for each client's requests of this type. A repeated request
            gets the kept reply and changes nothing. 0: no reply is kept, since a repeated request does no harm.
        pushed: True if the receiver sends no reply.

    Raises:
        ParameterError: another type has this number or name, or the number is not in 1 to 4095.
    """

    number: int
    name: str
    sent_by: frozenset[str] = frozenset()
    payload: PayloadRule = NEVER
    large: bool = False
    kept: int = 0
    pushed: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.number <= 4095:
            raise ParameterError("number", self.number, f"1 to 4095 for the type {self.name}")
        for other in TYPES.values():
            if self.number == other.number or self.name == other.name:
                expected = f"a number and a name that differ from those of the type {other.name} ({other.number})"
                raise ParameterError("Type", f"{self.name} ({self.number})", expected)
        TYPES[self.number] = self

    def __reduce__(self) -> str:
        return self.name  # copy and pickle return the one object


GROUP: Final = "memoire.tables"
"""Entry point group of table kinds that installed packages add: each is a `Kind`, whose module creates its types."""
FIRST_ADDED: Final = 128
_log = logging.getLogger(__name__)


def find(number: int) -> Type | None:
    """Return the type with this number, or None if this process has no such type.

    The first unknown number from 128 on loads the table kinds of installed packages: a proxy has no table to name them.
    """
    if number >= FIRST_ADDED and number not in TYPES:
        _load_entry_points()
    return TYPES.get(number)


@functools.lru_cache(1)
def _load_entry_points() -> None:
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            point.load()
        except Exception:
            _log.exception(
                "cannot load the table kind %r from %s: this process refuses its messages", point.name, point.value
            )


DRAWS_IN_FLIGHT: Final = 2
"""Draws that a reader may have in flight to one server, which keeps the replies: a resend draws no new samples."""
MAX_KEPT_REPLIES: Final = 64

HELLO: Final = Type(1, "HELLO", EVERYBODY)
WELCOME: Final = Type(2, "WELCOME")
UPDATE: Final = Type(3, "UPDATE", ACTORS)
UPDATED: Final = Type(4, "UPDATED", payload=MAYBE, large=True)
CACHE: Final = Type(5, "CACHE", ACTORS, ALWAYS, large=True, pushed=True)
EPISODE: Final = Type(6, "EPISODE", ACTORS, ALWAYS, large=True, pushed=True)
FEEDBACK: Final = Type(7, "FEEDBACK", LEARNERS, ALWAYS, large=True, kept=MAX_KEPT_REPLIES)
TAKEN: Final = Type(8, "TAKEN")
NOTICE: Final = Type(9, "NOTICE", payload=MAYBE)
FETCH: Final = Type(10, "FETCH", EVERYBODY)
CHUNK: Final = Type(11, "CHUNK", payload=MAYBE)
PUBLISH: Final = Type(12, "PUBLISH", LEARNERS, MAYBE, kept=MAX_KEPT_REPLIES)
PUBLISHED: Final = Type(13, "PUBLISHED")
SUMS: Final = Type(14, "SUMS", READERS)
SUMMED: Final = Type(15, "SUMMED")
DRAW: Final = Type(16, "DRAW", READERS, kept=DRAWS_IN_FLIGHT)  # large replies: only as many as can be in flight
DRAWN: Final = Type(17, "DRAWN", payload=MAYBE, large=True)
CONTROL: Final = Type(18, "CONTROL", LEARNERS, kept=MAX_KEPT_REPLIES)  # a repeated request must not undo a later one
REFUSED: Final = Type(19, "REFUSED")
NEWS: Final = Type(20, "NEWS")
LEDGER: Final = Type(21, "LEDGER", READERS)
ACCOUNTS: Final = Type(22, "ACCOUNTS")
INHERIT: Final = Type(23, "INHERIT", LEARNERS)
TAKE_SNAPSHOT: Final = Type(24, "TAKE_SNAPSHOT", LEARNERS)
SNAPSHOT: Final = Type(25, "SNAPSHOT")
INFER: Final = Type(26, "INFER", USERS, ALWAYS)
INFERRED: Final = Type(27, "INFERRED", payload=ALWAYS)
WORK: Final = Type(28, "WORK", ACTORS)
JOB: Final = Type(29, "JOB", payload=MAYBE)
RESULT: Final = Type(30, "RESULT", ACTORS, MAYBE)
TAKE: Final = Type(31, "TAKE", READERS, kept=1)  # one at a time: the next TAKE acknowledges this reply
ROLLOUTS: Final = Type(32, "ROLLOUTS", payload=MAYBE, large=True)
PROMPTS: Final = Type(33, "PROMPTS", USERS)
ANSWERS: Final = Type(34, "ANSWERS", ACTORS, MAYBE)
GROUPS: Final = Type(35, "GROUPS", LEARNERS, MAYBE)
PROMPTED: Final = Type(36, "PROMPTED", payload=MAYBE, large=True)
FIND_ROWS: Final = Type(40, "FIND_ROWS", USERS, MAYBE)
CHANGE_ROWS: Final = Type(41, "CHANGE_ROWS", ACTORS, MAYBE, kept=MAX_KEPT_REPLIES)
KEYED_ROWS: Final = Type(42, "KEYED_ROWS", payload=MAYBE, large=True)
