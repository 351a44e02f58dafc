"""The types of messages: one page of numbers, which are never reused.

A type says what a node has to know of a message that it passes on: whether it has a payload, how large that may be, and
whose keys may send it. What the tail holds is said by a body (`messages.body`), which only those load who read it.

    1 to 127      of memoire
    128 to 4095   of kinds of tables that others add
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
    """Whether a message has frame 1."""

    NEVER = 0
    MAYBE = 1
    ALWAYS = 2


NEVER, MAYBE, ALWAYS = PayloadRule.NEVER, PayloadRule.MAYBE, PayloadRule.ALWAYS

LEARNERS: Final = frozenset({"learner", "server"})
READERS: Final = LEARNERS | {"reader"}
ACTORS: Final = LEARNERS | {"actor"}
USERS: Final = READERS | ACTORS
EVERYBODY: Final = USERS | {"proxy", "inference"}
"""Roles of keys that may send a type of message. What learners may, servers may, too."""

TYPES: Final[dict[int, Type]] = {}
"""By number, all that this process knows."""


@dataclass(frozen=True, slots=True, eq=False)
class Type:
    """One type of message. There is one object of each, so that `is` compares them.

    Args:
        number: In headers.
        sent_by: Roles of keys that may send it to a server, proxy or inference node; none: it is a reply or published.
        large: Whether the payload may have `message_bytes`; else `request_bytes` at most.
        kept: Newest replies to each client's requests of this type that are kept. A request that comes again is given
            its reply, and changes nothing. 0: none, since it may be granted twice.
        pushed: Whether it comes without a reply going back.

    Raises:
        ParameterError: another type has this number or name, or there is no such number.
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
                expected = f"of another number and name than the type {other.name} ({other.number})"
                raise ParameterError("Type", f"{self.name} ({self.number})", expected)
        TYPES[self.number] = self

    def __reduce__(self) -> str:
        return self.name  # a copy is the type itself


GROUP: Final = "memoire.tables"
"""Entry points of kinds of tables that installed packages add: each is a `Kind`, whose module makes its types."""
FIRST_ADDED: Final = 128
_log = logging.getLogger(__name__)


def find(number: int) -> Type | None:
    """The type of this number; None if there is none here. The first number of an added kind that is not known has the
    kinds of installed packages loaded: a proxy has no table that names them.
    """
    if number >= FIRST_ADDED and number not in TYPES:
        _load_added()
    return TYPES.get(number)


@functools.lru_cache(1)
def _load_added() -> None:
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            point.load()
        except Exception:
            _log.exception(
                "the kind of table %r of %s cannot be loaded: its messages are refused", point.name, point.value
            )


DRAWS_IN_FLIGHT: Final = 2
"""Draws that a reader may have on their way to one server: the replies to these are kept, so that a resend eats
nothing.
"""
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
DRAW: Final = Type(16, "DRAW", READERS, kept=DRAWS_IN_FLIGHT)  # batches: only as many as can be on their way
DRAWN: Final = Type(17, "DRAWN", payload=MAYBE, large=True)
CONTROL: Final = Type(18, "CONTROL", LEARNERS, kept=MAX_KEPT_REPLIES)  # one sent again must not undo a later one
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
TAKE: Final = Type(31, "TAKE", READERS, kept=1)  # one at a time: the next one says that this one's reply came
ROLLOUTS: Final = Type(32, "ROLLOUTS", payload=MAYBE, large=True)
PROMPTS: Final = Type(33, "PROMPTS", USERS)
ANSWERS: Final = Type(34, "ANSWERS", ACTORS, MAYBE)
GROUPS: Final = Type(35, "GROUPS", LEARNERS, MAYBE)
PROMPTED: Final = Type(36, "PROMPTED", payload=MAYBE, large=True)
FIND_ROWS: Final = Type(40, "FIND_ROWS", USERS, MAYBE)
CHANGE_ROWS: Final = Type(41, "CHANGE_ROWS", ACTORS, MAYBE, kept=MAX_KEPT_REPLIES)
KEYED_ROWS: Final = Type(42, "KEYED_ROWS", payload=MAYBE, large=True)
